//! When the machine opens an incident, adds to it, and closes it.
//!
//! An incident is for people: it must not come and go with every bad minute. So it opens when trouble has lasted
//! (a minute where callers need not notice, ten seconds where they do), further models join one that has just begun,
//! for they mostly have its cause, and it closes five minutes after any node has last seen trouble. Trouble that comes
//! back within half an hour opens the same one again.
//!
//! In a fleet every node plans over the same rows, one at a time, and each tells what it sees by the time of `seen_ms`:
//! the one that sees no trouble closes nothing as long as another does.
//!
//! A person's word stands. What somebody opened, or has edited, the machine neither changes nor closes, and it opens
//! nothing beside it for the same models.

use std::collections::BTreeSet;

use super::Level;

/// Trouble that callers need not notice opens an incident after so long, in milliseconds.
const QUIET_MS: i64 = 60_000;
/// Trouble that they do notice, after so long.
const LOUD_MS: i64 = 10_000;
/// A model joins an incident that began at most so long ago.
const JOIN_MS: i64 = 5 * 60_000;
/// An incident closes when nobody has seen trouble for so long.
const CALM_MS: i64 = 5 * 60_000;
/// Trouble that comes back within this time is the old one.
const FLAP_MS: i64 = 30 * 60_000;
/// Rows are told at most so often that trouble goes on.
const TELL_MS: i64 = 10_000;

/// An incident, as far as the machine looks at it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    /// Its number.
    pub id: i64,
    /// The machine opened it, and nobody has edited it.
    pub is_ours: bool,
    /// The worst that it was.
    pub severity: Level,
    /// The models that it is about; none: all of them.
    pub models: BTreeSet<String>,
    /// When it began, in milliseconds since 1970, as all times here.
    pub opened_ms: i64,
    /// When it ended, if it did.
    pub closed_ms: Option<i64>,
    /// When a node last saw trouble.
    pub seen_ms: i64,
}

/// A model that shows trouble on this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Troubled {
    /// Its name.
    pub model: String,
    /// How bad it is; never operational.
    pub level: Level,
    /// Since when, without a break.
    pub since_ms: i64,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A new one.
    Open {
        /// How bad it is.
        severity: Level,
        /// Whom it is about; never empty.
        models: BTreeSet<String>,
        /// When the trouble began.
        began_ms: i64,
    },
    /// It goes on, or has begun again.
    GoOn {
        /// Its number.
        id: i64,
        /// The worst that it was.
        severity: Level,
        /// Whom it is about by now.
        models: BTreeSet<String>,
    },
    /// It is over.
    Close {
        /// Its number.
        id: i64,
    },
}

/// What is to be done with the incidents that there are. `known`: the open ones, and those that closed lately.
#[must_use]
pub fn plan(now_ms: i64, troubled: &[Troubled], known: &[Known]) -> Vec<Change> {
    let mut goes_on: Vec<(&Known, Vec<&Troubled>)> = vec![];
    let mut fresh: Vec<&Troubled> = vec![];
    for trouble in troubled {
        match home(now_ms, trouble, known) {
            Home::Told => {}
            Home::Known(incident) => match goes_on.iter_mut().find(|(one, _)| one.id == incident.id) {
                Some((_, members)) => members.push(trouble),
                None => goes_on.push((incident, vec![trouble])),
            },
            Home::None => fresh.push(trouble),
        }
    }
    let mut changes: Vec<Change> = vec![];
    for (incident, members) in &goes_on {
        let worst = members.iter().map(|trouble| trouble.level).max();
        let severity = worst.map_or(incident.severity, |worst| worst.max(incident.severity));
        let mut models = incident.models.clone();
        models.extend(members.iter().map(|trouble| trouble.model.clone()));
        let is_news = severity != incident.severity
            || models != incident.models
            || incident.closed_ms.is_some()
            || now_ms.saturating_sub(incident.seen_ms) >= TELL_MS;
        if is_news {
            changes.push(Change::GoOn { id: incident.id, severity, models });
        }
    }
    for incident in known {
        let is_calm = now_ms.saturating_sub(incident.seen_ms) >= CALM_MS;
        let goes_on = goes_on.iter().any(|(one, _)| one.id == incident.id);
        if incident.is_ours && incident.closed_ms.is_none() && is_calm && !goes_on {
            changes.push(Change::Close { id: incident.id });
        }
    }
    let lasting = |trouble: &&&Troubled| {
        let long = if trouble.level == Level::Degraded { QUIET_MS } else { LOUD_MS };
        now_ms.saturating_sub(trouble.since_ms) >= long
    };
    if let Some(began_ms) = fresh.iter().filter(lasting).map(|trouble| trouble.since_ms).min() {
        let began_with_it = |trouble: &&&Troubled| trouble.since_ms.saturating_sub(began_ms) <= JOIN_MS;
        let members = || fresh.iter().filter(began_with_it);
        let severity = members().map(|trouble| trouble.level).max().unwrap_or(Level::Degraded);
        let models = members().map(|trouble| trouble.model.clone()).collect();
        changes.push(Change::Open { severity, models, began_ms });
    }
    changes
}

/// Where a model's trouble belongs.
enum Home<'a> {
    /// A person has said something about it.
    Told,
    /// An incident of ours.
    Known(&'a Known),
    /// Nowhere yet.
    None,
}

fn home<'a>(now_ms: i64, trouble: &Troubled, known: &'a [Known]) -> Home<'a> {
    let names = |incident: &Known| incident.models.is_empty() || incident.models.contains(&trouble.model);
    let ago = |then_ms: i64| now_ms.saturating_sub(then_ms);
    let open = || known.iter().filter(|incident| incident.closed_ms.is_none());
    if open().any(|incident| !incident.is_ours && names(incident)) {
        return Home::Told;
    }
    let ours = || known.iter().filter(|incident| incident.is_ours);
    let same = ours().find(|incident| incident.closed_ms.is_none() && names(incident));
    let began_with_it = || {
        ours().find(|incident| {
            incident.closed_ms.is_none() && trouble.since_ms.saturating_sub(incident.opened_ms) <= JOIN_MS
        })
    };
    let came_back = || {
        ours()
            .filter(|incident| names(incident))
            .find(|incident| incident.closed_ms.is_some_and(|closed_ms| ago(closed_ms) <= FLAP_MS))
    };
    same.or_else(came_back).or_else(began_with_it).map_or(Home::None, Home::Known)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn trouble(model: &str, level: Level, since_ms: i64) -> Troubled {
        Troubled { model: model.to_owned(), level, since_ms }
    }

    fn of(models: &[&str]) -> BTreeSet<String> {
        models.iter().map(|model| (*model).to_owned()).collect()
    }

    fn ours(id: i64, models: &[&str], opened_ms: i64) -> Known {
        let severity = Level::Degraded;
        Known {
            id,
            is_ours: true,
            severity,
            models: of(models),
            opened_ms,
            closed_ms: None,
            seen_ms: opened_ms,
        }
    }

    /// Does to rows what a store does.
    fn apply(now_ms: i64, changes: &[Change], rows: &mut Vec<Known>) {
        for change in changes {
            match change {
                Change::Open { severity, models, began_ms } => rows.push(Known {
                    severity: *severity,
                    models: models.clone(),
                    seen_ms: now_ms,
                    ..ours(i64::try_from(rows.len()).unwrap(), &[], *began_ms)
                }),
                Change::GoOn { id, severity, models } => {
                    let row = rows.iter_mut().find(|row| row.id == *id).unwrap();
                    (row.severity, row.models) = (*severity, models.clone());
                    (row.seen_ms, row.closed_ms) = (now_ms, None);
                }
                Change::Close { id } => {
                    rows.iter_mut().find(|row| row.id == *id).unwrap().closed_ms = Some(now_ms);
                }
            }
        }
    }

    #[test]
    fn trouble_opens_an_incident_when_it_has_lasted_and_sooner_where_callers_notice() {
        let degraded = [trouble("a", Level::Degraded, 0)];
        assert_eq!(plan(59_999, &degraded, &[]), []);
        let opens = Change::Open { severity: Level::Degraded, models: of(&["a"]), began_ms: 0 };
        assert_eq!(plan(60_000, &degraded, &[]), [opens]);
        let down = [trouble("a", Level::Down, 0)];
        assert_eq!(plan(9_999, &down, &[]), []);
        assert_eq!(plan(10_000, &down, &[]).len(), 1);
    }

    #[test]
    fn models_that_fail_together_are_one_incident() {
        let both = [
            trouble("a", Level::Down, 0),
            trouble("b", Level::Partly, 100),
            trouble("c", Level::Down, 9_000),
        ];
        let opens = Change::Open { severity: Level::Down, models: of(&["a", "b", "c"]), began_ms: 0 };
        assert_eq!(plan(10_000, &both, &[]), [opens], "the first has lasted, and the others began with it");
        let joins = Change::GoOn { id: 7, severity: Level::Down, models: of(&["a", "c"]) };
        assert_eq!(plan(20_000, &[trouble("c", Level::Down, 9_000)], &[ours(7, &["a"], 0)]), [joins]);
        let later = [trouble("c", Level::Down, 400_000)];
        let old = Known { seen_ms: 409_999, ..ours(7, &["a"], 0) };
        assert!(matches!(plan(410_000, &later, &[old]).as_slice(), [Change::Open { .. }]), "another cause");
    }

    #[test]
    fn an_incident_gets_worse_but_never_better() {
        let known = [Known { severity: Level::Partly, ..ours(1, &["a"], 0) }];
        let worse = Change::GoOn { id: 1, severity: Level::Down, models: of(&["a"]) };
        assert_eq!(plan(1_000, &[trouble("a", Level::Down, 0)], &known), [worse]);
        let same = Change::GoOn { id: 1, severity: Level::Partly, models: of(&["a"]) };
        assert_eq!(plan(10_000, &[trouble("a", Level::Degraded, 0)], &known), [same]);
        assert_eq!(plan(9_000, &[trouble("a", Level::Degraded, 0)], &known), [], "that is known already");
    }

    #[test]
    fn it_closes_five_minutes_after_any_node_has_seen_trouble() {
        let known = [ours(1, &["a"], 0)];
        assert_eq!(plan(299_999, &[], &known), []);
        assert_eq!(plan(300_000, &[], &known), [Change::Close { id: 1 }]);
        let seen_by_another = [Known { seen_ms: 200_000, ..ours(1, &["a"], 0) }];
        assert_eq!(plan(300_000, &[], &seen_by_another), []);
    }

    #[test]
    fn trouble_that_comes_back_opens_the_same_incident_again() {
        let closed = [Known { closed_ms: Some(400_000), ..ours(1, &["a"], 0) }];
        let again = [trouble("a", Level::Degraded, 2_000_000)];
        assert!(matches!(plan(2_060_000, &again, &closed).as_slice(), [Change::GoOn { id: 1, .. }]));
        let much_later = [trouble("a", Level::Degraded, 9_000_000)];
        assert!(matches!(plan(9_060_000, &much_later, &closed).as_slice(), [Change::Open { .. }]));
    }

    #[test]
    fn a_persons_incident_is_left_alone_and_nothing_is_opened_beside_it() {
        let told = [Known { is_ours: false, ..ours(1, &["a"], 0) }];
        assert_eq!(plan(9_000_000, &[trouble("a", Level::Down, 0)], &told), []);
        assert_eq!(plan(9_000_000, &[], &told), []);
        let about_all = [Known { is_ours: false, ..ours(1, &[], 0) }];
        assert_eq!(plan(9_000_000, &[trouble("b", Level::Down, 0)], &about_all), []);
        let other = plan(9_000_000, &[trouble("b", Level::Down, 0)], &told);
        assert!(matches!(other.as_slice(), [Change::Open { .. }]));
    }

    proptest! {
        #[test]
        fn trouble_that_lasts_is_always_covered_by_one_open_incident_and_calm_closes_all(
            steps in prop::collection::vec((1_i64..120, 0_u8..8, 0_u8..3), 1..80),
        ) {
            let mut now_ms = 0;
            let mut rows: Vec<Known> = vec![];
            let mut since: [Option<i64>; 3] = [None; 3];
            let names = ["a", "b", "c"];
            for (seconds, in_trouble, level) in steps {
                now_ms += seconds * 1_000;
                let level = [Level::Degraded, Level::Partly, Level::Down][usize::from(level)];
                let mut troubled = vec![];
                for (bit, name) in names.iter().enumerate() {
                    let is = in_trouble & (1 << bit) != 0;
                    since[bit] = is.then(|| since[bit].unwrap_or(now_ms));
                    troubled.extend(since[bit].map(|at| trouble(name, level, at)));
                }
                let changes = plan(now_ms, &troubled, &rows);
                apply(now_ms, &changes, &mut rows);
                for one in &troubled {
                    let open = rows.iter().filter(|row| row.closed_ms.is_none() && row.models.contains(&one.model));
                    let count = open.count();
                    if now_ms - one.since_ms >= QUIET_MS {
                        prop_assert_eq!(count, 1, "{} at {}", &one.model, now_ms);
                    }
                    prop_assert!(count <= 1);
                }
                prop_assert_eq!(plan(now_ms, &troubled, &rows), vec![], "a plan that was followed is done");
            }
            now_ms += CALM_MS;
            let changes = plan(now_ms, &[], &rows);
            apply(now_ms, &changes, &mut rows);
            prop_assert!(rows.iter().all(|row| row.closed_ms.is_some()));
        }
    }
}
