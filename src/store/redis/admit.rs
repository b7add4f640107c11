//! Admission: revocation, all limits and the hold, in one call.

use std::fmt::{self, Display};
use std::time::Duration;

use data_encoding::HEXLOWER;
use filters::ids::{AccountId, KeyDigest};
use filters::limit::budget::{Budget, Period};
use filters::limit::{Kind, Limits, Over, Scopes, Standing};
use filters::money::Amount;
use filters::purse::Standings;

use super::node::Lane;
use super::pools::Fence;
use super::words::Words;
use super::{AMOUNT_MAX, Answer, Redis, RedisError, money, shard_of};
use crate::journal::record::{self, Record};
use crate::journal::{Hold, Pool};

/// Lua counts tokens in doubles, which are exact up to here, and a minute's sum has room above it.
const TOKENS_MAX: u64 = 1 << 48;
/// What an admission is made of, and each of its scopes with a budget or two. Most find room in that at once.
const WORDS: usize = 9;
const BYTES: usize = 512;
const PART_WORDS: usize = 15;
const PART_BYTES: usize = 256;
/// Redis wants an end for every counter: the year 9999, for windows that have none.
const END_MS_MAX: i64 = 253_402_300_799_000;

/// A hold to place.
#[derive(Clone, Copy, Debug)]
pub struct Admission<'a> {
    /// Its record. It goes along, for whoever has to end it when this node is gone.
    pub hold: &'a Hold,
    /// The pool that it is to be placed in.
    pub pool: Pool,
    /// Of this node's process.
    pub boot: i64,
    /// The models that may serve it: every one has to have room.
    pub models: &'a [String],
    pub scopes: &'a Scopes,
    /// Tokens that it may use.
    pub tokens: u64,
    /// Without a touch it is overdue after so long.
    pub lifetime: Duration,
}

/// A hold that was placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admitted {
    /// How requests and tokens per minute stand, where they are limited.
    pub standings: Standings,
    /// What is left in the pool.
    pub available: Amount,
}

/// Why no hold was placed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RedisDeny {
    /// The pool cannot carry it.
    #[error("the pool cannot carry the hold")]
    Funds {
        /// What is there.
        available: Amount,
    },
    /// A limit of the key, of its account, or of the account with this model.
    #[error("over the limit of {scope}: {}", over.kind.word())]
    Limited {
        /// Whose.
        scope: &'static str,
        /// Which, and until when.
        over: Over,
    },
    /// The key was revoked.
    #[error("the key was revoked")]
    Revoked,
    /// The same hold was ended before it came, or placed with another amount.
    #[error("the hold has ended before")]
    Closed,
    /// Another process, or another epoch.
    #[error("redis is another one than before: {0}")]
    Stale(Fence),
    /// What was spent in these budgets is not known here: restore them, and admit again.
    #[error("the spend of a budget is unknown")]
    BudgetUnknown(Vec<UnknownBudget>),
    /// No answer. It may have been placed: use another id from now on, and void this one.
    #[error("redis did not answer in time")]
    TimedOut,
    /// Nothing was placed.
    #[error(transparent)]
    Unavailable(RedisError),
}

/// Whose limits.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    Key(KeyDigest),
    Account,
    /// Of the account, with this model.
    Model(String),
}

/// A budget's window whose spend is unknown.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct UnknownBudget {
    pub scope: Scope,
    pub period: Period,
    /// When the window begins, in milliseconds since 1970.
    pub begins_ms: i64,
    pub ends_ms: i64,
}

impl From<RedisError> for RedisDeny {
    fn from(error: RedisError) -> Self {
        match error {
            RedisError::Stale(fence) => Self::Stale(fence),
            error if error.may_have_run() => Self::TimedOut,
            error => Self::Unavailable(error),
        }
    }
}

impl Redis {
    /// Places a hold, if its key is good and every limit and the pool have room; all of it, or nothing. The same
    /// once more (its answer was lost) answers the same and takes nothing again.
    ///
    /// # Errors
    /// [`RedisDeny`]; nothing was placed, unless it says [`RedisDeny::TimedOut`].
    pub async fn admit(&self, admission: &Admission<'_>) -> Result<Admitted, RedisDeny> {
        let hold = admission.hold;
        let account = AccountId(hold.account);
        let shard = shard_of(account);
        if admission.pool.shard != shard {
            return Err(RedisError::NoSuch.into());
        }
        let parts = parts_of(admission);
        let mut words =
            Words::with_capacity(WORDS + parts.len() * PART_WORDS, BYTES + parts.len() * PART_BYTES);
        words.show(admission.pool.epoch);
        words.show(hold_name(hold.id));
        words.show(money(Amount::from_nano(hold.amount.max(0))).ok_or(RedisError::NoSuch)?);
        words.show(hold.account);
        words.show(admission.boot);
        words.show(admission.lifetime.as_millis());
        words.show(HEXLOWER.encode_display(&hold.key));
        words.push_with(|out| record_of(admission, out))?;
        words.push(hold.model.as_bytes());
        parts.iter().for_each(|part| part.write(admission, &mut words));
        let answer = self.ask(Lane::Request, shard, "admit", &words).await?;
        read(answer, admission, &parts)
    }

    /// Tells a budget what was spent in its window, as the ledger knows it. The first word counts.
    ///
    /// # Errors
    /// [`RedisError`].
    pub async fn restore_budget(
        &self,
        account: AccountId,
        budget: &UnknownBudget,
        spent: Amount,
    ) -> Result<(), RedisError> {
        let UnknownBudget { scope, period, begins_ms, ends_ms } = budget;
        let name = format!("{}:{}", scope.name(account), Window(*period, *begins_ms));
        let key = format!("{}:b:{name}", self.base(shard_of(account)));
        let mut cmd = redis::cmd("SET");
        let spent = spent.clamp(Amount::ZERO, AMOUNT_MAX).nano();
        cmd.arg(&key).arg(spent).arg("PXAT").arg(kept_until(*begins_ms, *ends_ms)).arg("NX");
        self.command(Lane::Background, &key, &cmd).await.map(|_| ())
    }

    /// Adds to budgets what was spent elsewhere, for a call that a node paid from money of its own. Budgets that
    /// are not known here stay unknown: the ledger knows.
    ///
    /// # Errors
    /// [`RedisError`].
    pub async fn spend_budgets(
        &self,
        account: AccountId,
        budgets: &[UnknownBudget],
        spent: Amount,
    ) -> Result<(), RedisError> {
        let mut words = Words::default();
        words.show(money(spent).ok_or(RedisError::NoSuch)?);
        for budget in budgets {
            words.show(budget.scope.name(account));
            words.show(Window(budget.period, budget.begins_ms));
        }
        self.ask(Lane::Background, shard_of(account), "spent", &words).await?.good().map(|_| ())
    }
}

/// One scope of a call, as it is sent.
struct Part<'a> {
    scope: Of<'a>,
    limits: &'a Limits,
}

/// A [`Scope`] that is only looked at.
#[derive(Clone, Copy)]
enum Of<'a> {
    Key(KeyDigest),
    Account,
    Model(&'a str),
}

/// Key and account, also without limits, so that their places are fixed; then models that are limited.
fn parts_of<'a>(admission: &Admission<'a>) -> Vec<Part<'a>> {
    let Admission { hold, models, scopes, .. } = *admission;
    let mut parts = vec![
        Part { scope: Of::Key(KeyDigest(hold.key)), limits: &scopes.key },
        Part { scope: Of::Account, limits: &scopes.account },
    ];
    for (index, model) in models.iter().enumerate() {
        let earlier = models.get(..index).unwrap_or_default();
        if let Some(limits) = scopes.models.get(model).filter(|_| !earlier.contains(model)) {
            parts.push(Part { scope: Of::Model(model), limits });
        }
    }
    parts
}

impl Scope {
    /// Its part of a key's name.
    fn name(&self, account: AccountId) -> Name<'_> {
        let of = match self {
            Self::Key(digest) => Of::Key(*digest),
            Self::Account => Of::Account,
            Self::Model(model) => Of::Model(model),
        };
        Name(of, account)
    }
}

impl Of<'_> {
    fn scope(self) -> Scope {
        match self {
            Self::Key(digest) => Scope::Key(digest),
            Self::Account => Scope::Account,
            Self::Model(model) => Scope::Model(model.to_owned()),
        }
    }

    const fn word(self) -> &'static str {
        match self {
            Self::Key(_) => "key",
            Self::Account => "account",
            Self::Model(_) => "account and model",
        }
    }
}

/// A scope's part of a key's name.
struct Name<'a>(Of<'a>, AccountId);

impl Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(of, account) = self;
        match of {
            Of::Key(digest) => write!(f, "k{}", HEXLOWER.encode_display(&digest.0)),
            Of::Account => write!(f, "a{account}"),
            Of::Model(model) => write!(f, "m{account}:{model}"),
        }
    }
}

/// A window's part of a key's name.
struct Window(Period, i64);

impl Display for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(period, begins_ms) = self;
        let period = match period {
            Period::Day => 'd',
            Period::Month => 'm',
        };
        write!(f, "{period}{begins_ms}")
    }
}

impl Part<'_> {
    /// As `read_scopes` in `library.lua` reads it.
    fn write(&self, admission: &Admission<'_>, words: &mut Words) {
        let Limits { requests_per_minute, tokens_per_minute, concurrency, budgets } = self.limits;
        let number = |limit: Option<u64>| limit.map(|limit| limit.min(TOKENS_MAX));
        let model = match self.scope {
            Of::Model(model) => model,
            Of::Key(_) | Of::Account => "",
        };
        // More tokens than a minute has take the whole minute.
        let tokens = tokens_per_minute.map_or(admission.tokens, |limit| admission.tokens.min(limit));
        words.show(Name(self.scope, AccountId(admission.hold.account)));
        words.push(model.as_bytes());
        words.show_some(number(*requests_per_minute));
        words.show_some(number(*tokens_per_minute));
        words.show_some(number(Some(tokens)));
        words.show_some(number(*concurrency));
        words.show(budgets.len());
        for budget in budgets {
            let (begins_ms, ends_ms) = budget.window(admission.hold.at_ms);
            let before = budget.window(begins_ms.saturating_sub(1)).0;
            // What may be spent already so that this call still fits; nothing at all when it is too much alone.
            let room = budget.amount.checked_sub(Amount::from_nano(admission.hold.amount.max(0)));
            let room = room.filter(|room| *room >= Amount::ZERO).map(|room| room.min(AMOUNT_MAX));
            words.show(Window(budget.period, begins_ms));
            words.show(Window(budget.period, before));
            words.show_some(room.map(Amount::nano));
            words.show(kept_until(begins_ms, ends_ms));
        }
    }
}

fn read(mut answer: Answer, admission: &Admission<'_>, parts: &[Part<'_>]) -> Result<Admitted, RedisDeny> {
    match answer.word.as_str() {
        "OK" => {
            let available = answer.amount()?;
            Ok(Admitted { standings: standings(&mut answer, admission.scopes)?, available })
        }
        "FUNDS" => Err(RedisDeny::Funds { available: answer.amount()? }),
        "REVOKED" => Err(RedisDeny::Revoked),
        "CLOSED" => Err(RedisDeny::Closed),
        "STALE" => Err(RedisDeny::Stale(answer.fence()?)),
        "OVER" => {
            let part = part(&mut answer, parts)?;
            let kind = answer.text()?;
            let over = match kind.as_str() {
                "R" => Over { kind: Kind::Requests, retry_after: wait(&mut answer)? },
                "T" => Over { kind: Kind::Tokens, retry_after: wait(&mut answer)? },
                "C" => Over { kind: Kind::Concurrency, retry_after: wait(&mut answer)? },
                "B" => {
                    let at_ms = admission.hold.at_ms;
                    let wait = budget(&mut answer, part)?.window(at_ms).1.saturating_sub(at_ms);
                    let retry_after = Duration::from_millis(u64::try_from(wait).unwrap_or_default());
                    Over { kind: Kind::Budget, retry_after }
                }
                _ => return Err(RedisError::Unreadable.into()),
            };
            Err(RedisDeny::Limited { scope: part.scope.word(), over })
        }
        "UNKNOWN" => {
            let mut unknown = vec![];
            while !answer.is_empty() {
                let part = part(&mut answer, parts)?;
                let budget = budget(&mut answer, part)?;
                let (begins_ms, ends_ms) = budget.window(admission.hold.at_ms);
                let scope = part.scope.scope();
                unknown.push(UnknownBudget { scope, period: budget.period, begins_ms, ends_ms });
            }
            Err(RedisDeny::BudgetUnknown(unknown))
        }
        _ => Err(RedisError::Unreadable.into()),
    }
}

fn wait(answer: &mut Answer) -> Result<Duration, RedisError> {
    answer.number().map(Duration::from_millis)
}

/// Lua counts from one.
fn part<'a>(answer: &mut Answer, parts: &'a [Part<'a>]) -> Result<&'a Part<'a>, RedisError> {
    let index: usize = answer.number()?;
    parts.get(index.wrapping_sub(1)).ok_or(RedisError::Unreadable)
}

fn budget<'a>(answer: &mut Answer, part: &'a Part<'a>) -> Result<&'a Budget, RedisError> {
    let index: usize = answer.number()?;
    part.limits.budgets.get(index.wrapping_sub(1)).ok_or(RedisError::Unreadable)
}

/// Requests and tokens of key and account; of each the one with less left. As `standing` in `library.lua` writes them.
fn standings(answer: &mut Answer, scopes: &Scopes) -> Result<Standings, RedisError> {
    let text = answer.text()?;
    let mut numbers = text.split(' ');
    let mut standing = |limit: Option<u64>| -> Result<Option<Standing>, RedisError> {
        let (Some(sum), Some(reset)) = (numbers.next(), numbers.next()) else {
            return Err(RedisError::Unreadable);
        };
        let Some(limit) = limit else { return Ok(None) };
        let sum: u64 = sum.parse().map_err(|_| RedisError::Unreadable)?;
        let reset_ms: u64 = reset.parse().map_err(|_| RedisError::Unreadable)?;
        let remaining = limit.saturating_sub(sum);
        Ok(Some(Standing { limit, remaining, reset_seconds: reset_ms.div_ceil(1000) }))
    };
    let key = (standing(scopes.key.requests_per_minute)?, standing(scopes.key.tokens_per_minute)?);
    let account =
        (standing(scopes.account.requests_per_minute)?, standing(scopes.account.tokens_per_minute)?);
    let tighter =
        |a: Option<Standing>, b: Option<Standing>| a.into_iter().chain(b).min_by_key(|s| s.remaining);
    Ok((tighter(key.0, account.0), tighter(key.1, account.1)))
}

fn record_of(admission: &Admission<'_>, out: &mut Vec<u8>) -> Result<(), RedisError> {
    let hold = Hold { pool: Some(admission.pool), ..admission.hold.clone() };
    record::encode(&Record::of_hold(hold), out).map_err(|_| RedisError::NoSuch)
}

/// A counter is kept for one more window than its own, so that the next one knows that nothing came before it.
fn kept_until(begins_ms: i64, ends_ms: i64) -> i64 {
    ends_ms.saturating_add(ends_ms.saturating_sub(begins_ms)).min(END_MS_MAX)
}

/// A hold's name in Redis.
pub(super) fn hold_name(id: u128) -> impl Display {
    fmt::from_fn(move |f| write!(f, "{id:032x}"))
}
