// SPDX-License-Identifier: Apache-2.0
//! A VM as it was read from the host's kernel.

use super::PAGE;

/// The maximum size of KVM's own slots: the APIC access page and the identity map take one page
/// each, and the TSS takes three. These slots are not RAM of the guest, and KVM never logs their
/// dirty pages.
const MAX_OWN_SLOT: u64 = 3 * PAGE;

/// A memory slot: guest-physical memory at addresses of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// The address space: 0, or 1 for memory that only System Management Mode sees.
    pub space: u32,
    /// First guest-physical address.
    pub guest_address: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// Address in the process.
    pub process_address: u64,
    /// The guest cannot write this memory directly: its writes exit to the monitor.
    pub readonly: bool,
    /// The memory is in a guest_memfd, which the process does not map.
    pub guest_memfd: bool,
    /// KVM logs the pages that the guest writes, for a migration or a snapshot. A page that another
    /// process writes is not in this log.
    pub logs_dirty_pages: bool,
}

/// A vCPU of a guest, found in the host's kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vcpu {
    /// The thread that ran the vCPU last, as the reader's PID namespace numbers it; `None` before
    /// the first `KVM_RUN`, or if the thread has ended or is in another namespace.
    pub thread: Option<u32>,
}

/// The protection of a guest's memory and registers from its host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protection {
    /// The host can read and write the guest's memory and registers.
    #[default]
    None,
    /// The memory or the registers are encrypted or inaccessible to the host, for this reason.
    Protected(&'static str),
    /// The protection cannot be determined, for this reason.
    Unknown(&'static str),
}

/// The part of a guest's memory whose dirty pages KVM logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirtyLogging {
    /// None.
    Off,
    /// A part, such as the memory of a display.
    Part,
    /// All memory, for a migration or for snapshots.
    All,
}

/// A reason against a change of a guest's memory from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The guest is protected. A request for the guest's registers would end the guest.
    #[error("the guest is closed to its host, because {0}")]
    Protected(&'static str),
    /// It is unknown whether the guest is protected.
    #[error("it is unknown whether the guest is closed to its host, because {0}")]
    Unknown(&'static str),
    /// The guest's memory is in a guest_memfd.
    #[error("the guest's memory is a guest_memfd, which its monitor does not map")]
    GuestMemfd,
    /// KVM logs the writes to the guest's memory, at least to its largest slot, so a migration or
    /// a snapshot may be in progress.
    #[error(
        "KVM logs the dirty pages of the guest's memory, for a migration or for snapshots, and these would \
         miss what is written"
    )]
    DirtyLogging,
    /// The guest has no memory.
    #[error("the guest has no memory")]
    NoMemory,
}

/// The addresses of the structures between a process and its VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Found {
    /// The process's `task_struct`.
    pub(super) task: u64,
    /// The VM's `struct file`.
    pub(super) file: u64,
    /// The VM's `struct kvm`, the same for all descriptors of the VM.
    pub(crate) kvm: u64,
}

/// A VM, as read from KVM's structures.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Vm {
    pub(crate) found: Found,
    /// The slots by address space and guest-physical address.
    pub slots: Vec<Slot>,
    /// The generation of the slots of each address space. Each change of a slot changes it.
    pub generations: Vec<u64>,
    /// The vCPUs in the order of their creation.
    pub vcpus: Vec<Vcpu>,
    /// The protection from the host.
    pub protection: Protection,
    /// Size of the dirty ring of each vCPU, in bytes; 0 if the monitor uses none.
    pub dirty_ring_bytes: u32,
}

impl Vm {
    /// Returns whether two descriptors lead to one VM.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        self.found.kvm == other.found.kvm
    }

    /// Returns whether KVM logs the dirty pages of a slot, in a bitmap or in the vCPUs' rings.
    #[must_use]
    pub fn logs(&self, slot: &Slot) -> bool {
        slot.logs_dirty_pages || self.dirty_ring_bytes != 0
    }

    /// Returns the RAM that a guest sees by an ordinary access: the writable slots of the first
    /// address space, without KVM's own slots.
    pub fn ram(&self) -> impl Iterator<Item = &Slot> {
        self.slots
            .iter()
            .filter(|slot| slot.space == 0 && !slot.readonly && slot.bytes > MAX_OWN_SLOT)
    }

    /// Returns the number of bytes of RAM. Memory that the guest sees at several addresses counts
    /// once.
    #[must_use]
    pub fn ram_bytes(&self) -> u64 {
        let mut ranges: Vec<_> = self
            .ram()
            .map(|slot| (slot.process_address, slot.process_address + slot.bytes))
            .collect();
        ranges.sort_unstable();
        let (mut bytes, mut counted) = (0, 0);
        for (start, end) in ranges {
            bytes += end.saturating_sub(start.max(counted));
            counted = counted.max(end);
        }
        bytes
    }

    /// Returns the part of the RAM whose dirty pages KVM logs.
    #[must_use]
    pub fn dirty_logging(&self) -> DirtyLogging {
        let all = self.ram().count();
        match self.ram().filter(|slot| self.logs(slot)).count() {
            0 => DirtyLogging::Off,
            logged if logged == all => DirtyLogging::All,
            _ => DirtyLogging::Part,
        }
    }

    /// Returns the reasons against a change of the guest's memory.
    #[must_use]
    pub fn refusals(&self) -> Vec<Refusal> {
        let protection = match self.protection {
            Protection::None => None,
            Protection::Protected(why) => Some(Refusal::Protected(why)),
            Protection::Unknown(why) => Some(Refusal::Unknown(why)),
        };
        let mut all: Vec<Refusal> = protection.into_iter().collect();
        if self.slots.iter().any(|slot| slot.guest_memfd) {
            all.push(Refusal::GuestMemfd);
        }
        // The log of a smaller slot may be that of a display's memory, which is never written.
        let largest = self.ram().max_by_key(|slot| slot.bytes);
        if largest.is_some_and(|slot| self.logs(slot)) {
            all.push(Refusal::DirtyLogging);
        }
        if self.ram().next().is_none() {
            all.push(Refusal::NoMemory);
        }
        all
    }
}
