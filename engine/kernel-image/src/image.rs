// SPDX-License-Identifier: Apache-2.0
//! The memory of a kernel or a module, read from its ELF file.

use std::borrow::Cow;
use std::ops::Range;

use object::read::elf::{FileHeader, ProgramHeader, SectionHeader, SectionTable};
use object::{LittleEndian, elf};

use crate::symbols::{Symbol, SymbolKind, Symbols};

/// The maximum number of pieces of an image. A vmlinux has about five, a module about sixty.
const MAX_REGIONS: usize = 4096;

/// The reason why an ELF file cannot be read as a kernel.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The ELF structures are damaged.
    #[error("damaged or truncated ELF file: {0}; copy it again")]
    Damaged(#[from] object::Error),
    /// The file is not for x86.
    #[error("an ELF file for machine {0}: static keys can be read for x86 (32 and 64 bits) only")]
    Machine(u16),
    /// The file is neither a kernel nor a module.
    #[error(
        "an ELF file of type {0}, neither a kernel nor a module: give a vmlinux, a bzImage or a .ko"
    )]
    Type(u16),
    /// The file has nothing to load, or its segments are invalid or overlap.
    #[error("not a kernel: {0}")]
    Layout(&'static str),
}

/// A contiguous piece of the image. The bytes after `data` up to `end` are zero.
#[derive(Debug)]
struct Region<'data> {
    start: u64,
    end: u64,
    data: Cow<'data, [u8]>,
}

/// An image in memory.
#[derive(Debug)]
pub struct Image<'data> {
    /// Size of a pointer in bytes, 4 or 8.
    pub pointer_size: u64,
    /// The file is relocatable. Its addresses are artificial, and only differences within a section
    /// are meaningful.
    pub module: bool,
    /// Sorted and not overlapping.
    regions: Vec<Region<'data>>,
    /// Sorted by their starts.
    executable: Vec<Range<u64>>,
    /// Address range of the section `__jump_table`, if the file has one.
    pub jump_table_section: Option<Range<u64>>,
    /// Address ranges of the code sections that are freed after boot, if the file has section
    /// names.
    pub init_sections: Vec<Range<u64>>,
    /// The symbols of .symtab.
    pub symbols: Symbols,
}

impl<'data> Image<'data> {
    /// Reads an ELF kernel or module.
    ///
    /// # Errors
    /// [`ImageError`].
    pub fn parse(data: &'data [u8]) -> Result<Self, ImageError> {
        match data.get(4) {
            Some(&elf::ELFCLASS32) => Self::parse_class::<elf::FileHeader32<LittleEndian>>(data),
            _ => Self::parse_class::<elf::FileHeader64<LittleEndian>>(data),
        }
    }

    fn parse_class<Elf: FileHeader<Endian = LittleEndian>>(
        data: &'data [u8],
    ) -> Result<Self, ImageError> {
        let header = Elf::parse(data)?;
        let endian = header.endian()?;
        let machine = header.e_machine(endian);
        if machine != elf::EM_X86_64 && machine != elf::EM_386 {
            return Err(ImageError::Machine(machine));
        }
        match header.e_type(endian) {
            elf::ET_EXEC | elf::ET_DYN => Self::parse_kernel(header, endian, data),
            elf::ET_REL => crate::module::parse(header, endian, data),
            other => Err(ImageError::Type(other)),
        }
    }

    fn parse_kernel<Elf: FileHeader<Endian = LittleEndian>>(
        header: &Elf,
        endian: LittleEndian,
        data: &'data [u8],
    ) -> Result<Self, ImageError> {
        let mut regions = Vec::new();
        let mut executable_segments = Vec::new();
        for segment in header.program_headers(endian, data)? {
            if segment.p_type(endian) != elf::PT_LOAD {
                continue;
            }
            let bytes = segment.data(endian, data).map_err(|()| {
                ImageError::Layout(
                    "a segment lies outside the file: it is truncated, copy it again",
                )
            })?;
            let start: u64 = segment.p_vaddr(endian).into();
            let size: u64 = segment.p_memsz(endian).into();
            let end = start.checked_add(size).ok_or(ImageError::Layout(
                "a segment wraps around the end of the address space",
            ))?;
            if segment.p_flags(endian) & elf::PF_X != 0 {
                executable_segments.push(start..end);
            }
            regions.push((start, end, Cow::Borrowed(bytes)));
        }
        let sections = header.sections(endian, data)?;
        let mut executable = Vec::new();
        let mut jump_table_section = None;
        let mut init_sections = Vec::new();
        for section in sections.iter() {
            let flags: u64 = section.sh_flags(endian).into();
            if flags & u64::from(elf::SHF_ALLOC) == 0 {
                continue;
            }
            let start: u64 = section.sh_addr(endian).into();
            let size: u64 = section.sh_size(endian).into();
            let Some(end) = start.checked_add(size) else {
                continue;
            };
            // Since 6.16 `.data` is also marked executable, so writable sections do not count as
            // code.
            let code = elf::SHF_EXECINSTR | elf::SHF_WRITE;
            if flags & u64::from(code) == u64::from(elf::SHF_EXECINSTR) && size > 0 {
                executable.push(start..end);
            }
            match sections.section_name(endian, section) {
                Ok(b"__jump_table") => jump_table_section = Some(start..end),
                // Both lie between __init_begin and __init_end.
                Ok(b".init.text" | b".exit.text") => init_sections.push(start..end),
                _ => {}
            }
        }
        if executable.is_empty() {
            executable = executable_segments;
        }
        let text = executable.clone();
        let symbols = symbol_table(&sections, endian, data, |address| {
            text.iter().any(|range| range.contains(&address))
        })?;
        Self::new(
            header.is_class_64(),
            false,
            regions,
            executable,
            jump_table_section,
            init_sections,
            symbols,
        )
    }

    /// Creates an image from its pieces. Fails if there are none or too many, or if they overlap.
    pub(super) fn new(
        wide: bool,
        module: bool,
        pieces: Vec<(u64, u64, Cow<'data, [u8]>)>,
        mut executable: Vec<Range<u64>>,
        jump_table_section: Option<Range<u64>>,
        init_sections: Vec<Range<u64>>,
        symbols: Symbols,
    ) -> Result<Self, ImageError> {
        let mut regions: Vec<Region<'data>> = pieces
            .into_iter()
            .filter(|(start, end, _)| start < end)
            .map(|(start, end, data)| Region {
                start,
                end,
                data: at_most(data, end - start),
            })
            .collect();
        if regions.is_empty() {
            return Err(ImageError::Layout("nothing in it is to be loaded"));
        }
        if regions.len() > MAX_REGIONS || executable.len() > MAX_REGIONS {
            return Err(ImageError::Layout(
                "it has more than 4096 segments or sections",
            ));
        }
        regions.sort_by_key(|region| region.start);
        if regions.windows(2).any(|pair| pair[0].end > pair[1].start) {
            return Err(ImageError::Layout("its segments overlap"));
        }
        executable.sort_by_key(|range| range.start);
        Ok(Self {
            pointer_size: if wide { 8 } else { 4 },
            module,
            regions,
            executable,
            jump_table_section,
            init_sections,
            symbols,
        })
    }

    fn region(&self, address: u64) -> Option<&Region<'data>> {
        let next = self
            .regions
            .partition_point(|region| region.start <= address);
        let region = &self.regions[next.checked_sub(1)?];
        (address < region.end).then_some(region)
    }

    /// Creates the image of a kernel with 64-bit pointers from pieces of {addresses, bytes} and the
    /// ranges that are code. If a piece has fewer bytes than addresses, the rest is zero.
    ///
    /// # Errors
    /// [`ImageError::Layout`] if pieces overlap, or there are none or too many.
    pub fn from_pieces(
        pieces: impl IntoIterator<Item = (Range<u64>, &'data [u8])>,
        code: Vec<Range<u64>>,
    ) -> Result<Self, ImageError> {
        let pieces = pieces
            .into_iter()
            .map(|(range, bytes)| (range.start, range.end, Cow::Borrowed(bytes)))
            .collect();
        Self::new(
            true,
            false,
            pieces,
            code,
            None,
            Vec::new(),
            Symbols::default(),
        )
    }

    /// Returns the release from `linux_banner` ("Linux version 6.12.1 (...") or a module's
    /// `vermagic=`.
    pub fn release(&self) -> Option<String> {
        let marker: &[u8] = if self.module {
            b"vermagic="
        } else {
            b"Linux version "
        };
        self.pieces().find_map(|(_, data)| {
            data.windows(marker.len())
                .enumerate()
                .filter(|(_, window)| *window == marker)
                .find_map(|(at, _)| {
                    let rest = &data[at + marker.len()..];
                    let end = rest
                        .iter()
                        .take(65)
                        .position(|byte| !byte.is_ascii_graphic())?;
                    let release = std::str::from_utf8(&rest[..end]).ok()?;
                    release
                        .starts_with(|first: char| first.is_ascii_digit())
                        .then(|| release.to_owned())
                })
        })
    }

    /// Returns whether the address is in the image.
    pub fn contains(&self, address: u64) -> bool {
        self.region(address).is_some()
    }

    /// Returns the code of the image, as {address, bytes}.
    pub fn code(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.executable.iter().map(|range| {
            (
                range.start,
                self.bytes_at(range.start, range.end - range.start),
            )
        })
    }

    /// Returns whether the address is in code.
    pub fn is_executable(&self, address: u64) -> bool {
        let next = self
            .executable
            .partition_point(|range| range.start <= address);
        next.checked_sub(1)
            .is_some_and(|index| self.executable[index].contains(&address))
    }

    /// Returns up to `length` bytes of the file at `address`, fewer if the file has fewer there.
    pub fn bytes_at(&self, address: u64, length: u64) -> &[u8] {
        let Some(region) = self.region(address) else {
            return &[];
        };
        let from = usize::try_from(address - region.start).unwrap_or(usize::MAX);
        let bytes = region.data.get(from..).unwrap_or_default();
        &bytes[..bytes
            .len()
            .min(usize::try_from(length).unwrap_or(usize::MAX))]
    }

    /// Reads `N` bytes; bytes of .bss are zero. Returns `None` if the bytes are not all in one
    /// piece of the image.
    pub fn read<const N: usize>(&self, address: u64) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        self.read_into(address, &mut bytes)?;
        Some(bytes)
    }

    /// Like [`Image::read`], but fills `bytes`.
    pub fn read_into(&self, address: u64, bytes: &mut [u8]) -> Option<()> {
        let region = self.region(address)?;
        let length = bytes.len() as u64;
        if region.end - address < length {
            return None;
        }
        let present = self.bytes_at(address, length);
        let (first, rest) = bytes.split_at_mut(present.len());
        first.copy_from_slice(present);
        rest.fill(0);
        Some(())
    }

    /// Returns the pieces of the image as {address, bytes of the file}.
    pub fn pieces(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.regions
            .iter()
            .map(|region| (region.start, &*region.data))
    }
}

/// Returns the symbols of .symtab, sorted.
pub(crate) fn symbol_table<'data, Elf: FileHeader<Endian = LittleEndian>>(
    sections: &SectionTable<'data, Elf>,
    endian: LittleEndian,
    data: &'data [u8],
    is_code: impl Fn(u64) -> bool,
) -> Result<Symbols, object::Error> {
    let mut symbols = Symbols::default();
    let table = sections.symbols(endian, data, elf::SHT_SYMTAB)?;
    for symbol in table.iter() {
        use object::read::elf::Sym as _;
        let kind = symbol.st_type();
        if symbol.is_undefined(endian) || kind == elf::STT_FILE || kind == elf::STT_SECTION {
            continue;
        }
        let address: u64 = symbol.st_value(endian).into();
        symbols.push(
            Symbol {
                address,
                kind: SymbolKind::from_section(is_code(address)),
                global: symbol.st_bind() != elf::STB_LOCAL,
            },
            &String::from_utf8_lossy(symbol.name(endian, table.strings())?),
        );
    }
    symbols.sort();
    Ok(symbols)
}

/// Truncates `data` to `size` bytes: a segment may have more bytes in the file than in memory.
fn at_most(data: Cow<'_, [u8]>, size: u64) -> Cow<'_, [u8]> {
    match usize::try_from(size) {
        Ok(size) if size < data.len() => match data {
            Cow::Borrowed(data) => Cow::Borrowed(&data[..size]),
            Cow::Owned(mut data) => {
                data.truncate(size);
                Cow::Owned(data)
            }
        },
        _ => data,
    }
}
