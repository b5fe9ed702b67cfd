// SPDX-License-Identifier: Apache-2.0

//! Initial registers of a vCPU, and the tables they refer to.

use kvm_bindings::{kvm_lapic_state, kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs};

use crate::boot::layout::{GDT, PAGE_TABLES};
use crate::memory::{GuestRam, OutsideMemory, PAGE_SIZE};

const CR0_PROTECTED: u64 = 1;
const CR0_EXTENSION_TYPE: u64 = 1 << 4;
const CR0_PAGING: u64 = 1 << 31;
const CR4_PHYSICAL_ADDRESS_EXTENSION: u64 = 1 << 5;
const EFER_LONG_MODE: u64 = 1 << 8 | 1 << 10;

/// Bit 1 of RFLAGS is always set.
pub(crate) const RFLAGS_RESERVED: u64 = 2;
/// I/O privilege level 3: user mode may access I/O ports.
pub(crate) const RFLAGS_IOPL3: u64 = 3 << 12;

/// Selectors defined by the Linux boot protocol (`__BOOT_CS`, `__BOOT_DS`), and our own.
const KERNEL_CODE: u16 = 0x10;
const KERNEL_DATA: u16 = 0x18;
const TASK: u16 = 0x20;
const USER_DATA: u16 = 0x30;
const USER_CODE: u16 = 0x38;

/// Mode in which a vCPU starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// 64-bit mode, paging on, privilege level 0.
    Long,
    /// 64-bit mode, paging on, privilege level 3.
    LongUser,
    /// 32-bit protected mode, paging off, flat segments.
    Protected,
}

/// Returns a flat segment or the task segment in the form that KVM and the GDT need.
fn segment(selector: u16, type_: u8, long: bool, privilege: u8) -> kvm_segment {
    let system = selector == TASK;
    kvm_segment {
        base: 0,
        limit: if system { 0x67 } else { 0xffff_ffff },
        selector: selector | u16::from(privilege),
        type_,
        present: 1,
        dpl: privilege,
        db: u8::from(!system && !long),
        s: u8::from(!system),
        l: u8::from(long),
        g: u8::from(!system),
        ..Default::default()
    }
}

/// Returns the descriptor of a segment (Intel SDM volume 3, 3.4.5).
fn descriptor(segment: &kvm_segment) -> u64 {
    let limit = u64::from(if segment.g == 1 {
        segment.limit >> 12
    } else {
        segment.limit
    });
    let flags = u64::from(segment.type_)
        | u64::from(segment.s) << 4
        | u64::from(segment.dpl) << 5
        | u64::from(segment.present) << 7
        | u64::from(segment.l) << 13
        | u64::from(segment.db) << 14
        | u64::from(segment.g) << 15;
    (limit & 0xffff) | flags << 40 | (limit >> 16) << 48
}

/// Execute/read, accessed.
const CODE: u8 = 0xb;
/// Read/write, accessed.
const DATA: u8 = 3;
/// Busy task.
const BUSY_TASK: u8 = 0xb;

/// Writes the GDT and page tables to memory: the first 4 GiB identity-mapped with 2 MiB pages, also
/// for user mode.
pub(crate) fn write_tables(ram: &GuestRam) -> Result<(), OutsideMemory> {
    const PRESENT_WRITABLE_USER: u64 = 7;
    const LARGE: u64 = 1 << 7;
    let gdt = [
        0,
        0,
        descriptor(&segment(KERNEL_CODE, CODE, true, 0)),
        descriptor(&segment(KERNEL_DATA, DATA, false, 0)),
        descriptor(&segment(TASK, BUSY_TASK, false, 0)),
        0,
        descriptor(&segment(USER_DATA, DATA, false, 3)),
        descriptor(&segment(USER_CODE, CODE, true, 3)),
    ];
    for (index, descriptor) in gdt.iter().enumerate() {
        ram.write(GDT + index as u64 * 8, &descriptor.to_le_bytes())?;
    }
    let pointers = PAGE_TABLES + PAGE_SIZE;
    let directories = pointers + PAGE_SIZE;
    ram.write(
        PAGE_TABLES,
        &(pointers | PRESENT_WRITABLE_USER).to_le_bytes(),
    )?;
    for gigabyte in 0..4 {
        let directory = directories + gigabyte * PAGE_SIZE;
        ram.write(
            pointers + gigabyte * 8,
            &(directory | PRESENT_WRITABLE_USER).to_le_bytes(),
        )?;
        let mut entries = Vec::with_capacity(4096);
        for page in 0..512 {
            let address = (gigabyte << 30) + (page << 21);
            entries.extend_from_slice(&(address | PRESENT_WRITABLE_USER | LARGE).to_le_bytes());
        }
        ram.write(directory, &entries)?;
    }
    Ok(())
}

/// Sets the system registers for a mode; the rest of `sregs` keeps KVM's values.
pub(crate) fn system_registers(sregs: &mut kvm_sregs, mode: Mode) {
    let long = mode != Mode::Protected;
    let (code, data, privilege) = match mode {
        Mode::LongUser => (USER_CODE, USER_DATA, 3),
        Mode::Long | Mode::Protected => (KERNEL_CODE, KERNEL_DATA, 0),
    };
    let data = segment(data, DATA, false, privilege);
    sregs.cs = segment(code, CODE, long, privilege);
    sregs.ds = data;
    sregs.es = data;
    sregs.fs = data;
    sregs.gs = data;
    sregs.ss = data;
    sregs.tr = segment(TASK, BUSY_TASK, false, 0);
    sregs.gdt.base = GDT;
    sregs.gdt.limit = 8 * 8 - 1;
    sregs.idt.base = 0;
    sregs.idt.limit = 0;
    sregs.cr0 = CR0_PROTECTED | CR0_EXTENSION_TYPE;
    sregs.cr4 = 0;
    sregs.efer = 0;
    if long {
        sregs.cr3 = PAGE_TABLES;
        sregs.cr4 = CR4_PHYSICAL_ADDRESS_EXTENSION;
        sregs.cr0 |= CR0_PAGING;
        sregs.efer = EFER_LONG_MODE;
    }
}

/// Returns the general registers for an entry point; all others are zero.
pub(crate) fn general_registers(rip: u64) -> kvm_regs {
    kvm_regs {
        rip,
        rflags: RFLAGS_RESERVED,
        ..Default::default()
    }
}

/// Returns the MSRs that firmware sets before a kernel runs: fast string operations
/// (`IA32_MISC_ENABLE`), and write-back as the default memory type with MTRRs enabled
/// (`IA32_MTRR_DEF_TYPE`).
pub(crate) fn boot_msrs() -> [kvm_msr_entry; 2] {
    const MISC_ENABLE: u32 = 0x1a0;
    const MTRR_DEFAULT_TYPE: u32 = 0x2ff;
    [(MISC_ENABLE, 1), (MTRR_DEFAULT_TYPE, 1 << 11 | 6)].map(|(index, data)| kvm_msr_entry {
        index,
        data,
        ..Default::default()
    })
}

/// Sets up the local interrupt pins: external interrupts on LINT0 and NMI on LINT1, as in the MP
/// table (Intel SDM volume 3, 11.5.1).
pub(crate) fn local_interrupts(lapic: &mut kvm_lapic_state) {
    const LVT_LINT0: usize = 0x350;
    const LVT_LINT1: usize = 0x360;
    const DELIVERY: u32 = 7 << 8;
    const EXTERNAL: u32 = 7 << 8;
    const NMI: u32 = 4 << 8;
    for (register, delivery) in [(LVT_LINT0, EXTERNAL), (LVT_LINT1, NMI)] {
        let mut bytes = [0; 4];
        for (byte, source) in bytes.iter_mut().zip(&lapic.regs[register..]) {
            *byte = source.to_le_bytes()[0];
        }
        let value = (u32::from_le_bytes(bytes) & !DELIVERY) | delivery;
        for (target, byte) in lapic.regs[register..].iter_mut().zip(value.to_le_bytes()) {
            *target = i8::from_le_bytes([byte]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::MEMORY_MIN;
    use patchbay_memory::paging::{Levels, PageTable};

    #[test]
    fn descriptors_are_those_of_the_boot_protocol() {
        let code = descriptor(&segment(KERNEL_CODE, CODE, true, 0));
        let data = descriptor(&segment(KERNEL_DATA, DATA, false, 0));
        assert_eq!(code, 0x00af_9b00_0000_ffff);
        assert_eq!(data, 0x00cf_9300_0000_ffff);
        assert_eq!(
            descriptor(&segment(TASK, BUSY_TASK, false, 0)),
            0x0000_8b00_0000_0067
        );
    }

    #[test]
    fn the_first_four_gibibytes_are_mapped_onto_themselves() {
        let ram = GuestRam::new(MEMORY_MIN).unwrap();
        write_tables(&ram).unwrap();
        let table = PageTable {
            root: PAGE_TABLES,
            levels: Levels::Four,
        };
        for address in [0, 0x1234, 0x20_0000, 0xfee0_0010, 0xffff_ffff] {
            let mapping = table.translate(&ram, address).unwrap();
            assert_eq!(mapping.physical, address);
        }
        assert!(table.translate(&ram, 4 << 30).is_err());
    }
}
