//! Connections that are open before a failover needs them.
//!
//! The routes that would be asked next (see [`filters::upstream::board::Board::standbys`]) keep one connection each in
//! the pool that attempts take theirs from. That pool is Pingora's and out of reach from outside; but a *subrequest*
//! goes through the same proxy, and takes its connection out of the same pool. So warming up is a subrequest of our
//! own that ends where its head would go out: over HTTP/2 Pingora then puts the connection (back) into the pool,
//! and nothing was sent. Each round takes it out and puts it back, which keeps it from idling out; pings tell whether it
//! lives.
//!
//! A connection of HTTP/1.1 only gets into the pool behind a whole answer. So there the provider's free question
//! (`check:`) is asked, and without one such a provider is not kept warm; neither is one without TLS, whose
//! connection costs one round trip.
//!
//! A subrequest is known by what only this process can put into it ([`Target`]), never by anything in its head. It has
//! no key, no hold, no access line, and is no attempt: what it finds out, the next attempt finds out too.
//!
//! Every thread that serves has a pool of its own, and so a warmer of its own.

use std::collections::{HashMap, HashSet};
use std::io::Cursor;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use filters::ids::EndpointId;
use http::Version;
use http::header::{HOST, USER_AGENT};
use pingora::http::RequestHeader;
use pingora::protocols::http::ServerSession;
use pingora::upstreams::peer::HttpPeer;
use pingora::{Error, ErrorType};
use pingora_proxy::subrequest::Ctx as SubrequestCtx;
use pingora_proxy::{HttpProxy, Session, SubrequestSpawner};
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use super::ctx::{Ctx, Stage};
use super::gateway::Gateway;
use crate::clock;
use crate::config::checked::Provider;
use crate::config::reach::Http;
use crate::drain::Drain;
use crate::pool::endpoint::Addresses;
use crate::pool::peer::{Patience, Via, peer};
use crate::pool::{Pool, Snapshot};

/// The warm-up is over where its request would begin.
const WARM: ErrorType = ErrorType::new("warm");
/// How often to look who has to be kept warm: a model's first call must not wait long for its standbys.
const LOOK: Duration = Duration::from_millis(500);
/// How often a connection is taken out of the pool and put back: well within its idle time.
const AGAIN: Duration = Duration::from_secs(20);
/// When a provider is tried again whose connections cannot be kept.
const UNKEPT_AGAIN: Duration = Duration::from_secs(600);
/// How long one read of the answer to a free question may take.
const READ: Duration = Duration::from_secs(5);
/// How long a warm-up may take behind its connection.
const WARM_UP: Duration = Duration::from_secs(10);
/// Warm-ups at the same time.
const AT_ONCE_MAX: usize = 8;

/// Opens connections off the path of calls, on a thread that serves and for this one alone.
pub struct Warmer {
    /// The way into its proxy.
    way_in: SubrequestSpawner,
    pool: Arc<Pool>,
    drain: Arc<Drain>,
}

/// Whose connection is to be warm.
#[derive(Clone)]
pub(super) struct Target {
    snapshot: Arc<Snapshot>,
    endpoint: EndpointId,
    address: Arc<OnceLock<SocketAddr>>,
    found: Arc<OnceLock<Found>>,
}

/// What a warm-up came to, where it came to a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// A connection that cannot be kept: of HTTP/1.1, without a free question.
    Unkept,
    /// A connection that is in the pool now.
    Kept,
}

impl Target {
    fn provider(&self) -> pingora::Result<&Arc<Provider>> {
        Ok(&self.snapshot.endpoint(self.endpoint)?.provider)
    }

    /// Takes the mark off a session that we made.
    pub(super) fn of(session: &mut Session) -> Option<Self> {
        let mark = session.subrequest_ctx.as_mut()?.user_ctx_mut()?;
        mark.downcast_mut::<Self>().cloned()
    }

    /// Where it goes.
    pub(super) async fn peer(&self) -> pingora::Result<Box<HttpPeer>> {
        let provider = self.provider()?;
        let Some(address) = self.addresses()?.next().await else {
            return Error::e_explain(ErrorType::ConnectNoRoute, "no address is known");
        };
        self.address.get_or_init(|| address);
        let patience = Patience { connect: provider.timers.connect, read: READ };
        Ok(Box::new(peer(provider, address, Via::Pool, patience)))
    }

    /// There is a connection: it ends here, or asks the free question.
    pub(super) fn head(&self, head: &mut RequestHeader) -> pingora::Result<()> {
        let provider = self.provider()?;
        if head.version == Version::HTTP_2 {
            self.keep();
            return Error::e_explain(WARM, "over HTTP/2 nothing has to be sent");
        }
        let Some(check) = &provider.check else {
            self.found.get_or_init(|| Found::Unkept);
            return Error::e_explain(WARM, "over HTTP/1.1 without a free question");
        };
        let mut question = RequestHeader::build("GET", check.path.as_bytes(), Some(2))?;
        question.insert_header(HOST, provider.base.authority())?;
        question.insert_header(USER_AGENT, concat!("tollgate/", env!("CARGO_PKG_VERSION")))?;
        *head = question;
        Ok(())
    }

    /// The subrequest is over.
    pub(super) fn end(&self, error: Option<&Error>) {
        if error.is_none() {
            self.keep();
        }
    }

    /// The connection is in the pool: attempts are to go to its address.
    fn keep(&self) {
        self.found.get_or_init(|| Found::Kept);
        if let (Some(address), Ok(addresses)) = (self.address.get(), self.addresses()) {
            addresses.prefer(*address, clock::now());
        }
    }

    fn addresses(&self) -> pingora::Result<&Arc<Addresses>> {
        let unknown = || Error::explain(ErrorType::InternalError, "an endpoint that is not in the snapshot");
        self.snapshot.addresses.get(self.endpoint.0).ok_or_else(unknown)
    }
}

impl Warmer {
    /// For the proxy of this thread.
    #[must_use]
    pub fn new(proxy: Arc<HttpProxy<Gateway>>, pool: Arc<Pool>, drain: Arc<Drain>) -> Arc<Self> {
        Arc::new(Self { way_in: SubrequestSpawner::new(proxy), pool, drain })
    }

    /// Keeps standbys warm until the process leaves.
    pub async fn run(self: Arc<Self>) {
        let mut due: HashMap<String, Instant> = HashMap::new();
        let mut under_way: JoinSet<(String, Duration)> = JoinSet::new();
        let mut busy: HashSet<String> = HashSet::new();
        let mut tick = tokio::time::interval(LOOK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = tick.tick() => {}
                Some(ended) = under_way.join_next() => {
                    if let Ok((provider, again)) = ended {
                        busy.remove(&provider);
                        due.insert(provider, clock::now() + again);
                    }
                    continue;
                }
            }
            if self.drain.is_closing() {
                return;
            }
            let snapshot = self.pool.load();
            let targets = targets(&snapshot);
            due.retain(|provider, _| targets.iter().any(|(known, _)| known == provider));
            for (provider, endpoint) in targets {
                let is_due = due.get(&provider).is_none_or(|at| *at <= clock::now());
                if is_due && under_way.len() < AT_ONCE_MAX && busy.insert(provider.clone()) {
                    let (warmer, snapshot) = (Arc::clone(&self), Arc::clone(&snapshot));
                    under_way.spawn(async move {
                        let again = warmer.warm_up(snapshot, endpoint).await;
                        (provider, again)
                    });
                }
            }
        }
    }

    /// Warms one connection; answers when to do so again.
    async fn warm_up(&self, snapshot: Arc<Snapshot>, endpoint: EndpointId) -> Duration {
        let Some(parent) = parent().await else { return AGAIN };
        let target = Target { snapshot, endpoint, address: Arc::default(), found: Arc::default() };
        let Ok(provider) = target.provider() else { return AGAIN };
        let limit = provider.timers.connect + WARM_UP;
        let mark = SubrequestCtx::builder().user_ctx(Box::new(target.clone())).build();
        let mut task = self.way_in.spawn_background_subrequest(&parent, mark);
        if tokio::time::timeout(limit, &mut task).await.is_err() {
            task.abort();
        }
        let provider = provider.name.as_str();
        match target.found.get() {
            Some(Found::Kept) => {
                tracing::debug!(provider, "a connection is kept warm");
                AGAIN
            }
            Some(Found::Unkept) => {
                tracing::debug!(
                    provider,
                    "it speaks HTTP/1.1 and has no `check`: no connection is kept warm"
                );
                UNKEPT_AGAIN
            }
            None => {
                tracing::debug!(provider, "no connection could be warmed");
                AGAIN
            }
        }
    }
}

/// The providers to keep warm, each with one of its endpoints.
fn targets(snapshot: &Snapshot) -> Vec<(String, EndpointId)> {
    let mut targets: Vec<(String, EndpointId)> = vec![];
    if !snapshot.routing.warm {
        return targets;
    }
    for id in snapshot.upstreams.standbys() {
        let Ok(endpoint) = snapshot.endpoint(id) else { continue };
        let provider = &endpoint.provider;
        let may_be_two =
            provider.reach.http == Http::Two || (provider.base.tls && provider.reach.http == Http::Auto);
        let worth_it = may_be_two || (provider.base.tls && provider.check.is_some());
        if worth_it && !targets.iter().any(|(known, _)| *known == provider.name) {
            targets.push((provider.name.clone(), id));
        }
    }
    targets
}

/// The request whose copy every subrequest begins as. Nothing of it goes anywhere.
async fn parent() -> Option<ServerSession> {
    let head = Cursor::new(b"GET / HTTP/1.1\r\nhost: tollgate\r\n\r\n".to_vec());
    let mut session = ServerSession::new_http1(Box::new(head));
    matches!(session.read_request().await, Ok(true)).then_some(session)
}

impl Ctx {
    /// What is to be warmed, where this is no call.
    pub(super) fn warming(&self) -> Option<&Target> {
        match &self.stage {
            Stage::WarmingUp(target) => Some(target),
            Stage::Arrived | Stage::Admitted(_) | Stage::Finished => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use filters::dialect::Operation;
    use filters::preferences::Preferences;
    use filters::upstream::board::Ask;
    use filters::upstream::watchdog::Form;

    use super::*;
    use crate::config;

    /// Who is kept warm once `m` was asked for, where these are the settings of the provider behind the first.
    fn warm(provider: &str, routing: &str) -> usize {
        let text = format!(
            "listen: {{ http: 127.0.0.1:8080, admin: 127.0.0.1:9090 }}\n\
             store: {{ embedded: {{ path: ./data }} }}\n\
             routing: {{ {routing} }}\n\
             providers:\n  p: {{ dialect: openai, base_url: \"http://p\" }}\n  q: {{ dialect: openai, {provider} }}\n\
             models: {{ m: {{ price: {{ input: 1, output: 1 }}, limits: {{ context: 9, output: 9 }}, \
             routes: [{{ provider: p }}, {{ provider: q, weight: 9 }}, {{ provider: q, model: n, weight: 8 }}] }} }}\n"
        );
        let config = config::parse(&text, |_| None).unwrap_or_else(|e| panic!("{e}"));
        let snapshot = Snapshot::new(config.catalogue, config.routing).unwrap();
        assert_eq!(targets(&snapshot).len(), 0, "nobody has asked for the model");
        let preferences = Preferences::default();
        let models = [snapshot.upstreams.model("m", Operation::Chat).unwrap()];
        let ask = Ask { models: &models, form: Form::Whole, prompt_tokens: 9, preferences: &preferences };
        let _plan = snapshot.upstreams.candidates(&ask);
        targets(&snapshot).len()
    }

    #[test]
    fn a_standby_is_kept_warm_where_that_sends_it_nothing_unasked() {
        for (provider, warmed) in [
            ("base_url: \"https://q\"", 1),
            ("base_url: \"https://q\", http: h2", 1),
            ("base_url: \"http://q\", http: h2c", 1),
            ("base_url: \"https://q\", http: h1, check: { path: / }", 1),
            ("base_url: \"https://q\", http: h1", 0),
            ("base_url: \"http://q\", check: { path: / }", 0),
        ] {
            assert_eq!(warm(provider, ""), warmed, "{provider}");
            assert_eq!(warm(provider, "warm: false"), 0, "{provider}");
        }
    }
}
