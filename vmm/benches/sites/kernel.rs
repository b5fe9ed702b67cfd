// SPDX-License-Identifier: Apache-2.0
//! Tables of a synthetic kernel in a guest's memory.
//!
//! ```text
//!  guest-physical                 guest-virtual: mapped from IMAGE on in pages of 2 MiB
//!   2 MiB  page table
//!   4 MiB  request page
//!   6 MiB  gate words, array of gates +0
//!   8 MiB  jump table             +2 MiB
//!  12 MiB  keys                   +6 MiB
//!  14 MiB  probes of tracepoints  +8 MiB
//!  16 MiB  directory, names       +10 MiB
//!  20 MiB  text                   +14 MiB
//! ```

use patchbay_guest::abi;
use patchbay_guest::memory::Ram;
use patchbay_guest::requests::GuestRequests;
use patchbay_guest::testing::structures;
use zerocopy::{FromZeros, IntoBytes};

/// Guest memory that the tables need, and room behind them.
pub const MEMORY_BYTES: u64 = 72 << 20;
/// Distance between sites: several cache lines, so that sites are not fetched together.
pub const STRIDE: u64 = 256;
/// Limit on the number of sites.
pub const SITES_MAX: u64 = 100_000;

/// Guest-physical address of the kernel's page table.
pub const PAGE_TABLE: u64 = 2 << 20;
const REQUEST_PAGE: u64 = 4 << 20;
const PHYSICAL: u64 = 6 << 20;
const IMAGE: u64 = 0xffff_ffff_8100_0000;
const GATE_WORDS: u64 = IMAGE;
const GATES: u64 = IMAGE + 0x1000;
const TABLE: u64 = IMAGE + (2 << 20);
const KEYS: u64 = IMAGE + (6 << 20);
const PROBES: u64 = IMAGE + (8 << 20);
const DIRECTORY: u64 = IMAGE + (10 << 20);
const NAMES: u64 = DIRECTORY + SITES_MAX * size_of::<abi::Key>() as u64;
const TEXT: u64 = IMAGE + (14 << 20);
const TEXT_END: u64 = TEXT + SITES_MAX * STRIDE;
/// Distance between two tracepoints, and the offsets of their key and of their probes.
const TRACEPOINT_STRIDE: u64 = 64;
const TRACEPOINT_KEY: u64 = 8;
const TRACEPOINT_FUNCS: u64 = 40;
/// Distance between two arrays of probes: one probe, and one without a function, which ends it.
const PROBES_STRIDE: u64 = 48;
const TRACEPOINTS_MAX: u64 = 1000;
const NOP: [u8; 5] = [0x0f, 0x1f, 0x44, 0, 0];
/// Distance from a site to the target of its JMP.
const TARGET_DISTANCE: u64 = 128;

/// A kernel with `keys` keys of `sites` sites each.
#[derive(Debug, Clone, Copy)]
pub struct Kernel {
    pub keys: u64,
    pub sites: u64,
    /// The keys are those of tracepoints, each with a probe.
    pub tracepoints: bool,
}

impl Kernel {
    /// Returns a kernel with keys that may be counted from outside.
    pub const fn new(keys: u64, sites: u64) -> Self {
        Self {
            keys,
            sites,
            tracepoints: false,
        }
    }

    pub fn name(key: u64) -> String {
        format!("k{key:05}")
    }

    fn key(self, key: u64) -> u64 {
        match self.tracepoints {
            true => KEYS + key * TRACEPOINT_STRIDE + TRACEPOINT_KEY,
            false => KEYS + key * 16,
        }
    }

    /// Writes the tables and registers them.
    pub fn register(self, ram: &(impl Ram + ?Sized), requests: &impl GuestRequests) {
        let descriptor = self.write(ram);
        put(ram, REQUEST_PAGE, descriptor.as_bytes());
        let status = requests.request(abi::OP_REGISTER, REQUEST_PAGE);
        assert_eq!(status, 0, "the tables are accepted");
    }

    /// Writes the tables, and returns the descriptor that names them.
    pub fn write(self, ram: &(impl Ram + ?Sized)) -> abi::Descriptor {
        assert!(self.keys * self.sites <= SITES_MAX, "room for the sites");
        assert!(
            !self.tracepoints || self.keys <= TRACEPOINTS_MAX,
            "room for the tracepoints"
        );
        map(ram);
        // Sites of different keys alternate in text, as in a real kernel.
        for key in 0..self.keys {
            let address = self.key(key);
            let first = TABLE + key * self.sites * 16;
            write(ram, address, &0_u64.to_le_bytes());
            write(ram, address + 8, &first.to_le_bytes());
            for index in 0..self.sites {
                let site = TEXT + (index * self.keys + key) * STRIDE;
                write(ram, site, &NOP);
                let entry = first + index * 16;
                write(ram, entry, &near(site, entry));
                write(ram, entry + 4, &near(site + TARGET_DISTANCE, entry + 4));
                write(
                    ram,
                    entry + 8,
                    &address.wrapping_sub(entry + 8).to_le_bytes(),
                );
            }
        }
        let mut names = Vec::new();
        for key in 0..self.keys {
            let mut named = abi::Key {
                address: self.key(key),
                name: u32::try_from(names.len()).expect("short names"),
                class: abi::KEY_REF,
                ..abi::Key::default()
            };
            if self.tracepoints {
                named.class = abi::KEY_TRACEPOINT;
                named.tracepoint = named.address - TRACEPOINT_KEY;
                let probes = PROBES + key * PROBES_STRIDE;
                write(ram, probes, &TEXT.to_le_bytes());
                let funcs = named.tracepoint + TRACEPOINT_FUNCS;
                write(ram, funcs, &probes.to_le_bytes());
            }
            write(ram, DIRECTORY + key * 32, named.as_bytes());
            names.extend_from_slice(Self::name(key).as_bytes());
            names.push(0);
        }
        write(ram, NAMES, &names);
        // SYSTEM_RUNNING
        write(ram, GATE_WORDS, &2_u64.to_le_bytes());
        write(ram, GATES, structures::gates(GATE_WORDS).as_bytes());
        self.descriptor(u32::try_from(names.len()).expect("short names"))
    }

    fn descriptor(self, names_size: u32) -> abi::Descriptor {
        let mut descriptor = abi::Descriptor::new_zeroed();
        descriptor.header = abi::Header {
            magic: abi::HEADER_MAGIC,
            abi_version: abi::ABI_VERSION,
            op: u16::try_from(abi::OP_REGISTER).expect("small"),
            size: u32::try_from(size_of::<abi::Descriptor>()).expect("small"),
            status: -38,
            generation: 1,
        };
        structures::describe(&mut descriptor);
        descriptor.boot = 1;
        descriptor.jump_table = abi::Range {
            start: TABLE,
            end: TABLE + self.keys * self.sites * 16,
        };
        descriptor.text = abi::Range {
            start: TEXT,
            end: TEXT_END,
        };
        descriptor.page_table = PAGE_TABLE;
        descriptor.gates = GATES;
        descriptor.gate_count = 6;
        descriptor.directory = structures::directory(
            DIRECTORY,
            u32::try_from(self.keys).expect("few keys"),
            NAMES,
            names_size,
        );
        descriptor
    }
}

/// Sets the owner of text_mutex; 0 for none. While the mutex has an owner, no site may be changed.
#[allow(dead_code, reason = "the benchmark leaves all gates open")]
pub fn set_text_mutex(ram: &(impl Ram + ?Sized), owner: u64) {
    let address = structures::Gate::TextMutex.address(GATE_WORDS);
    write(ram, address, &owner.to_le_bytes());
}

/// Returns the number of sites that hold a JMP.
pub fn jumps(ram: &(impl Ram + ?Sized), kernel: Kernel) -> usize {
    let sites = 0..kernel.keys * kernel.sites;
    let jumps = sites.filter(|site| {
        let mut byte = [0];
        ram.read(TEXT + site * STRIDE - IMAGE + PHYSICAL, &mut byte)
            .expect("in memory");
        byte == [0xe9]
    });
    jumps.count()
}

/// Maps the memory behind the page table from [`IMAGE`] on.
pub fn map(ram: &(impl Ram + ?Sized)) {
    const PRESENT_WRITABLE: u64 = 3;
    const LARGE: u64 = 1 << 7;
    let index = |level: u64| (IMAGE >> (12 + 9 * level)) & 0x1ff;
    let entry = |table: u64, index: u64, value: u64| {
        put(ram, table + 8 * index, &value.to_le_bytes());
    };
    let [upper, middle] = [PAGE_TABLE + 0x1000, PAGE_TABLE + 0x2000];
    entry(PAGE_TABLE, index(3), upper | PRESENT_WRITABLE);
    entry(upper, index(2), middle | PRESENT_WRITABLE);
    for page in 0..(MEMORY_BYTES - PHYSICAL) >> 21 {
        let physical = PHYSICAL + (page << 21);
        entry(middle, index(1) + page, physical | LARGE | PRESENT_WRITABLE);
    }
}

/// Writes bytes at an address of the kernel.
pub fn write(ram: &(impl Ram + ?Sized), address: u64, bytes: &[u8]) {
    put(ram, address - IMAGE + PHYSICAL, bytes);
}

fn put(ram: &(impl Ram + ?Sized), physical: u64, bytes: &[u8]) {
    let piece = ram.piece(physical, bytes.len()).expect("in memory");
    assert!(ram.write_piece(piece, bytes), "memory is written");
}

fn near(to: u64, from: u64) -> [u8; 4] {
    i32::try_from(to.wrapping_sub(from).cast_signed())
        .expect("near")
        .to_le_bytes()
}
