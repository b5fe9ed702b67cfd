// SPDX-License-Identifier: Apache-2.0
//! The memory of a crafted guest, and the addresses of what is in it.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;

use patchbay_memory::{Cpu, OutsideMemory, PhysicalMemory};

pub const PAGE: u64 = 4096;
/// Address of the kernel's text.
pub const TEXT: u64 = 0xffff_ffff_8100_0000;
/// The end of the kernel's code.
pub const ETEXT: u64 = TEXT + 0xf00;
/// Address of the kernel's read-only data, which has 31 pages.
pub const RODATA: u64 = TEXT + PAGE;
/// Address of the kernel's data, which has 8 pages. The first is the top page table. It is aligned
/// to two pages.
pub const DATA: u64 = RODATA + 31 * PAGE;
/// Addresses of the module's text and of its data, a page each.
pub const MODULE_TEXT: u64 = 0xffff_ffff_c000_0000;
pub const MODULE_DATA: u64 = MODULE_TEXT + PAGE;
/// Address at which all of RAM is mapped.
pub const DIRECT: u64 = 0xffff_8880_0000_0000;
pub const IDT: u64 = 0xffff_fe00_0000_0000;
/// Guest-physical address of [`TEXT`].
pub const IMAGE: u64 = 0x10_0000;
pub const MODULE: u64 = 0x18_0000;
pub const IDT_PAGE: u64 = 0x1a_0000;
pub const NOTE: u64 = 0x1a_1000;
/// Guest-physical address of the page tables, which follow one another.
pub const TABLES: u64 = 0x1b_0000;
pub const RAM: u64 = 0x20_0000;

/// A change of RAM before a read.
type Change = Box<dyn FnMut(u64, &mut [u8])>;

pub struct CraftedGuest {
    pub ram: RefCell<Vec<u8>>,
    /// Called before each read with its number.
    pub before_read: RefCell<Option<Change>>,
    pub reads: RefCell<u64>,
    pub cpus: Vec<Cpu>,
    pub symbols: HashMap<String, u64>,
    /// The NOP of its sites.
    pub nop: [u8; 5],
    /// The symbols in kallsyms' form: address, letter and name. They include the symbols that the
    /// guest's kallsyms lack.
    pub listed: Vec<(u64, String)>,
}

impl PhysicalMemory for CraftedGuest {
    fn ram(&self) -> Vec<Range<u64>> {
        std::iter::once(0..RAM).collect()
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), OutsideMemory> {
        let mut ram = self.ram.borrow_mut();
        let number = *self.reads.borrow();
        *self.reads.borrow_mut() += 1;
        if let Some(change) = &mut *self.before_read.borrow_mut() {
            change(number, &mut ram);
        }
        let length = bytes.len();
        let outside = OutsideMemory { address, length };
        let end = address.checked_add(length as u64).ok_or(outside)?;
        if end > RAM {
            return Err(outside);
        }
        bytes.copy_from_slice(&ram[address as usize..end as usize]);
        Ok(())
    }
}

/// Returns the physical address of a virtual address of the guest.
pub fn physical(address: u64) -> u64 {
    match address {
        TEXT.. if address < TEXT + (1 << 20) => address - TEXT + IMAGE,
        MODULE_TEXT.. => address - MODULE_TEXT + MODULE,
        DIRECT.. if address < DIRECT + RAM => address - DIRECT,
        _ => panic!("{address:#x}"),
    }
}

impl CraftedGuest {
    /// Creates a guest whose RAM is zero.
    pub fn new(nop: [u8; 5]) -> Self {
        Self {
            ram: RefCell::new(vec![0; RAM as usize]),
            before_read: RefCell::new(None),
            reads: RefCell::new(0),
            cpus: Vec::new(),
            symbols: HashMap::new(),
            nop,
            listed: Vec::new(),
        }
    }

    pub fn put(&self, address: u64, bytes: &[u8]) {
        self.put_physical(physical(address), bytes);
    }

    pub fn put_physical(&self, address: u64, bytes: &[u8]) {
        let at = address as usize;
        self.ram.borrow_mut()[at..at + bytes.len()].copy_from_slice(bytes);
    }

    pub fn put_u64(&self, address: u64, value: u64) {
        self.put(address, &value.to_le_bytes());
    }

    pub fn put_u32(&self, address: u64, value: u32) {
        self.put(address, &value.to_le_bytes());
    }

    pub fn u64_at(&self, physical: u64) -> u64 {
        let at = physical as usize;
        u64::from_le_bytes(*self.ram.borrow()[at..].first_chunk().unwrap())
    }

    pub fn symbol(&self, name: &str) -> u64 {
        self.symbols[name]
    }

    pub fn name(&mut self, address: u64, letter: char, name: &str) {
        self.listed.push((address, format!("{letter}{name}")));
        self.symbols.insert(name.to_owned(), address);
    }

    /// Returns the address and the value of the last-level entry for a virtual address.
    pub fn entry(&self, address: u64) -> (u64, u64) {
        let mut table = physical(self.symbol("init_top_pgt"));
        for shift in [39, 30, 21] {
            table = self.u64_at(table + 8 * (address >> shift & 0x1ff)) & !0xfff;
        }
        let at = table + 8 * (address >> 12 & 0x1ff);
        (at, self.u64_at(at))
    }

    /// Maps pages; `flags` are those of the last level.
    pub fn map(&self, tables: &mut u64, address: u64, physical: u64, pages: u64, flags: u64) {
        for page in 0..pages {
            let (address, physical) = (address + page * PAGE, physical + page * PAGE);
            let mut table = self.symbol("init_top_pgt");
            table = self::physical(table);
            for level in [4, 3, 2] {
                let at = table + 8 * (address >> (12 + 9 * (level - 1)) & 0x1ff);
                if self.u64_at(at) == 0 {
                    self.put_physical(at, &(*tables | 3).to_le_bytes());
                    *tables += PAGE;
                }
                table = self.u64_at(at) & !0xfff;
            }
            let at = table + 8 * (address >> 12 & 0x1ff);
            self.put_physical(at, &(physical | flags).to_le_bytes());
        }
    }
}
