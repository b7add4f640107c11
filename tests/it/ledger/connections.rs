//! A server that cannot be reached, or is not who it says, is found out quickly.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use tollgate::config::checked;
use tollgate::ledger::{LedgerError, Postgres};
use tollgate::secret::Secret;

use super::super::support::postgres::{Server, database};
use super::super::support::tls::Authority;

/// Far beyond what is promised, since machines are slow at times; far below what a system waits by itself.
const QUICK: Duration = Duration::from_secs(20);

fn at(url: String) -> Postgres {
    Postgres::new(&checked::Postgres { url: Secret::new(url), ca_file: None, connections_max: 2 }).unwrap()
}

fn is_unreachable(ledger: &Postgres) -> String {
    let began = Instant::now();
    let error = ledger.check_version().unwrap_err();
    assert!(began.elapsed() < QUICK, "{error}");
    assert!(matches!(error, LedgerError::Unreachable(_)), "{error}");
    error.to_string()
}

#[test]
fn a_server_that_is_not_there_is_unreachable_quickly() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    // It is accepted by the kernel and never answered.
    is_unreachable(&at(format!("postgres://u@127.0.0.1:{port}/d")));
    drop(listener);
    is_unreachable(&at(format!("postgres://u@127.0.0.1:{port}/d")));
    let error = is_unreachable(&at(format!("postgres://u:sesame@127.0.0.1:{port}/d")));
    assert!(!error.contains("sesame"), "{error}");
}

#[test]
fn a_url_that_is_none_is_named_without_its_password() {
    let config = checked::Postgres {
        url: Secret::new("postgres://u:sesame@h:x/d"),
        ca_file: None,
        connections_max: 2,
    };
    let error = format!("{:#}", Postgres::new(&config).err().unwrap());
    assert!(error.contains("store.postgres.url") && !error.contains("sesame"), "{error}");
    let config = checked::Postgres { url: Secret::new("postgres://h/d?sslmode=require"), ..config };
    let error = format!("{:#}", Postgres::new(&config).err().unwrap());
    assert!(error.contains("ca_file"), "{error}");
}

#[test]
fn a_server_that_comes_back_is_used_again_and_one_that_is_busy_is_unreachable() {
    let mut server = Server::start("");
    let ledger = server.database().ledger();
    ledger.check_version().unwrap();
    server.crash();
    is_unreachable(&ledger);
    server.restart();
    // The pool may still hold connections of before; each is found out once.
    let until = Instant::now() + QUICK;
    while ledger.check_version().is_err() {
        assert!(Instant::now() < until);
    }
}

#[test]
fn a_ledger_may_be_dropped_and_used_wherever_threads_may_block() {
    let database = database();
    let ledger = database.ledger();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let asked = ledger.clone();
        tokio::task::spawn_blocking(move || asked.check_version().unwrap()).await.unwrap();
        drop(ledger);
    });
}

#[test]
fn tls_is_spoken_with_a_server_that_the_ca_file_knows_and_with_no_other() {
    let authority = Authority::new();
    let stranger = Authority::new();
    let mut server = Server::start("");
    let (certificate, key) = authority.server_pem("127.0.0.1");
    let (certificate, key) = (server.file("server.pem", &certificate), server.file("server.key", &key));
    server.restart_with(&format!(
        "ssl = on\nssl_cert_file = {}\nssl_key_file = {}\n",
        certificate.display(),
        key.display()
    ));
    let database = server.database();
    let with = |authority: &Authority, url: &str| {
        let url = Secret::new(url);
        Postgres::new(&checked::Postgres { url, ca_file: Some(authority.ca_file()), connections_max: 2 })
            .unwrap()
    };
    let ledger = with(&authority, &database.url);
    ledger.check_version().unwrap();
    let spoken = "SELECT bool_and(ssl) FROM pg_stat_ssl s JOIN pg_stat_activity a USING (pid)
                  WHERE a.datname = current_database() AND a.application_name = 'tollgate'
                      AND a.pid <> pg_backend_pid()";
    drop(database.ledger());
    assert!(["t", "f"].contains(&database.sql(spoken).as_str()));
    assert_eq!(
        database.sql(&format!("{spoken} AND s.ssl")),
        "t",
        "the connection that was checked speaks TLS"
    );
    let error = is_unreachable(&with(&stranger, &database.url));
    assert!(error.contains("UnknownIssuer") || error.contains("certificate"), "{error}");
    // The certificate is for an address; the name it is asked by now is another.
    let other = database.url.replace("127.0.0.1", "localhost");
    is_unreachable(&with(&authority, &other));
    // A server without TLS is not spoken to at all.
    let plain = super::super::support::postgres::database();
    is_unreachable(&with(&authority, &plain.url));
}
