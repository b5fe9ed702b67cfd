// SPDX-License-Identifier: Apache-2.0
//! A guest whose service is killed at a named moment.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use nix::sys::signal::{SigSet, Signal};
use nix::unistd::Pid;
use patchbay_attach::guest::Paused;
use patchbay_guest::guest::{Guest, Intended, PausedGuest};
use patchbay_guest::memory::{Exchanged, GuestRam, Piece, Ram};
use patchbay_guest::pause::PauseError;
use patchbay_memory::{OutsideMemory, PhysicalMemory};
use rustix::process::{Resource, Rlimit, setrlimit};

use super::super::cut;
use super::super::wrapped::Wrapped;
use super::{Moment, TORN_AT};

/// The moment at which this process is killed.
#[derive(Debug)]
pub struct Fate {
    pub moment: Moment,
    /// The number of reads or writes before it.
    pub left: AtomicUsize,
    pub is_armed: AtomicBool,
    /// The watchdog, if it is killed first.
    pub watchdog: Option<Pid>,
}

impl Moment {
    pub fn is_of_both(self) -> bool {
        matches!(
            self,
            Self::PendingBoth | Self::StoppedBoth | Self::WrittenBoth
        )
    }
}

impl Fate {
    fn is_at(&self, moment: Moment) -> bool {
        self.is_armed.load(Ordering::SeqCst) && self.moment == moment
    }

    /// Kills this process at its moment.
    pub fn reach(&self, moment: Moment) {
        if self.is_at(moment) {
            self.die(moment);
        }
    }

    /// Kills this process at its moment, after a number of calls.
    fn count(&self, moment: Moment) {
        if self.is_at(moment) && self.left.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.die(moment);
        }
    }

    pub fn die(&self, moment: Moment) -> ! {
        println!("\nkilled {moment:?}");
        cut::die(self.watchdog)
    }

    /// Lets the kernel kill this process in the next write to a file that goes beyond
    /// [`TORN_AT`].
    pub fn limit(&self, moment: Moment) {
        if self.is_at(moment) {
            println!("\nkilled {moment:?}");
            limit(Resource::Core, 0);
            limit(Resource::Fsize, TORN_AT);
        }
    }

    /// Lets such a write of this thread fail, as on a full disk.
    pub fn fill(&self, moment: Moment) {
        if self.is_at(moment) {
            let signal: SigSet = Signal::SIGXFSZ.into();
            signal.thread_block().expect("nothing forbids it");
            limit(Resource::Fsize, TORN_AT);
        }
    }
}

fn limit(resource: Resource, at_most: u64) {
    let limit = Rlimit {
        current: Some(at_most),
        maximum: Some(at_most),
    };
    setrlimit(resource, limit).expect("a process may lower it");
}

/// A guest whose service is killed.
pub type Doomed = Wrapped<Arc<Fate>>;

impl Guest for Doomed {
    type Paused<'a> = DoomedPaused<'a>;

    fn ram(&self) -> &GuestRam {
        &self.ram
    }

    fn pause(&self, timeout: Duration) -> Result<DoomedPaused<'_>, PauseError> {
        let paused = Some(self.guest.pause(timeout)?);
        self.with.reach(Moment::Stopped);
        self.with.reach(Moment::StoppedBoth);
        let fate = &self.with;
        Ok(DoomedPaused { paused, fate })
    }

    fn will_write(&self, change: Intended<'_>) -> Result<(), PauseError> {
        self.with.reach(Moment::Pending);
        self.with.reach(Moment::PendingBoth);
        self.guest.will_write(change)?;
        self.with.reach(Moment::Told);
        Ok(())
    }

    fn will_keep(&self, digest: &[u8; 32], replaced: Option<&[u8; 32]>) {
        self.with.reach(Moment::Announced);
        self.with.limit(Moment::WritingPending);
        self.with.fill(Moment::DiskFull);
        self.guest.will_keep(digest, replaced);
    }

    fn will_write_running(&self, ledger: &[u8; 32]) {
        self.with.reach(Moment::Pending);
        self.with.reach(Moment::PendingBoth);
        self.guest.will_write_running(ledger);
        self.with.reach(Moment::Told);
        self.with.limit(Moment::WritingOutcome);
        self.with.fill(Moment::OutcomeUnwritten);
    }
}

/// A stopped guest whose service is killed.
pub struct DoomedPaused<'a> {
    /// `None` only during the drop.
    paused: Option<Paused<'a>>,
    fate: &'a Fate,
}

impl DoomedPaused<'_> {
    fn paused(&self) -> &Paused<'_> {
        self.paused.as_ref().expect("it is not dropped")
    }
}

impl PausedGuest for DoomedPaused<'_> {
    fn rips(&self) -> Option<&[u64]> {
        self.paused().rips()
    }

    fn breakpoint_pending(&self) -> Option<bool> {
        self.paused().breakpoint_pending()
    }

    fn stop_time(&self) -> Duration {
        self.paused().stop_time()
    }

    fn begin_writes(&self) -> Result<(), String> {
        self.paused().begin_writes()?;
        self.fate.reach(Moment::Begun);
        Ok(())
    }

    fn check_writes(&self) -> Result<(), String> {
        self.fate.reach(Moment::Written);
        self.fate.reach(Moment::WrittenBoth);
        self.paused().check_writes()?;
        self.fate.reach(Moment::Checked);
        Ok(())
    }

    fn made(&self) {
        self.paused().made();
        self.fate.reach(Moment::Made);
    }

    fn undone(&self) {
        self.paused().undone();
    }
}

impl Drop for DoomedPaused<'_> {
    fn drop(&mut self) {
        self.paused = None;
        self.fate.reach(Moment::Resumed);
        self.fate.limit(Moment::WritingOutcome);
        self.fate.fill(Moment::OutcomeUnwritten);
    }
}

/// The memory of a guest whose service is killed.
#[derive(Debug)]
pub struct DoomedRam {
    pub ram: GuestRam,
    pub fate: Arc<Fate>,
}

impl PhysicalMemory for DoomedRam {
    fn ram(&self) -> Vec<std::ops::Range<u64>> {
        self.ram.ram()
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), OutsideMemory> {
        self.ram.read(address, bytes)
    }

    fn read_u64(&self, address: u64) -> Option<u64> {
        self.ram.read_u64(address)
    }
}

impl Ram for DoomedRam {
    fn piece(&self, address: u64, length: usize) -> Result<Piece, OutsideMemory> {
        self.ram.piece(address, length)
    }

    fn read_piece(&self, piece: Piece, bytes: &mut [u8]) -> bool {
        self.fate.count(Moment::Adopting);
        self.ram.read_piece(piece, bytes)
    }

    fn write_piece(&self, piece: Piece, bytes: &[u8]) -> bool {
        let written = self.ram.write_piece(piece, bytes);
        self.fate.count(Moment::BetweenWrites);
        written
    }

    fn writes_whole(&self, piece: Piece) -> bool {
        self.ram.writes_whole(piece)
    }

    fn compare_exchange_u32(&self, piece: Piece, current: u32, new: u32) -> Option<Exchanged> {
        let exchanged = self.ram.compare_exchange_u32(piece, current, new);
        self.fate.count(Moment::BetweenWrites);
        exchanged
    }

    fn can_exchange(&self) -> bool {
        self.ram.can_exchange()
    }

    fn is_dirty(&self, address: u64) -> bool {
        self.ram.is_dirty(address)
    }
}
