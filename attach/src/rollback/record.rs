// SPDX-License-Identifier: Apache-2.0
//! The description of a change that an attacher sends to its watchdog: the writes, the gates of the
//! kernel, and the names of the keys.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;

use static_keys::instruction::{is_half_replaced, replace};

/// The maximum length of a site's instruction, in bytes.
pub(super) const LONGEST: usize = 5;
/// The size of a key's count, in bytes.
const COUNT: usize = 4;

/// A run of bytes in one page of the guest.
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
    /// Index of the key in [`Change::keys`].
    pub key: u32,
    /// The second part is empty unless the write straddles pages. Together they have 2 or 5 bytes
    /// for an instruction, or 4 for a count.
    pub parts: [Part; 2],
    /// The bytes before the change.
    pub before: [u8; LONGEST],
    /// The bytes after the change.
    pub after: [u8; LONGEST],
}

/// The present state of a record's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Before,
    After,
    /// The attacher ended while it replaced an instruction.
    Half,
    /// The guest has changed the bytes. For a count, the number is its value.
    Foreign(i32),
}

/// A word of the guest's kernel that must have a known value before keys may be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedGate {
    /// Address in the monitor's process.
    pub address: u64,
    /// 1, 2, 4 or 8 bytes.
    pub length: u8,
    /// The bits that are compared.
    pub mask: u64,
    /// The value of these bits while the gate is open.
    pub open: u64,
}

/// A change that is about to be made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// Full names of the keys.
    pub keys: Vec<String>,
    /// The writes in their order: sites before counts.
    pub writes: Vec<Record>,
    /// The gates that were open when the guest was stopped.
    pub gates: Vec<RecordedGate>,
}

impl Record {
    /// The encoded size of a record, in bytes.
    const SIZE: usize = 4 + 2 * 9 + 2 * LONGEST;

    fn bytes(&self) -> [u8; Self::SIZE] {
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

    fn parse(bytes: [u8; Self::SIZE]) -> Self {
        let mut left = LONGEST as u8;
        let mut part = |from: usize| {
            let length = bytes[from + 8].min(left);
            left -= length;
            Part {
                address: u64::from_le_bytes(array_at(&bytes, from)),
                length,
            }
        };
        Self {
            key: u32::from_le_bytes(array_at(&bytes, 0)),
            parts: [part(4), part(13)],
            before: array_at(&bytes, 22),
            after: array_at(&bytes, 27),
        }
    }

    /// Returns the number of bytes.
    pub(super) fn length(&self) -> usize {
        let lengths = self.parts.iter().map(|part| usize::from(part.length));
        lengths.sum::<usize>().min(LONGEST)
    }

    pub(super) fn bytes_before(&self) -> &[u8] {
        &self.before[..self.length()]
    }

    pub(super) fn bytes_after(&self) -> &[u8] {
        &self.after[..self.length()]
    }

    pub(super) fn changes(&self) -> bool {
        self.bytes_before() != self.bytes_after()
    }

    /// Returns the counts before and after the change; `None` if the record is of an instruction.
    pub(super) fn counts(&self) -> Option<(i32, i32)> {
        let count = |bytes: &[u8; LONGEST]| i32::from_le_bytes(array_at(bytes, 0));
        (self.length() == COUNT).then(|| (count(&self.before), count(&self.after)))
    }

    pub(super) fn read(&self, memory: &File) -> io::Result<State> {
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
            _ => State::Foreign(i32::from_le_bytes(array_at(&bytes, 0))),
        })
    }

    /// Writes the bytes of after the change if `after` is set, otherwise those of before it. The
    /// kernel copies each part atomically, but this process may be killed between two parts.
    pub(super) fn write(&self, after: bool, memory: &File) -> io::Result<()> {
        let [first, second] = self.parts;
        let write = |bytes: &[u8]| {
            let (head, tail) = bytes.split_at(bytes.len().min(first.length.into()));
            memory.write_all_at(head, first.address)?;
            memory.write_all_at(tail, second.address)
        };
        let bytes = match after {
            true => self.bytes_after(),
            false => self.bytes_before(),
        };
        match second.length {
            0 => write(bytes),
            _ => replace(bytes, write),
        }
    }
}

impl RecordedGate {
    /// The encoded size of a gate, in bytes.
    const SIZE: usize = 8 + 1 + 8 + 8;

    fn bytes(&self) -> [u8; Self::SIZE] {
        let mut bytes = [0; Self::SIZE];
        bytes[..8].copy_from_slice(&self.address.to_le_bytes());
        bytes[8] = self.length;
        bytes[9..17].copy_from_slice(&self.mask.to_le_bytes());
        bytes[17..].copy_from_slice(&self.open.to_le_bytes());
        bytes
    }

    fn parse(bytes: [u8; Self::SIZE]) -> Self {
        Self {
            address: u64::from_le_bytes(array_at(&bytes, 0)),
            length: bytes[8].min(8),
            mask: u64::from_le_bytes(array_at(&bytes, 9)),
            open: u64::from_le_bytes(array_at(&bytes, 17)),
        }
    }

    pub(super) fn is_open(&self, memory: &File) -> io::Result<bool> {
        let mut word = [0; 8];
        memory.read_exact_at(&mut word[..usize::from(self.length)], self.address)?;
        Ok(u64::from_le_bytes(word) & self.mask == self.open)
    }
}

impl Change {
    /// Encodes the change for [`Change::parse`].
    ///
    /// # Errors
    /// The change is too long.
    pub fn bytes(&self) -> io::Result<Vec<u8>> {
        let mut bytes = count(self.keys.len())?.to_vec();
        for key in &self.keys {
            bytes.extend(count(key.len())?);
            bytes.extend(key.as_bytes());
        }
        bytes.extend(count(self.writes.len())?);
        bytes.extend(self.writes.iter().flat_map(Record::bytes));
        bytes.extend(count(self.gates.len())?);
        bytes.extend(self.gates.iter().flat_map(RecordedGate::bytes));
        Ok(bytes)
    }

    /// Parses the encoding that [`Change::bytes`] returns.
    ///
    /// # Errors
    /// The pipe ends.
    pub fn parse(pipe: &mut impl Read) -> io::Result<Self> {
        Ok(Self {
            keys: list(pipe, |pipe| {
                let bytes = list(pipe, |pipe| Ok(array::<1>(pipe)?[0]))?;
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            })?,
            writes: list(pipe, |pipe| Ok(Record::parse(array(pipe)?)))?,
            gates: list(pipe, |pipe| Ok(RecordedGate::parse(array(pipe)?)))?,
        })
    }
}

fn array_at<const N: usize>(bytes: &[u8], from: usize) -> [u8; N] {
    std::array::from_fn(|at| bytes[from + at])
}

/// Returns the length of a list as it is sent through the pipe.
///
/// # Errors
/// The list is too long.
pub fn count(length: usize) -> io::Result<[u8; 4]> {
    let length = u32::try_from(length).map_err(io::Error::other)?;
    Ok(length.to_le_bytes())
}

/// Reads `N` bytes from the pipe.
///
/// # Errors
/// The pipe ends.
pub fn array<const N: usize>(pipe: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    pipe.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Reads a list from the pipe.
///
/// # Errors
/// The pipe ends.
pub fn list<R: Read, T>(
    pipe: &mut R,
    parse: impl Fn(&mut R) -> io::Result<T>,
) -> io::Result<Vec<T>> {
    let length = u32::from_le_bytes(array(pipe)?);
    (0..length).map(|_| parse(pipe)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_survives_the_pipe() {
        let record = Record {
            key: 1,
            parts: [(2, 3), (4, 2)].map(|(address, length)| Part { address, length }),
            before: [5; LONGEST],
            after: [6; LONGEST],
        };
        let gate = RecordedGate {
            address: 7,
            length: 8,
            mask: 9,
            open: 10,
        };
        let change = Change {
            keys: vec!["a".to_owned(), "mod:b".to_owned()],
            writes: vec![record, record],
            gates: vec![gate],
        };
        let bytes = change.bytes().expect("short");
        assert_eq!(Change::parse(&mut &bytes[..]).expect("whole"), change);
        for length in 0..bytes.len() {
            Change::parse(&mut &bytes[..length]).expect_err("cut off");
        }
    }

    #[test]
    fn lengths_that_cannot_be_are_cut() {
        let mut bytes = [0; Record::SIZE];
        for at in [21, 12] {
            bytes[at] = 255;
            let parsed = Record::parse(bytes);
            assert_eq!(parsed.length(), LONGEST);
        }
        assert_eq!(Record::parse(bytes).parts[1].length, 0);
        assert_eq!(RecordedGate::parse([255; RecordedGate::SIZE]).length, 8);
    }
}
