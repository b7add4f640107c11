//! What the free-text variants mean: each becomes a case of its own with one thing changed.
//!
//! A variant reads `CHANGE`, `CHANGE -> OUTCOME` or `CHANGE (OUTCOME)`. What is not understood is an
//! error; nothing is passed over. An object is a JSON merge patch on the case.

use std::io::Write as _;

use base64::Engine as _;
use regex::{Captures, Regex};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::case::{Absence, AtMost, Case, Client, Expect, Framing, Infra, Members, Step, Upstream};
use super::stores::{self, Needs};
use super::want::Want;

/// A case or one of its variants.
pub struct Run {
    /// Empty for the case itself.
    pub name: String,
    pub plan: Plan,
}

pub enum Plan {
    Play(Box<Case>),
    /// It is not understood.
    Error(String),
}

/// A change: what it is to look like, and what it does.
type Change = (&'static str, fn(&mut Case, &Captures<'_>) -> Result<(), String>);

/// What can be said of a change, tried from the top.
const CHANGES: &[Change] = &[
    (r"^(\d{3})$", |case, found| status(case, &found[1], false)),
    (r"^(\d{3}) (?:no body|with zero-length body)$", |case, found| status(case, &found[1], true)),
    (r"^(?:connect|connection) refused$", |case, _| absent(case, Absence::Refused)),
    (r"^TLS failure$", |case, _| absent(case, Absence::Tls)),
    (r"^DNS failure$", |case, _| absent(case, Absence::Dns)),
    (r"^(reset|close|hang)s? after request$", |case, found| script(case, "request", &[&found[1]])),
    (r"^close before the request is read$", |case, _| unread(case)),
    (r"^(?:close )?\(?FIN\)?$", |case, _| leave(case, "close")),
    (r"^(?:reset )?\(?RST\)?$", |case, _| leave(case, "reset")),
    (r"^HTTP/2 RST_STREAM (\w+)$", |case, found| leave_h2(case, &found[1])),
    (r"^(h2_\S+?) then ok$", |case, found| h2_first(case, &found[1])),
    (r"^(h2_\S+?) before head$", |case, found| h2_before(case, &found[1])),
    (r"^(h2_\S+?) after content$", |case, found| h2_after(case, &found[1])),
    (r"^(\w+) twice$", |case, found| twice(case, &found[1])),
    (r"^duplicate inside messages\[0\]$", |case, _| twice_inside(case)),
    (r"^depth (\d+) in tools\[\]\.function\.parameters$", |case, found| deep_schema(case, &found[1])),
    (r"^(two|three|\d+) (?:gateway )?(?:processes|instances)$", |case, found| instances(case, &found[1])),
    (r"^no rule$", |case, _| drop_config(case, "transient_400")),
    (r"^no (\w+) configured$", |case, found| drop_config(case, &found[1])),
    (r"^served (\w+)$", |case, found| served_tier(case, &found[1])),
    (r"^Anthropic usage\.service_tier$", |case, _| anthropic_tier(case)),
    (r"^content-length$", |case, _| framing(case, Framing::Length)),
    (r"^chunked(?:, no length)?$", |case, _| framing(case, Framing::Chunked)),
    (r"^same bytes labelled (\S+)$", |case, found| labelled(case, &found[1])),
    (r"^TE first$", |case, _| te_first(case)),
    (r"^two different Content-Length$", |case, _| two_lengths(case)),
    (r"^bad key$", |case, _| key(case, "Bearer sk-not-ours")),
    (r"^no key$", |case, _| no_key(case)),
    (r"^key in \?(\w+)= query$", |case, found| key_in_query(case, &found[1])),
    (r"^x-api-key valid \+ Bearer foreign$", |case, _| two_keys(case, "sk-foreign-000000", "sk-test-alpha")),
    (r"^alpha \+ beta$", |case, _| two_keys(case, "sk-test-alpha", "sk-test-beta")),
    (r"^dribble:(\d+)$", |case, found| dribble(case, &found[1])),
    (r"^one byte per (?:write|read)$", |case, _| dribble(case, "1")),
    (r"^(CR|LF|CRLF)(?: only| line ends?)?$", |case, found| line_ends(case, &found[1])),
    (r"^(GET|PUT|DELETE|PATCH|HEAD|OPTIONS|POST)(?: (/\S*))?$", |case, found| method(case, found)),
    (
        r"^((?:prompt|completion|total|cached|cache_\w+|input|output|reasoning|audio)(?:_input|_read)?_tokens): ?(.+)$",
        |case, found| usage_field(case, &found[1], &found[2]),
    ),
    (r"^([a-z][a-z_]*): ?(.+)$", |case, found| body_field(case, &found[1], &found[2])),
    (r"^([A-Za-z][A-Za-z0-9]*(?:-[A-Za-z0-9]+)*): (.+)$", |case, found| header(case, &found[1], &found[2])),
    (r"^((?:Bearer|Basic|Digest|Token|bearer|BEARER)\b.*)$", |case, found| authorization(case, &found[1])),
    (r"^load is rejected, old config stays$", |case, _| reload_aliases(case)),
    (r"^(.*)$", |case, found| literal(case, &found[1])),
];

/// The case itself and its variants.
pub fn runs(case: &Case, line: &str) -> Vec<Run> {
    let mut plain = case.clone();
    plain.variants = vec![];
    let base = Run { name: String::new(), plan: Plan::Play(Box::new(plain.clone())) };
    let variants = case.variants.iter().map(|variant| {
        let name = variant.as_str().map_or_else(|| variant.to_string(), str::to_owned);
        let plan = match variant {
            Value::String(text) => {
                apply(&plain, text).map_or_else(Plan::Error, |case| Plan::Play(Box::new(case)))
            }
            patch => patched(line, patch).map_or_else(Plan::Error, |case| Plan::Play(Box::new(case))),
        };
        Run { name, plan }
    });
    let runs: Vec<Run> = std::iter::once(base).chain(variants).collect();
    runs.into_iter().flat_map(|run| dialects(case, run)).collect()
}

/// Scripts that are thrown away are one of three things: scripts where there are functions, functions, and scripts
/// where there is nothing else.
fn dialects(case: &Case, run: Run) -> Vec<Run> {
    const FLUSH: &str = "SCRIPT FLUSH";
    let Plan::Play(mut plain) = run.plan else { return vec![run] };
    plain.fleet = case.fleet;
    let flushes = |infra: &Infra| infra.action.as_ref().is_some_and(|text| text.contains(FLUSH));
    if !plain.infra.iter().any(flushes) {
        return vec![Run { plan: Plan::Play(plain), ..run }];
    }
    let name = |more: &str| [run.name.as_str(), more].join(" ").trim().to_owned();
    let mut functions = plain.clone();
    for text in functions.infra.iter_mut().filter_map(|infra| infra.action.as_mut()) {
        *text = text.replace(FLUSH, "FUNCTION FLUSH");
    }
    let mut scripts = plain.clone();
    scripts.scripts = true;
    let (functions, scripts) = (Plan::Play(functions), Plan::Play(scripts));
    vec![
        Run { name: name("functions flushed"), plan: functions },
        Run { name: name("scripts only"), plan: scripts },
        Run { plan: Plan::Play(plain), ..run },
    ]
    .into_iter()
    .rev()
    .collect()
}

/// A variant that is about a store: another layout, or something else that is done to it before.
fn of_store(case: &mut Case, text: &str) -> bool {
    let layout = Infra { redis: Some(text.to_owned()), ..Infra::default() };
    let action = Infra { action: Some(text.to_owned()), ..Infra::default() };
    let with = |infra: Infra| Case { infra: vec![infra], ..case.clone() };
    if stores::mentions_store(text) && stores::acts_of(text).is_ok() {
        // It stands in for what the case did itself.
        let own = case.infra.iter_mut().find(|infra| {
            [&infra.action, &infra.proxy].into_iter().flatten().any(|text| stores::mentions_store(text))
        });
        match own {
            Some(own) => (own.action, own.proxy) = (action.action, None),
            None => case.infra.push(action),
        }
        return true;
    }
    if Needs::of(&with(layout.clone())).is_ok_and(|needs| needs.is_some()) {
        case.infra.retain(|infra| infra.redis.is_none());
        case.infra.push(layout);
        return true;
    }
    false
}

fn apply(plain: &Case, text: &str) -> Result<Case, String> {
    let mut case = plain.clone();
    let (change, outcome) = parts(text);
    let unknown = || format!("variant `{text}` is not known to the runner");
    let mut done = of_store(&mut case, change);
    for (pattern, act) in CHANGES {
        if done {
            break;
        }
        let pattern = Regex::new(pattern).map_err(|e| e.to_string())?;
        if let Some(found) = pattern.captures(change) {
            act(&mut case, &found)
                .map_err(|why| if why.is_empty() { unknown() } else { format!("{}: {why}", unknown()) })?;
            done = true;
            break;
        }
    }
    if let Some(outcome) = outcome {
        expect_outcome(&mut case, outcome).map_err(|why| format!("{}: {why}", unknown()))?;
    }
    if done { Ok(case) } else { Err(unknown()) }
}

/// A change and what is to come of it.
fn parts(text: &str) -> (&str, Option<&str>) {
    if let Some((change, outcome)) = text.split_once(" -> ") {
        return (change.trim(), Some(outcome.trim()));
    }
    let told = Regex::new(r"^(.*?) \((\d{3}(?: or \d{3})*)\)$").expect("a pattern");
    let said = Regex::new(r"^(.*?): (\d{3} (?:within|and|no)\b.*)$").expect("a pattern");
    for pattern in [told, said] {
        if let Some(found) = pattern.captures(text) {
            let group = |index: usize| found.get(index).map_or("", |part| part.as_str());
            return (group(1), Some(group(2)));
        }
    }
    // Behind a byte-order mark the outcome is often told without an arrow.
    (text.trim(), None)
}

// ---- outcomes ----

fn expect_outcome(case: &mut Case, outcome: &str) -> Result<(), String> {
    if outcome == "u1" {
        return served_by_u1(case);
    }
    if outcome == "in-band error" {
        case.expect = Expect {
            status: Some(Want::Is(200.into())),
            client_text: case.expect.client_text.clone(),
            body_contains: vec!["\"error\"".to_owned()],
            attempts: Some(Want::Is(1.into())),
            breaker: Some(Want::Is("failure".into())),
            ..Expect::default()
        };
        return Ok(());
    }
    let list = Regex::new(r"^\[([\d, ]+)\]$").expect("a pattern");
    if let Some(found) = list.captures(outcome) {
        let statuses = found[1].split(',').filter_map(|s| s.trim().parse().ok()).collect();
        expect_status(case, statuses);
        return Ok(());
    }
    for clause in outcome.split(", ").flat_map(|clause| clause.split(" and ")) {
        expect_clause(case, clause.trim())?;
    }
    Ok(())
}

fn expect_clause(case: &mut Case, clause: &str) -> Result<(), String> {
    if ["accepted", "pass", "passes", "ok"].contains(&clause) {
        expect_status(case, vec![200]);
        return Ok(());
    }
    if clause == "no 100" {
        case.expect.interim = Some(vec![]);
        return Ok(());
    }
    if let Some(attempts) = clause.strip_prefix("attempts ") {
        case.expect.attempts = Some(Want::Is(attempts.parse::<u64>().map_err(|e| e.to_string())?.into()));
        return Ok(());
    }
    if clause.strip_prefix("not ").is_some_and(|status| status.parse::<u16>().is_ok()) {
        return Ok(()); // The list of allowed ones says so already.
    }
    let within = Regex::new(r"^(\d{3}) within (\d+) ms$").expect("a pattern");
    if let Some(found) = within.captures(clause) {
        expect_status(case, vec![found[1].parse().map_err(|_| "no status")?]);
        case.expect.within_ms = Some(AtMost(Want::Within { min: None, max: found[2].parse().ok() }));
        return Ok(());
    }
    let mut statuses = vec![];
    for word in clause.split(" or ") {
        match word.parse::<u64>() {
            Ok(status @ 100..=599) => statuses.push(status),
            // More than any status: what is charged.
            Ok(nano) => {
                case.expect.charge_nano = Some(Want::Is(nano.into()));
                return Ok(());
            }
            Err(_) if word.starts_with("inflated") => statuses.push(200),
            Err(_) => return Err(format!("outcome `{clause}`")),
        }
    }
    expect_status(case, statuses);
    Ok(())
}

/// Another status. Where its class is another one, what the old one promised is forgotten.
fn expect_status(case: &mut Case, statuses: Vec<u64>) {
    let class = |want: &Option<Want>| match want {
        Some(Want::Is(status)) => status.as_u64().map(|status| status / 100),
        Some(Want::OneOf(all)) => all.first().and_then(Value::as_u64).map(|status| status / 100),
        _ => None,
    };
    let old = class(&case.expect.status);
    let new = statuses.first().map(|status| status / 100);
    if old != new || statuses.iter().any(|status| Some(status / 100) != new) {
        case.expect = Expect {
            alive_after: case.expect.alive_after,
            log_not_contains: std::mem::take(&mut case.expect.log_not_contains),
            upstream_raw_not_contains: std::mem::take(&mut case.expect.upstream_raw_not_contains),
            ..Expect::default()
        };
    }
    let mut statuses: Vec<Value> = statuses.into_iter().map(Value::from).collect();
    case.expect.status = match statuses.len() {
        1 => statuses.pop().map(Want::Is),
        _ => Some(Want::OneOf(statuses)),
    };
}

fn served_by_u1(case: &mut Case) -> Result<(), String> {
    if case.upstreams.len() < 2 {
        return Err("there is no u1".to_owned());
    }
    let expect = &mut case.expect;
    expect.attempts = Some(Want::Is(2.into()));
    (expect.breaker, expect.upstream_requests) = (None, None);
    expect.breaker_by = Some([("u0".to_owned(), Want::Is("failure".into()))].into());
    Ok(())
}

// ---- upstreams ----

fn u0(case: &mut Case) -> Result<&mut Upstream, String> {
    case.upstreams.first_mut().ok_or_else(|| "there is no upstream".to_owned())
}

fn head(case: &mut Case) -> Result<&mut Step, String> {
    let script = &mut u0(case)?.script;
    script.iter_mut().find(|step| step.status.is_some()).ok_or_else(|| "no head in the script".to_owned())
}

fn status(case: &mut Case, status: &str, empty: bool) -> Result<(), String> {
    let status: u16 = status.parse().map_err(|_| "no status")?;
    let step = head(case)?;
    let old = step.status.replace(status);
    if empty || status == 204 || status == 304 {
        let bodiless = status == 204 || status == 304;
        *step = Step {
            framing: if bodiless { None } else { Some(Framing::Length) },
            bytes: if bodiless { None } else { Some(String::new()) },
            status: step.status,
            headers: step.headers.clone(),
            delay_ms: step.delay_ms,
            ..Step::default()
        };
    }
    // What is passed on is the upstream's own status.
    if let (Some(Want::Is(want)), Some(old)) = (&case.expect.status, old)
        && want == &Value::from(old)
        && old != 200
    {
        case.expect.status = Some(Want::Is(status.into()));
    }
    Ok(())
}

fn absent(case: &mut Case, absence: Absence) -> Result<(), String> {
    u0(case)?.absence = Some(absence);
    Ok(())
}

fn step(on: Option<&str>, action: Option<&str>) -> Step {
    Step { on: on.map(str::to_owned), action: action.map(str::to_owned), ..Step::default() }
}

fn script(case: &mut Case, on: &str, actions: &[&str]) -> Result<(), String> {
    let upstream = u0(case)?;
    upstream.script = vec![step(Some(on), None)];
    upstream.script.extend(actions.iter().map(|action| step(None, Some(action))));
    Ok(())
}

/// Where an upstream closes at once behind a request, it does not even read it.
fn unread(case: &mut Case) -> Result<(), String> {
    let script = &mut u0(case)?.script;
    let closing = script.windows(2).position(|pair| {
        matches!(pair, [on, act] if on.on.is_some() && matches!(act.action.as_deref(), Some("close" | "reset")))
    });
    let at = closing.ok_or("no upstream closes behind a request")?;
    script[at].on = Some("unread".to_owned());
    Ok(())
}

fn h2_first(case: &mut Case, action: &str) -> Result<(), String> {
    let script = &mut u0(case)?.script;
    let h2 = script.iter_mut().find(|step| step.action.as_ref().is_some_and(|a| a.starts_with("h2_")));
    h2.ok_or("no HTTP/2 action to change")?.action = Some(action.to_owned());
    Ok(())
}

/// The last piece of u0's script: a good answer.
fn good_piece(case: &mut Case) -> Result<Vec<Step>, String> {
    let script = &u0(case)?.script;
    let at = script.iter().rposition(|step| step.on.is_some()).ok_or("no request in the script")?;
    let piece: Vec<Step> = script[at..].to_vec();
    if piece.iter().any(|step| step.status.is_some()) { Ok(piece) } else { Err("no good answer".to_owned()) }
}

fn h2_before(case: &mut Case, action: &str) -> Result<(), String> {
    let good = good_piece(case)?;
    script(case, "request", &[action])?;
    u0(case)?.script[0].proto = Some("h2".to_owned());
    if case.upstreams.len() < 2 {
        case.upstreams.push(Upstream { name: "u1".to_owned(), script: good, absence: None });
    }
    Ok(())
}

fn h2_after(case: &mut Case, action: &str) -> Result<(), String> {
    let mut piece = good_piece(case)?;
    let text = |step: &Step| step.bytes.as_ref().is_some_and(|bytes| bytes.contains("Hello"));
    let at = piece.iter().position(text).ok_or("no content in the script")?;
    piece.truncate(at + 1);
    piece[0].proto = Some("h2".to_owned());
    piece.push(Step { delay_ms: 100, ..step(None, Some(action)) });
    u0(case)?.script = piece;
    Ok(())
}

fn labelled(case: &mut Case, kind: &str) -> Result<(), String> {
    head(case)?.headers.set("content-type", kind);
    Ok(())
}

fn dribble(case: &mut Case, bytes: &str) -> Result<(), String> {
    let bytes = bytes.parse().map_err(|_| "no number")?;
    for step in case.upstreams.iter_mut().flat_map(|u| &mut u.script).filter(|step| step.status.is_none()) {
        step.dribble = Some(bytes);
    }
    Ok(())
}

fn line_ends(case: &mut Case, ends: &str) -> Result<(), String> {
    let end = match ends {
        "CR" => "\r",
        "LF" => "\n",
        _ => "\r\n",
    };
    for step in case.upstreams.iter_mut().flat_map(|u| &mut u.script).filter(|step| step.status.is_none()) {
        if let Some(bytes) = &step.bytes {
            step.bytes = Some(bytes.replace("\r\n", "\n").replace('\r', "\n").replace('\n', end));
        }
    }
    Ok(())
}

fn served_tier(case: &mut Case, tier: &str) -> Result<(), String> {
    let tiers = Regex::new(r#""service_tier":\s*"[^"]*""#).expect("a pattern");
    let with = format!("\"service_tier\": \"{tier}\"");
    for step in case.upstreams.iter_mut().flat_map(|u| &mut u.script) {
        if let Some(body) = &step.body {
            step.body = Some(raw(&tiers.replace_all(body.get(), with.as_str()))?);
        }
        if let Some(bytes) = &step.bytes {
            step.bytes = Some(tiers.replace_all(bytes, with.as_str()).into_owned());
        }
    }
    Ok(())
}

/// A number of the usage that an upstream reports.
fn usage_field(case: &mut Case, name: &str, value: &str) -> Result<(), String> {
    let field = Regex::new(&format!(r#""{name}":\s*[^,}}]+"#)).map_err(|e| e.to_string())?;
    let with = format!("\"{name}\": {value}");
    let mut found = false;
    for step in case.upstreams.iter_mut().flat_map(|u| &mut u.script) {
        if let Some(body) = step.body.as_ref().filter(|body| field.is_match(body.get())) {
            step.body = Some(raw(&field.replace_all(body.get(), regex::NoExpand(&with)))?);
            found = true;
        }
        if let Some(bytes) = step.bytes.as_ref().filter(|bytes| field.is_match(bytes)) {
            step.bytes = Some(field.replace_all(bytes, regex::NoExpand(&with)).into_owned());
            found = true;
        }
    }
    if found { Ok(()) } else { Err("no upstream reports it".to_owned()) }
}

/// The same on Anthropic's surface, whose usage names the tier: standard price here.
fn anthropic_tier(case: &mut Case) -> Result<(), String> {
    let client = client(case)?;
    client.path = Some("/v1/messages".to_owned());
    client.body = Some(raw(
        &json!({ "model": "claude-a", "max_tokens": 1024, "messages": [{ "role": "user", "content": "hi" }],
            "service_tier": "auto" })
        .to_string(),
    )?);
    head(case)?.body = Some(raw(
        &json!({ "id": "m1", "type": "message", "role": "assistant", "model": "up-c",
            "content": [{ "type": "text", "text": "Hello" }], "stop_reason": "end_turn", "stop_sequence": null,
            "usage": { "input_tokens": 10, "output_tokens": 5, "service_tier": "standard" } })
        .to_string(),
    )?);
    case.expect.charge_nano = Some(Want::Is((10 * 3000 + 5 * 15_000).into()));
    Ok(())
}

/// The gateway runs without the aliases first; they come by a reload, which it has to refuse.
fn reload_aliases(case: &mut Case) -> Result<(), String> {
    let aliases = case.config.remove("aliases").ok_or("there are no aliases")?;
    case.infra.push(Infra {
        at: Some("before".to_owned()),
        action: Some(format!("reload with aliases {aliases}")),
        ..Infra::default()
    });
    Ok(())
}

// ---- callers ----

fn client(case: &mut Case) -> Result<&mut Client, String> {
    case.client.as_mut().or_else(|| case.sequence.first_mut()).ok_or_else(|| "there is no client".to_owned())
}

/// FIN or RST: of the upstream that hangs up in its script, else of the caller.
fn leave(case: &mut Case, how: &str) -> Result<(), String> {
    let steps = case.upstreams.iter_mut().flat_map(|upstream| &mut upstream.script);
    let mut hanging_up: Vec<&mut Step> =
        steps.filter(|step| matches!(step.action.as_deref(), Some("close" | "reset"))).collect();
    if let Some(step) = hanging_up.pop() {
        step.action = Some(how.to_owned());
        return Ok(());
    }
    let mut actions = client(case)?.actions.iter_mut();
    actions.find(|a| a.action == "close" || a.action == "reset").ok_or("nobody hangs up")?.action =
        how.to_owned();
    Ok(())
}

fn leave_h2(case: &mut Case, code: &str) -> Result<(), String> {
    let client = client(case)?;
    client.proto = Some("h2".to_owned());
    let mut actions = client.actions.iter_mut();
    let leaving =
        actions.find(|a| a.action == "close" || a.action == "reset").ok_or("the caller does not leave")?;
    leaving.action = format!("h2_rst:{code}");
    Ok(())
}

fn framing(case: &mut Case, framing: Framing) -> Result<(), String> {
    client(case)?.framing = Some(framing);
    Ok(())
}

fn instances(case: &mut Case, count: &str) -> Result<(), String> {
    let count = match count {
        "two" => 2,
        "three" => 3,
        number => number.parse().map_err(|_| "no number")?,
    };
    client(case)?.instances = Some(count);
    Ok(())
}

fn drop_config(case: &mut Case, key: &str) -> Result<(), String> {
    case.config.remove(key).map(|_| ()).ok_or_else(|| format!("there is no config `{key}`"))
}

fn method(case: &mut Case, found: &Captures<'_>) -> Result<(), String> {
    let client = client(case)?;
    client.method = Some(found[1].to_owned());
    if let Some(path) = found.get(2) {
        client.path = Some(path.as_str().to_owned());
    }
    Ok(())
}

fn body_text(client: &Client) -> String {
    let body = client.body.as_ref().map_or("{}", |body| body.get());
    serde_json::from_str::<String>(body).unwrap_or_else(|_| body.to_owned())
}

fn members(case: &mut Case) -> Result<Members<Box<RawValue>>, String> {
    Members::of(&body_text(client(case)?)).ok_or_else(|| "the body is no object".to_owned())
}

fn set_text(case: &mut Case, text: &str) -> Result<(), String> {
    let client = client(case)?;
    (client.body_gen, client.body_b64) = (None, None);
    client.body = Some(raw(&Value::from(text).to_string())?);
    Ok(())
}

fn raw(text: &str) -> Result<Box<RawValue>, String> {
    RawValue::from_string(text.to_owned()).map_err(|e| e.to_string())
}

/// The field stands in for the odd one of the case.
fn body_field(case: &mut Case, name: &str, value: &str) -> Result<(), String> {
    let mut body = members(case)?;
    const PLAIN: [&str; 5] = ["model", "messages", "stream", "stream_options", "input"];
    if !PLAIN.contains(&name) {
        body.0.retain(|(known, _)| PLAIN.contains(&known.as_str()));
    }
    body.set(name, value).or_else(|_| body.set(name, &Value::from(value).to_string()))?;
    set_text(case, &body.text())
}

fn twice(case: &mut Case, name: &str) -> Result<(), String> {
    let (first, second) = match name {
        "stream" => ("true", "false"),
        "model" => ("\"gpt-a\"", "\"claude-a\""),
        "stream_options" => ("{\"include_usage\":true}", "{\"include_usage\":false}"),
        "messages" => (r#"[{"role":"user","content":"hi"}]"#, "[]"),
        _ => ("1", "2"),
    };
    let mut body = plain_body(case);
    body.0.retain(|(known, _)| known != name);
    for value in [first, second] {
        body.0.push((name.to_owned(), raw(value)?));
    }
    set_text(case, &body.text())
}

/// A request that nothing is wrong with.
fn plain_body(case: &Case) -> Members<Box<RawValue>> {
    let model = super::config::Model::of(case).name();
    let text =
        format!(r#"{{"model":"{model}","messages":[{{"role":"user","content":"hi"}}],"stream":true}}"#);
    Members::of(&text).unwrap_or_default()
}

fn twice_inside(case: &mut Case) -> Result<(), String> {
    let mut body = plain_body(case);
    body.set("messages", r#"[{"role":"user","content":"ho","content":"hi"}]"#)?;
    set_text(case, &body.text())
}

fn deep_schema(case: &mut Case, depth: &str) -> Result<(), String> {
    let depth: usize = depth.parse().map_err(|_| "no number")?;
    let nested = format!("{}{{}}{}", r#"{"a":"#.repeat(depth), "}".repeat(depth));
    let mut body = plain_body(case);
    body.set(
        "tools",
        &format!(r#"[{{"type":"function","function":{{"name":"f","parameters":{nested}}}}}]"#),
    )?;
    set_text(case, &body.text())
}

fn key(case: &mut Case, value: &str) -> Result<(), String> {
    client(case)?.headers.set("authorization", value);
    Ok(())
}

fn no_key(case: &mut Case) -> Result<(), String> {
    let headers = &mut client(case)?.headers;
    headers.remove("authorization");
    headers.remove("x-api-key");
    Ok(())
}

fn two_keys(case: &mut Case, bearer: &str, other: &str) -> Result<(), String> {
    let headers = &mut client(case)?.headers;
    headers.set("authorization", &format!("Bearer {bearer}"));
    headers.set("x-api-key", other);
    case.expect.upstream_raw_not_contains = vec![bearer.to_owned(), other.to_owned()];
    Ok(())
}

/// Whatever is answered, nothing of it may be logged.
fn only_secrecy(case: &mut Case, statuses: &[u64]) {
    expect_status(case, statuses.to_vec());
}

fn key_in_query(case: &mut Case, name: &str) -> Result<(), String> {
    let client = client(case)?;
    client.path = Some(format!("{}?{name}=sk-test-alpha", client.path()));
    client.headers.remove("authorization");
    only_secrecy(case, &[200, 400, 401, 404]);
    Ok(())
}

/// A header line: in raw bytes, in an upstream's head where it belongs there, else the caller's.
fn header(case: &mut Case, name: &str, value: &str) -> Result<(), String> {
    if let Some(text) = case.client.as_ref().and_then(|client| client.raw.clone()) {
        return set_raw(
            case,
            with_lines(&text, &[name, "transfer-encoding"], &[format!("{}: {value}", name.to_lowercase())])?,
        );
    }
    const ANSWERS: [&str; 6] =
        ["retry-after", "location", "set-cookie", "content-type", "content-encoding", "server"];
    let lower = name.to_lowercase();
    let answers = ANSWERS.contains(&lower.as_str())
        || lower.starts_with("x-ratelimit")
        || lower.starts_with("retry-after");
    if answers || head(case).is_ok_and(|head| head.headers.find(name).is_some()) {
        head(case)?.headers.set(name, value);
        return Ok(());
    }
    client(case)?.headers.set(&lower, &unescape(value));
    if lower == "authorization" && !case.expect.log_not_contains.is_empty() {
        only_secrecy(case, &[200, 400, 401]);
    }
    Ok(())
}

fn authorization(case: &mut Case, value: &str) -> Result<(), String> {
    let size = Regex::new(r"<(\d+) ?KiB>").expect("a pattern");
    let value = size
        .replace_all(value, |found: &Captures<'_>| "x".repeat(found[1].parse::<usize>().unwrap_or(0) << 10));
    let value = unescape(&value);
    if let Some(text) = case.client.as_ref().and_then(|client| client.raw.clone()) {
        return set_raw(case, with_lines(&text, &["authorization"], &[format!("authorization: {value}")])?);
    }
    client(case)?.headers.set("authorization", &value);
    Ok(())
}

/// `\xff` as the byte that it names.
fn unescape(text: &str) -> String {
    let bytes = Regex::new(r"\\x([0-9a-fA-F]{2})").expect("a pattern");
    let byte = |found: &Captures<'_>| {
        u8::from_str_radix(&found[1], 16).map_or(String::new(), |b| char::from(b).to_string())
    };
    bytes.replace_all(text, byte).into_owned()
}

fn set_raw(case: &mut Case, text: String) -> Result<(), String> {
    let bytes: Vec<u8> = text.chars().map(|c| u8::try_from(u32::from(c)).unwrap_or(b'?')).collect();
    client(case)?.raw_b64 = Some(base64::engine::general_purpose::STANDARD.encode(bytes));
    Ok(())
}

/// The first request of raw bytes with some header lines replaced.
fn with_lines(text: &str, drop: &[&str], add: &[String]) -> Result<String, String> {
    let (head, rest) = text.split_once("\r\n\r\n").ok_or("no head in the raw bytes")?;
    let named = |line: &str, name: &str| {
        line.split_once(':').is_some_and(|(known, _)| known.trim().eq_ignore_ascii_case(name))
    };
    let mut lines: Vec<&str> = head.split("\r\n").collect();
    let at = lines.iter().position(|line| drop.iter().any(|name| named(line, name))).unwrap_or(lines.len());
    lines.retain(|line| !drop.iter().any(|name| named(line, name)));
    for (index, line) in add.iter().enumerate() {
        lines.insert((at + index).min(lines.len()), line);
    }
    Ok(format!("{}\r\n\r\n{rest}", lines.join("\r\n")))
}

fn te_first(case: &mut Case) -> Result<(), String> {
    let text = client(case)?.raw.clone().ok_or("no raw bytes")?;
    let lines = ["transfer-encoding: chunked".to_owned(), "content-length: 6".to_owned()];
    set_raw(case, with_lines(&text, &["transfer-encoding", "content-length"], &lines)?)
}

fn two_lengths(case: &mut Case) -> Result<(), String> {
    let text = client(case)?.raw.clone().ok_or("no raw bytes")?;
    let lines = ["content-length: 6".to_owned(), "content-length: 5".to_owned()];
    set_raw(case, with_lines(&text, &["transfer-encoding", "content-length"], &lines)?)
}

/// Nothing but a text: it stands for what is odd in the case, a body or a model's name.
fn literal(case: &mut Case, text: &str) -> Result<(), String> {
    let odd_body = case.client.as_ref().is_some_and(|client| {
        client.body.as_ref().is_some_and(|body| serde_json::from_str::<String>(body.get()).is_ok())
    });
    if odd_body {
        return literal_body(case, text);
    }
    const KNOWN: [&str; 3] = ["gpt-a", "claude-a", "embed-a"];
    let mut body = members(case).map_err(|_| String::new())?;
    let model = body.0.iter().find(|(name, _)| name == "model").map(|(_, value)| value.get().to_owned());
    let model: String = model.and_then(|text| serde_json::from_str(&text).ok()).ok_or("")?;
    if KNOWN.contains(&model.as_str()) || text.contains("->") {
        return Err(String::new());
    }
    // The name may be written with escapes.
    body.set("model", &format!("\"{text}\""))?;
    set_text(case, &body.text())
}

fn literal_body(case: &mut Case, text: &str) -> Result<(), String> {
    let good = plain_body(case).text();
    let engine = base64::engine::general_purpose::STANDARD;
    let client = client(case)?;
    if text.contains("gzip") {
        let mut coder = flate2::write::GzEncoder::new(vec![], flate2::Compression::default());
        coder.write_all(good.as_bytes()).map_err(|e| e.to_string())?;
        client.body_b64 = Some(engine.encode(coder.finish().map_err(|e| e.to_string())?));
        client.headers.set("content-encoding", "gzip");
        return Ok(());
    }
    if text.ends_with("BOM") {
        client.body_b64 = Some(engine.encode(format!("\u{feff}{good}")));
        return Ok(());
    }
    let comment = Regex::new(r"^(\{.*\}|\[.*\]) \([^)]*\)$").expect("a pattern");
    let text = comment.captures(text).map_or_else(|| text.to_owned(), |found| found[1].to_owned());
    match text.as_str() {
        "(empty)" => set_text(case, ""),
        other => set_text(case, &unescape(other)),
    }
}

// ---- objects ----

fn patched(line: &str, patch: &Value) -> Result<Case, String> {
    let mut value: Value = serde_json::from_str(line).map_err(|e| e.to_string())?;
    merge(&mut value, patch);
    if let Some(members) = value.as_object_mut() {
        members.remove("variants");
    }
    Case::parse(&value.to_string())
}

/// RFC 7396.
fn merge(into: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *into = patch.clone();
        return;
    };
    if !into.is_object() {
        *into = json!({});
    }
    let Some(members) = into.as_object_mut() else { return };
    for (name, value) in patch {
        if value.is_null() {
            members.remove(name);
        } else {
            merge(members.entry(name).or_insert(Value::Null), value);
        }
    }
}
