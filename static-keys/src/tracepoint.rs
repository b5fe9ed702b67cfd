// SPDX-License-Identifier: Apache-2.0
//! What is attached to a tracepoint, for people to look at. Read while the guest runs, and so a
//! moment's picture; a change looks again.

use crate::KeyId;
use crate::catalog::Catalog;
use crate::memory::{GuestMemory, ReadError, Width, read_word_at};

/// `struct tracepoint_func` {func, data, prio}, `include/linux/tracepoint-defs.h`.
const PROBE_SIZE: u64 = 24;
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
        let Some(address) = self
            .key(key)
            .map(|key| key.tracepoint)
            .filter(|&address| address != 0)
        else {
            return Ok(None);
        };
        let layout = &self.layout;
        // An address past the end of the address space is not mapped.
        let word = |address: u64, offset: u64| {
            let address = address.saturating_add(offset);
            read_word_at(memory, address, Width::U64)
        };
        let field = |offset: u32| word(address, offset.into());
        let switched_by_function =
            field(layout.tracepoint_regfunc)? != 0 || field(layout.tracepoint_unregfunc)? != 0;
        let funcs = field(layout.tracepoint_funcs)?;
        let mut probes = 0;
        if funcs != 0 {
            while probes < PROBES_MAX && word(funcs, u64::from(probes) * PROBE_SIZE)? != 0 {
                probes += 1;
            }
        }
        Ok(Some(Tracepoint {
            probes,
            switched_by_function,
        }))
    }
}
