// SPDX-License-Identifier: Apache-2.0
//! The result of a discovery.

use std::ops::Range;
use std::sync::Arc;

use patchbay_memory::paging::PageTable;
use serde::Serialize;
use static_keys::{Class, GateKind, ListedGate, Nops};

use super::debug_file::FileUse;
use super::layout::Layout;
use super::modules::LeftOut;
use super::parts::Part;
use super::tables::Site;
use crate::classes::{DebugLine, Tracepoint, location};
use crate::symbols::{SymbolKind, Symbols};

/// Address at which x86-64 maps the kernel image (`__START_KERNEL_map`): the second-to-last GiB.
pub(super) const IMAGE_MAP: u64 = 0xffff_ffff_8000_0000;

/// The way in which the kernel is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// A vCPU's page table and IDT lead to the kernel image.
    Image,
    /// All RAM is searched for VMCOREINFO. This is the only way if no registers are available. Its
    /// cost grows with the RAM.
    Note,
}

/// The role of VMCOREINFO in a discovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum NoteFound {
    /// The kernel's `vmcoreinfo_data` points to a text that agrees with the image.
    Agrees,
    /// A search of the RAM found a text that agrees with the image.
    Searched,
    /// The kernel has no VMCOREINFO that can be read.
    Absent,
}

/// The kernel image or a module.
#[derive(Debug)]
pub struct ImageTables {
    /// Address of the `struct module`; 0 for the kernel.
    pub module: u64,
    /// Name of the module; empty for the kernel.
    pub name: String,
    /// Code that is not freed after init; for the kernel, from `_stext` to `_etext`.
    pub text: Range<u64>,
    /// Code that was freed after the initialization.
    pub init_text: Range<u64>,
    /// Keys in this range cannot change.
    pub ro_after_init: Range<u64>,
    /// The jump table.
    pub jump_table: Range<u64>,
    /// The entries of the table, in its order.
    pub sites: Vec<Site>,
    /// The symbols of the image.
    pub symbols: Arc<Symbols>,
}

impl ImageTables {
    /// Returns the function that contains an address.
    #[must_use]
    pub fn function(&self, address: u64) -> Option<String> {
        self.symbols
            .resolve(address, SymbolKind::Text)
            .map(location)
    }
}

/// A static key.
#[derive(Clone, Debug)]
pub struct ObservedKey {
    /// Address of the `struct static_key`.
    pub address: u64,
    /// Index of the image that defines the key.
    pub image: usize,
    /// The name of the key in that image.
    pub name: String,
    /// The rules for changes of this key.
    pub class: Class,
    /// The key can no longer change.
    pub sealed: bool,
    /// The value of `enabled`.
    pub count: i32,
    /// The tracepoint, if the key belongs to one.
    pub tracepoint: Option<Tracepoint>,
    /// The reason why the sites contradict the count; `None` if they do not. The key was changed in
    /// part, or the guest is changing it.
    pub torn: Option<String>,
    /// The tracepoint has a function that must run when the tracepoint is switched, so a change of
    /// the key alone is not enough.
    pub switched_by_function: bool,
    /// The line that the key switches, if it is a key of dynamic debug.
    pub debug: Option<DebugLine>,
    /// The sites of the key: index of the image, and range in the image's `sites`.
    pub sites: Vec<(usize, Range<usize>)>,
}

/// A running kernel. [`Kernel::found`] returns the tables and gates that a change of its keys
/// needs.
#[derive(Debug)]
pub struct Kernel {
    /// A number that differs from boot to boot and stays the same while the kernel runs. Never 0.
    pub boot: u64,
    /// The output of `uname -r`.
    pub release: String,
    /// `linux_banner`.
    pub banner: String,
    /// The build id in hexadecimal; empty if unknown.
    pub build_id: String,
    /// The kernel's own page table.
    pub page_table: PageTable,
    /// Difference between guest-physical and guest-virtual addresses of the image, plus
    /// 0xffffffff80000000.
    pub phys_base: u64,
    /// The distance by which KASLR moved the image; `None` without VMCOREINFO.
    pub kaslr_offset: Option<u64>,
    /// Page table isolation is on; `None` if the kernel does not reveal it.
    pub page_table_isolation: Option<bool>,
    /// The NOPs that the kernel writes to its sites.
    pub nops: Nops,
    /// The layout of the kernel's structures.
    pub layout: Layout,
    /// The kernel image, then the modules.
    pub images: Vec<ImageTables>,
    /// The keys, sorted by address.
    pub keys: Vec<ObservedKey>,
    /// Loaded modules that are not among the images, because they are not live.
    pub left_out: Vec<LeftOut>,
    /// The gates for which a word was found.
    pub gates: Vec<ListedGate>,
    /// Offset of each possible CPU's per-CPU variables.
    pub per_cpu_offsets: Vec<u64>,
    /// The kernel's log, or the reason why it cannot be read.
    pub log: Result<Log, String>,
    /// The evidence for the discovery.
    pub evidence: Evidence,
}

/// The location of a running kernel's log, and of its state and trace events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Log {
    /// The kernel's own page table, which maps the log.
    pub page_table: PageTable,
    /// The location and the layout of the ring.
    pub source: patchbay_observe::log::Source,
    /// The words of the same kernel's state.
    pub state: patchbay_observe::state::Source,
    /// The tasks that the CPUs run, or the reason why they cannot be read.
    pub tasks: Result<patchbay_observe::tasks::Source, String>,
    /// The trace events, or the reason why they cannot be read.
    pub trace: Result<patchbay_observe::trace::Source, String>,
}

/// The evidence for a discovery, and its cost.
#[derive(Clone, Debug)]
pub struct Evidence {
    /// The way in which the kernel was found.
    pub way: Way,
    /// The role of VMCOREINFO.
    pub note: NoteFound,
    /// The use of a debug file; `None` if the kernel revealed everything itself.
    pub file: Option<FileUse>,
    /// Number of vCPUs whose page table and entry point belong to this kernel.
    pub cpus: usize,
    /// Results of an earlier discovery of the same kernel were reused.
    pub again: bool,
    /// Gates for which no word was found in this kernel.
    pub missing_gates: Vec<GateKind>,
    /// The parts of the discovery, in order.
    pub parts: Vec<Part>,
}
