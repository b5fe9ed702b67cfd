// SPDX-License-Identifier: Apache-2.0
//! A file on the host that supplies what a kernel does not reveal: its vmlinux or its System.map.
//!
//! The operator names the file and may name the wrong one. The file is used only if it is from the
//! same build as the running kernel:
//!
//! - Every symbol of the kernel's kallsyms must be in the file. The difference between the two
//!   addresses, which is the offset of KASLR, must be the same for all symbols.
//! - The build ids must be equal if both the kernel and the file have one (a System.map has none).
//!   Types are used only if the build ids were compared.

use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use object::read::elf::{FileHeader, ProgramHeader, SectionHeader, SectionTable};
use object::{LittleEndian, elf};

use super::error::{DiscoveryError, GIVE_FILE, refuse};
use super::kernel::IMAGE_MAP;
use super::layout;
use crate::btf::{Btf, BtfError};
use crate::container::{self, ContainerError};
use crate::dwarf;
use crate::image::{Image, symbol_table};
use crate::kallsyms::{self, KallsymsError};
use crate::symbols::{Named, SymbolFileError, Symbols};

/// The maximum size of a file in bytes; a distribution's vmlinux with its DWARF has up to 1 GiB.
const MAX_FILE: u64 = 2 << 30;
/// The maximum number of characters of a guest's name that errors show.
const MAX_SHOWN: usize = 64;

type Elf = elf::FileHeader64<LittleEndian>;

/// The reason why a debug file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DebugFileError {
    /// The file cannot be read.
    #[error("it cannot be read: {0}")]
    Read(std::io::Error),
    /// The path is a folder, a device, a pipe or a socket. The value says which.
    #[error("it is a {0}, not a regular file; give a vmlinux or a System.map")]
    Kind(&'static str),
    /// The file is too large. The value is its size in bytes.
    #[error("it has {0} bytes, more than {MAX_FILE}; give a vmlinux or a System.map")]
    TooLarge(u64),
    /// The file is packed and cannot be unpacked.
    #[error(transparent)]
    Container(#[from] ContainerError),
    /// The text is not a System.map.
    #[error(transparent)]
    Symbols(#[from] SymbolFileError),
    /// The ELF structures are damaged.
    #[error("damaged or truncated ELF file: {0}; copy it again")]
    Damaged(object::Error),
    /// The file is not a 64-bit kernel.
    #[error(
        "an ELF file of class {class}, type {kind} and machine {machine}, and a kernel of x86-64 has class 2, type 2 or 3 and machine 62; \
         give a vmlinux or a System.map"
    )]
    NoKernel {
        /// `EI_CLASS` of the header: 1 for 32 bits, 2 for 64.
        class: u8,
        /// `e_type`.
        kind: u16,
        /// `e_machine`.
        machine: u16,
    },
    /// The file has no .symtab.
    #[error("it has no symbols: it is stripped; give the vmlinux of the kernel's debug package")]
    Stripped,
    /// The section .BTF is damaged.
    #[error("its BTF is damaged: {0}; copy it again")]
    Btf(BtfError),
    /// The sections .debug_* are damaged.
    #[error("its DWARF is damaged: {0}; copy it again")]
    Dwarf(gimli::Error),
    /// The sections .debug_* are compressed.
    #[error("its DWARF is compressed; unpack it with `objcopy --decompress-debug-sections FILE`")]
    Compressed,
}

/// Converts an error whose text is part of the message. It is not the source too, because a report
/// of the chain of errors would print it twice.
macro_rules! shown {
    ($($variant:ident: $error:ty),*) => {$(
        impl From<$error> for DebugFileError {
            fn from(error: $error) -> Self {
                Self::$variant(error)
            }
        }
    )*};
}

shown!(Read: std::io::Error, Damaged: object::Error, Btf: BtfError, Dwarf: gimli::Error);

/// The information that a discovery took from a debug file, and how it was verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileUse {
    /// The file.
    pub path: PathBuf,
    /// The file's symbols were used, because the kernel's kallsyms lack symbols of data.
    pub data_symbols: bool,
    /// The file's type information was used.
    pub types: bool,
    /// Number of the kernel's symbols that were compared. The file has each of them, at the
    /// kernel's address minus the offset of KASLR.
    pub compared: usize,
    /// The build ids were compared too.
    pub build_id: bool,
}

/// A vmlinux or a System.map.
#[derive(Debug)]
pub struct DebugFile {
    path: PathBuf,
    symbols: Symbols,
    named: Named,
    /// Build id in hexadecimal; empty if the file has none.
    build_id: String,
    /// BTF, converted from DWARF if the file has no BTF.
    types: Option<Vec<u8>>,
}

/// The distance by which KASLR has moved the kernel from its address in the file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slide(u64);

impl Slide {
    /// Converts an address of the file to one of the guest. Values below the image are offsets of
    /// per-CPU variables and constants, which KASLR does not move.
    pub fn to_guest(self, address: u64) -> u64 {
        match address {
            IMAGE_MAP.. => address.wrapping_add(self.0),
            _ => address,
        }
    }

    fn to_file(self, address: u64) -> u64 {
        match address {
            IMAGE_MAP.. => address.wrapping_sub(self.0),
            _ => address,
        }
    }
}

impl DebugFile {
    /// Reads a file of the host.
    ///
    /// # Errors
    /// [`DebugFileError`].
    pub fn open(path: &Path) -> Result<Self, DebugFileError> {
        // This is checked before the file is opened, because opening a pipe without a writer would
        // block.
        let metadata = fs::metadata(path)?;
        let kind = metadata.file_type();
        if !kind.is_file() {
            return Err(DebugFileError::Kind(match kind {
                kind if kind.is_dir() => "folder",
                kind if kind.is_fifo() => "pipe",
                kind if kind.is_socket() => "socket",
                _ => "device",
            }));
        }
        if metadata.len() > MAX_FILE {
            return Err(DebugFileError::TooLarge(metadata.len()));
        }
        let mut bytes = Vec::new();
        // The file may grow while it is read.
        File::open(path)?
            .take(MAX_FILE + 1)
            .read_to_end(&mut bytes)?;
        if bytes.len() as u64 > MAX_FILE {
            return Err(DebugFileError::TooLarge(bytes.len() as u64));
        }
        Self::parse(path, &bytes)
    }

    /// Reads the bytes of a vmlinux, packed or not, or of a System.map. `path` names the file in
    /// errors.
    ///
    /// # Errors
    /// [`DebugFileError`].
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self, DebugFileError> {
        match container::unpack(bytes) {
            Ok(unpacked) => Self::from_elf(path, &unpacked.elf),
            Err(ContainerError::Unknown(_)) => {
                let symbols = Symbols::from_text(bytes)?;
                Ok(Self::new(path, symbols, String::new(), None))
            }
            Err(error) => Err(error.into()),
        }
    }

    fn from_elf(path: &Path, data: &[u8]) -> Result<Self, DebugFileError> {
        check_header(data)?;
        let header = Elf::parse(data)?;
        let endian = header.endian()?;
        let sections = header.sections(endian, data)?;
        // Symbols are classified as code or data later, by their addresses in the guest.
        let symbols = symbol_table(&sections, endian, data, |_| false)?;
        if symbols.is_empty() {
            return Err(DebugFileError::Stripped);
        }
        let mut build = None;
        for segment in header.program_headers(endian, data)? {
            // A file with only the debug information has no bytes in its segments.
            if segment.p_type(endian) == elf::PT_NOTE
                && let Ok(notes) = segment.data(endian, data)
            {
                build = build.or_else(|| build_id(notes));
            }
        }
        for section in sections.iter() {
            if section.sh_type(endian) == elf::SHT_NOTE {
                let notes = section.data(endian, data)?;
                build = build.or_else(|| build_id(notes));
            }
        }
        let content = |name: &str| match sections.section_by_name(endian, name.as_bytes()) {
            Some((_, section)) => section.data(endian, data),
            None => Ok(&[][..]),
        };
        let types = match content(".BTF")? {
            [] => types_of_dwarf(&sections, endian, content)?,
            btf => {
                Btf::parse(btf, &[])?;
                Some(btf.to_vec())
            }
        };
        Ok(Self::new(path, symbols, build.unwrap_or_default(), types))
    }

    fn new(path: &Path, symbols: Symbols, build_id: String, types: Option<Vec<u8>>) -> Self {
        Self {
            path: path.to_owned(),
            named: symbols.look_up(layout::SYMBOLS),
            symbols,
            build_id,
            types,
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn symbols(&self) -> &Symbols {
        &self.symbols
    }

    pub(super) fn named(&self) -> &Named {
        &self.named
    }

    /// Returns the types as BTF.
    pub(super) fn types(&self) -> Option<&[u8]> {
        self.types.as_deref()
    }

    /// Compares the file with the image of a kernel. Returns the file's symbols, and its types if
    /// the build ids are equal.
    pub(crate) fn of_image(
        self,
        image: &Image<'_>,
    ) -> Result<(Symbols, Option<Vec<u8>>), DiscoveryError> {
        match kallsyms::read(image) {
            Ok(own) => {
                let named = own.look_up(layout::SYMBOLS);
                let Slide(by) = self.compare(&own, &named)?;
                if by != 0 {
                    return refuse(format!(
                        "the debug file {} is of another build: its _stext is not where the image has it; {GIVE_FILE}",
                        self.path.display()
                    ));
                }
            }
            Err(KallsymsError::Absent) => {}
            Err(error) => return refuse(error.to_string()),
        }
        let notes = self.named.range("__start_notes", "__stop_notes");
        let notes = notes.map(|range| image.bytes_at(range.start, range.end - range.start));
        let proven = self.compare_build_id(&notes.and_then(build_id).unwrap_or_default())?;
        Ok((self.symbols, self.types.filter(|_| proven)))
    }

    /// Compares every symbol of the guest with the file. Returns the distance between their
    /// addresses.
    pub(super) fn compare(&self, guest: &Symbols, named: &Named) -> Result<Slide, DiscoveryError> {
        let Some(own) = self.named.address("_stext") else {
            return refuse(format!(
                "the debug file {} has no single symbol _stext; {GIVE_FILE}",
                self.path.display()
            ));
        };
        let Some(text) = named.address("_stext") else {
            return refuse(
                "the kernel's kallsyms have no single symbol _stext: no debug file can be compared with them",
            );
        };
        let slide = Slide(text.wrapping_sub(own));
        for (symbol, name) in guest.iter() {
            if self.symbols.contains(slide.to_file(symbol.address), name) {
                continue;
            }
            let shown: String = name.escape_debug().take(MAX_SHOWN).collect();
            let others = match self.symbols.address(name) {
                Some(address) => format!("has it at {:#x}", slide.to_guest(address)),
                None => "does not have it".to_owned(),
            };
            return refuse(format!(
                "the debug file {} is of another build: the kernel has {shown} at {:#x}, and the file, moved to the kernel's _stext, \
                 {others}; {GIVE_FILE}",
                self.path.display(),
                symbol.address
            ));
        }
        Ok(slide)
    }

    /// Compares the kernel's build id with the file's, and fails if they differ. Returns `false` if
    /// one of them has none.
    pub(super) fn compare_build_id(&self, guests: &str) -> Result<bool, DiscoveryError> {
        if guests.is_empty() || self.build_id.is_empty() {
            return Ok(false);
        }
        if !self.build_id.eq_ignore_ascii_case(guests) {
            let shown: String = guests.escape_debug().take(MAX_SHOWN).collect();
            return refuse(format!(
                "the debug file {} is of another build: its build id is {}, the kernel's is {shown}; {GIVE_FILE}",
                self.path.display(),
                self.build_id
            ));
        }
        Ok(true)
    }
}

/// Refuses an ELF file that is not an x86-64 kernel. Both ELF classes have these members at the
/// same offsets.
fn check_header(data: &[u8]) -> Result<(), DebugFileError> {
    let member = |at: usize| match data.get(at..at + 2) {
        Some(&[low, high]) => u16::from_le_bytes([low, high]),
        _ => 0,
    };
    let class = data.get(4).copied().unwrap_or_default();
    let (kind, machine) = (member(16), member(18));
    let is_kernel = class == elf::ELFCLASS64
        && machine == elf::EM_X86_64
        && matches!(kind, elf::ET_EXEC | elf::ET_DYN);
    if is_kernel {
        return Ok(());
    }
    Err(DebugFileError::NoKernel {
        class,
        kind,
        machine,
    })
}

/// Converts DWARF to BTF. `content` returns the bytes of a section.
fn types_of_dwarf<'data>(
    sections: &SectionTable<'data, Elf>,
    endian: LittleEndian,
    content: impl Fn(&str) -> Result<&'data [u8], object::Error>,
) -> Result<Option<Vec<u8>>, DebugFileError> {
    for section in sections.iter() {
        let name = sections.section_name(endian, section)?;
        let packed = section.sh_flags(endian) & u64::from(elf::SHF_COMPRESSED) != 0;
        if name.starts_with(b".zdebug_") || packed && name.starts_with(b".debug_") {
            return Err(DebugFileError::Compressed);
        }
    }
    Ok(dwarf::types(
        |name| content(name).unwrap_or_default(),
        &layout::types(),
    )?)
}

/// Returns the build id in a sequence of ELF notes. Each note is {u32 name size, u32 content size,
/// u32 type, name, content}. The name and the content are padded to four bytes.
pub(super) fn build_id(notes: &[u8]) -> Option<String> {
    let mut rest = notes;
    loop {
        let (header, after) = rest.split_first_chunk::<12>()?;
        let word = |at: usize| {
            let bytes = [header[at], header[at + 1], header[at + 2], header[at + 3]];
            u32::from_le_bytes(bytes)
        };
        let (name_size, size) = (word(0) as usize, word(4) as usize);
        let name = after.get(..name_size)?;
        let after = after.get(name_size.checked_next_multiple_of(4)?..)?;
        let content = after.get(..size)?;
        if word(8) == elf::NT_GNU_BUILD_ID && name == b"GNU\0" {
            return Some(content.iter().map(|byte| format!("{byte:02x}")).collect());
        }
        rest = after.get(size.checked_next_multiple_of(4)?..)?;
    }
}
