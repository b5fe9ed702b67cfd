// SPDX-License-Identifier: Apache-2.0
//! Starts attachers and keeps each running for as long as its target exists.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;

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
        let (is_failure, how) = if attacher.serves(&target) {
            tracing::info!(target = name, "it is attached already");
            while runs(&socket) {
                tokio::time::sleep(LOOK_INTERVAL).await;
            }
            (true, "it was no child".to_owned())
        } else {
            match attacher.spawn(&target, &socket) {
                Ok(mut child) => {
                    tracing::info!(target = name, pid = child.id(), "attaching");
                    said(attend(&mut child, &mut wanted).await)
                }
                Err(error) => {
                    let program = attacher.program.display();
                    (true, format!("{program} cannot be started: {error}"))
                }
            }
        };
        if wanted.borrow().ends {
            return;
        }
        ended.notify_one();
        // The guest may be gone, which the next scan notices.
        let delay = backoff.after(started.elapsed()).max(BACKOFF_FIRST);
        let next = format!("attacher ended; started again in {delay:?} if its guest is there");
        match is_failure {
            true => tracing::warn!(target = name, how, "{next}"),
            // It has ended with its guest.
            false => tracing::info!(target = name, how, "{next}"),
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

/// Returns whether an attacher failed, and a description of its end.
fn said(status: std::io::Result<ExitStatus>) -> (bool, String) {
    match status {
        Ok(status) => (!status.success(), status.to_string()),
        Err(error) => (true, error.to_string()),
    }
}
