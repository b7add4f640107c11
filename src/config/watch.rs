//! What the gateway does to know how it does, and whom it tells: `probes`, `heartbeats`, `notifications`.
//!
//! As written and as meant. A field's comment here is its comment in `conf/tollgate.yaml`, as for [`super::raw`].

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use deserr::Deserr;
use filters::money::Amount;

use super::raw::{Decimal, Named, Span};
use super::{Faults, join};
use crate::secret::Secret;

/// The shortest time between two probes of a route, and of all other spans here.
const SPAN_MIN: Duration = Duration::from_secs(1);
/// The longest.
const SPAN_MAX: Duration = Duration::from_secs(86_400);
/// Whoever is told, at most.
const RECEIVERS_MAX: usize = 16;
/// The shortest secret that signs, in bytes.
const SECRET_BYTES_MIN: usize = 16;

#[derive(Debug, Default, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct ProbesBlock {
    /// How often each route of each model is asked, a tenth more or less. Default 90s.
    #[deserr(default)]
    pub every: Option<Span>,
    /// USD that the probes of a day (of UTC) may cost together; one that might pass it is not sent. Default "1.00".
    #[deserr(default)]
    pub cost_max_per_day: Option<Decimal>,
    /// How long a whole answer may take. Default 10s.
    #[deserr(default)]
    pub timeout: Option<Span>,
    /// The account under which the books keep them. It pays nothing. Default tollgate-probes.
    #[deserr(default)]
    pub account: Option<String>,
    /// Models that are not asked. Default: none.
    #[deserr(default)]
    pub skip: Vec<String>,
}

#[derive(Debug, Default, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct HeartbeatsBlock {
    /// Where every periodic job says that it has begun (`<url>/<job>/start`), is done (`<url>/<job>`) or failed
    /// (`<url>/<job>/fail`), as Healthchecks takes it. The URL is a secret. Default: nowhere.
    #[deserr(default)]
    pub url: Option<Secret>,
    /// Jobs with a URL of their own, by their names in docs/operating.md: `<url>/start`, `<url>`, `<url>/fail`.
    #[deserr(default)]
    pub jobs: Named<Secret>,
    /// How much later than its period a job may be done before an alarm. Default 4m30s, so that it comes within 5m.
    #[deserr(default)]
    pub late_after: Option<Span>,
    /// Of a job that is done more often, so much time is between two pings. Default 60s.
    #[deserr(default)]
    pub ping_every: Option<Span>,
}

#[derive(Debug, Default, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct NotificationsBlock {
    /// Who is told. Default: nobody.
    #[deserr(default)]
    pub receivers: Vec<ReceiverBlock>,
    /// The same thing is told once in so much time, and what else comes of it is summed up at its end. Default 5m.
    #[deserr(default)]
    pub window: Option<Span>,
    /// USD below which the balance of an account is told of, once, until it is a tenth above. Default: never.
    #[deserr(default)]
    pub low_balance: Option<Decimal>,
    /// The same for single accounts, by name; "0" for never.
    #[deserr(default)]
    pub low_balances: Named<Decimal>,
}

#[derive(Debug, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct ReceiverBlock {
    /// Where to POST. It is a secret: no log shows it.
    pub url: Secret,
    /// `json` (docs/notifications.md has its fields) or `slack` (for Slack's incoming webhooks and their like). Default json.
    #[deserr(default)]
    pub shape: Option<ShapeName>,
    /// Signs each body with HMAC-SHA256 in the header `x-tollgate-signature`; at least 16 bytes. Default: no signature.
    #[deserr(default)]
    pub secret: Option<Secret>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserr)]
#[deserr(error = Faults, rename_all = lowercase)]
pub enum ShapeName {
    Json,
    Slack,
}

/// The three blocks, as they are meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Watching {
    /// `None`: no route is asked. A probe costs money at a provider, so somebody has to want them.
    pub probes: Option<Probes>,
    pub heartbeats: Heartbeats,
    pub notifications: Notifications,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probes {
    pub every: Duration,
    pub cost_max_per_day: Amount,
    pub timeout: Duration,
    pub account: String,
    pub skip: HashSet<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Heartbeats {
    /// Without a slash at its end.
    pub url: Option<Secret>,
    pub jobs: BTreeMap<String, Secret>,
    pub late_after: Duration,
    pub ping_every: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notifications {
    pub receivers: Vec<Receiver>,
    pub window: Duration,
    /// Nothing: never.
    pub low_balance: Amount,
    pub low_balances: BTreeMap<String, Amount>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Receiver {
    pub url: Secret,
    pub shape: ShapeName,
    pub secret: Option<Secret>,
}

/// Turns what was written into what is meant, and adds what is wrong with it to `faults`.
pub(super) fn check(
    probes: Option<ProbesBlock>,
    heartbeats: HeartbeatsBlock,
    notifications: NotificationsBlock,
    faults: &mut Faults,
) -> Watching {
    let mut check = Check { faults };
    Watching {
        probes: probes.map(|block| check.probes(block)),
        heartbeats: check.heartbeats(heartbeats),
        notifications: check.notifications(notifications),
    }
}

struct Check<'a> {
    faults: &'a mut Faults,
}

impl Check<'_> {
    fn probes(&mut self, block: ProbesBlock) -> Probes {
        let ProbesBlock { every, cost_max_per_day, timeout, account, skip } = block;
        let account = account.unwrap_or_else(|| "tollgate-probes".to_owned());
        if account.is_empty() || account.len() > 200 {
            self.faults.push("probes.account", "must have between 1 and 200 bytes");
        }
        let dollar = Amount::from_nano(1_000_000_000);
        Probes {
            every: self.span("probes.every", every, Duration::from_secs(90)),
            cost_max_per_day: self.usd("probes.cost_max_per_day", cost_max_per_day).unwrap_or(dollar),
            timeout: self.span("probes.timeout", timeout, Duration::from_secs(10)),
            account,
            skip: skip.into_iter().collect(),
        }
    }

    fn heartbeats(&mut self, block: HeartbeatsBlock) -> Heartbeats {
        let HeartbeatsBlock { url, jobs, late_after, ping_every } = block;
        let mut all = BTreeMap::new();
        for (job, url) in jobs.0 {
            all.extend(self.url(&join("heartbeats.jobs", &job), url).map(|url| (job, url)));
        }
        Heartbeats {
            url: url.and_then(|url| self.url("heartbeats.url", url)),
            jobs: all,
            late_after: self.span("heartbeats.late_after", late_after, Duration::from_secs(270)),
            ping_every: self.span("heartbeats.ping_every", ping_every, Duration::from_secs(60)),
        }
    }

    fn notifications(&mut self, block: NotificationsBlock) -> Notifications {
        let NotificationsBlock { receivers, window, low_balance, low_balances } = block;
        if receivers.len() > RECEIVERS_MAX {
            self.faults.push("notifications.receivers", format!("at most {RECEIVERS_MAX} can be told"));
        }
        let mut all = vec![];
        for (at, ReceiverBlock { url, shape, secret }) in receivers.into_iter().enumerate() {
            let path = format!("notifications.receivers[{at}]");
            if secret.as_ref().is_some_and(|secret| secret.expose().len() < SECRET_BYTES_MIN) {
                self.faults
                    .push(join(&path, "secret"), format!("must have at least {SECRET_BYTES_MIN} bytes"));
            }
            let url = self.url(&join(&path, "url"), url);
            all.extend(url.map(|url| Receiver { url, shape: shape.unwrap_or(ShapeName::Json), secret }));
        }
        let mut accounts = BTreeMap::new();
        for (account, usd) in low_balances.0 {
            let threshold = self.usd(&join("notifications.low_balances", &account), Some(usd));
            accounts.insert(account, threshold.unwrap_or_default());
        }
        Notifications {
            receivers: all,
            window: self.span("notifications.window", window, Duration::from_secs(300)),
            low_balance: self.usd("notifications.low_balance", low_balance).unwrap_or_default(),
            low_balances: accounts,
        }
    }

    fn span(&mut self, path: &str, span: Option<Span>, default: Duration) -> Duration {
        let span = span.map_or(default, |span| span.0);
        if !(SPAN_MIN..=SPAN_MAX).contains(&span) {
            self.faults.push(path, "must be from 1s to 24h");
        }
        span
    }

    fn usd(&mut self, path: &str, usd: Option<Decimal>) -> Option<Amount> {
        match Amount::parse_usd(&usd?.0) {
            Ok(amount) => Some(amount),
            Err(error) => {
                self.faults.push(path, error.to_string());
                None
            }
        }
    }

    /// What is wrong with it is said without it: there may be a key in it.
    fn url(&mut self, path: &str, url: Secret) -> Option<Secret> {
        let parsed = url.expose().parse::<http::Uri>().ok();
        let is_good = parsed.is_some_and(|parsed| {
            matches!(parsed.scheme_str(), Some("http" | "https")) && parsed.host().is_some()
        });
        if !is_good {
            self.faults.push(path, "this is no URL that begins with `http://` or `https://`");
            return None;
        }
        Some(Secret::new(url.expose().trim_end_matches('/')))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;

    fn parse(blocks: &str) -> Result<Watching, String> {
        let text = format!(
            "listen: {{ http: 127.0.0.1:8080, admin: 127.0.0.1:9090 }}\n\
             store: {{ embedded: {{ path: ./data }} }}\n\
             providers: {{ p: {{ dialect: openai, base_url: \"http://host\" }} }}\n\
             models: {{ m: {{ price: {{ input: 1, output: 1 }}, limits: {{ context: 9, output: 9 }}, routes: [{{ provider: p }}] }} }}\n\
             {blocks}\n"
        );
        config::parse(&text, |_| None).map(|config| config.watching).map_err(|faults| faults.to_string())
    }

    #[test]
    fn nothing_is_asked_of_providers_unless_somebody_wants_it() {
        assert_eq!(parse("").unwrap().probes, None);
        let probes = parse("probes: {}").unwrap().probes.unwrap();
        assert_eq!((probes.every, probes.cost_max_per_day.nano()), (Duration::from_secs(90), 1_000_000_000));
        assert_eq!(probes.account, "tollgate-probes");
    }

    #[test]
    fn what_is_wrong_is_said_without_showing_a_secret() {
        for (blocks, said) in [
            ("probes: { every: 10ms }", "probes.every: must be from 1s to 24h"),
            ("probes: { cost_max_per_day: \"-1\" }", "probes.cost_max_per_day"),
            ("heartbeats: { url: \"ftp://hidden\" }", "heartbeats.url: this is no URL"),
            ("heartbeats: { jobs: { sweep: hidden } }", "heartbeats.jobs.sweep: this is no URL"),
            ("notifications: { receivers: [{ url: \"://hidden\" }] }", "notifications.receivers[0].url"),
            ("notifications: { receivers: [{ url: \"http://a\", secret: hidden }] }", "at least 16 bytes"),
            ("notifications: { low_balances: { a: x } }", "notifications.low_balances.a"),
        ] {
            let error = parse(blocks).unwrap_err();
            assert!(error.contains(said) && !error.contains("hidden"), "{blocks}: {error}");
        }
    }
}
