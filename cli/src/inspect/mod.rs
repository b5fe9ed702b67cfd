// SPDX-License-Identifier: Apache-2.0
//! `patchbay inspect`: the jump table of a kernel that is not running.
//!
//!     file ──container──▶ ELF ──image──▶ memory ──kallsyms──▶ symbols ──table──▶ entries ──report──▶ keys and sites
//!
//! The file may come from anywhere: every number in it is checked before use, and what is made of it is bounded.

mod container;
mod entry;
mod glob;
mod image;
mod kallsyms;
mod module;
mod output;
mod report;
mod symbols;
mod table;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use container::{ContainerError, Unpacked};
use image::{Image, ImageError};
use report::{ImageReport, Reader, Report, Summary, SymbolSource};
use symbols::{SymbolFileError, Symbols};
use table::{Table, TableError};

use crate::args::Output;
use crate::failure::Failure;
use crate::print::print;

/// Largest file read: a vmlinux with debugging information has several hundred MiB.
const MAX_FILE: u64 = 2 << 30;

/// Lists the jump table of a kernel or module file: its static keys, their initial state and their branch sites.
#[derive(Debug, clap::Args)]
pub struct InspectArguments {
    /// A vmlinux, a bzImage (/boot/vmlinuz-*) or a module (.ko), also compressed.
    file: PathBuf,
    /// List only keys that match: `*` and `?` as in a shell, a leading `!` takes keys out again.
    #[arg(value_name = "KEY")]
    keys: Vec<String>,
    /// Take names from this System.map instead of the file's own symbols.
    #[arg(long, value_name = "FILE")]
    symbols: Option<PathBuf>,
    /// List every branch site (always in json and yaml).
    #[arg(long)]
    sites: bool,
}

/// Why a file cannot be listed.
#[derive(Debug, thiserror::Error)]
enum InspectError {
    #[error("cannot be read: {0}")]
    Read(#[from] std::io::Error),
    #[error("it has more than {} MiB: refused", MAX_FILE >> 20)]
    TooLarge,
    #[error(transparent)]
    SymbolFile(#[from] SymbolFileError),
    #[error(transparent)]
    Container(#[from] ContainerError),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    Table(#[from] TableError),
    #[error("no key matches; list all names with `-o name`")]
    NoMatch,
    #[error(
        "{unexplained} of {sites} entries do not agree with the bytes at their sites: the image is damaged, was changed after it was \
         built, or the symbols are another kernel's (see `problem` in -o json)"
    )]
    Disagreement { unexplained: usize, sites: usize },
}

/// Prints the listing.
///
/// # Errors
/// If the file cannot be read as a kernel or module, or, after printing, if an entry does not agree with the bytes at its site.
pub fn run(arguments: &InspectArguments, output: Output) -> Result<(), Failure> {
    let about =
        |path: &Path, error: InspectError| Failure::error(format!("{}: {error}", path.display()));
    let at_file = |error| about(&arguments.file, error);
    let given = match &arguments.symbols {
        Some(path) => Some(read_symbols(path).map_err(|error| about(path, error))?),
        None => None,
    };
    let file = read_file(&arguments.file).map_err(at_file)?;
    let mut report = inspect(&file, given).map_err(at_file)?;
    let filter = glob::Filter::new(&arguments.keys);
    report.keys.retain(|key| filter.matches(&key.name));
    if report.keys.is_empty() {
        return Err(at_file(InspectError::NoMatch));
    }
    let Summary {
        unexplained, sites, ..
    } = report.summary;
    print(
        output,
        &output::Listing {
            report,
            sites: arguments.sites,
        },
    )?;
    if unexplained > 0 {
        return Err(at_file(InspectError::Disagreement { unexplained, sites }));
    }
    Ok(())
}

fn read_file(path: &Path) -> Result<Vec<u8>, InspectError> {
    let mut bytes = Vec::new();
    File::open(path)?
        .take(MAX_FILE + 1)
        .read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(InspectError::TooLarge);
    }
    Ok(bytes)
}

fn read_symbols(path: &Path) -> Result<Symbols, InspectError> {
    Ok(Symbols::from_text(&read_file(path)?)?)
}

/// Reads a kernel or module file.
fn inspect(file: &[u8], given: Option<Symbols>) -> Result<Report, InspectError> {
    let Unpacked {
        bzimage,
        compression,
        elf,
    } = container::unpack(file)?;
    let mut image = Image::parse(&elf)?;
    let own = std::mem::take(&mut image.symbols);
    let (source, mut symbols) = if let Some(given) = given {
        (SymbolSource::File, given)
    } else if !own.is_empty() {
        (SymbolSource::Elf, own)
    } else if let Some(kallsyms) = kallsyms::read(&image) {
        (SymbolSource::Kallsyms, kallsyms)
    } else {
        (SymbolSource::None, own)
    };
    symbols.classify(|address| image.is_executable(address));
    let table = Table::find(&image, &symbols)?;
    let reader = Reader::new(&image, &symbols, &table);
    let (keys, summary) = reader.keys();
    Ok(Report {
        image: ImageReport {
            kind: match (bzimage, image.module) {
                (true, _) => "bzimage",
                (false, true) => "module",
                (false, false) => "vmlinux",
            },
            compression,
            release: release(&image),
            bits: image.pointer_size * 8,
            symbols: source,
            symbol_count: symbols.len(),
        },
        table: reader.table(),
        summary,
        keys,
    })
}

/// The release from `linux_banner` ("Linux version 6.12.1 (...") or a module's `vermagic=`.
fn release(image: &Image<'_>) -> Option<String> {
    let marker: &[u8] = if image.module {
        b"vermagic="
    } else {
        b"Linux version "
    };
    image.pieces().find_map(|(_, data)| {
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
