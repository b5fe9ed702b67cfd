// SPDX-License-Identifier: Apache-2.0
//! Reads the registers of all vCPUs from their run pages ([`crate::run_page`]).
//!
//! | the guest | registers are requested | registers are stored |
//! |---|---|---|
//! | runs | in a first freeze of the vCPUs | when a later freeze makes the vCPUs return |
//! | is about to be stopped by QEMU | in a freeze before the stop | when the vCPUs stop |
//!
//! A vCPU that does not return from `KVM_RUN` after the request stores nothing. This is the case
//! while its monitor has paused the guest.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::time::{Duration, Instant};

use crate::freeze::{FreezeError, Frozen, Point, freeze};
use crate::process::Process;
use crate::qmp::QmpError;
use crate::run_page::RunPage;

/// The maximum number of stops for one reading of the registers. The first stop requests them. If
/// no later stop can read them, they are reported as unknown.
const ATTEMPTS: u32 = 20;
/// The time between two attempts. A vCPU that is between two calls of `KVM_RUN` soon makes the next
/// one.
const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(1);

/// The registers of a vCPU. If the vCPU runs a nested guest, these are the nested guest's
/// registers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Registers {
    /// RIP, or EIP outside long mode.
    pub rip: u64,
    /// CR0. Bit 31: paging is on.
    pub cr0: u64,
    /// CR3, the address of the page table.
    pub cr3: u64,
    /// CR4. Bit 12: page tables have five levels.
    pub cr4: u64,
    /// EFER. Bit 12: SVM is on.
    pub efer: u64,
    /// IDTR.base.
    pub idt_base: u64,
}

/// The vCPUs of a guest in its monitor's process.
#[derive(Debug)]
pub(crate) struct Vcpus<'m> {
    process: &'m Process,
    /// The process's memory.
    memory: &'m File,
    /// The ids of the threads in this PID namespace.
    threads: Vec<u32>,
    /// The addresses of the run pages.
    pages: Vec<u64>,
}

/// Registers that were requested and not yet read. Dropping this value withdraws the request.
#[derive(Debug)]
pub(crate) struct Requested<'m>(Vec<RunPage<'m>>);

impl<'m> Vcpus<'m> {
    /// Finds the run pages of the vCPUs that ran last in these threads, one thread for each vCPU.
    ///
    /// # Errors
    /// The process does not map one run page for each vCPU.
    pub(crate) fn new(
        process: &'m Process,
        memory: &'m File,
        vcpus: &[u32],
    ) -> Result<Self, QmpError> {
        let pages = process.run_pages();
        let pages = pages.map_err(|error| failed(error.to_string()))?;
        if pages.len() != vcpus.len() {
            return Err(failed(format!(
                "process {} maps {} run pages for {} vCPUs",
                process.pid(),
                pages.len(),
                vcpus.len()
            )));
        }
        // One thread may run several vCPUs.
        let threads: BTreeSet<u32> = vcpus.iter().copied().collect();
        Ok(Self {
            process,
            memory,
            threads: threads.into_iter().collect(),
            pages,
        })
    }

    /// Stops the vCPUs repeatedly for a moment, and returns the registers of each. The first stop
    /// requests the registers, and a later one reads them.
    ///
    /// # Errors
    /// A vCPU did not leave `KVM_RUN` in time, or its run page cannot be used.
    pub(crate) fn registers(&self, patience: Duration) -> Result<Vec<Registers>, QmpError> {
        let deadline = Instant::now() + patience;
        let mut requested = None;
        for attempt in 0..ATTEMPTS {
            if attempt > 0 {
                std::thread::sleep(BETWEEN_ATTEMPTS);
            }
            let frozen = self.stop(Point::Running, deadline)?;
            let read = match &requested {
                Some(requested) => Requested::read(requested)?,
                None => {
                    requested = self.request_stopped()?;
                    None
                }
            };
            let is_last = attempt + 1 == ATTEMPTS || Instant::now() >= deadline;
            if read.is_some() || is_last {
                // The requests are withdrawn while no vCPU runs.
                drop(requested);
                drop(frozen);
                return read.ok_or_else(not_returned);
            }
        }
        Err(not_returned())
    }

    /// Stops the vCPUs for a moment and requests their registers, which each vCPU then stores when
    /// it next returns from `KVM_RUN`. Returns `None` if the monitor is about to change registers.
    ///
    /// # Errors
    /// The vCPUs cannot be stopped, or a run page cannot be used.
    pub(crate) fn request(&self, patience: Duration) -> Result<Option<Requested<'m>>, QmpError> {
        let _frozen = self.stop(Point::Unlocked, Instant::now() + patience)?;
        self.request_stopped()
    }

    fn request_stopped(&self) -> Result<Option<Requested<'m>>, QmpError> {
        let request = |page: &u64| RunPage::request(self.memory, *page);
        let pages: io::Result<Option<_>> = self.pages.iter().map(request).collect();
        Ok(pages.map_err(unusable)?.map(Requested))
    }

    fn stop(&self, point: Point, deadline: Instant) -> Result<Frozen, QmpError> {
        let has_ended = || failed("a vCPU's thread has ended".to_owned());
        let is_there = || self.threads.iter().all(|id| self.process.has_thread(*id));
        if !is_there() {
            return Err(has_ended());
        }
        let frozen = match freeze(&self.threads, point, deadline) {
            Err(FreezeError::Late(_)) => return Err(not_returned()),
            frozen => frozen.map_err(|error| failed(error.to_string()))?,
        };
        // A stopped thread keeps its id, but another process may have got the id before the stop.
        is_there().then_some(frozen).ok_or_else(has_ended)
    }
}

impl Requested<'_> {
    /// Returns the registers of each vCPU; `None` if a vCPU has not returned from `KVM_RUN` since
    /// the request. No vCPU may run meanwhile.
    ///
    /// # Errors
    /// The process has unmapped a run page.
    pub(crate) fn read(&self) -> Result<Option<Vec<Registers>>, QmpError> {
        let read: io::Result<_> = self.0.iter().map(RunPage::registers).collect();
        read.map_err(unusable)
    }
}

fn failed(why: String) -> QmpError {
    QmpError::Host(why)
}

fn unusable(error: io::Error) -> QmpError {
    failed(format!("a vCPU's run page cannot be used: {error}"))
}

fn not_returned() -> QmpError {
    failed(
        "a vCPU does not return from KVM_RUN, so its registers are unknown: its monitor has paused the guest; resume it"
            .to_owned(),
    )
}
