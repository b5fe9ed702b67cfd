// SPDX-License-Identifier: Apache-2.0

//! Patchbay's monitor: one process that runs one KVM guest, to be embedded in a program.
//!
//! It knows nothing of keys. [`vm::Vm`] boots a guest, [`vm::Vm::pause`] stops it, [`memory::GuestRam`]
//! reads and writes its memory, and [`request::GuestRequests`] is where the guest's own requests come
//! out. [`guest`] implements the seams of `patchbay-service` on these; the program `patchbay-vmm`
//! joins the two.

pub mod boot;
pub mod config;
pub mod devices;
pub mod dirty;
#[cfg(any(test, feature = "testing"))]
pub mod fuzzing;
pub mod guest;
pub mod jail;
mod kick;
pub mod latency;
pub mod memory;
pub mod pause;
pub mod probe;
pub mod request;
pub mod seccomp;
pub mod thread;
mod vcpu;
pub mod vm;
mod x86;
