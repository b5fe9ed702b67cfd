// SPDX-License-Identifier: Apache-2.0
//! Follows the rings of one instance in the memory of a guest, also across reboots.

use std::sync::Arc;
use std::time::{Duration, Instant};

use patchbay_guest::kernel_memory::KernelMemory;
use patchbay_observe::Bounded;
use patchbay_observe::trace::{Batch, Counters, Page, Rings, Source, Start};
use patchbay_proto::v1::TraceLosses;
use static_keys::Patterns;

use super::super::decode::Record;
use super::super::error::TraceError;
use super::super::stream::{self, Event, Raw, Selection};
use super::super::tasks::NAMING;
use super::formats::Formats;
use super::gaps::Gaps;
use crate::keys::registry::{KernelLog, Look};
use crate::keys::{Keys, KeysError};

/// The number of bytes of events after which a poll ends. Decoded events take about 40 times as
/// many bytes, and a stream holds them until its client has taken them.
const MAX_BYTES: usize = 64 << 10;
/// The maximum number of reads for the formats of one poll, and of bytes in them. The list of all
/// events of a kernel takes about a quarter.
const FORMAT_READS: usize = 1 << 16;
const FORMAT_BYTES: usize = 16 << 20;
/// The number of instances that an error names, and the number of bytes of their names. A client
/// refuses an answer whose headers, and so its error, are longer than 16 KiB.
const MAX_LISTED: usize = 10;
const MAX_LISTED_BYTES: usize = 1024;
/// Time without an event after which the reader searches for the running kernel again. If a kernel
/// starts another one without a reset (kexec), its rings stay in memory unchanged.
const QUIET: Duration = Duration::from_secs(10);
/// Time between two attempts to find the running kernel, or the instance.
const REST: Duration = Duration::from_millis(500);

/// The rings of an instance, and the kernel memory that contains them.
pub struct Place {
    found: KernelLog,
    source: Source,
    memory: KernelMemory,
    instance: String,
    array: u64,
}

impl Place {
    /// Finds the rings of the running kernel. This may take as long as a discovery.
    ///
    /// # Errors
    /// The kernel or its tracing is not found, or the kernel has no such instance.
    pub fn find(keys: &Keys, instance: &str) -> Result<Self, TraceError> {
        let found = keys.registry().find_log(Look::Known);
        let found = found.map_err(|why| not_found(&why))?;
        Self::of(keys, found, instance)
    }

    fn of(keys: &Keys, found: KernelLog, instance: &str) -> Result<Self, TraceError> {
        let source = found.log.trace.clone().map_err(|why| not_found(&why))?;
        let memory = KernelMemory::new(keys.ram()?, found.log.page_table);
        let Some(array) = source.instance(&memory, instance) else {
            return Err(no_instance(&source, &memory, instance));
        };
        Ok(Self {
            found,
            source,
            memory,
            instance: instance.to_owned(),
            array,
        })
    }

    fn rings(&self, start: Start) -> Rings {
        Rings::new(self.source.clone(), self.array, start)
    }

    /// Returns whether the instance that was found still exists.
    fn has_instance(&self) -> bool {
        self.source
            .is_instance(&self.memory, self.array, &self.instance)
    }

    /// Returns whether the kernel's list of instances is whole and does not contain the instance.
    /// The top level cannot be removed.
    fn instance_is_gone(&self) -> bool {
        let find = |name: &str| self.source.instance(&self.memory, name);
        // The top level is in every list that can be read.
        find("").is_some() && find(&self.instance).is_none()
    }
}

fn not_found(why: &str) -> TraceError {
    let why = format!("the trace events of the guest's kernel are not found in its memory: {why}");
    KeysError::NotRegistered { why }.into()
}

fn no_instance(source: &Source, memory: &KernelMemory, instance: &str) -> TraceError {
    let Some(mut instances) = source.instances(memory) else {
        return not_found("the list of its instances cannot be read; try again");
    };
    instances.retain(|name| !name.is_empty());
    let all = instances.len();
    let mut bytes = 0;
    instances.truncate(MAX_LISTED);
    // One name with all its characters escaped takes less than the limit.
    instances.retain(|name| {
        bytes += name.len();
        bytes <= MAX_LISTED_BYTES
    });
    let more = match all - instances.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    TraceError::InstanceNotFound(match instances.is_empty() {
        true => format!(
            "the guest has no tracefs instance {instance:?}, and no other; leave it out for the top level"
        ),
        false => {
            let listed = instances.join(", ");
            format!("the guest has no tracefs instance {instance:?}; it has {listed}{more}")
        }
    })
}

/// Returns the counters of each CPU's ring of an instance. This may take as long as a discovery.
///
/// # Errors
/// The rings are not found or cannot be read, or the kernel has no such instance.
pub fn counters(keys: &Keys, instance: &str) -> Result<Vec<Counters>, TraceError> {
    let place = Place::find(keys, instance)?;
    let counters = place.rings(Start::Oldest).counters(&place.memory);
    // The memory of an instance that was removed meanwhile may belong to another one.
    let counters = counters.filter(|_| place.has_instance());
    counters.ok_or_else(|| not_found("its counters cannot be read; try again"))
}

/// The events of one poll.
#[derive(Default)]
pub struct Polled {
    /// Decoded events, ordered by time.
    pub events: Vec<Event>,
    pub losses: TraceLosses,
    /// The rings were emptied or exchanged, or another kernel runs.
    pub restarted: bool,
    /// There are more events already.
    pub more: bool,
    /// Events were read, though perhaps none that are wanted.
    pub has_read: bool,
    /// All times are of the guest's CLOCK_MONOTONIC.
    pub is_monotonic: bool,
}

/// A reader of the rings. Its methods usually block for microseconds, and at most for the duration
/// of a discovery.
pub struct Reader {
    keys: Arc<Keys>,
    place: Place,
    rings: Rings,
    formats: Formats,
    /// The client wants records.
    records: bool,
    gaps: Gaps,
    /// The guest was reset, and its kernel is not known yet.
    is_reset: bool,
    /// The time of the last event or of the last search for the running kernel.
    confirmed: Instant,
}

impl Reader {
    /// Creates a reader that begins at `start`. With `records`, its events are [`Raw`], too.
    ///
    /// # Errors
    /// The rings cannot be read where they were found.
    pub fn begin(
        keys: Arc<Keys>,
        place: Place,
        start: Start,
        records: bool,
    ) -> Result<Self, TraceError> {
        let mut rings = place.rings(start);
        if !rings.begin(&place.memory) {
            return Err(not_found(
                "they cannot be read where they were: the kernel boots, or another one runs; try again",
            ));
        }
        Ok(Self {
            keys,
            place,
            rings,
            formats: Formats::default(),
            records,
            gaps: Gaps::default(),
            is_reset: false,
            confirmed: Instant::now(),
        })
    }

    /// Returns the events since the last poll: those that `patterns` select, and those that name
    /// tasks.
    ///
    /// # Errors
    /// The instance was removed, or another kernel runs and has no such instance.
    pub fn poll(&mut self, patterns: &Patterns) -> Result<Polled, TraceError> {
        self.is_reset |= !self.keys.registry().is_current_log(&self.place.found);
        let mut polled = Polled::default();
        if self.is_reset || !self.place.has_instance() {
            if !self.is_reset && self.place.instance_is_gone() {
                return Err(TraceError::InstanceNotFound(format!(
                    "the tracefs instance {:?} was removed in the guest",
                    self.place.instance
                )));
            }
            if !self.may_look(REST) || !self.look_again(Look::Search)? {
                return Ok(polled);
            }
            polled.restarted = true;
        }
        let mut rings = self.rings.clone();
        let batch = rings.poll(&self.place.memory, MAX_BYTES);
        self.keep(rings, &batch, patterns, &mut polled);
        if polled.has_read {
            self.confirmed = Instant::now();
        } else {
            let (rest, look) = match batch.unreadable {
                true => (REST, Look::Search),
                false => (QUIET, Look::Confirm),
            };
            polled.restarted |= self.may_look(rest) && self.look_again(look)?;
        }
        Ok(polled)
    }

    /// Decodes a batch that was read by `rings`, and continues behind it. If the instance is gone,
    /// its memory may already belong to another one, so the batch is dropped. The next poll finds
    /// out.
    fn keep(&mut self, rings: Rings, batch: &Batch, patterns: &Patterns, polled: &mut Polled) {
        if self.place.has_instance() {
            self.rings = rings;
            self.take(batch, patterns, polled);
        }
    }

    /// Decodes a batch.
    fn take(&mut self, batch: &Batch, patterns: &Patterns, polled: &mut Polled) {
        polled.restarted |= batch.restarted;
        polled.more = batch.more;
        polled.has_read = !batch.chunks.is_empty();
        polled.is_monotonic = batch.is_monotonic;
        polled.losses.overwritten = batch.lost;
        polled.losses.malformed = batch.damaged;
        if batch.restarted {
            self.formats.forget();
        }
        self.formats.confirm_anew();
        let memory = self.place.memory.clone();
        let view = Bounded::new(&memory, FORMAT_READS, FORMAT_BYTES);
        let mut selection = Selection::default();
        for chunk in &batch.chunks {
            let mut wants = |source: &Arc<stream::Source>| {
                source.name == NAMING || selection.wants(patterns, source)
            };
            self.gaps.add(chunk.cpu, chunk.lost_before);
            self.decode(&view, chunk.cpu, &chunk.page, &mut wants, polled);
        }
        // CPUs share one clock. The sort is stable, so each CPU's events stay in order.
        polled.events.sort_by_key(|event| event.guest_time_ns);
    }

    fn decode(
        &mut self,
        view: &Bounded<'_, KernelMemory>,
        cpu: u32,
        page: &[u8],
        wants: &mut impl FnMut(&Arc<stream::Source>) -> bool,
        polled: &mut Polled,
    ) {
        let Ok(page) = Page::parse(page) else {
            self.malformed(cpu, polled);
            return;
        };
        for event in page.events() {
            let Ok((time, payload)) = event else {
                self.malformed(cpu, polled);
                return;
            };
            let found = Record::parse(payload).and_then(|record| {
                let source = self.formats.find(view, &self.place.source, record.id)?;
                Some((source, record))
            });
            match found {
                Some((source, record)) if wants(&source) => {
                    let mut event = Event::of(&source, cpu, time, &record);
                    event.raw = self.records.then(|| {
                        Box::new(Raw {
                            record: payload.into(),
                            lost_before: self.gaps.take(cpu),
                        })
                    });
                    polled.events.push(event);
                }
                Some(_) => {}
                // A module that was unloaded has taken the format with it.
                None => self.malformed(cpu, polled),
            }
        }
    }

    /// Counts an event that cannot be decoded.
    fn malformed(&mut self, cpu: u32, polled: &mut Polled) {
        polled.losses.malformed += 1;
        self.gaps.add(cpu, 1);
    }

    fn may_look(&self, rest: Duration) -> bool {
        self.confirmed.elapsed() >= rest
    }

    /// Searches for the running kernel and the instance. Returns true if either has changed. The
    /// rings are then read from their oldest event.
    ///
    /// # Errors
    /// The kernel that runs has no such instance.
    fn look_again(&mut self, look: Look) -> Result<bool, TraceError> {
        self.confirmed = Instant::now();
        let found = self.keys.registry().find_log(look);
        let place = found
            .map_err(|why| not_found(&why))
            .and_then(|found| Place::of(&self.keys, found, &self.place.instance));
        match place {
            Ok(place) if self.is_reset || !self.is_same(&place) => {
                self.rings = place.rings(Start::Oldest);
                self.formats = Formats::default();
                self.place = place;
                self.is_reset = false;
                Ok(true)
            }
            Ok(_) => Ok(false),
            Err(gone @ TraceError::InstanceNotFound(_)) => Err(gone),
            Err(why) => {
                tracing::debug!(%why, "the trace events are not found");
                Ok(false)
            }
        }
    }

    fn is_same(&self, place: &Place) -> bool {
        (&place.found, place.array) == (&self.place.found, self.place.array)
    }
}

#[cfg(test)]
mod tests {
    use patchbay_guest::testing::{InMemoryGuest, TestKey};
    use patchbay_observe::testing::rings::{ARRAY, BASE};

    use super::super::super::select;
    use super::*;
    use crate::keys::{KeysConfig, Registry};
    use crate::testing::{GuestRings, numbered};

    /// The instance is removed after the poll has begun. The bytes that were copied may be of
    /// another one, which has the same pages by now.
    #[test]
    fn events_of_an_instance_that_is_removed_during_a_poll_are_dropped() {
        let registry = Arc::new(Registry::default());
        let guest = InMemoryGuest::boot(Arc::clone(&registry), &[TestKey::new("alpha", 1)]);
        let memory = GuestRings::new(&guest);
        memory.found_by(&registry);
        let (keys, _) = Keys::start(guest, registry, KeysConfig::default()).expect("a thread");
        let place = Place::find(&keys, "").expect("found");
        let reader = Reader::begin(Arc::new(keys), place, Start::Oldest, false);
        let mut reader = reader.expect("readable");
        memory.write(|writer| writer.event(0, 1, &numbered(1)));
        let patterns = select::Wanted::parse(vec![], false).expect("well-formed");
        let patterns = patterns.patterns();

        let mut rings = reader.rings.clone();
        let batch = rings.poll(&reader.place.memory, MAX_BYTES);
        assert_eq!(batch.chunks.len(), 1);
        let mut next = 0;
        memory.write(|writer| {
            let bytes = &writer.memory()[usize::try_from(ARRAY - BASE).expect("small")..][..8];
            next = u64::from_le_bytes(bytes.try_into().expect("8 bytes"));
            // LIST_POISON1
            writer.put(ARRAY, 0xdead_0000_0000_0100);
        });
        let mut polled = Polled::default();
        reader.keep(rings, &batch, patterns, &mut polled);
        assert!(
            polled.events.is_empty() && !polled.has_read,
            "it is removed"
        );

        // The position has not moved either.
        memory.write(|writer| writer.put(ARRAY, next));
        let polled = reader.poll(patterns).expect("it exists");
        assert_eq!(polled.events.len(), 1);
    }
}
