// SPDX-License-Identifier: Apache-2.0
//! Finds the monitor, the agent and busybox.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Returns the path of the monitor: the given one, or the one that `PATCHBAY_VMM` names, or
/// patchbay-vmm beside this program or in PATH.
///
/// # Errors
/// No monitor is found.
pub fn monitor(given: Option<&Path>) -> Result<PathBuf> {
    given_or_named(given, "PATCHBAY_VMM")
        .or_else(|| find("patchbay-vmm", &[]))
        .context("there is no patchbay-vmm beside this program or in PATH; name it in PATCHBAY_VMM")
}

/// Returns the path of the agent: the given one, or the one that `PATCHBAY_AGENT` names, or
/// patchbay-agent beside this program, in /usr/lib/patchbay or in PATH.
///
/// # Errors
/// No agent is found.
pub fn agent(given: Option<&Path>) -> Result<PathBuf> {
    given_or_named(given, "PATCHBAY_AGENT")
        .or_else(|| find("patchbay-agent", &["/usr/lib/patchbay"]))
        .context(
            "there is no patchbay-agent beside this program, in /usr/lib/patchbay or in PATH; name it in \
             PATCHBAY_AGENT",
        )
}

/// Returns the path of a static busybox.
///
/// # Errors
/// No busybox is found.
pub fn busybox() -> Result<PathBuf> {
    find("busybox", &["/bin"])
        .context("there is no busybox in PATH; install the package busybox-static")
}

fn given_or_named(given: Option<&Path>, variable: &str) -> Option<PathBuf> {
    let named = || std::env::var_os(variable).map(PathBuf::from);
    given.map(Path::to_owned).or_else(named)
}

/// Finds a program next to this one, in one of the folders, or in PATH.
fn find(name: &str, folders: &[&str]) -> Option<PathBuf> {
    let own = std::env::current_exe().ok()?.parent().map(Path::to_owned);
    let path = std::env::var_os("PATH").unwrap_or_default();
    own.into_iter()
        .chain(folders.iter().map(PathBuf::from))
        .chain(std::env::split_paths(&path))
        .map(|folder| folder.join(name))
        .find(|program| program.is_file())
}
