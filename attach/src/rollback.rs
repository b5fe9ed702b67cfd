// SPDX-License-Identifier: Apache-2.0
//! Rolls back a change that the attacher's end has cut in half. A key whose sites say one thing and whose count another would make the
//! guest's kernel stop with `BUG()` when it changes the key itself (`__jump_label_patch`, `arch/x86/kernel/jump_label.c`).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use static_keys::instruction::{is_half_replaced, replace};

/// Longest instruction of a site.
const LONGEST: usize = 5;

/// Bytes in one page of the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// Address in the monitor's process.
    pub address: u64,
    /// Number of bytes.
    pub length: u8,
}

/// One write, at addresses of the monitor's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Records with the same number belong to one key.
    pub key: u32,
    /// The second is empty unless the write straddles pages. Together they have at most 5 bytes.
    pub parts: [Part; 2],
    /// The bytes before the change.
    pub before: [u8; LONGEST],
    /// The bytes after it.
    pub after: [u8; LONGEST],
}

/// What a record's bytes are now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Before,
    After,
    /// The attacher died while it replaced an instruction.
    Half,
    /// The guest has changed them.
    Foreign,
}

impl Record {
    /// Bytes of a record in a pipe.
    pub const SIZE: usize = 4 + 2 * 9 + 2 * LONGEST;

    /// As [`Record::parse`] reads it.
    #[must_use]
    pub fn bytes(&self) -> [u8; Self::SIZE] {
        let mut bytes = [0; Self::SIZE];
        bytes[..4].copy_from_slice(&self.key.to_le_bytes());
        for (part, bytes) in self.parts.iter().zip(bytes[4..22].chunks_exact_mut(9)) {
            bytes[..8].copy_from_slice(&part.address.to_le_bytes());
            bytes[8] = part.length;
        }
        bytes[22..27].copy_from_slice(&self.before);
        bytes[27..].copy_from_slice(&self.after);
        bytes
    }

    /// The reverse of [`Record::bytes`].
    #[must_use]
    pub fn parse(bytes: &[u8; Self::SIZE]) -> Self {
        let bytes_at =
            |from: usize| -> [u8; LONGEST] { std::array::from_fn(|at| bytes[from + at]) };
        let mut left = LONGEST as u8;
        let mut part = |from: usize| {
            let length = bytes[from + 8].min(left);
            left -= length;
            Part {
                address: u64::from_le_bytes(std::array::from_fn(|at| bytes[from + at])),
                length,
            }
        };
        Self {
            key: u32::from_le_bytes(std::array::from_fn(|at| bytes[at])),
            parts: [part(4), part(13)],
            before: bytes_at(22),
            after: bytes_at(27),
        }
    }

    /// Number of bytes.
    #[must_use]
    pub fn length(&self) -> usize {
        let lengths = self.parts.iter().map(|part| usize::from(part.length));
        lengths.sum::<usize>().min(LONGEST)
    }

    fn bytes_before(&self) -> &[u8] {
        &self.before[..self.length()]
    }

    fn bytes_after(&self) -> &[u8] {
        &self.after[..self.length()]
    }

    fn changes(&self) -> bool {
        self.bytes_before() != self.bytes_after()
    }

    fn read(&self, memory: &File) -> io::Result<State> {
        let mut bytes = [0; LONGEST];
        let found = &mut bytes[..self.length()];
        let (first, second) = found.split_at_mut(self.parts[0].length.into());
        memory.read_exact_at(first, self.parts[0].address)?;
        memory.read_exact_at(second, self.parts[1].address)?;
        let (before, after) = (self.bytes_before(), self.bytes_after());
        Ok(match &*found {
            found if found == after => State::After,
            found if found == before => State::Before,
            found if is_half_replaced(found, before, after) => State::Half,
            _ => State::Foreign,
        })
    }

    /// Writes the bytes of before. The kernel copies each part in one go; two parts may be the watchdog's own last act.
    fn restore(&self, memory: &File) -> io::Result<()> {
        let [first, second] = self.parts;
        let write = |bytes: &[u8]| {
            let (head, tail) = bytes.split_at(bytes.len().min(first.length.into()));
            memory.write_all_at(head, first.address)?;
            memory.write_all_at(tail, second.address)
        };
        match second.length {
            0 => write(self.bytes_before()),
            _ => replace(self.bytes_before(), write),
        }
    }
}

/// What became of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was made whole or not at all, and nothing was written.
    Whole,
    /// All of it is as before.
    RolledBack,
    /// So many keys stay as they are: the guest has changed them since.
    Left(usize),
}

/// Rolls back these writes if only some of them were made. No vCPU may run. `memory` is the monitor's /proc/PID/mem.
///
/// # Errors
/// The memory cannot be read or written. What was written stays.
pub fn roll_back(records: &[Record], memory: &File) -> io::Result<Outcome> {
    let states: Vec<State> = records
        .iter()
        .map(|record| record.read(memory))
        .collect::<io::Result<_>>()?;
    let both = || records.iter().zip(&states);
    let foreign = both().filter(|(_, state)| **state == State::Foreign);
    let mut foreign: Vec<u32> = foreign.map(|(record, _)| record.key).collect();
    let mut changed = both().filter(|(record, _)| record.changes());
    let first = changed.next().map(|(_, state)| *state);
    let whole = first != Some(State::Half) && changed.all(|(_, state)| Some(*state) == first);
    if foreign.is_empty() && whole {
        return Ok(Outcome::Whole);
    }
    foreign.sort_unstable();
    foreign.dedup();
    // In reverse order, as an undo: counts before sites.
    for (record, state) in both().rev() {
        let made = matches!(state, State::After | State::Half) && record.changes();
        if made && foreign.binary_search(&record.key).is_err() {
            record.restore(memory)?;
        }
    }
    Ok(match foreign.len() {
        0 => Outcome::RolledBack,
        left => Outcome::Left(left),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SITES: [u64; 3] = [16, 32, 48];

    fn one(address: u64, length: u8) -> [Part; 2] {
        [Part { address, length }, Part::default()]
    }

    /// Two keys: a site and a count each, and a second site of the second.
    fn records() -> Vec<Record> {
        let site = |key, address| Record {
            key,
            parts: one(address, 5),
            before: [0x0f, 0x1f, 0x44, 0, 0],
            after: [0xe9, 1, 2, 3, 4],
        };
        let count = |key, address| Record {
            key,
            parts: one(address, 4),
            before: [0; 5],
            after: [1, 0, 0, 0, 0],
        };
        let [first, second, third] = SITES;
        vec![
            site(0, first),
            site(1, second),
            site(1, third),
            count(0, 64),
            count(1, 72),
        ]
    }

    /// Memory in which the first `made` writes were made.
    fn memory(made: usize) -> File {
        let memory = tempfile::tempfile().expect("room");
        memory.set_len(128).expect("room");
        for (at, record) in records().iter().enumerate() {
            let bytes = match at < made {
                true => record.bytes_after(),
                false => record.bytes_before(),
            };
            memory
                .write_all_at(bytes, record.parts[0].address)
                .expect("room");
        }
        memory
    }

    fn content(memory: &File) -> Vec<u8> {
        let mut bytes = vec![0; 128];
        memory.read_exact_at(&mut bytes, 0).expect("there");
        bytes
    }

    #[test]
    fn a_record_survives_the_pipe() {
        for record in records() {
            assert_eq!(Record::parse(&record.bytes()), record);
        }
        let mut long = records()[0].bytes();
        for at in [12, 21] {
            long[at] = 255;
            let parsed = Record::parse(&long);
            assert_eq!(parsed.length(), LONGEST);
            assert_eq!(parsed.parts[1].length, 0);
        }
    }

    #[test]
    fn what_was_made_in_part_is_rolled_back() {
        let all = records().len();
        for made in 0..=all {
            let memory = memory(made);
            let outcome = roll_back(&records(), &memory).expect("read");
            let whole = made == 0 || made == all;
            assert_eq!(outcome == Outcome::Whole, whole, "{made}: {outcome:?}");
            let expected = if made == all { all } else { 0 };
            assert_eq!(content(&memory), content(&self::memory(expected)), "{made}");
        }
    }

    #[test]
    fn a_key_that_the_guest_has_changed_is_left() {
        let memory = memory(3);
        memory.write_all_at(&[7, 0, 0, 0], 64).expect("room");
        let outcome = roll_back(&records(), &memory).expect("read");
        assert_eq!(outcome, Outcome::Left(1));
        let after = content(&memory);
        assert_eq!(after[16], 0xe9, "its site stays with its count");
        assert_eq!(after[64], 7);
        assert_eq!((after[32], after[48]), (0x0f, 0x0f));
    }

    /// A site whose last three bytes are on another page.
    #[test]
    fn half_an_instruction_is_rolled_back() {
        let [count, mut site] = [records()[3], records()[0]];
        let parts = [16, 100].map(|address| Part { address, length: 0 });
        site.parts = parts;
        for first in 0..5 {
            site.parts[0].length = first;
            site.parts[1].length = 5 - first;
            for half in [
                [0xa9, 0x1f, 0x44, 0, 0],
                [0xa9, 1, 0x44, 3, 0],
                [0xa9, 1, 2, 3, 4],
            ] {
                let memory = memory(0);
                let put = |bytes: &[u8]| {
                    let (head, tail) = bytes.split_at(first.into());
                    memory.write_all_at(head, 16).expect("room");
                    memory.write_all_at(tail, 100).expect("room");
                };
                put(&site.before);
                let before = content(&memory);
                put(&half);
                let outcome = roll_back(&[site, count], &memory).expect("read");
                assert_eq!(outcome, Outcome::RolledBack);
                assert_eq!(content(&memory), before, "{first} {half:x?}");
                // Alone it was not made whole either.
                put(&half);
                let outcome = roll_back(&[site], &memory).expect("read");
                assert_eq!(outcome, Outcome::RolledBack);
                // A breakpoint is the guest's own change, and so is another operand.
                for foreign in [[0xcc, 0x1f, 0x44, 0, 0], [0xa9, 1, 2, 3, 5]] {
                    put(&foreign);
                    let outcome = roll_back(&[site, count], &memory).expect("read");
                    assert_eq!(outcome, Outcome::Left(1), "{foreign:x?}");
                }
            }
        }
    }

    #[test]
    fn memory_that_is_gone_is_an_error() {
        let memory = memory(3);
        memory.set_len(40).expect("room");
        roll_back(&records(), &memory).expect_err("cut off");
    }
}
