//! What the page shows, before it is a page: what is known, put together and bounded.

use std::collections::BTreeSet;
use std::sync::Arc;

use filters::status::Level;
use filters::status::days::{Counted, together};

use crate::record::incidents::Incident;

/// Models that a page and its JSON show at most; how many there are beyond them is said.
pub(super) const MODELS_MAX: usize = 500;

/// Regions that a page and its JSON show with bars of their own at most; those beyond them are shown as they do now.
pub(super) const REGION_BARS_MAX: usize = 500;

/// A bar for each day, the oldest first; none where there are too many of them.
pub(super) type Bars = Arc<[(i64, Counted)]>;

/// All of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct View {
    /// When it was so, to the minute: a page that says nothing new is the same page.
    pub(super) at_ms: i64,
    pub(super) title: Option<String>,
    /// The page's own address, for feeds.
    pub(super) url: Option<String>,
    /// By name.
    pub(super) models: Vec<Model>,
    /// How many are not shown.
    pub(super) more_models: usize,
    /// The latest first.
    pub(super) incidents: Vec<Incident>,
    /// By name.
    pub(super) jobs: Vec<Job>,
    pub(super) goal: Option<Goal>,
    /// Records cannot be written, or not even be read.
    pub(super) read_only: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Model {
    pub(super) name: String,
    pub(super) level: Option<Level>,
    /// Those that have a name.
    pub(super) regions: Vec<Region>,
    /// Empty unless the config wants them shown.
    pub(super) routes: Vec<Route>,
    pub(super) bars: Bars,
}

/// A region of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Region {
    pub(super) name: String,
    pub(super) level: Option<Level>,
    pub(super) bars: Bars,
}

/// A route of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Route {
    pub(super) name: String,
    pub(super) level: Option<Level>,
}

/// A periodic job, over all nodes: as it does where it does worst.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Job {
    pub(super) name: String,
    pub(super) state: JobState,
    /// When it was last done, to the minute; `None`: never.
    pub(super) done_ms: Option<i64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum JobState {
    Well,
    Late,
    Failed,
}

/// How the month does beside its goal, in hundred-thousandths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Goal {
    pub(super) goal: u32,
    pub(super) share: u32,
    /// Of the error budget.
    pub(super) left: u32,
}

/// All models together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Overall {
    Unknown,
    Operational,
    Degraded,
    Partly,
    SomeDown,
    AllDown,
}

impl View {
    pub(super) fn overall(&self) -> Overall {
        let levels: BTreeSet<Option<Level>> = self.models.iter().map(|model| model.level).collect();
        match levels.last().copied().flatten() {
            None => Overall::Unknown,
            Some(Level::Operational) => Overall::Operational,
            Some(Level::Degraded) => Overall::Degraded,
            Some(Level::Partly) => Overall::Partly,
            Some(Level::Down) if levels.len() > 1 => Overall::SomeDown,
            Some(Level::Down) => Overall::AllDown,
        }
    }

    pub(super) fn open(&self) -> impl Iterator<Item = &Incident> {
        self.incidents.iter().filter(|incident| incident.closed_ms.is_none())
    }

    pub(super) fn past(&self) -> impl Iterator<Item = &Incident> {
        self.incidents.iter().filter(|incident| incident.closed_ms.is_some())
    }
}

impl Overall {
    /// Its colour.
    pub(super) const fn level(self) -> Option<Level> {
        match self {
            Self::Unknown => None,
            Self::Operational => Some(Level::Operational),
            Self::Degraded => Some(Level::Degraded),
            Self::Partly => Some(Level::Partly),
            Self::SomeDown | Self::AllDown => Some(Level::Down),
        }
    }
}

/// Good calls of all days shown, of a hundred thousand.
pub(super) fn share(bars: &Bars) -> Option<u32> {
    together(bars).share()
}

impl JobState {
    pub(super) const fn word(self) -> &'static str {
        match self {
            Self::Well => "on_time",
            Self::Late => "late",
            Self::Failed => "failed",
        }
    }

    pub(super) const fn level(self) -> Level {
        match self {
            Self::Well => Level::Operational,
            Self::Late => Level::Degraded,
            Self::Failed => Level::Down,
        }
    }
}
