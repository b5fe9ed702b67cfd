// SPDX-License-Identifier: Apache-2.0

//! A small valid kernel as bytes in guest memory, for the attacks to corrupt.
//!
//! ```text
//!  guest-physical                    kernel-virtual
//!  0x10_0000  programs               (vCPUs run with the first 4 GiB mapped onto themselves)
//!  0x13_0000  scratch, a page per vCPU
//!  0x14_0000  request page
//!  0x15_0000  the kernel's page tables
//!  0x20_0000  the image              0xffff_ffff_8100_0000, 512 pages of 4 KiB
//! ```
//!
//! Keys: `alpha` with two sites, `beta` and `guarded` with one each, and `event`, a tracepoint with
//! a probe, with one. vCPU 0 executes the first site of `alpha`; the second straddles two pages.

use std::mem::size_of;
use std::sync::atomic::{AtomicU64, Ordering};

use patchbay_guest::abi;
pub use patchbay_guest::testing::Gate;
use patchbay_guest::testing::structures;
use patchbay_vmm::memory::GuestRam;
use zerocopy::{FromZeros, IntoBytes};

pub const CODE: u64 = 0x10_0000;
pub const SCRATCH: u64 = 0x13_0000;
pub const REQUEST: u64 = 0x14_0000;
pub const PAGE_TABLES: u64 = 0x15_0000;
/// Page table of the image's 4 KiB pages.
pub const LEAF_TABLE: u64 = PAGE_TABLES + 0x3000;
/// Additional page tables for attacks.
pub const SPARE_TABLE: u64 = PAGE_TABLES + 0x4000;
pub const IMAGE_PHYSICAL: u64 = 0x20_0000;
pub const IMAGE: u64 = 0xffff_ffff_8100_0000;
pub const IMAGE_BYTES: u64 = 0x20_0000;
/// Memory after the image in 2 MiB steps, unmapped until an attack maps it.
pub const BEYOND: u64 = IMAGE + IMAGE_BYTES;
/// The last 2 MiB are unused.
pub const MEMORY: u64 = 6 << 20;

pub const TEXT: u64 = IMAGE;
pub const TEXT_END: u64 = IMAGE + 0x1_0000;
pub const TABLE: u64 = IMAGE + 0x2_0000;
pub const KEYS: u64 = IMAGE + 0x3_0000;
pub const GATE_WORDS: u64 = IMAGE + 0x3_2000;
/// Address of the array that describes the gates.
pub const GATES: u64 = IMAGE + 0x3_4000;
/// Address of an array of the CPUs' offsets, for attacks.
pub const CPU_OFFSETS: u64 = IMAGE + 0x6_0000;
pub const TRACEPOINT: u64 = IMAGE + 0x3_3000;
pub const CHAIN: u64 = IMAGE + 0x3_8000;
pub const DIRECTORY: u64 = IMAGE + 0x4_0000;
pub const NAMES: u64 = IMAGE + 0x5_0000;
/// `struct module`s with their tables and text, 64 KiB each.
pub const MODULES: u64 = IMAGE + 0x8_0000;
/// Memory in the image that is mapped and unused.
pub const FREE: u64 = IMAGE + 0x1f_0000;

pub const ALPHA: u64 = KEYS;
pub const BETA: u64 = KEYS + 0x10;
pub const GUARDED: u64 = KEYS + 0x20;
pub const EVENT: u64 = TRACEPOINT + 8;

/// The site that vCPU 0 executes.
pub const EXECUTED: u64 = TEXT + 0x10;
/// Target of the executed site.
pub const EXECUTED_TARGET: u64 = TEXT + 0x40;
/// A site that straddles two pages.
pub const STRADDLING: u64 = TEXT + 0x1ffd;
pub const BETA_SITE: u64 = TEXT + 0x3000;
pub const GUARDED_SITE: u64 = TEXT + 0x3010;
pub const EVENT_SITE: u64 = TEXT + 0x3020;
/// Target of all other sites.
pub const TARGET: u64 = TEXT + 0x4000;

pub const NOP: [u8; 5] = [0x0f, 0x1f, 0x44, 0, 0];

pub const PRESENT: u64 = 3;
pub const LARGE: u64 = 1 << 7;

/// Returns the guest-virtual address of a gate's word.
pub fn gate_word(gate: Gate) -> u64 {
    gate.address(GATE_WORDS)
}

/// Returns the guest-physical address of an address in the image.
pub fn physical(address: u64) -> u64 {
    address - IMAGE + IMAGE_PHYSICAL
}

/// Returns the five-byte JMP.
pub fn jump(from: u64, to: u64) -> [u8; 5] {
    let distance = to.wrapping_sub(from).wrapping_sub(5).cast_signed();
    let [a, b, c, d] = i32::try_from(distance).unwrap().to_le_bytes();
    [0xe9, a, b, c, d]
}

/// Returns a jump entry with relative members, to be stored at `at`.
pub fn entry(at: u64, site: u64, target: u64, key: u64) -> [u8; 16] {
    let near = |to: u64, from: u64| i32::try_from(to.wrapping_sub(from).cast_signed()).unwrap();
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&near(site, at).to_le_bytes());
    bytes[4..8].copy_from_slice(&near(target, at + 4).to_le_bytes());
    bytes[8..].copy_from_slice(&key.wrapping_sub(at + 8).to_le_bytes());
    bytes
}

/// Returns a directory record of a key.
pub fn record(address: u64, name: u32, class: u16, tracepoint: u64) -> abi::Key {
    abi::Key {
        address,
        name,
        class,
        flags: 0,
        tracepoint,
        module: 0,
    }
}

/// Guest memory, addressed by the kernel's virtual addresses.
pub struct Memory<'a>(pub &'a GuestRam);

impl Memory<'_> {
    pub fn write(&self, address: u64, bytes: &[u8]) {
        self.write_physical(physical(address), bytes);
    }

    pub fn write_physical(&self, address: u64, bytes: &[u8]) {
        self.0.write(address, bytes).unwrap();
    }

    pub fn write_u64(&self, address: u64, value: u64) {
        self.write(address, &value.to_le_bytes());
    }

    pub fn read<const N: usize>(&self, address: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.0.read(physical(address), &mut bytes).unwrap();
        bytes
    }

    pub fn count(&self, key: u64) -> i32 {
        i32::from_le_bytes(self.read(key))
    }

    /// Sets an entry of the kernel's page tables: table 0 is the top level, 1 and 2 follow, 3 maps
    /// the image's pages.
    pub fn map(&self, table: u64, index: u64, value: u64) {
        self.write_physical(
            PAGE_TABLES + table * 0x1000 + index * 8,
            &value.to_le_bytes(),
        );
    }

    /// Maps the 2 MiB page `number` after the image to a physical address.
    pub fn map_beyond(&self, number: u64, onto: u64) {
        self.map(
            2,
            ((IMAGE >> 21) & 511) + 1 + number,
            onto | LARGE | PRESENT,
        );
    }

    /// Maps the 2 MiB after the image by 4 KiB pages through [`SPARE_TABLE`].
    pub fn map_beyond_by_page(&self, index: u64, value: u64) {
        self.map(2, ((IMAGE >> 21) & 511) + 1, SPARE_TABLE | PRESENT);
        self.map(4, index, value);
    }

    pub fn entry(&self, index: u64, site: u64, target: u64, key: u64) {
        let at = TABLE + 16 * index;
        self.write(at, &entry(at, site, target, key));
    }

    pub fn records(&self, records: &[abi::Key]) {
        self.write(DIRECTORY, records.as_bytes());
    }

    /// Writes the list of gates.
    pub fn gates(&self, gates: &[abi::Gate]) {
        self.write(GATES, gates.as_bytes());
    }

    /// Writes the valid kernel: keys off, sites NOPs, gates open.
    pub fn write_kernel(&self) {
        self.map(0, (IMAGE >> 39) & 511, (PAGE_TABLES + 0x1000) | PRESENT);
        self.map(1, (IMAGE >> 30) & 511, (PAGE_TABLES + 0x2000) | PRESENT);
        self.map(2, (IMAGE >> 21) & 511, LEAF_TABLE | PRESENT);
        for page in 0..512 {
            self.map(3, page, (IMAGE_PHYSICAL + page * 0x1000) | PRESENT);
        }
        for site in [EXECUTED, STRADDLING, BETA_SITE, GUARDED_SITE, EVENT_SITE] {
            self.write(site, &NOP);
        }
        let sites = [
            (EXECUTED, EXECUTED_TARGET, ALPHA),
            (STRADDLING, TARGET, ALPHA),
            (BETA_SITE, TARGET, BETA),
            (GUARDED_SITE, TARGET, GUARDED),
            (EVENT_SITE, TARGET, EVENT),
        ];
        for (index, (site, target, key)) in (0..).zip(sites) {
            self.entry(index, site, target, key);
        }
        for (key, entry) in [(ALPHA, 0), (BETA, 2), (GUARDED, 3), (EVENT, 4)] {
            self.write(key, &0_u64.to_le_bytes());
            self.write_u64(key + 8, TABLE + 16 * entry);
        }
        // The tracepoint's array holds one probe.
        self.write_u64(TRACEPOINT + 40, TRACEPOINT + 0x100);
        self.write_u64(TRACEPOINT + 0x100, TEXT + 0x5000);
        self.write(TRACEPOINT + 0x108, &[0; 40]);
        self.write(GATE_WORDS, &[0; 64]);
        self.write(gate_word(Gate::SystemState), &[2]);
        self.gates(&structures::gates(GATE_WORDS));
        self.records(&[
            record(ALPHA, 0, abi::KEY_REF, 0),
            record(BETA, 6, abi::KEY_REF, 0),
            record(GUARDED, 11, abi::KEY_GUARDED, 0),
            record(EVENT, 19, abi::KEY_TRACEPOINT, TRACEPOINT),
        ]);
        self.write(NAMES, b"alpha\0beta\0guarded\0event\0");
    }
}

pub fn header(op: u32, size: usize) -> abi::Header {
    abi::Header {
        magic: abi::HEADER_MAGIC,
        abi_version: abi::ABI_VERSION,
        op: u16::try_from(op).unwrap(),
        size: u32::try_from(size).unwrap(),
        status: -38,
        generation: 0x1234,
    }
}

/// Returns the descriptor of the kernel written by [`Memory::write_kernel`].
pub fn descriptor() -> abi::Descriptor {
    static BOOTS: AtomicU64 = AtomicU64::new(1);
    let mut descriptor = abi::Descriptor::new_zeroed();
    descriptor.header = header(abi::OP_REGISTER, size_of::<abi::Descriptor>());
    structures::describe(&mut descriptor);
    descriptor.boot = BOOTS.fetch_add(1, Ordering::Relaxed);
    descriptor.jump_table = range(TABLE, TABLE + 5 * 16);
    descriptor.text = range(TEXT, TEXT_END);
    descriptor.page_table = PAGE_TABLES;
    descriptor.gates = GATES;
    descriptor.gate_count = 6;
    descriptor.directory = structures::directory(DIRECTORY, 4, NAMES, 25);
    descriptor.release[..6].copy_from_slice(b"6.12.0");
    descriptor
}

pub fn range(start: u64, end: u64) -> abi::Range {
    abi::Range { start, end }
}

/// Addresses of a module's parts.
#[derive(Clone, Copy, Debug)]
pub struct ModuleParts {
    pub address: u64,
    pub text: u64,
    pub table: u64,
    pub key: u64,
    pub directory: u64,
    pub names: u64,
}

/// Returns the parts of the module with this number, up to 16.
pub fn module_parts(number: u64) -> ModuleParts {
    let address = MODULES + number * 0x1_0000;
    ModuleParts {
        address,
        text: address + 0x1000,
        table: address + 0x5000,
        key: address + 0x7000,
        directory: address + 0x8000,
        names: address + 0x9000,
    }
}

impl Memory<'_> {
    /// Writes a module with one key, `mod_key`, with one site. Returns the request that registers
    /// it.
    pub fn write_module(&self, number: u64) -> abi::Module {
        let parts = module_parts(number);
        self.write_u64(parts.address, 0);
        self.write(parts.text, &NOP);
        self.write(
            parts.table,
            &entry(parts.table, parts.text, parts.text + 0x100, parts.key),
        );
        self.write_u64(parts.key, 0);
        self.write_u64(parts.key + 8, parts.table);
        self.write_module_key(number, parts.key, parts.address);
        self.write(parts.names, b"mod_key\0");
        let mut request = abi::Module::new_zeroed();
        request.header = header(abi::OP_MODULE_ADD, size_of::<abi::Module>());
        request.module = parts.address;
        request.load = number + 1;
        request.jump_table = range(parts.table, parts.table + 16);
        request.text = range(parts.text, parts.text + 0x4000);
        request.directory = structures::directory(parts.directory, 1, parts.names, 8);
        let name = format!("module{number}");
        request.name[..name.len()].copy_from_slice(name.as_bytes());
        request
    }

    /// Writes the record of a module's directory: a key and the module that defines it.
    pub fn write_module_key(&self, number: u64, key: u64, home: u64) {
        let mut record = record(key, 0, abi::KEY_REF, 0);
        record.module = home;
        self.write(module_parts(number).directory, record.as_bytes());
    }
}

/// Returns the request that removes a module.
pub fn module_del(add: &abi::Module) -> abi::Module {
    let mut request = *add;
    request.header.op = u16::try_from(abi::OP_MODULE_DEL).unwrap();
    request
}
