// SPDX-License-Identifier: Apache-2.0
//! Lists the VMs of this host repeatedly.
//!
//! A scan takes about as long as reading the names of all descriptors of the host's processes. The
//! kernel is read only for VMs that the previous scan did not find attachable.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};

use super::{Candidate, Found, ListedVm, Listing, Verdict, add_attachers, ptrace_refusal};
use crate::kernel::HostKernel;

/// Lists the VMs of this host as [`super::list()`] does. Keeps between scans what cannot have
/// changed.
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
    /// Returns this entry for another process that has the VM.
    #[cfg(test)]
    pub(super) fn of_process(mut self, proc: &Path, pid: u32) -> Self {
        let candidate = Candidate::open(&proc.join(pid.to_string()), pid, None);
        self.candidate = candidate.ok().flatten().unwrap_or(self.candidate);
        self.row.pid = pid;
        self
    }

    /// Returns whether `candidate` is the same process with the same descriptors.
    fn is(&self, candidate: &Candidate) -> bool {
        let known = &self.candidate;
        known.is_process(candidate.pid, candidate.started, &candidate.vms)
            && known.vcpus == candidate.vcpus
    }
}

impl Scanner {
    /// Creates a scanner that reads this kernel.
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
        // Known processes are added first, so that each new one is compared with all of them.
        let (known, new): (Vec<_>, Vec<_>) = found.with_vms().partition(|candidate| {
            let known = before.get(&candidate.pid);
            ptrace.is_none() && known.is_some_and(|known| known.is(candidate))
        });
        let known = known.into_iter();
        self.known
            .extend(known.filter_map(|candidate| before.remove_entry(&candidate.pid)));
        let mut seen: HashSet<u64> = HashSet::new();
        for candidate in new {
            let (mut rows, remark) = candidate.rows(Some(&mut self.kernel), &mut seen, &ptrace);
            rows.retain(|(_, address)| address.is_none_or(|address| !self.is_known(address)));
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
            } else {
                listing.vms.extend(rows.into_iter().map(|(row, _)| row));
            }
        }
        let known = self.known.values().map(|known| known.row.clone());
        listing.vms.extend(known);
        listing
            .vms
            .sort_unstable_by_key(|vm| (vm.pid, vm.descriptor));
        let remark = add_attachers(&self.proc, &mut listing.vms);
        listing.remarks.extend(remark);
        listing.remarks.extend(found.failures.remark());
        Ok(listing)
    }

    /// Returns whether a known process has the VM at this address. Another VM may have this address
    /// by now, because the process may have replaced its descriptor since it was read. Such a
    /// process is forgotten, and the next scan reads it again.
    fn is_known(&mut self, address: u64) -> bool {
        let same = |(_, known): &(&u32, &Known)| known.address == Some(address);
        let Some((pid, known)) = self.known.iter().find(same) else {
            return false;
        };
        let (pid, descriptor) = (*pid, known.row.descriptor);
        let vm = self.kernel.vm(pid, descriptor);
        let still = vm.is_ok_and(|vm| vm.found.kvm == address);
        if !still {
            self.known.remove(&pid);
        }
        still
    }
}
