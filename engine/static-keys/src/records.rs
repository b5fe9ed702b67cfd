// SPDX-License-Identifier: Apache-2.0
//! The record of changes that the guest can read: a ring in its own memory.
//!
//! Each key whose count was changed gets a record, written when the change is complete and, if that
//! needed a pause, before the guest runs on. A record that cannot be written is lost and fails
//! nothing: the memory is the guest's, and so is the loss.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::memory::{AccessFault, GuestMemory};
use crate::plan::KeyChange;

/// Most records of a ring, and so most that are written for one change.
pub const RECORDS_MAX: u32 = 128;
/// {u64 sequence, u64 key, u64 time, s32 count before, s32 count after}.
const RECORD_SIZE: u64 = (SEQUENCE_SIZE + BODY_SIZE) as u64;
const SEQUENCE_SIZE: usize = 8;
const BODY_SIZE: usize = 24;
/// Largest distance of records that a later guest may ask for.
const RECORD_DISTANCE_MAX: u64 = 2 * RECORD_SIZE;

/// A ring as the guest describes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecordRing {
    /// Guest-virtual address of the first record.
    pub address: u64,
    /// Records that it holds; 0: the guest keeps no record.
    pub count: u32,
    /// From one record to the next, in bytes.
    pub size: u32,
}

/// A ring that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordRingError {
    /// More than [`RECORDS_MAX`].
    #[error("{0} records are more than the {RECORDS_MAX} that are supported")]
    TooMany(u32),
    /// Too small for a record, or out of line.
    #[error(
        "the ring's records have {0} bytes, expected a multiple of 8 from {RECORD_SIZE} to {RECORD_DISTANCE_MAX}"
    )]
    Size(u32),
    /// Not aligned, or past the end of the address space.
    #[error("no ring of records can be at {0:#x}: misaligned, or at the end of the address space")]
    Address(u64),
}

impl RecordRing {
    /// Checks the numbers.
    ///
    /// # Errors
    /// [`RecordRingError`].
    pub fn check(self) -> Result<Self, RecordRingError> {
        let Self {
            address,
            count,
            size,
        } = self;
        if count == 0 {
            return Ok(Self::default());
        }
        if count > RECORDS_MAX {
            return Err(RecordRingError::TooMany(count));
        }
        let size_fits = (RECORD_SIZE..=RECORD_DISTANCE_MAX).contains(&u64::from(size));
        if !size_fits || !size.is_multiple_of(8) {
            return Err(RecordRingError::Size(size));
        }
        let end = address.checked_add(u64::from(count) * u64::from(size));
        if end.is_none() || !address.is_multiple_of(8) {
            return Err(RecordRingError::Address(address));
        }
        Ok(self)
    }
}

/// The ring of one registration, however often its modules change.
#[derive(Clone, Debug)]
pub(crate) struct Records {
    ring: RecordRing,
    /// Records so far.
    written: Arc<AtomicU64>,
}

/// Addresses of a plan's records, located before the guest is stopped.
#[derive(Clone, Debug)]
pub(crate) struct RecordPlaces<P> {
    records: Records,
    /// Records that were written when these were located.
    written: u64,
    /// One per record, the last as many as the ring holds: its sequence number and the rest.
    places: Vec<Option<(P, P)>>,
}

impl Records {
    pub fn new(ring: RecordRing) -> Self {
        Self {
            ring,
            written: Arc::default(),
        }
    }

    /// Locates the next `total` records.
    pub fn locate<M: GuestMemory>(&self, memory: &M, total: usize) -> RecordPlaces<M::Place> {
        let count = u64::from(self.ring.count);
        let written = self.written.load(Ordering::SeqCst);
        let end = written + total as u64;
        let place = |number: u64| {
            // Cannot overflow: the ring's end was checked.
            let address = self.ring.address + number % count * u64::from(self.ring.size);
            let sequence = memory.locate(address, SEQUENCE_SIZE).ok()?;
            let body = memory
                .locate(address + SEQUENCE_SIZE as u64, BODY_SIZE)
                .ok()?;
            Some((sequence, body))
        };
        let first = written.max(end.saturating_sub(count));
        let places = if count == 0 {
            Vec::new()
        } else {
            (first..end).map(place).collect()
        };
        RecordPlaces {
            records: self.clone(),
            written,
            places,
        }
    }
}

impl<P: Copy> RecordPlaces<P> {
    /// Locates the records again, after those of other changes.
    pub fn relocate<M: GuestMemory<Place = P>>(&mut self, memory: &M, total: usize) {
        if self.records.written.load(Ordering::SeqCst) != self.written {
            *self = self.records.locate(memory, total);
        }
    }

    /// Records changes that were made; of more than the ring holds, the last ones. Allocates
    /// nothing.
    pub fn append<'a, M: GuestMemory<Place = P>>(
        &self,
        memory: &M,
        changes: impl Iterator<Item = &'a KeyChange> + Clone,
    ) {
        let total = changes.clone().count();
        let before = self
            .records
            .written
            .fetch_add(total as u64, Ordering::SeqCst);
        // A plan that was overtaken and not located again loses its records.
        if before != self.written {
            return;
        }
        // 2554 is the year in which nanoseconds no longer fit.
        let time = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
        let skipped = total.saturating_sub(self.places.len());
        let numbers = before + 1 + skipped as u64..;
        for ((number, change), place) in numbers.zip(changes.skip(skipped)).zip(&self.places) {
            if let Some(place) = place {
                let _ = write(memory, *place, number, time, change);
            }
        }
    }
}

/// Nobody takes a record for whole whose sequence number is 0, or another one after it was read.
fn write<M: GuestMemory>(
    memory: &M,
    (sequence, body): (M::Place, M::Place),
    number: u64,
    time: u64,
    change: &KeyChange,
) -> Result<(), AccessFault> {
    let mut bytes = [0; BODY_SIZE];
    bytes[..8].copy_from_slice(&change.key.0.to_le_bytes());
    bytes[8..16].copy_from_slice(&time.to_le_bytes());
    bytes[16..20].copy_from_slice(&change.before.to_le_bytes());
    bytes[20..].copy_from_slice(&change.after.to_le_bytes());
    memory.write(sequence, &[0; SEQUENCE_SIZE])?;
    memory.write(body, &bytes)?;
    memory.write(sequence, &number.to_le_bytes())
}
