// SPDX-License-Identifier: Apache-2.0
//! VMCOREINFO, the text in which a kernel describes itself for crash dumps
//! (Documentation/admin-guide/kdump/vmcoreinfo.rst).
//!
//! Any process in the guest can write such a text into a page. A text is accepted only if
//!
//! - the page table that the text names maps `_stext` to the address that follows from `phys_base`,
//! - the page table of every vCPU whose registers are known maps `_stext` to the same address,
//! - CR4.LA57 of those vCPUs agrees with `pgtable_l5_enabled`,
//! - every `kallsyms_*` symbol lies in pages that this page table maps read-only and not
//!   executable, unless it maps even `_stext` writable (`rodata=off`),
//! - and all texts that pass these tests are equal.
//!
//! A forged text can prevent the kernel from being found in this way, but cannot make another
//! kernel be found in its place.

use std::collections::HashMap;

use super::error::{DiscoveryError, absent, refuse};
use super::kernel::IMAGE_MAP;
use crate::classes::printable;
use patchbay_memory::PAGE_SIZE;
use patchbay_memory::paging::{Levels, PageTable};
use patchbay_memory::{Cpu, PhysicalMemory};

/// The start of the text.
const START: &[u8] = b"OSRELEASE=";
/// Size in bytes of the header that precedes the text in `vmcoreinfo_note`: {name size, text size,
/// type 0, name padded to 12 bytes}.
const NOTE_HEADER: usize = 24;
/// The number of bytes that are read from the start of each page.
const START_SIZE: usize = NOTE_HEADER + START.len();
const NOTE_NAME: &[u8] = b"VMCOREINFO\0\0";
/// The maximum number of texts that are examined. Each guest has two; a guest that runs nested
/// guests may have more.
const MAX_TEXTS: usize = 64;

/// The contents of the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Note {
    pub release: String,
    /// Build id in hexadecimal; empty before 5.9.
    pub build_id: String,
    /// Virtual address of the kernel's own page table.
    pub root: u64,
    pub stext: u64,
    pub phys_base: u64,
    pub levels: Levels,
    pub kaslr_offset: Option<u64>,
    /// Addresses of the `kallsyms_*` symbols, sorted.
    pub kallsyms: Vec<u64>,
}

impl Note {
    /// Parses a text up to its NUL. Returns `None` if it lacks a line that every kernel since 4.19
    /// has.
    ///
    /// # Errors
    /// A message if the guest's memory is encrypted.
    pub fn parse(text: &[u8]) -> Option<Result<Self, String>> {
        let whole = text.split(|byte| *byte == 0).next()?;
        let lines: HashMap<&str, &str> = std::str::from_utf8(whole)
            .ok()?
            .lines()
            .filter_map(|line| line.split_once('='))
            .collect();
        let text = |name: &str| Some(printable(lines.get(name)?.as_bytes()).into_owned());
        let symbol = |name: &str| u64::from_str_radix(lines.get(name)?, 16).ok();
        if lines
            .get("NUMBER(sme_mask)")
            .is_some_and(|mask| *mask != "0")
        {
            return Some(Err(
                "VMCOREINFO says that the guest's memory is encrypted (sme_mask): its keys cannot be read"
                    .to_owned(),
            ));
        }
        let phys_base = lines.get("NUMBER(phys_base)")?;
        let mut kallsyms: Vec<u64> = lines
            .keys()
            .filter(|name| name.starts_with("SYMBOL(kallsyms_"))
            .map(|name| symbol(name))
            .collect::<Option<_>>()?;
        kallsyms.sort_unstable();
        Some(Ok(Self {
            release: text("OSRELEASE")?,
            build_id: text("BUILD-ID").unwrap_or_default(),
            root: symbol("SYMBOL(init_top_pgt)").or_else(|| symbol("SYMBOL(swapper_pg_dir)"))?,
            stext: symbol("SYMBOL(_stext)")?,
            phys_base: phys_base
                .parse::<i64>()
                .map(i64::cast_unsigned)
                .or_else(|_| phys_base.parse::<u64>())
                .ok()?,
            levels: Levels::of(*lines.get("NUMBER(pgtable_l5_enabled)")? == "1"),
            kaslr_offset: symbol("KERNELOFFSET"),
            kallsyms,
        }))
    }

    /// Returns the physical address of a virtual address in the image's mapping.
    fn physical(&self, address: u64) -> Option<u64> {
        Some(address.checked_sub(IMAGE_MAP)?.wrapping_add(self.phys_base))
    }

    /// Returns the kernel's own page table.
    pub fn table(&self) -> Option<PageTable> {
        Some(PageTable {
            root: self.physical(self.root)?,
            levels: self.levels,
        })
    }

    /// Returns whether the text passes the tests in the module documentation.
    fn is_proven(&self, memory: &(impl PhysicalMemory + ?Sized), cpus: &[Cpu]) -> bool {
        let (Some(table), Some(stext)) = (self.table(), self.physical(self.stext)) else {
            return false;
        };
        let maps_text = |table: PageTable| {
            table
                .translate(memory, self.stext)
                .is_ok_and(|mapping| mapping.physical == stext)
        };
        let unprotected = table
            .translate(memory, self.stext)
            .is_ok_and(|mapping| mapping.writable);
        let constant = |address: &u64| {
            table
                .translate(memory, *address)
                .is_ok_and(|mapping| unprotected || !mapping.writable && !mapping.executable)
        };
        maps_text(table)
            && self.kallsyms.iter().all(constant)
            && cpus.iter().filter(|cpu| cpu.has_paging()).all(|cpu| {
                cpu.levels() == self.levels && cpu.page_tables().into_iter().any(maps_text)
            })
    }
}

/// Searches the start of each page of RAM for a text that passes the tests. Also returns the number
/// of bytes that were read.
pub(super) fn find(
    memory: &(impl PhysicalMemory + ?Sized),
    cpus: &[Cpu],
) -> Result<(Note, u64), DiscoveryError> {
    let mut found: Option<Note> = None;
    let (mut texts, mut read) = (0, 0);
    for range in memory.ram() {
        let first = range.start.next_multiple_of(PAGE_SIZE);
        for page in (first..range.end).step_by(PAGE_SIZE as usize) {
            read += START_SIZE as u64;
            let Some(text) = text_at(memory, page) else {
                continue;
            };
            texts += 1;
            read += PAGE_SIZE;
            if texts > MAX_TEXTS {
                return refuse(format!(
                    "more than {MAX_TEXTS} pages of the guest begin like a VMCOREINFO: give the vCPUs' registers"
                ));
            }
            let note = match Note::parse(&text) {
                Some(Ok(note)) => note,
                Some(Err(encrypted)) => return refuse(encrypted),
                None => continue,
            };
            if !note.is_proven(memory, cpus) {
                continue;
            }
            match &found {
                Some(other) if *other != note => {
                    return refuse(format!(
                        "two VMCOREINFO texts pass every test and disagree (kernels {} and {}): give the vCPUs' registers",
                        other.release, note.release
                    ));
                }
                _ => found = Some(note),
            }
        }
    }
    match found {
        Some(note) => Ok((note, read)),
        None => absent(format!(
            "none of {texts} VMCOREINFO texts in its memory is proven by the page tables: it runs no Linux with \
             CONFIG_VMCORE_INFO, or has not booted"
        )),
    }
}

/// Returns the text at the start of a page, or after the header of a note at the start of a page.
fn text_at(memory: &(impl PhysicalMemory + ?Sized), page: u64) -> Option<Vec<u8>> {
    let mut start = [0; START_SIZE];
    memory.read(page, &mut start).ok()?;
    let behind = if start.starts_with(START) {
        0
    } else if start[NOTE_HEADER..] == *START && start[12..NOTE_HEADER] == *NOTE_NAME {
        NOTE_HEADER
    } else {
        return None;
    };
    let mut text = vec![0; PAGE_SIZE as usize];
    memory.read(page, &mut text).ok()?;
    text.drain(..behind);
    Some(text)
}
