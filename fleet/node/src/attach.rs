// SPDX-License-Identifier: Apache-2.0
//! Discovers guests of other monitors. `patchbay-attach` serves each of them, with its socket in
//! the run directory.
//!
//! ```text
//!  folders of QMP sockets ──inotify──▶ targets ──▶ one task per target ──▶ patchbay-attach
//!  virsh list, in intervals ─────────▶    │                │
//!                                         └── gone: the task ends with its attacher
//! ```
//!
//! An attacher ends when its guest ends. It keeps running when this process ends, because it keeps
//! the holds of its clients, and a new process finds it by its socket. One that dies leaves its
//! holds and claims in a file beside its socket, from which the next one continues.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use sha2::{Digest, Sha256};
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::guests::{BACKOFF_FIRST, Backoff, LOOK_INTERVAL, runs};
use crate::monitors::{MAX_MONITORS, RunDirs, SETTLE, Watch};

/// The interval at which libvirt is asked for its domains.
const LIST_INTERVAL: Duration = Duration::from_secs(5);
/// Timeout for an answer of libvirt.
const LIST_PATIENCE: Duration = Duration::from_secs(10);

/// The places that are searched for guests.
#[derive(Clone, Debug, Default)]
pub struct Attach {
    /// Folders whose sockets are QMP sockets.
    pub qmp: Vec<PathBuf>,
    /// The URI of a libvirt daemon on this host.
    pub libvirt: Option<String>,
    /// The attacher program; by default the one next to this program.
    pub program: Option<PathBuf>,
    /// A debug file of the guests' kernel, or a folder with the files of many kernels.
    pub debug_file: Option<PathBuf>,
}

/// A guest to attach to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Target {
    /// A QMP socket. The inode distinguishes it from a socket that replaced it.
    Qmp { path: PathBuf, inode: u64 },
    /// A domain of libvirt.
    Domain { uri: String, name: String },
}

impl Target {
    /// Returns the name of the target for log messages.
    fn name(&self) -> String {
        match self {
            Self::Qmp { path, .. } => path.display().to_string(),
            Self::Domain { name, .. } => name.clone(),
        }
    }

    /// Returns the attacher's socket. It is the same after a restart of the daemon.
    fn socket(&self, run_dir: &Path) -> PathBuf {
        let mut hash = Sha256::new();
        match self {
            Self::Qmp { path, .. } => hash.update(path.as_os_str().as_encoded_bytes()),
            Self::Domain { uri, name } => hash.update(format!("{uri}\0{name}")),
        }
        let hash = hash.finalize();
        let digits: String = hash
            .iter()
            .take(8)
            .map(|byte| format!("{byte:02x}"))
            .collect();
        run_dir.join(format!("attached-{digits}.sock"))
    }

    fn arguments(&self, socket: &Path, debug_file: Option<&Path>) -> Vec<OsString> {
        let words: Vec<OsString> = match self {
            Self::Qmp { path, .. } => vec!["qemu".into(), "--qmp".into(), path.into()],
            Self::Domain { uri, .. } => vec!["libvirt".into(), "--connect".into(), uri.into()],
        };
        let api = ["--api-socket".into(), socket.into()];
        let debug = debug_file.map(|path| ["--debug-file".into(), path.into()]);
        let domain = match self {
            Self::Qmp { .. } => vec![],
            // The domain's name may begin with a dash.
            Self::Domain { name, .. } => vec!["--".into(), name.into()],
        };
        words
            .into_iter()
            .chain(api)
            .chain(debug.into_iter().flatten())
            .chain(domain)
            .collect()
    }
}

/// Attaches to every guest that is discovered, until the future is dropped.
pub async fn run(attach: Attach, run_dir: PathBuf) {
    if let Err(error) = std::fs::create_dir_all(&run_dir) {
        let folder = run_dir.display();
        return tracing::error!("the folder {folder} cannot be made: {error}; nothing is attached");
    }
    for folder in attach.qmp.iter().filter(|folder| !folder.is_dir()) {
        let folder = folder.display();
        tracing::warn!("there is no folder {folder} of QMP sockets; it is used once it is there");
    }
    let attacher = Attacher {
        program: attach.program.unwrap_or_else(default_program),
        debug_file: attach.debug_file,
    };
    let (targets, watched) = watch::channel(BTreeSet::new());
    let mut sockets = (!attach.qmp.is_empty()).then(|| Watch::new(RunDirs(attach.qmp)));
    let mut domains = BTreeSet::new();
    let mut listed: Option<Instant> = None;
    let mut tasks: BTreeMap<Target, tokio::task::JoinHandle<()>> = BTreeMap::new();
    loop {
        let mut found = match &mut sockets {
            Some(sockets) => sockets.sockets().into_iter().filter_map(qmp).collect(),
            None => BTreeSet::new(),
        };
        if let Some(uri) = &attach.libvirt
            && listed.is_none_or(|at| at.elapsed() >= LIST_INTERVAL)
        {
            match list(uri).await {
                Ok(now) => domains = now,
                Err(why) => tracing::warn!(uri, why, "libvirt's domains are not known"),
            }
            listed = Some(Instant::now());
        }
        found.extend(domains.iter().cloned());
        if found.len() > MAX_MONITORS {
            tracing::error!(
                "{} guests are found; only {MAX_MONITORS} are attached",
                found.len()
            );
        }
        let found: BTreeSet<Target> = found.into_iter().take(MAX_MONITORS).collect();
        targets.send_replace(found.clone());
        tasks.retain(|_, task| !task.is_finished());
        for target in found {
            tasks.entry(target.clone()).or_insert_with(|| {
                let kept = keep(target, attacher.clone(), run_dir.clone(), watched.clone());
                tokio::spawn(kept)
            });
        }
        match &sockets {
            Some(sockets) if attach.libvirt.is_none() => sockets.changed().await,
            Some(sockets) => {
                // A timeout is not an error. It means that libvirt is to be asked again.
                let _ = tokio::time::timeout(LIST_INTERVAL, sockets.changed()).await;
            }
            None => tokio::time::sleep(LIST_INTERVAL).await,
        }
        // The delay bounds the work, even if a process writes to a folder all the time.
        tokio::time::sleep(SETTLE).await;
    }
}

fn qmp(path: PathBuf) -> Option<Target> {
    let inode = std::fs::symlink_metadata(&path).ok()?.ino();
    Some(Target::Qmp { path, inode })
}

/// Returns the attacher next to this program, or else the one in PATH.
fn default_program() -> PathBuf {
    const NAME: &str = "patchbay-attach";
    let own = std::env::current_exe().ok();
    let beside = own.and_then(|own| Some(own.parent()?.join(NAME)));
    beside
        .filter(|path| path.is_file())
        .unwrap_or_else(|| PathBuf::from(NAME))
}

/// Returns the running domains.
async fn list(uri: &str) -> Result<BTreeSet<Target>, String> {
    let output = Command::new("virsh")
        .args(["--connect", uri, "list", "--name"])
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = match tokio::time::timeout(LIST_PATIENCE, output).await {
        Err(_) => return Err(format!("virsh does not answer within {LIST_PATIENCE:?}")),
        Ok(Err(error)) => {
            return Err(format!(
                "virsh cannot be started ({error}); install libvirt-clients"
            ));
        }
        Ok(Ok(output)) => output,
    };
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("virsh says {:?}", said.trim()));
    }
    Ok(domains(uri, &String::from_utf8_lossy(&output.stdout)))
}

fn domains(uri: &str, text: &str) -> BTreeSet<Target> {
    let names = text.lines().map(str::trim).filter(|name| !name.is_empty());
    names
        .map(|name| Target::Domain {
            uri: uri.to_owned(),
            name: name.to_owned(),
        })
        .collect()
}

/// Keeps an attacher running for as long as its target exists.
async fn keep(
    target: Target,
    attacher: Attacher,
    run_dir: PathBuf,
    mut targets: watch::Receiver<BTreeSet<Target>>,
) {
    let (name, socket) = (target.name(), target.socket(&run_dir));
    let mut backoff = Backoff::default();
    loop {
        let started = Instant::now();
        let (how, end) = if runs(&socket) {
            tracing::info!(target = name, "it is attached already");
            while runs(&socket) {
                tokio::time::sleep(LOOK_INTERVAL).await;
            }
            ("it was no child".to_owned(), End::Died)
        } else {
            match attacher.spawn(&target, &socket) {
                Ok(mut child) => {
                    tracing::info!(target = name, pid = child.id(), "attaching");
                    said(child.wait().await)
                }
                Err(error) => {
                    let program = attacher.program.display();
                    (
                        format!("{program} cannot be started: {error}"),
                        End::Refused,
                    )
                }
            }
        };
        let delay = delay(&mut backoff, end, started.elapsed());
        let when = match delay.is_zero() {
            true => "at once".to_owned(),
            false => format!("in {delay:?}"),
        };
        tracing::warn!(
            target = name,
            how,
            "attacher ended; started again {when} if its guest is there"
        );
        let left = targets.wait_for(|targets| !targets.contains(&target));
        if tokio::time::timeout(delay, left).await.is_ok() {
            return tracing::info!(target = name, "the guest is gone");
        }
    }
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

/// The settings that all targets share.
#[derive(Clone)]
struct Attacher {
    program: PathBuf,
    debug_file: Option<PathBuf>,
}

impl Attacher {
    fn spawn(&self, target: &Target, socket: &Path) -> std::io::Result<Child> {
        Command::new(&self.program)
            .args(target.arguments(socket, self.debug_file.as_deref()))
            .stdin(Stdio::null())
            // In its own process group, the child does not get the signals that the terminal sends
            // to this process.
            .process_group(0)
            .spawn()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn domains_are_named_by_lines() {
        let names = |text| {
            let found = domains("u", text).into_iter();
            found.map(|target| target.name()).collect::<Vec<_>>()
        };
        assert_eq!(names("web-1\n  db 2 \n\n"), ["db 2", "web-1"]);
        assert!(names("\n\n").is_empty());
    }

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

    #[test]
    fn a_domain_is_no_option() {
        let target = Target::Domain {
            uri: "qemu:///system".to_owned(),
            name: "--pause".to_owned(),
        };
        let socket = target.socket(Path::new("/run/p"));
        let words = target.arguments(&socket, Some(Path::new("/d")));
        let last = ["--debug-file", "/d", "--", "--pause"];
        assert_eq!(words[words.len() - 4..], last);
        assert_eq!(words[..3], ["libvirt", "--connect", "qemu:///system"]);
        // The socket must differ from the socket of another target.
        let other = Target::Qmp {
            path: "--pause".into(),
            inode: 1,
        };
        assert_ne!(socket, other.socket(Path::new("/run/p")));
    }
}
