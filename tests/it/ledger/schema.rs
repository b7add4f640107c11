//! A row that is wrong cannot be written, and the schema is made once, by the one who is asked to.

use std::process::Command;

use tollgate::ledger::{Ledger as _, LedgerError};

use super::super::support::postgres::{Database, database, shared};
use super::{ALL, account, ended, first_epoch, just};

/// A folder with a config that names a database.
fn config(database: &Database) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let yaml = format!(
        "listen: {{ http: 127.0.0.1:0, admin: 127.0.0.1:1 }}\n\
         store: {{ path: ./node, redis: {{ urls: [\"redis://127.0.0.1:1\"] }}, postgres: {{ url: \"{}\" }} }}\n\
         providers: {{ p: {{ dialect: openai, base_url: \"http://127.0.0.1:1/v1\" }} }}\n\
         models: {{ m: {{ price: {{ input: 1, output: 1 }}, limits: {{ context: 9, output: 9 }}, routes: [{{ provider: p }}] }} }}\n",
        database.url
    );
    std::fs::write(folder.path().join("tollgate.yaml"), yaml).unwrap();
    folder
}

fn tollgate(folder: &tempfile::TempDir, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
    command.args(["--config", "tollgate.yaml"]).args(args).current_dir(folder.path());
    command
}

fn said(out: &std::process::Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr))
}

#[test]
fn many_who_migrate_at_once_do_it_once() {
    let database = shared().empty();
    let folder = config(&database);
    let migrating: Vec<_> = (0..6)
        .map(|_| {
            tollgate(&folder, &["migrate", "--json"]).stdout(std::process::Stdio::piped()).spawn().unwrap()
        })
        .collect();
    let (mut froms, mut newest) = (vec![], 0);
    for process in migrating {
        let out = process.wait_with_output().unwrap();
        assert!(out.status.success(), "{}", said(&out));
        let migrated: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
        froms.push(migrated["from"].as_i64().unwrap());
        newest = migrated["to"].as_i64().unwrap();
    }
    froms.sort_unstable();
    assert_eq!(froms, [0, newest, newest, newest, newest, newest]);
    assert_eq!(database.sql("SELECT count(*) FROM schema_version"), newest.to_string());
    assert_eq!(database.sql("SELECT count(*) FROM account"), "9", "the house");
    database.ledger().check_version().unwrap();
}

#[test]
fn a_binary_and_a_schema_that_do_not_go_together_say_what_to_do() {
    let database = shared().empty();
    let folder = config(&database);
    let out = tollgate(&folder, &["ledger", "verify"]).output().unwrap();
    assert!(!out.status.success());
    let ledger = database.ledger();
    let Err(LedgerError::TooOld(0, newest)) = ledger.check_version() else { panic!("it is too old") };
    let wanted = format!("schema version 0, this binary needs {newest}: run `tollgate migrate` first");
    assert!(said(&out).contains(&wanted), "{}", said(&out));
    assert_eq!(ledger.migrate().unwrap().to, newest);
    let newer = newest + 1;
    database.sql(&format!("INSERT INTO schema_version (version) VALUES ({newer})"));
    for refused in [ledger.check_version(), ledger.migrate().map(drop)] {
        let Err(LedgerError::TooNew(found, known)) = refused else { panic!("it is too new") };
        assert_eq!((found, known), (newer, newest));
    }
    let out = tollgate(&folder, &["accounts", "show"]).output().unwrap();
    assert!(said(&out).contains("use a newer tollgate"), "{}", said(&out));
}

#[test]
fn a_server_that_may_forget_what_it_has_committed_is_refused() {
    let database = database();
    database.ledger().check_version().unwrap();
    database.sql("ALTER ROLE tollgate IN DATABASE \"postgres\" RESET ALL");
    let name = database.sql("SELECT current_database()");
    database.sql(&format!("ALTER DATABASE {name} SET synchronous_commit = off"));
    let error = database.ledger().check_version().unwrap_err().to_string();
    assert!(error.contains("synchronous_commit is off"), "{error}");
}

#[test]
fn verbs_without_a_gateway_work_on_postgres_from_what_is_free() {
    let database = database();
    let folder = config(&database);
    let run = |args: &[&str]| {
        let out = tollgate(&folder, args).output().unwrap();
        (out.status.success(), said(&out))
    };
    assert!(run(&["accounts", "create", "alpha"]).0);
    assert!(run(&["accounts", "top-up", "alpha", "10", "--reference", "r1"]).0);
    assert!(run(&["accounts", "top-up", "alpha", "10", "--reference", "r1"]).1.contains("already"));
    let mut ledger = database.ledger();
    let boot = ledger.begin_boot(0).unwrap();
    let id = ledger.ensure_account("alpha", None, 0).unwrap();
    ledger.lease_local(id, boot, just(5_000_000_000)).unwrap();
    let (done, said) = run(&["accounts", "refund", "alpha", "6", "--reference", "r2"]);
    assert!(!done && said.contains("only $5"), "{said}");
    assert!(run(&["accounts", "refund", "alpha", "5", "--reference", "r3"]).0);
    assert!(run(&["keys", "create", "alpha"]).1.contains("tg-"));
    assert!(run(&["accounts", "statement", "alpha"]).1.contains("refund"));
    let (done, said) = run(&["ledger", "verify"]);
    assert!(done && said.contains("The books are right."), "{said}");
    // A node is lost with its disk.
    assert!(run(&["ledger", "boots"]).1.contains("1970-01-01T00:00:00Z"));
    let (done, said) = run(&["ledger", "lost", &boot.to_string()]);
    assert!(done && said.contains("$5.00"), "{said}");
    assert!(!run(&["ledger", "lost", &boot.to_string()]).0, "once");
    let restore = |usd| run(&["ledger", "restore", "alpha", usd, "--reference", "t1"]);
    assert!(!restore("6").0, "more than is there");
    assert!(restore("4.5").1.contains("Given back."));
    assert!(restore("4.5").1.contains("already"));
    assert_eq!(super::balance(&mut ledger, id), (4_500_000_000, 0));
    assert!(run(&["ledger", "verify"]).0);
}

#[test]
fn a_row_that_is_wrong_cannot_be_written() {
    let database = database();
    let mut ledger = database.ledger();
    let id = account(&mut ledger, "alpha", 1_000);
    let boot = ledger.begin_boot(0).unwrap();
    let pool = first_epoch(&ledger, boot, 7);
    ledger.lease_pool(id, pool, just(400)).unwrap();
    ledger.lease_local(id, boot, just(100)).unwrap();
    ledger.post(boot, &[ended(1, id, Some(pool), 300, 100)]).unwrap();
    ledger.verify().unwrap();
    let transfer = |values: &str| {
        format!(
            "INSERT INTO transfer (day, reference, kind, debit, credit, amount, reason, at_ms) VALUES ({values})"
        )
    };
    for (sql, why) in [
        ("UPDATE lease SET consumed = amount + 1 WHERE shard = 7".to_owned(), "lease_rest_check"),
        ("UPDATE lease SET amount = consumed - 1 WHERE shard = 7".to_owned(), "lease_rest_check"),
        ("UPDATE balance SET leased = posted + 1".to_owned(), "balance_check"),
        ("UPDATE balance SET posted = leased - 1".to_owned(), "balance_check"),
        ("UPDATE balance SET posted = -1, leased = -1".to_owned(), "check"),
        ("UPDATE lease SET state = 'closed' WHERE shard = 7".to_owned(), "lease_check"),
        ("INSERT INTO lease (account, boot, shard, epoch) VALUES (1000, 1, 7, 9)".to_owned(), "lease_check"),
        ("INSERT INTO lease (account) VALUES (1000)".to_owned(), "lease_check"),
        ("INSERT INTO lease (account, shard, epoch) VALUES (1000, 7, 1)".to_owned(), "duplicate key"),
        ("INSERT INTO lease (account, shard, epoch) VALUES (5, 7, 1)".to_owned(), "foreign key"),
        (transfer("'1970-01-01', 'x', 10, 2, 1000, 0, '', 0"), "amount"),
        (transfer("'1970-01-01', 'x', 10, 2, 2, 5, '', 0"), "transfer_check"),
        (transfer("'1970-01-02', 'x', 10, 2, 1000, 5, '', 0"), "transfer_check"),
        (transfer("'2026-11-30', 'x', 10, 2, 1000, 5, '', 0"), "transfer_check"),
        (transfer("'2026-11-30', 'x', 1, 1000, 1, 5, '', 0"), "transfer_check"),
        (transfer("'1970-01-01', 'alpha in', 10, 2, 1000, 5, '', 0"), "duplicate key"),
        ("UPDATE transfer SET amount = 1".to_owned(), "never changes"),
        ("DELETE FROM transfer".to_owned(), "never goes"),
        ("TRUNCATE transfer".to_owned(), "never goes"),
        ("DELETE FROM settlement".to_owned(), "never goes"),
        ("UPDATE settlement SET captured = captured + 1".to_owned(), "check"),
        ("INSERT INTO account (kind, name, created_ms) VALUES (2, 'x', 0)".to_owned(), "account_check"),
        ("UPDATE shard_epoch SET epoch = -1".to_owned(), "shard_epoch"),
    ] {
        let error = database.refused(&sql);
        assert!(error.contains(why), "{sql}: {error}");
    }
    ledger.verify().unwrap();
}

#[test]
fn verify_names_the_first_thing_that_is_wrong() {
    let database = database();
    let mut ledger = database.ledger();
    let id = account(&mut ledger, "alpha", 1_000);
    let boot = ledger.begin_boot(0).unwrap();
    let pool = first_epoch(&ledger, boot, 7);
    ledger.lease_pool(id, pool, just(400)).unwrap();
    ledger.lease_local(id, boot, ALL).unwrap();
    ledger.snapshot(86_400_000).unwrap();
    ledger.post(boot, &[ended(1, id, Some(pool), 300, 100), ended(2, id, None, 50, 20)]).unwrap();
    ledger.snapshot(2 * 86_400_000).unwrap();
    ledger.snapshot(2 * 86_400_000 + 5).unwrap();
    assert_eq!(database.sql("SELECT count(*) FROM snapshot"), "2");
    ledger.verify().unwrap();
    for (sql, undo, law) in [
        (
            "UPDATE balance SET posted = posted + 1",
            "UPDATE balance SET posted = posted - 1",
            "a balance is the sum",
        ),
        (
            "UPDATE balance SET leased = leased - 1",
            "UPDATE balance SET leased = leased + 1",
            "leases reconcile",
        ),
        ("UPDATE balance SET calls = 9", "UPDATE balance SET calls = 2", "an account's calls"),
        ("UPDATE balance SET suspended = 9", "UPDATE balance SET suspended = 0", "what is in suspense"),
        (
            "UPDATE lease SET consumed = consumed + 1, amount = amount + 1",
            "UPDATE lease SET consumed = consumed - 1, amount = amount - 1",
            "what a lease has spent",
        ),
        (
            "UPDATE settlement SET captured = captured + 1, released = released - 1",
            "UPDATE settlement SET captured = captured - 1, released = released + 1",
            "every hold's transfers",
        ),
        (
            "UPDATE snapshot SET posted = posted + 1 WHERE day = '1970-01-03'",
            "UPDATE snapshot SET posted = posted - 1 WHERE day = '1970-01-03'",
            "a day's snapshot",
        ),
    ] {
        database.sql(sql);
        let error = ledger.verify().unwrap_err().to_string();
        assert!(error.contains(law), "{sql}: {error}");
        database.sql(undo);
        ledger.verify().unwrap();
    }
}

#[test]
fn partitions_are_made_ahead_and_a_row_without_one_is_reported() {
    const MONTH_MS: i64 = 31 * 86_400_000;
    const NOVEMBER_2026_MS: i64 = 1_796_000_000_000;
    let database = database();
    let mut ledger = database.ledger();
    let parts = "SELECT count(*) FROM pg_inherits WHERE inhparent = 'transfer'::regclass";
    let before: i64 = database.sql(parts).parse().unwrap();
    assert_eq!(
        ledger.partitions_ahead(NOVEMBER_2026_MS + 12 * MONTH_MS).unwrap(),
        2 * 5,
        "two tables, five months"
    );
    assert_eq!(ledger.partitions_ahead(NOVEMBER_2026_MS + 12 * MONTH_MS).unwrap(), 0);
    assert_eq!(ledger.partitions_ahead(NOVEMBER_2026_MS + 13 * MONTH_MS).unwrap(), 2);
    assert_eq!(database.sql(parts).parse::<i64>().unwrap(), before + 6);
    let id = account(&mut ledger, "alpha", 1_000);
    let boot = ledger.begin_boot(0).unwrap();
    ledger.lease_local(id, boot, ALL).unwrap();
    // In ten years: nobody has made that month, and it is booked all the same, once.
    let mut late = ended(1, id, None, 50, 20);
    late.id += u128::from(10 * 365 * 86_400_000_u64) << 80;
    assert_eq!(ledger.post(boot, &[late.clone()]).unwrap(), 1);
    assert_eq!(ledger.post(boot, &[late]).unwrap(), 0);
    let error = ledger.verify().unwrap_err().to_string();
    assert!(error.contains("rows are in") && error.contains("_default"), "{error}");
}

#[test]
fn partitions_are_made_while_others_write() {
    let database = database();
    let mut ledger = database.ledger();
    let id = account(&mut ledger, "alpha", 1_000_000);
    let boot = ledger.begin_boot(0).unwrap();
    ledger.lease_local(id, boot, ALL).unwrap();
    let maker = {
        let ledger = database.ledger();
        std::thread::spawn(move || {
            for year in 1..6 {
                ledger.partitions_ahead(1_796_000_000_000 + year * 366 * 86_400_000).unwrap();
            }
        })
    };
    let mut number = 0;
    while !maker.is_finished() || number < 200 {
        number += 1;
        assert_eq!(ledger.post(boot, &[ended(number, id, None, 50, 20)]).unwrap(), 1);
    }
    maker.join().unwrap();
    ledger.verify().unwrap();
}
