// SPDX-License-Identifier: Apache-2.0
//! Shared by the demos.
#![forbid(unsafe_code)]

use std::path::Path;

use anyhow::{Context, Result};
use patchbay_tests::Environment;
use tokio::process::Command;

/// The environment of a Linux guest. `demo` is the argument of `cargo xtask demo`.
pub fn environment(demo: &str) -> Result<Environment> {
    Environment::linux_guest().with_context(|| {
        format!("no Linux guest can run here; start this with `cargo xtask demo {demo}`, or run `cargo xtask doctor`")
    })
}

/// Prints the heading of a step.
pub fn step(text: &str) {
    println!("\n── {text}");
}

/// Opens a shell for the user, in which `patchbay` is this program and finds the guest behind this socket. Returns when
/// the user leaves the shell.
///
/// # Errors
/// The shell cannot be started.
pub async fn open_shell(cli: &Path, socket: &Path) -> Result<()> {
    let programs = cli.parent().unwrap_or(Path::new("")).display();
    let path = std::env::var("PATH").unwrap_or_default();
    let shell = std::env::var("SHELL").unwrap_or_else(|_| "/bin/sh".to_owned());
    Command::new(&shell)
        .env("PATH", format!("{programs}:{path}"))
        .env("PATCHBAY_SOCKET", socket)
        .status()
        .await
        .with_context(|| format!("{shell} cannot be started"))?;
    Ok(())
}
