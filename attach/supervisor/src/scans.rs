// SPDX-License-Identifier: Apache-2.0
//! Scans the host in a separate thread, after events and at intervals.
//!
//! The thread is needed because the processes of the host determine how long a scan takes: the scan
//! reads what they have opened, and may wait for a process's lock. Nothing waits for a scan, not
//! even the end of this process.
//!
//! ```text
//!   /dev/kvm is opened ──▶ hurry ──┐
//!   the interval is over ──────────┴─▶ due ──▶ thread: scan ──▶ next() ──▶ rest ──▶ due …
//! ```

use std::io;
use std::time::Duration;

use patchbay_host_kernel::{HostKernel, Listing, Scanner};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use tokio::net::unix::pipe;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::SETTLE;

/// Scan at least this often.
pub(crate) const INTERVAL: Duration = Duration::from_secs(5);
/// The time between two scans, as a multiple of the work of the first. It bounds the load even if a
/// process opens the device all the time.
const REST: u32 = 20;
/// The maximum error of a thread's CPU time, which some kernels update only at each timer tick.
const TICK: Duration = Duration::from_millis(10);
/// The maximum time between two scans. Without it, processes with many descriptors could delay the
/// discovery of others for minutes.
const MAX_REST: Duration = Duration::from_secs(30);
/// A scan that takes this long is reported.
const LONG: Duration = Duration::from_secs(30);
/// The delay before another attempt to read a kernel that could not be read.
const REOPEN: Duration = Duration::from_secs(60);
/// The device that a monitor opens to create a VM.
const DEVICE: &str = "/dev/kvm";
/// The folder of the module. Its inode changes each time the module is loaded.
const MODULE: &str = "/sys/module/kvm";
/// The maximum number of reads of events at a time. Processes may cause events faster than this
/// process reads them.
const MAX_READS: usize = 16;

/// A function that scans the host. An error is a sentence for the user.
type Scan = Box<dyn FnMut() -> Result<Listing, String> + Send>;

/// The end of a scan.
struct Done {
    scan: Scan,
    result: Result<Listing, String>,
    /// The approximate CPU time of the scan. On a busy host a scan takes much longer, but this does
    /// not require a longer rest.
    work: Duration,
}

/// A scan in progress.
struct Running {
    started: Instant,
    is_reported: bool,
    done: oneshot::Receiver<Done>,
}

/// Scans the host repeatedly.
pub(crate) struct Scans {
    /// Creates a new scan function after the previous one has panicked.
    make: Box<dyn Fn() -> Scan + Send>,
    /// The scan function; `None` while it runs.
    scan: Option<Scan>,
    running: Option<Running>,
    inotify: Option<pipe::Receiver>,
    has_reported_watch: bool,
    /// The delay after the last scan, not including the rest.
    delay: Duration,
    /// True if the delay was shortened after the start of the last scan.
    is_hurried: bool,
    /// The end of the last scan, and the earliest time of the next one.
    ended: Instant,
    rested: Instant,
}

impl std::fmt::Debug for Scans {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let delay = (&self.delay, self.running.is_some());
        f.debug_tuple("Scans").field(&delay).finish()
    }
}

impl Scans {
    /// Creates scans of this host. The host's kernel is already open, or the first scan opens it.
    pub(crate) fn of_host(kernel: Option<HostKernel>) -> Self {
        let mut first = HostScan {
            module: module(),
            scanner: kernel.map(Scanner::new),
            failed: None,
        };
        let inotify = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)
            .map_err(io::Error::from)
            // The descriptor is read like a pipe, because the content of the events is not used.
            .and_then(pipe::Receiver::from_owned_fd_unchecked);
        let mut scans = Self::new(Box::new(|| {
            let mut later = HostScan::default();
            Box::new(move || later.scan())
        }));
        scans.scan = Some(Box::new(move || first.scan()));
        scans.inotify = inotify.ok();
        scans.watch();
        scans
    }

    /// Creates scans by functions that `make` returns. The first scan is due at once.
    pub(crate) fn new(make: Box<dyn Fn() -> Scan + Send>) -> Self {
        let now = Instant::now();
        Self {
            scan: Some(make()),
            make,
            running: None,
            inotify: None,
            has_reported_watch: false,
            delay: Duration::ZERO,
            is_hurried: false,
            ended: now,
            rested: now,
        }
    }

    /// Watches the device, which may be created later, or again when the module is loaded.
    fn watch(&mut self) {
        let Some(inotify) = &self.inotify else { return };
        let watched = inotify::add_watch(inotify, DEVICE, WatchFlags::OPEN);
        if let Err(error) = watched
            && !std::mem::replace(&mut self.has_reported_watch, true)
        {
            tracing::warn!(
                %error,
                "{DEVICE} is not watched; a new guest is found within {INTERVAL:?}"
            );
        }
    }

    fn due(&self) -> Instant {
        self.rested.max(self.ended + self.delay)
    }

    /// Makes the next scan due soon.
    pub(crate) fn hurry(&mut self) {
        self.delay = SETTLE;
        self.is_hurried = true;
    }

    /// Scans when a scan is due, and returns the result. Dropping the call loses nothing: the next
    /// call continues.
    pub(crate) async fn next(&mut self) -> Result<Listing, String> {
        loop {
            let due = self.due();
            let Some(running) = &mut self.running else {
                tokio::select! {
                    () = tokio::time::sleep_until(due) => self.start()?,
                    () = opened(self.inotify.as_ref()), if !self.is_hurried => self.hurry(),
                }
                continue;
            };
            let long = running.started + LONG;
            tokio::select! {
                done = &mut running.done => return self.finish(done.ok()),
                () = opened(self.inotify.as_ref()), if !self.is_hurried => self.hurry(),
                () = tokio::time::sleep_until(long), if !running.is_reported => {
                    running.is_reported = true;
                    tracing::warn!(
                        "a scan for VMs takes over {LONG:?}; until it ends, no new one is found"
                    );
                }
            }
        }
    }

    /// Starts a scan.
    fn start(&mut self) -> Result<(), String> {
        let mut scan = self.scan.take().unwrap_or_else(&self.make);
        let (sender, done) = oneshot::channel();
        let thread = std::thread::Builder::new().name("scan".to_owned());
        let started = thread.spawn(move || {
            let (started, before) = (std::time::Instant::now(), cpu_time());
            let result = scan();
            let work = work(started.elapsed(), before, cpu_time());
            // The receiver is gone at the end of this process.
            let _ = sender.send(Done { scan, result, work });
        });
        if let Err(error) = started {
            self.ended = Instant::now();
            self.rested = self.ended + INTERVAL;
            return Err(format!("a thread for a scan cannot be started: {error}"));
        }
        self.is_hurried = false;
        self.running = Some(Running {
            started: Instant::now(),
            is_reported: false,
            done,
        });
        Ok(())
    }

    /// Takes the result of a scan; `None` if it has panicked.
    fn finish(&mut self, done: Option<Done>) -> Result<Listing, String> {
        self.running = None;
        self.ended = Instant::now();
        if !self.is_hurried {
            self.delay = (self.delay * 2).clamp(SETTLE, INTERVAL);
        }
        self.watch();
        let Some(Done { scan, result, work }) = done else {
            self.rested = self.ended + REOPEN;
            return Err("a scan has panicked".to_owned());
        };
        self.rested = self.ended + rest(work);
        self.scan = Some(scan);
        result
    }
}

/// Returns the time between a scan with this work and the next scan.
fn rest(work: Duration) -> Duration {
    work.saturating_mul(REST).min(MAX_REST)
}

/// Returns the work of a scan that took the time `took`, from the CPU times before and after.
fn work(took: Duration, before: Option<Duration>, after: Option<Duration>) -> Duration {
    let difference = before.zip(after);
    let difference = difference.map(|(before, after)| after.saturating_sub(before) + TICK);
    difference.map_or(took, |work| work.min(took))
}

/// Returns the CPU time of the calling thread (Documentation/scheduler/sched-stats.rst).
fn cpu_time() -> Option<Duration> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    let nanoseconds = text.split_whitespace().next()?.parse().ok()?;
    Some(Duration::from_nanos(nanoseconds))
}

/// Waits until a process has opened the device.
async fn opened(inotify: Option<&pipe::Receiver>) {
    let Some(inotify) = inotify else {
        return std::future::pending().await;
    };
    let _ = inotify.readable().await;
    let mut events = [0; 4096];
    for _ in 0..MAX_READS {
        if !inotify.try_read(&mut events).is_ok_and(|read| read > 0) {
            return;
        }
    }
}

/// Scans this host. Opens the kernel again if an earlier attempt has failed, or if the module was
/// loaded.
#[derive(Debug, Default)]
struct HostScan {
    module: Option<u64>,
    scanner: Option<Scanner>,
    /// The time and the reason of the last failure to open the kernel.
    failed: Option<(std::time::Instant, String)>,
}

impl HostScan {
    fn scan(&mut self) -> Result<Listing, String> {
        let module = module();
        if module != self.module {
            // The layout and the addresses are those of a module that was unloaded.
            *self = Self {
                module,
                ..Self::default()
            };
        }
        if let Some((at, why)) = &self.failed
            && at.elapsed() < REOPEN
        {
            return Err(why.clone());
        }
        let scanner = match &mut self.scanner {
            Some(scanner) => scanner,
            none => {
                let opened = HostKernel::open().map_err(|error| {
                    format!("the host's kernel cannot be read; it is tried again every {REOPEN:?}: {error}")
                });
                match opened {
                    Ok(kernel) => none.insert(Scanner::new(kernel)),
                    Err(why) => {
                        self.failed = Some((std::time::Instant::now(), why.clone()));
                        return Err(why);
                    }
                }
            }
        };
        self.failed = None;
        let listing = scanner.scan();
        listing.map_err(|error| format!("/proc cannot be read; mount it: {error}"))
    }
}

fn module() -> Option<u64> {
    use std::os::unix::fs::MetadataExt;
    Some(std::fs::metadata(MODULE).ok()?.ino())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn scans_are_frequent_after_an_event_only() {
        let mut scans = Scans::new(Box::new(|| Box::new(|| Ok(Listing::default()))));
        assert_eq!(scans.due(), scans.ended, "the first is due at once");
        for delay in [SETTLE, SETTLE * 2, SETTLE * 4] {
            scans.next().await.expect("a list");
            assert_eq!(scans.delay, delay);
            assert!(scans.due() >= scans.ended + delay);
        }
        scans.delay = INTERVAL;
        scans.hurry();
        assert_eq!(scans.delay, SETTLE);
        // A scan with much work is followed by a rest of bounded length.
        scans.rested = scans.ended + Duration::from_secs(9);
        assert_eq!(scans.due(), scans.rested);
        assert_eq!(rest(Duration::from_millis(100)), Duration::from_secs(2));
        assert_eq!(rest(Duration::from_secs(3600)), MAX_REST);
    }

    #[test]
    fn the_work_is_no_longer_on_a_busy_host() {
        let seconds = Duration::from_secs;
        let cpu = |time| Some(Duration::from_millis(time));
        let expected = Duration::from_millis(100) + TICK;
        assert_eq!(work(seconds(15), cpu(50), cpu(150)), expected);
        assert_eq!(work(TICK / 2, cpu(50), cpu(150)), TICK / 2);
        assert_eq!(work(seconds(15), None, cpu(150)), seconds(15));
        let before = cpu_time().expect("schedstat");
        // The optimiser cannot remove this loop, because it reads the clock.
        while cpu_time().is_some_and(|now| now <= before) {}
    }

    #[tokio::test]
    async fn nothing_waits_for_a_scan() {
        let (go, wait) = mpsc::channel::<()>();
        let wait = std::sync::Mutex::new(Some(wait));
        let mut scans = Scans::new(Box::new(move || {
            let wait = wait.lock().expect("no panic").take();
            Box::new(move || {
                if let Some(wait) = &wait {
                    let _ = wait.recv();
                }
                Ok(Listing::default())
            })
        }));
        let ended = |_| panic!("the scan has not ended");
        // Each call is dropped early, as a signal or another event would do.
        while scans.running.is_none() {
            let next = tokio::time::timeout(SETTLE, scans.next()).await;
            let _ = next.map(ended);
        }
        let next = tokio::time::timeout(SETTLE, scans.next()).await;
        let _ = next.map(ended);
        assert!(scans.running.is_some());
        go.send(()).expect("it waits");
        scans.next().await.expect("the result of the same scan");
    }

    #[tokio::test(start_paused = true)]
    async fn a_scan_that_panics_is_followed_by_others() {
        let (count, counted) = mpsc::channel();
        let mut scans = Scans::new(Box::new(move || {
            let count = count.clone();
            Box::new(move || {
                count.send(()).expect("the test waits");
                panic!("a test");
            })
        }));
        for _ in 0..2 {
            let why = scans.next().await.expect_err("a panic");
            assert!(why.contains("panicked"), "{why}");
            // No scan is due at once, which would keep a CPU busy.
            assert_eq!(scans.due(), scans.ended + REOPEN);
        }
        assert_eq!(counted.try_iter().count(), 2);
    }
}
