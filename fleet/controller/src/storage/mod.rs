// SPDX-License-Identifier: Apache-2.0
//! Stores rollouts.
//!
//! ```text
//! rollouts/NAME/header            written last and deleted first: the rollout exists while it does
//! rollouts/NAME/spec              the text as it was given
//! rollouts/NAME/sets/DIGEST       the keys of all guests whose plans change the same keys
//! rollouts/NAME/members/00000042
//! ```
//!
//! [`record`] defines the form of the values and its versions. [`authentic`] defines the line
//! before a value that authenticates it.

mod archive;
mod authentic;
mod record;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures_util::{StreamExt, stream};

pub use self::archive::{Archive, Keys, NotArchived, deletions, entries};
pub use self::authentic::{NoKey, RecordKeys};
use self::authentic::{NotAuthentic, Opened};
use crate::rollout::{Header, KeySets, Member, Rollout, bounded};
use crate::spec::Spec;
use crate::store::{Entry, Store, StoreError, Write, folders};

const PREFIX: &str = "rollouts/";
/// The maximum size of the header of a rollout that is planned. The rest of what the store takes is
/// for its timeline and for further waves.
const MAX_PLANNED_HEADER_BYTES: usize = 384 << 10;
/// The maximum size of a set of keys.
const MAX_SET_BYTES: usize = 1 << 20;
/// The number of rollouts that are read from the store at the same time.
const READ_AHEAD: usize = 4;

/// The reason why a rollout is not planned.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} takes {bytes} bytes in the store, which has room for {most}; {advice}")]
pub struct TooLarge {
    what: String,
    bytes: usize,
    most: usize,
    advice: &'static str,
}

fn header_key(name: &str) -> String {
    format!("{PREFIX}{name}/header")
}

fn member_key(name: &str, index: usize) -> String {
    format!("{PREFIX}{name}/members/{index:08}")
}

fn set_key(name: &str, digest: &str) -> String {
    format!("{PREFIX}{name}/sets/{digest}")
}

fn spec_key(name: &str) -> String {
    format!("{PREFIX}{name}/spec")
}

/// Returns whether this program writes such a key for the rollout.
fn is_own_key(name: &str, key: &str) -> bool {
    let part = key
        .strip_prefix(PREFIX)
        .and_then(|rest| rest.strip_prefix(name));
    match part.and_then(|part| part.strip_prefix('/')) {
        Some("header" | "spec") => true,
        Some(part) => match part.split_once('/') {
            Some(("members", index)) => {
                index.len() >= 8 && index.bytes().all(|byte| byte.is_ascii_digit())
            }
            Some(("sets", digest)) => {
                digest.len() == 64 && digest.bytes().all(|byte| byte.is_ascii_hexdigit())
            }
            _ => false,
        },
        None => false,
    }
}

fn put(key: String, value: Vec<u8>) -> Write {
    let lease = None;
    Write::Put { key, value, lease }
}

/// Returns the writes of a rollout that was planned from the text of a spec. The header comes last.
///
/// # Errors
/// [`TooLarge`] if a record would not fit into the store, now or when the rollout has run.
pub fn planned(rollout: &mut Rollout, text: &str) -> Result<Vec<Write>, TooLarge> {
    let mut checked = BTreeSet::new();
    for member in rollout.members() {
        if checked.insert(member.plan.set.digest()) {
            check_member(member)?;
        }
    }
    let mut writes = vec![put(
        spec_key(&rollout.header().name),
        record::encode_spec(text),
    )];
    writes.extend(changed(rollout));
    // All members are new, so the header comes last.
    match writes.last() {
        Some(Write::Put { value, .. }) if value.len() > MAX_PLANNED_HEADER_BYTES => Err(TooLarge {
            what: "the state of the rollout without its guests".to_owned(),
            bytes: value.len(),
            most: MAX_PLANNED_HEADER_BYTES,
            advice: "write fewer waves, gates or freezes, or shorter ones",
        }),
        _ => Ok(writes),
    }
}

/// Checks that the keys of a guest that is planned fit into the store.
///
/// # Errors
/// [`TooLarge`].
pub fn check_member(member: &Member) -> Result<(), TooLarge> {
    let bytes = record::encode_set(&member.plan.set).len();
    match bytes > MAX_SET_BYTES {
        true => Err(TooLarge {
            what: format!("the plan of guest {} on {}", member.guest, member.host),
            bytes,
            most: MAX_SET_BYTES,
            advice: "select fewer keys, in several rollouts",
        }),
        false => Ok(()),
    }
}

/// Returns the writes of the parts that have changed since the last call. They may be made in
/// several transactions, of which only the first ones are made if the driver ends. Each write comes
/// after those that it names: the header after the members that it counts, and before the states of
/// other members, which follow from it (an undo, a wave that is taken back, members that are
/// superseded).
pub fn changed(rollout: &mut Rollout) -> Vec<Write> {
    let changes = rollout.take_changes();
    let (name, members) = (&rollout.header().name, rollout.members());
    let sets = changes.sets.iter();
    let sets = sets.map(|set| put(set_key(name, set.digest()), record::encode_set(set)));
    let member = |index| {
        put(
            member_key(name, index),
            record::encode_member(&members[index]),
        )
    };
    let header = changes
        .header
        .then(|| put(header_key(name), record::encode(rollout.header())));
    let (added, others): (Vec<_>, Vec<_>) = changes
        .members
        .into_iter()
        .partition(|&index| index >= changes.stored_members);
    sets.chain(added.into_iter().map(member))
        .chain(header)
        .chain(others.into_iter().map(member))
        .collect()
}

/// Returns the write that makes what is stored of a rollout no rollout.
pub fn header_deletion(name: &str) -> Write {
    let key = header_key(name);
    Write::Delete { key }
}

/// The rollouts that a store has.
#[derive(Default)]
pub struct Loaded {
    pub rollouts: Vec<(Rollout, Spec)>,
    pub unreadable: Vec<Unreadable>,
    /// The names of the unreadable rollouts whose header says that they are over.
    pub over: BTreeSet<String>,
    pub leftovers: Vec<Leftover>,
    /// The writes that sign those records again that the first key has not signed.
    pub signed_again: Vec<Write>,
}

/// The entries of a rollout that was not completely stored, or not completely deleted.
pub struct Leftover {
    pub name: String,
    pub entries: Vec<Entry>,
}

/// A rollout that cannot be read. Its records are left as they are.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Unreadable {
    pub name: String,
    pub why: String,
}

/// Loads all rollouts, one after the other, so that no answer of the store has more than one of
/// them. If a record of a rollout cannot be read or verified, the other rollouts are still loaded.
///
/// # Errors
/// [`StoreError::Unavailable`].
pub async fn load(store: &dyn Store, keys: &RecordKeys) -> Result<Loaded, StoreError> {
    let names = folders(store, PREFIX).await?;
    let folders = stream::iter(names).map(|name| async move {
        let snapshot = store.range(&format!("{PREFIX}{name}/")).await?;
        Ok::<_, StoreError>((name, snapshot.entries))
    });
    let mut folders = folders.buffered(READ_AHEAD);
    let mut loaded = Loaded::default();
    while let Some((name, entries)) = folders.next().await.transpose()? {
        match read(&name, &entries, keys) {
            Ok(Some(rollout)) => {
                let run = &rollout.0.header().run;
                loaded
                    .signed_again
                    .extend(signed_again(&name, run, &entries, keys));
                loaded.rollouts.push(rollout);
            }
            Ok(None) => {
                let mut entries = entries;
                entries.retain(|entry| is_own_key(&name, &entry.key));
                if !entries.is_empty() {
                    loaded.leftovers.push(Leftover { name, entries });
                }
            }
            Err(why) => {
                let why = bounded(&why);
                if is_over(&name, &entries, keys) {
                    loaded.over.insert(name.clone());
                }
                loaded.unreadable.push(Unreadable { name, why });
            }
        }
    }
    Ok(loaded)
}

/// Returns whether the header of a rollout that cannot be read says that the rollout is over.
fn is_over(name: &str, entries: &[Entry], keys: &RecordKeys) -> bool {
    let key = header_key(name);
    let header = entries.iter().find(|entry| entry.key == key);
    let header = header.and_then(|entry| keys.open(&key, &entry.value).ok());
    header.is_some_and(|header| record::is_over(header.value, name))
}

/// Returns the writes that sign a rollout's records with the first key.
fn signed_again(name: &str, run: &str, entries: &[Entry], keys: &RecordKeys) -> Vec<Write> {
    let mut writes = Vec::new();
    for Entry { key, value, .. } in entries {
        if is_own_key(name, key)
            && let Ok(opened) = keys.open(key, value)
            && !opened.is_current
        {
            let again = put(key.clone(), opened.value.to_vec());
            writes.extend(keys.signed(opened.run.unwrap_or(run), vec![again]));
        }
    }
    writes
}

/// Reads the entries of a rollout; `None` if they have no header.
fn read(
    name: &str,
    entries: &[Entry],
    keys: &RecordKeys,
) -> Result<Option<(Rollout, Spec)>, String> {
    let mut records = Records::open(name, entries, keys)?;
    let key = header_key(name);
    if !records.opened.contains_key(&*key) {
        return Ok(None);
    }
    let header: Header = records.read(&key, record::decode)?;
    if header.name != name {
        let other = header.name;
        return Err(format!(
            "the value of the key {key} is of rollout {other:?}"
        ));
    }
    records.run = Some(header.run.clone());
    records.check_run(&key)?;
    let spec_key = spec_key(name);
    records.check_run(&spec_key)?;
    let spec = records.read(&spec_key, |value| {
        let spec = Spec::parse_stored(record::decode_spec(value)?);
        spec.map_err(|error| record::Unreadable::Malformed(error.to_string()))
    })?;
    let mut sets = KeySets::default();
    for key in records.opened.keys() {
        if let Some(digest) = key.strip_prefix(&set_key(name, "")) {
            let set = records.read(key, |value| record::decode_set(value, digest))?;
            sets.shared(Arc::new(set));
        }
    }
    let stored_sets = sets.digests();
    let member = |index| {
        let key = member_key(name, index);
        records.check_run(&key)?;
        records.read(&key, |value| record::decode_member(value, &sets))
    };
    let members = (0..header.members).map(member);
    let members = members.collect::<Result<Vec<Member>, _>>()?;
    let rollout = Rollout::stored(header, members, stored_sets)
        .map_err(|why| format!("the value of the key {key} is malformed: {why}"))?;
    Ok(Some((rollout, spec)))
}

/// The verified records of a rollout by their keys.
struct Records<'e> {
    opened: BTreeMap<&'e str, Opened<'e>>,
    /// The rollout's random text, once it is known.
    run: Option<String>,
}

impl<'e> Records<'e> {
    /// Verifies all records that this program writes for the rollout.
    fn open(name: &str, entries: &'e [Entry], keys: &RecordKeys) -> Result<Self, String> {
        let own = entries.iter().filter(|entry| is_own_key(name, &entry.key));
        let open = |entry: &'e Entry| {
            let opened = keys.open(&entry.key, &entry.value);
            let opened = opened.map_err(|why| not_authentic(&entry.key, why))?;
            Ok((&*entry.key, opened))
        };
        Ok(Self {
            opened: own.map(open).collect::<Result<_, String>>()?,
            run: None,
        })
    }

    /// Checks that the record was written for this rollout, and not for another one of the same
    /// name.
    fn check_run(&self, key: &str) -> Result<(), String> {
        let run = self.opened.get(key).and_then(|record| record.run);
        match run.is_none() || run == self.run.as_deref() {
            true => Ok(()),
            false => Err(not_authentic(key, NotAuthentic::OtherRun)),
        }
    }

    fn read<T>(
        &self,
        key: &str,
        decode: impl FnOnce(&'e [u8]) -> Result<T, record::Unreadable>,
    ) -> Result<T, String> {
        let record = self.opened.get(key);
        let record = record.ok_or_else(|| format!("the key {key} is missing in the store"))?;
        decode(record.value).map_err(|why| format!("the value of the key {key} {why}"))
    }
}

fn not_authentic(key: &str, why: NotAuthentic) -> String {
    format!("the value of the key {key} {why}")
}

#[cfg(test)]
pub(crate) mod tests;
