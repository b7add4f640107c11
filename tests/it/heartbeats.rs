//! Periodic jobs say that they are done, whoever listens, and are missed when they are not.

use std::collections::HashMap;
use std::process::Command;

use tollgate::record::Records;

use super::support::receiver::{Post, Receiver};
use super::support::{Setup, upstream};
use tollgate::mock::Script;

/// The pings of one job, in order, without those that were not taken.
fn of(posts: &[Post], job: &str) -> Vec<&'static str> {
    let taken = posts.iter().filter(|post| post.status == 200);
    taken
        .filter_map(|post| match post.path.strip_prefix("/hidden-path/")?.strip_prefix(job)? {
            "/start" => Some("start"),
            "" => Some("done"),
            "/fail" => Some("fail"),
            _ => None,
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_job_is_told_of_in_order_whoever_answers_500_or_hangs() {
    let (mock, receiver) = (upstream(Script::default()).await, Receiver::start().await);
    // The first two pings of one job are refused, one of another hangs, and one job fails: its name is nobody's.
    receiver.answer("/sweep", &[500, 503]);
    receiver.answer("/certificates/start", &[0]);
    let nowhere = "127.0.0.1:1".parse().unwrap();
    let url = format!("http://{}/hidden-path/", receiver.address);
    let gateway = Setup::new(&[mock.address(), nowhere])
        .provider(1, "private: true")
        .with(&format!("heartbeats: {{ url: \"{url}\", ping_every: 1s }}"))
        .start();
    let yaml = gateway.config().replace("http://127.0.0.1:1/v1", "http://nobody.invalid/v1");
    gateway.write_config(&yaml);
    let jobs = ["sweep", "credentials", "dns", "checks", "config", "watch", "records_beats", "reach_out"];
    receiver.wait_for("two rounds of every job", |posts| {
        jobs.iter()
            .all(|job| of(posts, job).iter().filter(|ping| **ping != "start").count() >= 1)
            .then_some(())
    });
    receiver.wait_for("two rounds of a job that was refused first", |posts| {
        (of(posts, "sweep").len() >= 4).then_some(())
    });
    receiver.wait_for("the failure", |posts| of(posts, "dns").contains(&"fail").then_some(()));
    let posts = receiver.posts();
    for job in jobs {
        for pair in of(&posts, job).chunks(2) {
            let ended = pair.len() == 1 || pair[1] == "done" || pair[1] == "fail";
            assert!(pair[0] == "start" && ended, "{job}: {:?}", of(&posts, job));
        }
    }
    let refused = posts.iter().filter(|post| post.path.contains("/sweep") && post.status >= 500).count();
    assert_eq!(refused, 2, "they were tried again");
    let failed = posts.iter().find(|post| post.path.ends_with("/dns/fail")).unwrap();
    assert!(failed.body.contains("cannot be looked up"), "{}", failed.body);
    assert!(!gateway.log().contains("hidden-path"), "the URL is a secret: {}", gateway.log());
    // Who hangs keeps nobody else waiting, and the job itself goes on.
    gateway.wait_for_metric_that("tollgate_job_failures_total{task=\"dns\"}", |failures| failures > 0).await;
    let text = gateway.admin_page("/metrics").await.text();
    for line in [
        "tollgate_job_period_seconds{task=\"sweep\"} 0.05",
        "tollgate_job_late{task=\"certificates\"} 0",
        "tollgate_job_last_success_unix_seconds{task=\"certificates\"} ",
    ] {
        assert!(text.contains(line), "no {line} in\n{text}");
    }
    let records = Records::open_for_reading(&gateway.folder().join("data")).unwrap();
    let beats: HashMap<String, i64> =
        records.beats().unwrap().into_iter().map(|beat| (beat.job, beat.period_ms)).collect();
    assert_eq!((beats["sweep"], beats["dns"]), (50, 30_000));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_hangs_is_missed_and_its_return_is_told() {
    let (mock, receiver) = (upstream(Script::default()).await, Receiver::start().await);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("key");
    std::fs::write(&file, "a-credential").unwrap();
    let gateway = Setup::new(&[mock.address()])
        .provider(0, &format!("credential_file: {}", file.display()))
        .with("heartbeats: { late_after: 1s }")
        .with(&format!("notifications: {{ receivers: [ {{ url: \"http://{}/\" }} ] }}", receiver.address))
        .start();
    // Whoever opens this waits for somebody to write.
    let pipe = folder.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    std::fs::rename(&pipe, &file).unwrap();
    let late = receiver.wait_for("the alarm", |posts| {
        Receiver::notifications(posts, "heartbeat_late")
            .into_iter()
            .find(|told| told["subject"] == "credentials")
    });
    assert_eq!(late["state"], "begins");
    gateway.wait_for_log("`credentials`");
    gateway.wait_for_metric("tollgate_job_late{task=\"credentials\"}", 1).await;
    let writer = tokio::task::spawn_blocking(move || {
        let writer = std::fs::OpenOptions::new().write(true).open(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        std::fs::write(&file, "a-credential").unwrap();
        drop(writer);
    });
    writer.await.unwrap();
    let told = receiver.wait_for("its return", |posts| {
        let told = Receiver::notifications(posts, "heartbeat_late");
        let of: Vec<_> = told.into_iter().filter(|told| told["subject"] == "credentials").collect();
        (of.len() == 2).then_some(of)
    });
    assert_eq!(told[1]["state"], "ends");
    gateway.wait_for_metric("tollgate_job_late{task=\"credentials\"}", 0).await;
}
