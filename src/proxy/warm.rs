//! Connections that are open before a failover needs them.
//!
//! The routes that would be asked next (see [`filters::upstream::board::Board::standbys`]) keep one connection each in
//! the pool that attempts take theirs from. Over HTTP/2 a connection is opened, or taken out of the pool, and put (back)
//! there without anything being sent; each round that keeps it from idling out, and pings tell whether it lives.
//!
//! A connection of HTTP/1.1 only gets into the pool behind a whole answer. So there the provider's free question
//! (`check:`) is asked, and without one such a provider is not kept warm; neither is one without TLS, whose
//! connection costs one round trip.
//!
//! It is no attempt: what it finds out, the next attempt finds out too.
//!
//! Every thread that serves has a pool of its own, and so a warmer of its own. On its way it closes what has waited there
//! too long, or was closed by the other side.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use filters::ids::EndpointId;
use http::header::{HOST, USER_AGENT};
use pingora::http::RequestHeader;
use pingora::protocols::http::client::HttpSession;
use pingora::{Error, ErrorType};
use tokio::task::{Id, JoinSet};
use tokio::time::MissedTickBehavior;

use crate::clock;
use crate::config::checked::Provider;
use crate::config::reach::Http;
use crate::drain::Drain;
use crate::pool::peer::{Via, peer};
use crate::pool::wire::{Wires, next_final_piece};
use crate::pool::{Pool, Snapshot};

/// How often to look who has to be kept warm: a model's first call must not wait long for its standbys.
const LOOK: Duration = Duration::from_millis(500);
/// How often a connection is taken out of the pool and put back: well within its idle time.
const AGAIN: Duration = Duration::from_secs(20);
/// When a provider is tried again whose connections cannot be kept.
const UNKEPT_AGAIN: Duration = Duration::from_secs(600);
/// How long a warm-up may take behind its connection.
const WARM_UP: Duration = Duration::from_secs(10);
/// Warm-ups at the same time.
const AT_ONCE_MAX: usize = 8;

/// Opens connections off the path of calls, on a thread that serves and for this one alone.
pub struct Warmer {
    /// Those that this thread's attempts take.
    wires: Arc<Wires>,
    pool: Arc<Pool>,
    drain: Arc<Drain>,
}

/// What a warm-up came to, where it came to a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// A connection that cannot be kept: of HTTP/1.1, without a free question.
    Unkept,
    /// A connection that is in the pool now.
    Kept,
}

impl Warmer {
    /// For the attempts that take their connections from here.
    #[must_use]
    pub fn new(wires: Arc<Wires>, pool: Arc<Pool>, drain: Arc<Drain>) -> Arc<Self> {
        Arc::new(Self { wires, pool, drain })
    }

    /// Keeps standbys warm until the process leaves.
    pub async fn run(self: Arc<Self>) {
        let mut due: HashMap<String, Instant> = HashMap::new();
        let mut under_way: JoinSet<Duration> = JoinSet::new();
        let mut busy: HashMap<Id, String> = HashMap::new();
        let mut tick = tokio::time::interval(LOOK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = tick.tick() => {}
                Some(ended) = under_way.join_next_with_id() => {
                    let (id, again) = ended.unwrap_or_else(|broke| (broke.id(), AGAIN));
                    if let Some(provider) = busy.remove(&id) {
                        due.insert(provider, clock::now() + again);
                    }
                    continue;
                }
            }
            self.wires.sweep();
            if self.drain.is_closing() {
                return;
            }
            let snapshot = self.pool.load();
            let targets = targets(&snapshot);
            due.retain(|provider, _| targets.iter().any(|(known, _)| known == provider));
            for (provider, endpoint) in targets {
                let is_due = due.get(&provider).is_none_or(|at| *at <= clock::now());
                let is_busy = busy.values().any(|busy| *busy == provider);
                if is_due && !is_busy && under_way.len() < AT_ONCE_MAX {
                    let (warmer, snapshot) = (Arc::clone(&self), Arc::clone(&snapshot));
                    let task = under_way.spawn(async move { warmer.warm_up(&snapshot, endpoint).await });
                    busy.insert(task.id(), provider);
                }
            }
        }
    }

    /// Warms one connection; answers when to do so again.
    async fn warm_up(&self, snapshot: &Snapshot, endpoint: EndpointId) -> Duration {
        let Ok(provider) = snapshot.endpoint(endpoint).map(|endpoint| &endpoint.provider) else {
            return AGAIN;
        };
        let limit = provider.timers.connect + WARM_UP;
        let warmed = tokio::time::timeout(limit, self.open(snapshot, provider, endpoint)).await;
        let provider = provider.name.as_str();
        match warmed {
            Ok(Ok(Found::Kept)) => {
                tracing::debug!(provider, "a connection is kept warm");
                AGAIN
            }
            Ok(Ok(Found::Unkept)) => {
                tracing::debug!(
                    provider,
                    "it speaks HTTP/1.1 and has no `check`: no connection is kept warm"
                );
                UNKEPT_AGAIN
            }
            Ok(Err(error)) => {
                tracing::debug!(provider, %error, "no connection could be warmed");
                AGAIN
            }
            Err(_) => {
                tracing::debug!(provider, "no connection could be warmed in time");
                AGAIN
            }
        }
    }

    /// Opens a connection, or takes one out of the pool, and puts it there.
    async fn open(
        &self,
        snapshot: &Snapshot,
        provider: &Provider,
        endpoint: EndpointId,
    ) -> pingora::Result<Found> {
        let nowhere = || Error::explain(ErrorType::ConnectNoRoute, "no address is known");
        let addresses = snapshot.addresses.get(endpoint.0).ok_or_else(nowhere)?;
        let address = addresses.next().await.ok_or_else(nowhere)?;
        let peer = peer(provider, address, Via::Pool, provider.timers.connect);
        let mut wire = self.wires.open(peer).await?;
        if wire.session.as_http1().is_some() && !asked(&mut wire.session, provider).await? {
            return Ok(Found::Unkept);
        }
        self.wires.give_back(wire, true).await;
        // Attempts are to go where the connection is.
        addresses.prefer(address, clock::now());
        Ok(Found::Kept)
    }
}

/// Asks the provider's free question and hears the whole answer; `false`: it has none.
async fn asked(session: &mut HttpSession, provider: &Provider) -> pingora::Result<bool> {
    let Some(check) = &provider.check else { return Ok(false) };
    let mut question = RequestHeader::build("GET", check.path.as_bytes(), Some(2))?;
    question.insert_header(HOST, provider.base.authority.as_str())?;
    question.insert_header(USER_AGENT, concat!("tollgate/", env!("CARGO_PKG_VERSION")))?;
    session.write_request_header(Box::new(question)).await?;
    session.finish_request_body().await?;
    while !next_final_piece(session).await?.is_end() {}
    Ok(true)
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
