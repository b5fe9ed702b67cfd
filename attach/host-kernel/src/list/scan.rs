// SPDX-License-Identifier: Apache-2.0
//! Lists the VMs of this host repeatedly.
//!
//! A scan costs about as much as the names of all descriptors of the host's processes. The kernel
//! is read only for a VM that the previous scan did not find attachable.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};

use super::{Candidate, Found, ListedVm, Listing, Verdict, add_attachers, ptrace_refusal};
use crate::kernel::HostKernel;

/// Lists the VMs of this host as [`super::list()`] does, and keeps what does not change between
/// scans.
#[derive(Debug)]
pub struct Scanner {
    proc: PathBuf,
    kernel: HostKernel,
    pub(super) known: HashMap<u32, Known>,
}

/// A process with one VM that can be attached to.
#[derive(Debug)]
pub(super) struct Known {
    candidate: Candidate,
    row: ListedVm,
    /// The address of the VM in the kernel.
    address: Option<u64>,
}

impl Known {
    /// Returns whether `candidate` is the same process with the same descriptors.
    fn is(&self, candidate: &Candidate) -> bool {
        let known = &self.candidate;
        known.is_process(candidate.pid, candidate.started, &candidate.vms)
            && known.vcpus == candidate.vcpus
    }
}

impl Scanner {
    /// Makes a scanner that reads this kernel.
    #[must_use]
    pub fn new(kernel: HostKernel) -> Self {
        Self::in_folder(Path::new("/proc"), kernel)
    }

    pub(super) fn in_folder(proc: &Path, kernel: HostKernel) -> Self {
        Self {
            proc: proc.to_owned(),
            kernel,
            known: HashMap::new(),
        }
    }

    /// Lists the VMs of this host.
    ///
    /// # Errors
    /// /proc cannot be read.
    pub fn scan(&mut self) -> io::Result<Listing> {
        let known = |pid| self.known.get(&pid).map(|known| &known.candidate);
        let found = Found::find(&self.proc, |path, pid| {
            Candidate::open(path, pid, known(pid))
        })?;
        let mut before = std::mem::take(&mut self.known);
        let mut listing = Listing {
            vms: Vec::new(),
            remarks: found.closed(),
            hidden: found.hidden,
        };
        let ptrace = ptrace_refusal(&self.proc);
        let mut seen: HashSet<u64> = HashSet::new();
        for candidate in found.with_vms() {
            let known = before.remove(&candidate.pid);
            if let Some(known) = known.filter(|known| known.is(candidate) && ptrace.is_none()) {
                if known.address.is_none_or(|address| seen.insert(address)) {
                    listing.vms.push(known.row.clone());
                    self.known.insert(candidate.pid, known);
                }
                continue;
            }
            let (rows, remark) = candidate.rows(Some(&mut self.kernel), &mut seen, &ptrace);
            listing.remarks.extend(remark);
            if let [(row, address)] = rows.as_slice()
                && row.verdict == Verdict::Yes
            {
                let known = Known {
                    candidate: candidate.clone(),
                    row: row.clone(),
                    address: *address,
                };
                self.known.insert(candidate.pid, known);
            }
            listing.vms.extend(rows.into_iter().map(|(row, _)| row));
        }
        add_attachers(&self.proc, &mut listing.vms);
        listing.remarks.extend(found.failures.remark());
        Ok(listing)
    }
}
