// SPDX-License-Identifier: Apache-2.0
//! The memory that a request of the guest refers to.

use patchbay_guest::kernel_memory::KernelMemory;
use patchbay_guest::memory::GuestRam;
use patchbay_guest::snapshot::KeptArray;
use patchbay_memory::paging::PageTable;
use static_keys::{AccessFault, Exchanged, GuestMemory, ReadError, Unmapped};

/// Guest memory, and arrays that are read instead of the memory at their addresses. A guest may
/// free the arrays of a request once it has been served, so a copy has other content there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestMemory<'a> {
    ram: &'a GuestRam,
    arrays: &'a [KeptArray],
}

impl<'a> From<&'a GuestRam> for RequestMemory<'a> {
    fn from(ram: &'a GuestRam) -> Self {
        Self { ram, arrays: &[] }
    }
}

impl<'a> RequestMemory<'a> {
    /// Returns the memory of a copy of the guest that has sent the request.
    pub(super) fn of_copy(ram: &'a GuestRam, arrays: &'a [KeptArray]) -> Self {
        Self { ram, arrays }
    }

    /// Returns the memory by the addresses of the kernel.
    pub(super) fn mapped_by(self, table: PageTable) -> MappedMemory<'a> {
        MappedMemory {
            memory: KernelMemory::new(self.ram, table),
            arrays: self.arrays,
        }
    }
}

/// [`RequestMemory`] by the addresses of the kernel.
pub(super) struct MappedMemory<'a> {
    memory: KernelMemory,
    arrays: &'a [KeptArray],
}

impl GuestMemory for MappedMemory<'_> {
    type Place = <KernelMemory as GuestMemory>::Place;

    fn locate(&self, address: u64, len: usize) -> Result<Self::Place, Unmapped> {
        self.memory.locate(address, len)
    }

    fn read(&self, place: Self::Place, bytes: &mut [u8]) -> Result<(), AccessFault> {
        self.memory.read(place, bytes)
    }

    fn write(&self, place: Self::Place, bytes: &[u8]) -> Result<(), AccessFault> {
        self.memory.write(place, bytes)
    }

    fn writes_whole(&self, place: Self::Place, length: usize) -> bool {
        self.memory.writes_whole(place, length)
    }

    fn compare_exchange_u32(
        &self,
        place: Self::Place,
        current: u32,
        new: u32,
    ) -> Result<Exchanged, AccessFault> {
        self.memory.compare_exchange_u32(place, current, new)
    }

    fn read_gva(&self, address: u64, bytes: &mut [u8]) -> Result<(), ReadError> {
        let is_it = |kept: &&KeptArray| kept.address == address && kept.bytes.len() == bytes.len();
        match self.arrays.iter().find(is_it) {
            Some(kept) => bytes.copy_from_slice(&kept.bytes),
            None => self.memory.read_gva(address, bytes)?,
        }
        Ok(())
    }
}
