// SPDX-License-Identifier: Apache-2.0
#![deny(missing_docs)]
#![forbid(unsafe_code)]
//! Reads the virtual machines of a host from the memory of the host's kernel.
//!
//! A monitor's statements about its guest may be false. The host's kernel, which runs the guest,
//! records which process has a VM, where the guest's memory is in that process, and which threads
//! run its vCPUs.
//!
//! ```text
//! Kcore or Bpf ──▶ KernelMemory ──┐
//! BTF in /sys  ──▶ layout ────────┴──▶ HostKernel ──▶ Vm      list() ──▶ ListedVm
//! ```
//!
//! - A transport reads kernel memory ([`KernelMemory`]): [`Kcore`] needs CAP_SYS_RAWIO; [`Bpf`]
//!   needs CAP_BPF, CAP_PERFMON and Linux 5.10.
//! - The offsets of members come from the type information of the kernel and of its modules. This
//!   needs Linux 5.4, or 5.11 if KVM is a module.
//! - [`HostKernel::vm`] walks from a process to a VM with its slots and vCPUs.
//! - [`list()`] lists all VMs of the host. It works without kernel memory, but then reports less.
//!   [`Scanner`] lists them repeatedly.
//!
//! The kernel may change everything while it is read. Each walk is bounded, is repeated if it is
//! torn, and counts only if a second walk leads to the same object.

mod bpf;
mod kcore;
mod kernel;
mod layout;
mod list;
mod locks;
mod memory;
mod monitor;
#[cfg(test)]
mod testing;
mod vm;
mod words;

pub use bpf::Bpf;
pub use kcore::Kcore;
pub use kernel::{HostKernel, OpenError, WalkError};
pub use layout::LayoutError;
pub use list::{ListedVm, Listing, Scanner, Verdict, list, read_file};
pub use locks::Locks;
pub use memory::{KernelMemory, ReadError, TransportError};
pub use monitor::{Kind, Monitor, option_value};
pub use vm::{DirtyLogging, Protection, Refusal, Slot, Vcpu, Vm};
pub use words::Words;
