// SPDX-License-Identifier: Apache-2.0
#![forbid(unsafe_code)]
//! The seams of `patchbay-service` over a guest that another monitor runs: today QEMU.
//!
//! | seam | here |
//! |---|---|
//! | memory | [`memory::AttachedRam`]: the guest's memory file mapped, or /proc/PID/mem |
//! | pause | [`freeze`]: the vCPUs' threads by ptrace; or QEMU's `stop`, whose end [`watchdog`] guarantees |
//! | lifecycle | [`life::Life`]: QEMU's events, through libvirt by a `virsh` of their own, and the end of its process |
//! | console | [`console::NoConsole`]: the monitor keeps it |
//!
//! Another monitor needs: the guest-physical map and where it has each range, the ids of its vCPUs' threads or a stop of its own,
//! whether it migrates, and when its guest ends. [`monitor::Monitor`] is that list for QEMU; Cloud Hypervisor and Firecracker would be
//! variants of it.

pub mod attach;
pub mod console;
pub mod discovery;
pub mod error;
mod events;
pub mod flat_view;
pub mod freeze;
pub mod guest;
mod hotplug;
pub mod identity;
pub mod kvm;
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
mod virsh;
pub mod vsock;
pub mod watchdog;
mod wire;

pub use attach::{Options, PauseWay, Target, attach};
