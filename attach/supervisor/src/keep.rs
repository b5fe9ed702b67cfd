// SPDX-License-Identifier: Apache-2.0
//! Starts attachers and keeps each running for as long as its target exists.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use tokio::process::{Child, Command};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::MAX_TARGETS;
use crate::backoff::{BACKOFF_FIRST, Backoff, LOOK_INTERVAL, runs};
use crate::target::Target;

/// The option by which an attacher ends when its standard input does.
const UNTIL_EOF: &str = "--until-eof";

/// The settings that all attachers share.
#[derive(Clone, Debug)]
pub struct Attacher {
    /// The program.
    pub program: PathBuf,
    /// Further arguments.
    pub arguments: Vec<OsString>,
    /// The folder of the attachers' sockets.
    pub run_dir: PathBuf,
    /// Attachers outlive this process, and a later one finds them. Otherwise they end with this
    /// process, however it ends, and their sockets are named after their guests.
    pub outlives: bool,
}

impl Attacher {
    /// Returns the socket of a target's attacher.
    #[must_use]
    pub fn socket(&self, target: &Target) -> PathBuf {
        match self.outlives {
            true => target.lasting_socket(&self.run_dir),
            // `patchbay` looks for the guest of this name there.
            false => self.run_dir.join(format!("{}.sock", target.name())),
        }
    }

    /// Returns whether an attacher of an earlier process serves the target.
    #[must_use]
    pub fn serves(&self, target: &Target) -> bool {
        self.outlives && runs(&self.socket(target))
    }

    fn spawn(&self, target: &Target, socket: &Path) -> std::io::Result<Child> {
        let mut shared = self.arguments.clone();
        let input = match self.outlives {
            true => Stdio::null(),
            false => {
                shared.push(UNTIL_EOF.into());
                // The pipe also ends when this process is killed.
                Stdio::piped()
            }
        };
        Command::new(&self.program)
            .args(target.arguments(socket, &shared))
            .stdin(input)
            // In its own process group, the child does not get the signals that the terminal sends
            // to this process.
            .process_group(0)
            .spawn()
    }
}

/// The targets, or the end of this supervisor.
#[derive(Clone, Debug, Default)]
struct Wanted {
    targets: BTreeSet<Target>,
    ends: bool,
}

/// Keeps the attachers of a set of targets.
#[derive(Debug)]
pub struct Supervisor {
    attacher: Attacher,
    wanted: watch::Sender<Wanted>,
    tasks: BTreeMap<Target, JoinHandle<()>>,
    /// Notified when an attacher has ended.
    ended: Arc<Notify>,
}

impl Supervisor {
    /// Makes a supervisor without targets.
    #[must_use]
    pub fn new(attacher: Attacher) -> Self {
        Self {
            attacher,
            wanted: watch::Sender::default(),
            tasks: BTreeMap::new(),
            ended: Arc::default(),
        }
    }

    /// Attaches to the targets that are new. The attacher of a target that is gone is not started
    /// again.
    pub fn set(&mut self, found: BTreeSet<Target>) {
        if found.len() > MAX_TARGETS {
            tracing::error!(
                "{} guests are found; only {MAX_TARGETS} are attached",
                found.len()
            );
        }
        let targets: BTreeSet<Target> = found.into_iter().take(MAX_TARGETS).collect();
        self.wanted
            .send_modify(|wanted| wanted.targets = targets.clone());
        self.tasks.retain(|_, task| !task.is_finished());
        for target in targets {
            self.tasks.entry(target.clone()).or_insert_with(|| {
                let wanted = self.wanted.subscribe();
                let ended = Arc::clone(&self.ended);
                tokio::spawn(keep(target, self.attacher.clone(), ended, wanted))
            });
        }
    }

    /// Waits until an attacher has ended. Its guest may have ended.
    pub async fn attacher_ended(&self) {
        self.ended.notified().await;
    }

    /// Ends all attachers that do not outlive this process, and waits until they have ended.
    pub async fn end(self) {
        self.wanted.send_modify(|wanted| wanted.ends = true);
        for task in self.tasks.into_values() {
            // A task that panicked has lost its child, whose standard input has ended.
            let _ = task.await;
        }
    }
}

/// Keeps an attacher running for as long as its target exists.
async fn keep(
    target: Target,
    attacher: Attacher,
    ended: Arc<Notify>,
    mut wanted: watch::Receiver<Wanted>,
) {
    let (name, socket) = (target.name(), attacher.socket(&target));
    let mut backoff = Backoff::default();
    loop {
        let started = Instant::now();
        let (how, end) = if attacher.serves(&target) {
            tracing::info!(target = name, "it is attached already");
            while runs(&socket) {
                tokio::time::sleep(LOOK_INTERVAL).await;
            }
            ("it was no child".to_owned(), End::Died)
        } else {
            match attacher.spawn(&target, &socket) {
                Ok(mut child) => {
                    tracing::info!(target = name, pid = child.id(), "attaching");
                    said(attend(&mut child, &mut wanted).await)
                }
                Err(error) => {
                    let program = attacher.program.display();
                    let how = format!("{program} cannot be started: {error}");
                    (how, End::Refused)
                }
            }
        };
        if wanted.borrow().ends {
            return;
        }
        ended.notify_one();
        let delay = delay(&mut backoff, end, started.elapsed());
        let when = match delay.is_zero() {
            true => "at once".to_owned(),
            false => format!("in {delay:?}"),
        };
        let next = format!("attacher ended; started again {when} if its guest is there");
        match end {
            End::LostGuest => tracing::info!(target = name, how, "{next}"),
            End::Refused | End::Died => tracing::warn!(target = name, how, "{next}"),
        }
        let left = wanted.wait_for(|wanted| wanted.ends || !wanted.targets.contains(&target));
        if tokio::time::timeout(delay, left).await.is_ok() {
            return tracing::info!(target = name, "the guest is gone");
        }
    }
}

/// Waits for the end of an attacher. Ends it if this supervisor ends.
async fn attend(
    child: &mut Child,
    wanted: &mut watch::Receiver<Wanted>,
) -> std::io::Result<ExitStatus> {
    // To wait for a child closes its standard input.
    let input = child.stdin.take();
    tokio::select! {
        status = child.wait() => return status,
        _ = wanted.wait_for(|wanted| wanted.ends) => {}
    }
    drop(input);
    child.wait().await
}

/// The end of an attacher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// It has lost its guest, which the next scan notices.
    LostGuest,
    /// It was refused, or has lost its connection.
    Refused,
    /// It was killed, or has panicked.
    Died,
}

/// Returns the delay before an attacher is started again that ran for the time `ran`. One that died
/// is started at once unless it dies again and again, because until then nobody releases the holds
/// that expire. So is one that had served its guest for some time.
fn delay(backoff: &mut Backoff, end: End, ran: Duration) -> Duration {
    let is_fresh = backoff.is_fresh();
    let delay = backoff.after(ran);
    match end {
        End::Died if is_fresh => Duration::ZERO,
        End::Died | End::Refused if delay.is_zero() => delay,
        _ => delay.max(BACKOFF_FIRST),
    }
}

/// Returns how a child ended.
fn said(status: std::io::Result<ExitStatus>) -> (String, End) {
    /// The exit code of a Rust program whose main thread panics.
    const PANICKED: i32 = 101;
    match status {
        Ok(status) => {
            let end = match status.code() {
                Some(0) => End::LostGuest,
                None | Some(PANICKED) => End::Died,
                Some(_) => End::Refused,
            };
            (status.to_string(), end)
        }
        Err(error) => (error.to_string(), End::Died),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attacher_that_died_is_started_again_at_once_unless_it_dies_again() {
        let seconds = Duration::from_secs;
        let mut backoff = Backoff::default();
        let mut delays = |end, ran| delay(&mut backoff, end, ran);
        assert_eq!(delays(End::Died, seconds(5)), Duration::ZERO);
        assert_eq!(delays(End::Died, seconds(1)), seconds(2));
        assert_eq!(delays(End::Refused, seconds(1)), seconds(4));
        for end in [End::Died, End::Refused] {
            assert_eq!(delays(end, seconds(3600)), Duration::ZERO);
        }
        assert_eq!(delays(End::LostGuest, seconds(3600)), BACKOFF_FIRST);
        for end in [End::LostGuest, End::Refused] {
            let first = delay(&mut Backoff::default(), end, seconds(1));
            assert_eq!(first, BACKOFF_FIRST, "{end:?}");
        }
    }

    #[test]
    fn a_child_that_is_killed_or_panics_has_died() {
        use std::os::unix::process::ExitStatusExt;
        let end = |status| said(Ok(ExitStatus::from_raw(status))).1;
        assert_eq!(end(0), End::LostGuest);
        assert_eq!(end(1 << 8), End::Refused);
        assert_eq!((end(9), end(101 << 8)), (End::Died, End::Died));
    }
}
