//! Spans as the collector reads them, and what every message says of us.

use filters::trace::SpanId;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span, Status};
use prost::Message as _;

use super::Origin;
use super::spans::{AttemptSpan, Spans};
use crate::ops::metrics::calls::provider_name;

/// One message with these calls.
pub(super) fn request(origin: &Origin, calls: &[Spans]) -> Vec<u8> {
    let spans = calls.iter().flat_map(spans_of).collect();
    let scope_spans = vec![ScopeSpans { scope: Some(scope()), spans, ..ScopeSpans::default() }];
    let resource = Some(resource(origin));
    let resource_spans = vec![ResourceSpans { resource, scope_spans, ..ResourceSpans::default() }];
    ExportTraceServiceRequest { resource_spans }.encode_to_vec()
}

/// Who says it.
pub(super) fn resource(origin: &Origin) -> Resource {
    let Origin { instance, node } = origin;
    let attributes = vec![
        text("service.name", "tollgate"),
        text("service.version", env!("CARGO_PKG_VERSION")),
        text("service.instance.id", instance),
        text("tollgate.node", node),
    ];
    Resource { attributes, ..Resource::default() }
}

pub(super) fn scope() -> InstrumentationScope {
    let (name, version) = ("tollgate".to_owned(), env!("CARGO_PKG_VERSION").to_owned());
    InstrumentationScope { name, version, ..InstrumentationScope::default() }
}

fn spans_of(trace: &Spans) -> Vec<Span> {
    let mut spans = vec![call(trace)];
    spans.extend(trace.attempts.iter().map(|(span, it)| attempt(trace, *span, it)));
    spans
}

/// What the caller asked, from its arrival to its end.
fn call(trace: &Spans) -> Span {
    let call = &trace.call;
    let model = trace.model();
    let mut attributes = vec![
        text("gen_ai.operation.name", call.operation),
        text("gen_ai.provider.name", call.provider),
        text("gen_ai.request.model", model),
        number("http.response.status_code", u64::from(call.status)),
        text("tollgate.request_id", &call.request_id),
        text("tollgate.surface", call.surface),
        text("tollgate.kept_by", trace.kept_by),
        number("tollgate.attempts", u64::try_from(trace.attempts.len()).unwrap_or_default()),
    ];
    if call.code == "ok" {
        attributes.push(number("gen_ai.usage.input_tokens", call.input_tokens));
        attributes.push(number("gen_ai.usage.output_tokens", call.output_tokens));
    } else {
        attributes.push(text("error.type", call.code));
    }
    if let Some(first_token) = call.first_token {
        attributes.push(number(
            "tollgate.first_token_ms",
            u64::try_from(first_token.as_millis()).unwrap_or_default(),
        ));
    }
    Span {
        trace_id: bytes_of_trace(trace),
        span_id: bytes_of(trace.span),
        parent_span_id: trace.parent.map(bytes_of).unwrap_or_default(),
        name: format!("{} {model}", call.operation),
        kind: SpanKind::Server.into(),
        start_time_unix_nano: trace.ended_unix_nano.saturating_sub(nanos(trace.took)),
        end_time_unix_nano: trace.ended_unix_nano,
        attributes,
        // A caller's own fault is none of the server's.
        status: status(call.status < 500 && (call.code == "ok" || call.status >= 400), call.code),
        ..Span::default()
    }
}

/// What a provider was asked.
fn attempt(trace: &Spans, span: SpanId, attempt: &AttemptSpan) -> Span {
    let AttemptSpan { endpoint, provider, outcome, reason, began, ended } = attempt;
    let served = matches!(*outcome, "served" | "left");
    let mut attributes = vec![
        text("gen_ai.operation.name", trace.call.operation),
        text("gen_ai.provider.name", provider_name(provider.dialect)),
        text("gen_ai.request.model", trace.model()),
        text("tollgate.endpoint", endpoint),
        text("tollgate.region", &provider.region),
        text("tollgate.outcome", outcome),
    ];
    if !served {
        attributes.push(text("error.type", reason));
    }
    // All moments of a call are told from its end: one clock that may be set, read once.
    let before_end = |at: &std::time::Instant| {
        trace.ended_unix_nano.saturating_sub(nanos(trace.ended.saturating_duration_since(*at)))
    };
    Span {
        trace_id: bytes_of_trace(trace),
        span_id: bytes_of(span),
        parent_span_id: bytes_of(trace.span),
        name: format!("{} {endpoint}", trace.call.operation),
        kind: SpanKind::Client.into(),
        start_time_unix_nano: before_end(began),
        end_time_unix_nano: before_end(ended),
        attributes,
        status: status(served, reason),
        ..Span::default()
    }
}

impl Spans {
    /// The asked model's name; empty where it did not come to that.
    fn model(&self) -> &str {
        self.call.model.as_ref().map_or("", |model| model.name.as_str())
    }
}

fn bytes_of_trace(trace: &Spans) -> Vec<u8> {
    trace.trace.0.get().to_be_bytes().to_vec()
}

fn bytes_of(span: SpanId) -> Vec<u8> {
    span.0.get().to_be_bytes().to_vec()
}

fn status(is_good: bool, why: &str) -> Option<Status> {
    (!is_good).then(|| Status { message: why.to_owned(), code: StatusCode::Error.into() })
}

pub(super) fn text(key: &str, value: &str) -> KeyValue {
    attribute(key, Value::StringValue(value.to_owned()))
}

fn number(key: &str, value: u64) -> KeyValue {
    attribute(key, Value::IntValue(i64::try_from(value).unwrap_or(i64::MAX)))
}

fn attribute(key: &str, value: Value) -> KeyValue {
    let value = Some(AnyValue { value: Some(value) });
    KeyValue { key: key.to_owned(), value, ..KeyValue::default() }
}

fn nanos(span: std::time::Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}
