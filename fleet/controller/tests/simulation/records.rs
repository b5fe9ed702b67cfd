// SPDX-License-Identifier: Apache-2.0
//! The keys of records, replicas with other keys, and the deletion of rollouts that have ended.

use std::collections::BTreeMap;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use fastrand::Rng;
use patchbay_fleet::gates::commands::Commands;
use patchbay_fleet::hosts::Hosts;
use patchbay_fleet::metrics::Metrics;
use patchbay_fleet::runner::{Context, delete};
use patchbay_fleet::storage::{self, Archive, Keys, Loaded, RecordKeys};
use patchbay_fleet::store::Entry;
use tokio::sync::watch;

use super::world::World;

/// The record keys that the replicas should have.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Signing {
    Nothing,
    First,
    /// The second one signs from the next leader on, and the first one is still accepted.
    Both,
    Second,
}

/// Returns the replicas' possible keys: the first, the second, both, and a third one.
fn sets() -> &'static [RecordKeys; 4] {
    static SETS: OnceLock<[RecordKeys; 4]> = OnceLock::new();
    SETS.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let paths = ["first", "second", "third"].map(|name| {
            let path = folder.path().join(name);
            std::fs::write(&path, format!("{name:>40}")).expect("written");
            let own = PermissionsExt::from_mode(0o600);
            std::fs::set_permissions(&path, own).expect("permitted");
            path
        });
        let [first, second, third] = paths;
        [
            vec![first.clone()],
            vec![second.clone()],
            vec![second, first],
            vec![third],
        ]
        .map(|files| RecordKeys::read(&files).expect("good keys"))
    })
}

impl Signing {
    pub fn draw(rng: &mut Rng) -> Self {
        match rng.u32(0..4) {
            0 => Self::First,
            _ => Self::Nothing,
        }
    }

    pub fn is_signing(&self) -> bool {
        *self != Self::Nothing
    }

    /// Returns the keys by which all records can be verified.
    pub fn right(&self) -> RecordKeys {
        let set = match self {
            Self::Nothing => return RecordKeys::default(),
            Self::First => 0,
            Self::Second => 1,
            Self::Both => 2,
        };
        sets()[set].clone()
    }

    /// Returns keys by which no record can be verified.
    pub fn other(&self) -> RecordKeys {
        let set = match self {
            Self::Second => 0,
            _ => 3,
        };
        sets()[set].clone()
    }

    /// Begins to use the second key.
    pub fn rotate(&mut self) -> bool {
        let rotates = *self == Self::First;
        if rotates {
            *self = Self::Both;
        }
        rotates
    }

    /// Ends the use of the first key if the second one signs, because a leader has signed all
    /// records again.
    pub fn are_signed(&mut self) {
        if *self == Self::Both {
            *self = Self::Second;
        }
    }
}

impl World {
    /// Returns what is stored.
    pub fn load_all(&mut self) -> Loaded {
        let loaded = self.load_by(&self.keys.right());
        assert_eq!(loaded.unreadable, [], "every record can be read");
        loaded
    }

    /// Checks that a replica whose keys verify no record takes no rollout and changes nothing.
    pub fn check_blind(&mut self) {
        let loaded = self.load_by(&self.keys.other());
        let (rollouts, leftovers) = (loaded.rollouts.len(), loaded.leftovers.len());
        assert_eq!(
            (rollouts, leftovers, loaded.signed_again.len()),
            (0, 0, 0),
            "records with another key are taken"
        );
    }

    fn load_by(&self, keys: &RecordKeys) -> Loaded {
        let loaded = storage::load(self.store.as_ref(), keys);
        self.runtime.block_on(loaded).expect("the store is reached")
    }

    fn entries(&self, name: &str) -> Vec<Entry> {
        let entries = storage::entries(self.store.as_ref(), name, Keys::Own);
        self.runtime
            .block_on(entries)
            .expect("the store is reached")
    }

    /// Deletes a rollout that has ended, at first while the disk of the archive is full.
    pub fn delete(&mut self, name: &str, folder: &Path) {
        let (_, fence, keys) = self.leader_fence().expect("a replica leads");
        let folder = folder.join("archive");
        std::fs::create_dir_all(&folder).expect("room");
        let context = Context {
            store: Arc::<super::store::MemoryStore>::clone(&self.store),
            fence,
            hosts: Hosts::new(&[]).expect("no names"),
            changes: watch::Sender::new(0),
            metrics: Metrics::default(),
            archive: Archive {
                folder: folder.clone(),
                keep: Duration::ZERO,
            },
            commands: Commands::new(folder.clone()),
            keys,
        };
        let before = self.entries(name);
        let newest = before.iter().map(|entry| entry.modified).max();
        let stem = format!("{name}-{}", newest.expect("it is stored"));
        let file = folder.join(format!("{stem}.jsonl"));
        let _ = std::fs::remove_file(&file);
        // A write to this device fails as on a full disk.
        let partial = folder.join(format!("{stem}.partial"));
        symlink("/dev/full", &partial).expect("room");
        self.count("disk of the archive full");
        let deleted = delete(&context, name, Keys::Own, "person");
        let deleted = self.runtime.block_on(deleted);
        assert!(deleted.is_err(), "{name} is archived on a full disk");
        assert_eq!(self.entries(name), before, "{name} is kept");
        assert!(file.symlink_metadata().is_err(), "{name} has no file");

        std::fs::remove_file(&partial).expect("it exists");
        let deleted = delete(&context, name, Keys::Own, "person");
        let deleted = self.runtime.block_on(deleted).expect("there is room");
        assert_eq!(self.entries(name), [], "{name} is deleted");
        let text = std::fs::read_to_string(&deleted).expect("it is written");
        let _ = std::fs::remove_file(&deleted);
        let kept = text.lines().map(|line| {
            let line: BTreeMap<String, String> = serde_json::from_str(line).expect("JSON");
            (line["key"].clone(), line["value"].clone().into_bytes())
        });
        let kept: BTreeMap<String, Vec<u8>> = kept.collect();
        let before = before.into_iter().map(|entry| (entry.key, entry.value));
        assert_eq!(
            kept,
            before.collect(),
            "the file has every record of {name}"
        );
        self.drivers
            .retain(|_, driver| driver.rollout.header().name != name);
    }
}
