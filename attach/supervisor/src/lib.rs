// SPDX-License-Identifier: Apache-2.0
#![deny(missing_docs)]
#![forbid(unsafe_code)]
//! Keeps one `patchbay-attach` running for each guest that was found.
//!
//! ```text
//!  Vms: /dev/kvm is opened, in intervals ─▶ Scans of /proc ┐
//!  QMP sockets, libvirt's domains ─────────────────────────┴▶ Places ─▶ targets ─▶ Supervisor
//!                                                                                      │ one task per target
//!                                                                                      ▼
//!                                                                               patchbay-attach
//! ```
//!
//! | user | its attachers | their sockets |
//! |---|---|---|
//! | `patchbayd` | outlive it, because they keep their clients' holds | `attached-HASH.sock` |
//! | `patchbay-attach all --run-dir`, for `patchbayd` | end with it; the next ones continue the holds | `attached-HASH.sock` |
//! | `patchbay attach --all`, for `patchbay` | end with it | `NAME.sock` |

mod backoff;
mod domains;
mod keep;
mod names;
mod places;
mod queue;
mod reports;
mod run_dirs;
mod scans;
mod target;
mod vms;

pub use backoff::{BACKOFF_FIRST, Backoff, LOOK_INTERVAL, runs};
pub use keep::{Attacher, Supervisor};
pub use places::Places;
pub use run_dirs::{RunDirs, Watch, default_run_dirs, is_socket, sockets_of};
pub use target::{Target, is_of_process};
pub use vms::{Earlier, MAX_PER_USER, Owner, Vms};

/// The maximum number of targets that are attached to.
pub const MAX_TARGETS: usize = 4096;
/// The time for which events are combined.
pub const SETTLE: std::time::Duration = std::time::Duration::from_millis(20);
