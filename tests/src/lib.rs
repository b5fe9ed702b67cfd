// SPDX-License-Identifier: Apache-2.0
//! Support for Patchbay's own integration tests: guests of `patchbay-testing` with the kernels,
//! modules and programs that `cargo xtask` builds.
//!
//! ```no_run
//! # async fn example() -> anyhow::Result<()> {
//! use patchbay_tests::{Environment, Guest};
//!
//! let Some(environment) = Environment::linux_guest() else { return Ok(()) };
//! let mut guest = Guest::builder(&environment).vcpus(2).boot().await?;
//! assert_eq!(guest.shell("nproc").await?, "2");
//! guest.power_off().await?;
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

use std::path::Path;
use std::process::{Command, Output};

use anyhow::{Context, Result};

mod attacher;
mod disk;
mod environment;
mod foreign;
mod guest;
#[path = "../../attach/tests/support/programs.rs"]
pub mod programs;
mod qemu;
mod serial;
mod tracepoints;

pub use disk::{copy_disk, debugfs};
pub use environment::{Environment, InstalledKernel, KernelFiles, StockKernel};
pub use foreign::Foreign;
pub use guest::{AGENT_INSTANCE, Seen, TEST_KEYS, TestGuest};
pub use patchbay_testing::{
    EventStream, Guest, GuestBuilder, SHELL_READS, Shell, connect, reason, until,
};
pub use qemu::Qemu;
pub use tracepoints::{enabled_tracepoints, switch_tracepoints, without_functions};

/// Prints why a test cannot run here. `cargo xtask test` counts a test that prints this line as
/// skipped.
pub fn skip(reason: &str) {
    println!("SKIPPED: {reason}");
}

/// Runs a program of e2fsprogs, which may be only in root's PATH. The caller checks the exit
/// status.
pub fn e2fsprogs(program: &str, arguments: &[&Path]) -> Result<Output> {
    Command::new(program)
        .args(arguments)
        .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
        .output()
        .with_context(|| format!("{program} cannot be run; install e2fsprogs"))
}
