//! Where a provider is: its addresses. How its endpoints do knows [`super::upstreams`].
//!
//! They come from a `pingora-load-balancing` [`Backends`] of the provider's own (one for all would merge providers
//! behind one address), found by asynchronous DNS off the request path and used in turn. Choosing *among* endpoints is
//! ours: that crate's weights are static and keyed by address.
//!
//! Where the config names a free question, each address is asked it, and one that fails twice in a row is passed over.
//! When all fail, all are used: then the question may be the wrong one, and breakers judge by real calls.

use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use http::Method;
use http::header::{HOST, USER_AGENT};
use pingora::http::RequestHeader;
use pingora::upstreams::peer::ALPN;
use pingora::{Error, ErrorType, OrErr};
use pingora_load_balancing::discovery::ServiceDiscovery;
use pingora_load_balancing::health_check::HttpHealthCheck;
use pingora_load_balancing::{Backend, Backends};

use super::peer::{UPSTREAM_IDLE, Via, peer};
use crate::clock;
use crate::config::address::{Range, range_of};
use crate::config::checked::{FreeCheck, Provider};
use crate::config::reach::Http;

/// How long a look-up may take.
const LOOKUP: Duration = Duration::from_secs(2);
/// How long one read of a check's answer may take.
const CHECK_READ: Duration = Duration::from_secs(5);
/// How long the checks of all addresses of one provider may take.
const CHECKS: Duration = Duration::from_secs(30);
/// So many failed checks in a row, and an address is passed over.
const CHECK_FAILURES: usize = 2;

/// One provider's addresses.
pub struct Addresses {
    backends: Backends,
    turn: AtomicUsize,
    /// Where a connection is open already, and since when.
    warm: Mutex<Option<(SocketAddr, Instant)>>,
    /// A check has passed since this was last reset.
    passed: Arc<AtomicBool>,
}

impl Addresses {
    /// A provider of which nothing is known.
    ///
    /// # Errors
    /// When the question of its check cannot be put.
    pub fn new(provider: &Provider) -> pingora::Result<Self> {
        let (host, port) = (provider.base.host.clone(), provider.base.port);
        let dns = Dns { host, port, private: provider.private, told: AtomicBool::new(false) };
        Self::found_by(Box::new(dns), provider)
    }

    fn found_by(
        discovery: Box<dyn ServiceDiscovery + Send + Sync>,
        provider: &Provider,
    ) -> pingora::Result<Self> {
        let mut backends = Backends::new(discovery);
        let passed = Arc::new(AtomicBool::new(false));
        if let Some(check) = &provider.check {
            backends.set_health_check(Box::new(question(provider, check, Arc::clone(&passed))?));
        }
        Ok(Self { backends, turn: AtomicUsize::new(0), warm: Mutex::default(), passed })
    }

    /// Looks its addresses up. A look-up that fails keeps the old ones.
    ///
    /// # Errors
    /// When the name cannot be resolved.
    pub async fn refresh(&self) -> pingora::Result<()> {
        self.backends.update(|_| {}).await
    }

    /// Asks every address whether it is well; answers whether one of them is.
    pub async fn check(&self) -> bool {
        if self.backends.get_backend().is_empty() && self.refresh().await.is_err() {
            return false;
        }
        self.passed.store(false, Ordering::Relaxed);
        let over = tokio::time::timeout(CHECKS, self.backends.run_health_check(false)).await;
        over.is_ok() && self.passed.load(Ordering::Relaxed)
    }

    /// The next address, in turn; looked up now if none is known yet.
    pub async fn next(&self) -> Option<SocketAddr> {
        if let Some(address) = self.known() {
            return Some(address);
        }
        self.refresh().await.ok()?;
        self.known()
    }

    /// A connection to this address is open and waits.
    pub fn prefer(&self, address: SocketAddr, now: Instant) {
        *self.warm() = Some((address, now));
    }

    fn warm(&self) -> MutexGuard<'_, Option<(SocketAddr, Instant)>> {
        self.warm.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn known(&self) -> Option<SocketAddr> {
        let all = self.backends.get_backend();
        let mut of: Vec<_> = all.iter().filter(|b| self.backends.ready(b)).collect();
        if of.is_empty() {
            of = all.iter().collect();
        }
        let of: Vec<_> = of.into_iter().filter_map(|b| b.addr.as_inet().copied()).collect();
        let still = |since: Instant| clock::now().saturating_duration_since(since) < UPSTREAM_IDLE;
        if let Some((address, _)) =
            self.warm().filter(|(address, since)| still(*since) && of.contains(address))
        {
            return Some(address);
        }
        let turn = self.turn.fetch_add(1, Ordering::Relaxed).checked_rem(of.len())?;
        of.get(turn).copied()
    }
}

/// The question, put over connections of its own: it must not be answered by one that is warm already.
fn question(
    provider: &Provider,
    check: &FreeCheck,
    passed: Arc<AtomicBool>,
) -> pingora::Result<HttpHealthCheck> {
    let mut question = HttpHealthCheck::new(&provider.base.host, provider.base.tls);
    let anywhere = SocketAddr::from(([0, 0, 0, 0], provider.base.port));
    question.peer_template = *peer(provider, anywhere, Via::Pool, provider.timers.connect);
    question.peer_template.options.read_timeout = Some(CHECK_READ);
    if provider.reach.http == Http::Auto {
        question.peer_template.options.alpn = ALPN::H1;
    }
    // A session of HTTP/2 that is not given back stays open for ever.
    question.reuse_connection = provider.reach.http == Http::Two;
    question.consecutive_failure = CHECK_FAILURES;
    let mut head = RequestHeader::build(Method::GET, check.path.as_bytes(), Some(2))?;
    head.insert_header(HOST, provider.base.authority.as_str())?;
    head.insert_header(USER_AGENT, concat!("tollgate/", env!("CARGO_PKG_VERSION")))?;
    question.req = head;
    question.validator = Some(Box::new(move |head| {
        if !head.status.is_success() {
            return Error::e_explain(ErrorType::HTTPStatus(head.status.as_u16()), "a check did not pass");
        }
        passed.store(true, Ordering::Relaxed);
        Ok(())
    }));
    Ok(question)
}

/// Looks a name up. Addresses that may not be called (see [`crate::config::address`]) are not found.
struct Dns {
    host: String,
    port: u16,
    private: bool,
    /// That it was refused was said already; a call that finds no address looks it up again.
    told: AtomicBool,
}

impl Dns {
    fn allows(&self, address: &SocketAddr) -> bool {
        match range_of(address.ip()) {
            Range::Public => true,
            Range::Private => self.private,
            Range::Never => false,
        }
    }
}

#[async_trait]
impl ServiceDiscovery for Dns {
    async fn discover(&self) -> pingora::Result<(BTreeSet<Backend>, HashMap<u64, bool>)> {
        let lookup = tokio::net::lookup_host((self.host.as_str(), self.port));
        let found = tokio::time::timeout(LOOKUP, lookup)
            .await
            .map_err(|_| Error::explain(ErrorType::ConnectTimedout, "the name look-up took too long"))?
            .or_err(ErrorType::ConnectNoRoute, "the name cannot be resolved")?;
        let (called, refused): (Vec<_>, Vec<_>) = found.partition(|address| self.allows(address));
        if refused.is_empty() {
            self.told.store(false, Ordering::Relaxed);
        } else if !self.told.swap(true, Ordering::Relaxed) {
            tracing::error!(
                host = self.host,
                addresses = ?refused,
                "an upstream's name stands for addresses that are not called; private ones need `private: true`"
            );
        }
        let mut backends = BTreeSet::new();
        for address in called {
            backends.insert(Backend::new(&address.to_string())?);
        }
        if backends.is_empty() {
            return Error::e_explain(ErrorType::ConnectNoRoute, "the name has no address that may be called");
        }
        Ok((backends, HashMap::new()))
    }
}

#[cfg(test)]
mod tests {
    use pingora_load_balancing::discovery::Static;
    use tokio::net::TcpListener;

    use super::*;
    use crate::config;
    use crate::mock::{Mock, Script};

    fn at(addresses: [SocketAddr; 2], path: &str) -> Addresses {
        let text = format!(
            "listen: {{ http: 127.0.0.1:8080, admin: 127.0.0.1:9090 }}\n\
             store: {{ embedded: {{ path: ./data }} }}\n\
             providers: {{ p: {{ dialect: openai, base_url: \"http://host\", credential: k, check: {{ path: {path} }} }} }}\n\
             models: {{ m: {{ price: {{ input: 1, output: 1 }}, limits: {{ context: 9, output: 9 }}, routes: [{{ provider: p }}] }} }}\n"
        );
        let config = config::parse(&text, |_| None).unwrap_or_else(|e| panic!("{e}"));
        let known = Static::try_from_iter(addresses).unwrap();
        Addresses::found_by(known, &config.catalogue.endpoints[0].provider).unwrap()
    }

    async fn mock() -> Mock {
        Mock::start(TcpListener::bind("127.0.0.1:0").await.unwrap(), Script::default()).await.unwrap()
    }

    fn name(host: &str, private: bool) -> Dns {
        Dns { host: host.to_owned(), port: 80, private, told: AtomicBool::new(false) }
    }

    #[tokio::test]
    async fn a_name_that_turns_out_to_be_private_is_called_only_where_the_config_says_so() {
        assert!(name("localhost", false).discover().await.is_err());
        let (found, _) = name("localhost", true).discover().await.unwrap();
        assert!(!found.is_empty());
    }

    #[tokio::test]
    async fn what_turns_out_to_be_link_local_is_never_called() {
        // As resolvers read it, the first is 169.254.169.254 in one number.
        for host in ["2852039166", "0xa9fea9fe", "169.254.43518", "169.254.169.254", "::ffff:169.254.169.254"]
        {
            let found = name(host, true).discover().await;
            assert!(found.is_err(), "{host}: {found:?}");
        }
    }

    #[tokio::test]
    async fn an_address_that_fails_its_checks_is_passed_over() {
        let (well, gone) = (mock().await, mock().await);
        let addresses = at([well.address(), gone.address()], "/v1/models");
        assert!(addresses.check().await);
        gone.stop();
        for _ in 0..CHECK_FAILURES {
            assert!(addresses.check().await, "one of them is well");
        }
        for _ in 0..4 {
            assert_eq!(addresses.next().await, Some(well.address()));
        }
        let asked = &well.requests()[0];
        assert_eq!((asked.method.as_str(), asked.path.as_str()), ("GET", "/v1/models"));
        assert_eq!(asked.header("authorization"), None, "the question is free");
    }

    #[tokio::test]
    async fn the_address_with_a_warm_connection_is_used_until_that_has_idled_out() {
        let (one, two) = (mock().await, mock().await);
        let addresses = at([one.address(), two.address()], "/v1/models");
        addresses.refresh().await.unwrap();
        addresses.prefer(two.address(), clock::now());
        for _ in 0..3 {
            assert_eq!(addresses.next().await, Some(two.address()));
        }
        addresses.prefer(two.address(), clock::now().checked_sub(UPSTREAM_IDLE).unwrap());
        let used: BTreeSet<_> = [addresses.next().await, addresses.next().await].into();
        assert_eq!(used.len(), 2, "in turn again");
    }

    #[tokio::test]
    async fn a_question_that_nobody_passes_takes_no_address_away() {
        let (one, two) = (mock().await, mock().await);
        let addresses = at([one.address(), two.address()], "/nowhere");
        for _ in 0..=CHECK_FAILURES {
            assert!(!addresses.check().await);
        }
        let used: BTreeSet<_> = [addresses.next().await, addresses.next().await].into();
        assert_eq!(used, [Some(one.address()), Some(two.address())].into());
    }
}
