// SPDX-License-Identifier: Apache-2.0
//! A snapshot of the probes attached to a tracepoint, for display. It is read while the guest runs;
//! a change checks the probes again.

use std::hash::{BuildHasher, Hasher};

use foldhash::fast::FixedState;

use crate::catalog::Catalog;
use crate::key::KeyId;
use crate::memory::{GuestMemory, ReadError, Width, read_word_at};

/// `struct tracepoint_func` {func, data, prio}, `include/linux/tracepoint-defs.h`.
const PROBE_SIZE: usize = 24;
/// The maximum number of probes that are counted. A real array is much shorter.
const PROBES_MAX: u32 = 256;

/// The state of a tracepoint in the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tracepoint {
    /// Number of functions in the `funcs` array, up to 256.
    pub probes: u32,
}

/// Identifies the set of probes of a tracepoint by its `funcs` array and the array's contents.
///
/// The kernel allocates a new array whenever a probe is attached or detached, so equal values mean
/// the same probes, with one exception. If every probe is detached, the allocator reuses the
/// array's memory, and the new probes have the same functions and data, the values are equal too.
/// perf is such a case: it attaches a single probe to a tracepoint for all its users, always with
/// the same function and data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probes {
    funcs: u64,
    /// Digest of the array.
    contents: u64,
}

impl Probes {
    /// Returns whether these are the same functions with the same data, perhaps in another array.
    #[must_use]
    pub fn same_functions(&self, other: &Self) -> bool {
        self.contents == other.contents
    }

    /// Returns whether no probe is attached.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.funcs == 0
    }
}

impl Catalog {
    /// Reads the state of a key's tracepoint. Returns `None` if the key has no tracepoint.
    ///
    /// # Errors
    /// [`ReadError`], which may also mean that the guest changed the array during the read.
    pub fn tracepoint<M: GuestMemory>(
        &self,
        memory: &M,
        key: KeyId,
    ) -> Result<Option<Tracepoint>, ReadError> {
        let Some(funcs) = self.funcs(memory, key)? else {
            return Ok(None);
        };
        let (probes, _) = read_probes(memory, funcs)?;
        Ok(Some(Tracepoint { probes }))
    }

    /// Reads the addresses of the functions of a key's probes, up to 256; none if the key has no
    /// tracepoint.
    ///
    /// # Errors
    /// Same as [`Catalog::tracepoint`].
    pub fn probe_functions<M: GuestMemory>(
        &self,
        memory: &M,
        key: KeyId,
    ) -> Result<Vec<u64>, ReadError> {
        let Some(funcs) = self.funcs(memory, key)? else {
            return Ok(vec![]);
        };
        let mut functions = vec![];
        each_probe(memory, funcs, |probe| {
            let function = probe.first_chunk().copied().unwrap_or_default();
            functions.push(u64::from_le_bytes(function));
        })?;
        Ok(functions)
    }

    /// Reads the probes of a key's tracepoint. Returns `None` if the key has no tracepoint.
    ///
    /// # Errors
    /// Same as [`Catalog::tracepoint`].
    pub fn probes<M: GuestMemory>(
        &self,
        memory: &M,
        key: KeyId,
    ) -> Result<Option<Probes>, ReadError> {
        let Some(funcs) = self.funcs(memory, key)? else {
            return Ok(None);
        };
        let (_, contents) = read_probes(memory, funcs)?;
        Ok(Some(Probes { funcs, contents }))
    }

    /// Reads the address of the array of a key's probes. Returns `None` if the key has no
    /// tracepoint.
    fn funcs<M: GuestMemory>(&self, memory: &M, key: KeyId) -> Result<Option<u64>, ReadError> {
        match self.key(key).map_or(0, |key| key.tracepoint) {
            0 => Ok(None),
            address => word(memory, address, self.layout.tracepoint_funcs).map(Some),
        }
    }
}

/// Reads a word of a structure. An address past the end of the address space is unmapped.
fn word<M: GuestMemory>(memory: &M, address: u64, offset: u32) -> Result<u64, ReadError> {
    let address = address.saturating_add(offset.into());
    read_word_at(memory, address, Width::U64)
}

/// Returns the number of probes in a `funcs` array, up to 256, and a digest of them.
fn read_probes<M: GuestMemory>(memory: &M, funcs: u64) -> Result<(u32, u64), ReadError> {
    let mut digest = FixedState::default().build_hasher();
    let mut probes = 0;
    each_probe(memory, funcs, |probe| {
        digest.write(probe);
        probes += 1;
    })?;
    Ok((probes, digest.finish()))
}

/// Reads the probes of a `funcs` array, up to 256.
fn each_probe<M: GuestMemory>(
    memory: &M,
    funcs: u64,
    mut each: impl FnMut(&[u8; PROBE_SIZE]),
) -> Result<(), ReadError> {
    if funcs == 0 {
        return Ok(());
    }
    let mut at = funcs;
    for _ in 0..PROBES_MAX {
        let mut probe = [0; PROBE_SIZE];
        memory.read_gva(at, &mut probe)?;
        // A probe without a function ends the array.
        if probe[..8] == [0; 8] {
            break;
        }
        each(&probe);
        at = at.saturating_add(PROBE_SIZE as u64);
    }
    Ok(())
}
