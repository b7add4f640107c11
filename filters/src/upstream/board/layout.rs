//! What a board is about, as it is configured.

use crate::dialect::Operation;
use crate::ids::{CredentialId, EndpointId, ModelId};
use crate::money::PriceCard;
use crate::route::Sort;
use crate::upstream::watchdog::Limit;

/// One endpoint as it is configured.
#[derive(Clone, Debug)]
pub struct EndpointSpec {
    /// Its name; its state survives a reload under it.
    pub name: String,
    /// The provider's name, as callers' preferences use it.
    pub provider: String,
    /// Whose quota it uses.
    pub credential: CredentialId,
    /// The first endpoint of its place: the same server, the same native model, another credential. What a server does
    /// wrong it does for every credential, so health, breaker, timings and a Retry-After of its own are the place's;
    /// only rests for 429 and for trouble with a credential are the credential's.
    pub place: EndpointId,
    /// The configured weight.
    pub weight: u32,
    /// To the response head.
    pub first_byte: Limit,
    /// To the first meaningful event.
    pub first_event: Limit,
    /// What a caller pays there, for `max_price` and `sort: price`.
    pub price: Option<PriceCard>,
    /// The parameters that it understands; `None`: all.
    pub parameters: Option<Vec<String>>,
}

/// One model as it is configured.
#[derive(Clone, Debug)]
pub struct ModelSpec {
    /// Its public name.
    pub name: String,
    /// What is asked of it: one model that serves several operations is as many models here, each with
    /// speeds of its own.
    pub operation: Operation,
    /// Its routes.
    pub routes: Vec<EndpointId>,
    /// It thinks before it speaks.
    pub reasoning: bool,
    /// How its order is made.
    pub sort: Sort,
    /// Some calls begin with a standby, or with a route that lost its place, to learn how they do.
    pub explore: bool,
}

/// What a board is about. Ids are places in these lists.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    /// All endpoints.
    pub endpoints: Vec<EndpointSpec>,
    /// All models.
    pub models: Vec<ModelSpec>,
}

/// One model at one endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Route {
    /// The model.
    pub model: ModelId,
    /// The endpoint.
    pub endpoint: EndpointId,
}

impl Layout {
    /// Every model at every endpoint that serves it.
    pub fn routes(&self) -> impl Iterator<Item = Route> {
        let models = self.models.iter().enumerate();
        models.flat_map(|(at, spec)| {
            let model = ModelId(at);
            spec.routes.iter().map(move |endpoint| Route { model, endpoint: *endpoint })
        })
    }
}
