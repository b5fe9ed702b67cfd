// SPDX-License-Identifier: Apache-2.0
#![forbid(unsafe_code)]
//! Implements the interfaces of `patchbay-service` for a guest that another monitor runs: QEMU, or
//! any other monitor on KVM.
//!
//! | seam | here |
//! |---|---|
//! | memory | [`memory::AttachedRam`]: the guest's memory file mapped, or the monitor's process |
//! | pause | [`freeze`]: ptrace of the vCPUs; or QEMU's `stop`, which [`watchdog`] ends if needed |
//! | lifecycle | [`life::Life`]: QEMU's events (libvirt: by a second `virsh`), the process's end |
//! | console | [`console::NoConsole`]: the monitor keeps it |
//!
//! For each guest this crate needs the guest-physical map and the address of each range in the
//! monitor's process, the ids of the vCPUs' threads or a stop command, the state of migrations, and
//! a report of the guest's end. [`monitor::Monitor`] provides them. The host's kernel answers what
//! it knows ([`host::Host`]), and QEMU what only QEMU knows.

mod at_once;
pub mod attach;
pub mod console;
pub mod discovery;
pub mod error;
mod events;
pub mod flat_view;
pub mod freeze;
pub mod guest;
pub mod host;
mod hotplug;
pub mod hybrid_vsock;
pub mod identity;
pub mod kvm;
pub mod ledger;
pub mod libvirt;
pub mod life;
mod lock;
mod machine;
pub mod memory;
pub mod monitor;
pub mod nested;
pub mod process;
pub mod qmp;
mod region;
pub mod registers;
mod resume;
mod rights;
pub mod rollback;
mod run_page;
mod stop;
pub mod terminal;
mod virsh;
pub mod vsock;
pub mod watchdog;
mod wire;

pub use attach::{Options, PauseWay, Target, attach};
