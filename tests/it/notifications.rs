//! What happens is told: once, signed, until somebody takes it, and only by who should.

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;
use tollgate::mock::Script;

use super::support::receiver::{Post, Receiver};
use super::support::{Call, Setup, script, stream_request, upstream};

mod kept;

/// A block that has both shapes told.
fn told_to(receiver: &Receiver) -> String {
    format!(
        "notifications: {{ receivers: [ {{ url: \"http://{0}/\" }}, {{ url: \"http://{0}/slack\", shape: slack }} ] }}",
        receiver.address
    )
}

/// What Slack was told, with one of these words in it.
fn slack(posts: &[Post], part: &str) -> Vec<String> {
    let slack = posts.iter().filter(|post| post.path == "/slack" && post.status == 200);
    let texts = slack.map(|post| post.json()["text"].as_str().expect("a text").to_owned());
    texts.filter(|text| text.contains(part)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_low_balance_is_told_until_it_is_taken_and_again_when_it_is_well() {
    let (mock, receiver) = (upstream(Script::default()).await, Receiver::start().await);
    receiver.answer("/hidden-path", &[500, 0, 503]);
    let gateway = Setup::new(&[mock.address()])
        .with(&format!(
            "notifications: {{ low_balance: \"2.00\", low_balances: {{ beta: \"0\" }}, receivers: [ \
             {{ url: \"http://{0}/hidden-path\", secret: a-secret-of-ours }}, \
             {{ url: \"http://{0}/slack\", shape: slack }} ] }}",
            receiver.address
        ))
        .start();
    // Who takes nothing keeps nobody else waiting.
    let slack =
        receiver.wait_for("the other", |posts| posts.iter().find(|post| post.path == "/slack").cloned());
    assert!(
        slack.json()["text"].as_str().unwrap().contains("the balance of `alpha` is $1"),
        "{}",
        slack.body
    );
    let told = receiver.wait_for("the balance", |posts| {
        let taken = posts.iter().find(|post| post.path == "/hidden-path" && post.status == 200);
        taken.cloned()
    });
    let json = told.json();
    assert_eq!(
        (&json["kind"], &json["subject"], &json["state"]),
        (&"low_balance".into(), &"alpha".into(), &"begins".into())
    );
    let mut mac = Hmac::<Sha256>::new_from_slice(b"a-secret-of-ours").unwrap();
    mac.update(format!("{}.{}", told.headers["x-tollgate-timestamp"], told.body).as_bytes());
    let signature = format!("v1={}", data_encoding::HEXLOWER.encode(&mac.finalize().into_bytes()));
    assert_eq!(told.headers["x-tollgate-signature"], signature);
    let tries = receiver.posts().into_iter().filter(|post| post.path == "/hidden-path");
    let ids: Vec<String> = tries.map(|post| post.headers["x-tollgate-id"].clone()).collect();
    assert!(ids.len() == 4 && ids.iter().all(|id| *id == ids[0]), "the same id each time: {ids:?}");
    gateway.command(&["accounts", "top-up", "alpha", "5", "--reference", "r1"]);
    let ends = receiver.wait_for("that it is well", |posts| {
        Receiver::notifications(posts, "low_balance").into_iter().find(|told| told["state"] == "ends")
    });
    assert_eq!(ends["subject"], "alpha");
    let all = Receiver::notifications(&receiver.posts(), "low_balance");
    assert_eq!(all.len(), 2, "one account has no threshold, and each crossing is told once: {all:?}");
    assert!(!gateway.log().contains("hidden-path"), "{}", gateway.log());
    assert!(!gateway.log().contains("a-secret-of-ours"));
    gateway
        .wait_for_metric_that("tollgate_notifications_total{result=\"retried\"}", |tries| tries == 3)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_config_and_a_model_without_a_route_are_told_and_so_is_their_end() {
    let (mock, receiver) = (upstream(Script::default()).await, Receiver::start().await);
    let gateway = Setup::new(&[mock.address()])
        .with(&format!("notifications: {{ receivers: [ {{ url: \"http://{}/\" }} ] }}", receiver.address))
        .start();
    let good = gateway.config();
    let wait_for = |kind: &'static str, state: &'static str| {
        receiver.wait_for(state, |posts| {
            Receiver::notifications(posts, kind).into_iter().find(|told| told["state"] == state)
        })
    };
    gateway.write_config("nonsense: true\n");
    gateway.reload().await;
    assert_eq!(wait_for("config_refused", "begins")["scope"], "node");
    gateway.write_config(&good);
    gateway.reload().await;
    wait_for("config_refused", "ends");
    mock.set_script(script(r#"{ "fault": { "kind": "status", "code": 429, "retry_after": "2" } }"#));
    let answer = Call::post(super::support::whole_request()).send(gateway.http).await;
    assert_eq!(answer.status, 429);
    assert_eq!(wait_for("no_route", "begins")["subject"], "gpt-a");
    wait_for("no_route", "ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_cost_more_than_there_was_is_told_of_once_in_both_shapes() {
    // The provider reports 900 output tokens although 10 was the bound.
    let only = upstream(script(r#"{"usage":{"prompt":10,"completion":900,"cached":0}}"#)).await;
    let receiver = Receiver::start().await;
    let gateway = Setup::new(&[only.address()]).balance("0.0009").with(&told_to(&receiver)).start();
    let request = stream_request().replace("\"stream\"", "\"max_tokens\":10,\"stream\"");
    assert_eq!(Call::post(request.clone()).send(gateway.http).await.status, 200);
    let told = receiver.wait_for("the shortfall", |posts| Receiver::notifications(posts, "shortfall").pop());
    assert_eq!((&told["state"], &told["scope"]), (&"happens".into(), &"node".into()));
    assert_eq!(told["fields"]["nano_dollars"], (9_025_000 - 900_000).to_string());
    let line = receiver.wait_for("it, in Slack", |posts| slack(posts, "more than their holds").pop());
    assert!(line.starts_with(":warning: ") && line.contains("$0.008125"), "{line}");
    assert_eq!(Call::post(request).send(gateway.http).await.status, 402);
    // What is told later comes behind it: there is no second one on its way.
    gateway.write_config("nonsense: true\n");
    gateway.reload().await;
    receiver.wait_for("what came later", |posts| slack(posts, "is refused").pop());
    receiver.wait_for("the same", |posts| Receiver::notifications(posts, "config_refused").pop());
    let posts = receiver.posts();
    let times = (Receiver::notifications(&posts, "shortfall").len(), slack(&posts, "more than their").len());
    assert_eq!(times, (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_that_ends_in_a_few_days_is_told_of_once_and_so_is_its_renewal() {
    let (only, receiver) = (upstream(Script::default()).await, Receiver::start().await);
    let folder = tempfile::tempdir().unwrap();
    let certificate = |days: u64| {
        let mut params = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        let day = std::time::Duration::from_secs(86_400);
        params.not_after =
            (std::time::SystemTime::now() + day * u32::try_from(days).unwrap() + day / 2).into();
        let key = rcgen::KeyPair::generate().unwrap();
        (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
    };
    let write = |at: &std::path::Path, (certificate, key): (String, String)| {
        std::fs::write(at.join("key.pem"), key).unwrap();
        std::fs::write(at.join("cert.pem"), certificate).unwrap();
    };
    write(folder.path(), certificate(5));
    let https = super::support::gateway::free_address();
    let listen = format!("https: {{ address: \"{https}\", cert_file: cert.pem, key_file: key.pem }}");
    let setup = Setup::new(&[only.address()]).listen(&listen).with(&told_to(&receiver));
    let gateway = setup.start_in(folder);
    let told = receiver.wait_for("that it ends", |posts| Receiver::notifications(posts, "certificate").pop());
    assert_eq!((&told["state"], &told["scope"]), (&"begins".into(), &"node".into()));
    assert!(told["text"].as_str().unwrap().ends_with("cert.pem ends in 5 days"), "{told}");
    receiver.wait_for("it, in Slack", |posts| slack(posts, ":red_circle: the certificate").pop());
    write(gateway.folder(), certificate(90));
    receiver
        .wait_for("that it was renewed", |posts| slack(posts, ":large_green_circle: the certificate").pop());
    let states = receiver.wait_for("the same", |posts| {
        let told = Receiver::notifications(posts, "certificate");
        (told.len() > 1).then(|| told.iter().map(|told| told["state"].clone()).collect::<Vec<_>>())
    });
    assert_eq!(states, ["begins", "ends"]);
    assert_eq!(slack(&receiver.posts(), "the certificate").len(), 2);
}
