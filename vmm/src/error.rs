// SPDX-License-Identifier: Apache-2.0
//! The errors of creating and starting a guest.

use crate::boot::BootError;
use crate::devices::ConsoleError;
use crate::devices::virtio::VirtioError;
use crate::memory::MemoryError;
use crate::snapshot::SnapshotError;

/// A guest could not be created or started.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names the fields")]
pub enum VmError {
    #[error(
        "/dev/kvm does not exist: this host has no KVM; load the module kvm_intel or kvm_amd, or enable (nested) virtualisation"
    )]
    KvmMissing,
    #[error("this user may not open /dev/kvm; join the group kvm, or run as root")]
    KvmPermission,
    #[error("/dev/kvm cannot be opened ({0}); check whether another hypervisor uses the processor")]
    KvmOpen(kvm_ioctls::Error),
    #[error("this host's KVM lacks {0}; use a kernel of 5.10 or later")]
    KvmLacks(&'static str),
    #[error("KVM refuses to {what} ({error}); the kernel's log may say why")]
    Kvm {
        what: &'static str,
        error: kvm_ioctls::Error,
    },
    #[error("a vCPU's shared page cannot be mapped ({0}); raise the limit on address space")]
    Map(rustix::io::Errno),
    #[error("a thread cannot be started ({0}); raise the limit on processes")]
    Thread(std::io::Error),
    #[error("{0} vCPUs are not possible; use 1 to 16")]
    VcpuCount(u8),
    #[error("this host's CPUID table is too long for KVM; report the host's processor")]
    Cpuid,
    #[error("the guest has already been started; create a new one")]
    Started,
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Boot(#[from] BootError),
    #[error(transparent)]
    Console(#[from] ConsoleError),
    #[error(transparent)]
    Virtio(#[from] VirtioError),
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
}

impl VmError {
    /// Returns a function that maps the error of the KVM call described by `what`.
    pub(crate) fn kvm(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> Self {
        move |error| Self::Kvm { what, error }
    }
}
