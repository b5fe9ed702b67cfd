// SPDX-License-Identifier: Apache-2.0
//! Keys whose sites contradict their counts.

use std::sync::Arc;

use patchbay_guest::memory::GuestRam;
use static_keys::{Branch, Key, NotPatchable, count_users};

use super::quarantine::{Quarantine, QuarantineCause};
use super::registry::Registration;

/// A key that has sites that contradict its count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TornKey {
    /// "name" or "module:name".
    pub name: Arc<str>,
    /// `static_key_count()`.
    pub count: i32,
    /// The number of sites with the instruction of the opposite state.
    pub contrary: u32,
    /// Sites that hold neither their NOP nor their JMP.
    pub foreign: u32,
}

impl Registration {
    /// Compares a key's sites with the key's count in guest memory. Returns `None` if they agree,
    /// or if the guest is changing the key.
    pub(super) fn torn(&self, ram: &GuestRam, key: &Key, sites: &mut usize) -> Option<TornKey> {
        let memory = self.memory(ram);
        let count = self.catalog.enabled(&memory, key.id).ok()?;
        if count < 0 {
            return None;
        }
        let mut torn = TornKey {
            name: Arc::clone(&key.full_name),
            count: count_users(count),
            contrary: 0,
            foreign: 0,
        };
        for site in self.catalog.sites(&memory, key.id) {
            match (&site.patchable, site.branch) {
                (Ok(()), Some(branch)) => {
                    *sites += 1;
                    torn.contrary += u32::from(branch != Branch::of(count > 0, site.likely));
                }
                (Err(NotPatchable::Foreign), _) => {
                    *sites += 1;
                    torn.foreign += 1;
                }
                _ => {}
            }
        }
        (torn.contrary + torn.foreign > 0).then_some(torn)
    }

    /// Returns the quarantine of a key that a discovery found torn, if the key is still torn.
    pub(super) fn torn_quarantine(&self, ram: &GuestRam, key: &Key) -> Option<Quarantine> {
        let discovery = self.discovery.as_ref()?;
        if !discovery.torn.contains(&key.id) {
            return None;
        }
        let torn = self.torn(ram, key, &mut 0)?;
        Some(Quarantine {
            cause: QuarantineCause::UndoIncomplete,
            message: format!("{}; repair it (patchbay keys repair)", torn.sentence()),
        })
    }
}

impl TornKey {
    /// Describes how the sites contradict the count.
    #[must_use]
    pub fn sentence(&self) -> String {
        let Self {
            count,
            contrary,
            foreign,
            ..
        } = self;
        format!(
            "its count is {count}, {contrary} of its sites do what the other state would do, and {foreign} hold neither their NOP nor their JMP"
        )
    }
}
