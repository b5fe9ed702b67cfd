// SPDX-License-Identifier: Apache-2.0
//! Shares syncs of a file among the threads that wait for their lines.
//!
//! The lock of the audit log is held while a line is written, and not while the file is synced. On
//! a slow disk, a line is therefore written while another one is synced. One thread syncs at a
//! time. A sync is for all lines that were written before it began, so a thread waits for at most
//! two: the one in progress when its line was written, and the next one.
//!
//! The kernel reports an error of writeback only once for an open file, and the pages are clean
//! afterwards, so a later sync succeeds without them. A sync that fails is therefore the failure of
//! all lines that were begun before it returned, and they stay failed. Only a line that is begun
//! later makes its page dirty again after the error.

use std::ops::RangeInclusive;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// The syncs of an open file. Lines are numbered from 1 in the order in which they are written.
/// Number 1 is what the file contained when it was opened.
#[derive(Debug)]
pub struct Syncs {
    state: Mutex<State>,
    /// Notified at the end of each sync.
    ended: Condvar,
}

#[derive(Debug)]
struct State {
    /// The last line whose write has begun.
    begun: u64,
    /// The last line that was written.
    written: u64,
    /// The lines up to this one are on the disk, except those that failed.
    synced: u64,
    /// The lines that may not be on the disk, and the error. Lines between two failures count as
    /// failed, too.
    failed: Option<(RangeInclusive<u64>, String)>,
    /// A thread syncs the file.
    is_syncing: bool,
}

impl Default for Syncs {
    fn default() -> Self {
        Self {
            state: Mutex::new(State {
                begun: 1,
                written: 1,
                synced: 0,
                failed: None,
                is_syncing: false,
            }),
            ended: Condvar::new(),
        }
    }
}

impl Syncs {
    /// Returns the number of a line that is about to be written. Lines are written one at a time.
    pub fn begin(&self) -> u64 {
        let mut state = self.lock();
        state.begun += 1;
        state.begun
    }

    /// Notes that a line was written.
    pub fn end(&self, line: u64) {
        self.lock().written = line;
    }

    /// Waits until a line that was written is on the disk. Calls `sync` unless a sync by another
    /// thread includes the line.
    ///
    /// # Errors
    /// The line may not be on the disk.
    pub fn wait(
        &self,
        line: u64,
        sync: impl FnOnce() -> std::io::Result<()>,
    ) -> std::io::Result<()> {
        let mut state = self.lock();
        loop {
            if let Some((failed, error)) = &state.failed
                && failed.contains(&line)
            {
                return Err(std::io::Error::other(error.clone()));
            }
            if line <= state.synced {
                return Ok(());
            }
            if !state.is_syncing {
                break;
            }
            let ended = self.ended.wait(state);
            state = ended.unwrap_or_else(PoisonError::into_inner);
        }
        state.is_syncing = true;
        let included = state.written;
        drop(state);
        let result = sync();
        let mut state = self.lock();
        state.is_syncing = false;
        match &result {
            Ok(()) => state.synced = included,
            Err(error) => {
                let earlier = state.failed.as_ref().map(|(failed, _)| *failed.start());
                let first = earlier.unwrap_or(state.synced + 1);
                state.failed = Some((first..=state.begun, error.to_string()));
            }
        }
        drop(state);
        self.ended.notify_all();
        result
    }

    /// Returns the last line that was written.
    pub fn last(&self) -> u64 {
        self.lock().written
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn works() -> io::Result<()> {
        Ok(())
    }

    fn fails() -> io::Result<()> {
        Err(io::Error::other("the disk is gone"))
    }

    fn unused() -> io::Result<()> {
        panic!("the line is on the disk already, or has failed")
    }

    /// Writes a line.
    fn write(syncs: &Syncs) -> u64 {
        let line = syncs.begin();
        syncs.end(line);
        line
    }

    #[test]
    fn a_sync_is_for_the_lines_that_were_written_before_it() {
        let syncs = Syncs::default();
        let [first, second, third] = [(); 3].map(|()| write(&syncs));
        let mut later = 0;
        syncs
            .wait(second, || {
                later = write(&syncs);
                Ok(())
            })
            .expect("synced");
        for line in [first, third] {
            syncs.wait(line, unused).expect("included");
        }
        syncs.wait(later, fails).expect_err("not included");
    }

    #[test]
    fn what_the_file_contained_is_synced() {
        let syncs = Syncs::default();
        let mut calls = 0;
        let sync = || {
            calls += 1;
            Ok(())
        };
        syncs.wait(syncs.last(), sync).expect("synced");
        assert_eq!(calls, 1);
    }

    /// The kernel does not report the error again, and a line that is written during a sync may be
    /// in a page that it could not write.
    #[test]
    fn a_failed_sync_is_the_failure_of_all_lines_that_were_begun() {
        let syncs = Syncs::default();
        let before = write(&syncs);
        let own = write(&syncs);
        let (mut during, mut unfinished) = (0, 0);
        let failed = syncs.wait(own, || {
            during = write(&syncs);
            unfinished = syncs.begin();
            fails()
        });
        failed.expect_err("it fails");
        syncs.end(unfinished);
        let later = write(&syncs);
        syncs.wait(later, works).expect("a page that is new");
        for line in [before, own, during, unfinished] {
            let error = syncs.wait(line, unused).expect_err("perhaps not there");
            assert_eq!(error.to_string(), "the disk is gone");
        }
        let last = write(&syncs);
        syncs.wait(last, fails).expect_err("it fails again");
        syncs.wait(before, unused).expect_err("still not there");
        let next = write(&syncs);
        syncs.wait(next, works).expect("synced");
    }

    /// A line waits for the sync in progress and for one more, however many lines there are.
    #[test]
    fn lines_that_are_written_during_a_sync_share_the_next_one() {
        let syncs = Syncs::default();
        let calls = AtomicUsize::new(0);
        let sync = || {
            calls.fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        let own = write(&syncs);
        std::thread::scope(|scope| {
            let slow = || {
                for line in [(); 32].map(|()| write(&syncs)) {
                    let (syncs, sync) = (&syncs, &sync);
                    scope.spawn(move || syncs.wait(line, sync).expect("synced"));
                }
                sync()
            };
            syncs.wait(own, slow).expect("synced");
        });
        assert_eq!(calls.into_inner(), 2);
    }
}
