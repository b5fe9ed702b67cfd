// SPDX-License-Identifier: Apache-2.0

//! Stopping every vCPU, and knowing that each has stopped.
//!
//! Each vCPU is a plain thread with a state word of its own:
//!
//! ```text
//!              thread starts                   pause asked for
//!  NotStarted ──────────────▶ Running ────────────────────────▶ StopRequested
//!                              │  ▲  ▲  deadline missed           │        │
//!                 saw the word │  │  └────────────────────────────┘        │
//!                              ▼  │ resume                                │
//!                             Parked ◀────────────────────────────────────┘
//!                                                     stopped, RIP published
//!  any ──────────────▶ Exited     (guest ended, or the vCPU can never run again)
//! ```
//!
//! The controller and the vCPUs meet in two words:
//!
//! - `word`: says whether a pause is wanted. Who parks sleeps on it, so that one
//!   futex wake resumes all.
//! - `outstanding`: how many vCPUs are in `StopRequested`. Who leaves that state
//!   takes one off, whether it parks, exits or is given up on; the one who takes
//!   the last off wakes the controller.
//!
//! Why no vCPU can run on unnoticed: a vCPU stores `Running` and *then* looks at
//! `word`; the controller changes `word` and *then* looks at the states. All
//! of it is sequentially consistent, so either the vCPU sees the wish and
//! parks by itself, or the controller sees `Running` and signals it. A vCPU that
//! the controller finds `Parked`, `NotStarted` or `Exited` cannot enter the guest
//! before `word` says so.
//!
//! Why no signal is lost: the controller sets `immediate_exit` and then signals;
//! the vCPU clears `immediate_exit` and then looks at `word` (KVM API, 5, The
//! kvm_run structure: a set `immediate_exit` makes `KVM_RUN` return at once).

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU32, AtomicU64, Ordering::SeqCst};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

pub use patchbay_service::pause::{Activity, LateVcpu, PauseError};
use rustix::thread::futex;

use crate::kick::{ImmediateExit, kick_thread};

/// How long the controller spins before it sleeps, where it has a core that no vCPU it waits
/// for needs. A vCPU leaves the guest in less; a core that sleeps takes as long again to wake,
/// on a virtual machine most of all.
const SPIN: Duration = Duration::from_micros(100);

/// Rounds that the controller spins where a vCPU may need its core, about 2 µs: enough for vCPUs
/// that are stopped already. More makes stopping slower by as much.
const SPINS_ON_A_SHARED_CORE: u32 = 50;

/// In `word`: the guest is being ended, nobody parks any more.
const TERMINATE: u32 = 1;

/// In `word`: a pause is wanted. Pausing and resuming both add it, so that the
/// bits above count them and no sleeper takes one pause for another.
const PAUSE: u32 = 2;

/// A state of the machine above.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum State {
    NotStarted,
    Running,
    StopRequested,
    Parked,
    Exited,
}

/// Kind in the top byte, detail below: one word, so that it is never seen half-written.
fn to_word(activity: Activity) -> u64 {
    let (kind, detail) = match activity {
        Activity::Monitor => (0, 0),
        Activity::Guest => (1, 0),
        Activity::PortIo(port) => (2, u64::from(port)),
        Activity::Mmio(address) => (3, address),
        Activity::Request(op) => (4, u64::from(op)),
    };
    kind << 56 | (detail & ((1 << 56) - 1))
}

fn from_word(word: u64) -> Activity {
    let detail = word & ((1 << 56) - 1);
    match word >> 56 {
        1 => Activity::Guest,
        2 => Activity::PortIo(u16::try_from(detail).unwrap_or(u16::MAX)),
        3 => Activity::Mmio(detail),
        4 => Activity::Request(u32::try_from(detail).unwrap_or(u32::MAX)),
        _ => Activity::Monitor,
    }
}

/// What the controller and one vCPU thread share.
#[derive(Debug)]
struct Slot {
    state: AtomicU8,
    thread: AtomicI32,
    activity: AtomicU64,
    rip: AtomicU64,
    has_rip: AtomicBool,
    breakpoint: AtomicBool,
    immediate_exit: ImmediateExit,
}

impl Slot {
    /// Moves from one state to another; false: it was not in the first.
    fn exchange(&self, from: State, to: State) -> bool {
        self.state
            .compare_exchange(from as u8, to as u8, SeqCst, SeqCst)
            .is_ok()
    }

    fn kick(&self) {
        self.immediate_exit.set(true);
        kick_thread(self.thread.load(SeqCst));
    }
}

/// Where a vCPU stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stopped {
    /// Guest-virtual address of the next instruction.
    pub rip: u64,
    /// Whether a breakpoint exception (#BP) waits to be delivered.
    pub breakpoint: bool,
}

/// Stops and resumes the vCPUs of one guest.
#[derive(Debug)]
pub struct Pauser {
    word: AtomicU32,
    outstanding: AtomicU32,
    /// The controller may be asleep on `outstanding`.
    sleeping: AtomicBool,
    held: AtomicBool,
    slots: Box<[Slot]>,
    /// Cores that this process may run on.
    cores: usize,
    /// Room for the RIPs, kept so that a pause allocates nothing.
    rips: Mutex<Vec<u64>>,
}

impl Pauser {
    pub(crate) fn new(immediate_exits: Vec<ImmediateExit>) -> Self {
        let slots: Box<[Slot]> = immediate_exits
            .into_iter()
            .map(|immediate_exit| Slot {
                state: AtomicU8::new(State::NotStarted as u8),
                thread: AtomicI32::new(0),
                activity: AtomicU64::new(to_word(Activity::Monitor)),
                rip: AtomicU64::new(0),
                has_rip: AtomicBool::new(false),
                breakpoint: AtomicBool::new(false),
                immediate_exit,
            })
            .collect();
        Self {
            word: AtomicU32::new(0),
            outstanding: AtomicU32::new(0),
            sleeping: AtomicBool::new(false),
            held: AtomicBool::new(false),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            rips: Mutex::new(Vec::with_capacity(slots.len())),
            slots,
        }
    }

    /// Stops every vCPU. They stay stopped until the answer is dropped.
    ///
    /// vCPUs that have not started, are halted or have exited count as stopped.
    /// Takes some tens of microseconds when the vCPUs have cores to run on.
    ///
    /// # Errors
    /// [`PauseError`]; in each case the guest runs on and nothing has changed.
    pub fn pause(&self, deadline: Duration) -> Result<Paused<'_>, PauseError> {
        if self.held.swap(true, SeqCst) {
            return Err(PauseError::AlreadyPaused);
        }
        let began = Instant::now();
        if self.word.fetch_add(PAUSE, SeqCst) & TERMINATE != 0 {
            self.resume();
            return Err(PauseError::Ended);
        }
        let mut asked = 0;
        for slot in &self.slots {
            // Counted first: the vCPU may stop, and take itself off, at once.
            self.outstanding.fetch_add(1, SeqCst);
            if slot.exchange(State::Running, State::StopRequested) {
                slot.kick();
                asked += 1;
            } else {
                self.outstanding.fetch_sub(1, SeqCst);
            }
        }
        if !self.wait_until_stopped(asked, began, deadline) {
            let late = self.give_up();
            // Empty: the last stopped between the deadline and this look.
            if !late.is_empty() {
                self.resume();
                return Err(PauseError::Late { deadline, late });
            }
        }
        let stop_time = began.elapsed();
        let mut rips = std::mem::take(&mut *self.lock_rips());
        rips.clear();
        let mut breakpoint = false;
        for slot in &self.slots {
            // Not only those in `Parked`: one that woke from the last pause into this
            // one is briefly in `Running`, but has not moved.
            if slot.state.load(SeqCst) != State::Exited as u8 && slot.has_rip.load(SeqCst) {
                rips.push(slot.rip.load(SeqCst));
                breakpoint |= slot.breakpoint.load(SeqCst);
            }
        }
        Ok(Paused {
            pauser: self,
            rips,
            breakpoint,
            stop_time,
        })
    }

    fn lock_rips(&self) -> std::sync::MutexGuard<'_, Vec<u64>> {
        self.rips.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until none of the vCPUs asked is in `StopRequested`. False: the deadline passed first.
    fn wait_until_stopped(&self, asked: usize, began: Instant, deadline: Duration) -> bool {
        let mut rounds = 0;
        while rounds < SPINS_ON_A_SHARED_CORE
            || asked < self.cores && began.elapsed() < SPIN.min(deadline)
        {
            if self.outstanding.load(SeqCst) == 0 {
                return true;
            }
            std::hint::spin_loop();
            rounds += 1;
        }
        self.sleeping.store(true, SeqCst);
        let stopped = loop {
            let outstanding = self.outstanding.load(SeqCst);
            if outstanding == 0 {
                break true;
            }
            let Some(left) = deadline.checked_sub(began.elapsed()) else {
                break false;
            };
            let timeout = futex::Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            };
            // Woken, timed out, interrupted, or the count had moved on: look again.
            let _ = futex::wait(
                &self.outstanding,
                futex::Flags::PRIVATE,
                outstanding,
                Some(&timeout),
            );
        };
        self.sleeping.store(false, SeqCst);
        stopped
    }

    /// Takes the request back from those who have not followed it, and names them.
    fn give_up(&self) -> Vec<LateVcpu> {
        let mut late = vec![];
        for (vcpu, slot) in self.slots.iter().enumerate() {
            let activity = from_word(slot.activity.load(SeqCst));
            if slot.exchange(State::StopRequested, State::Running) {
                self.outstanding.fetch_sub(1, SeqCst);
                late.push(LateVcpu {
                    vcpu,
                    activity,
                    last_rip: slot.has_rip.load(SeqCst).then(|| slot.rip.load(SeqCst)),
                });
            }
        }
        late
    }

    fn resume(&self) {
        self.word.fetch_add(PAUSE, SeqCst);
        let _ = futex::wake(&self.word, futex::Flags::PRIVATE, i32::MAX.cast_unsigned());
        self.held.store(false, SeqCst);
    }

    /// Ends every vCPU thread, parked or running. Cannot be taken back.
    pub(crate) fn terminate(&self) {
        self.word.fetch_or(TERMINATE, SeqCst);
        let _ = futex::wake(&self.word, futex::Flags::PRIVATE, i32::MAX.cast_unsigned());
        for slot in &self.slots {
            let state = slot.state.load(SeqCst);
            if state == State::Running as u8 || state == State::StopRequested as u8 {
                slot.kick();
            }
        }
    }

    /// The vCPU thread's side.
    pub(crate) fn vcpu(&self, index: usize) -> VcpuSide<'_> {
        VcpuSide {
            pauser: self,
            slot: &self.slots[index],
        }
    }
}

/// The guest, stopped. Dropping this resumes it.
#[derive(Debug)]
pub struct Paused<'a> {
    pauser: &'a Pauser,
    rips: Vec<u64>,
    breakpoint: bool,
    stop_time: Duration,
}

impl Paused<'_> {
    /// The instruction pointers of the stopped vCPUs, in the order of their
    /// indices. vCPUs that have not started or have exited have none.
    #[must_use]
    pub fn rips(&self) -> &[u64] {
        &self.rips
    }

    /// Whether a breakpoint exception (#BP) waits to be delivered on any vCPU:
    /// the guest is in the middle of patching its own text.
    #[must_use]
    pub fn breakpoint_pending(&self) -> bool {
        self.breakpoint
    }

    /// From the request to stop until the last vCPU had stopped.
    #[must_use]
    pub fn stop_time(&self) -> Duration {
        self.stop_time
    }
}

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        *self.pauser.lock_rips() = std::mem::take(&mut self.rips);
        self.pauser.resume();
    }
}

/// What a vCPU thread does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// Enter the guest.
    Run,
    /// A pause is wanted: settle what is pending, then [`VcpuSide::park`].
    Park(u32),
    /// End the thread.
    End,
}

/// One vCPU thread's hold on the pauser. It ends with the thread's work, also by a panic: no pause waits
/// for a vCPU that can never run again.
#[derive(Debug)]
pub(crate) struct VcpuSide<'a> {
    pauser: &'a Pauser,
    slot: &'a Slot,
}

impl VcpuSide<'_> {
    /// To be called first on the vCPU's thread.
    pub fn start(&self) {
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        self.slot.thread.store(thread, SeqCst);
        self.slot.state.store(State::Running as u8, SeqCst);
    }

    /// What is wanted now. Clears `immediate_exit` first: see the module's head.
    pub fn next(&self) -> Next {
        self.slot.immediate_exit.set(false);
        self.peek()
    }

    /// As [`next`](Self::next), but leaves `immediate_exit` alone.
    pub fn peek(&self) -> Next {
        let word = self.pauser.word.load(SeqCst);
        if word & TERMINATE != 0 {
            Next::End
        } else if word & PAUSE != 0 {
            Next::Park(word)
        } else {
            Next::Run
        }
    }

    /// Makes the next `KVM_RUN` return before it enters the guest.
    pub fn hold_back(&self) {
        self.slot.immediate_exit.set(true);
    }

    /// Publishes where the vCPU stopped and sleeps until no pause is wanted any
    /// more; `word` is the one that was seen.
    pub fn park(&self, word: u32, stopped: Stopped) {
        self.slot.rip.store(stopped.rip, SeqCst);
        self.slot.breakpoint.store(stopped.breakpoint, SeqCst);
        self.slot.has_rip.store(true, SeqCst);
        let mut word = word;
        loop {
            self.leave_to(State::Parked);
            while self.pauser.word.load(SeqCst) == word {
                // Woken or interrupted: the loop looks again.
                let _ = futex::wait(&self.pauser.word, futex::Flags::PRIVATE, word, None);
            }
            self.slot.state.store(State::Running as u8, SeqCst);
            match self.peek() {
                // The next pause came before this thread woke: it never left its place.
                Next::Park(next) => word = next,
                Next::Run | Next::End => return,
            }
        }
    }

    /// Notes what the thread is busy with.
    pub fn busy(&self, activity: Activity) {
        self.slot
            .activity
            .store(to_word(activity), std::sync::atomic::Ordering::Relaxed);
    }

    fn leave_to(&self, state: State) {
        if self.slot.state.swap(state as u8, SeqCst) == State::StopRequested as u8 {
            self.take_off();
        }
    }

    fn take_off(&self) {
        let last = self.pauser.outstanding.fetch_sub(1, SeqCst) == 1;
        if last && self.pauser.sleeping.load(SeqCst) {
            let _ = futex::wake(&self.pauser.outstanding, futex::Flags::PRIVATE, 1);
        }
    }
}

impl Drop for VcpuSide<'_> {
    fn drop(&mut self) {
        self.leave_to(State::Exited);
    }
}
