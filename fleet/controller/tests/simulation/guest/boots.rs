// SPDX-License-Identifier: Apache-2.0
//! Guests that boot again, or are set back to an earlier boot.

use std::collections::{BTreeMap, BTreeSet};

use patchbay_fleet::rollout::Millis;
use patchbay_service::testing::found;
use tokio::runtime::Runtime;

use super::module::MODULE_KEY;
use super::{Guest, KEYS, Kind, keys};

/// The state of a guest in a snapshot. It does not have the ledger, which the guest's service
/// keeps elsewhere.
pub struct Saved {
    boot: u64,
    /// See [`Guest::epoch`].
    pub epoch: u32,
    kinds: BTreeMap<&'static str, Kind>,
    counts: BTreeMap<&'static str, i32>,
    /// See [`Guest::changed`].
    changed: BTreeSet<&'static str>,
    /// The owners of claims, and the generation of one claim of each.
    pub owners: BTreeMap<String, u64>,
}

impl Guest {
    /// Boots the guest again, into a kernel with keys of these kinds. Its service goes on if
    /// `in_place`, and is started again otherwise.
    pub fn reboot(&mut self, in_place: bool, kinds: BTreeMap<&'static str, Kind>) {
        self.register((self.number << 16) + u64::from(self.boots), kinds);
        self.orphans = None;
        self.changed.clear();
        match &self.service {
            Some(service) if in_place => {
                self.is_settled = false;
                let tables = self.tables.clone();
                service.registry.register_kernel(tables).expect("taken");
            }
            _ => self.stop(),
        }
        if self.kind(MODULE_KEY) != Kind::Missing {
            self.load_module();
        }
    }

    /// Registers a kernel with keys of these kinds in the boot after this number. It has no claims.
    fn register(&mut self, before: u64, kinds: BTreeMap<&'static str, Kind>) {
        self.kinds = kinds;
        self.vm.set_boot(before);
        assert_eq!(self.vm.register(&keys(&self.original, &self.kinds)), 0);
        self.boot = before + 1;
        self.tables = found(&self.vm);
        self.boots += 1;
        self.epoch += 1;
        self.others.clear();
        self.ends.clear();
    }

    /// Takes the snapshot to which [`Guest::set_back`] sets the guest back. The service must run.
    pub fn save_state(&mut self, runtime: &Runtime, now: Millis) {
        let page = self.claims(runtime, now, "").expect("served");
        let claims = page.claims.into_iter();
        let owners = claims.map(|claim| (claim.owner, claim.generation));
        self.saved = Some(Saved {
            boot: self.boot,
            epoch: self.epoch,
            kinds: self.kinds.clone(),
            counts: self.counts(),
            changed: self.changed.clone(),
            owners: owners.collect(),
        });
    }

    /// Sets the guest back to its snapshot if that is of an earlier boot, and returns the snapshot.
    /// The ledger of that boot is gone. Afterwards no service runs.
    pub fn set_back(&mut self) -> Option<Saved> {
        let saved = self.saved.take_if(|saved| saved.boot != self.boot)?;
        self.stop();
        self.register(saved.boot - 1, saved.kinds.clone());
        if self.kind(MODULE_KEY) != Kind::Missing {
            self.load_module();
        }
        for (key, count) in &saved.counts {
            if self.kind(key) != Kind::Missing {
                self.vm.set_count(key, *count);
            }
        }
        // The service takes the counts for those of the guest's own.
        self.changed = match saved.owners.is_empty() {
            true => saved.changed.clone(),
            false => KEYS.into(),
        };
        Some(saved)
    }
}
