// SPDX-License-Identifier: Apache-2.0
//! Registers of a vCPU.

use crate::PAGE_SIZE;
use crate::paging::{ADDRESS, Levels, PageTable};

/// The registers of a vCPU from which its kernel is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpu {
    /// CR0. Bit 31 is set if paging is on.
    pub cr0: u64,
    /// CR3, the root of the page table in use.
    pub cr3: u64,
    /// CR4. Bit 12 is set if the page table has five levels.
    pub cr4: u64,
    /// IDTR.base.
    pub idt_base: u64,
    /// IA32_FRED_CONFIG, whose bits 63:12 are the entry point of exceptions; `None` if FRED is off
    /// or the monitor does not read it.
    pub fred_config: Option<u64>,
    /// The registers may be those of a nested guest that this vCPU runs ([`Cpu::can_run_guests`]).
    /// The nested guest controls the memory that they lead to, so no kernel is found through them.
    /// They can only confirm the kernel that another vCPU runs.
    pub may_be_nested: bool,
}

impl Cpu {
    /// Returns whether paging is on. A vCPU that the guest has not started runs no kernel.
    #[must_use]
    pub fn has_paging(&self) -> bool {
        self.cr0 & 1 << 31 != 0
    }

    /// Returns whether VMX or SVM is on. Both are also on in the registers of a nested guest: VM
    /// entry requires CR4.VMXE (Intel SDM volume 3, 23.8), and VMRUN requires EFER.SVME (AMD APM
    /// volume 2, 15.5.1).
    #[must_use]
    pub fn can_run_guests(cr4: u64, efer: u64) -> bool {
        cr4 & 1 << 13 != 0 || efer & 1 << 12 != 0
    }

    /// Returns the number of levels of the page table (CR4.LA57).
    #[must_use]
    pub fn levels(&self) -> Levels {
        Levels::of(self.cr4 & 1 << 12 != 0)
    }

    /// Returns whether FRED is on (CR4.FRED). A monitor that reports only 32 bits of CR4 does not
    /// report it.
    #[must_use]
    pub fn has_fred(&self) -> bool {
        self.cr4 & 1 << 32 != 0
    }

    /// Returns two page tables: the kernel's half of the pair, which exists if page table isolation
    /// is on, and the table that CR3 names. With isolation, bit 12 of CR3 selects the user's half.
    /// Without isolation, bit 12 belongs to the address.
    #[must_use]
    pub fn page_tables(&self) -> [PageTable; 2] {
        let root = self.cr3 & ADDRESS;
        let levels = self.levels();
        [root & !PAGE_SIZE, root].map(|root| PageTable { root, levels })
    }
}
