// SPDX-License-Identifier: Apache-2.0

//! What a guest is made of.

use std::ops::RangeInclusive;
use std::sync::Arc;

use crate::boot::LinuxBoot;
use crate::devices::virtio::VirtioConfig;
use crate::devices::{ConsoleOutput, PortDevice};

/// A guest's configuration.
pub struct VmConfig {
    /// What it runs.
    pub payload: Payload,
    /// Its memory in bytes: a multiple of 4 KiB, 2 MiB to 1 TiB.
    pub memory_bytes: u64,
    /// Its vCPUs: 1 to 16.
    pub vcpus: u8,
    /// Where its serial console goes.
    pub console: ConsoleOutput,
    /// Its virtio devices.
    pub virtio: VirtioConfig,
    /// Devices on I/O ports beside the built-in ones.
    pub ports: Vec<(RangeInclusive<u16>, Arc<dyn PortDevice>)>,
    /// Whether to tell the guest about Patchbay (if a transport works here).
    pub offer_patchbay: bool,
}

impl VmConfig {
    /// A guest with 256 MiB, one vCPU and no console output.
    #[must_use]
    pub fn new(payload: Payload) -> Self {
        Self {
            payload,
            memory_bytes: 256 << 20,
            vcpus: 1,
            console: ConsoleOutput::None,
            virtio: VirtioConfig::default(),
            ports: vec![],
            offer_patchbay: true,
        }
    }
}

/// What a guest runs.
pub enum Payload {
    /// A Linux kernel, or another one with its boot protocols.
    Linux(LinuxBoot),
    /// Raw machine code in 64-bit mode.
    Raw(RawCode),
}

/// Raw machine code: 64-bit mode, the first 4 GiB mapped onto themselves,
/// interrupts off, no interrupt table.
pub struct RawCode {
    /// Bytes and their guest-physical address, at or above 1 MiB.
    pub image: Vec<u8>,
    /// Guest-physical address of the image's first byte.
    pub address: u64,
    /// Where each vCPU starts; those without an entry stay as a processor does
    /// that has not been started.
    pub entries: Vec<Option<RawEntry>>,
}

/// Where and how a vCPU starts in raw machine code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawEntry {
    /// The first instruction's address.
    pub rip: u64,
    /// The stack pointer.
    pub rsp: u64,
    /// Put into RDI.
    pub argument: u64,
    /// At privilege level 3 instead of 0; I/O ports can be used all the same.
    pub user_mode: bool,
}
