// SPDX-License-Identifier: Apache-2.0

//! Writes the start info of the PVH boot protocol (Xen's `arch-x86/hvm/start_info.h`).

use linux_loader::loader::elf::start_info::{
    XEN_HVM_START_MAGIC_VALUE, hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info,
};
use vm_memory::{ByteValued, Bytes, GuestAddress};

use super::layout::{ACPI_TABLES, COMMAND_LINE, PVH_START_INFO};
use super::memory_map::memory_map;
use super::{BootError, Initrd};
use crate::memory::{GuestRam, OutsideMemory};

/// Address of the module list (the initrd), after the start info.
const MODULES: u64 = PVH_START_INFO + 0x100;
/// Address of the memory map, after the module list.
const MEMORY_MAP: u64 = PVH_START_INFO + 0x200;

/// Writes the start info, the module list and the memory map.
pub(super) fn write_start_info(ram: &GuestRam, initrd: Option<Initrd>) -> Result<(), BootError> {
    let map = memory_map(ram);
    let entries = u32::try_from(map.len()).unwrap_or(u32::MAX);
    let mut info = hvm_start_info {
        magic: XEN_HVM_START_MAGIC_VALUE,
        version: 1,
        cmdline_paddr: COMMAND_LINE,
        rsdp_paddr: ACPI_TABLES,
        memmap_paddr: MEMORY_MAP,
        memmap_entries: entries,
        ..Default::default()
    };
    if let Some(initrd) = initrd {
        info.nr_modules = 1;
        info.modlist_paddr = MODULES;
        let module = hvm_modlist_entry {
            paddr: initrd.address,
            size: initrd.size,
            ..Default::default()
        };
        put(ram, MODULES, module)?;
    }
    for (index, range) in (0..).zip(map) {
        let entry = hvm_memmap_table_entry {
            addr: range.address,
            size: range.size,
            type_: range.kind,
            reserved: 0,
        };
        put(ram, MEMORY_MAP + index * size_of_val(&entry) as u64, entry)?;
    }
    put(ram, PVH_START_INFO, info)?;
    Ok(())
}

fn put<T: ByteValued>(ram: &GuestRam, address: u64, object: T) -> Result<(), OutsideMemory> {
    ram.mmap()
        .write_obj(object, GuestAddress(address))
        .map_err(|_| OutsideMemory {
            address,
            length: size_of::<T>(),
        })
}
