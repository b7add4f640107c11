//! To whom connections are kept open before they are needed.

use std::time::{Duration, Instant};

use super::{Ask, Board, Stand};
use crate::ids::{EndpointId, ModelId};
use crate::preferences::Preferences;
use crate::upstream::watchdog::Form;

/// A model that nobody has asked for so long needs no warm connections.
pub(super) const WARM_FOR: Duration = Duration::from_secs(300);
/// So many places behind the first one of a model are kept warm.
const WARM_PLACES: usize = 2;
/// And so many endpoints of all models.
const WARM_MAX: usize = 64;

impl Board {
    /// To whom connections are kept open, off the path of requests: the next two places behind the first one of every
    /// model that has traffic, one endpoint of each. The first is kept open by its calls.
    #[must_use]
    pub fn standbys(&self, now: Instant) -> Vec<EndpointId> {
        let preferences = Preferences::default();
        let mut standbys: Vec<EndpointId> = vec![];
        for (at, state) in self.models.iter().enumerate() {
            if state.asked.is_none_or(|asked| now.saturating_duration_since(asked) >= WARM_FOR) {
                continue;
            }
            let models = [ModelId(at)];
            let ask =
                Ask { models: &models, form: Form::Stream, prompt_tokens: 0, preferences: &preferences };
            let mut stands = self.survey(now, ModelId(at), &ask);
            stands.retain(Stand::admits);
            let weight = |stand: &Stand| f64::from(stand.weight) * stand.factor;
            stands.sort_by(|a, b| weight(b).total_cmp(&weight(a)));
            let mut places: Vec<EndpointId> = vec![];
            for place in stands.iter().map(|stand| self.place(stand.route.endpoint)) {
                if !places.contains(&place) {
                    places.push(place);
                }
            }
            for place in places.into_iter().skip(1).take(WARM_PLACES) {
                if !standbys.contains(&place) {
                    standbys.push(place);
                }
            }
        }
        standbys.truncate(WARM_MAX);
        standbys
    }
}
