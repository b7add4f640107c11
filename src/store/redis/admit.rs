//! Admission: revocation, all limits and the hold, in one call.

use std::time::Duration;

use filters::ids::{AccountId, KeyDigest};
use filters::limit::budget::{Budget, Period, Windows};
use filters::limit::{Kind, Limits, Over, Scopes, Standing};
use filters::money::Amount;
use filters::purse::Standings;

use super::node::Lane;
use super::pools::Fence;
use super::words::{Words, put_hex, put_number};
use super::{AMOUNT_MAX, Answer, Redis, RedisError, money, shard_of};
use crate::journal::record::Lent;
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
        let shard = shard_of(AccountId(admission.hold.account));
        if admission.pool.shard != shard {
            return Err(RedisError::NoSuch.into());
        }
        let parts = parts_of(admission);
        let words = words_of(admission, &parts)?;
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
        let base = self.base(shard_of(account));
        let mut key = format!("{base}:b:").into_bytes();
        scope.name(account).put(&mut key);
        key.push(b':');
        Window(*period, *begins_ms).put(&mut key);
        let mut cmd = redis::cmd("SET");
        let spent = spent.clamp(Amount::ZERO, AMOUNT_MAX).nano();
        cmd.arg(key.as_slice()).arg(spent).arg("PXAT").arg(kept_until(*begins_ms, *ends_ms)).arg("NX");
        self.command(Lane::Background, &base, &cmd).await.map(|_| ())
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
        words.number(money(spent).ok_or(RedisError::NoSuch)?);
        for budget in budgets {
            words.put(|out| budget.scope.name(account).put(out));
            words.put(|out| Window(budget.period, budget.begins_ms).put(out));
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

impl Name<'_> {
    fn put(&self, out: &mut Vec<u8>) {
        let Self(of, AccountId(account)) = self;
        match of {
            Of::Key(digest) => {
                out.push(b'k');
                put_hex(out, &digest.0);
            }
            Of::Account => {
                out.push(b'a');
                put_number(out, *account);
            }
            Of::Model(model) => {
                out.push(b'm');
                put_number(out, *account);
                out.push(b':');
                out.extend_from_slice(model.as_bytes());
            }
        }
    }
}

/// A window's part of a key's name.
struct Window(Period, i64);

impl Window {
    fn put(&self, out: &mut Vec<u8>) {
        let Self(period, begins_ms) = self;
        out.push(match period {
            Period::Day => b'd',
            Period::Month => b'm',
        });
        put_number(out, *begins_ms);
    }
}

/// As `verbs.admit` in `library.lua` reads it.
fn words_of(admission: &Admission<'_>, parts: &[Part<'_>]) -> Result<Words, RedisError> {
    let hold = admission.hold;
    let mut words = Words::with_capacity(WORDS + parts.len() * PART_WORDS, BYTES + parts.len() * PART_BYTES);
    words.number(admission.pool.epoch);
    words.hex(&hold.id.to_be_bytes());
    words.number(money(Amount::from_nano(hold.amount.max(0))).ok_or(RedisError::NoSuch)?);
    words.number(hold.account);
    words.number(admission.boot);
    words.number(admission.lifetime.as_millis());
    words.hex(&hold.key);
    let record = Lent::PooledHold(admission.pool, hold);
    words.try_put(|out| record.encode(out).map_err(|_| RedisError::NoSuch))?;
    words.push(hold.model.as_bytes());
    parts.iter().for_each(|part| part.write(admission, &mut words));
    Ok(words)
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
        words.put(|out| Name(self.scope, AccountId(admission.hold.account)).put(out));
        words.push(model.as_bytes());
        words.number_if(number(*requests_per_minute));
        words.number_if(number(*tokens_per_minute));
        words.number_if(number(Some(tokens)));
        words.number_if(number(*concurrency));
        words.number(budgets.len());
        for budget in budgets {
            let Windows { before_ms, begins_ms, ends_ms } = budget.windows(admission.hold.at_ms);
            // What may be spent already so that this call still fits; nothing at all when it is too much alone.
            let room = budget.amount.checked_sub(Amount::from_nano(admission.hold.amount.max(0)));
            let room = room.filter(|room| *room >= Amount::ZERO).map(|room| room.min(AMOUNT_MAX));
            words.put(|out| Window(budget.period, begins_ms).put(out));
            words.put(|out| Window(budget.period, before_ms).put(out));
            words.number_if(room.map(Amount::nano));
            words.number(kept_until(begins_ms, ends_ms));
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

/// A counter is kept for one more window than its own, so that the next one knows that nothing came before it.
fn kept_until(begins_ms: i64, ends_ms: i64) -> i64 {
    ends_ms.saturating_add(ends_ms.saturating_sub(begins_ms)).min(END_MS_MAX)
}

#[cfg(test)]
mod tests {
    use std::fmt::{self, Display};

    use data_encoding::HEXLOWER;
    use filters::limit::budget::Zone;
    use proptest::prelude::*;

    use super::*;
    use crate::journal::record::{self, Record};

    /// The words of an admission as they were when each was displayed; the calendar is asked for each window.
    fn displayed(admission: &Admission<'_>) -> Vec<Vec<u8>> {
        let Admission { hold, pool, boot, models, scopes, tokens, lifetime } = *admission;
        let mut words: Vec<Vec<u8>> = vec![];
        let mut show = |word: &dyn Display| words.push(word.to_string().into_bytes());
        show(&pool.epoch);
        show(&format_args!("{:032x}", hold.id));
        show(&hold.amount.max(0));
        show(&hold.account);
        show(&boot);
        show(&lifetime.as_millis());
        show(&HEXLOWER.encode_display(&hold.key));
        let mut frame = vec![];
        record::encode(&Record::of_hold(Hold { pool: Some(pool), ..hold.clone() }), &mut frame).unwrap();
        words.push(frame);
        words.push(hold.model.clone().into_bytes());
        let account = hold.account;
        let mut of = vec![
            (format!("k{}", HEXLOWER.encode(&hold.key)), "", &scopes.key),
            (format!("a{account}"), "", &scopes.account),
        ];
        for (index, model) in models.iter().enumerate() {
            if let Some(limits) = scopes.models.get(model).filter(|_| !models[..index].contains(model)) {
                of.push((format!("m{account}:{model}"), model, limits));
            }
        }
        for (name, model, limits) in of {
            let number = |limit: Option<u64>| limit.map_or(String::new(), |n| n.min(TOKENS_MAX).to_string());
            let taken = limits.tokens_per_minute.map_or(tokens, |limit| tokens.min(limit));
            let mut show = |word: &dyn Display| words.push(word.to_string().into_bytes());
            show(&name);
            show(&model);
            show(&number(limits.requests_per_minute));
            show(&number(limits.tokens_per_minute));
            show(&number(Some(taken)));
            show(&number(limits.concurrency));
            show(&limits.budgets.len());
            for budget in &limits.budgets {
                let letter = if budget.period == Period::Day { 'd' } else { 'm' };
                let (begins_ms, ends_ms) = budget.window(hold.at_ms);
                let before = budget.window(begins_ms.saturating_sub(1)).0;
                let room = budget.amount.nano().checked_sub(hold.amount.max(0)).filter(|room| *room >= 0);
                show(&format_args!("{letter}{begins_ms}"));
                show(&format_args!("{letter}{before}"));
                show(&fmt::from_fn(|f| {
                    room.map_or(Ok(()), |room| write!(f, "{}", room.min(AMOUNT_MAX.nano())))
                }));
                show(&kept_until(begins_ms, ends_ms));
            }
        }
        words
    }

    fn budget() -> impl Strategy<Value = Budget> {
        let zone = prop::sample::select(vec!["UTC", "Asia/Tokyo", "Europe/Berlin", "Africa/Cairo"]);
        (any::<bool>(), any::<i64>(), zone).prop_map(|(month, nano, zone)| Budget {
            period: if month { Period::Month } else { Period::Day },
            amount: Amount::from_nano(nano),
            zone: Zone::find(zone).unwrap(),
        })
    }

    fn limits() -> impl Strategy<Value = Limits> {
        let of = (any::<Option<u64>>(), any::<Option<u64>>(), any::<Option<u64>>());
        (of, prop::collection::vec(budget(), 0..3)).prop_map(|((requests, tokens, concurrency), budgets)| {
            Limits { requests_per_minute: requests, tokens_per_minute: tokens, concurrency, budgets }
        })
    }

    proptest! {
        #[test]
        fn what_is_sent_is_what_was_sent_when_every_word_was_displayed(
            id: u128, account: i64, amount in i64::MIN..AMOUNT_MAX.nano(), key: [u8; 32], boot: i64, epoch: i64,
            at_ms in prop_oneof![0_i64..4_000_000_000_000, any::<i64>()], tokens: u64, seconds: u32,
            (of_key, of_account, of_model) in (limits(), limits(), limits()),
        ) {
            let models = ["gpt-é".to_owned(), "other".to_owned(), "gpt-é".to_owned()];
            let scopes = Scopes {
                key: of_key,
                account: of_account,
                models: [(models[0].clone(), of_model)].into(),
            };
            let hold = Hold {
                id, account, amount, at_ms, request: "r".to_owned(), model: models[0].clone(), key,
                price_version: 7, pool: None,
            };
            let admission = Admission {
                hold: &hold,
                pool: Pool { shard: shard_of(AccountId(account)), epoch },
                boot,
                models: &models,
                scopes: &scopes,
                tokens,
                lifetime: Duration::from_secs(seconds.into()),
            };
            let words = words_of(&admission, &parts_of(&admission)).unwrap();
            let mut cmd = words.room();
            words.add_to(&mut cmd);
            let mut expected = redis::Cmd::new();
            displayed(&admission).iter().for_each(|word| { expected.arg(word.as_slice()); });
            prop_assert_eq!(cmd.get_packed_command(), expected.get_packed_command());
        }
    }
}
