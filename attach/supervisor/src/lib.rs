// SPDX-License-Identifier: Apache-2.0
#![deny(missing_docs)]
#![forbid(unsafe_code)]
//! Keeps one `patchbay-attach` running for each guest that was found.
//!
//! ```text
//!  Vms: /dev/kvm is opened, in intervals ─▶ Scans of /proc ┐
//!  QMP sockets, libvirt's domains (patchbayd) ─────────────┴▶ targets ─▶ Supervisor
//!                                                                           │ one task per target
//!                                                                           ▼
//!                                                                    patchbay-attach
//! ```
//!
//! | user | finds | its attachers |
//! |---|---|---|
//! | `patchbayd` | QMP sockets, libvirt's domains, all VMs | outlive it, because they keep their clients' holds |
//! | `patchbay attach --all` | all VMs | end with it |

mod backoff;
mod keep;
mod names;
mod queue;
mod reports;
mod scans;
mod target;
mod vms;

pub use backoff::{BACKOFF_FIRST, Backoff, LOOK_INTERVAL, runs};
pub use keep::{Attacher, Supervisor};
pub use target::{Target, is_of_process};
pub use vms::{Earlier, MAX_PER_USER, Owner, Vms};

/// The maximum number of targets that are attached to.
pub const MAX_TARGETS: usize = 4096;
/// The time for which events are combined.
pub const SETTLE: std::time::Duration = std::time::Duration::from_millis(20);
