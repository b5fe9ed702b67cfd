// SPDX-License-Identifier: Apache-2.0
//! The kernel's log: `prb` in kernel/printk/printk.c, a `struct printk_ringbuffer`
//! (kernel/printk/printk_ringbuffer.h), which kernels have since 5.10.
//!
//! # The ring
//!
//! A record has a descriptor, an info and a text. Descriptors and infos are arrays of the same
//! length, a power of two. The record with the id `n` is in slot `n` modulo that length. `head_id`
//! is the newest id, `tail_id` the oldest. Ids have 62 bits, begin shortly before they wrap, and
//! are compared modulo 2^62. The info contains the sequence number, which counts from 0.
//!
//! `state_var` of a descriptor holds the id in bits 0 to 61 and the state in bits 62 and 63:
//!
//! | state | number | meaning | [`Follower::poll`] |
//! |---|---|---|---|
//! | reserved | 0 | a writer fills the record | waits, or counts it as lost |
//! | committed | 1 | whole, but the writer may append to it (`LOG_CONT`) | waits, or takes it |
//! | finalized | 2 | does not change until it is reclaimed | takes it |
//! | reusable | 3 | reclaimed: the text may be overwritten | counts it as lost |
//! | the id one round before, or 0 | | the descriptor is not yet written | as reserved |
//! | any other id | | the ring has wrapped past this record | searches for the tail |
//!
//! With [`Terms::unfinished`], a poll takes a committed record, and counts a reserved one as lost
//! unless it is the newest. A writer advances `head_id` before it writes the descriptor. Until then
//! the descriptor holds the id of one round before, or 0 in the first round.
//!
//! The text is a block in `text_data_ring`: the id of its record, then the bytes. `begin` and
//! `next` of a descriptor are positions that never wrap. A block does not straddle the end of the
//! ring: if `begin` and `next - 1` are in different rounds, the block is at index 0. Both are odd
//! if there is no block: 3 for an empty line, 1 for a text that did not fit. Descriptors are
//! reclaimed only as needed, so many of the oldest may be reusable already.
//!
//! # Why a torn copy is not taken
//!
//! A record is copied between two reads of its descriptor, which must be equal and name its id.
//!
//! - A writer makes a descriptor reusable before it moves the tail of the texts past its block, and
//!   no byte of the block is overwritten before the tail has moved (`data_push_tail()`). So while
//!   the state is still finalized, no byte of the text was overwritten.
//! - A slot gets its next id before the info is written (`desc_reserve()`), and an id does not
//!   return within 2^62 records. So while the id is still the same, the info is the record's.
//! - A committed record can be reserved again, extended, and committed. Its info then contains
//!   another length of the text, so the info of a committed record is read twice as well.
//!
//! The id at the start of the block is checked as well.

mod follower;
mod layout;
mod ring;
mod summary;

pub use self::follower::{Batch, Follower, Start, Terms, newest};
pub use self::layout::{Layout, SYMBOL, TYPES};
pub use self::summary::Summary;

/// A kernel's log: the address of the pointer `prb`, and the layout of its structures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Address of `prb`. The kernel changes this pointer when it moves the log to a larger ring
    /// (`log_buf_len=`).
    pub prb: u64,
    /// The layout of its structures.
    pub layout: Layout,
}

/// The writer of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caller {
    /// A task, by its pid.
    Task(u32),
    /// A CPU, from a context that is not a task.
    Cpu(u32),
}

/// A record of the log. All texts are the guest's and may contain any bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Sequence number.
    pub seq: u64,
    /// `local_clock()` in nanoseconds, about the time since boot.
    pub time: u64,
    /// The level, from 0 (emergency) to 7 (debug).
    pub level: u8,
    /// Facility of syslog; 0 is the kernel.
    pub facility: u8,
    /// True for a fragment that continues the line of an earlier record (`LOG_CONT`).
    pub continues: bool,
    /// The writer. The kernel records it even if it does not print it (`CONFIG_PRINTK_CALLER`).
    pub caller: Caller,
    /// `SUBSYSTEM=` of `dev_printk()`; empty for other records.
    pub subsystem: Vec<u8>,
    /// `DEVICE=` of `dev_printk()`.
    pub device: Vec<u8>,
    /// The text, without a newline at its end. `None` if it did not fit into the ring.
    pub text: Option<Vec<u8>>,
    /// False for a record that the writer may still append to.
    pub finished: bool,
}

#[cfg(test)]
mod tests;
