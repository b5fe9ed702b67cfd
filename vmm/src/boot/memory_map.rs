// SPDX-License-Identifier: Apache-2.0

//! Memory map of the guest for both boot protocols, which use the type numbers of the BIOS call
//! E820.

use super::layout::{ACPI_TABLES, ACPI_TABLES_MAX, HIGH_MEMORY, MP_TABLE, MP_TABLE_MAX};
use crate::memory::{DEVICE_GAP_END, GuestRam};

/// Usable memory.
pub(super) const RAM: u32 = 1;
/// Memory that the guest must not use.
pub(super) const RESERVED: u32 = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MapEntry {
    pub address: u64,
    pub size: u64,
    pub kind: u32,
}

/// Returns the memory map in ascending order.
pub(super) fn memory_map(ram: &GuestRam) -> Vec<MapEntry> {
    let entry = |address, size, kind| MapEntry {
        address,
        size,
        kind,
    };
    let mut map = vec![
        entry(0, MP_TABLE, RAM),
        entry(MP_TABLE, MP_TABLE_MAX as u64, RESERVED),
        entry(ACPI_TABLES, ACPI_TABLES_MAX as u64, RESERVED),
        entry(HIGH_MEMORY, ram.low_bytes() - HIGH_MEMORY, RAM),
    ];
    if ram.high_bytes() > 0 {
        map.push(entry(DEVICE_GAP_END, ram.high_bytes(), RAM));
    }
    map
}
