// SPDX-License-Identifier: Apache-2.0
//! Lists the holders of a key. The guests are queried only when an operator requests it.

use std::sync::Arc;

use futures_util::{StreamExt, stream};
use patchbay_access::policy::Policy;
use serde::Serialize;

use super::access;
use crate::hosts::{CallError, Host, Hosts};

/// The maximum number of guests that are queried.
const MAX_GUESTS: usize = 256;
const FAN_OUT: usize = 32;
/// The maximum number of holds of one guest that are shown.
const MAX_HOLDS: usize = 20;

#[derive(Serialize)]
pub struct Holders {
    key: String,
    /// The number of guests that could be queried. `guests` contains a part of them.
    total: usize,
    guests: Vec<GuestHolders>,
    unreachable: Vec<String>,
}

#[derive(Serialize)]
struct GuestHolders {
    host: String,
    guest: String,
    count: Option<i32>,
    enabled: bool,
    holds: Vec<HoldRow>,
    /// The reason why the guest did not answer.
    error: String,
}

#[derive(Serialize)]
struct HoldRow {
    holder: String,
    reason: String,
    references: u32,
    /// The expiry, in milliseconds since the epoch.
    expires: Option<i64>,
}

/// Queries the guests of one host, or of all hosts if `host` is empty.
pub async fn holders(
    hosts: &Hosts,
    host: &str,
    key: &str,
    policy: &Policy,
    principal: &str,
) -> Holders {
    let mut asked = hosts.all();
    asked.retain(|one| host.is_empty() || one.config.name == host);
    let lists = stream::iter(asked).map(|host| async move {
        let list = host.list_guests().await;
        (host, list)
    });
    let lists: Vec<_> = lists.buffered(FAN_OUT).collect().await;
    let (mut found, mut unreachable) = (Vec::new(), Vec::new());
    for (host, list) in lists {
        match list {
            Ok(list) => found.extend(list.into_iter().map(|one| (Arc::clone(&host), one.guest))),
            Err(status) => unreachable.push(format!("{}: {}", host.config.name, status.message())),
        }
    }
    found.retain(|(_, guest)| access::may_view(policy, principal, Some(guest)).is_ok());
    let total = found.len();
    found.truncate(MAX_GUESTS);
    unreachable.truncate(MAX_HOLDS);
    let guests = stream::iter(found).map(|(host, guest)| ask(host, guest, key));
    Holders {
        key: key.to_owned(),
        total,
        guests: guests.buffered(FAN_OUT).collect().await,
        unreachable,
    }
}

async fn ask(host: Arc<Host>, guest: String, key: &str) -> GuestHolders {
    let patterns = vec![key.to_owned()];
    let (keys, holds) = tokio::join!(host.list_keys(&guest, patterns), host.holds(&guest));
    let failed = keys.as_ref().err().or(holds.as_ref().err());
    let error = failed.map(|status| CallError::new(status).why);
    let keys = keys.unwrap_or_default();
    let found = keys.first();
    let holds = holds.unwrap_or_default().into_iter();
    let holds = holds.filter(|hold| hold.key == key).take(MAX_HOLDS);
    let holds = holds.map(|hold| HoldRow {
        holder: hold.holder,
        reason: hold.reason,
        references: hold.references,
        expires: hold
            .expires_at
            .map(|time| time.seconds.saturating_mul(1000)),
    });
    GuestHolders {
        host: host.config.name.clone(),
        guest,
        count: found.map(|key| key.count),
        enabled: found.is_some_and(|key| key.enabled),
        holds: holds.collect(),
        error: error.unwrap_or_default(),
    }
}
