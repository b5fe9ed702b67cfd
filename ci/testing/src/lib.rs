// SPDX-License-Identifier: Apache-2.0
//! Boots Linux guests for integration tests.
//!
//! A [`Guest`] is a kernel under `patchbay-vmm` with a shell on its console and an agent that runs
//! commands. It also has clients of the gRPC interface, with which a test changes static keys and
//! traces events.
//!
//! ```no_run
//! use patchbay_testing::{Guest, in_place};
//!
//! // With the attribute #[test].
//! fn two_processors() -> anyhow::Result<()> {
//!     in_place(async || {
//!         let mut guest = Guest::builder("/boot/vmlinuz-test").vcpus(2).boot().await?;
//!         assert_eq!(guest.run(&["nproc"]).await?.success()?, "2");
//!         assert_eq!(guest.shell("cat /proc/loadavg | wc -l").await?, "1");
//!         guest.assert_no_warnings().await
//!     })
//! }
//! ```
//!
//! `examples/ci` of the repository is a project with such tests. `docs/ci.md` lists what a kernel
//! needs.
//!
//! # Where guests run
//!
//! [`in_place`] runs a test on this machine's KVM if it runs Linux guests. Otherwise it runs the
//! test in the lab, an emulated computer with working KVM, which needs the Debian packages that
//! `docs/ci.md` names. Each test starts a lab of its own, one at a time. All tests of a program
//! share one lab if Cargo starts the program in the lab:
//!
//! ```text
//! CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="patchbay lab --" cargo test -- --test-threads=1
//! ```
//!
//! # Versions
//!
//! The crate has the version of the programs and follows Semantic Versioning. It works with the
//! monitor and the agent of the same MINOR version; from 1.0 on, of the same MAJOR version. Types
//! that may grow are `non_exhaustive` or have private fields. [`proto`] is part of the interface.
#![deny(missing_docs)]
#![forbid(unsafe_code)]

use std::time::Duration;

use anyhow::{Context, Result};
use tonic::Status;
use tonic_types::StatusExt;

mod commands;
mod console;
mod guest;
mod place;
mod trace;

pub use patchbay_proto as proto;

pub use commands::CommandOutput;
pub use console::{SHELL_READS, Shell};
pub use guest::{Guest, GuestBuilder, connect};
pub use place::in_place;
pub use trace::EventStream;

/// Returns the reason in an error's details; empty if there is none.
pub fn reason(status: &Status) -> String {
    status
        .get_details_error_info()
        .map(|info| info.reason)
        .unwrap_or_default()
}

/// Polls until the condition holds. Fails after one minute, or after four in the lab.
pub async fn until(mut so: impl AsyncFnMut() -> Result<bool>) -> Result<()> {
    let asked = async {
        while !so().await? {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    };
    let limit = patchbay_ci::place::patience(Duration::from_secs(60));
    tokio::time::timeout(limit, asked)
        .await
        .with_context(|| format!("the condition does not hold after {limit:?}"))?
}
