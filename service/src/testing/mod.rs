// SPDX-License-Identifier: Apache-2.0
//! Parts of the service for tests without KVM, beside the guest in memory
//! ([`patchbay_guest::testing`]).

mod clock;
#[cfg(test)]
mod conformance_tests;
mod discovery;
mod log;
mod rings;

pub use self::clock::ManualClock;
pub use self::discovery::{Discovered, discovered_after, found, found_after, found_in};
pub use self::log::GuestLog;
pub use self::rings::{GuestRings, numbered};

use std::time::{Duration, Instant};

use patchbay_proto::v1;
use tonic::{Request, Status};

use crate::api::claims;
use crate::keys::claims::{ClaimQuery, ClaimView};
use crate::keys::{HoldQuery, HoldView, Keys, Registry};

/// Replaces the claims of an owner as the service does for a call, without a socket.
///
/// # Errors
/// The status that a client gets.
pub async fn set_claims(
    keys: &Keys,
    request: Request<v1::SetClaimsRequest>,
    principal: &str,
) -> Result<v1::SetClaimsResponse, Status> {
    Ok(claims::set(keys, request, principal.into()).await?)
}

/// Lists claims as the service does for a call, without a socket.
///
/// # Errors
/// The status that a client gets.
pub async fn list_claims(
    keys: &Keys,
    request: v1::ListClaimsRequest,
) -> Result<v1::ListClaimsResponse, Status> {
    let deadline = Instant::now() + Duration::from_secs(30);
    Ok(claims::list(keys, request, deadline).await?)
}

/// Returns the first page of holds, with a page size of 100.
///
/// # Panics
/// The list fails.
#[must_use]
pub fn listed_holds(keys: &Keys) -> Vec<HoldView> {
    let query = HoldQuery {
        page_size: 100,
        ..HoldQuery::default()
    };
    keys.holds(&query).expect("no token").holds
}

/// Returns the first page of claims, with a page size of 100.
#[must_use]
pub fn listed_claims(keys: &Keys) -> Vec<ClaimView> {
    let query = ClaimQuery {
        page_size: 100,
        ..ClaimQuery::default()
    };
    keys.claims(&query).claims
}

/// Returns the registry of a service that was started.
#[must_use]
pub fn registry(keys: &Keys) -> &Registry {
    keys.registry()
}
