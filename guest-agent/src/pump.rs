// SPDX-License-Identifier: Apache-2.0
//! Forwards ring-buffer pages to the monitor, within the credit that the monitor has granted.
//!
//! Without credit nothing is read. Events stay in the kernel's ring buffer, which overwrites the
//! oldest events and counts them. The agent therefore holds at most one batch, regardless of what
//! the guest does.

use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use patchbay_proto::agent::v1::from_agent::Message as Answer;
use patchbay_proto::agent::v1::{AgentPage, AgentPages};
use patchbay_proto::{AGENT_PAGE_MAX_BYTES, AGENT_PAGE_OVERHEAD};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::session::Outlet;
use crate::tracefs::Tracefs;

/// Limit on the cost of the pages in one frame.
const BATCH_COST: u64 = 256 << 10;
/// Delay between two batches: the maximum delay of an event, and a limit on the agent's own
/// wake-ups.
const PAUSE: Duration = Duration::from_millis(20);
const POLL_TIMEOUT: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 500_000_000,
};

/// Size of a page header: u64 time stamp, then a `local_t` with the length of the data and two
/// flags (`struct buffer_data_page`, `kernel/trace/ring_buffer.c`; described in
/// `events/header_page`).
const HEADER_BYTES: usize = 16;
const LENGTH_MASK: u64 = (1 << 30) - 1;
/// `RB_MISSED_STORED`: the data is followed by the number of events that were lost before this
/// page.
const MISSED_STORED: u64 = 1 << 30;

/// Credit granted by the monitor.
#[derive(Debug, Default)]
pub struct Credit {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    bytes: u64,
    sent: u64,
    closed: bool,
}

impl Credit {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn add(&self, bytes: u64) {
        let mut state = self.state();
        state.bytes = state.bytes.saturating_add(bytes);
        self.changed.notify_all();
    }

    /// Ends all waits, because the connection has ended.
    pub fn close(&self) {
        self.state().closed = true;
        self.changed.notify_all();
    }

    /// Returns the number of bytes sent on this connection.
    pub fn sent(&self) -> u64 {
        self.state().sent
    }

    fn spend(&self, batch: &Batch) {
        let mut state = self.state();
        state.bytes = state.bytes.saturating_sub(batch.cost);
        state.sent = state.sent.saturating_add(batch.bytes);
    }

    /// Waits for at least `at_least`, and until the credit suffices for a page of this length.
    /// Returns the credit; `None` if the connection has ended.
    fn wait(&self, at_least: Duration, page_bytes: usize) -> Option<u64> {
        let enough = page_bytes as u64 + AGENT_PAGE_OVERHEAD;
        let state = self.state();
        let wait = self
            .changed
            .wait_timeout_while(state, at_least, |state| !state.closed);
        let (state, _) = wait.unwrap_or_else(PoisonError::into_inner);
        let wait = self
            .changed
            .wait_while(state, |state| !state.closed && state.bytes < enough);
        let state = wait.unwrap_or_else(PoisonError::into_inner);
        (!state.closed).then_some(state.bytes)
    }
}

/// The thread that forwards pages.
pub struct Pump<'a> {
    pub outlet: &'a Outlet,
    pub credit: &'a Credit,
    pub tracefs: &'a Tracefs,
}

impl Pump<'_> {
    /// Forwards pages until the connection ends.
    pub fn run(self) {
        let cpus = self.tracefs.pages();
        let longest = usize::try_from(AGENT_PAGE_MAX_BYTES).unwrap_or(usize::MAX);
        let mut page = vec![0; rustix::param::page_size().min(longest)];
        while let Some(credit) = self.credit.wait(PAUSE, page.len()) {
            let mut fds: Vec<_> = cpus
                .iter()
                .map(|(_, file)| PollFd::from_borrowed_fd(file.as_fd(), PollFlags::IN))
                .collect();
            if poll(&mut fds, Some(&POLL_TIMEOUT)).is_err() {
                continue;
            }
            let batch = read_batch(&cpus, &mut page, credit.min(BATCH_COST));
            if batch.pages.is_empty() {
                continue;
            }
            self.credit.spend(&batch);
            let pages = AgentPages { pages: batch.pages };
            if self.outlet.send(0, Answer::Pages(pages)).is_err() {
                return;
            }
        }
    }
}

/// Pages of one frame.
#[derive(Debug, Default)]
struct Batch {
    pages: Vec<AgentPage>,
    bytes: u64,
    /// Cost of the pages as defined by the protocol.
    cost: u64,
}

/// Reads one page of each CPU in turn, so that no CPU starves the others, up to a total cost of
/// `limit`.
fn read_batch(cpus: &[(u32, File)], page: &mut [u8], limit: u64) -> Batch {
    let most = page.len() as u64 + AGENT_PAGE_OVERHEAD;
    let mut batch = Batch::default();
    loop {
        let before = batch.cost;
        for (cpu, file) in cpus {
            // Reading a page removes it from the ring buffer, so there must be credit to send it.
            if batch.cost + most > limit {
                return batch;
            }
            let mut file = file;
            let Ok(read) = file.read(page) else { continue };
            let data = used(&page[..read]);
            if !data.is_empty() {
                let bytes = data.len() as u64;
                batch.bytes += bytes;
                batch.cost += bytes + AGENT_PAGE_OVERHEAD;
                batch.pages.push(AgentPage {
                    cpu: *cpu,
                    data: data.to_vec(),
                });
            }
        }
        if batch.cost == before {
            return batch;
        }
    }
}

/// Returns a page without the bytes after its data; empty if it has no data.
fn used(page: &[u8]) -> &[u8] {
    let Some(header) = page
        .get(8..HEADER_BYTES)
        .and_then(|bytes| bytes.try_into().ok())
    else {
        return &[];
    };
    let commit = u64::from_le_bytes(header);
    let length = usize::try_from(commit & LENGTH_MASK).unwrap_or(usize::MAX);
    if length == 0 {
        return &[];
    }
    let missed = if commit & MISSED_STORED != 0 { 8 } else { 0 };
    page.get(..HEADER_BYTES.saturating_add(length).saturating_add(missed))
        .unwrap_or(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(commit: u64) -> Vec<u8> {
        let mut page = vec![0; 4096];
        page[8..16].copy_from_slice(&commit.to_le_bytes());
        page
    }

    #[test]
    fn only_committed_data_is_sent() {
        assert_eq!(used(&page(100)).len(), 116);
        assert_eq!(used(&page(100 | 1 << 31)).len(), 116);
        assert_eq!(used(&page(100 | 3 << 30)).len(), 124);
        assert_eq!(used(&page(0)).len(), 0);
        assert_eq!(used(&page(LENGTH_MASK)).len(), 4096, "more than there is");
        assert_eq!(used(&[1, 2, 3]).len(), 0);
    }

    #[test]
    fn closing_ends_a_wait_without_credit() {
        let credit = Credit::default();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| credit.wait(Duration::ZERO, 4096));
            credit.close();
            assert_eq!(waiter.join().expect("no panic"), None);
        });
    }

    #[test]
    fn credit_is_added_and_spent() {
        let credit = Credit::default();
        credit.add(5000);
        assert_eq!(credit.wait(Duration::ZERO, 4096), Some(5000));
        credit.spend(&Batch {
            bytes: 10,
            cost: 138,
            ..Batch::default()
        });
        assert_eq!(credit.wait(Duration::ZERO, 4096), Some(4862));
        assert_eq!(credit.sent(), 10);
        credit.add(u64::MAX);
        assert_eq!(credit.wait(Duration::ZERO, 4096), Some(u64::MAX));
    }

    #[test]
    fn a_batch_costs_no_more_than_it_may() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("pages");
        let mut one = page(1000);
        one.truncate(2000);
        std::fs::write(&path, one.repeat(20)).expect("written");
        for (limit, expected) in [(0, 0), (2127, 0), (2128, 1), (5000, 3), (1 << 20, 20)] {
            let cpus = [(0, File::open(&path).expect("there"))];
            let batch = read_batch(&cpus, &mut [0; 2000], limit);
            assert_eq!(batch.pages.len(), expected, "{limit}");
            assert_eq!(batch.cost, expected as u64 * (1016 + AGENT_PAGE_OVERHEAD));
            assert!(batch.cost <= limit);
        }
    }
}
