//! Several nodes are one gateway: one balance, one set of limits, one ledger.

mod catalogue;

use crate::support::fleet::Fleet;
use crate::support::{Call, Setup, script, upstream, whole_request};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_nodes_charge_one_account_in_one_ledger() {
    let fleet = Fleet::start().await;
    let only = upstream(script(r#"{"usage":{"prompt":10,"completion":5,"cached":0}}"#)).await;
    let first = fleet.node(Setup::new(&[only.address()]));
    let second = fleet.node(Setup::new(&[only.address()]));
    for node in [&first, &second, &first, &second] {
        let answer = Call::post(whole_request()).send(node.http).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    assert_eq!(1_000_000_000 - fleet.account("alpha", 4).balance_nano, 4 * 75_000);
    fleet.verify();
}
