// SPDX-License-Identifier: Apache-2.0
//! Rolls back a change that was interrupted by the end of the attacher. If the sites of a key
//! contradict its count, the guest's kernel stops with `BUG()` when it changes the key
//! (`__jump_label_patch`, `arch/x86/kernel/jump_label.c`).
//!
//! The guest may have run since the attacher's end, and may have changed keys itself. While one of
//! the guest's gates is closed, such a change is in progress, and nothing is decided
//! ([`Outcome::Busy`]). Afterwards each key is treated according to its count, because the kernel
//! itself relies on the count. The attacher writes sites before counts, in the order of the
//! records. So a count that the attacher cannot have written yet was written by the guest.
//!
//! - A key has the count before the change, or a count after the change that the attacher can have
//!   written: it is rolled back, unless all such keys are as before the change, or all as after it.
//! - A key has another count: the count is the guest's, and the key's sites are made to agree with
//!   it.
//! - A key has another count that is negative, or has sites with foreign bytes: nothing is changed,
//!   and the key is reported as inconsistent.

mod record;

use std::fs::File;
use std::io;

use self::record::State;
pub use self::record::{Change, Part, Record, RecordedGate, array, count, list};

/// The outcome of a rollback. Keys are given by index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The guest is changing its keys or its text. Nothing was written.
    Busy,
    /// The guest can continue.
    Settled(Settled),
}

/// The outcome for each key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settled {
    /// The change was partial and was rolled back, except for the following keys.
    pub rolled_back: bool,
    /// Apart from the following keys: true if the change was made as a whole, false if it was not
    /// made or was rolled back. `None` if there are no other keys.
    pub made: Option<bool>,
    /// The guest has changed these keys itself. They keep the guest's count, and their sites agree
    /// with it.
    pub moved: Vec<u32>,
    /// The sites of these keys may contradict their counts.
    pub inconsistent: Vec<u32>,
}

/// The state in which a key of the change was found.
#[derive(Clone, Copy, Debug, Default)]
struct Found {
    /// The count in memory.
    now: i32,
    /// The count that the change sets.
    after: i32,
    moved: bool,
    /// A site holds bytes that neither the attacher nor the key's own code has written.
    foreign: bool,
}

/// Rolls back the writes of a change if only some of them were made. No vCPU may run. `memory` is
/// the monitor's /proc/PID/mem.
///
/// # Errors
/// The memory cannot be read or written. Writes that were already made stay.
pub fn roll_back(change: &Change, memory: &File) -> io::Result<Outcome> {
    for gate in &change.gates {
        if !gate.is_open(memory)? {
            return Ok(Outcome::Busy);
        }
    }
    let states = change
        .writes
        .iter()
        .map(|record| record.read(memory))
        .collect::<io::Result<Vec<State>>>()?;
    let writes: Vec<(&Record, State)> = change.writes.iter().zip(states).collect();
    let keys = judge(change.keys.len(), &writes);
    let of = |record: &Record| keys.get(record.key as usize).copied();
    let is_moved = |record: &Record| of(record).is_none_or(|key| key.moved || key.foreign);
    let mut own = writes
        .iter()
        .filter(|(record, _)| record.changes() && !is_moved(record));
    let first = own.next().map(|(_, state)| *state);
    let whole = first != Some(State::Half) && own.all(|(_, state)| Some(*state) == first);
    // Writes are undone in reverse order: counts before sites.
    for (record, state) in writes.iter().rev().filter(|(record, _)| record.changes()) {
        let wanted = match of(record) {
            None => continue,
            Some(key) if key.foreign => continue,
            Some(key) if key.moved => match key.agrees() {
                Some(after) if record.counts().is_none() => after,
                _ => continue,
            },
            Some(_) if whole => continue,
            Some(_) => false,
        };
        let as_wanted = match wanted {
            true => State::After,
            false => State::Before,
        };
        if *state != as_wanted {
            record.write(wanted, memory)?;
        }
    }
    let mut settled = Settled {
        rolled_back: !whole,
        made: first.map(|first| whole && first == State::After),
        ..Settled::default()
    };
    for (key, found) in (0..).zip(&keys) {
        if found.foreign || found.moved && found.agrees().is_none() {
            settled.inconsistent.push(key);
        } else if found.moved {
            settled.moved.push(key);
        }
    }
    Ok(Outcome::Settled(settled))
}

impl Found {
    /// Returns whether the present count requires the sites to be as after the change; `None` if
    /// the count is negative and requires neither state.
    fn agrees(self) -> Option<bool> {
        (self.now >= 0).then_some((self.now > 0) == (self.after > 0))
    }
}

/// Decides the outcome of each of the change's keys.
fn judge(keys: usize, writes: &[(&Record, State)]) -> Vec<Found> {
    let mut keys = vec![Found::default(); keys];
    let sites = || {
        writes
            .iter()
            .filter(|(record, _)| record.counts().is_none())
    };
    // The attacher wrote all records before the one during which it died.
    let mut reached = sites().all(|(record, state)| !record.changes() || *state == State::After);
    for (record, state) in writes {
        let Some((before, after)) = record.counts() else {
            continue;
        };
        let now = match state {
            State::Before | State::Half => before,
            State::After => after,
            State::Foreign(now) => *now,
        };
        let moved = match state {
            State::After => !reached,
            State::Foreign(_) => true,
            State::Before | State::Half => false,
        };
        let moved = moved && record.changes();
        reached &= !record.changes() || *state == State::After;
        if let Some(key) = keys.get_mut(record.key as usize) {
            *key = Found {
                now,
                after,
                moved,
                foreign: false,
            };
        }
    }
    for (record, state) in sites() {
        if let (State::Foreign(_), Some(key)) = (state, keys.get_mut(record.key as usize)) {
            key.foreign = true;
        }
    }
    keys
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    const SITES: [u64; 3] = [16, 32, 48];
    const COUNTS: [u64; 2] = [64, 72];
    const GATE: u64 = 80;
    const NOP: [u8; 5] = [0x0f, 0x1f, 0x44, 0, 0];
    const JUMP: [u8; 5] = [0xe9, 1, 2, 3, 4];

    fn one(address: u64, length: u8) -> [Part; 2] {
        [Part { address, length }, Part::default()]
    }

    fn bytes_of(count: i32) -> [u8; 5] {
        let [a, b, c, d] = count.to_le_bytes();
        [a, b, c, d, 0]
    }

    /// Returns a change that turns two keys on or both off. The first key has one site, the second
    /// has two.
    fn change_to(on: bool) -> Change {
        let turned = |off, on_| match on {
            true => (off, on_),
            false => (on_, off),
        };
        let site = |key, address| {
            let (before, after) = turned(NOP, JUMP);
            Record {
                key,
                parts: one(address, 5),
                before,
                after,
            }
        };
        let count = |key, address| {
            let (before, after) = turned(bytes_of(0), bytes_of(1));
            Record {
                key,
                parts: one(address, 4),
                before,
                after,
            }
        };
        let [first, second, third] = SITES;
        Change {
            keys: ["first", "second"].map(str::to_owned).to_vec(),
            writes: vec![
                site(0, first),
                site(1, second),
                site(1, third),
                count(0, COUNTS[0]),
                count(1, COUNTS[1]),
            ],
            gates: vec![RecordedGate {
                address: GATE,
                length: 8,
                mask: !7,
                open: 0,
            }],
        }
    }

    /// Returns memory in which the first `made` writes were made.
    fn memory(change: &Change, made: usize) -> File {
        let memory = tempfile::tempfile().expect("room");
        memory.set_len(128).expect("room");
        for (at, record) in change.writes.iter().enumerate() {
            record.write(at < made, &memory).expect("room");
        }
        memory
    }

    fn content(memory: &File) -> Vec<u8> {
        let mut bytes = vec![0; 128];
        memory.read_exact_at(&mut bytes, 0).expect("there");
        bytes
    }

    fn settle(change: &Change, memory: &File) -> Settled {
        match roll_back(change, memory).expect("read") {
            Outcome::Settled(settled) => settled,
            Outcome::Busy => panic!("the gate is open"),
        }
    }

    fn set_count(memory: &File, key: usize, count: i32) {
        let bytes = count.to_le_bytes();
        memory.write_all_at(&bytes, COUNTS[key]).expect("room");
    }

    fn set_sites(memory: &File, key: usize, bytes: [u8; 5]) {
        let sites = if key == 0 { &SITES[..1] } else { &SITES[1..] };
        for site in sites {
            memory.write_all_at(&bytes, *site).expect("room");
        }
    }

    /// Asserts that each key's sites jump if and only if its count is above zero.
    fn assert_agrees(memory: &File) {
        let content = content(memory);
        for (key, sites) in [(0, &SITES[..1]), (1, &SITES[1..])] {
            let expected = if content[COUNTS[key] as usize] > 0 {
                JUMP
            } else {
                NOP
            };
            for site in sites {
                let site = *site as usize;
                assert_eq!(content[site..site + 5], expected, "key {key}");
            }
        }
    }

    #[test]
    fn what_was_made_in_part_is_rolled_back() {
        for change in [change_to(true), change_to(false)] {
            let all = change.writes.len();
            for made in 0..=all {
                let memory = memory(&change, made);
                let settled = settle(&change, &memory);
                let whole = made == 0 || made == all;
                assert_eq!(settled.rolled_back, !whole, "{made}: {settled:?}");
                assert_eq!(settled.made, Some(made == all), "{made}");
                assert!(settled.moved.is_empty() && settled.inconsistent.is_empty());
                let expected = if made == all { all } else { 0 };
                let expected = self::memory(&change, expected);
                assert_eq!(content(&memory), content(&expected), "{made}");
            }
        }
    }

    #[test]
    fn nothing_is_decided_while_a_gate_is_closed() {
        let change = change_to(true);
        let memory = memory(&change, 3);
        // The word is a task's address, as in a mutex. Its flags are ignored.
        for (word, busy) in [(0x1000_u64, true), (7, false)] {
            memory
                .write_all_at(&word.to_le_bytes(), GATE)
                .expect("room");
            let before = content(&memory);
            let outcome = roll_back(&change, &memory).expect("read");
            assert_eq!(outcome == Outcome::Busy, busy);
            assert_eq!(content(&memory) == before, busy);
        }
    }

    /// The guest took or dropped a reference without checking the sites, because it did not make
    /// the first crossing of zero.
    #[test]
    fn a_key_that_the_guest_counts_on_keeps_its_count_and_gets_the_sites_for_it() {
        for change in [change_to(true), change_to(false)] {
            for made in 0..=change.writes.len() {
                for count in [0, 1, 2, 7] {
                    let memory = memory(&change, made);
                    set_count(&memory, 1, count);
                    let settled = settle(&change, &memory);
                    assert!(
                        settled.inconsistent.is_empty(),
                        "{made} {count}: {settled:?}"
                    );
                    assert_agrees(&memory);
                    if count > 1 {
                        assert_eq!(settled.moved, [1], "{made}");
                        assert_eq!(i32::from(content(&memory)[72]), count);
                    }
                }
            }
        }
    }

    /// The guest keeps its own reference, because the attacher had not reached the counts.
    #[test]
    fn a_key_that_the_guest_turned_itself_is_not_rolled_back() {
        let change = change_to(true);
        let memory = memory(&change, 1);
        set_sites(&memory, 1, JUMP);
        set_count(&memory, 1, 1);
        // The attacher has not written the first key's count, so the second's is the guest's.
        let settled = settle(&change, &memory);
        assert_eq!(settled.moved, [1]);
        assert!(settled.rolled_back);
        assert_agrees(&memory);
        assert_eq!((content(&memory)[64], content(&memory)[72]), (0, 1));
    }

    #[test]
    fn a_key_that_cannot_agree_is_left_and_named() {
        let change = change_to(true);
        // The count is -1 while the guest takes the first reference. The guest then holds a mutex
        // that is a gate, but its kernel may have stopped at this point.
        let one = memory(&change, 2);
        set_count(&one, 1, -1);
        // A breakpoint that the attacher did not write.
        let two = memory(&change, 2);
        two.write_all_at(&[0xcc], SITES[1]).expect("room");
        for memory in [one, two] {
            let before = content(&memory);
            let settled = settle(&change, &memory);
            assert_eq!(settled.inconsistent, [1]);
            assert!(settled.moved.is_empty() && settled.rolled_back);
            let after = content(&memory);
            assert_eq!(after[16..21], NOP, "the other key is rolled back");
            assert_eq!(after[32..], before[32..]);
        }
    }

    /// A site whose last bytes are on another page.
    #[test]
    fn half_an_instruction_is_rolled_back() {
        let mut change = change_to(true);
        change.writes.truncate(1);
        change.writes.push(change_to(true).writes[3]);
        for first in 0..5 {
            change.writes[0].parts =
                [(16, first), (100, 5 - first)].map(|(address, length)| Part { address, length });
            for half in [
                [0xa9, 0x1f, 0x44, 0, 0],
                [0xa9, 1, 0x44, 3, 0],
                [0xa9, 1, 2, 3, 4],
            ] {
                let memory = memory(&change, 0);
                let put = |bytes: &[u8]| {
                    let (head, tail) = bytes.split_at(first.into());
                    memory.write_all_at(head, 16).expect("room");
                    memory.write_all_at(tail, 100).expect("room");
                };
                let before = content(&memory);
                put(&half);
                let settled = settle(&change, &memory);
                assert!(settled.rolled_back);
                assert_eq!(content(&memory), before, "{first} {half:x?}");
                // The attacher does not write this operand.
                put(&[0xa9, 1, 2, 3, 5]);
                assert_eq!(settle(&change, &memory).inconsistent, [0]);
            }
        }
    }

    #[test]
    fn numbers_of_keys_that_do_not_exist_are_ignored() {
        let mut change = change_to(true);
        for record in &mut change.writes {
            record.key = u32::MAX;
        }
        let memory = memory(&change, 2);
        let before = content(&memory);
        assert_eq!(settle(&change, &memory), Settled::default());
        assert_eq!(content(&memory), before);
    }

    #[test]
    fn memory_that_is_gone_is_an_error() {
        let change = change_to(true);
        let memory = memory(&change, 3);
        memory.set_len(40).expect("room");
        roll_back(&change, &memory).expect_err("cut off");
    }
}
