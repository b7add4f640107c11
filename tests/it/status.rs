//! The status page: for everybody, cheap, and yellow before a caller notices.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use flate2::read::GzDecoder;
use futures::future::join_all;
use serde_json::{Value, json};
use tokio::task::block_in_place;

use crate::support::fleet::Fleet;
use crate::support::{
    Answer, Call, Caller, Gateway, Setup, postgres, redis, script, upstream, whole_request,
};

/// How long anything may take before a test gives up on it.
const PATIENCE: Duration = Duration::from_secs(20);

fn get(path: &str) -> Call {
    Call::get(path).without("authorization").without("content-type")
}

async fn page(gateway: &Gateway, path: &str) -> Answer {
    get(path).send(gateway.http).await
}

/// The JSON, once it is as `will_do` wants it.
async fn when(gateway: &Gateway, what: &str, will_do: impl Fn(&Value) -> bool) -> Value {
    let began = Instant::now();
    loop {
        let found = page(gateway, "/status.json").await.json();
        if will_do(&found) {
            return found;
        }
        assert!(began.elapsed() < PATIENCE, "{what}: {found}\n{}", gateway.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Does a verb on the admin port.
async fn verb(gateway: &Gateway, verb: &Value) -> Answer {
    let token = std::fs::read_to_string(gateway.folder().join("data/admin.token")).unwrap();
    let call = Call::post(verb.to_string()).path("/incidents");
    call.header("authorization", &format!("Bearer {token}")).send(gateway.admin).await
}

#[tokio::test]
async fn everybody_gets_the_page_and_who_has_it_gets_nothing() {
    let only = upstream(script("{}")).await;
    let gateway = Setup::new(&[only.address()]).start();
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    when(&gateway, "a model that was called is operational", |json| json["status"] == "operational").await;

    let html = page(&gateway, "/status").await;
    assert_eq!((html.status, html.header("content-type")), (200, Some("text/html; charset=utf-8")));
    assert_eq!(html.header("cache-control"), Some("public, max-age=5"));
    let policy = html.header("content-security-policy").unwrap();
    assert!(
        policy.starts_with("default-src 'none'; style-src 'sha256-") && !policy.contains("unsafe"),
        "{policy}"
    );
    assert!(html.text().contains("gpt-a") && html.text().contains("All systems operational"));
    assert!(!html.text().contains("u0"), "no provider is named");
    assert_eq!(page(&gateway, "/status?lang=fa").await.header("content-language"), Some("fa"));
    let arabic = get("/status").header("accept-language", "ar-EG, en;q=0.5").send(gateway.http).await;
    assert_eq!(arabic.header("content-language"), Some("ar"));
    let feed = page(&gateway, "/status.rss").await;
    assert!(
        feed.text().starts_with("<?xml")
            && feed.header("content-type").unwrap().starts_with("application/rss")
    );

    // The feed has no time of its own, so that nothing changes it meanwhile.
    let tag = feed.header("etag").unwrap().to_owned();
    // One connection: a body behind a 304 would be taken for the next answer.
    let mut caller = Caller::connect(gateway.http).await;
    for known in [tag.clone(), format!("W/{tag}"), format!("\"x\", {tag}"), "*".to_owned()] {
        caller.send(&get("/status.rss").header("if-none-match", &known)).await;
        let again = caller.head().await;
        assert_eq!((again.status, again.header("etag")), (304, Some(tag.as_str())), "{known}");
    }
    let other = get("/status.rss").header("if-none-match", "\"x\"").send(gateway.http).await;
    assert_eq!(other.status, 200);
    for path in ["/status", "/status.json", "/status.rss"] {
        let posted = Call::post("{}").path(path).send(gateway.http).await;
        assert_eq!((posted.status, posted.header("allow")), (405, Some("GET, HEAD")));
    }
}

#[tokio::test]
async fn a_head_tells_the_length_and_the_connection_goes_on() {
    let only = upstream(script("{}")).await;
    let gateway = Setup::new(&[only.address()]).start();
    let mut caller = Caller::connect(gateway.http).await;
    let request = b"HEAD /status.rss HTTP/1.1\r\nhost: gateway\r\n\r\n";
    caller.send_raw(request).await;
    let head = caller.head().await;
    let length: usize = head.header("content-length").unwrap().parse().unwrap();
    assert!(head.status == 200 && length > 100, "{} {length}", head.status);
    caller.send(&get("/status.rss")).await;
    let whole = caller.next_answer().await;
    assert_eq!((whole.status, whole.body.len()), (200, length), "no body came with the head");
}

#[tokio::test]
async fn it_is_yellow_before_the_first_caller_sees_an_error() {
    let (sick, well) = (upstream(script("{}")).await, upstream(script("{}")).await);
    let gateway = Setup::new(&[sick.address(), well.address()]).start();
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    when(&gateway, "all is well", |json| json["models"][0]["status"] == "operational").await;

    sick.set_script(script(r#"{"fault":{"kind":"status","code":500}}"#));
    let began = Instant::now();
    loop {
        let answer = Call::post(whole_request()).send(gateway.http).await;
        assert_eq!(answer.status, 200, "no caller notices: {}", answer.text());
        let json = page(&gateway, "/status.json").await.json();
        let model = &json["models"][0];
        if model["status"] == "degraded" {
            let regions = model["regions"].as_array().unwrap();
            let of = |name: &str| regions.iter().find(|it| it["name"] == name).unwrap()["status"].clone();
            assert!(of("r0") == "degraded" || of("r0") == "down", "{json}");
            assert_eq!(of("r1"), "operational");
            break;
        }
        assert!(began.elapsed() < PATIENCE, "{json}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let metrics = gateway.admin_page("/metrics").await.text();
    assert!(metrics.contains("tollgate_status{model=\"gpt-a\"} 1"), "{metrics}");
}

#[tokio::test]
async fn a_model_that_nobody_serves_is_down_and_an_incident_says_so() {
    let sick = upstream(script(r#"{"fault":{"kind":"status","code":500}}"#)).await;
    let gateway = Setup::new(&[sick.address()]).start();
    for _ in 0..8 {
        assert_ne!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    }
    when(&gateway, "it is down", |json| json["status"] == "down").await;
    let json = when(&gateway, "an incident is open", |json| json["incidents"][0]["id"].is_i64()).await;
    let incident = &json["incidents"][0];
    assert_eq!((&incident["automatic"], &incident["models"]), (&json!(true), &json!(["gpt-a"])));
    assert_eq!((&incident["severity"], &incident["closed_at"]), (&json!("down"), &Value::Null));
    assert!(page(&gateway, "/status").await.text().contains("Out of service"));
    gateway.wait_for_metric("tollgate_incidents_open", 1).await;
    assert!(gateway.command(&["incidents", "list"]).contains("automatic"));
}

#[tokio::test]
async fn a_person_opens_changes_and_closes_incidents_and_cannot_write_markup() {
    let only = upstream(script("{}")).await;
    let mut gateway = Setup::new(&[only.address()]).start();
    let hostile = "<script>alert(1)</script>";
    let refused = Call::post("{\"verb\":\"list\"}").path("/incidents").send(gateway.admin).await;
    assert_eq!(refused.status, 401);
    let opened = verb(
        &gateway,
        &json!({"verb": "open", "title": {"en": hostile, "fa": "کندی"}, "severity": "degraded", "models": ["gpt-a"]}),
    )
    .await;
    assert_eq!(opened.status, 200, "{}", opened.text());
    let json = when(&gateway, "the model is as the person says", |json| json["status"] == "degraded").await;
    let id = json["incidents"][0]["id"].as_i64().unwrap();
    let html = page(&gateway, "/status").await.text();
    assert!(html.contains("&lt;script&gt;alert(1)") && !html.contains("<script"), "{html}");
    assert!(page(&gateway, "/status?lang=fa").await.text().contains("کندی"));

    let id_text = id.to_string();
    gateway.command(&[
        "incidents",
        "update",
        &id_text,
        "--text",
        "We look into it",
        "--text",
        "ar=نبحث في الأمر",
    ]);
    gateway.command(&["incidents", "edit", &id_text, "--title", "Slow answers", "--severity", "partly_down"]);
    when(&gateway, "it is worse", |json| json["status"] == "partly_down").await;
    assert!(page(&gateway, "/status?lang=ar").await.text().contains("نبحث في الأمر"));
    let bad = [
        json!({"verb": "open", "title": {}, "severity": "down"}),
        json!({"verb": "open", "title": {"en": "x"}, "severity": "bad"}),
        json!({"verb": "open", "title": {"en": "\u{7}"}, "severity": "down"}),
        json!({"verb": "edit", "id": id}),
        json!({"verb": "update", "id": 99, "text": {"en": "x"}}),
    ];
    for wrong in bad {
        assert_eq!(verb(&gateway, &wrong).await.status, 422, "{wrong}");
    }
    gateway.command(&["incidents", "close", &id_text, "--text", "It is over"]);
    when(&gateway, "it is over", |json| json["status"] == "no_data").await;
    assert!(gateway.try_command(&["incidents", "close", &id_text]).is_err(), "it is closed already");
    let feed = page(&gateway, "/status.rss").await.text();
    assert_eq!(feed.matches("<item>").count(), 3, "{feed}");
    gateway.kill();
    let listed = gateway.command(&["incidents", "list", "--all", "--json"]);
    let listed: Value = serde_json::from_str(&listed).unwrap();
    assert_eq!(listed[0]["updates"].as_array().unwrap().len(), 3, "also when no gateway runs: {listed}");
}

#[tokio::test]
async fn a_reload_switches_it_off_and_on_and_shows_routes_only_where_they_are_wanted() {
    let only = upstream(script("{}")).await;
    let gateway = Setup::new(&[only.address()]).with("status: { detail: true, title: Example }").start();
    let json = when(&gateway, "routes are shown", |json| json["models"][0]["routes"].is_array()).await;
    assert_eq!(
        (&json["models"][0]["routes"][0]["name"], &json["title"]),
        (&json!("u0/up-a"), &json!("Example"))
    );
    let config = gateway.config();
    gateway.write_config(&config.replace("detail: true", "detail: false"));
    gateway.reload().await;
    assert!(!page(&gateway, "/status").await.text().contains("u0/up-a"));
    gateway.write_config(&config.replace("detail: true", "enabled: false"));
    gateway.reload().await;
    for path in ["/status", "/status.json", "/status.rss"] {
        assert_eq!(page(&gateway, path).await.status, 404, "{path}");
    }
}

/// Today's bars of the model `gpt-a` and of its regions, by name.
fn todays(json: &Value) -> Vec<(String, Value)> {
    let model = &json["models"][0];
    let today = |of: &Value| {
        let days = of["days"].as_array().unwrap();
        assert_eq!(days.len(), 90, "{of}");
        (of["name"].as_str().unwrap().to_owned(), days[89]["good"].clone())
    };
    let regions = model["regions"].as_array().unwrap().iter().map(today);
    [today(model)].into_iter().chain(regions).collect()
}

#[tokio::test]
async fn every_region_has_its_own_days() {
    let sick = r#"{"fault":{"kind":"status","code":500}}"#;
    let (first, second) = (upstream(script("{}")).await, upstream(script("{}")).await);
    let mut gateway = Setup::new(&[first.address(), second.address()]).start();
    let named = |r0: Value, r1: Value, all: Value| {
        vec![("gpt-a".to_owned(), all), ("r0".to_owned(), r0), ("r1".to_owned(), r1)]
    };
    let nothing =
        when(&gateway, "regions are known", |json| json["models"][0]["regions"][1].is_object()).await;
    assert_eq!(todays(&nothing), named(Value::Null, Value::Null, Value::Null));
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    first.set_script(script(sick));
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200, "by the other region");
    second.set_script(script(sick));
    assert_ne!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    // Days are read at the start, then twice a minute.
    gateway.signal("-TERM");
    assert!(gateway.wait().success());
    let gateway = gateway.again();
    let json = when(&gateway, "days are read", |json| !json["models"][0]["good_90d"].is_null()).await;
    let [of_model, mut r0, mut r1] =
        <[_; 3]>::try_from(todays(&json)).unwrap().map(|(_, good)| good.as_f64().unwrap());
    if r0 > r1 {
        (r0, r1) = (r1, r0);
    }
    assert_eq!((of_model, r0, r1), (0.66666, 0.5, 1.0), "the last to fail is to blame, and no other: {json}");
    for language in ["en", "ar", "fa"] {
        let html = page(&gateway, &format!("/status?lang={language}")).await.text();
        assert_eq!(html.matches("<ol class=\"days\"").count(), 3, "the model's, and one of each region");
        assert_eq!(html.matches("<h4><bdi>r").count(), 2);
    }
}

#[tokio::test]
async fn a_reader_who_takes_gzip_gets_the_same_page_with_a_tag_of_its_own() {
    let only = upstream(script("{}")).await;
    let gateway = Setup::new(&[only.address()]).start();
    // The feed has no time of its own, so that nothing changes it meanwhile.
    let plain = page(&gateway, "/status.rss").await;
    let coded = get("/status.rss").header("accept-encoding", "br, gzip").send(gateway.http).await;
    assert_eq!((coded.header("content-encoding"), plain.header("content-encoding")), (Some("gzip"), None));
    let mut text = String::new();
    std::io::Read::read_to_string(&mut GzDecoder::new(coded.body.as_slice()), &mut text).unwrap();
    assert_eq!(text, plain.text());
    assert_eq!(coded.header("vary"), Some("accept-language, accept-encoding"));
    let tag = coded.header("etag").unwrap();
    assert_ne!(Some(tag), plain.header("etag"));
    let again = get("/status.rss").header("accept-encoding", "gzip").header("if-none-match", tag);
    assert_eq!(again.begin(gateway.http).await.head().await.status, 304);
    let other = get("/status.rss").header("if-none-match", tag).send(gateway.http).await;
    assert_eq!(other.status, 200, "it has the other one");
}

/// What a flood got: whole pages and their bytes, and refusals.
#[derive(Default)]
struct Flood {
    pages: usize,
    bytes: usize,
    refused: usize,
}

/// Asks for the page so often on one connection, all at once.
async fn flood(from: Ipv4Addr, gateway: &Gateway, times: usize) -> Flood {
    let mut caller = Caller::connect_from(from, gateway.http).await;
    caller.send_raw("GET /status?lang=fa HTTP/1.1\r\nhost: gateway\r\n\r\n".repeat(times).as_bytes()).await;
    let mut flood = Flood::default();
    for _ in 0..times {
        let answer = caller.next_answer().await;
        match answer.status {
            200 => {
                assert!(answer.clean && answer.text().ends_with("</html>"), "a whole page");
                flood.pages += 1;
                flood.bytes += answer.body.len();
            }
            429 => {
                assert!(answer.header("retry-after").is_some() && answer.code() == "rate_limit_exceeded");
                flood.refused += 1;
            }
            status => panic!("{status}: {}", answer.text()),
        }
    }
    flood
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_readers_takes_nothing_from_calls_and_no_more_than_its_ration() {
    const PER_SECOND: usize = 64 << 10;
    let only = upstream(script("{}")).await;
    let gateway =
        Setup::new(&[only.address()]).balance("10").with("status: { bytes_per_second: 64KiB }").start();
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    when(&gateway, "it was called", |json| json["status"] == "operational").await;
    let tag = page(&gateway, "/status.rss").await.header("etag").unwrap().to_owned();
    let began = Instant::now();
    let one = Ipv4Addr::LOCALHOST;
    let many = (2..=40).map(|last| Ipv4Addr::new(127, 0, 0, last));
    let floods = [one; 8].into_iter().map(|from| (from, 250)).chain(many.map(|from| (from, 50)));
    let floods = join_all(floods.map(|(from, times)| flood(from, &gateway, times)));
    let calls = async {
        let mut statuses = vec![];
        for _ in 0..20 {
            statuses.push(Call::post(whole_request()).send(gateway.http).await.status);
        }
        statuses
    };
    let (floods, statuses) = tokio::join!(floods, calls);
    let took = began.elapsed();
    assert_eq!(statuses, [200; 20], "every call is answered meanwhile");
    let sum = |of: fn(&Flood) -> usize| floods.iter().map(of).sum::<usize>();
    let (pages, bytes, refused) = (sum(|it| it.pages), sum(|it| it.bytes), sum(|it| it.refused));
    assert_eq!(pages + refused, 8 * 250 + 39 * 50);
    assert!(pages >= 10 && refused > 0, "{pages} pages, {refused} refused");
    // Ten seconds of it are there at the beginning; whoever finds something left gets a whole page.
    let seconds = usize::try_from(took.as_secs()).unwrap() + 11;
    assert!(bytes <= seconds * PER_SECOND + bytes / pages, "{bytes} bytes in {took:?}");

    let known = get("/status.rss").header("if-none-match", &tag).begin(gateway.http).await.head().await;
    assert_eq!(known.status, 304, "who has it costs nothing");
    let limited = "tollgate_requests_total{status=\"429\",surface=\"status\"}";
    assert_eq!(gateway.metric(limited).await, i64::try_from(refused).unwrap());
    assert_eq!(gateway.metric("tollgate_in_flight").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_who_reads_the_page_waits_for_a_database() {
    let server = block_in_place(postgres::Server::start_durable);
    let fleet = Fleet { redis: redis::Server::start().await, database: block_in_place(|| server.database()) };
    let only = upstream(script("{}")).await;
    let gateway = fleet.node(Setup::new(&[only.address()]));
    when(&gateway, "there is a page", |json| json["models"][0]["name"] == "gpt-a").await;
    block_in_place(|| server.freeze());
    let readers = [Ipv4Addr::LOCALHOST; 4].map(|from| flood(from, &gateway, 100));
    let floods = join_all(readers).await;
    block_in_place(|| server.thaw());
    assert_eq!(floods.iter().map(|it| (it.pages, it.refused)).collect::<Vec<_>>(), [(100, 0); 4]);
}

#[tokio::test]
async fn hostile_queries_and_languages_get_a_page_that_was_there_before() {
    let only = upstream(script("{}")).await;
    let gateway = Setup::new(&[only.address()]).start();
    let mut tags = BTreeSet::new();
    for language in ["en", "ar", "fa"] {
        // The feed has no time of its own, so that nothing changes it meanwhile.
        let feed = page(&gateway, &format!("/status.rss?lang={language}")).await;
        tags.insert(feed.header("etag").unwrap().to_owned());
    }
    assert_eq!(tags.len(), 3);
    let long = "lang=zz&".repeat(4_000);
    let languages = [
        ",".repeat(30_000),
        "fa;q=0.1,".repeat(3_000),
        format!("en;q=0.{}", "9".repeat(20_000)),
        "*;q=1, zz-ZZ;q=1e308, fa;q=NaN, ar;q=-1, en;q=inf".to_owned(),
        "\u{202e}fa<script>".to_owned(),
        "fa-".repeat(10_000),
        ";;;q=;=,,;q".to_owned(),
    ];
    let queries = [
        "lang=",
        "lang=../../etc/passwd",
        "lang=%00",
        "lang=fa%0d%0aset-cookie:x=1",
        "lang=<script>",
        "&&&&=&=&lang",
        "lang[]=fa&lang=fa",
        "LANG=FA",
        &long,
        "lang=fa'%20OR%201=1--",
        "x=%ff%fe",
    ];
    let calls = queries.map(|query| get(&format!("/status.rss?{query}")));
    let accepts = languages.iter().map(|language| get("/status.rss").header("accept-language", language));
    let mut served = 0;
    for call in calls.into_iter().chain(accepts) {
        let answer = call.send(gateway.http).await;
        assert_eq!(answer.header("set-cookie"), None);
        if answer.status == 200 {
            assert!(tags.contains(answer.header("etag").unwrap()), "{:?}", answer.headers);
            assert!(["en", "ar", "fa"].contains(&answer.header("content-language").unwrap()));
            served += 1;
        } else {
            // No URI may have such characters.
            assert_eq!((answer.status, answer.code().as_str()), (400, "invalid_request"));
            assert!(!answer.text().contains("script"), "{}", answer.text());
        }
    }
    assert!(served >= 16, "{served} were served");
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
}
