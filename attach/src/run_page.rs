// SPDX-License-Identifier: Apache-2.0
//! Reads a vCPU's registers from its run page, `struct kvm_run` (`include/uapi/linux/kvm.h`), in
//! the monitor's process.
//!
//! While `kvm_valid_regs` names a set of registers, KVM stores it in the page whenever `KVM_RUN`
//! returns, also when a signal or ptrace interrupts it. `kvm_dirty_regs`, by which a monitor
//! changes registers, is never written here. KVM answers `kvm_valid_regs` of a confidential guest
//! with EINVAL from `KVM_RUN`, which ends the guest, so such guests are refused before
//! (`patchbay_host_kernel::Vm::refusals`).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::registers::Registers;

/// Offsets in `struct kvm_run` and in the `struct kvm_sync_regs` in it, since Linux 4.17.
const VALID_REGS: u64 = 288;
const DIRTY_REGS: u64 = 296;
const REGS: u64 = 304;
const RIP: u64 = REGS + 16 * 8;
const SREGS: u64 = REGS + 18 * 8;
/// The base in `kvm_sregs.idt`, after eight segments of 24 bytes and `gdt` of 16.
const IDT: u64 = SREGS + 8 * 24 + 16;
const CR0: u64 = IDT + 16;
const CR3: u64 = CR0 + 16;
const CR4: u64 = CR0 + 24;
const EFER: u64 = CR0 + 40;
/// The last word of the padding after the registers, which neither KVM nor a monitor uses.
const NOTE: u64 = REGS + 2048 - 8;
/// Marks [`NOTE`] as written by an attacher. The low bits are the bits of `kvm_valid_regs` that the
/// attacher's request has set. If an attacher is killed, the next one clears the bits that were
/// left.
const REQUESTED: u64 = u64::from_be_bytes(*b"patchba\0");

/// `KVM_SYNC_X86_REGS` and `KVM_SYNC_X86_SREGS`
const GENERAL: u64 = 1;
const SYSTEM: u64 = 2;

/// The run page of a vCPU whose registers have been requested. Dropping this value withdraws the
/// request.
#[derive(Debug)]
pub(crate) struct RunPage<'m> {
    memory: &'m File,
    address: u64,
    /// The part of `kvm_valid_regs` that the monitor itself had not set.
    ours: u64,
}

impl<'m> RunPage<'m> {
    /// Requests the registers of a vCPU, which must be stopped outside of `KVM_RUN`. Returns `None`
    /// if the monitor is about to change registers through the page.
    ///
    /// # Errors
    /// The process has no page at this address, or the monitor itself requests registers through
    /// the page.
    pub(crate) fn request(memory: &'m File, address: u64) -> io::Result<Option<Self>> {
        let mut page = Self {
            memory,
            address,
            ours: 0,
        };
        if page.word(DIRTY_REGS)? != 0 {
            return Ok(None);
        }
        let note = page.word(NOTE)?;
        let left = match note & !(GENERAL | SYSTEM) {
            REQUESTED => note & (GENERAL | SYSTEM),
            _ => 0,
        };
        let theirs = page.word(VALID_REGS)? & !left;
        if theirs & SYSTEM != 0 {
            return Err(io::Error::other(
                "the monitor itself requests the system registers, so those of this stop cannot be told from older ones",
            ));
        }
        page.ours = (GENERAL | SYSTEM) & !theirs;
        page.write(NOTE, REQUESTED | page.ours)?;
        // CR0.ET is always 1, so KVM never stores 0.
        page.write(CR0, 0)?;
        page.write(VALID_REGS, theirs | page.ours)?;
        Ok(Some(page))
    }

    fn word(&self, offset: u64) -> io::Result<u64> {
        let mut word = [0; 8];
        let address = self.address.saturating_add(offset);
        self.memory.read_exact_at(&mut word, address)?;
        Ok(u64::from_le_bytes(word))
    }

    fn write(&self, offset: u64, word: u64) -> io::Result<()> {
        let address = self.address.saturating_add(offset);
        self.memory.write_all_at(&word.to_le_bytes(), address)
    }

    /// Returns the registers of the last return from `KVM_RUN`; `None` if the vCPU has not returned
    /// since the request.
    ///
    /// # Errors
    /// The process has unmapped the page.
    pub(crate) fn registers(&self) -> io::Result<Option<Registers>> {
        let registers = Registers {
            rip: self.word(RIP)?,
            cr0: self.word(CR0)?,
            cr3: self.word(CR3)?,
            cr4: self.word(CR4)?,
            efer: self.word(EFER)?,
            idt_base: self.word(IDT)?,
        };
        Ok((registers.cr0 != 0).then_some(registers))
    }
}

impl Drop for RunPage<'_> {
    fn drop(&mut self) {
        // Bits that the monitor has set meanwhile are kept.
        if let Ok(now) = self.word(VALID_REGS) {
            let _ = self.write(VALID_REGS, now & !self.ours);
            if self.ours != 0 {
                let _ = self.write(NOTE, 0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The offset of the page in the file that serves as the monitor's memory.
    const PAGE: u64 = 4096;

    fn memory(valid: u64) -> File {
        let file = tempfile::tempfile().expect("room");
        file.set_len(2 * PAGE).expect("room");
        put(&file, VALID_REGS, valid);
        put(&file, CR0, 0x11);
        put(&file, CR3, 0x1000);
        file
    }

    fn put(file: &File, offset: u64, word: u64) {
        let written = file.write_all_at(&word.to_le_bytes(), PAGE + offset);
        written.expect("room");
    }

    fn get(file: &File, offset: u64) -> u64 {
        let mut word = [0; 8];
        file.read_exact_at(&mut word, PAGE + offset).expect("there");
        u64::from_le_bytes(word)
    }

    fn request(file: &File) -> RunPage<'_> {
        let page = RunPage::request(file, PAGE).expect("a page");
        page.expect("nothing is dirty")
    }

    #[test]
    fn registers_count_only_after_a_return_from_the_guest() {
        let file = memory(0);
        let page = request(&file);
        assert_eq!(get(&file, VALID_REGS), GENERAL | SYSTEM);
        assert_eq!(page.registers().expect("there"), None);
        let stored = [
            (RIP, 0xffff_ffff_8100_0000),
            (CR0, 0x8005_0033),
            (CR3, 0x2000),
            (CR4, 0x20),
            (EFER, 0xd01),
            (IDT, 0xffff_fe00_0000_0000),
        ];
        for (offset, word) in stored {
            put(&file, offset, word);
        }
        let expected = Registers {
            rip: stored[0].1,
            cr0: stored[1].1,
            cr3: stored[2].1,
            cr4: stored[3].1,
            efer: stored[4].1,
            idt_base: stored[5].1,
        };
        assert_eq!(page.registers().expect("there"), Some(expected));
        drop(page);
        assert_eq!(get(&file, VALID_REGS), 0);
        RunPage::request(&file, 1 << 20).expect_err("no page");
    }

    #[test]
    fn requests_of_the_monitor_itself_stay() {
        for before in [GENERAL, 4, GENERAL | 4] {
            let file = memory(before);
            let page = request(&file);
            assert_eq!(get(&file, VALID_REGS), before | 3);
            assert_eq!(page.registers().expect("there"), None, "{before}");
            // The monitor requests a further set of registers.
            put(&file, VALID_REGS, before | 3 | 8);
            drop(page);
            assert_eq!(get(&file, VALID_REGS), before | 8);
            assert_eq!(get(&file, NOTE), 0);
        }
        for before in [SYSTEM, 7] {
            let file = memory(before);
            RunPage::request(&file, PAGE).expect_err("it is the monitor's");
            let words = [VALID_REGS, CR0, NOTE].map(|offset| get(&file, offset));
            assert_eq!(words, [before, 0x11, 0]);
        }
    }

    #[test]
    fn the_request_of_a_killed_attacher_is_not_taken_for_the_monitors() {
        for before in [0, GENERAL, 4] {
            let file = memory(before);
            std::mem::forget(request(&file));
            put(&file, CR0, 0x11);
            let page = request(&file);
            assert_eq!(page.registers().expect("there"), None, "older ones");
            drop(page);
            assert_eq!(get(&file, VALID_REGS), before);
        }
    }

    #[test]
    fn registers_that_the_monitor_changes_are_not_touched() {
        for dirty in [GENERAL, SYSTEM] {
            let file = memory(0);
            put(&file, DIRTY_REGS, dirty);
            assert!(RunPage::request(&file, PAGE).expect("a page").is_none());
            let words = [VALID_REGS, DIRTY_REGS, CR0].map(|offset| get(&file, offset));
            assert_eq!(words, [0, dirty, 0x11]);
        }
    }
}
