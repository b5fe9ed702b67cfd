// SPDX-License-Identifier: Apache-2.0
//! What is attached to a tracepoint, for people to look at. Read while the guest runs, and so a
//! moment's picture; a change looks again.

use std::hash::{BuildHasher, Hasher};

use foldhash::fast::FixedState;

use crate::KeyId;
use crate::catalog::Catalog;
use crate::memory::{GuestMemory, ReadError, Width, read_word_at};

/// `struct tracepoint_func` {func, data, prio}, `include/linux/tracepoint-defs.h`.
const PROBE_SIZE: usize = 24;
/// Probes are counted up to here; the end of the array comes long before.
const PROBES_MAX: u32 = 256;

/// A tracepoint as it is in the guest now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tracepoint {
    /// Functions in its `funcs` array, up to 256.
    pub probes: u32,
    /// Its `regfunc` or `unregfunc` must run when it is switched, so that its key alone cannot.
    pub switched_by_function: bool,
}

/// For whom a tracepoint fires: which `funcs` array it has, and what is in it.
///
/// The kernel makes a new array whenever a probe comes or goes, so two that are equal are mostly one
/// and the same. They are not if every probe went, the allocator gave the freed array away again, and
/// the new probes have the same functions and data. Those of two users of perf do: perf attaches one
/// probe for all its users.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probes {
    funcs: u64,
    /// Digest of the array.
    contents: u64,
}

impl Probes {
    /// Whether these are the same functions with the same data, perhaps in another array.
    #[must_use]
    pub fn same_functions(&self, other: &Self) -> bool {
        self.contents == other.contents
    }
}

impl Catalog {
    /// What is attached to the tracepoint of a key; None for other keys.
    ///
    /// # Errors
    /// [`ReadError`], also when the guest changed the array meanwhile.
    pub fn tracepoint<M: GuestMemory>(
        &self,
        memory: &M,
        key: KeyId,
    ) -> Result<Option<Tracepoint>, ReadError> {
        let Some(address) = self.tracepoint_of(key) else {
            return Ok(None);
        };
        let layout = &self.layout;
        let field = |offset: u32| word(memory, address, offset);
        let switched_by_function =
            field(layout.tracepoint_regfunc)? != 0 || field(layout.tracepoint_unregfunc)? != 0;
        let (probes, _) = read_probes(memory, field(layout.tracepoint_funcs)?)?;
        Ok(Some(Tracepoint {
            probes,
            switched_by_function,
        }))
    }

    /// For whom the tracepoint of a key fires now; None for other keys.
    ///
    /// # Errors
    /// As [`Catalog::tracepoint`].
    pub fn probes<M: GuestMemory>(
        &self,
        memory: &M,
        key: KeyId,
    ) -> Result<Option<Probes>, ReadError> {
        let Some(address) = self.tracepoint_of(key) else {
            return Ok(None);
        };
        let funcs = word(memory, address, self.layout.tracepoint_funcs)?;
        let (_, contents) = read_probes(memory, funcs)?;
        Ok(Some(Probes { funcs, contents }))
    }

    fn tracepoint_of(&self, key: KeyId) -> Option<u64> {
        let address = self.key(key)?.tracepoint;
        (address != 0).then_some(address)
    }
}

/// A word of a structure. An address past the end of the address space is not mapped.
fn word<M: GuestMemory>(memory: &M, address: u64, offset: u32) -> Result<u64, ReadError> {
    let address = address.saturating_add(offset.into());
    read_word_at(memory, address, Width::U64)
}

/// The number of probes in a `funcs` array, up to 256, and a digest of them.
fn read_probes<M: GuestMemory>(memory: &M, funcs: u64) -> Result<(u32, u64), ReadError> {
    let mut digest = FixedState::default().build_hasher();
    let mut probes = 0;
    let mut at = funcs;
    while funcs != 0 && probes < PROBES_MAX {
        let mut probe = [0; PROBE_SIZE];
        memory.read_gva(at, &mut probe)?;
        // The array ends with a probe without a function.
        if probe[..8] == [0; 8] {
            break;
        }
        digest.write(&probe);
        probes += 1;
        at = at.saturating_add(PROBE_SIZE as u64);
    }
    Ok((probes, digest.finish()))
}
