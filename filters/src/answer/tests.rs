//! What the answers of the makers are read as, whole and cut at every byte.

use proptest::prelude::*;

use super::*;

const ROLE: &str =
    r#"data: {"model":"gpt-a","choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#;
const HELLO: &str =
    r#"data: {"model":"gpt-a","choices":[{"delta":{"content":"Hello"},"finish_reason":null}]}"#;
const STOP: &str = r#"data: {"model":"gpt-a","choices":[{"delta":{},"finish_reason":"stop"}]}"#;
const USAGE: &str =
    r#"data: {"model":"gpt-a","choices":[],"usage":{"prompt_tokens":10,"completion_tokens":5}}"#;
const DONE: &str = "data: [DONE]";
const BUSY: &str = r#"data: {"error":{"message":"upstream busy","code":429}}"#;

fn answer(stream: bool, wants_usage: bool) -> Answer {
    let shape = Shape {
        stream,
        fold: false,
        choices: 1,
        echoed_bytes: 0,
        wants_usage,
        public_model: "gpt-a".into(),
        request_id: "req-1".into(),
    };
    Answer::new(Operation::Chat, shape, Rules::default())
}

fn events(lines: &[&str]) -> String {
    lines.iter().map(|line| format!("{line}\n\n")).collect()
}

/// Plays a stream in the given pieces; what went out, and the refusal if it failed.
fn play(answer: &mut Answer, parts: &[&[u8]]) -> (Vec<u8>, Option<Refusal>, Vec<End>) {
    let (mut out, mut ends) = (vec![], vec![]);
    let kind = if answer.shape.stream { "text/event-stream" } else { "application/json" };
    let mut steps = vec![answer.head(200, Some(kind), None)];
    for part in parts {
        steps.push(answer.body(&Bytes::copy_from_slice(part)));
        if matches!(steps.last(), Some(Step::Failed(_))) {
            break;
        }
    }
    if !matches!(steps.last(), Some(Step::Failed(_))) {
        steps.push(answer.end());
    }
    let mut seen_head = false;
    for step in steps {
        match step {
            Step::Hold => {}
            Step::Forward(forward) => {
                assert_eq!(forward.commits, !seen_head, "the head goes out once, and first");
                seen_head = true;
                out.extend_from_slice(&forward.bytes);
                ends.push(forward.end);
            }
            Step::Failed(refusal) => return (out, Some(refusal), ends),
        }
    }
    (out, None, ends)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn openers_are_held_until_content_comes() {
    let mut answer = answer(true, false);
    answer.head(200, Some("text/event-stream"), None);
    assert!(matches!(answer.body(&events(&[": ping", ROLE]).into()), Step::Hold));
    let Step::Forward(forward) = answer.body(&events(&[HELLO]).into()) else { panic!("commits") };
    assert!(forward.commits);
    assert_eq!(text(&forward.bytes), events(&[ROLE, HELLO]), "comments are dropped while holding");
}

#[test]
fn an_operators_rule_reclasses_an_error_as_status_and_as_event() {
    let rule = |treat_as| Rule { status: None, body_contains: Some("upstream busy".into()), treat_as };
    let fault: Arc<[Rule]> = Arc::new([rule(classify::Class::CallerFault)]);
    let mut streamed = answer(true, false).classed_by(Arc::clone(&fault));
    let refusal = play(&mut streamed, &[events(&[BUSY]).as_bytes()]).1.expect("refused");
    assert_eq!(refusal.failure, Failure::CallerFault(429));
    let mut whole = answer(false, false).classed_by(fault);
    whole.head(503, None, None);
    whole.body(&Bytes::from_static(br#"{"error":"upstream busy"}"#));
    let Step::Failed(refusal) = whole.end() else { panic!("refused") };
    assert_eq!((refusal.failure, refusal.error.status), (Failure::CallerFault(400), 400));
}

#[test]
fn a_healthy_stream_passes_unchanged_but_for_usage_nobody_asked_for() {
    let whole = events(&[ROLE, HELLO, STOP, USAGE, DONE]);
    let (out, refusal, ends) = play(&mut answer(true, false), &[whole.as_bytes()]);
    assert_eq!((text(&out), refusal), (events(&[ROLE, HELLO, STOP, DONE]), None));
    assert_eq!(ends, [End::Settle, End::Over]);
    let mut asked = answer(true, true);
    assert_eq!(text(&play(&mut asked, &[whole.as_bytes()]).0), whole);
    let used = asked.used(99, &Ceiling::NONE);
    assert_eq!((used.usage.input, used.usage.output, used.estimated), (10, 5, false));
}

#[test]
fn an_error_before_content_fails_over_and_says_nothing() {
    for stream in [events(&[BUSY]), events(&[ROLE, BUSY]), events(&[": ping", ROLE, BUSY])] {
        let (out, refusal, _) = play(&mut answer(true, false), &[stream.as_bytes()]);
        assert!(out.is_empty());
        assert_eq!(refusal.unwrap().failure, Failure::Status(429));
    }
}

#[test]
fn a_callers_fault_as_first_event_is_not_failed_over() {
    let event = r#"data: {"error":{"message":"too long","type":"invalid_request_error","code":"context_length_exceeded"}}"#;
    let (_, refusal, _) = play(&mut answer(true, false), &[events(&[event]).as_bytes()]);
    let refusal = refusal.unwrap();
    assert_eq!(refusal.failure, Failure::CallerFault(400));
    assert_eq!(refusal.error.code, "context_length_exceeded");
}

#[test]
fn an_error_after_content_ends_the_stream_with_an_error_event() {
    let stream = events(&[HELLO, BUSY, DONE]);
    let mut answer = answer(true, false);
    let (out, refusal, _) = play(&mut answer, &[stream.as_bytes()]);
    let out = text(&out);
    assert!(refusal.is_none() && out.contains("\"error\"") && !out.contains("[DONE]"), "{out}");
    assert!(!out.contains("upstream busy"), "the upstream's words stay inside");
    assert_eq!(answer.ended(), &Ended::Broken(Failure::Status(429)));
}

#[test]
fn a_stream_without_any_end_is_a_cut_one() {
    let mut cut = answer(true, false);
    let (out, _, _) = play(&mut cut, &[events(&[ROLE, HELLO]).as_bytes()]);
    assert!(text(&out).contains("\"error\""));
    assert_eq!(cut.ended(), &Ended::Broken(Failure::Broken));
    for end in [events(&[HELLO, DONE]), events(&[HELLO, STOP])] {
        let mut whole = answer(true, false);
        let (out, _, _) = play(&mut whole, &[end.as_bytes()]);
        assert!(!text(&out).contains("\"error\""));
        assert_eq!(text(&out).matches("[DONE]").count(), 1, "the caller gets the terminal event once");
        assert_eq!(whole.ended(), &Ended::Properly);
    }
}

#[test]
fn the_rest_without_a_blank_line_is_ended_for_the_caller() {
    let stream = format!("{}{USAGE}", events(&[HELLO, STOP]));
    let mut asked = answer(true, true);
    let (out, _, _) = play(&mut asked, &[stream.as_bytes()]);
    assert_eq!(text(&out), events(&[HELLO, STOP, USAGE, DONE]));
    assert_eq!(asked.used(0, &Ceiling::NONE).usage.output, 5);
}

#[test]
fn half_an_event_is_not_forwarded() {
    let stream = format!("{}{}", events(&[HELLO]), &STOP[..30]);
    let (out, _, _) = play(&mut answer(true, false), &[stream.as_bytes()]);
    for event in text(&out).split("\n\n").filter(|e| !e.is_empty()) {
        json::check(event.trim_start_matches("data: ").as_bytes()).unwrap();
    }
    assert!(text(&out).contains("\"error\""));
}

#[test]
fn what_is_no_answer_is_refused() {
    let stream = |body: &str| play(&mut answer(true, false), &[body.as_bytes()]).1.unwrap().failure;
    assert_eq!(stream(""), Failure::NotAnAnswer(NotAnAnswer::Empty));
    assert_eq!(stream(&events(&[ROLE])), Failure::NotAnAnswer(NotAnAnswer::Empty));
    assert_eq!(stream(&events(&[DONE])), Failure::NotAnAnswer(NotAnAnswer::Empty));
    assert_eq!(stream("data: hello\n\n"), Failure::NotAnAnswer(NotAnAnswer::Unreadable));
    let whole = |body: &str| play(&mut answer(false, false), &[body.as_bytes()]).1.unwrap().failure;
    assert_eq!(whole(" "), Failure::NotAnAnswer(NotAnAnswer::Empty));
    assert_eq!(whole("<html>"), Failure::NotAnAnswer(NotAnAnswer::Unreadable));
    assert_eq!(whole(&events(&[HELLO])), Failure::NotAnAnswer(NotAnAnswer::Unreadable));
    assert_eq!(whole(r#"{"error":{"code":503}}"#), Failure::Status(503));
    for (stream, kind) in [(true, "text/html"), (true, "application/json"), (false, "text/event-stream")] {
        assert!(matches!(answer(stream, false).head(200, Some(kind), None), Step::Failed(_)), "{kind}");
    }
    assert!(matches!(answer(true, false).head(200, None, Some("br")), Step::Failed(_)));
}

#[test]
fn a_refused_attempts_body_is_kept() {
    let mut refused = answer(true, false);
    refused.head(422, Some("application/json"), None);
    refused.body(&r#"{"error":{"message":"bad","code":"c"}}"#.into());
    let Step::Failed(refusal) = refused.end() else { panic!("fails") };
    assert_eq!((refusal.failure, refusal.error.message.as_str()), (Failure::CallerFault(422), "bad"));
}

fn folding(parts: &[&str]) -> (Vec<u8>, Option<Refusal>, Answer) {
    let mut answer = answer(false, false);
    answer.shape.fold = true;
    answer.head(200, Some("text/event-stream"), None);
    let mut out = vec![];
    for step in parts
        .iter()
        .map(|part| answer.body(&Bytes::copy_from_slice(part.as_bytes())))
        .collect::<Vec<_>>()
        .into_iter()
        .chain(std::iter::once_with(|| Step::Hold))
    {
        match step {
            Step::Hold => {}
            Step::Forward(forward) => {
                assert_eq!((forward.commits, forward.end), (true, End::Over), "all at once");
                out.extend_from_slice(&forward.bytes);
            }
            Step::Failed(refusal) => return (out, Some(refusal), answer),
        }
    }
    if out.is_empty() {
        match answer.end() {
            Step::Failed(refusal) => return (out, Some(refusal), answer),
            Step::Forward(forward) => out.extend_from_slice(&forward.bytes),
            Step::Hold => {}
        }
    }
    (out, None, answer)
}

#[test]
fn a_folded_stream_goes_out_whole_at_its_end_or_not_at_all() {
    let all = events(&[ROLE, HELLO, STOP, USAGE, DONE]);
    let (head, tail) = all.split_at(all.len() / 2);
    let (out, refusal, folded) = folding(&[head, tail]);
    assert_eq!(refusal, None);
    let whole: serde_json::Value = serde_json::from_slice(&out).unwrap();
    assert_eq!(whole["object"], "chat.completion");
    assert_eq!(whole["choices"][0]["message"]["content"], "Hello");
    assert_eq!(whole["usage"]["completion_tokens"], 5, "a whole answer always has its usage");
    assert!(folded.is_committed() && *folded.ended() == Ended::Properly);
    let (out, refusal, _) = folding(&[&events(&[ROLE, HELLO, STOP])]);
    assert_eq!((out.is_empty(), refusal), (false, None), "a finish is an end");
    let (out, refusal, cut) = folding(&[&events(&[ROLE, HELLO])]);
    assert_eq!((out.len(), refusal.unwrap().failure), (0, Failure::Broken));
    assert!(cut.is_under_way() && cut.has_spoken() && !cut.is_committed());
    let (out, refusal, _) = folding(&[&events(&[ROLE, HELLO, BUSY])]);
    assert_eq!((out.len(), refusal.unwrap().failure), (0, Failure::Status(429)));
    let (out, refusal, _) = folding(&[&events(&[ROLE, DONE])]);
    assert_eq!((out.len(), refusal.unwrap().failure), (0, Failure::NotAnAnswer(NotAnAnswer::Empty)));
}

#[test]
fn an_upstream_that_answers_json_all_the_same_is_taken_as_it_is() {
    let mut plain = answer(false, false);
    plain.shape.fold = true;
    plain.head(200, Some("application/json"), None);
    plain.body(&r#"{"choices":[{"message":{"content":"Hello"},"finish_reason":"stop"}]}"#.into());
    assert!(matches!(plain.end(), Step::Forward(Forward { commits: true, end: End::Over, .. })));
}

#[test]
fn what_comes_coded_unasked_is_read_as_if_it_were_plain() {
    let coded = |text: &str| {
        let mut encoder = flate2::write::GzEncoder::new(vec![], flate2::Compression::default());
        std::io::Write::write_all(&mut encoder, text.as_bytes()).unwrap();
        Bytes::from(encoder.finish().unwrap())
    };
    let mut refused = answer(true, false);
    refused.head(400, Some("application/json"), Some("gzip"));
    refused.body(&coded(r#"{"error":{"message":"bad","code":"c"}}"#));
    let Step::Failed(refusal) = refused.end() else { panic!("fails") };
    assert_eq!(refusal.error.message, "bad");
    let mut stream = answer(true, false);
    stream.head(200, Some("text/event-stream"), Some("gzip"));
    let Step::Forward(forward) = stream.body(&coded(&events(&[HELLO]))) else { panic!("goes out") };
    assert_eq!(text(&forward.bytes), events(&[HELLO]));
    let Step::Forward(last) = stream.body(&Bytes::from_static(b"no gzip at all")) else { panic!("ends") };
    assert_eq!(last.end, End::Over, "what breaks after the commit ends with an error event");
}

#[test]
fn a_large_unfinished_first_event_commits_unless_it_speaks_of_an_error() {
    let large = format!("data: {{\"choices\":[{{\"delta\":{{\"content\":\"{}", "x".repeat(300 << 10));
    let mut fine = answer(true, false);
    fine.head(200, Some("text/event-stream"), None);
    assert!(matches!(fine.body(&large.into()), Step::Forward(Forward { commits: true, .. })));
    let bad = format!("data: {{\"error\":{{\"message\":\"{}", "x".repeat(300 << 10));
    let mut broken = answer(true, false);
    broken.head(200, Some("text/event-stream"), None);
    assert!(matches!(broken.body(&bad.into()), Step::Failed(_)));
}

#[test]
fn a_long_json_text_commits_early_and_keeps_its_last_piece_back() {
    let body = format!(
        r#"{{"id":"x","model":"up-a","choices":[{{"message":{{"content":"{}"}}}}],"usage":{{"prompt_tokens":1,"completion_tokens":2}}}}"#,
        "y".repeat(200 << 10)
    );
    let parts: Vec<&[u8]> = body.as_bytes().chunks(50_000).collect();
    let mut long = answer(false, false);
    let (out, refusal, ends) = play(&mut long, &parts);
    assert_eq!((refusal, text(&out)), (None, body.replace("up-a", "gpt-a")));
    assert!(ends.len() > 2 && long.used(0, &Ceiling::NONE).usage.output == 2);
}

#[test]
fn a_timer_after_the_commit_is_said_in_the_stream() {
    let mut idle = answer(true, false);
    idle.head(200, Some("text/event-stream"), None);
    idle.body(&events(&[HELLO]).into());
    let Step::Forward(last) = idle.fail(Failure::Timeout(Timer::Idle)) else { panic!("an event") };
    assert!(text(&last.bytes).contains("upstream_timeout") && last.end == End::Over);
    for (failure, code) in
        [(Failure::Timeout(Timer::Drain), "shutting_down"), (Failure::Ours, "internal_error")]
    {
        let mut ours = answer(true, false);
        ours.head(200, Some("text/event-stream"), None);
        ours.body(&events(&[HELLO]).into());
        let Step::Forward(last) = ours.fail(failure) else { panic!("an event") };
        assert!(text(&last.bytes).contains(code) && last.end == End::Over);
    }
    let mut before = answer(true, false);
    assert!(matches!(before.fail(Failure::Timeout(Timer::FirstByte)), Step::Failed(_)));
}

const START: &str = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"model\":\"claude-a\",\"usage\":{\"input_tokens\":20,\"cache_read_input_tokens\":1000,\"cache_creation_input_tokens\":0,\"output_tokens\":1}}}";
const BLOCK: &str = "event: content_block_start\ndata: {\"type\":\"content_block_start\",\"index\":0,\"content_block\":{\"type\":\"text\",\"text\":\"\"}}";
const PING: &str = "event: ping\ndata: {\"type\":\"ping\"}";
const WORD: &str = "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"Hello there\"}}";
const FINISH: &str = "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"},\"usage\":{\"input_tokens\":20,\"cache_read_input_tokens\":1000,\"output_tokens\":16}}";
const LAST: &str = "event: message_stop\ndata: {\"type\":\"message_stop\"}";
const FULL: &str = "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"secret words\"}}";

fn message() -> Answer {
    let shape = Shape {
        choices: 1,
        echoed_bytes: 0,
        stream: true,
        fold: false,
        wants_usage: true,
        public_model: "claude-a".into(),
        request_id: "req-1".into(),
    };
    Answer::new(Operation::Messages, shape, Rules::default())
}

#[test]
fn pings_are_dropped_while_openers_wait_and_pass_after_the_commit() {
    let stream = events(&[START, PING, BLOCK, PING, WORD, PING, FINISH, LAST]);
    let mut answer = message();
    let (out, refusal, ends) = play(&mut answer, &[stream.as_bytes()]);
    assert_eq!(text(&out), events(&[START, BLOCK, WORD, PING, FINISH, LAST]));
    assert_eq!((refusal, ends), (None, vec![End::Settle, End::Over]));
    let used = answer.used(99, &Ceiling::NONE);
    assert_eq!((used.usage.prompt(), used.usage.cache_read, used.usage.output), (1_020, 1_000, 16));
    assert!(!used.estimated);
}

#[test]
fn an_overload_before_content_fails_over_without_a_trace_of_its_openers() {
    for stream in [events(&[": warm", FULL]), events(&[START, PING, BLOCK, FULL])] {
        let (out, refusal, _) = play(&mut message(), &[stream.as_bytes()]);
        assert!(out.is_empty());
        assert_eq!(refusal.unwrap().failure, Failure::Status(529));
    }
}

#[test]
fn an_overload_after_content_ends_the_message_in_its_own_shape() {
    let mut answer = message();
    let (out, _, _) = play(&mut answer, &[events(&[START, BLOCK, WORD, FULL, LAST]).as_bytes()]);
    let out = text(&out);
    let error = out.split("event: error\ndata: ").nth(1).unwrap();
    let error: serde_json::Value = serde_json::from_str(error.trim()).unwrap();
    assert_eq!((&error["type"], &error["error"]["type"]), (&"error".into(), &"overloaded_error".into()));
    assert_eq!(error["request_id"], "req-1");
    assert!(!out.contains("message_stop") && !out.contains("secret words"), "{out}");
    assert_eq!(answer.ended(), &Ended::Broken(Failure::Status(529)));
}

#[test]
fn a_cut_message_is_charged_its_prompt_and_the_larger_of_two_outputs() {
    let mut answer = message();
    let (out, _, _) = play(&mut answer, &[events(&[START, BLOCK, WORD]).as_bytes()]);
    assert!(text(&out).contains("event: error") && !text(&out).contains("message_stop"));
    let used = answer.used(99, &Ceiling::NONE);
    assert_eq!((used.usage.input, used.usage.cache_read), (20, 1_000), "as it was reported");
    assert_eq!((used.usage.output, used.estimated), (3, true), "11 bytes are more than one token");
    assert_eq!(answer.ended(), &Ended::Broken(Failure::Broken));
}

#[test]
fn a_message_that_has_finished_needs_no_stop() {
    let mut answer = message();
    let (out, _, _) = play(&mut answer, &[events(&[START, BLOCK, WORD, FINISH]).as_bytes()]);
    assert!(!text(&out).contains("event: error"));
    assert_eq!((answer.ended(), answer.used(0, &Ceiling::NONE).usage.output), (&Ended::Properly, 16));
    assert!(!answer.awaits_usage());
}

const CREATED: &str = r#"data: {"type":"response.created","sequence_number":0,"response":{"model":"up-a","output":[],"usage":null}}"#;
const DELTA: &str =
    r#"data: {"type":"response.output_text.delta","sequence_number":4,"delta":"Hello there"}"#;
const COMPLETED: &str = r#"data: {"type":"response.completed","sequence_number":5,"response":{"model":"up-a","status":"completed","output":[{"type":"message","content":[{"type":"output_text","text":"Hello there"}]}],"usage":{"input_tokens":10,"output_tokens":5}}}"#;
const FAILED: &str = r#"data: {"type":"response.failed","sequence_number":5,"response":{"model":"up-a","status":"failed","error":{"code":"server_error","message":"secret words"}}}"#;

fn response() -> Answer {
    Answer::new(Operation::Responses, answer(true, true).shape, Rules::default())
}

fn public(lines: &[&str]) -> String {
    events(lines).replace("up-a", "gpt-a")
}

#[test]
fn a_response_is_held_until_its_first_word_and_settled_with_its_last_event() {
    let mut answer = response();
    answer.head(200, Some("text/event-stream"), None);
    assert!(matches!(answer.body(&events(&[CREATED]).into()), Step::Hold));
    let Step::Forward(first) = answer.body(&events(&[DELTA]).into()) else { panic!("commits") };
    assert_eq!((text(&first.bytes), first.end), (public(&[CREATED, DELTA]), End::Open));
    let Step::Forward(last) = answer.body(&events(&[COMPLETED, "data: [DONE]"]).into()) else {
        panic!("settles")
    };
    assert_eq!((text(&last.bytes), last.end), (public(&[COMPLETED]), End::Settle));
    assert!(matches!(answer.end(), Step::Forward(Forward { end: End::Over, .. })));
    let used = answer.used(99, &Ceiling::NONE);
    assert_eq!((used.usage.input, used.usage.output, used.estimated), (10, 5, false));
    assert_eq!(answer.ended(), &Ended::Properly);
}

#[test]
fn a_response_may_begin_by_repeating_a_long_request() {
    let instructions = "x".repeat(400 << 10);
    let repeating = |line: &str| {
        line.replace(r#""output":"#, &format!(r#""error":null,"instructions":"{instructions}","output":"#))
    };
    let shape = answer(true, true).shape;
    let mut long = Answer::new(Operation::Responses, shape, Rules::of(Operation::Responses, 401 << 10));
    let stream = events(&[&repeating(CREATED), &repeating(CREATED), DELTA, &repeating(COMPLETED)]);
    let parts: Vec<&[u8]> = stream.as_bytes().chunks(60_000).collect();
    let (out, refusal, _) = play(&mut long, &parts);
    assert_eq!((text(&out) == stream.replace("up-a", "gpt-a"), refusal), (true, None));
    assert_eq!(long.used(0, &Ceiling::NONE).usage.output, 5);
    assert!(!speaks_of_error(br#"{"error" : null,"x":"error"#), "cut before its end");
    for text in [r#"{"error":{"#, r#"{"type":"error","#, r#"{"error":null,"a":{"error":1"#] {
        assert!(speaks_of_error(text.as_bytes()), "{text}");
    }
}

#[test]
fn a_response_that_says_all_in_its_last_event_is_an_answer() {
    let (out, refusal, ends) = play(&mut response(), &[events(&[CREATED, COMPLETED]).as_bytes()]);
    assert_eq!((text(&out), refusal), (public(&[CREATED, COMPLETED]), None));
    assert_eq!(ends, [End::Settle, End::Over]);
    let mut unended = response();
    let tail = format!("{}{COMPLETED}", events(&[CREATED, DELTA]));
    let (out, _, _) = play(&mut unended, &[tail.as_bytes()]);
    assert_eq!(text(&out), public(&[CREATED, DELTA, COMPLETED]), "its blank line is added");
}

#[test]
fn a_response_that_fails_is_failed_over_before_its_first_word_and_ended_in_its_shape_after_it() {
    let (out, refusal, _) = play(&mut response(), &[events(&[CREATED, FAILED]).as_bytes()]);
    assert!(out.is_empty());
    assert_eq!(refusal.unwrap().failure, Failure::Status(500));
    for stream in [events(&[CREATED, DELTA, FAILED]), events(&[CREATED, DELTA])] {
        let mut answer = response();
        let (out, _, _) = play(&mut answer, &[stream.as_bytes()]);
        let out = text(&out);
        let error = out.split("event: error\ndata: ").nth(1).expect("an error event");
        let error: serde_json::Value = serde_json::from_str(error.trim()).unwrap();
        assert_eq!((&error["type"], &error["code"]), (&"error".into(), &"upstream_failed".into()));
        assert!(error["sequence_number"].as_u64() > Some(4) && !out.contains("secret words"), "{out}");
        let used = answer.used(7, &Ceiling::NONE);
        assert_eq!((used.usage.input, used.usage.output, used.estimated), (7, 3, true));
    }
}

#[test]
fn a_path_that_the_server_lacks_fails_over_and_a_free_answer_uses_nothing() {
    let mut lacks = response();
    lacks.head(404, Some("application/json"), None);
    lacks.body(&r#"{"detail":"Not Found"}"#.into());
    let Step::Failed(refusal) = lacks.end() else { panic!("refused") };
    assert!(refusal.failure.fails_over() && refusal.failure.is_not_served());
    let shape = Shape { stream: false, ..answer(false, true).shape };
    let mut count = Answer::new(Operation::CountTokens, shape, Rules::default());
    let (out, _, _) = play(&mut count, &[br#"{"input_tokens":2095}"#]);
    assert_eq!(text(&out), r#"{"input_tokens":2095}"#);
    assert_eq!(count.used(7, &Ceiling::NONE), Used::default());
}

/// A stream read in parts of `size` bytes gives what it gives in one.
fn is_the_same_in_parts(fresh: impl Fn() -> Answer, stream: &str, size: usize) -> Result<(), TestCaseError> {
    let (mut one, mut many) = (fresh(), fresh());
    let whole = play(&mut one, &[stream.as_bytes()]);
    let parts: Vec<&[u8]> = stream.as_bytes().chunks(size).collect();
    let split = play(&mut many, &parts);
    prop_assert_eq!(text(&split.0), text(&whole.0));
    prop_assert_eq!(split.1, whole.1);
    prop_assert_eq!(many.used(3, &Ceiling::NONE), one.used(3, &Ceiling::NONE));
    prop_assert_eq!(many.ended(), one.ended());
    Ok(())
}

proptest! {
    #[test]
    fn any_split_gives_the_same_response(
        picks in prop::collection::vec(0_usize..7, 0..10), size in 1_usize..40,
    ) {
        let all = [CREATED, DELTA, COMPLETED, FAILED, ": ping", "data: [DONE]", "data: {\"type\":\"new\"}"];
        let lines: Vec<&str> = picks.iter().map(|n| all[*n]).collect();
        is_the_same_in_parts(response, &events(&lines), size)?;
    }

    #[test]
    fn embeddings_of_any_length_lose_nothing_but_the_upstreams_name(
        numbers in 1_usize..4_000, size in 1_usize..3_000,
    ) {
        let list = vec!["-0.0123"; numbers].join(",");
        let body = format!(
            r#"{{"object":"list","data":[{{"index":0,"embedding":[{list}]}}],"model":"up-a","usage":{{"prompt_tokens":8,"total_tokens":8}}}}"#
        );
        // So small that texts of every size are among them: held, committed early, too long to be read.
        let rules = Rules { whole_bytes_max: 4 << 10, read_bytes_max: 16 << 10, ..Rules::default() };
        let shape = Shape { stream: false, ..answer(false, true).shape };
        let mut embeddings = Answer::new(Operation::Embeddings, shape, rules);
        let parts: Vec<&[u8]> = body.as_bytes().chunks(size).collect();
        let (out, refusal, _) = play(&mut embeddings, &parts);
        prop_assert_eq!((text(&out), refusal), (body.replace("up-a", "gpt-a"), None));
        let used = embeddings.used(3, &Ceiling { context: 8_191, output: 0 });
        prop_assert_eq!((used.usage.input, used.usage.output, used.estimated), (8, 0, false));
    }

    #[test]
    fn any_split_gives_the_same_answer(
        picks in prop::collection::vec(0_usize..8, 0..14), size in 1_usize..40, wants_usage: bool,
    ) {
        let all = [ROLE, HELLO, STOP, USAGE, DONE, BUSY, ": ping", "data: junk"];
        let lines: Vec<&str> = picks.iter().map(|n| all[*n]).collect();
        is_the_same_in_parts(|| answer(true, wants_usage), &events(&lines), size)?;
    }

    #[test]
    fn any_split_gives_the_same_message(
        picks in prop::collection::vec(0_usize..9, 0..14), size in 1_usize..40,
    ) {
        let all = [START, BLOCK, PING, WORD, FINISH, LAST, FULL, ": ping", "data: {\"type\":\"new\"}"];
        let lines: Vec<&str> = picks.iter().map(|n| all[*n]).collect();
        is_the_same_in_parts(message, &events(&lines), size)?;
    }

    #[test]
    fn a_whole_answer_does_not_depend_on_the_split(size in 1_usize..70_000, filler in 0_usize..150_000) {
        let body = format!(
            r#"{{"model":"up-a","choices":[{{"message":{{"content":"{}"}}}}]}}"#, "z".repeat(filler)
        );
        let (mut one, mut many) = (answer(false, false), answer(false, false));
        let parts: Vec<&[u8]> = body.as_bytes().chunks(size).collect();
        prop_assert_eq!(play(&mut many, &parts).0, play(&mut one, &[body.as_bytes()]).0);
    }
}

#[test]
fn a_stream_ends_properly_only_when_every_choice_has_finished() {
    let shape = Shape {
        stream: true,
        fold: false,
        choices: 2,
        echoed_bytes: 0,
        wants_usage: false,
        public_model: "gpt-a".into(),
        request_id: "r".into(),
    };
    let mut two = Answer::new(Operation::Chat, shape, Rules::default());
    let (out, _, _) = play(&mut two, &[events(&[HELLO, STOP]).as_bytes()]);
    assert!(text(&out).contains("\"error\""), "one of two has finished");
    let empty = STOP.replace("\"stop\"", "\"\"");
    let (out, _, _) = play(&mut answer(true, false), &[events(&[HELLO, &empty]).as_bytes()]);
    assert!(text(&out).contains("\"error\""), "an empty reason is none");
}

#[test]
fn neither_an_endless_event_nor_endless_openers_fill_the_memory() {
    let mut committed = answer(true, false);
    committed.head(200, Some("text/event-stream"), None);
    committed.body(&events(&[HELLO]).into());
    let piece = Bytes::from(vec![b'z'; 1 << 20]);
    let over =
        (0..20).any(|_| matches!(committed.body(&piece), Step::Forward(Forward { end: End::Over, .. })));
    assert!(over, "the stream is ended");
    let mut opening = answer(true, false);
    opening.head(200, Some("text/event-stream"), None);
    let roles = Bytes::from(events(&[ROLE; 100]));
    assert!((0..100).any(|_| matches!(opening.body(&roles), Step::Failed(_))), "the attempt is refused");
}

#[test]
fn a_whole_answer_too_long_to_be_read_is_charged_by_the_usage_at_its_end() {
    let filler = "y".repeat(9 << 20);
    let body = format!(
        r#"{{"model":"gpt-a","choices":[{{"message":{{"content":"{filler}"}}}}],"usage":{{"prompt_tokens":10,"completion_tokens":5}}}}"#
    );
    let parts: Vec<&[u8]> = body.as_bytes().chunks(1 << 20).collect();
    let mut long = answer(false, false);
    let (out, refusal, _) = play(&mut long, &parts);
    assert!(refusal.is_none() && out == body.as_bytes());
    let used = long.used(3, &Ceiling::NONE);
    assert_eq!((used.usage.input, used.usage.output, used.estimated), (10, 5, false));
}

#[test]
fn a_cut_whole_answer_is_counted_by_what_came_of_it() {
    let mut cut = answer(false, false);
    cut.head(200, Some("application/json"), None);
    let start = format!(r#"{{"model":"gpt-a","choices":[{{"message":{{"content":"{}"#, "y".repeat(100_000));
    cut.body(&start.into());
    cut.fail(Failure::Broken);
    assert!(cut.used(3, &Ceiling::NONE).usage.output > 20_000);
}
