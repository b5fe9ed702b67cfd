// SPDX-License-Identifier: Apache-2.0
//! Names for addresses, from .symtab, kallsyms or a System.map.

use std::collections::HashMap;
use std::ops::Range;

use foldhash::fast::RandomState;

use crate::classes::printable;

/// The maximum number of symbols that are kept; a distribution kernel has about 200,000.
pub const MAX_SYMBOLS: usize = 1 << 22;

/// The reason why a symbol file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SymbolFileError {
    /// A line is not `address type name`.
    #[error(
        "line {line} of the symbol file is not `address type name`; give a System.map of this very kernel"
    )]
    Line {
        /// Number of the line, from 1.
        line: usize,
    },
    /// There are no symbols, or every address is zero.
    #[error(
        "the symbol file has no addresses: Debian's /boot/System.map is a stub (the real one is in the package \
         linux-image-VERSION-dbg), and /proc/kallsyms shows zeros to unprivileged users"
    )]
    Empty,
    /// There are more than [`MAX_SYMBOLS`] symbols.
    #[error(
        "the symbol file has more than {MAX_SYMBOLS} symbols; give a System.map of this very kernel"
    )]
    TooMany,
}

/// The kind of object that a symbol names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SymbolKind {
    /// Code.
    Text,
    /// Data.
    Data,
}

impl SymbolKind {
    /// Returns the kind of the symbols in a section that is executable or not.
    pub fn from_section(executable: bool) -> Self {
        if executable { Self::Text } else { Self::Data }
    }

    /// Returns the kind for a letter of nm(1), as in kallsyms and System.map.
    fn from_letter(letter: u8) -> Self {
        Self::from_section(matches!(letter, b't' | b'T' | b'w' | b'W' | b'i'))
    }
}

/// A symbol without its name.
#[derive(Clone, Copy, Debug)]
pub struct Symbol {
    /// Virtual address.
    pub address: u64,
    /// The kind of object that the symbol names.
    pub kind: SymbolKind,
    /// The symbol is visible to all files of the kernel.
    pub global: bool,
}

impl Symbol {
    /// Creates a symbol from its letter of nm(1).
    pub fn from_letter(address: u64, letter: u8) -> Self {
        Self {
            address,
            kind: SymbolKind::from_letter(letter),
            global: letter.is_ascii_uppercase(),
        }
    }
}

/// The symbols with one name.
#[derive(Clone, Copy, Debug, Default)]
struct Candidates {
    count: usize,
    first: u64,
    globals: usize,
    first_global: u64,
}

impl Candidates {
    fn add(&mut self, symbol: Symbol) {
        if self.count == 0 {
            self.first = symbol.address;
        }
        self.count += 1;
        if symbol.global {
            if self.globals == 0 {
                self.first_global = symbol.address;
            }
            self.globals += 1;
        }
    }
}

/// Returns the name that a symbol has in the source. ThinLTO adds `.llvm.HASH` to a static symbol
/// that it makes available to other files.
fn source_name(name: &str) -> &str {
    match name.split_once(".llvm.") {
        Some((name, _)) if !name.is_empty() => name,
        _ => name,
    }
}

/// The results of looking up several names.
#[derive(Debug, Default)]
pub struct Named {
    found: HashMap<&'static str, Candidates, RandomState>,
    completed: bool,
}

impl Named {
    /// For each name that has no symbol here, takes the symbols of `others`. `moved` maps the
    /// addresses of `others` to addresses here.
    pub fn complete(&mut self, others: &Self, moved: impl Fn(u64) -> u64) {
        self.completed = true;
        for (name, candidates) in &mut self.found {
            if candidates.count == 0
                && let Some(other) = others.found.get(name)
            {
                *candidates = Candidates {
                    first: moved(other.first),
                    first_global: moved(other.first_global),
                    ..*other
                };
            }
        }
    }

    /// Returns whether [`Named::complete`] was called.
    pub fn is_completed(&self) -> bool {
        self.completed
    }

    /// Returns the address of the only symbol with this name, or of the only global one.
    pub fn address(&self, name: &str) -> Option<u64> {
        let found = self.found.get(name);
        debug_assert!(found.is_some(), "{name} was not looked up");
        let found = found?;
        match (found.count, found.globals) {
            (1, _) => Some(found.first),
            (_, 1) => Some(found.first_global),
            _ => None,
        }
    }

    /// Returns the range between two symbols; `None` if one is missing or they are in the wrong
    /// order.
    pub fn range(&self, start: &str, end: &str) -> Option<Range<u64>> {
        let range = self.address(start)?..self.address(end)?;
        (range.start <= range.end).then_some(range)
    }
}

/// Symbols by address.
#[derive(Debug, Default)]
pub struct Symbols {
    /// Sorted by address once [`Symbols::sort`] was called. The two numbers are the range of the
    /// name in `names`.
    entries: Vec<(Symbol, u32, u32)>,
    names: String,
}

impl Symbols {
    /// Adds a symbol. Characters of its name that are not printable are replaced, because names
    /// reach clients and terminals. A symbol is silently dropped after [`MAX_SYMBOLS`] symbols or 4
    /// GiB of names; only its name is then missing from listings.
    pub fn push(&mut self, symbol: Symbol, name: &str) {
        let name = printable(name.as_bytes());
        let start = u32::try_from(self.names.len());
        let end = u32::try_from(self.names.len().saturating_add(name.len()));
        if let (Ok(start), Ok(end)) = (start, end)
            && self.entries.len() < MAX_SYMBOLS
            && !name.is_empty()
        {
            self.names.push_str(&name);
            self.entries.push((symbol, start, end));
        }
    }

    /// Sorts the symbols by address. Call it after the last push.
    pub fn sort(&mut self) {
        self.entries
            .sort_by_key(|(symbol, start, _)| (symbol.address, *start));
    }

    /// Sets the kind of each symbol by its address, because since 6.16 nm(1) gives the letter of
    /// code to symbols of `.data`.
    pub fn classify(&mut self, is_code: impl Fn(u64) -> bool) {
        for (symbol, ..) in &mut self.entries {
            symbol.kind = SymbolKind::from_section(is_code(symbol.address));
        }
    }

    /// Returns the number of symbols.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether there are no symbols.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    fn name(&self, entry: &(Symbol, u32, u32)) -> &str {
        &self.names[entry.1 as usize..entry.2 as usize]
    }

    /// Returns all symbols, ordered by address.
    pub fn iter(&self) -> impl Iterator<Item = (Symbol, &str)> {
        self.entries.iter().map(|entry| (entry.0, self.name(entry)))
    }

    /// Returns whether a symbol with this name is at the address.
    pub fn contains(&self, address: u64, name: &str) -> bool {
        let first = self
            .entries
            .partition_point(|(symbol, ..)| symbol.address < address);
        self.entries[first..]
            .iter()
            .take_while(|(symbol, ..)| symbol.address == address)
            .any(|entry| self.name(entry) == name)
    }

    /// Adds the symbols of `others` that are missing here. `moved` maps the addresses of `others`
    /// to addresses here.
    pub fn merge(&mut self, others: &Self, moved: impl Fn(u64) -> u64) {
        let missing: Vec<(Symbol, &str)> = others
            .iter()
            .map(|(symbol, name)| {
                let address = moved(symbol.address);
                (Symbol { address, ..symbol }, name)
            })
            .filter(|(symbol, name)| !self.contains(symbol.address, name))
            .collect();
        for (symbol, name) in missing {
            self.push(symbol, name);
        }
        self.sort();
    }

    /// Returns the address of the first symbol with this name, or else of the first symbol that has
    /// this name in the source.
    pub fn address(&self, name: &str) -> Option<u64> {
        let mut renamed = None;
        for entry in &self.entries {
            let own = self.name(entry);
            if own == name {
                return Some(entry.0.address);
            }
            if renamed.is_none() && source_name(own) == name {
                renamed = Some(entry.0.address);
            }
        }
        renamed
    }

    /// Looks up all these names in one pass. If no symbol has a name, the symbols that have it in
    /// the source are used.
    pub fn look_up(&self, names: &[&'static str]) -> Named {
        type Found = HashMap<&'static str, Candidates, RandomState>;
        let mut found: Found = names
            .iter()
            .map(|name| (*name, Candidates::default()))
            .collect();
        let mut renamed = found.clone();
        for entry in &self.entries {
            let own = self.name(entry);
            if let Some(candidates) = found.get_mut(own) {
                candidates.add(entry.0);
            } else if let Some(candidates) = renamed.get_mut(source_name(own)) {
                candidates.add(entry.0);
            }
        }
        for (name, candidates) in &mut found {
            if candidates.count == 0 {
                *candidates = renamed[name];
            }
        }
        Named {
            found,
            completed: false,
        }
    }

    /// Returns the last symbol that begins at or before the address, by its name in the source, and
    /// the offset of the address from the symbol.
    ///
    /// If several symbols begin there, one of the wanted kind is preferred, then one that is
    /// neither a boundary of the linker script nor one of lockdep's keys, which have no size, then
    /// a global one.
    pub fn resolve(&self, address: u64, wanted: SymbolKind) -> Option<(&str, u64)> {
        let next = self
            .entries
            .partition_point(|(symbol, ..)| symbol.address <= address);
        let at = self.entries[next.checked_sub(1)?].0.address;
        let mut best: Option<(u32, &str)> = None;
        for entry in self.entries[..next]
            .iter()
            .rev()
            .take_while(|entry| entry.0.address == at)
            .take(64)
        {
            let name = self.name(entry);
            let boundary = ["__start_", "__stop_", "__end_", "__key."]
                .iter()
                .any(|prefix| name.starts_with(prefix));
            let rank = u32::from(entry.0.kind == wanted) * 4
                + u32::from(!boundary) * 2
                + u32::from(entry.0.global);
            // Of equal ranks, the first in the table is used, as by `%pS`.
            if best.is_none_or(|(best, _)| rank >= best) {
                best = Some((rank, name));
            }
        }
        best.map(|(_, name)| (source_name(name), address - at))
    }

    /// Returns the symbols by which [`Symbols::resolve`] names these addresses, as it names them
    /// here. It must not be asked about others.
    pub fn only(&self, mut addresses: Vec<u64>) -> Self {
        addresses.sort_unstable();
        let mut kept = Self::default();
        let mut last = None;
        for address in addresses {
            let next = self
                .entries
                .partition_point(|(symbol, ..)| symbol.address <= address);
            let at = next
                .checked_sub(1)
                .map(|index| self.entries[index].0.address);
            let Some(at) = at.filter(|at| Some(*at) != last) else {
                continue;
            };
            let first = self
                .entries
                .partition_point(|(symbol, ..)| symbol.address < at);
            for entry in &self.entries[first..next] {
                kept.push(entry.0, self.name(entry));
            }
            last = Some(at);
        }
        kept.entries.shrink_to_fit();
        kept.names.shrink_to_fit();
        kept
    }

    /// Returns the number of bytes from an address to the next symbol of the wanted kind.
    pub fn extent(&self, address: u64, wanted: SymbolKind) -> u64 {
        let next = self
            .entries
            .partition_point(|(symbol, ..)| symbol.address <= address);
        self.entries[next..]
            .iter()
            .find(|(symbol, ..)| symbol.kind == wanted)
            .map_or(u64::MAX, |(symbol, ..)| symbol.address - address)
    }

    /// Reads a System.map or /proc/kallsyms.
    ///
    /// # Errors
    /// [`SymbolFileError`].
    pub fn from_text(text: &[u8]) -> Result<Self, SymbolFileError> {
        let mut symbols = Self::default();
        let mut any = false;
        for (index, line) in text.split(|byte| *byte == b'\n').enumerate() {
            let line = line.trim_ascii();
            if line.is_empty() {
                continue;
            }
            let broken = || SymbolFileError::Line { line: index + 1 };
            let line = std::str::from_utf8(line).map_err(|_| broken())?;
            let mut words = line.split_ascii_whitespace();
            let (Some(address), Some(&[letter]), Some(name)) =
                (words.next(), words.next().map(str::as_bytes), words.next())
            else {
                return Err(broken());
            };
            let address = u64::from_str_radix(address, 16).map_err(|_| broken())?;
            // Symbols of modules in /proc/kallsyms are not part of the image.
            if words.next().is_some_and(|word| word.starts_with('[')) {
                continue;
            }
            any |= address != 0 && address != u64::MAX;
            if symbols.len() == MAX_SYMBOLS {
                return Err(SymbolFileError::TooMany);
            }
            symbols.push(Symbol::from_letter(address, letter), name);
        }
        if !any {
            return Err(SymbolFileError::Empty);
        }
        symbols.sort();
        Ok(symbols)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_printable() {
        let mut symbols = Symbols::default();
        let names = ["plain", "a b~", "clear\x1b[2J\r\n\x7f", "turn\u{202e}"];
        for (address, name) in (0..).zip(names) {
            symbols.push(Symbol::from_letter(address, b't'), name);
        }
        symbols.sort();
        let kept: Vec<&str> = symbols.iter().map(|(_, name)| name).collect();
        assert_eq!(kept, ["plain", "a b~", "clear?[2J???", "turn???"]);
        assert_eq!(symbols.resolve(1, SymbolKind::Text), Some(("a b~", 0)));
    }

    #[test]
    fn what_is_kept_names_its_addresses_as_before() {
        let mut symbols = Symbols::default();
        let all = [
            (10, b't', "first"),
            (20, b't', "local"),
            (20, b'T', "global"),
            (20, b'D', "__start_data"),
            (30, b'd', "data"),
            (40, b't', "last"),
        ];
        for (address, letter, name) in all {
            symbols.push(Symbol::from_letter(address, letter), name);
        }
        symbols.sort();
        let asked = vec![45, 9, 25, 20, 25, 39];
        let kept = symbols.only(asked.clone());
        let names: Vec<&str> = kept.iter().map(|(_, name)| name).collect();
        assert_eq!(names, ["local", "global", "__start_data", "data", "last"]);
        for address in asked {
            for kind in [SymbolKind::Text, SymbolKind::Data] {
                let (before, now) = (symbols.resolve(address, kind), kept.resolve(address, kind));
                assert_eq!(before, now, "{address} {kind:?}");
            }
        }
    }
}
