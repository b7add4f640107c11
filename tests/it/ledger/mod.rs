//! What the fleet's ledger promises beside the port: shared by nodes, fed from two sides, and never wrong.

mod connections;
mod epochs;
mod feed;
mod forgetting;
mod leases;
mod life;
mod posting;
mod reaped;
mod reconcile;
mod schema;

use filters::ids::AccountId;
use filters::money::Amount;
use tollgate::journal::{Pool, Settled};
use tollgate::ledger::port::{Movement, What};
use tollgate::ledger::postgres::Wanted;
use tollgate::ledger::{Ledger as _, Postgres};

use super::books::settled;
use super::support::postgres::hold;

fn nano(nano: i64) -> Amount {
    Amount::from_nano(nano)
}

/// As much as there is.
const ALL: Wanted = Wanted { least: Amount::MAX, most: Amount::MAX };

/// Just so much, if half of what is free is that.
fn just(amount: i64) -> Wanted {
    Wanted { least: nano(amount), most: nano(amount) }
}

/// A new account with so much.
fn account(ledger: &mut Postgres, name: &str, amount: i64) -> AccountId {
    let account = ledger.ensure_account(name, None, 0).unwrap();
    let reference = format!("{name} in");
    let movement = Movement {
        account,
        what: What::TopUp,
        amount: nano(amount),
        reference: &reference,
        reason: "test",
        now_ms: 1,
        boot: None,
    };
    assert!(ledger.transfer(&movement).unwrap());
    account
}

/// A hold that ended; `pool`: where it was placed.
fn ended(number: u64, account: AccountId, pool: Option<Pool>, held: i64, cost: i64) -> Settled {
    Settled { provider_cost: 0, pool, ..settled(number, account, held, cost, cost) }
}

/// The first epoch of a shard, won by a boot.
fn first_epoch(ledger: &Postgres, boot: i64, shard: u16) -> Pool {
    let advanced = ledger.advance(boot, "run-1", &[(shard, 0)]).unwrap();
    assert!(advanced[0].won);
    Pool { shard, epoch: 1 }
}

/// What an account has: posted, leased.
fn balance(ledger: &mut Postgres, account: AccountId) -> (i64, i64) {
    let rows = ledger.accounts(None).unwrap();
    let row = rows.iter().find(|row| row.id == account.0).unwrap();
    (row.balance_nano, row.leased_nano)
}
