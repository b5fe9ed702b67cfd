// SPDX-License-Identifier: Apache-2.0

//! Stops every vCPU and waits until each has stopped.
//!
//! Each vCPU has a thread and a state word:
//!
//! ```text
//!              thread starts                   pause requested
//!  NotStarted ──────────────▶ Running ────────────────────────▶ StopRequested
//!                              │  ▲  ▲  deadline missed           │        │
//!                 saw the word │  │  └────────────────────────────┘        │
//!                              ▼  │ resume                                │
//!                             Parked ◀────────────────────────────────────┘
//!                                                     stopped, RIP published
//!  any ──────────────▶ Exited     (guest ended, or the vCPU can never run again)
//! ```
//!
//! The controller and the vCPUs share two words:
//!
//! - `word` says whether a pause is requested. Parked vCPUs sleep on it, so one futex wake resumes
//!   them all.
//! - `outstanding` counts the vCPUs in `StopRequested`. A vCPU that leaves that state, because it
//!   parks, exits or misses the deadline, decrements the count. The last one wakes the controller.
//!
//! Every vCPU that runs is detected. A vCPU stores `Running` and *then* reads `word`. The
//! controller changes `word` and *then* reads the states. All accesses are sequentially consistent,
//! so either the vCPU sees the request and parks without a signal, or the controller sees `Running`
//! and signals it. A vCPU that the controller finds `Parked`, `NotStarted` or `Exited` cannot enter
//! the guest before `word` allows it.
//!
//! No signal is lost. The controller sets `immediate_exit` and then signals. The vCPU clears
//! `immediate_exit` and then reads `word`. A set `immediate_exit` makes `KVM_RUN` return at once
//! (KVM API, 5, The kvm_run structure).

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU32, AtomicU64, Ordering::SeqCst};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

pub use patchbay_guest::pause::{Activity, LateVcpu, PauseError};
use rustix::thread::futex;

use crate::kick::{ImmediateExit, kick_thread};
use crate::system_registers::{RegisterReader, RegistersError, SystemRegisters};

/// Time that the controller spins before it sleeps, if there are more cores than vCPUs to stop. A
/// vCPU usually leaves the guest in less time. Sleeping would add about as much time to wake the
/// core again, in particular on a virtual machine.
const SPIN: Duration = Duration::from_micros(100);

/// Number of iterations that the controller spins if a vCPU may need its core, about 2 µs. They
/// suffice for vCPUs that have already stopped. More iterations would delay the vCPUs that are
/// still running.
const SPINS_ON_A_SHARED_CORE: u32 = 50;

/// Bit in `word`: the guest is being ended and no vCPU parks.
const TERMINATE: u32 = 1;

/// Bit in `word`: a pause is requested. Pausing and resuming each add this value to `word`, so the
/// bits above count pauses, and a sleeping vCPU cannot mistake one pause for another.
const PAUSE: u32 = 2;

/// State of a vCPU; see the diagram above.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum VcpuState {
    NotStarted,
    Running,
    StopRequested,
    Parked,
    Exited,
}

/// Packs an activity into one word, with the kind in the top byte and the detail below it, so that
/// no thread sees a half-written activity.
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

/// State shared by the controller and one vCPU thread.
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
    /// Changes the state with a compare-and-exchange. Returns false if the state was not `from`.
    fn exchange(&self, from: VcpuState, to: VcpuState) -> bool {
        self.state
            .compare_exchange(from as u8, to as u8, SeqCst, SeqCst)
            .is_ok()
    }

    /// Returns whether the vCPU's thread has started and has not ended.
    fn has_thread(&self) -> bool {
        let without = [VcpuState::NotStarted as u8, VcpuState::Exited as u8];
        !without.contains(&self.state.load(SeqCst))
    }

    fn kick(&self) {
        self.immediate_exit.set(true);
        kick_thread(self.thread.load(SeqCst));
    }
}

/// State of a stopped vCPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stopped {
    /// Guest-virtual address of the next instruction.
    pub rip: u64,
    /// A breakpoint exception (#BP) is pending.
    pub breakpoint: bool,
}

/// Stops and resumes the vCPUs of one guest.
#[derive(Debug)]
pub struct Pauser {
    word: AtomicU32,
    outstanding: AtomicU32,
    /// True if the controller may be asleep on `outstanding`.
    sleeping: AtomicBool,
    held: AtomicBool,
    slots: Box<[Slot]>,
    /// Number of cores that this process may run on.
    cores: usize,
    registers: RegisterReader,
    /// Buffer for the RIPs; reused so that a pause does not allocate.
    rips: Mutex<Vec<u64>>,
}

impl Pauser {
    pub(crate) fn new(immediate_exits: Vec<ImmediateExit>) -> Self {
        let slots: Box<[Slot]> = immediate_exits
            .into_iter()
            .map(|immediate_exit| Slot {
                state: AtomicU8::new(VcpuState::NotStarted as u8),
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
            registers: RegisterReader::new(slots.len()),
            rips: Mutex::new(Vec::with_capacity(slots.len())),
            slots,
        }
    }

    /// Stops every vCPU until the returned guard is dropped.
    ///
    /// vCPUs that have not started, are halted or have exited count as stopped. Stopping takes some
    /// tens of microseconds if the vCPUs have cores to run on.
    ///
    /// # Errors
    /// [`PauseError`]. This call has then changed nothing. The guest continues to run, stays paused
    /// by an earlier call, or has ended.
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
            // Counted before the signal: the vCPU may stop and decrement the count at once.
            self.outstanding.fetch_add(1, SeqCst);
            if slot.exchange(VcpuState::Running, VcpuState::StopRequested) {
                slot.kick();
                asked += 1;
            } else {
                self.outstanding.fetch_sub(1, SeqCst);
            }
        }
        if !self.wait_until_stopped(asked, began, deadline) {
            let late = self.give_up();
            // The list is empty if the last vCPU stopped after the deadline but before this check.
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
            // The state need not be `Parked`. A vCPU that leaves the previous pause and finds this
            // one requested is briefly `Running`, but has not entered the guest.
            if slot.state.load(SeqCst) != VcpuState::Exited as u8 && slot.has_rip.load(SeqCst) {
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

    /// Returns whether the guest is paused, or a pause is being requested.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.held.load(SeqCst)
    }

    /// Returns the system registers of the vCPUs that have started, without a pause.
    pub(crate) fn system_registers(
        &self,
        timeout: Duration,
    ) -> Result<Vec<SystemRegisters>, RegistersError> {
        self.registers.read(timeout, |vcpu| {
            let slot = &self.slots[vcpu];
            let runs = slot.has_thread();
            if runs {
                slot.kick();
            }
            runs
        })
    }

    fn lock_rips(&self) -> std::sync::MutexGuard<'_, Vec<u64>> {
        self.rips.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no vCPU is in `StopRequested`. Returns false if the deadline passes first.
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
            // The wait ends by a wake-up, the timeout, a signal or a changed count. The loop checks
            // which.
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

    /// Withdraws the request from the vCPUs that have not stopped, and returns them.
    fn give_up(&self) -> Vec<LateVcpu> {
        let mut late = vec![];
        for (vcpu, slot) in self.slots.iter().enumerate() {
            let activity = from_word(slot.activity.load(SeqCst));
            if slot.exchange(VcpuState::StopRequested, VcpuState::Running) {
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

    /// Ends every vCPU thread, parked or running. This cannot be undone.
    pub(crate) fn terminate(&self) {
        self.word.fetch_or(TERMINATE, SeqCst);
        let _ = futex::wake(&self.word, futex::Flags::PRIVATE, i32::MAX.cast_unsigned());
        for slot in &self.slots {
            let state = slot.state.load(SeqCst);
            if state == VcpuState::Running as u8 || state == VcpuState::StopRequested as u8 {
                slot.kick();
            }
        }
    }

    /// Returns the handle of a vCPU thread.
    pub(crate) fn vcpu(&self, index: usize) -> VcpuSide<'_> {
        VcpuSide {
            pauser: self,
            index,
            slot: &self.slots[index],
        }
    }
}

/// A stopped guest. Dropping this resumes it.
#[derive(Debug)]
pub struct Paused<'a> {
    pauser: &'a Pauser,
    rips: Vec<u64>,
    breakpoint: bool,
    stop_time: Duration,
}

impl Paused<'_> {
    /// Returns the instruction pointers of the stopped vCPUs, ordered by index. vCPUs that have not
    /// started or have exited are left out.
    #[must_use]
    pub fn rips(&self) -> &[u64] {
        &self.rips
    }

    /// Returns whether a #BP is pending on any vCPU. If so, the guest may be patching its own text.
    #[must_use]
    pub fn breakpoint_pending(&self) -> bool {
        self.breakpoint
    }

    /// Returns the first vCPU that is not parked between two instructions, because its thread has
    /// not started or has ended.
    pub(crate) fn not_parked(&self) -> Option<usize> {
        let mut slots = self.pauser.slots.iter();
        slots.position(|slot| !slot.has_thread())
    }

    /// Returns the time from the request until the last vCPU stopped.
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

/// The next step of a vCPU thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NextStep {
    /// Enter the guest.
    Run,
    /// Complete the last exit, then call [`VcpuSide::park`] with this word.
    Park(u32),
    /// End the thread.
    End,
}

/// A vCPU thread's handle on the pauser. Dropping it, even in a panic, marks the vCPU as exited, so
/// that no pause waits for it.
#[derive(Debug)]
pub(crate) struct VcpuSide<'a> {
    pauser: &'a Pauser,
    index: usize,
    slot: &'a Slot,
}

impl VcpuSide<'_> {
    /// Marks the vCPU as running. The vCPU's thread calls this before any other method.
    pub fn start(&self) {
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        self.slot.thread.store(thread, SeqCst);
        self.slot.state.store(VcpuState::Running as u8, SeqCst);
    }

    /// Returns the next step of the thread. Clears `immediate_exit` first; see the module's
    /// documentation.
    pub fn next(&self) -> NextStep {
        self.slot.immediate_exit.set(false);
        self.peek()
    }

    /// Returns the same as [`next`](Self::next), but does not clear `immediate_exit`.
    pub fn peek(&self) -> NextStep {
        let word = self.pauser.word.load(SeqCst);
        if word & TERMINATE != 0 {
            NextStep::End
        } else if word & PAUSE != 0 {
            NextStep::Park(word)
        } else {
            NextStep::Run
        }
    }

    /// Answers a request for the system registers, if there is one. Call it after
    /// [`next`](Self::next).
    pub fn report_registers(&self, read: impl FnOnce() -> Option<SystemRegisters>) {
        let registers = &self.pauser.registers;
        if registers.take_request(self.index) {
            registers.answer(self.index, read());
        }
    }

    /// Makes the next `KVM_RUN` return before it enters the guest.
    pub fn hold_back(&self) {
        self.slot.immediate_exit.set(true);
    }

    /// Publishes where the vCPU stopped and sleeps until the pause ends. `word` is the value that
    /// requested the pause.
    pub fn park(&self, word: u32, stopped: Stopped) {
        self.slot.rip.store(stopped.rip, SeqCst);
        self.slot.breakpoint.store(stopped.breakpoint, SeqCst);
        self.slot.has_rip.store(true, SeqCst);
        let mut word = word;
        loop {
            self.leave_to(VcpuState::Parked);
            while self.pauser.word.load(SeqCst) == word {
                // After a wake-up or an interruption the loop checks again.
                let _ = futex::wait(&self.pauser.word, futex::Flags::PRIVATE, word, None);
            }
            self.slot.state.store(VcpuState::Running as u8, SeqCst);
            match self.peek() {
                // The next pause started before this thread woke. The vCPU has not moved.
                NextStep::Park(next) => word = next,
                NextStep::Run | NextStep::End => return,
            }
        }
    }

    /// Records what the thread is doing, for reports about late vCPUs.
    pub fn busy(&self, activity: Activity) {
        self.slot
            .activity
            .store(to_word(activity), std::sync::atomic::Ordering::Relaxed);
    }

    fn leave_to(&self, state: VcpuState) {
        if self.slot.state.swap(state as u8, SeqCst) == VcpuState::StopRequested as u8 {
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
        self.leave_to(VcpuState::Exited);
        self.pauser.registers.answer(self.index, None);
    }
}
