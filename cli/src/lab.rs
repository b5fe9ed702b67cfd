// SPDX-License-Identifier: Apache-2.0
//! Runs `patchbay lab`.

use std::time::Duration;

use patchbay_lab::machine::{self, Interrupts, Job};

use crate::args::LabArgs;
use crate::failure::Failure;

/// Runs a command in the lab and returns its exit status.
///
/// # Errors
/// The lab cannot be prepared or started, or the command does not end in time.
pub fn run(arguments: LabArgs, timeout: Option<Duration>) -> Result<u8, Failure> {
    let failure = |error| Failure::error(format!("{error:#}"));
    if let Some(out) = &arguments.out {
        std::fs::create_dir_all(out).map_err(|error| {
            Failure::usage(format!(
                "the folder {} of --out cannot be created: {error}; give another",
                out.display()
            ))
        })?;
    }
    machine::prepare().map_err(failure)?;
    let interrupts = Interrupts::catch().map_err(failure)?;
    let temporary = tempfile::tempdir()?;
    let out = arguments.out.as_deref().unwrap_or(temporary.path());
    let mut job = Job::new(arguments.command, out).map_err(failure)?;
    job.memory_mib = arguments.memory;
    job.timeout = timeout;
    job.interrupts = Some(interrupts);
    machine::run(&job).map_err(failure)
}
