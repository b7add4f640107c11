//! The models that a caller may use, in the shape of its dialect.
//!
//! Listed is what can be asked for there: a model none of whose upstreams speaks the caller's dialect is
//! left out. Deliberately absent: pages (`after_id`, `limit`); a list is short and comes whole.

use filters::dialect::Dialect;
use serde_json::{Value, json};

use crate::pool::Snapshot;
use crate::pool::keys::Principal;

/// When a model was made is known to its provider alone; both shapes need a date.
const CREATED_AT: &str = "1970-01-01T00:00:00Z";

/// All of them.
pub(super) fn all(snapshot: &Snapshot, principal: &Principal, dialect: Dialect) -> Value {
    let catalogue = &snapshot.catalogue;
    let aliases = catalogue.aliases.iter().map(|(alias, model)| (alias.as_str(), model.as_str()));
    let all = catalogue.models.keys().map(|name| (name.as_str(), name.as_str())).chain(aliases);
    let served = all.filter(|(_, model)| {
        catalogue.models.get(*model).is_some_and(|model| catalogue.speaks(model, dialect))
    });
    let usable = served.filter(|(name, model)| principal.may_use(name) || principal.may_use(model));
    let mut names: Vec<&str> = usable.map(|(name, _)| name).collect();
    names.sort_unstable();
    let data: Vec<_> = names.iter().map(|name| one(dialect, name)).collect();
    match dialect {
        Dialect::OpenAi => json!({ "object": "list", "data": data }),
        Dialect::Anthropic => json!({
            "data": data,
            "has_more": false,
            "first_id": names.first(),
            "last_id": names.last(),
        }),
    }
}

/// One of them.
pub(super) fn one(dialect: Dialect, name: &str) -> Value {
    match dialect {
        Dialect::OpenAi => json!({ "id": name, "object": "model", "created": 0, "owned_by": "tollgate" }),
        Dialect::Anthropic => {
            json!({ "type": "model", "id": name, "display_name": name, "created_at": CREATED_AT })
        }
    }
}
