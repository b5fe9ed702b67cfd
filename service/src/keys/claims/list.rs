// SPDX-License-Identifier: Apache-2.0
//! Lists claims in pages.

use std::sync::Arc;
use std::time::SystemTime;

use patchbay_guest::kernel_memory::KernelMemory;
use smallvec::SmallVec;
use static_keys::Patterns;

use super::{Claim, KeyClaims, Owner, Seen, Verdict};
use crate::keys::handle::Keys;
use crate::keys::holds::{Hold, KeyHolds, KeyInstance, KeyState};
use crate::keys::paging::{ITEM_BYTES, PAGE_BYTES};
use crate::keys::registry::Registration;

/// A query for claims.
#[derive(Clone, Debug, Default)]
pub struct ClaimQuery {
    /// Page size, at least 1. The claims on one key are not divided between pages.
    pub page_size: usize,
    /// The first key of the page; empty for the first page.
    pub page_token: String,
    /// Glob patterns of key names.
    pub patterns: Patterns,
    /// Only claims of owners of this principal; empty for all.
    pub principal: String,
    /// Only claims of owners of this name; empty for all.
    pub name: String,
    /// Only claims that are not made.
    pub not_made: bool,
}

/// A page of claims, ordered by key. The claims on one key are ordered from the oldest to the
/// newest.
#[derive(Clone, Debug, Default)]
pub struct ClaimPage {
    /// The claims.
    pub claims: Vec<ClaimView>,
    /// Next page token; empty on the last page.
    pub next_page_token: String,
    /// The guest's boot, as requests name it; empty if it is not known.
    pub boot: String,
    /// If the query is for claims that are not made: the number of claims in any state.
    pub total: usize,
    /// The highest generation of the selected owners whose claims were made; 0 if there is none.
    pub made: u64,
}

/// A claim as it is listed.
#[derive(Clone, Debug)]
pub struct ClaimView {
    /// "name" or "module:name".
    pub key: String,
    /// The claim.
    pub claim: Claim,
    /// The owner's highest generation.
    pub generation: u64,
    /// The claim decides between on and off.
    pub decides: bool,
    /// Its state.
    pub verdict: Verdict,
    /// Time at which the claim expires.
    pub expires_at: Option<SystemTime>,
    /// The owner whose claim decides against this one, if this one is held by others.
    pub decided_by: Option<Owner>,
}

impl Keys {
    /// Lists one page of claims.
    #[must_use]
    pub fn claims(&self, query: &ClaimQuery) -> ClaimPage {
        let registry = &self.shared.registry;
        let read = registry.to_read().ok();
        let registration = read.as_ref().map(|(registration, _)| &**registration);
        let book = self.shared.book();
        // The boot of a kernel that has panicked is not given, because its claims have no future.
        let running = read.as_ref().filter(|(_, panicked)| !panicked);
        let mut page = ClaimPage {
            boot: running
                .map(|(registration, _)| self.shared.boot_name(registration))
                .unwrap_or_default(),
            made: book.claims.made_last(|owner| query.selects(owner)),
            ..ClaimPage::default()
        };
        let mut bytes = 0;
        let memory = registration.and_then(|registration| {
            let ram = self.shared.registry.ram()?;
            Some((registration, registration.memory(ram)))
        });
        for (name, claims) in book.claims.keys_from(&query.page_token) {
            // The counts of other owners' keys are not read, because the lock of the book is held.
            let owners = claims.stack().iter().map(|claim| &claim.owner);
            let selected = owners.filter(|owner| query.selects(owner)).count();
            if selected == 0 || !query.patterns.select_full(name) {
                continue;
            }
            page.total += selected;
            if page.claims.len() >= query.page_size || bytes > PAGE_BYTES / 2 {
                if page.next_page_token.is_empty() {
                    page.next_page_token.clone_from(name);
                }
                match query.not_made {
                    true => continue,
                    false => break,
                }
            }
            let mut claims = claims.clone();
            let holds = |instance| book.holds.copy(instance);
            let count = memory.as_ref().and_then(|(registration, memory)| {
                look(registration, memory, name, &mut claims, holds)
            });
            let decider = claims.decider();
            for claim in claims
                .stack()
                .iter()
                .filter(|claim| query.selects(&claim.owner))
            {
                let state = book.claims.owner(&claim.owner);
                let verdict = count.and_then(|count| claims.verdict(&claim.owner, count));
                let verdict = verdict.unwrap_or(Verdict::Missing);
                if query.not_made && verdict == Verdict::Made {
                    continue;
                }
                let is_held = verdict == Verdict::HeldByOthers;
                let against = decider.filter(|decider| is_held && decider.want != claim.want);
                let decided_by = against.map(|decider| decider.owner.clone());
                let owners = std::iter::once(&claim.owner).chain(&decided_by);
                let owner_bytes: usize = owners.map(|owner| owner.holder().len()).sum();
                bytes += name.len() + owner_bytes + ITEM_BYTES;
                page.claims.push(ClaimView {
                    key: name.clone(),
                    claim: claim.clone(),
                    generation: state.map_or(0, |state| state.generation),
                    decides: decider.is_some_and(|decider| decider.owner == claim.owner),
                    verdict,
                    expires_at: state.and_then(|state| state.expires).map(|(_, at)| at),
                    decided_by,
                });
            }
        }
        page
    }
}

/// Voids in a copy of a key's claims what the guest has changed. Returns the key's count; `None` if
/// the key is not found, in which case the claims stay.
pub(in crate::keys) fn look(
    registration: &Registration,
    memory: &KernelMemory,
    name: &str,
    claims: &mut KeyClaims,
    holds: impl FnOnce(KeyInstance) -> KeyHolds,
) -> Option<i32> {
    let key = registration.catalog.find(name)?;
    let instance = registration.instance(key);
    let state = registration.state(memory, key)?;
    claims.follow_guest(instance, holds(instance), &state);
    Some(state.count)
}

impl ClaimQuery {
    fn selects(&self, owner: &Owner) -> bool {
        (self.principal.is_empty() || self.principal == owner.principal)
            && (self.name.is_empty() || self.name == owner.name)
    }
}

impl Seen {
    /// Returns the references of a key with this state and these holds. Holds that the guest has
    /// voided must be removed first.
    pub(in crate::keys) fn of(claims: &KeyClaims, holds: &KeyHolds, state: &KeyState) -> Self {
        let is_ours = |hold: &Hold| claims.holders().any(|holder| *holder == hold.holder);
        let (mut holders, mut others) = (SmallVec::new(), 0);
        for hold in holds.as_slice() {
            match is_ours(hold) {
                true => holders.push(Arc::clone(&hold.holder)),
                false => others += hold.references,
            }
        }
        let count = u32::try_from(state.count).unwrap_or(0);
        Self {
            own: match state.tracepoint {
                true => u32::from(holds.would_leave_on(state)),
                false => count.saturating_sub(holds.references()),
            },
            others,
            holders,
            tracepoint: state.tracepoint,
            no_probes: state.probes.is_some_and(|probes| probes.is_empty()),
        }
    }
}
