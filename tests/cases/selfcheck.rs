//! The runner's own parts, checked before they judge anybody: this binary has no test harness.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use super::case::{Case, Members};
use super::client::{Sent, path_parts, value_at};
use super::relay::{self, Effect};
use super::sse::Reader;
use super::stores::{self, Act, Change, Which};
use super::upstream::Scripted;
use super::variants::{Plan, runs};
use super::want::Want;
use super::wire::Chunks;

/// Everything; a panic says what is wrong.
pub async fn all() {
    streams_are_read_as_the_standard_says();
    chunks_are_read_over_any_cut();
    demands_judge_values();
    what_is_not_known_is_an_error();
    variants_change_one_thing();
    paths_reach_into_json();
    words_about_stores_are_understood();
    frames_are_found_over_any_cut();
    an_upstream_speaks_http2().await;
}

fn streams_are_read_as_the_standard_says() {
    let texts =
        |bytes: &[u8]| -> Vec<String> { Reader::read(bytes).into_iter().map(|event| event.data).collect() };
    assert_eq!(texts(b"data: a\n\ndata:b\r\n\r\ndata: c\r\r"), ["a", "b", "c"], "all line ends");
    assert_eq!(texts(b"data: a\ndata: b\n\n"), ["a\nb"], "lines of one event are joined");
    assert_eq!(texts(b": note\n\nid: 1\n\nevent: x\n\n"), [""; 0], "without data nothing is dispatched");
    assert_eq!(texts(b"data\n\n"), [""], "a field without a colon is empty");
    assert_eq!(texts(b"data: a\n\ndata: lost"), ["a"], "an event ends with a blank line");
    assert_eq!(texts("\u{feff}data: a\n\n".as_bytes()), ["a"], "one mark is skipped");
    let stream = "\u{feff}event: e\r\ndata: ä\r\n\r\n".as_bytes();
    for cut in 0..stream.len() {
        let mut reader = Reader::default();
        reader.feed(&stream[..cut]);
        reader.feed(&stream[cut..]);
        assert_eq!((reader.events.len(), reader.events[0].data.as_str()), (1, "ä"), "cut at {cut}");
    }
}

fn chunks_are_read_over_any_cut() {
    let coded = b"5;x=y\r\nHello\r\n0\r\nt: 1\r\n\r\nrest";
    for cut in 0..coded.len() {
        let mut chunks = Chunks::default();
        chunks.feed(&coded[..cut]);
        chunks.feed(&coded[cut..]);
        assert!(chunks.ended() && chunks.body == b"Hello" && chunks.behind() == b"rest", "cut at {cut}");
    }
    let mut broken = Chunks::default();
    broken.feed(b"zz\r\n");
    assert!(broken.broken());
}

fn demands_judge_values() {
    let good = |want: Value, seen: Value| {
        let want: Want = serde_json::from_value(want).expect("a demand");
        want.judge(&seen, 1000).is_ok()
    };
    assert!(good(json!(5), json!(5)) && !good(json!(5), json!(6)));
    assert!(good(json!([401, null]), Value::Null) && !good(json!([401, null]), json!(400)));
    assert!(good(json!({ "min": 1, "max": 5 }), json!(5)) && !good(json!({ "max": 5 }), json!(6)));
    assert!(good(json!({ "regex": "^a" }), json!("ab")) && !good(json!({ "regex": "^a" }), json!("ba")));
    assert!(good(json!({ "absent": true }), Value::Null) && !good(json!({ "absent": true }), json!("x")));
    assert!(
        good(json!({ "int_range": [1, 20] }), json!("20"))
            && !good(json!({ "int_range": [1, 20] }), json!("x"))
    );
    assert!(good(json!({ "gen": "start-3*75" }), json!(775)) && !good(json!({ "gen": "start" }), json!(775)));
    assert!(serde_json::from_value::<Want>(json!({ "about": 5 })).is_err());
}

const PLAIN: &str = r#"{"id":"X-1","area":"x","title":"t","client":{"body":{"model":"gpt-a","messages":[],"max_tokens":-1}},
    "upstreams":[{"name":"u0","script":[{"on":"request"},{"status":422,"framing":"length","body":{}}]}],"expect":{"status":422}"#;

fn what_is_not_known_is_an_error() {
    assert!(Case::parse(&format!("{PLAIN}}}")).is_ok());
    for bad in [
        PLAIN.replace("\"status\":422}", "\"state\":422}"),
        PLAIN.replace("\"on\":\"request\"", "\"on\":\"request\",\"when\":1"),
        format!("{PLAIN},\"flavour\":1"),
    ] {
        assert!(Case::parse(&format!("{bad}}}")).is_err(), "{bad}");
    }
    let line = format!(r#"{PLAIN},"variants":["moon is full"]}}"#);
    let case = Case::parse(&line).expect("a case");
    assert!(matches!(&runs(&case, &line)[1].plan, Plan::Error(why) if why.contains("moon is full")));
}

fn variants_change_one_thing() {
    let line =
        format!(r#"{PLAIN},"variants":["413","404 -> [404,502]","n:0","max_tokens:1e30 (402 or 400)"]}}"#);
    let case = Case::parse(&line).expect("a case");
    let plans: Vec<Case> = runs(&case, &line)
        .into_iter()
        .map(|run| match run.plan {
            Plan::Play(case) => Ok(*case),
            Plan::Error(why) => Err(why),
        })
        .collect::<Result<_, _>>()
        .expect("they are known");
    let status = |case: &Case, seen: u16| {
        case.expect.status.as_ref().is_some_and(|want| want.judge(&seen.into(), 0).is_ok())
    };
    let sent = |case: &Case| {
        let client = case.client.as_ref().expect("a client");
        Members::of(&Sent::of(client).expect("a request").body_text()).expect("an object").text()
    };
    assert!(status(&plans[1], 413) && plans[1].upstreams[0].script[1].status == Some(413));
    assert!(status(&plans[2], 502) && !status(&plans[2], 422));
    assert_eq!(sent(&plans[3]), r#"{"model": "gpt-a", "messages": [], "n": 0}"#);
    assert!(sent(&plans[4]).contains("1e30") && status(&plans[4], 402));
}

fn paths_reach_into_json() {
    assert_eq!(path_parts("$.messages[0].content"), ["messages", "0", "content"]);
    assert_eq!(value_at(&json!({ "a": [{ "b": 1 }] }), "a[0].b"), 1);
    assert_eq!(value_at(&json!({}), "a.b"), Value::Null);
}

fn words_about_stores_are_understood() {
    let acts = |text: &str| stores::acts_of(text).expect(text);
    let signal = |name: &str| Act::Signal(Which::Redis, name.to_owned());
    assert_eq!(acts("SIGSTOP redis; stop db"), [signal("SIGSTOP"), Act::Stop(Which::Database)]);
    assert_eq!(acts("thaw redis and start the database"), [signal("SIGCONT"), Act::Start(Which::Database)]);
    assert_eq!(acts("redis SCRIPT FLUSH"), [Act::Command(vec!["SCRIPT".to_owned(), "FLUSH".to_owned()])]);
    assert_eq!(
        acts("DEBUG SLEEP replica link, write, promote replica (lost writes)"),
        [Act::CutLink, Act::Write, Act::Promote]
    );
    assert_eq!(acts("restart redis"), [Act::Stop(Which::Redis), Act::Start(Which::Redis)]);
    let lost = Change::Fault { verb: None, nth: 1, what: Effect::LoseReply };
    let words = "redis tcp proxy drops the first reply after forwarding the command";
    assert_eq!(acts(words), [Act::Relay(Which::Redis, lost)]);
    let cut = Change::Fault { verb: Some("settle".to_owned()), nth: 2, what: Effect::CloseForReply };
    let words = "redis proxy closes the connection instead of the second reply of the settle";
    assert_eq!(acts(words), [Act::Relay(Which::Redis, cut)]);
    let late = Change::Delay(Duration::from_millis(30));
    assert_eq!(acts("db proxy delays all replies by 30 ms"), [Act::Relay(Which::Database, late)]);
    for unknown in ["redis is sad", "promote db", "redis tcp proxy sings"] {
        assert!(stores::acts_of(unknown).is_err(), "{unknown}");
    }
}

fn frames_are_found_over_any_cut() {
    let frames: [&[u8]; 5] = [
        b"*2\r\n$3\r\nGET\r\n$1\r\n\n\r\n",
        b"$-1\r\n",
        b">2\r\n+a\r\n:1\r\n",
        b"%1\r\n+k\r\n*1\r\n_\r\n",
        b"*-1\r\n",
    ];
    for frame in frames {
        for cut in 0..frame.len() {
            assert_eq!(relay::frame(&frame[..cut]), None, "{frame:?} cut at {cut}");
        }
        assert_eq!(relay::frame(&[frame, b"+more"].concat()), Some(frame.len()), "{frame:?}");
    }
}

async fn an_upstream_speaks_http2() {
    let script = r#"[{"on":"request","proto":"h2"},{"action":"h2_rst:REFUSED_STREAM"},
        {"on":"request"},{"status":200,"headers":{"content-type":"text/plain"}},{"bytes":"Hello"},{"action":"end"},
        {"on":"request"},{"action":"h2_goaway:last_stream_id=0"}]"#;
    let line = format!(
        r#"{{"id":"H","area":"x","title":"t","upstreams":[{{"name":"u0","script":{script}}}],"expect":{{}}}}"#
    );
    let case = Case::parse(&line).expect("a case");
    let upstream: Arc<Scripted> = Scripted::start(&case.upstreams[0], false).await.expect("an upstream");
    let client = r#"{"proto":"h2","path":"/v1/x","body":{"a":1}}"#;
    let sent = Sent::of(&serde_json::from_str(client).expect("a client")).expect("a request");
    let refused = sent.call(upstream.address).await;
    assert!(refused.status.is_none() && refused.error.is_some_and(|e| e.contains("refused")));
    let good = sent.call(upstream.address).await;
    assert_eq!((good.status, good.body_text().as_str(), good.complete), (Some(200), "Hello", true));
    let sent_away =
        tokio::time::timeout(Duration::from_secs(5), sent.call(upstream.address)).await.expect("an end");
    assert!(sent_away.status.is_none() && sent_away.error.is_some());
    let asked = upstream.asked();
    assert_eq!(asked.len(), 3);
    assert!(asked[0].unprocessed && !asked[1].unprocessed && asked[2].unprocessed);
    assert!(asked[1].answered && asked[1].body == br#"{"a":1}"# && asked[1].path == "/v1/x");
}
