// SPDX-License-Identifier: Apache-2.0
//! The record of changes that the guest can read: a ring in the guest's own memory.
//!
//! Each key whose count was changed gets a record, written when the change is complete and, if that
//! needed a pause, before the guest continues. A record that cannot be written is lost, but the
//! change succeeds: the guest alone is responsible for the memory of the ring.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::key::KeyChange;
use crate::memory::{AccessFault, GuestMemory};

/// The maximum number of records of a ring, and therefore of records written for one change.
pub const RECORDS_MAX: u32 = 128;
/// Size in bytes of a record: {u64 sequence, u64 key, u64 time, s32 count before, s32 count after}.
const RECORD_SIZE: u64 = (SEQUENCE_SIZE + BODY_SIZE) as u64;
const SEQUENCE_SIZE: usize = 8;
const BODY_SIZE: usize = 24;
/// The maximum distance from one record to the next, in bytes. A later guest may have larger
/// records.
const RECORD_DISTANCE_MAX: u64 = 2 * RECORD_SIZE;

/// A ring as the guest describes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecordRing {
    /// Guest-virtual address of the first record.
    pub address: u64,
    /// Number of records that the ring holds; 0 if the guest has no ring.
    pub count: u32,
    /// Distance from one record to the next, in bytes.
    pub size: u32,
}

/// The ring cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordRingError {
    /// The ring has more than [`RECORDS_MAX`] records.
    #[error("{0} records are more than the {RECORDS_MAX} that are supported")]
    TooMany(u32),
    /// The distance between records is too small or too large, or not a multiple of 8.
    #[error(
        "the ring's records have {0} bytes, expected a multiple of 8 from {RECORD_SIZE} to {RECORD_DISTANCE_MAX}"
    )]
    Size(u32),
    /// The ring is not aligned, or passes the end of the address space.
    #[error("no ring of records can be at {0:#x}: misaligned, or at the end of the address space")]
    Address(u64),
}

impl RecordRing {
    /// Checks the numbers. Returns the default ring if `count` is 0.
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

/// The ring of one registration. It stays the same while modules are added and removed.
#[derive(Clone, Debug)]
pub(crate) struct Records {
    ring: RecordRing,
    /// Number of records written so far.
    written: Arc<AtomicU64>,
}

/// Places of a plan's records, located before the guest is stopped.
#[derive(Clone, Debug)]
pub(crate) struct RecordPlaces<P> {
    records: Records,
    /// The value of `Records::written` when the places were located.
    written: u64,
    /// The places of the sequence number and of the body of each record. If there are more records
    /// than the ring holds, these are the places of the last ones.
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
    /// Locates the records again if other changes were recorded since they were located.
    pub fn relocate<M: GuestMemory<Place = P>>(&mut self, memory: &M, total: usize) {
        if self.records.written.load(Ordering::SeqCst) != self.written {
            *self = self.records.locate(memory, total);
        }
    }

    /// Records `total` changes that were made. If there are more than the ring holds, records only
    /// the last ones. Allocates nothing.
    pub fn append<'a, M: GuestMemory<Place = P>>(
        &self,
        memory: &M,
        changes: impl Iterator<Item = &'a KeyChange>,
        total: usize,
    ) {
        let before = self
            .records
            .written
            .fetch_add(total as u64, Ordering::SeqCst);
        // If other changes were recorded since the places were located, these changes are not
        // recorded.
        if before != self.written || self.places.is_empty() {
            return;
        }
        // The nanoseconds fit in 64 bits until the year 2554.
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

/// Writes one record. The sequence number is 0 while the body is written. A reader discards a
/// record whose sequence number is 0, or changes while the record is read.
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
