// SPDX-License-Identifier: Apache-2.0
//! The instances that have enabled an event: `struct trace_event_file`
//! (include/linux/trace_events.h), of which each `struct trace_array` has one for each event.

use std::collections::{BTreeMap, HashMap};

use super::events::{self, Event, MAX_EVENTS};
use super::{MAX_CPUS, Rings, Source};
use crate::{Bounded, KernelView, copy, word};

/// The maximum number of reads, and of bytes in them. An instance of 7.3 takes about 2700 reads of
/// 100 bytes.
const MAX_READS: usize = 1 << 18;
const MAX_BYTES: usize = 32 << 20;
/// The maximum number of bytes of all names that are returned. A guest may give a thousand
/// instances long names, and enable all events in each.
const MAX_NAMES: usize = 1 << 20;
/// `EVENT_FILE_FL_ENABLED`: the probe of the event is attached for this instance. It is also set
/// while a trigger of the guest waits for the event.
const ENABLED: u64 = 1;

/// The names of the instances that have enabled an event, by its name "system:name". The name of
/// the top level is empty. Characters other than printable ASCII are escaped.
pub type Enabled = BTreeMap<String, Vec<String>>;

impl Source {
    /// Returns the events that are enabled, and by whom. Returns `None` if one of the lists cannot
    /// be read, for example because an instance is being removed, or if all names together are too
    /// long.
    pub fn enabled(&self, view: &(impl KernelView + ?Sized)) -> Option<Enabled> {
        let view = &Bounded::new(view, MAX_READS, MAX_BYTES);
        let layout = self.layout.file.as_ref()?;
        let calls = Event::all(view, self)?.into_iter();
        let calls: HashMap<u64, Event> = calls.map(|event| (event.address(), event)).collect();
        let mut enabled = Enabled::new();
        let mut room = MAX_NAMES;
        for (array, name) in events::arrays(view, self)? {
            let name = name.escape_ascii().to_string();
            let head = array.wrapping_add(layout.files);
            let mut link = word(view, head)?;
            let mut left = MAX_EVENTS;
            while link != head {
                left = left.checked_sub(1)?;
                let file = copy(view, link.wrapping_sub(layout.list), layout.size)?;
                let event = calls.get(&layout.call.of(&file)?);
                if let Some(event) = event.filter(|_| is_enabled(layout.flags.of(&file))) {
                    room = room.checked_sub(name.len())?;
                    let event = format!("{}:{}", event.system, event.name);
                    enabled.entry(event).or_default().push(name.clone());
                }
                link = layout.next.of(&file)?;
            }
        }
        Some(enabled)
    }
}

fn is_enabled(flags: Option<u64>) -> bool {
    flags.is_some_and(|flags| flags & ENABLED != 0)
}

/// The counters of the ring of one CPU, as `per_cpu/cpuN/stats` in tracefs has them. They are
/// copied one after another, while the guest may write events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// The number of the CPU.
    pub cpu: u32,
    /// The number of events that were written since the ring was emptied.
    pub written: u64,
    /// The number of these that were overwritten.
    pub overwritten: u64,
    /// The number of these that a reader in the guest has consumed.
    pub consumed: u64,
    /// The size of the ring in bytes, without the reader page; 0 if it is not known.
    pub bytes: u64,
}

impl Counters {
    /// Returns the number of events that the ring holds.
    #[must_use]
    pub fn held(&self) -> u64 {
        let gone = self.overwritten.saturating_add(self.consumed);
        self.written.saturating_sub(gone)
    }
}

impl Rings {
    /// Returns the counters of each CPU that was ever online. Returns `None` if they cannot be
    /// read.
    pub fn counters(&self, view: &(impl KernelView + ?Sized)) -> Option<Vec<Counters>> {
        let view = &Bounded::new(view, 4 + 2 * MAX_CPUS as usize, MAX_BYTES);
        let (rings, capacity) = self.rings(view)?;
        let header = usize::try_from(self.source.layout.data.events).ok()?;
        let page = u64::try_from(capacity.checked_add(header)?).ok()?;
        let layout = &self.source.layout.cpu;
        let rings = (0..).zip(rings).filter(|(_, ring)| *ring != 0);
        let counters = rings.map(|(cpu, ring)| {
            let bytes = copy(view, ring, layout.size)?;
            let pages = layout.pages.map_or(Some(0), |field| field.of(&bytes))?;
            Some(Counters {
                cpu,
                written: layout.entries.of(&bytes)?,
                overwritten: layout.overrun.of(&bytes)?,
                consumed: layout.read.of(&bytes)?,
                bytes: pages.saturating_mul(page),
            })
        });
        counters.collect()
    }
}
