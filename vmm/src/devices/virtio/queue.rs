// SPDX-License-Identifier: Apache-2.0

//! A device's view of a queue, on top of virtio-queue's rings.
//!
//! The queue lies in guest memory and may change at any time. A chain of descriptors is therefore
//! read once, into a [`Chain`] with checked addresses. The guest's tables are not read again after
//! that.

use std::sync::atomic::{Ordering, fence};

use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemory, Permissions};

use super::Memory;
use crate::snapshot::ActiveQueue;

/// Limit on the descriptors of a chain.
pub(super) const CHAIN_MAX: usize = 256;

/// Flag of the available ring: the driver wants no interrupts (virtio 1.2, 2.7.6).
const NO_INTERRUPT: u16 = 1;

/// The driver broke the rules of virtio. The device stops until it is reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the guest's driver broke the rules: {0}; it must reset the device")]
pub(super) struct Broken(pub &'static str);

/// Location of a queue in guest memory, as given by the driver.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct QueueAddresses {
    /// Number of entries; a power of two.
    pub size: u32,
    /// Guest-physical address of the descriptor table.
    pub descriptors: u64,
    /// Guest-physical address of the available ring.
    pub available: u64,
    /// Guest-physical address of the used ring.
    pub used: u64,
}

/// A queue that the driver has made ready.
#[derive(Debug)]
pub(super) struct Ring {
    queue: Queue,
    memory: Memory,
    /// A chain was returned since the last call of `interrupt_wanted`.
    returned: bool,
}

impl Ring {
    /// Checks the size (at most `max`), the alignments and the addresses.
    pub fn new(addresses: QueueAddresses, max: u16, memory: &Memory) -> Result<Self, Broken> {
        let mut queue =
            Queue::new(max).map_err(|_| Broken("a queue's maximum size is not a power of two"))?;
        let size = u16::try_from(addresses.size).map_err(|_| Broken("a queue is too long"))?;
        queue
            .try_set_size(size)
            .map_err(|_| Broken("a queue's size is out of range"))?;
        let misaligned = |_| Broken("a part of a queue is misaligned");
        queue
            .try_set_desc_table_address(GuestAddress(addresses.descriptors))
            .map_err(misaligned)?;
        queue
            .try_set_avail_ring_address(GuestAddress(addresses.available))
            .map_err(misaligned)?;
        queue
            .try_set_used_ring_address(GuestAddress(addresses.used))
            .map_err(misaligned)?;
        let size = usize::from(size);
        for (address, bytes, access) in [
            (addresses.descriptors, 16 * size, Permissions::Read),
            (addresses.available, 6 + 2 * size, Permissions::Read),
            (addresses.used, 6 + 8 * size, Permissions::Write),
        ] {
            if address == 0 || !memory.check_range(GuestAddress(address), bytes, access) {
                return Err(Broken("a part of a queue lies outside memory"));
            }
        }
        queue.set_ready(true);
        Ok(Self {
            queue,
            memory: memory.clone(),
            returned: false,
        })
    }

    /// Returns the positions in the rings as if the last `unused` chains had not been taken.
    pub fn positions(&self, unused: u16) -> ActiveQueue {
        ActiveQueue {
            next_available: self.queue.next_avail().wrapping_sub(unused).into(),
            next_used: self.queue.next_used().into(),
        }
    }

    /// Continues at these positions. Returns false if they are impossible.
    pub fn set_positions(&mut self, positions: ActiveQueue) -> bool {
        let next = [positions.next_available, positions.next_used].map(u16::try_from);
        let [Ok(available), Ok(used)] = next else {
            return false;
        };
        self.queue.set_next_avail(available);
        self.queue.set_next_used(used);
        true
    }

    /// Takes the next available chain.
    pub fn pop(&mut self) -> Result<Option<Chain>, Broken> {
        let mut heads = self
            .queue
            .iter(&self.memory)
            .map_err(|_| Broken("more is available than the queue has room for"))?;
        match heads.next() {
            Some(descriptors) => Chain::read(descriptors, &self.memory).map(Some),
            None => Ok(None),
        }
    }

    /// Returns a chain to the driver, with `written` bytes in it.
    pub fn push(&mut self, chain: &Chain, written: usize) -> Result<(), Broken> {
        self.returned = true;
        self.queue
            .add_used(
                &self.memory,
                chain.head,
                u32::try_from(written).unwrap_or(u32::MAX),
            )
            .map_err(|_| Broken("the used ring cannot be written"))
    }

    /// Returns whether the driver wants an interrupt for the chains returned since the last call.
    pub fn interrupt_wanted(&mut self) -> bool {
        if !std::mem::take(&mut self.returned) {
            return false;
        }
        // The used index must be visible before the flag is read (virtio 1.2, 2.7.7.2).
        fence(Ordering::SeqCst);
        let flags: u16 = self
            .memory
            .load(GuestAddress(self.queue.avail_ring()), Ordering::Relaxed)
            .unwrap_or(0);
        u16::from_le(flags) & NO_INTERRUPT == 0
    }
}

/// A contiguous range of guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Segment {
    address: GuestAddress,
    length: usize,
}

/// A chain of descriptors, copied and checked: it ends, all its buffers are in guest memory, and
/// readable buffers come before writable ones.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Chain {
    head: u16,
    readable: Vec<Segment>,
    writable: Vec<Segment>,
}

impl Chain {
    fn read(
        descriptors: virtio_queue::DescriptorChain<&Memory>,
        memory: &Memory,
    ) -> Result<Self, Broken> {
        let mut chain = Self {
            head: descriptors.head_index(),
            readable: vec![],
            writable: vec![],
        };
        // The iterator ends without an error both at the end of a chain and at an invalid
        // descriptor. Only the "next" flag of the last descriptor distinguishes the two cases.
        let mut continues = true;
        for descriptor in descriptors {
            continues = descriptor.has_next();
            let writable = descriptor.is_write_only();
            let segment = Segment {
                address: descriptor.addr(),
                length: descriptor.len() as usize,
            };
            let access = match writable {
                true => Permissions::Write,
                false => Permissions::Read,
            };
            if segment.length > 0 && !memory.check_range(segment.address, segment.length, access) {
                return Err(Broken("a buffer lies outside memory"));
            }
            if chain.readable.len() + chain.writable.len() == CHAIN_MAX {
                return Err(Broken("a chain has too many descriptors"));
            }
            match (writable, chain.writable.is_empty()) {
                (true, _) => chain.writable.push(segment),
                (false, true) => chain.readable.push(segment),
                (false, false) => {
                    return Err(Broken("a chain has a readable buffer after a writable one"));
                }
            }
        }
        if continues {
            return Err(Broken("a chain loops or leads out of its table"));
        }
        Ok(chain)
    }

    /// Returns the number of bytes that the device may read.
    pub fn readable_bytes(&self) -> usize {
        self.readable.iter().map(|segment| segment.length).sum()
    }

    /// Returns the number of bytes that the device may write.
    pub fn writable_bytes(&self) -> usize {
        self.writable.iter().map(|segment| segment.length).sum()
    }

    /// Copies the chain's readable bytes from `offset` on into `bytes`.
    pub fn read_at(&self, memory: &Memory, offset: usize, bytes: &mut [u8]) -> Result<(), Broken> {
        let mut rest = bytes;
        for piece in self.readable_pieces(offset, rest.len())? {
            let (now, later) = rest.split_at_mut(piece.length);
            memory
                .read_slice(now, piece.address)
                .map_err(|_| Broken("a buffer cannot be read"))?;
            rest = later;
        }
        Ok(())
    }

    /// Copies `bytes` into the chain's writable bytes from `offset` on.
    pub fn write_at(&self, memory: &Memory, offset: usize, bytes: &[u8]) -> Result<(), Broken> {
        let mut rest = bytes;
        for piece in self.writable_pieces(offset, rest.len())? {
            let (now, later) = rest.split_at(piece.length);
            memory
                .write_slice(now, piece.address)
                .map_err(|_| Broken("a buffer cannot be written"))?;
            rest = later;
        }
        Ok(())
    }

    /// Locates `length` readable bytes from `offset` on.
    fn readable_pieces(&self, offset: usize, length: usize) -> Result<Vec<Piece>, Broken> {
        pieces(&self.readable, offset, length)
    }

    /// Locates `length` writable bytes from `offset` on.
    fn writable_pieces(&self, offset: usize, length: usize) -> Result<Vec<Piece>, Broken> {
        pieces(&self.writable, offset, length)
    }
}

/// A part of a chain that is contiguous in guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Piece {
    address: GuestAddress,
    length: usize,
}

fn pieces(segments: &[Segment], offset: usize, length: usize) -> Result<Vec<Piece>, Broken> {
    let mut skip = offset;
    let mut left = length;
    let mut pieces = vec![];
    for segment in segments {
        if left == 0 {
            break;
        }
        let skipped = skip.min(segment.length);
        skip -= skipped;
        let length = left.min(segment.length - skipped);
        if length > 0 {
            pieces.push(Piece {
                // No overflow: the whole segment is in guest memory.
                address: GuestAddress(segment.address.0 + skipped as u64),
                length,
            });
            left -= length;
        }
    }
    match left {
        0 => Ok(pieces),
        _ => Err(Broken("a chain is too short")),
    }
}
