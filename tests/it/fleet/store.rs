//! A node's store in this process, for tests that count.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use filters::ids::{AccountId, KeyDigest};
use filters::money::Amount;
use tokio::task::block_in_place;
use tollgate::boot::{self, Booted};
use tollgate::config::checked;
use tollgate::entropy;
use tollgate::store::{Admit, Deny, Embedded, Holds, Ticket};

use crate::support::fleet::Fleet;

/// What each call sets aside.
pub const HOLD: Amount = Amount::from_nano(1_000_000);
/// More than a config may say, for a machine that is busy with other tests.
const REDIS_PATIENCE: Duration = Duration::from_secs(5);

/// A node's store in this process.
pub struct Store {
    pub holds: Arc<dyn Holds>,
    pub local: Arc<Embedded>,
    booted: Mutex<Option<Booted>>,
    _folder: tempfile::TempDir,
}

impl Store {
    pub fn start(fleet: &Fleet) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let data = folder.path().join("data");
        let store = fleet.store().replace("./data", data.to_str().unwrap());
        let text = format!(
            "listen: {{ http: 127.0.0.1:1, admin: 127.0.0.1:2 }}\nstore: {{ {store} }}\n\
             providers: {{ p: {{ dialect: openai, base_url: \"http://h\", credential: k }} }}\n\
             models: {{ m: {{ price: {{ input: 1, output: 1 }}, limits: {{ context: 9, output: 9 }}, routes: [{{ provider: p }}] }} }}\n\
             bootstrap: {{ accounts: {{ alpha: {{ balance: \"1.00\", keys: [ {{ key: sk-test-alpha }} ] }} }} }}\n"
        );
        let mut config = tollgate::config::parse(&text, |_| None).unwrap_or_else(|faults| panic!("{faults}"));
        if let checked::Store::Fleet(servers) = &mut config.store {
            Arc::get_mut(servers).unwrap().redis.timeout = REDIS_PATIENCE;
        }
        let booted = block_in_place(|| boot::start(&config, false)).unwrap();
        let (holds, local) = (Arc::clone(&booted.holds), Arc::clone(&booted.store));
        Self { holds, local, booted: Mutex::new(Some(booted)), _folder: folder }
    }

    pub async fn admit(&self, account: AccountId) -> Result<Ticket, Deny> {
        self.admit_for(account, HOLD).await
    }

    pub async fn admit_for(&self, account: AccountId, amount: Amount) -> Result<Ticket, Deny> {
        let admit = Admit {
            hold: entropy::hold_id(),
            account,
            amount,
            request: String::new(),
            models: vec!["m".to_owned()],
            key: KeyDigest([7; 32]),
            price_version: 1,
            tokens: 0,
            scopes: Arc::default(),
        };
        self.holds.admit(admit).await
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if let Some(booted) = self.booted.get_mut().unwrap().take() {
            block_in_place(|| booted.stop());
        }
    }
}
