// SPDX-License-Identifier: Apache-2.0
//! Stops the threads of a guest's vCPUs by ptrace.
//!
//! A thread that the kernel has stopped is not in `KVM_RUN`, so its vCPU executes nothing, even if
//! a client tells the monitor to continue the guest. The monitor's other threads keep running. The
//! kernel releases the threads when the thread that stopped them ends, so a stop does not outlive
//! this process (PTRACE_SEIZE without PTRACE_O_EXITKILL, ptrace(2)).
//!
//! A thread that emulates a device holds QEMU's big lock, and QEMU answers no client without that
//! lock. Such a thread is resumed from system call to system call until it enters `KVM_RUN` or
//! waits for another thread ([`Point::Unlocked`]).
//!
//! A ptrace relation belongs to the tracing thread, so each stop has its own thread, which ends
//! soon after the stop.
//!
//! A thread may stop because a signal is about to be delivered to it. The kernel delivers the
//! signal if the tracer passes its number on, or if the tracer's thread ends and has not consumed
//! the report of the stop. So reports are only looked at. The numbers of real-time signals, by
//! which several monitors interrupt their vCPUs, cannot be passed on without unsafe code. The end
//! of the tracer's thread delivers them.

use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::libc;
use nix::sys::ptrace;
use nix::sys::signal::{Signal, raise};
use nix::unistd::Pid;
use rustix::process::{WaitId, WaitIdOptions, waitid};
use rustix::thread::gettid;

/// Time spent polling without sleep. Most threads stop sooner.
const SPIN: Duration = Duration::from_micros(300);
/// Interval of later polls.
const BETWEEN_LOOKS: Duration = Duration::from_micros(50);
/// The time after which a stop kills this process. Such a stop usually hangs in an access to the
/// monitor's memory, which waits for a page, for example from a file system in user space. If the
/// wait cannot be interrupted, the vCPUs run again all the same, because the tracer's thread ends.
const LONGEST: Duration = Duration::from_secs(60);
/// The time for a last message.
const LOGGING: Duration = Duration::from_secs(1);
/// The longest wait for the kernel to release the threads of a tracer that ends.
const ENDING: Duration = Duration::from_secs(1);

/// The `ioctl` that runs a vCPU (`include/uapi/linux/kvm.h`).
const KVM_RUN: u64 = 0xae80;
/// The status of a thread that enters or leaves a system call (PTRACE_O_TRACESYSGOOD).
const SYSCALL: i32 = libc::SIGTRAP | 0x80;

/// The points at which a thread may be stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// The entry to `KVM_RUN` or the return from it, or a wait for another thread. QEMU's big lock
    /// is rarely held at these points: only while the thread waits for a second lock, or while QEMU
    /// 8.0 and later waits for the vCPU to leave `KVM_RUN`.
    Unlocked,
    /// The entry to `KVM_RUN` or the return from it. A thread whose monitor has paused it, for
    /// example for a snapshot, waits elsewhere.
    Running,
    /// Anywhere. A QEMU without KVM has no `KVM_RUN`.
    Any,
}

/// An error of a stop; all threads keep running.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum FreezeError {
    /// The threads with these indices did not stop in time.
    #[error("{} threads did not stop in time", .0.len())]
    Late(Vec<usize>),
    /// A thread has ended.
    #[error("a vCPU's thread has ended")]
    Gone,
    /// The thread that traces the vCPUs' threads cannot be started.
    #[error("a thread cannot be started: {0}; raise the limit on processes")]
    NoThread(String),
    /// The kernel denies ptrace.
    #[error(
        "thread {thread} cannot be traced with ptrace: {error}; run as the monitor's user or with CAP_SYS_PTRACE, and detach any debugger from the thread"
    )]
    Denied {
        /// The thread's id.
        thread: u32,
        /// The operating system's error message.
        error: String,
    },
}

/// The end of a stop. The error is the id of the tracer's thread, whose end releases threads that
/// could not be detached.
type Released = Result<(), rustix::thread::Pid>;

/// The reason why an attempt has stopped no thread.
#[derive(Debug, PartialEq, Eq)]
enum Failure {
    /// The thread with this index has to continue, and a real-time signal is being delivered to it.
    RealTimeSignal(usize),
    Final(FreezeError),
}

impl From<FreezeError> for Failure {
    fn from(error: FreezeError) -> Self {
        Self::Final(error)
    }
}

/// Stopped threads. They are resumed on drop.
#[derive(Debug)]
pub struct Frozen {
    release: Option<Sender<()>>,
    released: Receiver<Released>,
    tracer: Option<JoinHandle<()>>,
    stop_time: Duration,
}

impl Frozen {
    /// Returns the time that the stop took.
    #[must_use]
    pub fn stop_time(&self) -> Duration {
        self.stop_time
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.release = None;
        let released = self.released.recv();
        // The end of the tracer's thread, which takes longer, is not awaited.
        if released != Ok(Ok(()))
            && let Some(tracer) = self.tracer.take()
        {
            // The tracer has panicked, or a thread has ended or was not detached. The kernel
            // releases the threads when the tracer's thread ends.
            wait_for_end(tracer, released.ok());
        }
    }
}

/// Waits until a tracer's thread has ended and the kernel has released the threads that it traced.
fn wait_for_end(tracer: JoinHandle<()>, released: Option<Released>) {
    let _ = tracer.join();
    // The kernel wakes this thread a little before it releases the traced threads.
    if let Some(Err(id)) = released {
        let tracer = format!("/proc/self/task/{id}");
        let end = Instant::now() + ENDING;
        while Path::new(&tracer).exists() && Instant::now() < end {
            std::thread::sleep(BETWEEN_LOOKS);
        }
    }
}

/// Stops all of these threads before the deadline, or none. A stop that lasts longer than a minute
/// kills this process, which releases the threads. If it is the attacher, its watchdog rolls back.
///
/// # Errors
/// [`FreezeError`]; all threads keep running.
pub fn freeze(threads: &[u32], point: Point, deadline: Instant) -> Result<Frozen, FreezeError> {
    freeze_for(threads, point, deadline, LONGEST)
}

fn freeze_for(
    threads: &[u32],
    point: Point,
    deadline: Instant,
    longest: Duration,
) -> Result<Frozen, FreezeError> {
    loop {
        match attempt(threads, point, deadline, longest) {
            Ok(frozen) => return Ok(frozen),
            Err(Failure::Final(error)) => return Err(error),
            // The tracer's end has delivered the signal.
            Err(Failure::RealTimeSignal(_)) if Instant::now() < deadline => {}
            Err(Failure::RealTimeSignal(index)) => return Err(FreezeError::Late(vec![index])),
        }
    }
}

fn attempt(
    threads: &[u32],
    point: Point,
    deadline: Instant,
    longest: Duration,
) -> Result<Frozen, Failure> {
    let threads = threads.to_vec();
    let (answer, answered) = channel();
    let (release, end) = channel();
    let (report, released) = channel();
    let tracer = std::thread::Builder::new()
        .name("freeze".to_owned())
        .spawn(move || {
            let wait = || {
                if end.recv_timeout(longest) == Err(RecvTimeoutError::Timeout) {
                    end_this_process(longest);
                }
            };
            let released = trace(&threads, point, deadline, &answer, wait);
            // Sending fails only if this process is ending.
            let _ = report.send(released);
        })
        .map_err(|error| FreezeError::NoThread(error.to_string()))?;
    match answered.recv() {
        Ok(Ok(stop_time)) => Ok(Frozen {
            release: Some(release),
            released,
            tracer: Some(tracer),
            stop_time,
        }),
        // The tracer has panicked.
        Err(_) => Err(FreezeError::Gone.into()),
        Ok(Err(failure)) => {
            wait_for_end(tracer, released.recv().ok());
            Err(failure)
        }
    }
}

/// Kills this process because of a stop that has lasted this long.
fn end_this_process(longest: Duration) {
    let (done, logged) = channel();
    // Nobody may read the log, so another thread writes it.
    std::thread::spawn(move || {
        tracing::error!(
            ?longest,
            "the guest was stopped for too long, so this process kills itself; the watchdog of an attacher rolls back"
        );
        let _ = done.send(());
    });
    let _ = logged.recv_timeout(LOGGING);
    let _ = raise(Signal::SIGKILL);
}

/// A thread that is being stopped.
struct Traced {
    id: u32,
    pid: Pid,
    stopped: bool,
    /// A signal that was being delivered to the thread when it stopped.
    signal: Option<i32>,
}

/// Runs in the tracer's thread. `wait` waits for the end of the stop.
fn trace(
    threads: &[u32],
    point: Point,
    deadline: Instant,
    answer: &Sender<Result<Duration, Failure>>,
    wait: impl FnOnce(),
) -> Released {
    let began = Instant::now();
    let mut traced = Vec::with_capacity(threads.len());
    let stopped = stop(threads, point, &mut traced, deadline);
    let stopped = stopped.map(|()| began.elapsed());
    let is_stopped = stopped.is_ok();
    // Sending fails only if this process is ending.
    let _ = answer.send(stopped);
    if is_stopped {
        wait();
    }
    release(&traced)
}

fn release(traced: &[Traced]) -> Released {
    let mut is_released = true;
    for thread in traced {
        is_released &= thread.stopped
            && match thread.signal.map(Signal::try_from).transpose() {
                // ESRCH means that the thread has been killed. When this tracer's thread ends, the
                // kernel releases all threads that are still traced.
                Ok(signal) => ptrace::detach(thread.pid, signal).is_ok(),
                Err(_) => false,
            };
    }
    is_released.then_some(()).ok_or_else(gettid)
}

fn stop(
    threads: &[u32],
    point: Point,
    traced: &mut Vec<Traced>,
    deadline: Instant,
) -> Result<(), Failure> {
    seize(threads, traced)?;
    stop_seized(point, traced, deadline)
}

fn seize(threads: &[u32], traced: &mut Vec<Traced>) -> Result<(), FreezeError> {
    for &id in threads {
        let pid = Pid::from_raw(i32::try_from(id).map_err(|_| FreezeError::Gone)?);
        ptrace::seize(pid, ptrace::Options::PTRACE_O_TRACESYSGOOD)
            .map_err(|error| failed(id, error))?;
        traced.push(Traced {
            id,
            pid,
            stopped: false,
            signal: None,
        });
    }
    Ok(())
}

fn stop_seized(point: Point, traced: &mut [Traced], deadline: Instant) -> Result<(), Failure> {
    for thread in traced.iter() {
        ptrace::interrupt(thread.pid).map_err(|error| failed(thread.id, error))?;
    }
    let began = Instant::now();
    loop {
        for (index, thread) in traced.iter_mut().enumerate() {
            if !thread.stopped {
                look(index, thread, point)?;
            }
        }
        if traced.iter().all(|thread| thread.stopped) {
            return Ok(());
        }
        let now = Instant::now();
        if now >= deadline {
            let late = (0..)
                .zip(traced.iter())
                .filter(|(_, thread)| !thread.stopped);
            let late = late.map(|(index, _)| index).collect();
            return Err(FreezeError::Late(late).into());
        }
        if now - began < SPIN {
            std::thread::yield_now();
        } else {
            std::thread::sleep(BETWEEN_LOOKS);
        }
    }
}

fn look(index: usize, thread: &mut Traced, point: Point) -> Result<(), Failure> {
    let error = |error| failed(thread.id, error);
    let mut resumable = point != Point::Any;
    let Some(status) = stop_status(thread.pid).map_err(error)? else {
        return Ok(());
    };
    let signal = match (status & 0xff, status >> 8) {
        // The thread stopped at a system call, or by the interrupt.
        (SYSCALL, 0) | (libc::SIGTRAP, 1..) => None,
        // The thread stopped before a signal, which is delivered to it afterwards.
        (signal, 0) => Some(signal),
        // The whole process is stopped (group-stop in ptrace(2)). PTRACE_SYSCALL would end that
        // stop for this thread.
        _ => {
            resumable = false;
            None
        }
    };
    if !resumable || is_at(point, thread.pid).map_err(error)? {
        thread.stopped = true;
        thread.signal = signal;
        return Ok(());
    }
    let Ok(signal) = signal.map(Signal::try_from).transpose() else {
        return Err(Failure::RealTimeSignal(index));
    };
    Ok(ptrace::syscall(thread.pid, signal).map_err(error)?)
}

/// Returns the status of a stopped thread: a signal, and an event in the next byte (ptrace(2)).
/// Returns `None` while the thread runs. The report of the stop is not consumed.
fn stop_status(pid: Pid) -> nix::Result<Option<i32>> {
    // A tracer may wait for a thread without __WALL since Linux 4.7.
    let options = WaitIdOptions::EXITED
        | WaitIdOptions::STOPPED
        | WaitIdOptions::NOHANG
        | WaitIdOptions::NOWAIT;
    let id = rustix::process::Pid::from_raw(pid.as_raw()).ok_or(Errno::ESRCH)?;
    let status =
        waitid(WaitId::Pid(id), options).map_err(|error| Errno::from_raw(error.raw_os_error()))?;
    match status {
        None => Ok(None),
        // Other statuses mean that the thread has ended.
        Some(status) => status.trapping_signal().ok_or(Errno::ESRCH).map(Some),
    }
}

/// Returns whether a stopped thread enters or leaves `KVM_RUN` or, if [`Point::Unlocked`] is given,
/// waits for another thread.
fn is_at(point: Point, pid: Pid) -> nix::Result<bool> {
    let registers = ptrace::getregs(pid)?;
    let argument = registers.rsi;
    Ok(match registers.orig_rax.cast_signed() {
        libc::SYS_ioctl => argument == KVM_RUN,
        // The kernel takes the low 32 bits.
        libc::SYS_futex if point == Point::Unlocked => matches!(
            argument as i32 & libc::FUTEX_CMD_MASK,
            libc::FUTEX_WAIT | libc::FUTEX_WAIT_BITSET
        ),
        _ => false,
    })
}

fn failed(thread: u32, error: Errno) -> FreezeError {
    match error {
        Errno::ESRCH | Errno::ECHILD => FreezeError::Gone,
        _ => FreezeError::Denied {
            thread,
            error: error.desc().to_owned(),
        },
    }
}

#[cfg(test)]
mod tests;
