// SPDX-License-Identifier: Apache-2.0

//! Patchbay's monitor: one process that runs one KVM guest, and lets its operator
//! flip the guest's static keys.
//!
//! The lower half knows nothing of keys: [`vm::Vm`] boots a guest, [`vm::Vm::pause`]
//! stops it, [`memory::GuestRam`] and [`paging`] read and write its memory, and
//! [`request::GuestRequests`] is where the guest's own requests come out. The upper
//! half, `keys` and `service`, is built on these.

pub mod abi;
pub mod boot;
pub mod config;
pub mod devices;
pub mod dirty;
#[cfg(any(test, feature = "testing"))]
pub mod fuzzing;
pub mod jail;
pub mod keys;
mod kick;
pub mod latency;
pub mod log_file;
mod log_limit;
pub mod memory;
pub mod paging;
pub mod pause;
pub mod probe;
pub mod request;
pub mod seccomp;
pub mod service;
pub mod socket;
pub mod thread;
pub mod trace;
mod vcpu;
pub mod vm;
mod x86;
