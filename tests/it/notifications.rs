//! What happens is told: once, signed, until somebody takes it, and only by who should.

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;
use tollgate::mock::Script;

use super::support::receiver::Receiver;
use super::support::{Setup, upstream};

mod kept;

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
    mock.set_script(super::support::script(
        r#"{ "fault": { "kind": "status", "code": 429, "retry_after": "2" } }"#,
    ));
    let answer = super::support::Call::post(super::support::whole_request()).send(gateway.http).await;
    assert_eq!(answer.status, 429);
    assert_eq!(wait_for("no_route", "begins")["subject"], "gpt-a");
    wait_for("no_route", "ends");
}
