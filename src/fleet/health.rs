//! How upstreams do, shared by all nodes.
//!
//! One task carries the news of this node's board to Redis and the fleet's word back
//! ([`filters::upstream::fleet`]), off the path of requests: every 200 ms if there are any, and at once when a call has
//! failed, a probe begins or somebody waits for a claim. What changes is announced to all nodes; every second
//! each asks for everything, so that an announcement which nobody heard is made good for. One call is all that
//! either takes, to one verb in `share.lua`. Time is the server's, and travels as durations.
//!
//! Names travel, not numbers: nodes may have different catalogues for a while. A credential is named by a digest
//! of its secret, so that a rest ends where it is replaced and reaches no node that has another one.
//!
//! News that were not answered are told again under the same number, which the verb counts once. When Redis is away
//! the board is told so, and decides by itself as on a single node.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use filters::ids::{CredentialId, EndpointId, ModelId};
use filters::upstream::board::{Board, Notice};
use filters::upstream::fleet::{
    Ask, Generation, HealthWord, Heard, News, Phase, PlaceNews, PlaceWord, RestNews, RestWord,
};
use filters::upstream::rest::Cause;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tokio::sync::mpsc;

use crate::digits::first_digits;
use crate::ops::heartbeat;
use crate::pool::{Pool, Snapshot};
use crate::store::redis::{News as Message, Redis, RedisError};
use crate::{clock, entropy};

/// Where everything that is not an account's is kept.
pub const SHARD: u16 = 0;
/// News that can wait are told so often.
const ROUND: Duration = Duration::from_millis(200);
/// Urgent ones so often at most.
const ROUND_MIN: Duration = Duration::from_millis(5);
/// And everything is asked for so often.
const POLL: Duration = Duration::from_secs(1);
/// News that have not been answered for so long are none any more.
const NEWS_AGE_MAX: Duration = Duration::from_secs(5);
/// Announcements that wait to be taken in.
const HEARD_MAX: usize = 256;

/// The task of one node.
pub struct Health {
    redis: Redis,
    pool: Arc<Pool>,
    /// As what this process is known to the others.
    node: String,
}

/// What the task remembers.
struct State {
    number: u64,
    unanswered: Option<(Instant, Telling)>,
    /// When everything was asked for, of which snapshot.
    polled: Option<(Instant, Arc<Snapshot>)>,
    is_heard: bool,
}

/// One call: what `verbs.tell` is told.
#[derive(Clone, Debug, Default, Serialize)]
struct Telling {
    node: String,
    number: u64,
    /// For the jitter of an open time.
    chance: f64,
    all: bool,
    places: HashMap<String, PlaceTold>,
    rests: HashMap<String, RestSaid>,
    served: HashMap<String, bool>,
    gates: HashMap<String, Asked>,
}

#[derive(Clone, Debug, Serialize)]
struct PlaceTold {
    generation: String,
    good: u32,
    bad: u32,
    units: u32,
    tail: u32,
    streak: u32,
    needed: bool,
    check_passed: bool,
    rest: u64,
    #[serde(flatten)]
    asked: Option<Asked>,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Asked {
    ask: &'static str,
    hold: u64,
}

/// A rest, either way.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct RestSaid {
    cause: RestCause,
    left: u64,
    times: u32,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum RestCause {
    RateLimit,
    Credential,
}

/// What the verb answers.
#[derive(Debug, Deserialize)]
struct Answer {
    places: HashMap<String, PlaceSaid>,
    rests: HashMap<String, RestSaid>,
    /// Milliseconds.
    claims: HashMap<String, u64>,
    gates: HashMap<String, u64>,
}

/// What it announces.
#[derive(Debug, Deserialize)]
struct Announcement {
    places: HashMap<String, PlaceSaid>,
    rests: HashMap<String, RestSaid>,
    served: HashMap<String, bool>,
}

#[derive(Debug, Deserialize)]
struct PlaceSaid {
    generation: String,
    phase: char,
    left: u64,
    by_rate: bool,
    openings: u32,
    rest: u64,
    good: f64,
    bad: f64,
    fast: f64,
    reopened: i64,
}

impl Health {
    /// For the upstreams of this pool.
    #[must_use]
    pub fn new(redis: Redis, pool: Arc<Pool>) -> Self {
        let node = entropy::hold_id().to_string();
        Self { redis, pool, node }
    }

    /// Never ends: run it as a service.
    pub async fn run(&self) {
        let (sender, heard) = mpsc::channel(HEARD_MAX);
        let channels = [self.redis.channel(SHARD, "health")];
        tokio::join!(self.redis.listen(&channels, sender), self.rounds(heard));
    }

    async fn rounds(&self, mut heard: mpsc::Receiver<Message>) {
        let mut state = State { number: 0, unanswered: None, polled: None, is_heard: false };
        let mut last = clock::now();
        let job = heartbeat::job("health", ROUND);
        loop {
            let snapshot = self.pool.load();
            let bell = snapshot.upstreams.bell();
            tokio::select! {
                message = heard.recv() => {
                    match message {
                        Some(Message::Message { payload, .. }) => hear_announcement(&snapshot, &payload),
                        Some(Message::Missed) => state.polled = None,
                        None => return,
                    }
                    continue;
                }
                () = bell.urgent.notified() => {}
                () = tokio::time::sleep_until((last + ROUND).into()) => {}
            }
            tokio::time::sleep_until((last + ROUND_MIN).into()).await;
            last = clock::now();
            self.round(&snapshot, &mut state).await;
            job.done();
            bell.heard.notify_waiters();
        }
    }

    /// Tells what there is to tell, and hears what is said.
    async fn round(&self, snapshot: &Arc<Snapshot>, state: &mut State) {
        if self.redis.is_shard_open(SHARD) {
            return lost(snapshot, state, &RedisError::Open);
        }
        let now = clock::now();
        let fresh = |at: Instant| now.saturating_duration_since(at) < POLL;
        let all = !state.polled.as_ref().is_some_and(|(at, of)| fresh(*at) && Arc::ptr_eq(of, snapshot));
        state.unanswered.take_if(|(at, _)| now.saturating_duration_since(*at) > NEWS_AGE_MAX);
        let (since, mut telling) = match state.unanswered.take() {
            Some(unanswered) => unanswered,
            None => {
                state.number += 1;
                (now, self.telling(snapshot, state.number))
            }
        };
        telling.all = all;
        if telling.is_empty() && !all {
            return;
        }
        let asked = serde_json::to_vec(&telling).unwrap_or_default();
        match self.redis.call(SHARD, "tell", &[asked]).await.and_then(|answer| read(&answer)) {
            Ok(answer) => {
                if !std::mem::replace(&mut state.is_heard, true) {
                    tracing::info!("health is shared with the other nodes");
                }
                hear_answer(snapshot, now, all, &telling, &answer);
                if all {
                    state.polled = Some((now, Arc::clone(snapshot)));
                }
            }
            Err(error) => {
                state.unanswered = Some((since, telling));
                if self.redis.is_shard_open(SHARD) || !matches!(error, RedisError::TimedOut) {
                    lost(snapshot, state, &error);
                }
            }
        }
    }

    fn telling(&self, snapshot: &Snapshot, number: u64) -> Telling {
        let News { places, rests, gates } = snapshot.upstreams.with_board(Board::news);
        let chance = entropy::with_rng(filters::upstream::backoff::fraction);
        let mut telling = Telling { node: self.node.clone(), number, chance, ..Telling::default() };
        for place in places {
            if let Some(name) = snapshot.catalogue.endpoints.get(place.place.0).map(|it| it.name.clone()) {
                telling.places.insert(name, PlaceTold::of(&place));
            }
        }
        for rest in rests {
            match rest {
                RestNews::Rests { credential, rest } => {
                    if let (Some(name), Some(rest)) =
                        (credential_name(snapshot, credential), RestSaid::of(rest))
                    {
                        telling.rests.insert(name, rest);
                    }
                }
                RestNews::Served(credential) => {
                    telling.served.extend(credential_name(snapshot, credential).map(|name| (name, true)));
                }
            }
        }
        let names = if gates.is_empty() { vec![] } else { snapshot.upstreams.gate_names() };
        let named = |(model, ask): (ModelId, Ask)| Some((names.get(model.0)?.clone(), Asked::of(ask)));
        telling.gates = gates.into_iter().filter_map(named).collect();
        telling
    }
}

impl Telling {
    fn is_empty(&self) -> bool {
        self.places.is_empty() && self.rests.is_empty() && self.served.is_empty() && self.gates.is_empty()
    }
}

impl PlaceTold {
    fn of(news: &PlaceNews) -> Self {
        let PlaceNews { place: _, generation, tally, needed, check_passed, rest, ask } = *news;
        Self {
            generation: generation.0.to_string(),
            good: tally.good,
            bad: tally.bad,
            units: tally.units,
            tail: tally.tail,
            streak: tally.streak,
            needed,
            check_passed,
            rest: rest.map_or(0, millis),
            asked: ask.map(Asked::of),
        }
    }
}

impl Asked {
    fn of(ask: Ask) -> Self {
        match ask {
            Ask::Want => Self { ask: "want", hold: 0 },
            Ask::Hold(span) => Self { ask: "hold", hold: millis(span) },
            Ask::Free => Self { ask: "free", hold: 0 },
        }
    }
}

impl RestSaid {
    fn of(word: RestWord) -> Option<Self> {
        let RestWord { cause, remaining, times } = word;
        let cause = match cause {
            Cause::RateLimit => RestCause::RateLimit,
            Cause::Credential => RestCause::Credential,
            // That is the place's.
            Cause::Endpoint => return None,
        };
        Some(Self { cause, left: millis(remaining), times })
    }

    fn word(self) -> RestWord {
        let Self { cause, left, times } = self;
        let cause = match cause {
            RestCause::RateLimit => Cause::RateLimit,
            RestCause::Credential => Cause::Credential,
        };
        RestWord { cause, remaining: Duration::from_millis(left), times }
    }
}

impl PlaceSaid {
    fn word(&self) -> Option<PlaceWord> {
        let Self { generation, phase, left, by_rate, openings, rest, good, bad, fast, reopened } = self;
        let phase = match phase {
            'c' => Phase::Closed,
            'o' => Phase::Open(Duration::from_millis(*left)),
            'h' => Phase::HalfOpen(u32::try_from(*left).ok()?),
            _ => return None,
        };
        let reopened = u64::try_from(*reopened).ok().map(Duration::from_millis);
        Some(PlaceWord {
            generation: Generation(generation.parse().ok()?),
            phase,
            by_rate: *by_rate,
            openings: *openings,
            rest: Duration::from_millis(*rest),
            health: HealthWord { good: *good, bad: *bad, fast: *fast, reopened },
        })
    }
}

/// The fleet cannot be heard.
fn lost(snapshot: &Snapshot, state: &mut State, error: &RedisError) {
    snapshot.upstreams.with_board(|board, _| board.alone());
    state.polled = None;
    if std::mem::replace(&mut state.is_heard, false) {
        tracing::warn!(%error, "health is not shared: this node judges upstreams by itself");
    }
}

fn read(answer: &[Vec<u8>]) -> Result<Answer, RedisError> {
    let text = answer.get(1).ok_or(RedisError::Unreadable)?;
    serde_json::from_slice(text).map_err(|error| {
        tracing::error!(%error, "the fleet's word on upstreams cannot be read");
        RedisError::Unreadable
    })
}

/// `now`: when the question was sent; so a claim never ends later here than there.
fn hear_answer(snapshot: &Snapshot, now: Instant, all: bool, telling: &Telling, answer: &Answer) {
    let until = |left: &u64| (*left > 0).then(|| now + Duration::from_millis(*left));
    let gates = if answer.gates.is_empty() { vec![] } else { snapshot.upstreams.gate_names() };
    let credentials = if all { credentials(snapshot) } else { vec![] };
    let notices = snapshot.upstreams.with_board(|board, _| {
        board.joined();
        let mut notices = vec![];
        for (place, name) in places(snapshot) {
            match answer.places.get(name).and_then(PlaceSaid::word) {
                Some(word) => notices.push((place, board.hear_place(now, place, &word, Heard::Answer))),
                None if all => board.hear_nothing_of(place),
                None => {}
            }
            if let Some(left) = answer.claims.get(name) {
                board.claimed(place, until(left));
            }
        }
        for (at, name) in gates.iter().enumerate() {
            if let Some(left) = answer.gates.get(name) {
                board.gate_claimed(ModelId(at), until(left));
            }
        }
        for (credential, name) in credentials {
            // What is told in this same call may be in the answer or not: it is known here anyway.
            if !telling.rests.contains_key(&name) {
                board.hear_rest(now, credential, answer.rests.get(&name).map(|rest| rest.word()));
            }
        }
        notices
    });
    say(snapshot, notices);
}

fn hear_announcement(snapshot: &Snapshot, payload: &[u8]) {
    let Ok(Announcement { places: said, rests, served }) = serde_json::from_slice(payload) else {
        tracing::error!("an announcement on upstreams cannot be read");
        return;
    };
    let named = if rests.is_empty() && served.is_empty() { vec![] } else { credentials(snapshot) };
    let notices = snapshot.upstreams.with_board(|board, now| {
        let mut notices = vec![];
        for (place, name) in places(snapshot) {
            if let Some(word) = said.get(name).and_then(PlaceSaid::word) {
                notices.push((place, board.hear_place(now, place, &word, Heard::Announcement)));
            }
        }
        for (credential, name) in named {
            if let Some(rest) = rests.get(&name) {
                board.hear_rest(now, credential, Some(rest.word()));
            } else if served.contains_key(&name) {
                board.hear_rest(now, credential, None);
            }
        }
        notices
    });
    say(snapshot, notices);
}

fn say(snapshot: &Snapshot, notices: Vec<(EndpointId, Option<Notice>)>) {
    for (place, notice) in notices {
        snapshot.upstreams.say(notice, place);
    }
}

fn places(snapshot: &Snapshot) -> impl Iterator<Item = (EndpointId, &str)> {
    let endpoints = snapshot.catalogue.endpoints.iter().enumerate();
    let first = endpoints.filter(|(at, endpoint)| endpoint.place == EndpointId(*at));
    first.map(|(at, endpoint)| (EndpointId(at), endpoint.name.as_str()))
}

/// All credentials, each once, by what they are called in the fleet.
fn credentials(snapshot: &Snapshot) -> Vec<(CredentialId, String)> {
    let ids = snapshot.upstreams.with_board(|board, _| {
        let mut ids: Vec<_> = board.layout().endpoints.iter().map(|spec| spec.credential).collect();
        ids.sort_unstable_by_key(|id| (id.provider, id.index));
        ids.dedup();
        ids
    });
    ids.into_iter().filter_map(|id| Some((id, credential_name(snapshot, id)?))).collect()
}

/// The provider, and the beginning of a digest of the secret: nobody can tell the secret from it, and everybody
/// whether it is the same.
fn credential_name(snapshot: &Snapshot, id: CredentialId) -> Option<String> {
    let at = snapshot
        .upstreams
        .with_board(|board, _| board.layout().endpoints.iter().position(|spec| spec.credential == id))?;
    let endpoint = snapshot.catalogue.endpoints.get(at)?;
    let mut digest = Sha256::new();
    digest.update(endpoint.provider.name.as_bytes());
    digest.update([0]);
    if let Some(credential) = endpoint.credential() {
        digest.update(credential.held().secret.expose().as_bytes());
    }
    Some(format!("{}#{}", endpoint.provider.name, first_digits(&digest.finalize(), 8)))
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}
