//! The status page: for everybody, cheap, and yellow before a caller notices.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::{Answer, Call, Gateway, Setup, script, upstream, whole_request};

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
    let mut caller = crate::support::Caller::connect(gateway.http).await;
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
    let mut caller = crate::support::Caller::connect(gateway.http).await;
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
    assert_eq!(todays(&json), named(json!(1.0), json!(0.5), json!(0.66666)), "the last to fail is to blame");
    assert_eq!(json["models"][0]["regions"][1]["good_90d"], json!(0.5));
    for language in ["en", "ar", "fa"] {
        let html = page(&gateway, &format!("/status?lang={language}")).await.text();
        assert_eq!(html.matches("<ol class=\"days\"").count(), 3, "the model's, and one of each region");
        assert_eq!(html.matches("<h4><bdi>r").count(), 2);
    }
}
