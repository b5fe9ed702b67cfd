// SPDX-License-Identifier: Apache-2.0
//! Checks the stopped guest before anything is written.
//!
//! The order is: gates, counts, instruction pointers, sites. A mismatch in the first three means
//! that the guest was changing its own keys (busy). If all three are as planned, a site that does
//! not hold the instruction of its key's state was changed neither by the guest's jump label code
//! nor by this crate. Its bytes are foreign, and a retry does not help.

use std::sync::Arc;

use crate::busy::Busy;
use crate::instruction::{Hex, Size};
use crate::key::KeyChange;
use crate::memory::{AccessFault, GuestMemory, first_bytes, first_changed};
use crate::plan::{Plan, PlannedSite};

/// The plan cannot be committed. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VerifyError {
    /// Resume the guest, and wait or plan again; see [`Busy::outdates_plan`].
    #[error("the guest is busy: {0}; try again")]
    Busy(#[from] Busy),
    /// A site holds neither its NOP nor its JMP, or it holds the instruction of the opposite state.
    #[error(
        "key {key}: the site at {site:#x} holds {}, expected {}; something else patches this kernel, leave the key alone",
        Hex(&.found[..*.length]), Hex(&.expected[..*.length])
    )]
    ForeignBytes {
        /// Full name of the key.
        key: Arc<str>,
        /// Address of the site.
        site: u64,
        /// Number of valid bytes in `expected` and `found`.
        length: usize,
        /// The instruction of the key's state; a NOP of `length` bytes if the site's size is
        /// unknown.
        expected: [u8; 5],
        /// Bytes in the guest.
        found: [u8; 5],
    },
    /// Memory that was readable at planning is not readable now.
    #[error("guest memory that was readable at planning cannot be read now; try again")]
    Fault(#[from] AccessFault),
}

impl<P: Copy> Plan<P> {
    /// Checks the stopped guest. `rips` are the instruction pointers of its vCPUs. Allocates
    /// nothing; takes time proportional to the sites that change.
    ///
    /// # Errors
    /// [`VerifyError`].
    pub fn verify<M: GuestMemory<Place = P>>(
        &self,
        memory: &M,
        rips: &[u64],
    ) -> Result<(), VerifyError> {
        self.verify_gates(memory)?;
        self.verify_counts(memory)?;
        for &rip in rips {
            if let Some(site) = self.site_around(rip) {
                return Err(Busy::InsideSite {
                    rip,
                    site: site.address,
                }
                .into());
            }
        }
        self.verify_suspects(memory)?;
        self.verify_sites(memory)
    }

    /// Checks only the gates and the counts. This may be done while the guest runs, to avoid
    /// stopping it for a gate that is closed or a plan that is out of date.
    ///
    /// # Errors
    /// [`VerifyError::Busy`], [`VerifyError::Fault`].
    pub fn verify_running<M: GuestMemory<Place = P>>(&self, memory: &M) -> Result<(), VerifyError> {
        self.verify_gates(memory)?;
        self.verify_counts(memory)
    }

    pub(crate) fn verify_gates<M: GuestMemory<Place = P>>(
        &self,
        memory: &M,
    ) -> Result<(), VerifyError> {
        let Some((index, found)) = first_changed(memory, &self.gate_words)? else {
            return Ok(());
        };
        let gate = self.gates[index].named(&self.changes);
        Err(Busy::Gate { gate, found }.into())
    }

    fn verify_counts<M: GuestMemory<Place = P>>(&self, memory: &M) -> Result<(), VerifyError> {
        let Some((index, found)) = first_changed(memory, self.count_words())? else {
            return Ok(());
        };
        let KeyChange { name, before, .. } = &self.changes[index];
        Err(Busy::Count {
            key: name.clone(),
            expected: *before,
            found: i32::from_le_bytes(first_bytes(found)),
        }
        .into())
    }

    /// Returns the site that contains `rip` at a byte other than its first. A vCPU at the first
    /// byte has not started the old instruction and executes the new one.
    fn site_around(&self, rip: u64) -> Option<&PlannedSite<P>> {
        let after = self.sites.partition_point(|site| site.address < rip);
        let site = &self.sites[after.checked_sub(1)?];
        (rip - site.address < site.before.size().bytes() as u64).then_some(site)
    }

    fn verify_suspects<M: GuestMemory<Place = P>>(&self, memory: &M) -> Result<(), VerifyError> {
        // A single suspect prevents the commit, so only the first is checked.
        let Some(suspect) = self.suspects.first() else {
            return Ok(());
        };
        let (key, site, length) = (self.key_name(suspect.key), suspect.address, suspect.length);
        let mut found = [0; 5];
        memory.read(suspect.place, &mut found[..length])?;
        let recognised = suspect
            .nops
            .recognise(&found[..length], site, suspect.target);
        if recognised.is_some() {
            return Err(Busy::SiteChanging { key, site }.into());
        }
        let nop = suspect.nops.nop(if length == Size::Two.bytes() {
            Size::Two
        } else {
            Size::Five
        });
        let mut expected = [0; 5];
        expected[..length].copy_from_slice(nop.as_bytes());
        Err(VerifyError::ForeignBytes {
            key,
            site,
            length,
            expected,
            found,
        })
    }

    fn verify_sites<M: GuestMemory<Place = P>>(&self, memory: &M) -> Result<(), VerifyError> {
        let Some((index, found)) = first_changed(memory, &self.words[..self.sites.len()])? else {
            return Ok(());
        };
        let (site, word) = (&self.sites[index], &self.words[index]);
        Err(VerifyError::ForeignBytes {
            key: self.key_name(site.key),
            site: site.address,
            length: word.length,
            expected: first_bytes(word.before),
            found: first_bytes(found),
        })
    }
}
