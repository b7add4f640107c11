//! Who waits out what: the upstream's own word about when to come back.
//!
//! **Reading it.** Providers say it in six ways: `retry-after-ms`, `retry-after` in seconds (whole or not) or
//! as an HTTP date, and `x-ratelimit-reset-requests/-tokens` as `6m0s`, as seconds, as an epoch or as RFC 3339
//! (`anthropic-ratelimit-*-reset`). The plain ones win; of the resets those count whose `remaining` is 0, the
//! longest of them; if none is said to be used up, the shortest. Whatever is said is at most 10 min, never
//! negative, and nonsense is nothing: an upstream must not be able to switch itself off for a week.
//!
//! **Acting on it.** A 429 rests the *credential*: the quota is the credential's, and an endpoint that shares
//! it is as much out of it. So does trouble with the credential itself (401, 402, quota used up), with an
//! alarm, since only a human can mend that; 1 min doubling to 10, so that a mended one is found. An error
//! that names a time rests the *endpoint*. A 429 without a time ("silent") rests 1 s, doubling to 30 s while
//! they go on; one whose time was too short doubles likewise, from 100 ms to 1 s.
//!
//! When a rest is over, the first call that is let in is a **trial**: until it has succeeded the others keep
//! the credential last. Otherwise a provider that throttles slowly and silently would get its whole
//! traffic back every few seconds only to refuse it.
//!
//! Deliberately absent: the breaker. A credential without quota says nothing about the endpoint.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::ids::{CredentialId, EndpointId};
use crate::upstream::fleet::RestWord;

/// The longest rest that an upstream can ask for.
pub const REST_MAX: Duration = Duration::from_secs(600);
const SILENT_MIN: Duration = Duration::from_secs(1);
const SILENT_MAX: Duration = Duration::from_secs(30);
const TROUBLE_MIN: Duration = Duration::from_secs(60);
/// Where a shorter wait than this was named and turned out too short, it is doubled, to a second at most.
const TOLD_MIN: Duration = Duration::from_millis(100);

/// Seconds since 1970, by the edge's wall clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct UnixSeconds(pub u64);

/// When an upstream wants to be asked again. `header` looks a header up by its lower-case name.
#[must_use]
pub fn wait<'a>(header: impl Fn(&str) -> Option<&'a str>, now: UnixSeconds) -> Option<Duration> {
    let plain = |name: &str, unit: f64| header(name).and_then(|text| seconds(text, unit));
    plain("retry-after-ms", 0.001)
        .or_else(|| plain("retry-after", 1.0))
        .or_else(|| header("retry-after").and_then(|text| until(imf_fixdate(text)?, now)))
        .or_else(|| resets(&header, now))
        .map(|wait| wait.min(REST_MAX))
}

/// Whether a header of this lower-case name may have a part in [`wait`]: most answers have none, and looking up
/// sixteen names in vain costs more than looking at those that are there.
#[must_use]
pub fn may_tell(name: &str) -> bool {
    name.starts_with("retry-after") || name.contains("ratelimit")
}

/// Pairs of "remaining" and "reset".
const RESETS: [(&str, &str); 7] = [
    ("x-ratelimit-remaining", "x-ratelimit-reset"),
    ("x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"),
    ("x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"),
    ("anthropic-ratelimit-requests-remaining", "anthropic-ratelimit-requests-reset"),
    ("anthropic-ratelimit-tokens-remaining", "anthropic-ratelimit-tokens-reset"),
    ("anthropic-ratelimit-input-tokens-remaining", "anthropic-ratelimit-input-tokens-reset"),
    ("anthropic-ratelimit-output-tokens-remaining", "anthropic-ratelimit-output-tokens-reset"),
];

fn resets<'a>(header: &impl Fn(&str) -> Option<&'a str>, now: UnixSeconds) -> Option<Duration> {
    let (mut used_up, mut any): (Option<Duration>, Option<Duration>) = (None, None);
    for (remaining, reset) in RESETS {
        let Some(wait) = header(reset).and_then(|text| reset_wait(text, now)) else { continue };
        if header(remaining).is_some_and(|text| text.trim() == "0") {
            used_up = Some(used_up.map_or(wait, |longest| longest.max(wait)));
        }
        any = Some(any.map_or(wait, |shortest| shortest.min(wait)));
    }
    used_up.or(any)
}

fn reset_wait(text: &str, now: UnixSeconds) -> Option<Duration> {
    /// What is larger is no duration but a date, in seconds (1973 and later) or milliseconds.
    const EPOCH_MIN: u64 = 100_000_000;
    const EPOCH_MS_MIN: u64 = 100_000_000_000;
    if let Some(plain) = seconds_unbounded(text, 1.0) {
        return match plain.as_secs() {
            0..EPOCH_MIN => Some(plain),
            date @ EPOCH_MIN..EPOCH_MS_MIN => until(UnixSeconds(date), now),
            date => until(UnixSeconds(date / 1000), now),
        };
    }
    compound(text).or_else(|| until(rfc3339(text)?, now))
}

fn until(then: UnixSeconds, now: UnixSeconds) -> Option<Duration> {
    Some(Duration::from_secs(then.0.saturating_sub(now.0)))
}

fn seconds(text: &str, unit: f64) -> Option<Duration> {
    seconds_unbounded(text, unit).map(|wait| wait.min(REST_MAX))
}

/// Digits with at most one point. Rust would also read `inf`, `1e9` and `-0`, which nobody means.
fn seconds_unbounded(text: &str, unit: f64) -> Option<Duration> {
    let text = text.trim();
    let plain = (1..=20).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    let number: f64 = if plain { text.parse().ok()? } else { return None };
    Some(Duration::try_from_secs_f64(number * unit).unwrap_or(Duration::MAX))
}

/// `1s`, `6m0s`, `120ms`, `1h2m3.5s`, as Go prints durations.
fn compound(text: &str) -> Option<Duration> {
    let mut rest = text.trim();
    let mut sum = Duration::ZERO;
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, tail) = rest.split_at_checked(digits)?;
        let letters = tail.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(tail.len());
        let (unit, next) = tail.split_at_checked(letters)?;
        let unit = match unit {
            "ms" => 0.001,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3_600.0,
            "d" => 86_400.0,
            _ => return None,
        };
        sum = sum.saturating_add(seconds_unbounded(number, unit)?);
        rest = next;
    }
    Some(sum)
}

/// `Sun, 06 Nov 1994 08:49:37 GMT` (RFC 9110, 5.6.7). The two obsolete forms are not read: no server of
/// this century sends them. The crate `httpdate` speaks the system clock's type, which this crate bans.
fn imf_fixdate(text: &str) -> Option<UnixSeconds> {
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let (_weekday, rest) = text.trim().split_once(", ")?;
    let mut parts = rest.split(' ');
    let day = parts.next()?.parse().ok()?;
    let name = parts.next()?;
    let month = MONTHS.iter().position(|month| *month == name)? + 1;
    let year = parts.next()?.parse().ok()?;
    let time = parts.next()?;
    if parts.next() != Some("GMT") || parts.next().is_some() {
        return None;
    }
    date(year, u64::try_from(month).ok()?, day, time, 0)
}

/// `2026-01-27T12:00:00Z`, with fractions and offsets.
fn rfc3339(text: &str) -> Option<UnixSeconds> {
    let (day, clock) = text.trim().split_once(['T', 't', ' '])?;
    let mut parts = day.splitn(3, '-');
    let mut part = || parts.next()?.parse::<u64>().ok();
    let (year, month, day) = (part()?, part()?, part()?);
    let zone = clock.find(['Z', 'z', '+', '-'])?;
    let (time, zone) = clock.split_at_checked(zone)?;
    let ahead = match zone {
        "Z" | "z" => 0,
        offset => {
            let (hours, minutes) = offset.get(1..)?.split_once(':')?;
            let (hours, minutes) = (hours.parse::<i64>().ok()?, minutes.parse::<i64>().ok()?);
            if !(0..24).contains(&hours) || !(0..60).contains(&minutes) {
                return None;
            }
            (hours * 60 + minutes) * 60 * if offset.starts_with('-') { -1 } else { 1 }
        }
    };
    date(year, month, day, time.split('.').next()?, ahead)
}

fn date(year: u64, month: u64, day: u64, time: &str, ahead: i64) -> Option<UnixSeconds> {
    let mut parts = time.splitn(3, ':');
    let mut part = || parts.next()?.parse::<u64>().ok();
    let (hour, minute, second) = (part()?, part()?, part()?);
    let sound = (1970..10_000).contains(&year)
        && (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && hour < 24
        && minute < 60
        && second <= 60;
    if !sound {
        return None;
    }
    // Days since 1 March of year 0 (Howard Hinnant's civil calendar); a year begins in March here.
    let (years, months) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = years * 365 + years / 4 - years / 100 + years / 400 + (153 * months + 2) / 5 + day - 1;
    let seconds = days.checked_sub(719_468)? * 86_400 + hour * 3_600 + minute * 60 + second;
    seconds.checked_add_signed(-ahead).map(UnixSeconds)
}

/// Why somebody rests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// 429.
    RateLimit,
    /// The provider does not accept our credential, or its plan is used up.
    Credential,
    /// The endpoint itself named a time.
    Endpoint,
}

/// Whether somebody may be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Yes.
    Free,
    /// Its rest is over but nothing has succeeded since; this call would be the trial.
    Trial,
    /// The same, and another call is the trial: only after everybody else.
    OnTrial,
    /// Not before.
    Resting {
        /// The moment.
        until: Instant,
        /// Why.
        cause: Cause,
    },
}

/// All rests of a node. Its maps are bounded by the catalogue.
#[derive(Clone, Debug, Default)]
pub struct Rests {
    credentials: HashMap<CredentialId, Rest>,
    endpoints: HashMap<EndpointId, Instant>,
}

#[derive(Clone, Copy, Debug)]
struct Rest {
    until: Instant,
    cause: Cause,
    /// In a row.
    times: u32,
    trial_until: Option<Instant>,
}

impl Rests {
    /// A 429: the credential rests. Answers until when.
    pub fn rate_limited(&mut self, now: Instant, id: CredentialId, wait: Option<Duration>) -> Instant {
        self.rest(now, id, Cause::RateLimit, |times| {
            let silent = SILENT_MIN.saturating_mul(1 << times.min(5)).min(SILENT_MAX);
            // "Now" is no time to come back at: it was now that it said 429. Nor is a moment that has been
            // tried and was too soon.
            let doublings = times.checked_sub(1).map(|doublings| doublings.min(4));
            let too_soon =
                doublings.map_or(Duration::ZERO, |n| TOLD_MIN.saturating_mul(1 << n).min(SILENT_MIN));
            wait.filter(|wait| !wait.is_zero()).map_or(silent, |wait| wait.max(too_soon))
        })
    }

    /// The credential is refused: it rests and somebody must look. Answers until when.
    pub fn refused(&mut self, now: Instant, id: CredentialId) -> Instant {
        self.rest(now, id, Cause::Credential, |times| TROUBLE_MIN.saturating_mul(1 << times.min(4)))
    }

    /// An endpoint's error named a time. Answers until when.
    pub fn endpoint_asked(&mut self, now: Instant, id: EndpointId, wait: Duration) -> Instant {
        let until = now + wait.min(REST_MAX);
        let rest = self.endpoints.entry(id).or_insert(until);
        *rest = until.max(*rest);
        *rest
    }

    /// Something was served with it. A rest that is not over stays: the answer began before it. Answers whether
    /// one of the credential was.
    pub fn served(&mut self, now: Instant, endpoint: EndpointId, id: CredentialId) -> bool {
        let was_over = self.hear_served(now, id);
        if self.endpoints.get(&endpoint).is_some_and(|until| *until <= now) {
            self.endpoints.remove(&endpoint);
        }
        was_over
    }

    /// Another node has served something with it, or the fleet knows of no rest. Answers whether there was one
    /// that is over.
    pub fn hear_served(&mut self, now: Instant, id: CredentialId) -> bool {
        let is_over = self.credentials.get(&id).is_some_and(|rest| rest.until <= now);
        if is_over {
            self.credentials.remove(&id);
        }
        is_over
    }

    /// Another node was told to let a credential rest: the longer rest counts.
    pub fn hear(&mut self, now: Instant, id: CredentialId, word: RestWord) {
        let RestWord { cause, remaining, times } = word;
        let until = now + remaining.min(REST_MAX);
        let known = self.credentials.get(&id);
        // A rest that is over, with nothing served since, is repeated as long as that is so.
        if known.is_none_or(|rest| rest.until < until && !remaining.is_zero()) {
            self.credentials.insert(id, Rest { until, cause, times, trial_until: None });
        }
    }

    /// How a credential rests.
    #[must_use]
    pub fn word(&self, now: Instant, id: CredentialId) -> Option<RestWord> {
        let Rest { until, cause, times, trial_until: _ } = *self.credentials.get(&id)?;
        Some(RestWord { cause, remaining: until.checked_duration_since(now)?, times })
    }

    /// Takes over what another has of an endpoint and its credential, under their new ids.
    pub fn adopt(&mut self, other: &Self, old: (EndpointId, CredentialId), new: (EndpointId, CredentialId)) {
        if let Some(until) = other.endpoints.get(&old.0) {
            self.endpoints.insert(new.0, *until);
        }
        if let Some(rest) = other.credentials.get(&old.1) {
            self.credentials.insert(new.1, *rest);
        }
    }

    /// The operator has put a new credential in its place.
    pub fn renewed(&mut self, id: CredentialId) {
        self.credentials.remove(&id);
    }

    /// Whether a route may be asked.
    #[must_use]
    pub fn standing(&self, now: Instant, endpoint: EndpointId, id: CredentialId) -> Standing {
        // Asked of every route of every call; mostly nobody rests.
        if self.endpoints.is_empty() && self.credentials.is_empty() {
            return Standing::Free;
        }
        let endpoint = self.endpoints.get(&endpoint).copied().filter(|until| *until > now);
        let rest = self.credentials.get(&id);
        match (rest, endpoint) {
            (Some(rest), other) if rest.until > now && other.is_none_or(|other| other <= rest.until) => {
                Standing::Resting { until: rest.until, cause: rest.cause }
            }
            (_, Some(until)) => Standing::Resting { until, cause: Cause::Endpoint },
            (Some(rest), None) if rest.trial_until.is_some_and(|end| end > now) => Standing::OnTrial,
            (Some(_), None) => Standing::Trial,
            (None, None) => Standing::Free,
        }
    }

    /// A call is the trial of this credential, until its watchdog ends it.
    pub fn begin_trial(&mut self, id: CredentialId, until: Instant) {
        if let Some(rest) = self.credentials.get_mut(&id) {
            rest.trial_until = Some(until);
        }
    }

    /// The trial ended without saying anything about the credential.
    pub fn end_trial(&mut self, id: CredentialId) {
        if let Some(rest) = self.credentials.get_mut(&id) {
            rest.trial_until = None;
        }
    }

    /// Credentials that a human must look at.
    pub fn alarms(&self) -> impl Iterator<Item = CredentialId> {
        self.credentials.iter().filter(|(_, rest)| rest.cause == Cause::Credential).map(|(id, _)| *id)
    }

    fn rest(
        &mut self,
        now: Instant,
        id: CredentialId,
        cause: Cause,
        wait: impl FnOnce(u32) -> Duration,
    ) -> Instant {
        let before = self.credentials.get(&id).filter(|rest| rest.cause == cause);
        // Calls that were under way together say the same thing: it is one rest, not ten doublings.
        let under_way = before.filter(|rest| rest.until > now);
        let earlier = before.map_or(0, |rest| rest.times) - u32::from(under_way.is_some());
        let until = now + wait(earlier).min(REST_MAX);
        let until = under_way.map_or(until, |rest| rest.until.max(until));
        self.credentials
            .insert(id, Rest { until, cause, times: earlier.saturating_add(1), trial_until: None });
        until
    }
}

/// The soonest of several ends.
#[must_use]
pub fn soonest(ends: impl Iterator<Item = Instant>) -> Option<Instant> {
    ends.min()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Sun, 06 Nov 1994 08:49:37 GMT.
    const THEN: u64 = 784_111_777;
    const KEY: CredentialId = CredentialId { provider: 1, index: 0 };
    const OTHER: CredentialId = CredentialId { provider: 1, index: 1 };
    const A: EndpointId = EndpointId(0);

    fn said(headers: &[(&str, &str)], now: u64) -> Option<f64> {
        let header = |name: &str| headers.iter().find(|(n, _)| *n == name).map(|(_, value)| *value);
        wait(header, UnixSeconds(now)).map(|wait| wait.as_secs_f64())
    }

    #[test]
    fn every_name_that_is_looked_up_may_tell() {
        let asked = std::cell::RefCell::new(vec![]);
        let header = |name: &str| -> Option<&str> {
            asked.borrow_mut().push(name.to_owned());
            name.contains("reset").then_some("1s")
        };
        assert!(wait(header, UnixSeconds(0)).is_some());
        assert!(asked.borrow().len() > RESETS.len() * 2);
        for name in asked.borrow().iter() {
            assert!(may_tell(name), "{name}");
        }
    }

    #[test]
    fn retry_after_is_read_in_every_form() {
        for (name, text, wait) in [
            ("retry-after", "30", 30.0),
            ("retry-after", " 1.5 ", 1.5),
            ("retry-after", "0", 0.0),
            ("retry-after-ms", "250", 0.25),
            ("retry-after", "Sun, 06 Nov 1994 08:50:07 GMT", 30.0),
            ("retry-after", "Sun, 06 Nov 1994 08:49:00 GMT", 0.0),
            ("x-ratelimit-reset-requests", "1s", 1.0),
            ("x-ratelimit-reset-tokens", "6m0s", 360.0),
            ("x-ratelimit-reset-tokens", "120ms", 0.12),
            ("x-ratelimit-reset-tokens", "1m2.5s", 62.5),
            ("x-ratelimit-reset-requests", "784111800", 23.0),
            ("x-ratelimit-reset", "784111800000", 23.0),
            ("x-ratelimit-reset-requests", "12", 12.0),
            ("anthropic-ratelimit-requests-reset", "1994-11-06T08:49:47Z", 10.0),
            ("anthropic-ratelimit-tokens-reset", "1994-11-06T09:49:47.123+01:00", 10.0),
        ] {
            let found = said(&[(name, text)], THEN).unwrap_or(-1.0);
            assert!((found - wait).abs() < 1e-9, "{name}: {text} gave {found}");
        }
    }

    #[test]
    fn nonsense_is_nothing() {
        for text in [
            "",
            "-1",
            "NaN",
            "inf",
            "1e9",
            "soon",
            "1s1",
            "5x",
            ".",
            "1.2.3",
            "Sun, 99 Nov 1994 08:49:37 GMT",
        ] {
            assert_eq!(said(&[("retry-after", text)], THEN), None, "{text}");
            assert_eq!(said(&[("x-ratelimit-reset-tokens", text)], THEN), None, "{text}");
        }
        assert_eq!(said(&[], THEN), None);
    }

    #[test]
    fn nobody_rests_longer_than_ten_minutes() {
        for (name, text) in [
            ("retry-after", "86400"),
            ("retry-after", "99999999999999999999"),
            ("retry-after", "Fri, 31 Dec 9999 23:59:59 GMT"),
            ("x-ratelimit-reset-requests", "700h"),
            ("anthropic-ratelimit-requests-reset", "9999-12-31T23:59:59Z"),
        ] {
            assert_eq!(said(&[(name, text)], THEN), Some(600.0), "{text}");
        }
    }

    #[test]
    fn of_several_resets_the_one_that_is_used_up_counts() {
        let both = [
            ("x-ratelimit-remaining-requests", "17"),
            ("x-ratelimit-reset-requests", "1s"),
            ("x-ratelimit-remaining-tokens", "0"),
            ("x-ratelimit-reset-tokens", "40s"),
        ];
        assert_eq!(said(&both, THEN), Some(40.0));
        assert_eq!(said(&[both[1], both[3]], THEN), Some(1.0), "none is said to be used up");
        let plain = [both[2], both[3], ("retry-after", "7")];
        assert_eq!(said(&plain, THEN), Some(7.0), "the plain word wins");
    }

    #[test]
    fn a_429_rests_the_credential_and_not_its_neighbour() {
        let now = Instant::now();
        let mut rests = Rests::default();
        let until = rests.rate_limited(now, KEY, Some(Duration::from_secs(30)));
        assert_eq!(until, now + Duration::from_secs(30));
        let standing = Standing::Resting { until, cause: Cause::RateLimit };
        assert_eq!(rests.standing(now, A, KEY), standing);
        assert_eq!(rests.standing(now, EndpointId(9), KEY), standing, "another endpoint, the same quota");
        assert_eq!(rests.standing(now, A, OTHER), Standing::Free);
        assert_eq!(rests.alarms().count(), 0);
    }

    #[test]
    fn a_silent_429_rests_longer_each_time_until_something_is_served() {
        let mut now = Instant::now();
        let mut rests = Rests::default();
        for seconds in [1, 2, 4, 8, 16, 30, 30] {
            let until = rests.rate_limited(now, KEY, Some(Duration::ZERO));
            assert_eq!(rests.rate_limited(now, KEY, None), until, "said twice, it is one rest");
            rests.served(now, A, KEY);
            assert_eq!(until - now, Duration::from_secs(seconds), "an earlier answer does not end it");
            now = until;
        }
        rests.served(now, A, KEY);
        assert_eq!(rests.rate_limited(now, KEY, None) - now, Duration::from_secs(1));
    }

    #[test]
    fn a_time_that_was_too_short_is_believed_once() {
        let mut now = Instant::now();
        let mut rests = Rests::default();
        for millis in [5, 100, 200, 400, 800, 1_000, 1_000] {
            let until = rests.rate_limited(now, KEY, Some(Duration::from_millis(5)));
            assert_eq!(until - now, Duration::from_millis(millis));
            now = until;
        }
        let until = rests.rate_limited(now, KEY, Some(Duration::from_secs(3)));
        assert_eq!(until - now, Duration::from_secs(3), "a longer one counts as it is");
    }

    #[test]
    fn credential_trouble_rests_with_an_alarm_until_it_is_mended() {
        let now = Instant::now();
        let mut rests = Rests::default();
        assert_eq!(rests.refused(now, KEY) - now, Duration::from_secs(60));
        assert_eq!(rests.alarms().collect::<Vec<_>>(), [KEY]);
        rests.renewed(KEY);
        assert_eq!((rests.alarms().count(), rests.standing(now, A, KEY)), (0, Standing::Free));
    }

    #[test]
    fn after_a_rest_one_call_is_the_trial_and_the_others_keep_it_last() {
        let now = Instant::now();
        let mut rests = Rests::default();
        let end = rests.rate_limited(now, KEY, None);
        assert_eq!(rests.standing(end, A, KEY), Standing::Trial);
        rests.begin_trial(KEY, end + Duration::from_secs(5));
        assert_eq!(rests.standing(end, A, KEY), Standing::OnTrial);
        assert_eq!(rests.standing(end + Duration::from_secs(5), A, KEY), Standing::Trial, "it vanished");
        rests.served(end, A, KEY);
        assert_eq!(rests.standing(end, A, KEY), Standing::Free);
    }

    #[test]
    fn an_endpoint_that_named_a_time_rests_by_itself() {
        let now = Instant::now();
        let mut rests = Rests::default();
        let until = rests.endpoint_asked(now, A, Duration::from_secs(9_999));
        assert_eq!(until, now + REST_MAX);
        assert_eq!(rests.standing(now, A, KEY), Standing::Resting { until, cause: Cause::Endpoint });
        assert_eq!(rests.standing(now, EndpointId(1), KEY), Standing::Free);
        assert_eq!(soonest([until, now].into_iter()), Some(now));
    }

    proptest! {
        #[test]
        fn any_header_gives_a_sane_wait_or_none(
            text in "\\PC{0,40}", number in "[0-9.:TZ+smh-]{0,30}", now: u64, which in 0_usize..4,
        ) {
            let name = ["retry-after", "retry-after-ms", RESETS[0].1, RESETS[2].1][which];
            for text in [text, number] {
                if let Some(wait) = said(&[(name, &text)], now) {
                    prop_assert!((0.0..=600.0).contains(&wait));
                }
            }
        }

        #[test]
        fn dates_agree_with_a_count_of_days(days in 0_u64..100_000, second in 0_u64..86_400) {
            // The same calendar, counted year by year.
            let (mut year, mut left) = (1970, days);
            let leap = |y: u64| y.is_multiple_of(4) && (!y.is_multiple_of(100) || y.is_multiple_of(400));
            while left >= 365 + u64::from(leap(year)) {
                left -= 365 + u64::from(leap(year));
                year += 1;
            }
            let mut lengths = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
            lengths[1] += u64::from(leap(year));
            let mut month = 0;
            while left >= lengths[month] {
                left -= lengths[month];
                month += 1;
            }
            let (h, m, s) = (second / 3_600, second / 60 % 60, second % 60);
            let text = format!("{year:04}-{:02}-{:02}T{h:02}:{m:02}:{s:02}Z", month + 1, left + 1);
            prop_assert_eq!(rfc3339(&text), Some(UnixSeconds(days * 86_400 + second)));
        }

        #[test]
        fn a_rest_never_lasts_longer_than_ten_minutes(
            steps in prop::collection::vec((0_u64..2_000_000, 0_u64..2_000_000, 0_u8..3), 0..40),
        ) {
            let mut now = Instant::now();
            let mut rests = Rests::default();
            for (wait_ms, said_ms, what) in steps {
                now += Duration::from_millis(wait_ms);
                let until = match what {
                    0 => rests.refused(now, KEY),
                    1 => rests.rate_limited(now, KEY, None),
                    _ => rests.rate_limited(now, KEY, Some(Duration::from_millis(said_ms))),
                };
                prop_assert!(until > now && until <= now + REST_MAX);
            }
        }
    }
}
