// SPDX-License-Identifier: Apache-2.0
//! Finds the jump table of an image.

use serde::Serialize;
use static_keys::JumpEntry;

use crate::entry::{Format, decode_site};
use crate::image::Image;
use crate::symbols::Symbols;

/// The maximum number of entries that are read; distribution kernels have 4,000 to 12,000.
const MAX_ENTRIES: u64 = 1 << 20;

/// The minimum number of consecutive entries that a search without symbols accepts as a table.
const SHORTEST_RUN: u64 = 8;

/// The maximum distance between the two addresses that jump_label_init() loads, in bytes. Kernels
/// have had 14 to 56.
const NEAR: u64 = 128;

/// The reason why no jump table was found.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    /// The table ends where it starts.
    #[error(
        "the jump table is empty: this kernel was built without CONFIG_JUMP_LABEL, its static keys are plain counters that no site depends on"
    )]
    Empty,
    /// The module has no `__jump_table` section, or an empty one.
    #[error(
        "the module has no jump table: it has no static branch and no tracepoint call in its code"
    )]
    Module,
    /// Neither symbols nor a search found the table.
    #[error(
        "no jump table found: look for CONFIG_JUMP_LABEL=y in the kernel's config; if it is there, give the kernel's own System.map \
         with --debug-file"
    )]
    NotFound,
    /// The entries that a search found may be only a part of the table.
    #[error(
        "this kernel has no readable symbols, and a search found {entries} entries at {start:#x}..{stop:#x} that may be only a part of its \
         jump table (no code refers to both ends): give the kernel's own System.map with --debug-file"
    )]
    NotProven {
        /// Start of the candidate.
        start: u64,
        /// End of the candidate.
        stop: u64,
        /// Entries in between.
        entries: u64,
    },
    /// The symbols belong to another kernel.
    #[error(
        "the symbols place the jump table at {start:#x}..{stop:#x}, which is not in this image: give the System.map of this very kernel"
    )]
    Outside {
        /// Start of the candidate.
        start: u64,
        /// End of the candidate.
        stop: u64,
    },
    /// No entry is valid in any known format.
    #[error(
        "what is at {start:#x}..{stop:#x} is no jump table in a known format: the symbols may be another kernel's, or the image damaged"
    )]
    Format {
        /// Start of the candidate.
        start: u64,
        /// End of the candidate.
        stop: u64,
    },
    /// The table has more entries than any kernel has.
    #[error(
        "the jump table at {start:#x}..{stop:#x} would have more than {MAX_ENTRIES} entries: refused"
    )]
    TooLarge {
        /// Start of the candidate.
        start: u64,
        /// End of the candidate.
        stop: u64,
    },
}

/// The way in which a table was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FoundBy {
    /// `__start___jump_table` and `__stop___jump_table`.
    Symbols,
    /// The ELF section `__jump_table`.
    Section,
    /// The longest run of valid entries in the image, proven to be the whole table.
    Search,
}

/// A jump table.
#[derive(Debug)]
pub struct Table {
    /// The layout of the entries.
    pub format: Format,
    /// Address of the first entry.
    pub start: u64,
    /// Address after the last entry.
    pub stop: u64,
    /// The way in which the table was found.
    pub found_by: FoundBy,
    /// Address of the code that loads the addresses of both ends, if a search found the table.
    pub proof: Option<u64>,
    /// The entries, in the order of the table.
    pub entries: Vec<JumpEntry>,
}

impl Table {
    /// Finds and decodes the table: by symbols, else by section, else by a search.
    ///
    /// # Errors
    /// [`TableError`].
    pub fn find(image: &Image<'_>, symbols: &Symbols) -> Result<Self, TableError> {
        let bounds = symbols
            .address("__start___jump_table")
            .zip(symbols.address("__stop___jump_table"));
        if let Some((start, stop)) = bounds
            && !image.module
        {
            return Self::between(image, start, stop, FoundBy::Symbols);
        }
        if let Some(section) = &image.jump_table_section {
            return Self::between(image, section.start, section.end, FoundBy::Section);
        }
        if image.module {
            return Err(TableError::Module);
        }
        let (format, start, count) = search(image).ok_or(TableError::NotFound)?;
        let table = Self::decode(image, format, start, count, FoundBy::Search);
        let stop = table.stop;
        match bounds_in_code(image, start, stop) {
            None => Err(TableError::NotProven {
                start,
                stop,
                entries: count,
            }),
            proof => Ok(Self { proof, ..table }),
        }
    }

    fn between(
        image: &Image<'_>,
        start: u64,
        stop: u64,
        found_by: FoundBy,
    ) -> Result<Self, TableError> {
        if start == stop {
            return Err(if image.module {
                TableError::Module
            } else {
                TableError::Empty
            });
        }
        if start > stop || !image.contains(start) || !image.contains(stop - 1) {
            return Err(TableError::Outside { start, stop });
        }
        let explained = |format: Format| {
            let count = (stop - start) / format.entry_size();
            (0..count.min(MAX_ENTRIES))
                .filter(|index| {
                    entry_if_valid(image, format, start + index * format.entry_size()).is_some()
                })
                .count() as u64
        };
        let (format, explained) = Format::candidates(image.pointer_size)
            .into_iter()
            .filter(|format| (stop - start).is_multiple_of(format.entry_size()))
            .map(|format| (format, explained(format)))
            .max_by_key(|(_, explained)| *explained)
            .ok_or(TableError::Format { start, stop })?;
        if explained == 0 {
            return Err(TableError::Format { start, stop });
        }
        let count = (stop - start) / format.entry_size();
        if count > MAX_ENTRIES {
            return Err(TableError::TooLarge { start, stop });
        }
        Ok(Self::decode(image, format, start, count, found_by))
    }

    fn decode(
        image: &Image<'_>,
        format: Format,
        start: u64,
        count: u64,
        found_by: FoundBy,
    ) -> Self {
        let size = format.entry_size();
        Self {
            format,
            start,
            stop: start + count * size,
            found_by,
            proof: None,
            entries: (0..count)
                .filter_map(|index| format.decode(image, start + index * size))
                .collect(),
        }
    }
}

/// Returns the entry at `address` if it is valid: its site and its target lie in code, its key lies
/// in data, and the site holds a NOP or a JMP to the target.
fn entry_if_valid(image: &Image<'_>, format: Format, address: u64) -> Option<JumpEntry> {
    let entry = format.decode(image, address)?;
    let in_code = image.is_executable(entry.code) && image.is_executable(entry.target);
    // The key of a module's branch may belong to the kernel.
    let in_data = !image.is_executable(entry.key) && (image.module || image.contains(entry.key));
    (in_code && in_data && decode_site(image.bytes_at(entry.code, 5), &entry).is_ok())
        .then_some(entry)
}

/// Returns the longest run of valid entries: {format, address, count}. Makes one pass over the
/// image for each format and alignment.
fn search(image: &Image<'_>) -> Option<(Format, u64, u64)> {
    let mut best = None;
    let mut best_count = SHORTEST_RUN - 1;
    for format in Format::candidates(image.pointer_size) {
        let size = format.entry_size();
        for (piece, bytes) in image.pieces() {
            let Some(first) = piece.checked_next_multiple_of(image.pointer_size) else {
                continue;
            };
            let end = piece + bytes.len() as u64;
            for phase in (0..size).step_by(image.pointer_size as usize) {
                let mut address = first.saturating_add(phase);
                let mut count = 0;
                while address.checked_add(size).is_some_and(|after| after <= end) {
                    if entry_if_valid(image, format, address).is_some() && count < MAX_ENTRIES {
                        count += 1;
                        if count > best_count {
                            best_count = count;
                            best = Some((format, address - (count - 1) * size, count));
                        }
                    } else {
                        count = 0;
                    }
                    address += size;
                }
            }
        }
    }
    best
}

/// Returns the address of code that loads the addresses of both ends of the table, as
/// jump_label_init() and other functions of kernel/jump_label.c do. Each address is stored in the
/// last four bytes of the instruction that loads it, either absolute or relative to the next
/// instruction.
///
/// The probability that code refers to two given addresses this close together by chance is 10^-10
/// in a kernel with 32 MiB of code.
fn bounds_in_code(image: &Image<'_>, start: u64, stop: u64) -> Option<u64> {
    image.code().find_map(|(base, bytes)| {
        let mut last_start: Option<u64> = None;
        let mut last_stop: Option<u64> = None;
        for (at, word) in (base..).zip(bytes.windows(4)) {
            let word = u32::from_le_bytes(*word.first_chunk()?);
            if refers(image, at, word, start) {
                last_start = Some(at);
            } else if refers(image, at, word, stop) {
                last_stop = Some(at);
            } else {
                continue;
            }
            if let (Some(one), Some(other)) = (last_start, last_stop)
                && one.abs_diff(other) <= NEAR
            {
                return Some(one.min(other));
            }
        }
        None
    })
}

/// Returns whether the four bytes `word` at `at` may refer to `address` as part of an instruction.
fn refers(image: &Image<'_>, at: u64, word: u32, address: u64) -> bool {
    let signed = i64::from(word.cast_signed());
    let (absolute, relative) = (
        signed.cast_unsigned(),
        at.wrapping_add(4).wrapping_add_signed(signed),
    );
    if image.pointer_size == 4 {
        u64::from(word) == address || relative & u64::from(u32::MAX) == address
    } else {
        absolute == address || relative == address
    }
}
