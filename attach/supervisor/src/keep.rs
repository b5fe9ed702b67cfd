// SPDX-License-Identifier: Apache-2.0
//! Starts attachers, and keeps one running for each target for as long as the target exists.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::backoff::{BACKOFF_FIRST, Backoff, LOOK_INTERVAL, runs};
use crate::places::Places;
use crate::queue::Queue;
use crate::target::Target;
use crate::vms::Earlier;
use crate::{MAX_TARGETS, SETTLE};

/// The option by which an attacher ends when its standard input does.
const UNTIL_EOF: &str = "--until-eof";
/// An attacher is taken as started after this time, even if its socket is not there.
const START_PATIENCE: Duration = Duration::from_secs(30);
/// The interval of checks whether the socket of a starting attacher exists.
const START_INTERVAL: Duration = Duration::from_millis(50);

/// The settings that all attachers share.
#[derive(Clone, Debug)]
pub struct Attacher {
    /// The program.
    pub program: PathBuf,
    /// Further arguments.
    pub arguments: Vec<OsString>,
    /// The folder of the attachers' sockets.
    pub run_dir: PathBuf,
    /// If true, sockets are named after their guests, so that `patchbay` finds them. If false,
    /// `patchbayd` can tell by their names which guests were found by their processes.
    pub names_sockets: bool,
    /// If true, attachers outlive this process, and a later one finds them. If false, attachers end
    /// with this process, however it ends.
    pub outlives: bool,
}

/// The environment variable by which glibc's allocator is set.
const TUNABLES: &str = "GLIBC_TUNABLES";
/// Makes the allocator return what a discovery has freed, which is several times what is kept of
/// it. By default, the allocator keeps more for each thread after larger buffers were freed.
const SMALL_HEAP: &str = "glibc.malloc.mmap_threshold=131072:glibc.malloc.arena_max=1";

impl Attacher {
    /// Returns the socket of a target's attacher.
    #[must_use]
    pub fn socket(&self, target: &Target) -> PathBuf {
        match self.names_sockets {
            true => self.run_dir.join(format!("{}.sock", target.name())),
            false => target.lasting_socket(&self.run_dir),
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
        let tunables = std::env::var_os(TUNABLES);
        Command::new(&self.program)
            .args(target.arguments(socket, &shared))
            .env(TUNABLES, tunables.unwrap_or_else(|| SMALL_HEAP.into()))
            .stdin(input)
            // In its own process group, the child does not get the signals that the terminal sends
            // to this process.
            .process_group(0)
            .spawn()
    }
}

/// The targets, and the requests to the tasks of all of them.
#[derive(Clone, Debug, Default)]
struct Wanted {
    targets: BTreeSet<Target>,
    /// The number of times that SIGHUP was to be sent.
    hangups: u64,
    ends: bool,
}

/// Keeps the attachers of a set of targets.
#[derive(Debug)]
pub struct Supervisor {
    shared: Arc<Shared>,
    wanted: watch::Sender<Wanted>,
    tasks: BTreeMap<Target, JoinHandle<()>>,
    has_reported_most: bool,
}

/// The ends of attachers.
#[derive(Debug, Default)]
struct Ended {
    /// Notified when an attacher has ended.
    notify: Notify,
    /// True if the attacher of a domain has ended since the last query.
    is_domain: AtomicBool,
}

impl Supervisor {
    /// Creates a supervisor without targets.
    #[must_use]
    pub fn new(attacher: Attacher) -> Self {
        Self {
            shared: Arc::new(Shared {
                attacher,
                ended: Ended::default(),
                starting: Queue::default(),
            }),
            wanted: watch::Sender::default(),
            tasks: BTreeMap::new(),
            has_reported_most: false,
        }
    }

    /// Attaches to every guest that is found, until the future is dropped. See `Places::search`
    /// for `is_free` and `earlier`.
    pub async fn run(
        &mut self,
        places: &mut Places,
        is_free: impl Fn(&Target) -> bool,
        earlier: impl Fn(&Target) -> Earlier,
    ) {
        loop {
            self.set(places.search(&is_free, &earlier));
            tokio::select! {
                () = places.changed() => {}
                is_domain = self.attacher_ended() => places.hurry(is_domain),
            }
            // The delay bounds the work, even if a process writes to a folder all the time.
            tokio::time::sleep(SETTLE).await;
        }
    }

    /// Attaches to new targets. The attacher of a target that is gone is not started again.
    pub(crate) fn set(&mut self, found: BTreeSet<Target>) {
        let has_more = found.len() > MAX_TARGETS;
        if has_more && !self.has_reported_most {
            tracing::error!(
                "{} guests are found; only {MAX_TARGETS} are attached",
                found.len()
            );
        }
        self.has_reported_most = has_more;
        // The targets that were found by their processes are the last ones in this order.
        let targets: BTreeSet<Target> = found.into_iter().take(MAX_TARGETS).collect();
        self.wanted.send_if_modified(|wanted| {
            let is_new = wanted.targets != targets;
            if is_new {
                wanted.targets.clone_from(&targets);
            }
            is_new
        });
        self.tasks.retain(|_, task| !task.is_finished());
        for target in targets {
            self.tasks.entry(target.clone()).or_insert_with(|| {
                let wanted = self.wanted.subscribe();
                tokio::spawn(keep(target, Arc::clone(&self.shared), wanted))
            });
        }
    }

    /// Waits until an attacher has ended, perhaps because its guest has ended. Returns whether it
    /// was the attacher of a domain of libvirt.
    pub(crate) async fn attacher_ended(&self) -> bool {
        self.shared.ended.notify.notified().await;
        self.shared.ended.is_domain.swap(false, Ordering::Relaxed)
    }

    /// Sends SIGHUP to each attacher, which then opens its audit log again.
    pub fn hang_up(&self) {
        self.wanted.send_modify(|wanted| wanted.hangups += 1);
    }

    /// Ends all attachers that do not outlive this process, and waits until they have ended.
    pub async fn end(self) {
        self.wanted.send_modify(|wanted| wanted.ends = true);
        for task in self.tasks.into_values() {
            // If a task has panicked, its child is lost, but the child's standard input has ended.
            let _ = task.await;
        }
    }
}

/// The state that the tasks of all targets share.
#[derive(Debug)]
struct Shared {
    attacher: Attacher,
    ended: Ended,
    starting: Queue,
}

/// Keeps an attacher running for as long as its target exists.
async fn keep(target: Target, shared: Arc<Shared>, mut wanted: watch::Receiver<Wanted>) {
    let attacher = &shared.attacher;
    let (name, socket) = (target.name(), attacher.socket(&target));
    let gone = |wanted: &Wanted| wanted.ends || !wanted.targets.contains(&target);
    let mut backoff = Backoff::default();
    loop {
        let mut started = Instant::now();
        let (how, end) = if attacher.outlives && runs(&socket) {
            tracing::info!(target = name, "it is attached already");
            while runs(&socket) {
                tokio::time::sleep(LOOK_INTERVAL).await;
            }
            ("it was no child".to_owned(), End::Died)
        } else {
            let mut permit = None;
            if let Target::Process { stranger, .. } = target {
                tokio::select! {
                    free = shared.starting.turn(stranger) => permit = Some(free),
                    _ = wanted.wait_for(gone) => return tracing::info!(target = name, "the guest is gone"),
                }
                started = Instant::now();
            }
            match attacher.spawn(&target, &socket) {
                Ok(mut child) => {
                    tracing::info!(target = name, pid = child.id(), "attaching");
                    let mut attended = std::pin::pin!(attend(&mut child, &socket, &mut wanted));
                    let status = tokio::select! {
                        status = &mut attended => status,
                        () = has_started(&socket), if permit.is_some() => {
                            drop(permit.take());
                            attended.await
                        }
                    };
                    said(status)
                }
                Err(error) => {
                    let program = attacher.program.display();
                    let how = format!("{program} cannot be started: {error}");
                    (how, End::Unstartable)
                }
            }
        };
        if wanted.borrow().ends {
            return;
        }
        // Without a start, nothing has become known about the guest.
        if end != End::Unstartable {
            let is_domain = matches!(target, Target::Domain { .. });
            shared
                .ended
                .is_domain
                .fetch_or(is_domain, Ordering::Relaxed);
            shared.ended.notify.notify_one();
        }
        let delay = delay(&mut backoff, end, started.elapsed());
        let when = match delay.is_zero() {
            true => "at once".to_owned(),
            false => format!("in {delay:?}"),
        };
        let next = format!("attacher ended; started again {when} if its guest is there");
        match end {
            End::LostGuest => tracing::info!(target = name, how, "{next}"),
            End::Refused | End::Unstartable | End::Died => {
                tracing::warn!(target = name, how, "{next}");
            }
        }
        if tokio::time::timeout(delay, wanted.wait_for(gone))
            .await
            .is_ok()
        {
            return tracing::info!(target = name, "the guest is gone");
        }
    }
}

/// Waits until an attacher serves its socket, or has had enough time for it. An attacher that was
/// killed has left a socket that nobody serves.
async fn has_started(socket: &Path) {
    let _ = tokio::time::timeout(START_PATIENCE, is_served(socket)).await;
}

async fn is_served(socket: &Path) {
    while !runs(socket) {
        tokio::time::sleep(START_INTERVAL).await;
    }
}

/// Waits for the end of an attacher, and forwards SIGHUP to it. Ends it if this supervisor ends.
async fn attend(
    child: &mut Child,
    socket: &Path,
    wanted: &mut watch::Receiver<Wanted>,
) -> std::io::Result<ExitStatus> {
    // Waiting for a child would close its standard input.
    let input = child.stdin.take();
    let pid = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
    let mut forwarder = wanted.clone();
    tokio::select! {
        status = child.wait() => return status,
        never = forward(pid, socket, &mut forwarder) => match never {},
        _ = wanted.wait_for(|wanted| wanted.ends) => {}
    }
    drop(input);
    child.wait().await
}

/// Forwards each SIGHUP to a child that has not been waited for, so its number is no other
/// process's. Does not return.
async fn forward(
    child: Option<Pid>,
    socket: &Path,
    wanted: &mut watch::Receiver<Wanted>,
) -> Infallible {
    let mut sent = wanted.borrow().hangups;
    loop {
        let more = wanted.wait_for(|wanted| wanted.hangups != sent).await;
        let hangups = more.map(|wanted| wanted.hangups);
        let (Ok(hangups), Some(child)) = (hangups, child) else {
            return std::future::pending().await;
        };
        sent = hangups;
        // While an attacher starts, the signal would end it.
        is_served(socket).await;
        if let Err(error) = kill_process(child, Signal::HUP) {
            tracing::warn!(pid = child.as_raw_nonzero(), %error, "SIGHUP cannot be sent");
        }
    }
}

/// The end of an attacher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The attacher has lost its guest. The next scan notices this.
    LostGuest,
    /// The attacher was refused, or has lost its connection.
    Refused,
    /// The attacher's program cannot be started.
    Unstartable,
    /// The attacher was killed or has panicked.
    Died,
}

/// Returns the delay before the restart of an attacher that ran for the time `ran`. An attacher
/// that died is restarted at once unless it dies again and again, because no process ends expired
/// holds until then. An attacher that had served its guest for some time is restarted at once too.
fn delay(backoff: &mut Backoff, end: End, ran: Duration) -> Duration {
    let is_fresh = backoff.is_fresh();
    let delay = backoff.after(ran);
    match end {
        End::Died if is_fresh => Duration::ZERO,
        End::LostGuest => delay.max(BACKOFF_FIRST),
        End::Died | End::Refused | End::Unstartable => delay,
    }
}

/// Returns a description of how a child ended, and its kind.
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
    use crate::queue::MAX_STARTING;

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

    fn process(pid: u32) -> Target {
        Target::Process {
            pid,
            started: 1,
            name: format!("kvm:0:{pid}"),
            stranger: None,
        }
    }

    /// Makes a supervisor of attachers that are a script, which has the number of its process's
    /// guest as `$2`.
    fn supervisor(folder: &Path, script: &str) -> Supervisor {
        use std::os::unix::fs::PermissionsExt;
        let program = folder.join("attacher");
        let script = format!(
            "#!/bin/sh\n: >>{0}/started.$2\n{script}\n",
            folder.display()
        );
        std::fs::write(&program, script).expect("room");
        let executable = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(&program, executable).expect("own file");
        Supervisor::new(Attacher {
            program,
            arguments: Vec::new(),
            run_dir: folder.to_owned(),
            names_sockets: true,
            outlives: false,
        })
    }

    fn count(folder: &Path, part: &str) -> usize {
        let files = std::fs::read_dir(folder).expect("there").flatten();
        let names = files.map(|file| file.file_name().to_string_lossy().into_owned());
        names.filter(|name| name.contains(part)).count()
    }

    async fn until(mut holds: impl FnMut() -> bool) {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    #[tokio::test]
    async fn few_attachers_start_at_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path();
        let socket = |pid: u32| path.join(process(pid).name() + ".sock");
        let bind = |pid| std::os::unix::net::UnixListener::bind(socket(pid)).expect("free");
        let all = u32::try_from(MAX_STARTING).expect("small") + 2;
        // An earlier attacher of each was killed, and has left its socket.
        (1..=all).for_each(|pid| drop(bind(pid)));
        let mut supervisor = supervisor(path, "read -r _");
        supervisor.set((1..=all).map(process).collect());
        until(|| count(path, "started.") == MAX_STARTING).await;
        tokio::time::sleep(2 * START_INTERVAL).await;
        // The remaining attachers start only after another one has finished its start.
        let started = |pid: &u32| path.join(format!("started.{pid}")).exists();
        let mut served: BTreeMap<u32, _> = BTreeMap::new();
        for more in 1..=2 {
            assert_eq!(count(path, "started."), MAX_STARTING + more - 1);
            let pid = (1..=all).find(|pid| started(pid) && !served.contains_key(pid));
            let pid = pid.expect("one waits");
            std::fs::remove_file(socket(pid)).expect("own file");
            served.insert(pid, bind(pid));
            until(|| count(path, "started.") == MAX_STARTING + more).await;
        }
        supervisor.end().await;
    }

    #[tokio::test]
    async fn an_attacher_returns_what_a_discovery_has_freed() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path();
        let script = format!(
            "echo $GLIBC_TUNABLES >{0}/new; mv {0}/new {0}/tunables; read -r _",
            path.display()
        );
        let mut supervisor = supervisor(path, &script);
        supervisor.set(BTreeSet::from([process(1)]));
        until(|| path.join("tunables").exists()).await;
        let tunables = std::fs::read_to_string(path.join("tunables")).expect("it is there");
        // The tests may run with settings of their own.
        let own = std::env::var(TUNABLES).unwrap_or_else(|_| SMALL_HEAP.to_owned());
        assert_eq!(tunables.trim_end(), own);
        supervisor.end().await;
    }

    #[tokio::test]
    async fn an_attacher_gets_a_sighup_once_it_serves_its_socket() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path();
        // The shell runs a trap only between commands and while it waits for a child. It cannot
        // trap a signal that was ignored when it started, as under nohup.
        let script = format!(
            "cd {}; exec env --default-signal=HUP sh -c '
            exec 3<&0; while [ ! -e go ]; do sleep 0.01; done
            trap \": >hung\" HUP; : >ready; cat <&3 & wait $!; wait $!'",
            path.display()
        );
        let mut supervisor = supervisor(path, &script);
        supervisor.set(BTreeSet::from([process(1)]));
        until(|| path.join("started.1").exists()).await;
        supervisor.hang_up();
        // Until the trap is set, the signal would end the shell, and the next one gets none.
        std::fs::write(path.join("go"), "").expect("room");
        until(|| path.join("ready").exists()).await;
        let socket = path.join(process(1).name() + ".sock");
        let _listener = std::os::unix::net::UnixListener::bind(socket).expect("free");
        until(|| path.join("hung").exists()).await;
        supervisor.end().await;
    }

    /// Each end of a domain's attacher causes a new list of libvirt's domains.
    #[tokio::test]
    async fn the_end_of_an_attacher_tells_whether_it_was_a_domains() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut supervisor = supervisor(folder.path(), "exit 0");
        supervisor.set(BTreeSet::from([process(1)]));
        assert!(!supervisor.attacher_ended().await);
        let domain = Target::Domain {
            uri: "u".to_owned(),
            name: "web".to_owned(),
        };
        supervisor.set(BTreeSet::from([domain]));
        while !supervisor.attacher_ended().await {}
        supervisor.end().await;
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
