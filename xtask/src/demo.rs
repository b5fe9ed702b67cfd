// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask demo`: prepares everything and runs examples/getppid.

use std::ffi::OsString;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};

use crate::{cargo, guest, host, lab};

/// Runs the demo with the given arguments; its exit status is the demo's.
pub fn run(arguments: Vec<OsString>) -> Result<ExitCode> {
    let variables = guest::prepare(false)?;
    guest::announce_place();
    let program = cargo::program("getppid-demo");
    if host::Kvm::probe().runs_linux() {
        let mut command = Command::new(&program);
        command.args(arguments).envs(variables);
        let status = command
            .status()
            .with_context(|| format!("no {}", program.display()))?;
        return Ok(if status.success() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        });
    }
    let mut command = vec![program.into_os_string()];
    command.extend(arguments);
    let mut job = lab::Job::new(command)?;
    job.set(variables);
    Ok(ExitCode::from(lab::run(&job)?))
}
