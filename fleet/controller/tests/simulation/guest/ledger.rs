// SPDX-License-Identifier: Apache-2.0
//! Ledgers that cannot be written, that are lost, and that are replaced by an earlier export.

use std::collections::BTreeSet;

use patchbay_fleet::rollout::Millis;
use patchbay_proto::v1;
use tokio::runtime::Runtime;

use super::{Guest, KEYS, locked};

impl Guest {
    /// Lets writes of the ledger fail, or succeed again.
    pub fn fill_disk(&mut self, is_full: bool) {
        self.is_full = is_full;
        let mut new = locked(&self.copies).path.clone().into_os_string();
        // A new ledger is written to this path, and a folder is never replaced.
        new.push(patchbay_guest::log_file::NEXT);
        let _ = match is_full {
            true => std::fs::create_dir(new),
            false => std::fs::remove_dir(new),
        };
    }

    /// Starts the service again without its ledger. It must run, and the disk must not be full.
    pub fn lose_ledger(&mut self, runtime: &Runtime, now: Millis) {
        self.replace_ledger(runtime, now, None);
    }

    /// Exports the ledger. The service may run.
    pub fn export_ledger(&mut self) {
        let ledger = std::fs::read(&locked(&self.copies).path);
        self.exported = ledger.ok().map(|ledger| (self.boots, ledger));
    }

    /// Starts the service again with the ledger that was exported in this boot. Returns whether
    /// there is one. The service must run, and the disk must not be full.
    pub fn import_ledger(&mut self, runtime: &Runtime, now: Millis) -> bool {
        let exported = self.exported.take();
        let Some((_, ledger)) = exported.filter(|(boots, _)| *boots == self.boots) else {
            return false;
        };
        self.replace_ledger(runtime, now, Some(&ledger));
        true
    }

    fn replace_ledger(&mut self, runtime: &Runtime, now: Millis, by: Option<&[u8]>) {
        let before = self.claims(runtime, now, "").expect("served");
        self.stop();
        let path = locked(&self.copies).path.clone();
        match by {
            Some(ledger) => std::fs::write(path, ledger).expect("room"),
            None => _ = std::fs::remove_file(path),
        }
        self.epoch += 1;
        // The service takes the present counts for those of the guest's own.
        self.changed.extend(KEYS);
        self.others.clear();
        self.start(now);
        let after = made(&self.claims(runtime, now, "").expect("served"));
        let lost = made(&before).into_iter().filter(|one| !after.contains(one));
        let owners = lost.map(|(owner, ..)| owner);
        // After the first loss, late calls may make claims of rollouts that have ended.
        let orphans = self.orphans.get_or_insert_with(|| owners.collect());
        orphans.retain(|owner| !after.iter().any(|one| one.0 == *owner));
    }
}

/// Returns the owners, keys and generations of claims.
fn made(page: &v1::ListClaimsResponse) -> BTreeSet<(String, String, u64)> {
    let claims = page.claims.iter();
    let made = claims.map(|one| (one.owner.clone(), one.key.clone(), one.generation));
    made.collect()
}
