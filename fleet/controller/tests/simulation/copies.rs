// SPDX-License-Identifier: Apache-2.0
//! Copies of guests, which are started from snapshots. A copy has the ledger of the moment of its
//! snapshot. No rollout may take it for the guest that it is a copy of, and none selects it, so its
//! keys and claims stay as they were.

use std::collections::{BTreeMap, BTreeSet};

use patchbay_fleet::rollout::Millis;

use patchbay_proto::v1;
use patchbay_service::keys::SaveRequest;
use patchbay_service::keys::claims::CopiedHolds;
use tokio::runtime::Runtime;

use super::faults::HOSTS;
use super::guest::Guest;
use super::world::World;

/// The maximum number of copies in a run.
const MOST: usize = 2;

/// The state of a guest in its snapshot.
pub struct Snapshot {
    counts: BTreeMap<&'static str, i32>,
    claims: Vec<v1::Claim>,
    /// The name of the guest's boot.
    boot: String,
}

impl Guest {
    /// Starts a copy of this guest, whose service must run. `number` is not the number of another
    /// guest.
    fn copy(
        &mut self,
        runtime: &Runtime,
        now: Millis,
        name: &str,
        host: &str,
        number: u64,
    ) -> Option<Self> {
        let page = self.claims(runtime, now, "").ok()?;
        let saved = runtime.block_on(self.service()?.save(SaveRequest::to_nobody()));
        saved.expect_err("nobody receives the memory");
        let ledger = self.vm.saved().pop()?.ledger;
        let mut copy = self.twin(name, host, number);
        for (key, count) in self.counts() {
            copy.vm.set_count(key, count);
        }
        copy.copied = CopiedHolds::decode(&ledger).expect("whole");
        copy.snapshot = Some(Snapshot {
            counts: self.counts(),
            claims: page.claims,
            boot: page.boot,
        });
        copy.start(now);
        Some(copy)
    }

    /// Checks that nothing has changed the copy, which has these claims.
    pub fn check_copy(&self, page: &v1::ListClaimsResponse) {
        let Some(snapshot) = &self.snapshot else {
            return;
        };
        let name = &self.name;
        assert_ne!(
            page.boot, snapshot.boot,
            "the copy {name} and its original have one boot"
        );
        // The clocks of the copy and of its original differ, so the time left is not compared.
        let mut may_end = snapshot.claims.iter();
        if may_end.any(|claim| claim.expires_at.is_some()) {
            return;
        }
        assert_eq!(self.counts(), snapshot.counts, "the copy {name} is changed");
        let each = |claim: &v1::Claim| {
            let (owner, key) = (claim.owner.clone(), claim.key.clone());
            (owner, key, claim.generation, claim.want, claim.state)
        };
        let claims: BTreeSet<_> = page.claims.iter().map(each).collect();
        let before: BTreeSet<_> = snapshot.claims.iter().map(each).collect();
        assert_eq!(claims, before, "the claims on the copy {name}");
    }
}

impl World {
    /// Starts a copy of a guest, under another name or on a host that never had the guest: on a
    /// host that the guest has left, nothing tells a copy of the same name from the guest after a
    /// boot.
    pub fn start_copy(&mut self, index: usize) {
        let guest = &self.guests[index];
        let copies = self.guests.iter().filter(|one| one.snapshot.is_some());
        let is_full = copies.count() >= MOST;
        if is_full || guest.is_namesake || guest.host.is_none() || !guest.is_served() {
            return;
        }
        let number = self.guests.len() as u64 + 1;
        let others = self.guests.iter().filter(|one| one.name == guest.name);
        let taken: BTreeSet<String> = others.flat_map(|one| one.homes.clone()).collect();
        let free = HOSTS.into_iter().filter(|host| !taken.contains(*host));
        let free: Vec<&str> = free.collect();
        let keeps_name = self.rng.bool() && !free.is_empty();
        let hosts = if keeps_name { &free[..] } else { &HOSTS[..] };
        let host = hosts[self.rng.usize(0..hosts.len())];
        let name = match keeps_name {
            true => self.guests[index].name.clone(),
            false => format!("copy-{number}"),
        };
        let (runtime, now) = (&self.runtime, self.now);
        let copy = self.guests[index].copy(runtime, now, &name, host, number);
        if let Some(copy) = copy {
            self.count("guest copied");
            self.trace(|| format!("guest {index} is copied as {name} on {host}"));
            self.guests.push(copy);
            self.register_soon();
        }
    }
}
