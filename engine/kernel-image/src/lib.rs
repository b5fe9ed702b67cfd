// SPDX-License-Identifier: Apache-2.0
//! Reads a Linux kernel or module without its cooperation: its symbols, its jump table, its static
//! keys and their branch sites.
//!
//! ```text
//! file ──container──▶ ELF ──image──▶ pieces of memory ──kallsyms──▶ symbols
//!   ──table──▶ entries ──report──▶ keys and sites
//! ```
//!
//! [`inspect`] performs all these steps on the bytes of a file. If the memory of a kernel is
//! already available in pieces, begin with [`Image::from_pieces`].
//!
//! The bytes may come from anywhere: every number in them is checked before use, and the memory
//! that is allocated for them is bounded.
#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod btf;
mod classes;
pub mod container;
mod dwarf;
mod entry;
mod image;
mod kallsyms;
pub mod live;
mod module;
mod report;
mod symbols;
mod table;

pub use btf::{Btf, BtfError, Member};
pub use classes::{DebugLine, Tracepoint};
pub use container::{Compression, ContainerError, Unpacked, unpack};
pub use entry::{Format, Instruction, Site, decode_site};
pub use image::{Image, ImageError};
pub use kallsyms::{KallsymsError, read as read_kallsyms};
pub use report::{ImageReport, KeyReport, Report, SiteReport, Summary, SymbolSource, TableReport};
/// Globs over key names.
pub use static_keys::{PatternError, Patterns};
pub use symbols::{MAX_SYMBOLS, Symbol, SymbolFileError, SymbolKind, Symbols};
pub use table::{FoundBy, Table, TableError};

use live::DebugFile;

/// The reason why a kernel or module cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    /// The file contains no ELF file.
    #[error(transparent)]
    Container(#[from] ContainerError),
    /// The ELF file is neither a kernel nor a module.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// Reading the kernel's own symbols takes too long.
    #[error(transparent)]
    Kallsyms(#[from] KallsymsError),
    /// The debug file does not belong to this kernel.
    #[error(transparent)]
    DebugFile(#[from] live::DiscoveryError),
    /// No jump table was found.
    #[error(transparent)]
    Table(#[from] TableError),
}

/// Reads a kernel or module file. Names come from the debug file `given` if there is one, otherwise
/// from the file itself. Types come from the file itself, or from `given` if the file has no types.
///
/// # Errors
/// [`InspectError`]. An entry that does not agree with the bytes at its site is not an error here:
/// see [`SiteReport::problem`].
pub fn inspect(file: &[u8], given: Option<DebugFile>) -> Result<Report, InspectError> {
    let Unpacked {
        bzimage,
        compression,
        elf,
    } = unpack(file)?;
    let mut image = Image::parse(&elf)?;
    let own = std::mem::take(&mut image.symbols);
    let mut types = None;
    let (source, mut symbols) = if let Some(given) = given {
        let (symbols, its_types) = given.of_image(&image)?;
        types = its_types;
        (SymbolSource::File, symbols)
    } else if !own.is_empty() {
        (SymbolSource::Elf, own)
    } else {
        match read_kallsyms(&image) {
            Ok(kallsyms) => (SymbolSource::Kallsyms, kallsyms),
            Err(KallsymsError::Absent) => (SymbolSource::None, own),
            Err(error) => return Err(error.into()),
        }
    };
    symbols.classify(|address| image.is_executable(address));
    let table = Table::find(&image, &symbols)?;
    let image_report = ImageReport {
        kind: match (bzimage, image.module) {
            (true, _) => "bzimage",
            (false, true) => "module",
            (false, false) => "vmlinux",
        },
        compression,
        release: image.release(),
        bits: image.pointer_size * 8,
        symbols: source,
        symbol_count: symbols.len(),
    };
    Ok(Report::new(
        image_report,
        &image,
        &symbols,
        types.as_deref(),
        &table,
    ))
}
