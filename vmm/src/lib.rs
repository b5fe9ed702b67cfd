// SPDX-License-Identifier: Apache-2.0

//! Patchbay's monitor: a library that runs one KVM guest in a process.
//!
//! It contains nothing that is specific to static keys. [`vm::Vm`] boots a guest, [`vm::Vm::pause`]
//! stops it, [`memory::GuestRam`] accesses its memory, and
//! [`patchbay_guest::requests::GuestRequests`] receives the guest's requests. [`guest`] implements
//! the traits of [`patchbay_guest`] on these types. The program `patchbay-vmm` connects these
//! types with the control service.

#![deny(missing_docs)]

pub mod boot;
pub mod config;
pub mod devices;
pub mod dirty;
mod discovery;
mod error;
#[cfg(any(test, feature = "testing"))]
pub mod fuzzing;
pub mod guest;
pub mod jail;
mod kick;
pub mod latency;
pub mod memory;
pub mod pause;
mod payload;
pub mod probe;
pub mod request;
pub mod seccomp;
pub mod snapshot;
pub mod system_registers;
pub mod thread;
mod vcpu;
pub mod vm;
mod x86;
