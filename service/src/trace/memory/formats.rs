// SPDX-License-Identifier: Apache-2.0
//! The formats of a guest's events, read from its memory when they are needed.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use patchbay_guest::kernel_memory::KernelMemory;
use patchbay_observe::trace::{Event, Source as Rings};

use super::super::decode::Format;
use super::super::stream::Source;

/// The maximum size of all formats in bytes. Beyond it, all are forgotten and read again.
const MAX_BYTES: usize = 16 << 20;
/// Time between two reads of the list of events. A module that is loaded changes the list.
const REST: Duration = Duration::from_secs(1);

/// Formats by the id of the event.
#[derive(Default)]
pub struct Formats {
    events: HashMap<u16, Event>,
    listed: Option<Instant>,
    /// `None` for an event whose format cannot be read.
    formats: HashMap<u16, Option<Arc<Source>>>,
    bytes: usize,
}

impl Formats {
    /// Returns the format of an event; `None` if it cannot be read.
    pub fn find(&mut self, memory: &KernelMemory, rings: &Rings, id: u16) -> Option<Arc<Source>> {
        if let Some(known) = self.formats.get(&id)
            && (known.is_some() || !self.may_list())
        {
            return known.clone();
        }
        let mut found = self.read(memory, rings, id);
        if found.is_none() && self.may_list() {
            self.list(memory, rings);
            found = self.read(memory, rings, id);
        }
        if self.bytes > MAX_BYTES {
            self.formats.clear();
            self.bytes = 0;
        }
        self.bytes += found.as_ref().map_or(0, |source| source.format.bytes());
        self.formats.insert(id, found.clone());
        found
    }

    fn may_list(&self) -> bool {
        self.listed.is_none_or(|at| at.elapsed() >= REST)
    }

    /// Reads the list of events. The formats of unloaded modules are forgotten with it.
    fn list(&mut self, memory: &KernelMemory, rings: &Rings) {
        self.listed = Some(Instant::now());
        // While a module is being loaded, the list may be unreadable.
        if let Some(events) = Event::all(memory, rings) {
            self.events = events.into_iter().map(|event| (event.id, event)).collect();
        }
        self.formats.retain(|_, known| known.is_some());
    }

    fn read(&self, memory: &KernelMemory, rings: &Rings, id: u16) -> Option<Arc<Source>> {
        let event = self.events.get(&id)?;
        let text = event.format(memory, rings)?;
        let format = Format::parse(&text)
            .inspect_err(|error| tracing::debug!(%error, event = event.name, "format refused"));
        Some(Arc::new(Source {
            name: format!("{}:{}", event.system, event.name),
            format: format.ok()?,
            settled_at: AtomicU64::new(0),
            events: AtomicU64::new(0),
        }))
    }
}
