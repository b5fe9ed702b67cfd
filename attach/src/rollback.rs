// SPDX-License-Identifier: Apache-2.0
//! Rolls back a change that the attacher's end has cut in half. A key whose sites say one thing and whose count another would make the
//! guest's kernel stop with `BUG()` when it changes the key itself (`__jump_label_patch`, `arch/x86/kernel/jump_label.c`).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Longest instruction of a site.
const LONGEST: usize = 5;

/// One write, at an address of the monitor's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Records with the same number belong to one key.
    pub key: u32,
    /// Address in the monitor's process.
    pub address: u64,
    /// Number of bytes, at most 5.
    pub length: u8,
    /// The bytes before the change.
    pub before: [u8; LONGEST],
    /// The bytes after it.
    pub after: [u8; LONGEST],
}

impl Record {
    /// Bytes of a record in a pipe.
    pub const SIZE: usize = 4 + 8 + 1 + 2 * LONGEST;

    /// As [`Record::parse`] reads it.
    #[must_use]
    pub fn bytes(&self) -> [u8; Self::SIZE] {
        let mut bytes = [0; Self::SIZE];
        bytes[..4].copy_from_slice(&self.key.to_le_bytes());
        bytes[4..12].copy_from_slice(&self.address.to_le_bytes());
        bytes[12] = self.length;
        bytes[13..18].copy_from_slice(&self.before);
        bytes[18..].copy_from_slice(&self.after);
        bytes
    }

    /// The reverse of [`Record::bytes`].
    #[must_use]
    pub fn parse(bytes: &[u8; Self::SIZE]) -> Self {
        let part = |from: usize| -> [u8; LONGEST] { std::array::from_fn(|at| bytes[from + at]) };
        Self {
            key: u32::from_le_bytes(std::array::from_fn(|at| bytes[at])),
            address: u64::from_le_bytes(std::array::from_fn(|at| bytes[4 + at])),
            length: bytes[12].min(LONGEST as u8),
            before: part(13),
            after: part(18),
        }
    }

    fn bytes_before(&self) -> &[u8] {
        &self.before[..usize::from(self.length)]
    }

    fn bytes_after(&self) -> &[u8] {
        &self.after[..usize::from(self.length)]
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
    let mut made = Vec::with_capacity(records.len());
    let mut foreign = Vec::new();
    for record in records {
        let mut found = [0; LONGEST];
        let found = &mut found[..usize::from(record.length)];
        memory.read_exact_at(found, record.address)?;
        made.push(found == record.bytes_after());
        if found != record.bytes_after() && found != record.bytes_before() {
            foreign.push(record.key);
        }
    }
    let changes = |record: &Record| record.before != record.after;
    let mut states = records
        .iter()
        .zip(&made)
        .filter(|(record, _)| changes(record));
    let first = states.next().map(|(_, made)| *made);
    if foreign.is_empty() && states.all(|(_, made)| Some(*made) == first) {
        return Ok(Outcome::Whole);
    }
    foreign.sort_unstable();
    foreign.dedup();
    // In reverse order, as an undo: counts before sites.
    for (record, made) in records.iter().zip(made).rev() {
        if made && changes(record) && foreign.binary_search(&record.key).is_err() {
            memory.write_all_at(record.bytes_before(), record.address)?;
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

    /// Two keys: a site and a count each, and a second site of the second.
    fn records() -> Vec<Record> {
        let site = |key, address| Record {
            key,
            address,
            length: 5,
            before: [0x0f, 0x1f, 0x44, 0, 0],
            after: [0xe9, 1, 2, 3, 4],
        };
        let count = |key, address| Record {
            key,
            address,
            length: 4,
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
            memory.write_all_at(bytes, record.address).expect("room");
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
        long[12] = 255;
        assert_eq!(usize::from(Record::parse(&long).length), LONGEST);
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

    #[test]
    fn memory_that_is_gone_is_an_error() {
        let memory = memory(3);
        memory.set_len(40).expect("room");
        roll_back(&records(), &memory).expect_err("cut off");
    }
}
