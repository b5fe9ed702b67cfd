// SPDX-License-Identifier: Apache-2.0
//! Reads a kernel's ELF file: its sections, its functions, its branch sites, and names for
//! addresses.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use object::read::elf::ElfFile64;
use object::{
    LittleEndian, Object, ObjectSection, ObjectSymbol, SectionFlags, SectionIndex, SymbolFlags,
    SymbolKind, elf,
};
use static_keys::{EntryFormat, JumpEntry};

/// The address that Linux is linked to (`__START_KERNEL_map`).
const TOPMOST: u64 = 0xffff_ffff_8000_0000;

/// A section that a running kernel has in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Section {
    /// The section's name.
    pub name: String,
    pub address: u64,
    /// The section's size. All bytes beyond `bytes` are zero.
    pub size: u64,
    /// The bytes that the file has.
    pub bytes: Vec<u8>,
    /// The section contains code.
    pub code: bool,
}

impl Section {
    fn contains(&self, address: u64) -> bool {
        address.wrapping_sub(self.address) < self.size
    }
}

/// A symbol of the image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Symbol {
    /// The name.
    pub name: String,
    /// The source file of a local symbol; empty for a global one.
    pub file: String,
    /// The address of the symbol.
    pub address: u64,
    /// The size; zero for labels of the linker and of assembly.
    pub size: u64,
}

/// A function, or another piece of code with a name and a size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function<'image> {
    /// The name, the source file of a local function, and its number among those that share both.
    pub identity: (&'image str, &'image str, usize),
    pub address: u64,
    /// The function's code.
    pub bytes: &'image [u8],
}

/// An image with its sections and symbols.
#[derive(Debug, Default)]
pub struct Image {
    sections: Vec<Section>,
    /// The symbols, ordered by address.
    symbols: Vec<Symbol>,
}

impl Image {
    /// Reads a vmlinux.
    pub fn read(path: &Path) -> Result<Self> {
        let data = std::fs::read(path).with_context(|| format!("no {}", path.display()))?;
        Self::parse(&data).with_context(|| format!("{} is no kernel", path.display()))
    }

    fn parse(data: &[u8]) -> Result<Self> {
        let file = ElfFile64::<LittleEndian>::parse(data)?;
        let mut sections = Vec::new();
        let mut in_memory = HashMap::<SectionIndex, ()>::new();
        for section in file.sections() {
            let SectionFlags::Elf { sh_flags } = section.flags() else {
                continue;
            };
            if sh_flags & u64::from(elf::SHF_ALLOC) == 0 || section.size() == 0 {
                continue;
            }
            in_memory.insert(section.index(), ());
            sections.push(Section {
                name: section.name()?.to_owned(),
                address: section.address(),
                size: section.size(),
                bytes: section.data()?.to_vec(),
                code: sh_flags & u64::from(elf::SHF_EXECINSTR) != 0,
            });
        }
        let mut symbols = Vec::new();
        let mut source = String::new();
        for symbol in file.symbols() {
            if symbol.kind() == SymbolKind::File {
                source = symbol.name()?.to_owned();
                continue;
            }
            let in_memory = |index| in_memory.contains_key(&index);
            if !symbol.section_index().is_some_and(in_memory)
                || symbol.kind() == SymbolKind::Section
            {
                continue;
            }
            let local = matches!(symbol.flags(), SymbolFlags::Elf { st_info, .. }
                if st_info >> 4 == elf::STB_LOCAL);
            symbols.push(Symbol {
                name: symbol.name()?.to_owned(),
                file: if local { source.clone() } else { String::new() },
                address: symbol.address(),
                size: symbol.size(),
            });
        }
        ensure!(!symbols.is_empty(), "it has no symbols");
        Ok(Self::new(sections, symbols))
    }

    /// Creates an image from sections and symbols.
    pub fn new(sections: Vec<Section>, mut symbols: Vec<Symbol>) -> Self {
        symbols.retain(|symbol| !symbol.name.is_empty());
        symbols.sort_by(|a, b| (a.address, &a.name).cmp(&(b.address, &b.name)));
        Self { sections, symbols }
    }

    /// Returns all sections.
    pub fn sections(&self) -> &[Section] {
        &self.sections
    }

    /// Returns the section that contains an address.
    pub fn section(&self, address: u64) -> Option<&Section> {
        self.sections
            .iter()
            .find(|section| section.contains(address))
    }

    /// Returns whether the number can be an address of the image other than a per-CPU one. The
    /// image's other sections are adjacent, in the topmost 2 GiB.
    pub fn is_high(&self, number: u64) -> bool {
        let high = |section: &&Section| section.address >= TOPMOST;
        let ends = |section: &Section| section.address + section.size;
        let begin = self.sections.iter().filter(high).map(|s| s.address).min();
        let end = self.sections.iter().filter(high).map(ends).max();
        begin.is_some_and(|begin| begin <= number) && end.is_some_and(|end| number <= end)
    }

    /// Returns the file's bytes from an address to the end of its section.
    pub fn bytes(&self, address: u64) -> &[u8] {
        let bytes = self.section(address).and_then(|section| {
            let from = usize::try_from(address - section.address).ok()?;
            section.bytes.get(from..)
        });
        bytes.unwrap_or_default()
    }

    fn address(&self, name: &str) -> Option<u64> {
        let symbol = self.symbols.iter().find(|symbol| symbol.name == name)?;
        Some(symbol.address)
    }

    /// Returns the symbols at an address or nearest before it, and the offset from them.
    pub fn names(&self, address: u64) -> (&[Symbol], u64) {
        let end = self
            .symbols
            .partition_point(|symbol| symbol.address <= address);
        let Some(last) = end.checked_sub(1).map(|last| self.symbols[last].address) else {
            return (&[], 0);
        };
        let begin = self.symbols.partition_point(|symbol| symbol.address < last);
        (&self.symbols[begin..end], address - last)
    }

    /// Returns all code that has a name and a size, by address, without aliases.
    pub fn functions(&self) -> Vec<Function<'_>> {
        let mut functions: Vec<Function<'_>> = Vec::new();
        let mut numbers = HashMap::<(&str, &str), usize>::new();
        for symbol in &self.symbols {
            let in_code = self
                .section(symbol.address)
                .is_some_and(|section| section.code);
            if symbol.size == 0 || !in_code {
                continue;
            }
            let number = numbers.entry((&symbol.name, &symbol.file)).or_default();
            let identity = (symbol.name.as_str(), symbol.file.as_str(), *number);
            *number += 1;
            let last = functions.last();
            if last.is_some_and(|last| last.address == symbol.address) {
                continue;
            }
            let bytes = self.bytes(symbol.address);
            let size = usize::try_from(symbol.size).unwrap_or(usize::MAX);
            functions.push(Function {
                identity,
                address: symbol.address,
                bytes: &bytes[..size.min(bytes.len())],
            });
        }
        functions
    }

    /// Returns the jump table.
    pub fn jump_entries(&self) -> Result<Vec<JumpEntry>> {
        let [Some(start), Some(stop)] =
            ["__start___jump_table", "__stop___jump_table"].map(|name| self.address(name))
        else {
            // This is a kernel without jump labels.
            return Ok(Vec::new());
        };
        let size = usize::try_from(
            stop.checked_sub(start)
                .context("its end is before its start")?,
        )?;
        let bytes = self.bytes(start).get(..size);
        let bytes = bytes.context("the jump table lies outside the file")?;
        let entries = EntryFormat::Relative.entries(start, bytes, static_keys::Image::File);
        Ok(entries.collect())
    }

    /// Returns the number of branch sites of each function, by its address, and the number of sites
    /// outside all functions.
    pub fn sites(&self) -> Result<(BTreeMap<u64, usize>, usize)> {
        let functions = self.functions();
        let mut sites = BTreeMap::new();
        let mut elsewhere = 0;
        for entry in self.jump_entries()? {
            let next = functions.partition_point(|function| function.address <= entry.code);
            let around = next.checked_sub(1).map(|index| &functions[index]);
            match around {
                Some(function) if entry.code - function.address < function.bytes.len() as u64 => {
                    *sites.entry(function.address).or_default() += 1;
                }
                _ => elsewhere += 1,
            }
        }
        Ok((sites, elsewhere))
    }
}
