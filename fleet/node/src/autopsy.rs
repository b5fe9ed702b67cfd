// SPDX-License-Identifier: Apache-2.0
//! Writes an autopsy of each guest whose kernel panics.
//!
//! ```text
//!  monitors ──DescribeGuest──▶ panicked? ──▶ `patchbay guest autopsy` ──stdout──▶ a file
//!                                                      │
//!                                     the daemon's own socket: policy, audit log
//! ```
//!
//! The program `patchbay` collects everything, through the socket of this daemon. The policy
//! decides about its calls, and the audit log records them, like those of any other client. Guests
//! and monitors choose the content of an autopsy. Its size, the memory of the program and its time
//! are therefore limited.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use patchbay_proto::text::{cut, printable};
use patchbay_proto::v1;
use patchbay_proto::v1::guest_service_client::GuestServiceClient;
use rustix::io::Errno;
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde::Deserialize;
use tokio::io::AsyncReadExt;
use tokio::process::Command;
use tokio::sync::{Mutex, OwnedMutexGuard};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, timeout};

use crate::metrics::Metrics;
use crate::monitors::{Directory, HostedGuest};

mod files;

/// The time between two looks at a guest. A guest that restarts sooner after its panic is missed.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// The time between two searches for the kernel of a guest.
const FIND_INTERVAL: Duration = Duration::from_secs(10);
/// The timeout for an answer about a guest. It includes the search for its kernel.
const PATIENCE: Duration = Duration::from_secs(5);
/// The maximum number of guests that are looked at at the same time.
const FAN_OUT: usize = 64;
/// The maximum number of attempts for a panic.
const ATTEMPTS: u32 = 3;
/// The minimum time between two attempts for a guest. A guest chooses how often it panics.
const ATTEMPT_INTERVAL: Duration = Duration::from_secs(5);
/// The timeout of the program, and of the folder.
const RUN_PATIENCE: Duration = Duration::from_secs(60);
/// The limit on the memory of the program, in bytes.
const MAX_MEMORY: u64 = 512 << 20;
/// The maximum number of bytes of the program's error message that are logged.
const MAX_ERROR_BYTES: usize = 2048;

/// The configuration of the autopsies.
#[derive(Clone, Debug)]
pub struct Autopsies {
    /// The folder of the files. It is created if it is missing.
    pub folder: PathBuf,
    /// The program `patchbay`.
    pub program: PathBuf,
}

/// The state of a guest.
#[derive(Clone, Copy, Debug, Default)]
struct Watched {
    /// A look at it has not ended.
    is_looked_at: bool,
    /// The start of the last look.
    looked: Option<Instant>,
    /// The time before which its kernel is not searched again.
    find_at: Option<Instant>,
    has_panicked: bool,
    /// The number of attempts for the present panic.
    attempts: u32,
    /// Nothing is left to do before another kernel boots.
    is_done: bool,
    /// The start of the last attempt, also for an earlier panic.
    attempted: Option<Instant>,
}

impl Watched {
    fn is_due(&self, now: Instant) -> bool {
        let has_rested = |attempted| now.duration_since(attempted) >= ATTEMPT_INTERVAL;
        self.has_panicked && !self.is_done && self.attempted.is_none_or(has_rested)
    }
}

/// Looks at all guests of the directory, and writes autopsies, until the future is dropped.
/// `socket` is the daemon's own socket.
pub async fn run(config: Autopsies, socket: PathBuf, directory: Directory, metrics: Metrics) {
    let mut watched: BTreeMap<String, Watched> = BTreeMap::new();
    // A monitor that does not answer delays the looks at its own guest alone.
    let mut looks = JoinSet::new();
    // One at a time, which bounds the memory for guests that panic together. A call that hangs on a
    // remote file system outlives its timeout and keeps the lock. The next autopsy waits for it.
    let one = Arc::new(Mutex::new(()));
    let mut writers: JoinSet<(String, Result<bool, String>)> = JoinSet::new();
    let mut ticks = tokio::time::interval(LOOK_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {
                let now = Instant::now();
                let mut guests = directory.all();
                // A monitor that connects again does not shorten the interval of the attempts.
                watched.retain(|name, state| {
                    guests.iter().any(|guest| guest.name == *name)
                        || state.attempted.is_some_and(|at| now - at < ATTEMPT_INTERVAL)
                });
                guests.sort_by_key(|guest| last_look(&watched, &guest.name));
                for guest in guests {
                    let state = watched.entry(guest.name.clone()).or_default();
                    if !state.is_looked_at && looks.len() < FAN_OUT {
                        state.is_looked_at = true;
                        state.looked = Some(now);
                        looks.spawn(look(guest, state.find_at.is_none_or(|at| at <= now)));
                    }
                }
            }
            Some(Ok((name, found))) = looks.join_next() => {
                let Some(state) = watched.get_mut(&name) else { continue };
                state.is_looked_at = false;
                match found {
                    Found::Nothing => {}
                    Found::NoKernel => state.find_at = Some(Instant::now() + FIND_INTERVAL),
                    Found::Runs => {
                        *state = Watched {
                            looked: state.looked,
                            attempted: state.attempted,
                            ..Watched::default()
                        };
                    }
                    Found::Panicked => state.has_panicked = true,
                }
            }
            Some(ended) = writers.join_next() => match ended {
                Ok((name, written)) => finish(&mut watched, &metrics, &name, written),
                Err(error) => {
                    tracing::error!(%error, "writing an autopsy panicked; report it, it is a bug");
                }
            },
        }
        let now = Instant::now();
        let due = watched.iter_mut().filter(|(_, state)| state.is_due(now));
        // No guest that panics often keeps the others waiting.
        let next = due.min_by_key(|(_, state)| state.attempted);
        if let Some((name, state)) = next
            && let Ok(only) = one.clone().try_lock_owned()
            && let Some(guest) = directory.find(name)
        {
            // `finish` clears this if the attempt fails and was not the last one.
            state.is_done = true;
            state.attempts += 1;
            state.attempted = Some(now);
            let is_last = state.attempts >= ATTEMPTS;
            let (config, socket) = (config.clone(), socket.clone());
            writers.spawn(async move {
                let written = write(&config, &socket, &guest.name, is_last, only).await;
                (guest.name, written)
            });
        }
    }
}

/// Returns the time of the last look at a guest. Looks begin with the oldest, so that each guest
/// has its turn.
fn last_look(watched: &BTreeMap<String, Watched>, guest: &str) -> Option<Instant> {
    watched.get(guest).and_then(|state| state.looked)
}

/// Takes the result of an attempt: true if a file was written.
fn finish(
    watched: &mut BTreeMap<String, Watched>,
    metrics: &Metrics,
    name: &str,
    written: Result<bool, String>,
) {
    match written {
        Ok(true) => metrics.autopsy(true),
        Ok(false) => {}
        Err(why) => {
            metrics.autopsy(false);
            tracing::error!(
                guest = name,
                why,
                "the autopsy of a panicked guest is not written"
            );
            if let Some(guest) = watched.get_mut(name) {
                guest.is_done = guest.attempts >= ATTEMPTS;
            }
        }
    }
}

/// The result of a look.
enum Found {
    /// The monitor does not answer, or does not tell.
    Nothing,
    /// The guest's kernel is not found.
    NoKernel,
    Runs,
    Panicked,
}

/// Asks the monitor of a guest directly. The daemon's limit on calls does not apply, because a
/// client that has used it up must not hide a panic.
async fn look(guest: HostedGuest, finds: bool) -> (String, Found) {
    let mut client = GuestServiceClient::new(guest.monitor.channel());
    let request = v1::DescribeGuestRequest {
        guest: guest.name.clone(),
        find_kernel_state: finds,
    };
    let found = match timeout(PATIENCE, client.describe_guest(request)).await {
        Ok(Ok(answer)) => match answer
            .into_inner()
            .kernel_state
            .and_then(|state| state.panicked)
        {
            Some(true) => Found::Panicked,
            Some(false) => Found::Runs,
            None => Found::Nothing,
        },
        // The call fails if the kernel is not found.
        _ if finds => Found::NoKernel,
        _ => Found::Nothing,
    };
    (guest.name, found)
}

/// Writes the autopsy of a guest, while no other one is written. Returns false if this panic has
/// one from an earlier run of the daemon, or if the guest has booted again.
async fn write(
    config: &Autopsies,
    socket: &Path,
    guest: &str,
    is_last: bool,
    only: OwnedMutexGuard<()>,
) -> Result<bool, String> {
    let content = collect(&config.program, socket, guest).await?;
    let found: Content = serde_json::from_slice(&content)
        .map_err(|error| format!("patchbay guest autopsy: {error}"))?;
    // The kernel prints the reason of a panic at this level. A guest may print other lines at it
    // before, but the first one differs from boot to boot.
    let records = &found.log.records;
    let first = records.iter().find(|record| record.level == "emerg");
    let panic = first.map(|record| (record.sequence, record.time_us));
    let has_reason = records
        .iter()
        .any(|record| record.text.starts_with("Kernel panic"));
    match found.guest.and_then(|guest| guest.details.panicked) {
        Some(true) => {}
        // The log is read first. The guest has ended or booted since.
        Some(false) | None if has_reason => {}
        Some(false) => {
            tracing::warn!(guest, "it has booted again before its autopsy was finished");
            return Ok(false);
        }
        None => return Err("the guest could not be read".to_owned()),
    }
    // An autopsy without a log is better than none.
    if let Some(why) = found.missing.get("log").filter(|_| !is_last) {
        return Err(format!("its log could not be read: {}", shown(why)));
    }
    let (folder, guest_name) = (config.folder.clone(), guest.to_owned());
    // The folder may hang if its file system is remote.
    let storing = tokio::task::spawn_blocking(move || {
        let _only = only;
        files::store(&folder, &guest_name, panic, &content)
    });
    let stored = timeout(RUN_PATIENCE, storing).await;
    let stored =
        stored.map_err(|_| format!("the folder does not answer within {RUN_PATIENCE:?}"))?;
    let stored = stored.map_err(|error| format!("{error}; report it, it is a bug"))??;
    if let Some(path) = &stored {
        tracing::warn!(
            guest,
            file = %path.display(),
            "the guest's kernel has panicked; its autopsy is written"
        );
    }
    Ok(stored.is_some())
}

/// The parts of an autopsy that this module reads.
#[derive(Deserialize)]
struct Content {
    guest: Option<ContentGuest>,
    log: ContentLog,
    missing: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct ContentGuest {
    details: ContentDetails,
}

#[derive(Deserialize)]
struct ContentDetails {
    panicked: Option<bool>,
}

#[derive(Deserialize)]
struct ContentLog {
    records: Vec<ContentRecord>,
}

#[derive(Deserialize)]
struct ContentRecord {
    sequence: u64,
    time_us: u64,
    level: String,
    text: String,
}

/// Runs the program and returns its output.
async fn collect(program: &Path, socket: &Path, guest: &str) -> Result<Vec<u8>, String> {
    let named = |error: std::io::Error| format!("{}: {error}", program.display());
    let mut child = Command::new(program)
        .arg("--socket")
        .arg(socket)
        // A name may begin with a hyphen.
        .arg(format!("--guest={guest}"))
        .args(["--output", "json", "guest", "autopsy"])
        .env_clear()
        .envs(std::env::var_os("PATH").map(|path| ("PATH", path)))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(named)?;
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok());
    let Some(pid) = pid.and_then(Pid::from_raw) else {
        return Err(format!("{} has no process id", program.display()));
    };
    let memory = Rlimit {
        current: Some(MAX_MEMORY),
        maximum: Some(MAX_MEMORY),
    };
    // A program that has ended already has told why.
    if let Err(error) = prlimit(Some(pid), Resource::Data, memory)
        && error != Errno::SRCH
    {
        return Err(named(error.into()));
    }
    // If memory runs out, this program is ended first. It may have ended already.
    let _ = std::fs::write(
        format!("/proc/{}/oom_score_adj", pid.as_raw_nonzero()),
        "1000",
    );
    let (Some(mut output), Some(mut errors)) = (child.stdout.take(), child.stderr.take()) else {
        return Err("the program has no pipes; report it, it is a bug".to_owned());
    };
    let run = async {
        let (mut content, mut said) = (vec![], vec![]);
        let mut limited = (&mut output).take(files::MAX_FILE_BYTES + 1);
        let mut message = (&mut errors).take(MAX_ERROR_BYTES as u64);
        let (read, read_errors) = tokio::join!(
            limited.read_to_end(&mut content),
            message.read_to_end(&mut said)
        );
        read.and(read_errors).map_err(named)?;
        if content.len() as u64 > files::MAX_FILE_BYTES {
            return Err(format!("it has more than {} bytes", files::MAX_FILE_BYTES));
        }
        // What the program says beyond the limit must not keep it from ending.
        drop(errors);
        let status = child.wait().await.map_err(named)?;
        finished(status, &said).map(|()| content)
    };
    let run = timeout(RUN_PATIENCE, run).await;
    run.map_err(|_| format!("{} does not end within {RUN_PATIENCE:?}", program.display()))?
}

fn finished(status: ExitStatus, said: &[u8]) -> Result<(), String> {
    if status.success() {
        return Ok(());
    }
    let said = shown(String::from_utf8_lossy(said).trim());
    Err(format!("patchbay guest autopsy: {status}: {said}"))
}

/// Returns the beginning of a text from outside, in one line.
fn shown(text: &str) -> String {
    cut(&printable(text), MAX_ERROR_BYTES).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_guest_has_its_turn() {
        let mut guests: Vec<String> = (0..3 * FAN_OUT).map(|guest| format!("{guest}")).collect();
        guests.sort();
        let mut watched: BTreeMap<String, Watched> = BTreeMap::new();
        let begin = Instant::now();
        for round in 0..3 {
            guests.sort_by_key(|guest| last_look(&watched, guest));
            for guest in &guests[..FAN_OUT] {
                let state = watched.entry(guest.clone()).or_default();
                state.looked = Some(begin + round * LOOK_INTERVAL);
            }
        }
        assert_eq!(watched.len(), guests.len());
    }
}
