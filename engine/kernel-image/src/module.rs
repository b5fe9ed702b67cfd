// SPDX-License-Identifier: Apache-2.0
//! Lays out a module (.ko) as the loader would, at artificial addresses, and relocates its code and
//! its jump table.

use std::borrow::Cow;
use std::ops::Range;

use object::read::elf::{
    FileHeader, Rela as _, SectionHeader, SectionTable, Sym as _, SymbolTable,
};
use object::{LittleEndian, SectionIndex, elf};

use crate::image::{Image, ImageError};
use crate::symbols::{Symbol, SymbolKind, Symbols};

/// The address of the first section. The other sections follow in the order of the file.
const BASE: u64 = 0x1_0000;
/// The address of the first undefined symbol (a key of the kernel or of another module). Undefined
/// symbols are [`IMPORT_STRIDE`] bytes apart and lie in no section.
const IMPORTS: u64 = 0x4000_0000;
/// Distance between undefined symbols in bytes, enough for an array of keys or a struct tracepoint.
const IMPORT_STRIDE: u64 = 0x1000;
/// The maximum size and the maximum alignment of a section, in bytes.
const MAX_SECTION: u64 = 256 << 20;

/// Lays out a relocatable file.
pub(super) fn parse<'data, Elf: FileHeader<Endian = LittleEndian>>(
    header: &Elf,
    endian: LittleEndian,
    data: &'data [u8],
) -> Result<Image<'data>, ImageError> {
    let sections = header.sections(endian, data)?;
    let table = sections.symbols(endian, data, elf::SHT_SYMTAB)?;
    let wide = header.is_class_64();

    let mut layout = Layout::new(&sections, endian)?;
    let mut executable = Vec::new();
    let mut jump_table_section = None;
    let mut init_sections = Vec::new();
    let mut pieces = Vec::new();
    for (index, section) in sections.enumerate() {
        let Some(range) = layout.range(index) else {
            continue;
        };
        let name = sections.section_name(endian, section)?;
        let code = section.sh_flags(endian).into() & u64::from(elf::SHF_EXECINSTR | elf::SHF_WRITE)
            == u64::from(elf::SHF_EXECINSTR);
        if code {
            executable.push(range.clone());
        }
        match name {
            b"__jump_table" => jump_table_section = Some(range.clone()),
            // This is the loader's rule, module_init_layout_section() in kernel/module/main.c.
            // With CONFIG_MODULE_UNLOAD, `.exit.text` is not freed.
            name if code && name.starts_with(b".init") => init_sections.push(range.clone()),
            _ => {}
        }
        let mut bytes = Cow::Borrowed(section.data(endian, data)?);
        if code || name == b"__jump_table" {
            relocate(
                &sections,
                &table,
                index,
                endian,
                data,
                &mut layout,
                wide,
                bytes.to_mut(),
            )?;
        }
        pieces.push((range.start, range.end, bytes));
    }

    let mut symbols = Symbols::default();
    for (index, symbol) in table.enumerate() {
        let kind = symbol.st_type();
        if kind == elf::STT_FILE || kind == elf::STT_SECTION {
            continue;
        }
        let Some(address) = layout.symbol(&table, index.0, endian)? else {
            continue;
        };
        let code = executable
            .iter()
            .any(|range: &Range<u64>| range.contains(&address));
        symbols.push(
            Symbol {
                address,
                kind: SymbolKind::from_section(code),
                global: symbol.st_bind() != elf::STB_LOCAL,
            },
            &String::from_utf8_lossy(symbol.name(endian, table.strings())?),
        );
    }
    symbols.sort();
    Image::new(
        wide,
        true,
        pieces,
        executable,
        jump_table_section,
        init_sections,
        symbols,
    )
}

/// Addresses of the sections.
struct Layout {
    sections: Vec<Option<Range<u64>>>,
}

impl Layout {
    fn new<'data, Elf: FileHeader<Endian = LittleEndian>>(
        sections: &SectionTable<'data, Elf>,
        endian: LittleEndian,
    ) -> Result<Self, ImageError> {
        let mut next = BASE;
        let mut placed = Vec::new();
        for section in sections.iter() {
            let flags: u64 = section.sh_flags(endian).into();
            let size: u64 = section.sh_size(endian).into();
            let alignment: u64 = Into::<u64>::into(section.sh_addralign(endian)).max(1);
            if flags & u64::from(elf::SHF_ALLOC) == 0 {
                placed.push(None);
                continue;
            }
            if size > MAX_SECTION || !alignment.is_power_of_two() || alignment > MAX_SECTION {
                return Err(ImageError::Layout(
                    "a section of the module is larger than 256 MiB or oddly aligned",
                ));
            }
            let start = next.next_multiple_of(alignment);
            next = start + size;
            if next > IMPORTS {
                return Err(ImageError::Layout("the module is larger than 1 GiB"));
            }
            placed.push(Some(start..next));
        }
        Ok(Self { sections: placed })
    }

    fn range(&self, index: SectionIndex) -> Option<Range<u64>> {
        self.sections.get(index.0).cloned().flatten()
    }

    /// Returns the address of a symbol; `None` if it has none because it is absolute, common or in
    /// a section that is not loaded.
    fn symbol<'data, Elf: FileHeader<Endian = LittleEndian>>(
        &self,
        table: &SymbolTable<'data, Elf>,
        index: usize,
        endian: LittleEndian,
    ) -> Result<Option<u64>, ImageError> {
        // Index 0 is the null symbol, which a relocation without a symbol uses.
        if index == 0 {
            return Ok(None);
        }
        let index = object::SymbolIndex(index);
        let symbol = table.symbol(index)?;
        let value: u64 = symbol.st_value(endian).into();
        if symbol.is_undefined(endian) {
            return Ok(Some(IMPORTS + IMPORT_STRIDE * index.0 as u64));
        }
        let section = table.symbol_section(endian, symbol, index)?;
        Ok(section
            .and_then(|section| self.range(section))
            .map(|range| range.start.wrapping_add(value)))
    }
}

/// Applies the relocations of one section. Of the types in arch/x86/kernel/module.c, only those
/// that code and jump tables have are supported; others are ignored.
#[expect(clippy::too_many_arguments, reason = "an ELF file in its parts")]
fn relocate<'data, Elf: FileHeader<Endian = LittleEndian>>(
    sections: &SectionTable<'data, Elf>,
    table: &SymbolTable<'data, Elf>,
    target: SectionIndex,
    endian: LittleEndian,
    data: &'data [u8],
    layout: &mut Layout,
    wide: bool,
    bytes: &mut [u8],
) -> Result<(), ImageError> {
    let Some(base) = layout.range(target).map(|range| range.start) else {
        return Ok(());
    };
    for section in sections.iter() {
        if section.sh_info(endian) as usize != target.0 {
            continue;
        }
        if let Some((entries, _)) = section.rela(endian, data)? {
            for entry in entries {
                let offset: u64 = entry.r_offset(endian).into();
                let addend: i64 = entry.r_addend(endian).into();
                let symbol = layout.symbol(table, entry.r_sym(endian, false) as usize, endian)?;
                let kind = entry.r_type(endian, false);
                let Some(symbol) = symbol else { continue };
                let value = symbol.wrapping_add_signed(addend);
                let place = base.wrapping_add(offset);
                match kind {
                    elf::R_X86_64_64 if wide => store(bytes, offset, &value.to_le_bytes()),
                    elf::R_X86_64_PC64 if wide => {
                        store(bytes, offset, &value.wrapping_sub(place).to_le_bytes())
                    }
                    elf::R_X86_64_PC32 | elf::R_X86_64_PLT32 if wide => {
                        store(
                            bytes,
                            offset,
                            &(value.wrapping_sub(place) as u32).to_le_bytes(),
                        );
                    }
                    _ => {}
                }
            }
        }
        if let Some((entries, _)) = section.rel(endian, data)? {
            use object::read::elf::Rel as _;
            for entry in entries {
                let offset: u64 = entry.r_offset(endian).into();
                let symbol = layout.symbol(table, entry.r_sym(endian) as usize, endian)?;
                let addend = usize::try_from(offset)
                    .ok()
                    .and_then(|offset| bytes.get(offset..)?.first_chunk())
                    .map(|bytes| u32::from_le_bytes(*bytes));
                let (Some(symbol), Some(addend)) = (symbol, addend) else {
                    continue;
                };
                let value = (symbol as u32).wrapping_add(addend);
                let kind = entry.r_type(endian);
                if kind == elf::R_386_32 {
                    store(bytes, offset, &value.to_le_bytes());
                } else if kind == elf::R_386_PC32 || kind == elf::R_386_PLT32 {
                    store(
                        bytes,
                        offset,
                        &value
                            .wrapping_sub(base.wrapping_add(offset) as u32)
                            .to_le_bytes(),
                    );
                }
            }
        }
    }
    Ok(())
}

/// Stores a relocated value. A relocation outside its section is ignored; the entry that it would
/// have changed is then reported with a problem.
fn store(bytes: &mut [u8], offset: u64, value: &[u8]) {
    if let Ok(offset) = usize::try_from(offset)
        && let Some(place) = bytes
            .get_mut(offset..)
            .and_then(|rest| rest.get_mut(..value.len()))
    {
        place.copy_from_slice(value);
    }
}
