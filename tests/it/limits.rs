//! Limits are exact, also when many ask at once, and come back.

use super::support::{Call, Gateway, Setup, script, stream_request, upstream, whole_request};
use tollgate::mock::{Mock, Script};

async fn limited(key_limits: &str, account_extra: &str) -> (Mock, Gateway) {
    let only = upstream(Script::default()).await;
    let gateway = Setup::new(&[only.address()])
        .key(&format!("limits: {{ {key_limits} }}"))
        .account(account_extra)
        .start();
    (only, gateway)
}

#[tokio::test]
async fn five_a_minute_are_five_of_twenty_at_once() {
    let (upstream, gateway) = limited("rpm: 5", "").await;
    let calls = (0..20).map(|_| Call::post(whole_request()).send(gateway.http));
    let answers = futures::future::join_all(calls).await;
    let good = answers.iter().filter(|a| a.status == 200).count();
    assert_eq!((good, upstream.requests().len()), (5, 5));
    for answer in answers.iter().filter(|a| a.status != 200) {
        assert_eq!((answer.status, answer.code().as_str()), (429, "rate_limit_exceeded"));
        let wait: u64 = answer.header("retry-after").unwrap().parse().unwrap();
        assert!((1..=61).contains(&wait), "{wait}");
    }
    assert_eq!(gateway.spent(5), 5 * 75_000);
}

#[tokio::test]
async fn headers_say_how_the_limits_stand() {
    let (_upstream, gateway) = limited("rpm: 5, tpm: 100000", "").await;
    let answer = Call::post(whole_request()).send(gateway.http).await;
    assert_eq!(answer.header("x-ratelimit-limit-requests"), Some("5"));
    assert_eq!(answer.header("x-ratelimit-remaining-requests"), Some("4"));
    assert_eq!(answer.header("x-ratelimit-limit-tokens"), Some("100000"));
    assert!(answer.header("x-ratelimit-reset-requests").unwrap().ends_with('s'));
}

#[tokio::test]
async fn reserved_tokens_are_corrected_when_a_call_ends() {
    let (_upstream, gateway) = limited("tpm: 1000", "").await;
    let request = stream_request().replace("\"stream\"", "\"max_tokens\":900,\"stream\"");
    for round in 1..=5 {
        let answer = Call::post(request.clone()).send(gateway.http).await;
        assert_eq!(answer.status, 200, "round {round}: {}", answer.text());
        gateway.wait_until_settled().await;
    }
}

#[tokio::test]
async fn slots_are_given_back_by_calls_that_end_in_any_way() {
    let only = upstream(script(r#"{"fault":{"kind":"hang_after_pieces","pieces":1}}"#)).await;
    let gateway = Setup::new(&[only.address()]).key("limits: { concurrency: 2 }").start();
    for _ in 0..3 {
        let mut callers = vec![];
        for _ in 0..2 {
            let mut caller = Call::post(stream_request()).begin(gateway.http).await;
            assert_eq!(caller.head().await.status, 200);
            callers.push(caller);
        }
        let third = Call::post(stream_request()).send(gateway.http).await;
        assert_eq!((third.status, third.header("retry-after")), (429, Some("1")));
        callers.into_iter().for_each(super::support::Caller::reset);
        gateway.wait_until_settled().await;
    }
}

#[tokio::test]
async fn an_account_and_its_models_have_limits_of_their_own() {
    let (_upstream, gateway) =
        limited("rpm: 100", "limits: { rpm: 3 }, model_limits: { gpt-a: { rpm: 2 } }").await;
    let mut statuses = vec![];
    for _ in 0..3 {
        statuses.push(Call::post(whole_request()).send(gateway.http).await.status);
    }
    assert_eq!(statuses, [200, 200, 429]);
}

#[tokio::test]
async fn a_budget_outlives_the_process() {
    // A call may cost 10,267,500 nano-dollars at most and costs 75,000.
    let (_upstream, mut gateway) = limited("budget_day: \"0.0104\"", "").await;
    let request = stream_request().replace("\"stream\"", "\"max_tokens\":1000,\"stream\"");
    assert_eq!(Call::post(request.clone()).send(gateway.http).await.status, 200);
    assert_eq!(Call::post(request.clone()).send(gateway.http).await.status, 200);
    gateway.spent(2);
    gateway = gateway.kill_and_restart();
    let refused = Call::post(request).send(gateway.http).await;
    assert_eq!(refused.status, 429, "what was spent before the restart counts: {}", refused.text());
    let wait: u64 = refused.header("retry-after").unwrap().parse().unwrap();
    assert!(wait <= 86_400, "until midnight: {wait}");
}

#[tokio::test]
async fn a_key_may_have_its_output_lowered_instead_of_being_refused() {
    let only = upstream(Script::default()).await;
    let gateway = Setup::new(&[only.address()]).key("clamp_output: true").balance("0.05").start();
    let request = stream_request().replace("\"stream\"", "\"max_tokens\":16000,\"stream\"");
    let answer = Call::post(request).send(gateway.http).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let lowered: u64 = answer.header("x-tollgate-clamped-output").unwrap().parse().unwrap();
    // Half of five cents, at 10,000 nano-dollars a token, less the prompt.
    assert!((2_400..2_500).contains(&lowered), "{lowered}");
    let body: serde_json::Value = serde_json::from_slice(&only.requests()[0].body).unwrap();
    assert_eq!(body["max_tokens"], lowered, "and the provider enforces it");
}

#[tokio::test]
async fn tokens_are_counted_where_their_bytes_do_not_fit_the_balance() {
    let words = "the quick brown fox ".repeat(400);
    let request =
        stream_request().replace("hi", &words).replace("\"stream\"", "\"max_tokens\":10,\"stream\"");
    for (tokenizer, status) in [("", 402), ("tokenizer: o200k", 200)] {
        let only = upstream(Script::default()).await;
        // 8,000 bytes would be 20 million nano-dollars, 1,600 tokens are 4.
        let gateway = Setup::new(&[only.address()]).model(tokenizer).balance("0.006").start();
        assert_eq!(Call::post(request.clone()).send(gateway.http).await.status, status, "{tokenizer}");
    }
}

#[tokio::test]
async fn leaving_early_is_forgiven_up_to_an_allowance_and_booked_as_our_cost() {
    let only = upstream(script(r#"{"fault":{"kind":"hang_before_head"}}"#)).await;
    // Our cost of a prompt of 5 tokens is 10,000 nano-dollars.
    let gateway = Setup::new(&[only.address()]).key("abandoned_max: \"0.00002\"").start();
    for left in 1..=3 {
        let caller = Call::post(stream_request()).begin(gateway.http).await;
        only.wait_for_requests(left).await;
        caller.reset();
        gateway.wait_until_settled().await;
    }
    assert_eq!(gateway.spent(3), 5 * 2_500, "two are free, the third pays for its prompt");
    assert!(gateway.ledger_is_right());
}

#[tokio::test]
async fn service_tiers_and_long_prompts_have_prices_of_their_own() {
    let priced = "price: { input: \"2.5\", output: \"10\", long_context: { above: 50, input: \"5\", output: \"20\" }, \
                  service_tiers: { priority: { input: \"4.25\", output: \"17\" } } }";
    let only = upstream(script(r#"{"usage":{"prompt":51,"completion":5,"cached":0}}"#)).await;
    let gateway = Setup::new(&[only.address()]).model(priced).start();
    Call::post(whole_request()).send(gateway.http).await;
    assert_eq!(gateway.spent(1), 51 * 5_000 + 5 * 20_000, "the whole request at the long price");
}
