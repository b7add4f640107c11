//! All money to one boot, whatever the ledger.

use filters::ids::AccountId;
use filters::money::Amount;
use tollgate::ledger::postgres::Wanted;
use tollgate::ledger::{Ledger, Postgres, Sqlite};

/// A ledger whose money all goes to one boot.
pub trait Whole: Ledger {
    /// Leases what is free of all accounts; answers what the boot has of each.
    fn lease_whole(&mut self, boot: i64) -> Vec<(AccountId, Amount)>;

    /// Leases what is free by now; answers what was added.
    fn lease_rest(&mut self, boot: i64) -> Vec<(AccountId, Amount)>;
}

impl Whole for Sqlite {
    fn lease_whole(&mut self, boot: i64) -> Vec<(AccountId, Amount)> {
        self.lease_all(boot).unwrap()
    }

    fn lease_rest(&mut self, boot: i64) -> Vec<(AccountId, Amount)> {
        self.lease_free(boot).unwrap()
    }
}

/// In a fleet money is leased by account, and all of it only where it is too small to split.
impl Whole for Postgres {
    fn lease_whole(&mut self, boot: i64) -> Vec<(AccountId, Amount)> {
        self.lease_rest(boot);
        assert_eq!(self.lease_all(boot).unwrap(), self.leases(boot).unwrap(), "nothing is leased unasked");
        self.leases(boot).unwrap()
    }

    fn lease_rest(&mut self, boot: i64) -> Vec<(AccountId, Amount)> {
        assert_eq!(self.lease_free(boot).unwrap(), [], "nothing is leased unasked");
        let all = Wanted { least: Amount::MAX, most: Amount::MAX };
        let rows = self.accounts(None).unwrap();
        let added = rows.iter().map(|row| {
            let account = AccountId(row.id);
            (account, self.lease_local(account, boot, all).unwrap().added)
        });
        added.filter(|(_, added)| added.is_positive()).collect()
    }
}
