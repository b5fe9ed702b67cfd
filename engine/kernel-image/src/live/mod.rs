// SPDX-License-Identifier: Apache-2.0
//! Discovery: the static keys of a running kernel that does not register, found in its memory.
//!
//! ```text
//! vCPU ──▶ page table ──▶ image ──▶ kallsyms, BTF ──▶ gates ──▶ modules, jump tables ──▶ keys, classes, names ──▶ gates again
//! ```
//!
//! The guest runs meanwhile or is stopped. Its memory is copied once, page by page, and may say
//! anything: every address is checked, every list is bounded. A kernel that lies harms only itself:
//! what is found names words and sites of the guest, in the guest.
//!
//! A [`DebugFile`] of the host says what a kernel does not reveal: data symbols without
//! CONFIG_KALLSYMS_ALL, structures without CONFIG_DEBUG_INFO_BTF.
//!
//! Either every entry of every jump table is explained or the whole is refused. Modules that are
//! not live are left out, and named. A guest that boots or changes its modules gives
//! [`DiscoveryError::Busy`]: try again a little later.

mod contents;
mod debug_file;
mod debug_folder;
mod error;
mod finder;
mod functions;
mod gates;
mod layout;
mod locate;
mod memory;
mod modules;
mod names;
mod note;
mod parts;
mod tables;
mod vcpus;

use std::ops::Range;
use std::sync::Arc;

use patchbay_memory::paging::PageTable;
use serde::Serialize;
use static_keys::Nops;

pub use debug_file::{DebugFile, DebugFileError, FileUse};
pub use debug_folder::{DebugFiles, DebugFolder};
pub use error::DiscoveryError;
pub use finder::{Finder, discover};
pub use functions::Functions;
pub use gates::{Concerns, Gate, GateKind};
pub use layout::Layout;
pub use modules::LeftOut;
pub use parts::Part;
pub use tables::Site;

use crate::classes::{Class, DebugLine, Tracepoint, location};
use crate::symbols::{SymbolKind, Symbols};

/// Address at which x86-64 maps the kernel image (`__START_KERNEL_map`): the second-to-last GiB.
const IMAGE_MAP: u64 = 0xffff_ffff_8000_0000;

/// How the kernel is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// From a vCPU's page table and IDT.
    Image,
    /// From VMCOREINFO, searched for in all RAM. It is the only way without registers, and its cost
    /// grows with the RAM.
    Note,
}

/// What VMCOREINFO says beside the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum NoteFound {
    /// `vmcoreinfo_data` of the kernel points at a text that says the same.
    Agrees,
    /// A search of the RAM found it, and the image says the same.
    Searched,
    /// This kernel has none.
    Absent,
}

/// The kernel image or a module.
#[derive(Debug)]
pub struct ImageTables {
    /// Address of the `struct module`; 0 for the kernel.
    pub module: u64,
    /// Name of the module; empty for the kernel.
    pub name: String,
    /// Code that stays: `_stext` to `_etext`.
    pub text: Range<u64>,
    /// Code that is gone since the image runs.
    pub init_text: Range<u64>,
    /// Keys in here cannot change.
    pub ro_after_init: Range<u64>,
    /// Its jump table.
    pub jump_table: Range<u64>,
    /// The entries of the table, in its order.
    pub sites: Vec<Site>,
    /// Names for addresses in it.
    pub symbols: Arc<Symbols>,
}

impl ImageTables {
    /// Returns the function that an address lies in.
    #[must_use]
    pub fn function(&self, address: u64) -> Option<String> {
        self.symbols
            .resolve(address, SymbolKind::Text)
            .map(location)
    }
}

/// A static key.
#[derive(Clone, Debug)]
pub struct Key {
    /// Address of its `struct static_key`.
    pub address: u64,
    /// Index of the image that defines it.
    pub image: usize,
    /// Its name in that image.
    pub name: String,
    /// What it is for.
    pub class: Class,
    /// It cannot change any more.
    pub sealed: bool,
    /// `enabled`, as it was found.
    pub count: i32,
    /// For a tracepoint's key.
    pub tracepoint: Option<Tracepoint>,
    /// Why its sites do not do what its count asks for, if they do not: it was changed in part, or
    /// the guest changes it just now.
    pub torn: Option<String>,
    /// The tracepoint has a function that must run when it is switched, so that its key alone
    /// cannot be.
    pub switched_by_function: bool,
    /// For a key of dynamic debug.
    pub debug: Option<DebugLine>,
    /// Its sites: index of the image, range in the image's `sites`.
    pub sites: Vec<(usize, Range<usize>)>,
}

/// A running kernel, in plain numbers.
#[derive(Debug)]
pub struct Kernel {
    /// Differs from boot to boot, and stays for as long as the kernel runs. Never 0.
    pub boot: u64,
    /// The output of `uname -r`.
    pub release: String,
    /// `linux_banner`.
    pub banner: String,
    /// Hexadecimal; empty if unknown.
    pub build_id: String,
    /// The kernel's own page table.
    pub page_table: PageTable,
    /// Guest-physical less guest-virtual addresses of the image, plus 0xffffffff80000000.
    pub phys_base: u64,
    /// How far KASLR moved the image; none without VMCOREINFO.
    pub kaslr_offset: Option<u64>,
    /// Page table isolation is on; none if the kernel does not tell.
    pub page_table_isolation: Option<bool>,
    /// The NOPs that it writes to its sites.
    pub nops: Nops,
    /// Offsets of structures.
    pub layout: Layout,
    /// The kernel first.
    pub images: Vec<ImageTables>,
    /// Ordered by address.
    pub keys: Vec<Key>,
    /// Loaded modules that are not among the images, because they are not live.
    pub left_out: Vec<LeftOut>,
    /// The gates that can be looked at.
    pub gates: Vec<Gate>,
    /// Offset of each possible CPU's per-CPU variables.
    pub per_cpu_offsets: Vec<u64>,
    /// What proves it.
    pub evidence: Evidence,
}

/// What proves a discovery, and what it cost.
#[derive(Clone, Debug)]
pub struct Evidence {
    /// How the kernel was found.
    pub way: Way,
    /// What VMCOREINFO says.
    pub note: NoteFound,
    /// What was taken from a debug file; none if the kernel said everything itself.
    pub file: Option<FileUse>,
    /// Number of vCPUs whose page table and entry point belong to this kernel.
    pub cpus: usize,
    /// What an earlier discovery found of the same kernel was kept.
    pub again: bool,
    /// Gates that this kernel has no word for that could be found.
    pub missing_gates: Vec<GateKind>,
    /// In order.
    pub parts: Vec<Part>,
}
