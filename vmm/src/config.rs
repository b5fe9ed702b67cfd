// SPDX-License-Identifier: Apache-2.0

//! Configuration of a guest.

use crate::boot::LinuxBoot;
use crate::devices::virtio::VirtioConfig;
use crate::devices::{ConsoleOutput, MemoryDevices, PortDevices};
use crate::snapshot::Snapshot;

/// The configuration of a guest: its hardware and its payload.
pub struct VmConfig {
    /// Kernel or machine code.
    pub payload: Payload,
    /// Memory in bytes: a multiple of 4 KiB from 2 MiB to 1 TiB.
    pub memory_bytes: u64,
    /// Number of vCPUs, 1 to 16.
    pub vcpus: u8,
    /// Output of the serial console.
    pub console: ConsoleOutput,
    /// Virtio devices.
    pub virtio: VirtioConfig,
    /// Devices on I/O ports, in addition to the built-in ones.
    pub ports: PortDevices,
    /// Devices in guest-physical memory outside RAM, in addition to the built-in ones.
    pub memory_devices: MemoryDevices,
    /// Offer Patchbay to the guest, if a transport works on this host.
    pub offer_patchbay: bool,
}

impl VmConfig {
    /// Creates a copy of a guest that was saved, without console output and virtio devices.
    #[must_use]
    pub fn of_snapshot(snapshot: Snapshot) -> Self {
        Self {
            memory_bytes: snapshot.memory_bytes(),
            vcpus: snapshot.vcpus(),
            offer_patchbay: snapshot.offers_patchbay(),
            ..Self::new(Payload::Snapshot(Box::new(snapshot)))
        }
    }

    /// Creates a guest with 256 MiB, one vCPU and no console output.
    #[must_use]
    pub fn new(payload: Payload) -> Self {
        Self {
            payload,
            memory_bytes: 256 << 20,
            vcpus: 1,
            console: ConsoleOutput::None,
            virtio: VirtioConfig::default(),
            ports: vec![],
            memory_devices: vec![],
            offer_patchbay: true,
        }
    }
}

/// Kernel or machine code.
pub enum Payload {
    /// A Linux kernel, or another kernel that uses one of Linux's boot protocols.
    Linux(LinuxBoot),
    /// Machine code in 64-bit mode.
    Raw(RawCode),
    /// A guest that was saved; see [`VmConfig::of_snapshot`]. The virtio devices must be those of
    /// the snapshot.
    Snapshot(Box<Snapshot>),
}

/// Machine code that starts in 64-bit mode with the first 4 GiB identity-mapped, interrupts
/// disabled and no IDT.
pub struct RawCode {
    /// The code. It must lie at or above 1 MiB in guest memory.
    pub image: Vec<u8>,
    /// Guest-physical address of the first byte.
    pub address: u64,
    /// Start of each vCPU. A vCPU with `None` waits for its start-up interrupt (SIPI).
    pub entries: Vec<Option<RawEntry>>,
}

/// Start of a vCPU that runs machine code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawEntry {
    /// Address of the first instruction.
    pub rip: u64,
    /// Initial RSP.
    pub rsp: u64,
    /// Initial RDI.
    pub argument: u64,
    /// Start at privilege level 3 instead of 0, with access to I/O ports.
    pub user_mode: bool,
}
