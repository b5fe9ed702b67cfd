// SPDX-License-Identifier: Apache-2.0
//! Reads the symbol table that a kernel contains, from an image without section names or symbols.
//!
//! scripts/kallsyms.c writes it as consecutive arrays in .rodata. Each is aligned to the size of a
//! pointer, and since 7.0 to four bytes. The order of the arrays depends on the version:
//!
//! - Before 6.4: offsets, relative_base, num_syms, names, markers, token_table, token_index. Before
//!   4.6 and without `KALLSYMS_BASE_RELATIVE`, addresses take the place of the first two. In 6.2
//!   and 6.3, seqs_of_names follows the markers.
//! - 6.4 to 6.19: num_syms, names, markers, token_table, token_index, offsets, relative_base,
//!   seqs_of_names.
//! - 7.0 and later: as in 6.4, without relative_base.
//!
//! Addresses are stored in one of four forms:
//!
//! | stored | address |
//! |---|---|
//! | u32 | relative_base + offset |
//! | s32 ≥ 0, `KALLSYMS_ABSOLUTE_PERCPU` | the offset itself |
//! | s32 < 0, `KALLSYMS_ABSOLUTE_PERCPU` | relative_base − 1 − offset |
//! | s32, without a base | the offset's own address + offset |
//! | pointer | the address |
//!
//! The tables do not tell which form is used. The right form is the one that places the symbol for
//! the start of the kernel's text where the code of the image starts.
//!
//! Each name is {ULEB128 length, that many token numbers}; before 6.1 the length is one byte. The
//! token table holds 256 strings and is found by the digits: `0` to `9` occur in names, so each of
//! them is a token. The token index must then agree with every string, the markers must agree with
//! every 256th name, and the addresses must be in ascending order. It is very unlikely that other
//! data passes these checks.

use std::borrow::Cow;
use std::ops::Range;

use memchr::memmem;

use crate::image::Image;
use crate::symbols::{MAX_SYMBOLS, Symbol, Symbols};

/// The reason why a kernel's symbols cannot be read from its image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KallsymsError {
    /// The image has no kallsyms, or their layout is unknown.
    #[error("the kernel's read-only data holds no kallsyms: it is built without CONFIG_KALLSYMS")]
    Absent,
    /// The search took too many steps.
    #[error(
        "the search for kallsyms was given up after {MAX_STEPS} steps: too much of the kernel's read-only data resembles them"
    )]
    TooManySteps,
}

/// The tokens `0` to `9`.
const DIGITS: &[u8] = b"0\x001\x002\x003\x004\x005\x006\x007\x008\x009\x00";
/// The maximum length of a token and of a name, in bytes (`KSYM_NAME_LEN` is 512).
const MAX_NAME: usize = 512;
/// The maximum size of all names together, in bytes; a distribution kernel has 5 MiB.
const MAX_NAMES: usize = 64 << 20;
/// The maximum distance from the start of the markers to the token table, in bytes. At most 3 bytes
/// per symbol lie between them.
const MAX_MARKER_DISTANCE: usize = 16 << 20;
/// The maximum number of steps of a search, 16 times as many as the largest stock kernel needs. It
/// bounds the time that a crafted image takes.
const MAX_STEPS: usize = 1 << 28;

/// Reads the symbols of a kernel built with CONFIG_KALLSYMS.
///
/// # Errors
/// [`KallsymsError`].
pub fn read(image: &Image<'_>) -> Result<Symbols, KallsymsError> {
    search(image, &mut Steps::new(MAX_STEPS))
}

fn search(image: &Image<'_>, steps: &mut Steps) -> Result<Symbols, KallsymsError> {
    let digits = memmem::Finder::new(DIGITS);
    let pointer = image.pointer_size as usize;
    for (address, data) in image.pieces() {
        let mut from = 0;
        while let Some(found) = digits.find(&data[from..]) {
            for alignment in [pointer, 4] {
                if let Some(tokens) = Tokens::around(data, from + found, alignment, steps) {
                    let finder = Finder {
                        address,
                        data,
                        tokens,
                        pointer,
                        alignment,
                        steps,
                    };
                    if let Some(symbols) = finder.symbols(image) {
                        return Ok(symbols);
                    }
                }
                if steps.are_used_up() {
                    return Err(KallsymsError::TooManySteps);
                }
            }
            from += found + 1;
        }
    }
    Err(KallsymsError::Absent)
}

/// Counts the steps of a search. Each step examines a byte, a word, a name or a token.
struct Steps {
    taken: usize,
    most: usize,
}

impl Steps {
    fn new(most: usize) -> Self {
        Self { taken: 0, most }
    }

    /// Counts `steps`. Returns `None` if the limit is exceeded, and the caller gives up.
    fn take(&mut self, steps: usize) -> Option<()> {
        self.taken = self.taken.saturating_add(steps);
        (!self.are_used_up()).then_some(())
    }

    fn are_used_up(&self) -> bool {
        self.taken > self.most
    }
}

fn align_up(offset: usize, alignment: usize) -> usize {
    offset.saturating_add(alignment - 1) & !(alignment - 1)
}

fn u32_at(data: &[u8], at: usize) -> Option<u32> {
    data.get(at..)?
        .first_chunk()
        .map(|bytes| u32::from_le_bytes(*bytes))
}

/// Reads a pointer of `size` bytes.
fn pointer_at(data: &[u8], at: usize, size: usize) -> Option<u64> {
    match size {
        4 => u32_at(data, at).map(u64::from),
        _ => data
            .get(at..)?
            .first_chunk()
            .map(|bytes| u64::from_le_bytes(*bytes)),
    }
}

/// Returns the string at `at`, up to its NUL.
fn string_at<'data>(data: &'data [u8], at: usize, steps: &mut Steps) -> Option<&'data [u8]> {
    let rest = data.get(at..)?;
    let length = rest.iter().take(MAX_NAME).position(|byte| *byte == 0);
    steps.take(length.unwrap_or(MAX_NAME) + 1)?;
    rest.get(..length?)
}

/// kallsyms_token_table and kallsyms_token_index.
struct Tokens<'data> {
    strings: Vec<Cow<'data, str>>,
    /// Offset of the table.
    start: usize,
    /// Offset after the index.
    end: usize,
}

impl<'data> Tokens<'data> {
    /// Finds the table and the index around the digits. `digits` is the offset of token 0x30.
    fn around(
        data: &'data [u8],
        digits: usize,
        alignment: usize,
        steps: &mut Steps,
    ) -> Option<Self> {
        let mut end = digits;
        for _ in usize::from(b'0')..256 {
            end += string_at(data, end, steps)?.len() + 1;
        }
        let index_start = align_up(end, alignment);
        let index = data.get(index_start..)?.get(..512)?;
        let offset = |token: usize| {
            usize::from(u16::from_le_bytes([index[2 * token], index[2 * token + 1]]))
        };
        let start = digits.checked_sub(offset(usize::from(b'0')))?;
        let mut expected = 0;
        let mut strings = Vec::with_capacity(256);
        for token in 0..256 {
            if offset(token) != expected {
                return None;
            }
            let string = string_at(data, start + expected, steps)?;
            strings.push(String::from_utf8_lossy(string));
            expected += string.len() + 1;
        }
        Some(Self {
            strings,
            start,
            end: index_start + 512,
        })
    }
}

/// The arrays with the names.
struct Names {
    count: usize,
    /// Offset of kallsyms_num_syms.
    count_at: usize,
    /// The range of each name's token numbers.
    tokens: Vec<Range<usize>>,
}

struct Finder<'data, 'steps> {
    /// Address of `data`.
    address: u64,
    data: &'data [u8],
    tokens: Tokens<'data>,
    pointer: usize,
    /// Alignment of the arrays.
    alignment: usize,
    steps: &'steps mut Steps,
}

impl Finder<'_, '_> {
    fn symbols(mut self, image: &Image<'_>) -> Option<Symbols> {
        let names = self.find_names()?;
        let text = self.find_text(&names)?;
        let addresses = self.find_addresses(&names, text, image)?;
        let mut symbols = Symbols::default();
        let mut name = String::with_capacity(MAX_NAME);
        let mut length = 0;
        for (range, address) in names.tokens.into_iter().zip(addresses) {
            let letter = self.expand(range, &mut name)?;
            length += name.len();
            if length > MAX_NAMES {
                return None;
            }
            symbols.push(Symbol::from_letter(address, letter), &name[1..]);
        }
        symbols.sort();
        Some(symbols)
    }

    /// Returns the index of the symbol for the start of the kernel's text.
    fn find_text(&mut self, names: &Names) -> Option<usize> {
        let mut name = String::with_capacity(MAX_NAME);
        names.tokens.iter().position(|range| {
            self.expand(range.clone(), &mut name).is_some()
                && matches!(&name[1..], "_stext" | "_text")
        })
    }

    /// Expands a symbol into `name`: its nm(1) letter, which is the first character, and its name.
    /// Returns the letter.
    fn expand(&mut self, tokens: Range<usize>, name: &mut String) -> Option<u8> {
        name.clear();
        for token in &self.data[tokens] {
            let string = &self.tokens.strings[usize::from(*token)];
            self.steps.take(1 + string.len())?;
            name.push_str(string);
            if name.len() > MAX_NAME {
                return None;
            }
        }
        name.bytes().next().filter(u8::is_ascii)
    }

    /// Searches backwards from the token table for the markers, which start with 0 and ascend.
    fn find_names(&mut self) -> Option<Names> {
        let lowest = self.tokens.start.saturating_sub(MAX_MARKER_DISTANCE);
        let mut at = self.tokens.start & !3;
        while at >= lowest + 4 {
            at -= 4;
            self.steps.take(1)?;
            // Markers were as wide as a pointer before 4.20.
            for width in [4, self.pointer] {
                let markers = self.markers(at, width);
                self.steps.take(markers.len())?;
                if markers.len() < 4 {
                    continue;
                }
                // The run may include one value too many, from the data after the markers.
                for count in [markers.len(), markers.len() - 1] {
                    if let Some(names) = self.names_before(at, &markers[..count]) {
                        return Some(names);
                    }
                }
            }
        }
        None
    }

    /// Returns the run of plausible markers at an offset. Each marker is at least 512 more than the
    /// previous one, because 256 names take at least 512 bytes.
    fn markers(&self, at: usize, width: usize) -> Vec<usize> {
        let mut markers = Vec::new();
        let mut previous = None;
        for position in (at..self.tokens.start).step_by(width) {
            let Some(value) = pointer_at(self.data, position, width)
                .and_then(|value| usize::try_from(value).ok())
            else {
                break;
            };
            let plausible = match previous {
                None => value == 0,
                Some(previous) => {
                    value > previous && (512..=256 * (MAX_NAME + 2)).contains(&(value - previous))
                }
            };
            if !plausible {
                break;
            }
            markers.push(value);
            previous = Some(value);
        }
        markers
    }

    /// Finds the names, which end right before the markers. Their start is found by the count that
    /// precedes them, which must match the number of markers.
    fn names_before(&mut self, markers_at: usize, markers: &[usize]) -> Option<Names> {
        let last = *markers.last()?;
        let highest = markers_at.checked_sub(last)?;
        let lowest = highest
            .saturating_sub(256 * (MAX_NAME + 2))
            .max(self.alignment);
        let mut start = highest & !(self.alignment - 1);
        while start >= lowest {
            self.steps.take(1)?;
            let count_at = start - self.alignment;
            let count = u32_at(self.data, count_at)? as usize;
            if count.div_ceil(256) == markers.len() && count <= MAX_SYMBOLS {
                // The length had one byte before 6.1, when no name was longer than 255 tokens.
                for wide_lengths in [true, false] {
                    if let Some(tokens) = self.walk(start, count, markers, wide_lengths)
                        && let Some(end) = tokens.last().map(|range| range.end)
                        && align_up(end, self.alignment) == markers_at
                    {
                        return Some(Names {
                            count,
                            count_at,
                            tokens,
                        });
                    }
                }
            }
            start = start.checked_sub(self.alignment)?;
        }
        None
    }

    fn walk(
        &mut self,
        start: usize,
        count: usize,
        markers: &[usize],
        wide_lengths: bool,
    ) -> Option<Vec<Range<usize>>> {
        let mut at = start;
        let mut names = Vec::new();
        for index in 0..count {
            self.steps.take(1)?;
            if index % 256 == 0 && markers.get(index / 256) != Some(&(at - start)) {
                return None;
            }
            let mut length = usize::from(*self.data.get(at)?);
            at += 1;
            if wide_lengths && length & 0x80 != 0 {
                length = length & 0x7f | usize::from(*self.data.get(at)?) << 7;
                at += 1;
            }
            let end = at + length;
            if length == 0 || end > self.tokens.start {
                return None;
            }
            names.push(at..end);
            at = end;
        }
        Some(names)
    }

    /// Returns the addresses of the symbols. `text` is the index of the symbol for the start of the
    /// kernel's text.
    fn find_addresses(
        &mut self,
        names: &Names,
        text: usize,
        image: &Image<'_>,
    ) -> Option<Vec<u64>> {
        // There are at most six passes over the addresses.
        self.steps.take(6 * names.count)?;
        // In 6.4 and later, the addresses follow the token index.
        let after = align_up(self.tokens.end, self.alignment);
        let base_after = align_up(after.checked_add(names.count * 4)?, self.pointer);
        // Before 6.4, the addresses precede the count.
        let base_before = names.count_at.checked_sub(self.pointer);
        let before =
            base_before.and_then(|base| base.checked_sub(align_up(names.count * 4, self.pointer)));
        let absolute = names
            .count_at
            .checked_sub(align_up(names.count * self.pointer, self.pointer));

        let offsets = |at: usize| -> Option<Vec<u32>> {
            (0..names.count)
                .map(|index| u32_at(self.data, at + 4 * index))
                .collect()
        };
        let plausible =
            |addresses: &mut dyn Iterator<Item = u64>| plausible(addresses, text, image);
        let relative_to = |at: Option<usize>, base: Option<usize>| {
            let base = pointer_at(self.data, base?, self.pointer)?;
            let offsets = offsets(at?)?;
            // CONFIG_KALLSYMS_ABSOLUTE_PERCPU: kallsyms_sym_address() in kernel/kallsyms.c.
            let mut percpu = offsets.iter().map(|offset| {
                let offset = i64::from(offset.cast_signed());
                if offset >= 0 {
                    offset.cast_unsigned()
                } else {
                    base.wrapping_sub(1).wrapping_sub(offset.cast_unsigned())
                }
            });
            let mut plain = offsets
                .iter()
                .map(|offset| base.wrapping_add(u64::from(*offset)));
            plausible(&mut percpu).or_else(|| plausible(&mut plain))
        };
        let relative_to_themselves = || {
            let offsets = offsets(after)?;
            let own = (self.address.wrapping_add(after as u64)..).step_by(4);
            plausible(
                &mut own
                    .zip(offsets)
                    .map(|(own, offset)| own.wrapping_add_signed(offset.cast_signed().into())),
            )
        };
        let pointers = || {
            let addresses: Vec<u64> = (0..names.count)
                .map(|index| pointer_at(self.data, absolute? + self.pointer * index, self.pointer))
                .collect::<Option<_>>()?;
            plausible(&mut addresses.into_iter())
        };
        relative_to(Some(after), Some(base_after))
            .or_else(|| relative_to(before, base_before))
            .or_else(relative_to_themselves)
            .or_else(pointers)
    }
}

/// Returns the addresses if they are plausible: they ascend, most are in the image (some lie after
/// its end or are absolute), and the symbol with the index `text` lies where code starts.
fn plausible(
    addresses: &mut dyn Iterator<Item = u64>,
    text: usize,
    image: &Image<'_>,
) -> Option<Vec<u64>> {
    let mask = if image.pointer_size == 4 {
        u64::from(u32::MAX)
    } else {
        u64::MAX
    };
    let addresses: Vec<u64> = addresses.map(|address| address & mask).collect();
    let anchored = image.code().any(|(start, _)| start == addresses[text]);
    let rising = addresses.windows(2).all(|pair| pair[0] <= pair[1]);
    let inside = addresses
        .iter()
        .filter(|address| image.contains(**address))
        .count();
    (anchored && rising && inside * 4 > addresses.len() * 3).then_some(addresses)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A token table with its index: the digits, and empty strings.
    fn token_table() -> Vec<u8> {
        let (mut table, mut index) = (Vec::new(), Vec::new());
        for token in 0..=255_u8 {
            let start = u16::try_from(table.len()).expect("a short table");
            index.extend_from_slice(&start.to_le_bytes());
            table.extend(token.is_ascii_digit().then_some(token));
            table.push(0);
        }
        table.resize(table.len().next_multiple_of(8), 0);
        table.extend_from_slice(&index);
        table
    }

    /// Searches `data` with a limit of steps. Also returns the number of steps taken.
    fn search_in(data: &[u8], most: usize) -> (Result<Symbols, KallsymsError>, usize) {
        let range = 0x1000..0x1000 + data.len() as u64;
        let image = Image::from_pieces([(range, data)], Vec::new()).expect("one piece");
        let mut steps = Steps::new(most);
        (search(&image, &mut steps), steps.taken)
    }

    #[test]
    fn steps_of_a_search_are_bounded() {
        // Markers seem to begin every 16 bytes, and the count of names is searched for before each
        // of them.
        let markers = [0, 2000, 4000, 6000_u32].map(u32::to_le_bytes);
        let mut data = markers.as_flattened().repeat(1 << 11);
        data.extend(token_table());
        let (found, taken) = search_in(&data, usize::MAX);
        assert_eq!(found.err(), Some(KallsymsError::Absent));
        let most = 1 << 18;
        assert!(taken > 8 * most, "{taken}");
        let (found, taken) = search_in(&data, most);
        assert_eq!(found.err(), Some(KallsymsError::TooManySteps));
        assert!((most..most + 2 * MAX_NAME).contains(&taken), "{taken}");
    }

    /// The examination of candidate token tables counts as steps; their number has no limit of its
    /// own.
    #[test]
    fn token_tables_are_searched_for_within_the_steps() {
        let data = token_table().repeat(100);
        let (found, taken) = search_in(&data, usize::MAX);
        assert_eq!(found.err(), Some(KallsymsError::Absent));
        let most = 1 << 16;
        assert!(taken > 16 * most, "{taken}");
        let (found, taken) = search_in(&data, most);
        assert_eq!(found.err(), Some(KallsymsError::TooManySteps));
        assert!((most..most + 2 * MAX_NAME).contains(&taken), "{taken}");
    }
}
