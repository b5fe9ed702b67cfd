// SPDX-License-Identifier: Apache-2.0
//! A source supplies the [`Registry`] with the tables of the guest's kernel. Either the guest
//! itself sends requests that the monitor passes to [`Registry::request`], or a program finds the
//! tables in guest memory and calls [`Registry::register_kernel`]. Both supply numbers that come
//! from the guest and may have any value, and both lead to the same [`Registration`].
//!
//! Every source must satisfy:
//!
//! - A guest has one source. It registers a kernel before the kernel's keys are changed, and
//!   withdraws it ([`Registry::withdraw`]) before the memory is reused.
//! - The version changes before a table is removed. The service stops the guest and checks the
//!   version; an unchanged version guarantees that no table is removed until the resume. So a call
//!   of the registry in progress must keep the guest from counting as stopped, as a vCPU's request
//!   does. A source that only observes the guest must check again while it is stopped.
//! - The caller of the registry does not hold the guest stopped.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use patchbay_guest::abi;
use patchbay_kernel_image::live::{FileUse, Functions, LeftOut, Way};
use patchbay_memory::paging::PageTable;
use static_keys::{EntryFormat, FoundKernel, GateKind, Kernel, KeyId, Layout, Range};

use crate::keys::debug::DebugSites;
use crate::keys::registration::{self as read, Refused};

/// Guarantees of a source, in addition to its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Promises {
    /// The version changes before a table is removed, even while the guest runs. If false, counts
    /// are changed only in a stopped guest.
    pub fence: bool,
    /// The open gates prove that no change of text has begun and not ended: `text_mutex` is free,
    /// and no text change is queued or in progress. Then no vCPU is inside a site, whether its RIP
    /// is known or not:
    ///
    /// - A site is one instruction, before a change and after it. A vCPU can be past its first byte
    ///   only by the breakpoint that the kernel writes there while it changes the site.
    /// - The kernel frees `text_mutex` after it has removed the breakpoint and every CPU has
    ///   answered an interrupt since (`text_poke_sync()`). A CPU that has executed the breakpoint
    ///   cannot answer before the handler has returned, because the exception is delivered and
    ///   handled with interrupts off. This also holds if an exit from the guest has interrupted the
    ///   delivery: the exception is delivered before any interrupt.
    /// - A breakpoint from another source is detected as foreign bytes.
    pub text_gates: bool,
}

/// Location of the tables.
#[derive(Clone, Debug)]
pub enum Contents {
    /// The descriptor contains the addresses of the tables in guest memory. Modules register by
    /// separate requests.
    Described(Kernel),
    /// The tables were already read, with all modules.
    Found(FoundKernel),
}

/// The description of a kernel, as a source supplies it. Its numbers are the guest's and may have
/// any value.
#[derive(Clone, Debug)]
pub struct KernelTables {
    /// Differs from boot to boot; never 0. It is constant while the kernel runs, however often the
    /// kernel registers, because holds outlive a registration of the same boot.
    pub boot: u64,
    /// Differs from registration to registration; never 0.
    pub generation: u64,
    /// The kernel's own page table.
    pub page_table: PageTable,
    /// Page table isolation is on.
    pub page_table_isolation: bool,
    /// KASLR offset of the kernel's text, in bytes.
    pub kaslr_offset: u64,
    /// `utsname()->release`, printable.
    pub release: String,
    /// Build id in hexadecimal; empty if unknown.
    pub build_id: String,
    /// The jump table, the gate words, the offsets and the keys.
    pub contents: Contents,
    /// Descriptors of dynamic debug.
    pub debug: DebugSites,
    /// Guarantees of the source.
    pub promises: Promises,
    /// The discovery; `None` if the kernel registered itself.
    pub discovery: Option<DiscoveredKernel>,
}

/// The way in which a kernel was discovered, and the names of its functions.
#[derive(Clone, Debug)]
pub struct DiscoveredKernel {
    /// Resets of the guest before the discovery
    /// ([`Discoverable::resets`](patchbay_guest::discovery::Discoverable::resets)).
    pub resets: u64,
    /// The method by which the kernel was found.
    pub way: Way,
    /// Time from the start of the discovery until the tables were known.
    pub time: Duration,
    /// The information from a file of the host.
    pub file: Option<FileUse>,
    /// Names of the gates that can be read.
    pub gates: Vec<&'static str>,
    /// Names of the gates that cannot be read.
    pub missing_gates: Vec<&'static str>,
    /// Modules that are loaded and not live, so that their keys and sites are not known.
    pub left_out: Vec<LeftOut>,
    /// Keys whose sites contradicted their counts. The guest may have been changing them at that
    /// time.
    pub torn: HashSet<KeyId>,
    /// Names of functions, from the kallsyms of the kernel and of its modules.
    pub functions: Arc<Functions>,
}

impl DiscoveredKernel {
    /// Returns whether the kernel has a word that differs from boot to boot.
    pub(super) fn tells_boots_apart(&self) -> bool {
        !self.missing_gates.contains(&GateKind::SameKernel.name())
    }
}

impl KernelTables {
    /// Checks the numbers as those of a descriptor are checked.
    pub(super) fn check(&self) -> Result<(), Refused> {
        let levels = self.page_table.levels;
        read::check_number("the boot", self.boot)?;
        if self.generation == 0 {
            return Err(Refused("the generation is 0".to_owned()));
        }
        let ranges = |jump_table: Range, text: Range, ro_after_init: Range| {
            for (what, range) in [
                ("the jump table", jump_table),
                ("text", text),
                ("ro_after_init", ro_after_init),
            ] {
                let (start, end) = (range.start, range.end);
                read::check_range(what, abi::Range { start, end }, levels)?;
            }
            Ok(())
        };
        let (layout, gates) = match &self.contents {
            Contents::Described(kernel) => {
                ranges(kernel.jump_table, kernel.text, kernel.ro_after_init)?;
                (kernel.layout, &kernel.gates)
            }
            Contents::Found(kernel) => {
                for image in &kernel.images {
                    ranges(image.jump_table, image.text, image.ro_after_init)?;
                }
                (kernel.layout, &kernel.gates)
            }
        };
        read::check_layout(layout)?;
        read::check_gates(gates.clone(), levels)?;
        Ok(())
    }

    pub(super) fn layout(&self) -> Option<Layout> {
        match &self.contents {
            Contents::Described(kernel) if kernel.format == EntryFormat::None => None,
            Contents::Described(kernel) => Some(kernel.layout),
            Contents::Found(kernel) => Some(kernel.layout),
        }
    }
}
