// SPDX-License-Identifier: Apache-2.0
//! The names of the functions of a running kernel that its branch sites lie in and lead to, and of
//! the probes of its trace events, kept as long as its tables are used.

use std::fmt;
use std::ops::Range;

use super::kernel::Kernel;
use crate::classes::location;
use crate::symbols::{SymbolKind, Symbols};

/// The probes by which the kernel learns the names of tasks while any event is recorded
/// (kernel/trace/trace_sched_switch.c). They belong to no event.
pub const TASK_NAME_PROBES: [&str; 2] = ["probe_sched_switch", "probe_sched_wakeup"];
/// The prefixes of the probes that the kernel defines for each class of events, to record the event
/// in a tracefs instance, for perf, and for BPF (include/trace/trace_events.h, perf.h and
/// bpf_probe.h).
pub const EVENT_PROBES: [&str; 3] = ["trace_event_raw_event_", "perf_trace_", "__bpf_trace_"];

/// The functions of the kernel image and of its modules that have a branch site or the target of
/// one, and the probes of [`TASK_NAME_PROBES`] and [`EVENT_PROBES`].
#[derive(Default)]
pub struct Functions {
    images: Vec<Image>,
}

struct Image {
    text: Range<u64>,
    init_text: Range<u64>,
    symbols: Symbols,
}

impl Functions {
    /// Returns the function that contains the guest-virtual address of a site or of a target,
    /// followed by the offset in the function if it is not 0. The name of any other address may be
    /// wrong.
    #[must_use]
    pub fn name(&self, address: u64) -> Option<String> {
        let holds =
            |image: &&Image| image.text.contains(&address) || image.init_text.contains(&address);
        let image = self.images.iter().find(holds)?;
        let found = image.symbols.resolve(address, SymbolKind::Text)?;
        Some(location(found))
    }

    /// Returns the function that begins at a guest-virtual address. `None` if its name was not
    /// kept. Names of probes that a module defines itself are usually not.
    #[must_use]
    pub fn probe(&self, address: u64) -> Option<&str> {
        let image = self
            .images
            .iter()
            .find(|image| image.text.contains(&address))?;
        let (name, offset) = image.symbols.resolve(address, SymbolKind::Text)?;
        (offset == 0).then_some(name)
    }
}

impl fmt::Debug for Functions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let symbols: usize = self.images.iter().map(|image| image.symbols.len()).sum();
        f.debug_struct("Functions")
            .field("images", &self.images.len())
            .field("symbols", &symbols)
            .finish()
    }
}

/// Returns the addresses of the probes of [`TASK_NAME_PROBES`] and [`EVENT_PROBES`].
pub(super) fn probes(symbols: &Symbols) -> impl Iterator<Item = u64> {
    let is_probe = |name: &str| {
        let has_prefix = |prefix: &&str| name.starts_with(*prefix);
        TASK_NAME_PROBES.contains(&name) || EVENT_PROBES.iter().any(has_prefix)
    };
    let found = symbols.iter().filter(move |(_, name)| is_probe(name));
    found.map(|(symbol, _)| symbol.address)
}

impl Kernel {
    /// Returns the functions of the sites and of their targets, and the probes.
    #[must_use]
    pub fn functions(&self) -> Functions {
        let sites = self.images.iter().flat_map(|image| &image.sites);
        let addresses = sites.flat_map(|site| [site.entry.code, site.entry.target]);
        let mut addresses: Vec<u64> = addresses.collect();
        addresses.sort_unstable();
        let within = |range: &Range<u64>| {
            let start = addresses.partition_point(|address| *address < range.start);
            let rest = &addresses[start..];
            &rest[..rest.partition_point(|address| *address < range.end)]
        };
        let images = self.images.iter().map(|image| {
            let mut own = [within(&image.text), within(&image.init_text)].concat();
            own.extend(probes(&image.symbols));
            Image {
                text: image.text.clone(),
                init_text: image.init_text.clone(),
                symbols: image.symbols.only(own),
            }
        });
        Functions {
            images: images.collect(),
        }
    }
}
