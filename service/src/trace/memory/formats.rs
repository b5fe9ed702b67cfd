// SPDX-License-Identifier: Apache-2.0
//! The formats of a guest's events, read from its memory when they are needed.
//!
//! The kernel gives the id of an event that was removed to the next one that is registered: another
//! probe, or an event of another module. A format is therefore confirmed in each poll that uses it.
//! The kernel empties most rings, but not all, when it removes an event.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use patchbay_observe::trace::{Event, Source as Rings};
use patchbay_observe::{Bounded, KernelView};

use super::super::decode::Format;
use super::super::stream::Source;

/// The maximum size of all formats in bytes. Beyond it, all are forgotten and read again.
pub const MAX_BYTES: usize = 16 << 20;
/// Time between two reads of the list of events, and between two reads of a whole format. A module
/// that is loaded changes the list.
const REST: Duration = Duration::from_secs(1);

/// Formats by the id of the event.
#[derive(Default)]
pub struct Formats {
    events: HashMap<u16, Event>,
    listed: Option<Instant>,
    /// `None` for an event whose format cannot be read.
    formats: HashMap<u16, Option<Known>>,
    bytes: usize,
    /// The events that were used since [`Self::confirm_anew`].
    confirmed: HashSet<u16>,
    /// The confirmed events whose format has changed. A record of such an event may have the format
    /// before or after the change.
    changed: HashSet<u16>,
}

/// A format that was read.
struct Known {
    event: Event,
    source: Arc<Source>,
    read: Instant,
}

impl Formats {
    /// Forgets the formats, as after the rings were emptied. An event of the list is compared with
    /// memory before its format is read again.
    pub fn forget(&mut self) {
        self.formats.clear();
        self.bytes = 0;
    }

    /// Begins a poll: each format is confirmed again before it is used.
    pub fn confirm_anew(&mut self) {
        self.confirmed.clear();
        self.changed.clear();
        if self.bytes > MAX_BYTES {
            self.forget();
        }
    }

    /// Returns the format of an event; `None` if it cannot be read, or if the event was replaced by
    /// another one since the last poll.
    pub fn find<V: KernelView + ?Sized>(
        &mut self,
        view: &Bounded<'_, V>,
        rings: &Rings,
        id: u16,
    ) -> Option<Arc<Source>> {
        if self.confirmed.insert(id)
            && let Some(Some(known)) = self.formats.get_mut(&id)
            && !known.is_current(view, rings)
            && !view.is_exhausted()
        {
            self.formats.remove(&id);
            self.events.remove(&id);
            self.changed.insert(id);
        }
        if self.changed.contains(&id) {
            return None;
        }
        if let Some(known) = self.formats.get(&id)
            && (known.is_some() || !self.may_list())
        {
            return known.as_ref().map(|known| Arc::clone(&known.source));
        }
        let mut found = self.read(view, rings, id);
        if found.is_none() && self.may_list() {
            self.list(view, rings);
            found = self.read(view, rings, id);
        }
        if view.is_exhausted() {
            return None;
        }
        self.bytes += found
            .as_ref()
            .map_or(0, |known| known.source.format_bytes());
        let source = found.as_ref().map(|known| Arc::clone(&known.source));
        self.formats.insert(id, found);
        source
    }

    fn may_list(&self) -> bool {
        self.listed.is_none_or(|at| at.elapsed() >= REST)
    }

    /// Reads the list of events. Forgets which events had no format, because they may have one now.
    fn list<V: KernelView + ?Sized>(&mut self, view: &Bounded<'_, V>, rings: &Rings) {
        self.listed = Some(Instant::now());
        // While a module is being loaded, the list may be unreadable.
        if let Some(events) = Event::all(view, rings) {
            self.events = events.into_iter().map(|event| (event.id, event)).collect();
        }
        self.formats.retain(|_, known| known.is_some());
    }

    fn read<V: KernelView + ?Sized>(
        &self,
        view: &Bounded<'_, V>,
        rings: &Rings,
        id: u16,
    ) -> Option<Known> {
        let event = self.events.get(&id)?.clone();
        let text = event.format(view, rings)?;
        let format = Format::parse(&text)
            .inspect_err(|error| tracing::debug!(%error, event = event.name, "format refused"));
        let source = Arc::new(Source {
            name: format!("{}:{}", event.system, event.name),
            format: format.ok()?,
            text: text.into(),
            settled_at: AtomicU64::new(0),
            events: AtomicU64::new(0),
        });
        Some(Known {
            event,
            source,
            read: Instant::now(),
        })
    }
}

impl Known {
    /// Returns whether the kernel still has the event. Its addresses are compared each time, and
    /// its whole format from time to time.
    fn is_current<V: KernelView + ?Sized>(&mut self, view: &Bounded<'_, V>, rings: &Rings) -> bool {
        if self.read.elapsed() < REST {
            return self.event.is_current(view, rings);
        }
        self.read = Instant::now();
        self.event.format(view, rings).as_deref() == Some(&*self.source.text)
    }
}
