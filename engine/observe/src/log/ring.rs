// SPDX-License-Identifier: Apache-2.0
//! Copies of the ring's header and of single records.

use std::sync::atomic::{Ordering, fence};

use super::layout::Layout;
use super::{Caller, Record, Source};
use crate::{KernelView, copy, number, word};

/// Number of bits of an id.
const ID_BITS: u32 = 62;
/// The bits of an id. Arithmetic on ids is modulo 2^62.
pub(super) const ID: u64 = (1 << ID_BITS) - 1;

/// The maximum sizes of a ring, as powers of two: the kernel limits the texts to 2 GiB
/// (`LOG_BUF_LEN_MAX`) and reserves a descriptor per 32 bytes of text (`PRB_AVGBITS`).
const MAX_TEXT_BITS: u64 = 31;
const MAX_COUNT_BITS: u64 = 26;

const RESERVED: u64 = 0;
const COMMITTED: u64 = 1;
const FINALIZED: u64 = 2;

/// The bit that `begin` and `next` both have if the record has no block of text.
const NO_BLOCK: u64 = 1;
/// `NO_LPOS` (`EMPTY_LINE_LPOS` in 6.12), for an empty text. The only other value is `FAILED_LPOS`,
/// for a lost text.
const EMPTY_TEXT: u64 = 3;
/// Size of the id at the start of a block.
const BLOCK_ID: u64 = 8;

const LOG_CONT: u64 = 8;
const CALLER_IS_CPU: u64 = 1 << 31;

/// The address and the size of a ring. They change only when the kernel moves the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    descriptors: u64,
    infos: u64,
    text: u64,
    count_bits: u32,
    text_bits: u32,
}

/// A copy of the ring's header.
pub(super) struct Ring<'a> {
    layout: &'a Layout,
    pub place: Place,
    /// The newest id.
    pub head: u64,
    /// The oldest id. The copy is not atomic, so the kernel may already have reused the slot.
    pub tail: u64,
}

/// The state of a record at one time.
pub(super) enum Slot {
    /// A whole record.
    Record(Record),
    /// A writer has reserved the record, or is about to.
    Reserved,
    /// The writer may still append to the record.
    Committed,
    /// The record was reclaimed, but its slot still names it.
    Reusable,
    /// The slot holds another record, or the record was replaced while it was copied.
    Replaced {
        /// True if the record was replaced while it was copied, so that the copy mixes two records.
        torn: bool,
    },
    /// The record is finalized, but its positions or its block contradict it.
    Damaged,
    /// The descriptor of the slot cannot be read.
    Unreadable,
}

impl<'a> Ring<'a> {
    /// Copies the header. Returns `None` if it cannot be read or is no ring.
    pub fn read(view: &(impl KernelView + ?Sized), source: &'a Source) -> Option<Self> {
        let layout = &source.layout;
        let ring = word(view, source.prb)?;
        let bytes = copy(view, ring, layout.ring.size)?;
        fence(Ordering::Acquire);
        let fields = &layout.ring;
        let bits = |field: crate::fields::Field, most| {
            let bits = field.of(&bytes)?;
            let bits = (1..=most).contains(&bits).then_some(bits)?;
            u32::try_from(bits).ok()
        };
        Some(Self {
            layout,
            place: Place {
                descriptors: fields.descriptors.of(&bytes)?,
                infos: fields.infos.of(&bytes)?,
                text: fields.text.of(&bytes)?,
                count_bits: bits(fields.count_bits, MAX_COUNT_BITS)?,
                text_bits: bits(fields.text_bits, MAX_TEXT_BITS)?,
            },
            head: fields.head.of(&bytes)? & ID,
            tail: fields.tail.of(&bytes)? & ID,
        })
    }

    /// Returns the number of slots.
    pub fn count(&self) -> u64 {
        1 << self.place.count_bits
    }

    /// Returns the number of records from an id up to the newest: 0 for the next id to be used. The
    /// number exceeds [`Self::count`] if the ring has wrapped past the id. It exceeds 2^61 for an
    /// id after the next.
    pub fn from(&self, id: u64) -> u64 {
        self.head.wrapping_add(1).wrapping_sub(id) & ID
    }

    /// Returns the address of the slot of an id in an array of records of `size` bytes.
    fn slot(&self, array: u64, id: u64, size: usize) -> u64 {
        let index = id & (self.count() - 1);
        array.wrapping_add(index.wrapping_mul(size as u64))
    }

    fn descriptor(&self, id: u64) -> u64 {
        self.slot(self.place.descriptors, id, self.layout.descriptor.size)
    }

    /// Returns whether the record is reclaimed or replaced. This takes one read of one word.
    pub fn is_gone(&self, view: &(impl KernelView + ?Sized), id: u64) -> bool {
        let field = self.layout.descriptor.state;
        let state = word(view, self.descriptor(id).wrapping_add(field.offset()));
        state.is_none_or(|state| match self.state(state, id) {
            State::Other => true,
            State::Former => false,
            State::Own(state) => state > FINALIZED,
        })
    }

    fn state(&self, state: u64, id: u64) -> State {
        let found = state & ID;
        if found == id {
            State::Own(state >> ID_BITS)
        } else if state == 0 || found == id.wrapping_sub(self.count()) & ID {
            // In the first round, a descriptor that was never used is zero.
            State::Former
        } else {
            State::Other
        }
    }

    /// Copies a record.
    pub fn record(&self, view: &(impl KernelView + ?Sized), id: u64) -> Slot {
        let layout = &self.layout.descriptor;
        let Some(descriptor) = copy(view, self.descriptor(id), layout.size) else {
            return Slot::Unreadable;
        };
        // The state is loaded before the info and the text.
        fence(Ordering::Acquire);
        let Some(state) = layout.state.of(&descriptor) else {
            return Slot::Unreadable;
        };
        let finished = match self.state(state, id) {
            State::Other => return Slot::Replaced { torn: false },
            State::Former | State::Own(RESERVED) => return Slot::Reserved,
            State::Own(COMMITTED) => false,
            State::Own(FINALIZED) => true,
            State::Own(_) => return Slot::Reusable,
        };
        let (Some(begin), Some(next)) = (layout.begin.of(&descriptor), layout.next.of(&descriptor))
        else {
            return Slot::Unreadable;
        };
        let address = self.slot(self.place.infos, id, self.layout.info.size);
        let info = copy(view, address, self.layout.info.size);
        let record = info
            .as_ref()
            .and_then(|info| self.copy(view, id, (begin, next), info));
        // The state is loaded again after the info and the text.
        fence(Ordering::Acquire);
        let Some(again) = copy(view, self.descriptor(id), layout.size) else {
            return Slot::Unreadable;
        };
        if again != descriptor {
            // A record that its writer finishes or extends meanwhile is not lost.
            let state = layout.state.of(&again).map(|state| self.state(state, id));
            return match state {
                Some(State::Own(RESERVED..=FINALIZED)) => Slot::Committed,
                _ => Slot::Replaced { torn: true },
            };
        }
        if !finished {
            let again = copy(view, address, self.layout.info.size);
            if again != info {
                return Slot::Committed;
            }
        }
        match record {
            Some(record) => Slot::Record(Record { finished, ..record }),
            None => Slot::Damaged,
        }
    }

    fn copy(
        &self,
        view: &(impl KernelView + ?Sized),
        id: u64,
        block: (u64, u64),
        info: &[u8],
    ) -> Option<Record> {
        let fields = &self.layout.info;
        let length = fields.text_length.of(info)?;
        let caller = fields.caller.of(info)?;
        let number = u32::try_from(caller & (CALLER_IS_CPU - 1)).ok()?;
        Some(Record {
            seq: fields.seq.of(info)?,
            time: fields.time.of(info)?,
            level: u8::try_from(fields.level.of(info)?).ok()?,
            facility: u8::try_from(fields.facility.of(info)?).ok()?,
            continues: fields.flags.of(info)? & LOG_CONT != 0,
            caller: match caller & CALLER_IS_CPU {
                0 => Caller::Task(number),
                _ => Caller::Cpu(number),
            },
            subsystem: fields.subsystem.of(info),
            device: fields.device.of(info),
            text: self.text(view, id, block, length)?,
            finished: true,
        })
    }

    /// Copies the text of a record. Returns `None` if the block contradicts itself, and
    /// `Some(None)` if the kernel had no room for the text.
    fn text(
        &self,
        view: &(impl KernelView + ?Sized),
        id: u64,
        (begin, next): (u64, u64),
        length: u64,
    ) -> Option<Option<Vec<u8>>> {
        if begin & next & NO_BLOCK != 0 {
            let is_empty = (begin, next) == (EMPTY_TEXT, EMPTY_TEXT);
            return Some(is_empty.then(Vec::new));
        }
        let bits = self.place.text_bits;
        let mask = (1_u64 << bits) - 1;
        let last = next.wrapping_sub(1);
        let (index, size) = if begin >> bits == last >> bits {
            (begin & mask, last.checked_sub(begin)? + 1)
        } else if (begin >> bits).wrapping_add(1) & (u64::MAX >> bits) == last >> bits {
            (0, (last & mask) + 1)
        } else {
            return None;
        };
        let room = size.checked_sub(BLOCK_ID)?;
        // `text_len` has 16 bits, so this bounds the copy.
        let length = usize::try_from(length.min(room)).ok()?;
        let text = self.place.text.wrapping_add(index);
        let mut bytes = copy(view, text, BLOCK_ID as usize + length)?;
        let text = bytes.split_off(BLOCK_ID as usize);
        (number(&bytes, 0, BLOCK_ID as usize)? & ID == id).then_some(Some(text))
    }
}

/// The content of `state_var`.
enum State {
    /// The expected id, in this state.
    Own(u64),
    /// The id that the slot had one round before.
    Former,
    Other,
}
