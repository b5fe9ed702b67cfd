// SPDX-License-Identifier: Apache-2.0
//! Runs `patchbay inspect`: reads the jump table of a kernel that is not running.

mod output;

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use patchbay_kernel_image::live::{DebugFile, DebugFileError};
use patchbay_kernel_image::{PatternError, Patterns, Summary, inspect};

use crate::args::output::Output;
use crate::failure::Failure;
use crate::print::print;
use crate::progress::Progress;

/// The maximum size of a file. A vmlinux with debugging information has several hundred MiB.
const MAX_FILE: u64 = 2 << 30;

/// Lists the jump table of a kernel or module file: its static keys, their initial state and their
/// branch sites.
#[derive(Debug, clap::Args)]
pub struct InspectArguments {
    /// A vmlinux, a bzImage (/boot/vmlinuz-*) or a module (.ko); each may be compressed.
    file: PathBuf,
    /// Globs of names; a leading ! excludes: 'sched_*' '!sched_energy*'.
    #[arg(value_name = "KEY")]
    keys: Vec<String>,
    /// The kernel's System.map or vmlinux. Names are taken from this file instead of the kernel's
    /// own symbols; types too, if the kernel has no BTF.
    #[arg(long, value_name = "FILE")]
    debug_file: Option<PathBuf>,
    /// List every branch site (always in json and yaml).
    #[arg(long)]
    sites: bool,
}

/// The reasons why a file cannot be listed.
#[derive(Debug, thiserror::Error)]
enum InspectError {
    #[error("cannot be read: {0}")]
    Read(#[from] std::io::Error),
    #[error("it has more than {} MiB: refused", MAX_FILE >> 20)]
    TooLarge,
    #[error(transparent)]
    DebugFile(#[from] DebugFileError),
    #[error(transparent)]
    Image(#[from] patchbay_kernel_image::InspectError),
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
/// The file cannot be read as a kernel or module, or an entry does not agree with the bytes at its
/// site. In the second case the listing is still printed.
pub async fn run(arguments: InspectArguments, output: Output) -> Result<(), Failure> {
    let file = arguments.file.clone();
    // The work runs on a separate thread, so that this thread can show progress.
    let work = tokio::task::spawn_blocking(move || listing(&arguments));
    let what = format!("reading {}", file.display());
    let listing = Progress::default().during(&what, work).await;
    let listing =
        listing.map_err(|error| Failure::error(format!("{}: {error}", file.display())))??;
    print(output, &listing)?;
    let Summary {
        unexplained, sites, ..
    } = listing.report.summary;
    if unexplained > 0 {
        let error = InspectError::Disagreement { unexplained, sites };
        return Err(about(&file, error));
    }
    Ok(())
}

fn about(path: &Path, error: InspectError) -> Failure {
    let message = format!("{}: {error}", path.display());
    match error {
        InspectError::NoMatch | InspectError::Disagreement { .. } => Failure::error(message),
        _ => Failure::usage(message),
    }
}

fn listing(arguments: &InspectArguments) -> Result<output::Listing, Failure> {
    let at_file = |error| about(&arguments.file, error);
    let keys = Patterns::parse(&arguments.keys)
        .map_err(|error: PatternError| Failure::usage(error.to_string()))?;
    let given = match &arguments.debug_file {
        Some(path) => Some(DebugFile::open(path).map_err(|error| about(path, error.into()))?),
        None => None,
    };
    let file = read_file(&arguments.file).map_err(at_file)?;
    let mut report = inspect(&file, given).map_err(|error| at_file(error.into()))?;
    report.keys.retain(|key| keys.select("", &key.name));
    if report.keys.is_empty() {
        return Err(at_file(InspectError::NoMatch));
    }
    Ok(output::Listing {
        report,
        sites: arguments.sites,
    })
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
