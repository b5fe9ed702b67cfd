// SPDX-License-Identifier: Apache-2.0
#![forbid(unsafe_code)]
//! Implements the interfaces of `patchbay-service` for a guest that another monitor, today QEMU,
//! runs.
//!
//! | seam | here |
//! |---|---|
//! | memory | [`memory::AttachedRam`]: the guest's memory file mapped, or /proc/PID/mem |
//! | pause | [`freeze`]: the vCPUs' threads by ptrace; or QEMU's `stop`, whose end [`watchdog`] guarantees |
//! | lifecycle | [`life::Life`]: QEMU's events (for libvirt by a separate `virsh`) and the process's end |
//! | console | [`console::NoConsole`]: the monitor keeps it |
//!
//! A guest needs the guest-physical map and the place of each range in the monitor's process, the
//! ids of its vCPUs' threads or its own stop command, the state of migrations, and the end of its
//! guest. [`monitor::Monitor`] is that list. QEMU answers it itself. For any other monitor the
//! host's kernel does ([`host::Host`]).

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
pub mod identity;
pub mod kvm;
pub mod ledger;
pub mod libvirt;
pub mod life;
pub mod memory;
pub mod monitor;
pub mod nested;
pub mod process;
pub mod qmp;
mod region;
pub mod registers;
mod resume;
pub mod rollback;
mod run_page;
mod stop;
mod virsh;
pub mod vsock;
pub mod watchdog;
mod wire;

pub use attach::{Options, PauseWay, Target, attach};
