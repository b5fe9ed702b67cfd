// SPDX-License-Identifier: Apache-2.0

//! Writes the zero page of the Linux boot protocol (`Documentation/arch/x86/zero-page.rst`).

use linux_loader::loader::bootparam::{boot_e820_entry, boot_params, setup_header};
use vm_memory::{Bytes, GuestAddress};

use super::kernel::Kernel;
use super::layout::{ACPI_TABLES, COMMAND_LINE, ZERO_PAGE};
use super::memory_map::memory_map;
use super::{BootError, Initrd};
use crate::memory::{GuestRam, OutsideMemory};
use crate::x86::low_half;

/// Boot loader type "undefined", because no assigned value fits.
const LOADER_TYPE: u8 = 0xff;

/// Returns a setup header for an ELF kernel, which has none of its own. The magic and the version
/// tell the kernel that the fields are valid.
fn elf_header() -> setup_header {
    setup_header {
        boot_flag: 0xaa55,
        header: 0x5372_6448,
        version: 0x020c,
        kernel_alignment: 0x0100_0000,
        ..Default::default()
    }
}

pub(super) fn write_zero_page(
    ram: &GuestRam,
    kernel: &Kernel,
    command_line_size: usize,
    initrd: Option<Initrd>,
) -> Result<(), BootError> {
    let mut params = boot_params {
        hdr: kernel.setup.unwrap_or_else(elf_header),
        acpi_rsdp_addr: ACPI_TABLES,
        ..Default::default()
    };
    params.hdr.type_of_loader = LOADER_TYPE;
    params.hdr.cmd_line_ptr = low_half(COMMAND_LINE);
    params.hdr.cmdline_size = low_half(command_line_size as u64);
    if let Some(initrd) = initrd {
        params.hdr.ramdisk_image = low_half(initrd.address);
        params.hdr.ramdisk_size = low_half(initrd.size);
    }
    let map = memory_map(ram);
    for (entry, range) in params.e820_table.iter_mut().zip(&map) {
        *entry = boot_e820_entry {
            addr: range.address,
            size: range.size,
            r#type: range.kind,
        };
        params.e820_entries += 1;
    }
    ram.mmap()
        .write_obj(params, GuestAddress(ZERO_PAGE))
        .map_err(|_| OutsideMemory {
            address: ZERO_PAGE,
            length: size_of::<boot_params>(),
        })?;
    Ok(())
}
