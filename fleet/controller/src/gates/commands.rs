// SPDX-License-Identifier: Apache-2.0
//! Runs the commands of gates. A spec contains only the name of a command, and the controller's own
//! configuration contains the command. People who write specs may have no account on the
//! controller's machine, and other programs may write the store.
//!
//! The file NAME.yaml in the folder of `--gates` contains one command:
//!
//! ```yaml
//! command: [/usr/local/bin/probe, web]
//! user: probe                    # nobody by default
//! timeout: 30s                   # 60s by default
//! environment: {PROBE_ZONE: eu}
//! ```

mod thread;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;

use nix::unistd::User;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use serde::Deserialize;
use tokio::process::{Child, Command};

use self::thread::{Threads, in_thread};
use super::{Asking, Obstacle};
use crate::names;
use crate::rollout::WaveGateKind;
use crate::spec::{Duration, Spec};
use crate::trusted::{self, Forbidden, NotTrusted};

/// The default folder of the files.
pub const DEFAULT_FOLDER: &str = "/etc/patchbay/gates.d";
/// The timeout of a command if its file gives none.
const DEFAULT_TIMEOUT_MS: u64 = 60_000;
/// The user of a command if its file gives none and the controller is root.
const DEFAULT_USER: &str = "nobody";
const SEARCH_PATH: &str = "/usr/local/bin:/usr/bin:/bin";
const MAX_FILE_BYTES: u64 = 64 << 10;
/// The time within which the file system must return a file, and within which a program must start.
const LIMIT: std::time::Duration = std::time::Duration::from_secs(10);

/// The commands that gates may name.
#[derive(Clone, Debug)]
pub struct Commands {
    folder: Arc<Path>,
    threads: Threads,
    limit: std::time::Duration,
}

impl Default for Commands {
    fn default() -> Self {
        Self::new(PathBuf::from(DEFAULT_FOLDER))
    }
}

/// The reason why a command cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("command {name} of a gate cannot be used: {why}")]
pub struct NotUsable {
    name: String,
    why: Why,
}

#[derive(Debug, thiserror::Error)]
enum Why {
    #[error("{} is not used: {error}", .path.display())]
    NotTrusted { path: PathBuf, error: NotTrusted },
    /// The parser's error may quote a secret from the file, so it is only logged.
    #[error("{} is malformed at line {line}; see the controller's log", .path.display())]
    Malformed { path: PathBuf, line: usize },
    #[error("{0:?} is not a name of a command; give 1 to 64 letters, digits, '-' and '_'")]
    Name(String),
    #[error("{0:?} is not the absolute path of a program")]
    Program(String),
    #[error("{0:?} is not a name of a variable")]
    Variable(String),
    #[error("there is no user {0:?} on this machine")]
    NoUser(String),
    #[error("the user {name:?} cannot be looked up: {error}")]
    Lookup { name: String, error: nix::Error },
    #[error(
        "the controller runs as uid {own}, and only root can run it as {name}; leave `user` out"
    )]
    OtherUser { own: u32, name: String },
    #[error(
        "{} is not read within {} ms; look at its file system", .path.display(), .limit.as_millis()
    )]
    Hangs {
        path: PathBuf,
        limit: std::time::Duration,
    },
    #[error("no thread can read the file: {0}")]
    Thread(io::Error),
}

/// The content of a file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CommandFile {
    command: Vec<String>,
    user: Option<String>,
    timeout: Option<Duration>,
    #[serde(default)]
    environment: BTreeMap<String, String>,
}

/// A command with the user that runs it.
struct Usable {
    program: String,
    arguments: Vec<String>,
    /// The user and the group; `None` if these are the controller's.
    user: Option<(u32, u32)>,
    timeout: std::time::Duration,
    environment: BTreeMap<String, String>,
}

/// Returns whether this is a valid name of a command. The name becomes part of a path.
pub fn is_name(name: &str) -> bool {
    names::is_name(name, b"-_")
}

impl Commands {
    /// Uses the files of this folder. A file is read each time its command is used.
    pub fn new(folder: PathBuf) -> Self {
        Self {
            folder: folder.into(),
            threads: Threads::default(),
            limit: LIMIT,
        }
    }

    /// Checks the commands that the gates of a spec name.
    ///
    /// # Errors
    /// [`NotUsable`].
    pub async fn check(&self, spec: &Spec) -> Result<(), NotUsable> {
        for gate in &spec.gates {
            if let WaveGateKind::NamedCommand { name, .. } = &gate.0.kind {
                self.read(name).await?;
            }
        }
        Ok(())
    }

    /// Runs a command, which must exit with status 0. Dropping the future kills its processes.
    pub(super) async fn run(&self, name: &str, asking: &Asking<'_>) -> Result<(), Obstacle> {
        let usable = self.read(name).await;
        let usable = usable.map_err(|error| format!("cannot be used: {}", error.why))?;
        let (command, timeout) = (usable.command(asking), usable.timeout);
        let group = self.spawn(name, command).await;
        let group = group.map_err(|error| format!("cannot be started: {error}"))?;
        let ended = tokio::time::timeout(timeout, group.ended()).await;
        let limit = timeout.as_millis();
        let status = ended.map_err(|_| format!("did not end within {limit} ms"))?;
        match status {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(Obstacle::Failed(format!("ended with {status}"))),
            Err(error) => Err(format!("cannot be waited for: {error}").into()),
        }
    }

    /// Reads the file of a command. Its file system, and the lookup of its user, may hang.
    async fn read(&self, name: &str) -> Result<Usable, NotUsable> {
        let (folder, owned) = (Arc::clone(&self.folder), name.to_owned());
        let reading = self.threads.run(name, move || read(&folder, &owned));
        let read = match tokio::time::timeout(self.limit, reading).await {
            Ok(read) => read.unwrap_or_else(|error| Err(Why::Thread(error))),
            Err(_) => Err(Why::Hangs {
                path: path(&self.folder, name),
                limit: self.limit,
            }),
        };
        let name = name.to_owned();
        read.map_err(|why| NotUsable { name, why })
    }

    /// Starts a command. The call returns only when the program is loaded, which may hang too.
    async fn spawn(&self, name: &str, command: Command) -> io::Result<Group> {
        let runtime = tokio::runtime::Handle::current();
        let spawning = self.threads.run(name, move || {
            let _entered = runtime.enter();
            Group::spawn(command)
        });
        match tokio::time::timeout(self.limit, spawning).await {
            Ok(spawned) => spawned?,
            Err(_) => {
                let limit = self.limit.as_millis();
                let why = format!("its program is not loaded within {limit} ms");
                Err(io::Error::new(io::ErrorKind::TimedOut, why))
            }
        }
    }
}

fn path(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}.yaml"))
}

fn read(folder: &Path, name: &str) -> Result<Usable, Why> {
    if !is_name(name) {
        return Err(Why::Name(name.to_owned()));
    }
    let path = path(folder, name);
    trusted::check_folder(folder).map_err(|error| {
        let path = folder.to_owned();
        Why::NotTrusted { path, error }
    })?;
    let content = match trusted::read(&path, Forbidden::Write, MAX_FILE_BYTES) {
        Ok(content) => content,
        Err(error) => return Err(Why::NotTrusted { path, error }),
    };
    let file: CommandFile = match serde_yaml_ng::from_slice(&content) {
        Ok(file) => file,
        Err(error) => {
            tracing::error!("{} is malformed: {error}", path.display());
            let line = error.location().map_or(0, |at| at.line());
            return Err(Why::Malformed { path, line });
        }
    };
    usable(file)
}

fn usable(file: CommandFile) -> Result<Usable, Why> {
    let mut words = file.command.into_iter();
    let program = words.next().unwrap_or_default();
    if !program.starts_with('/') {
        return Err(Why::Program(program));
    }
    let is_letter = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let is_variable = |name: &&String| !name.is_empty() && name.chars().all(is_letter);
    if let Some(name) = file.environment.keys().find(|name| !is_variable(name)) {
        return Err(Why::Variable(name.clone()));
    }
    let timeout_ms = file.timeout.map_or(DEFAULT_TIMEOUT_MS, Duration::millis);
    Ok(Usable {
        program,
        arguments: words.collect(),
        user: user(file.user)?,
        timeout: std::time::Duration::from_millis(timeout_ms),
        environment: file.environment,
    })
}

/// Returns the uid and gid for a command whose file names this user; `None` for those of the
/// controller.
fn user(name: Option<String>) -> Result<Option<(u32, u32)>, Why> {
    let own = rustix::process::geteuid().as_raw();
    if own != 0 && name.is_none() {
        return Ok(None);
    }
    let name = name.unwrap_or_else(|| DEFAULT_USER.to_owned());
    match User::from_name(&name) {
        Ok(Some(user)) if own == 0 => Ok(Some((user.uid.as_raw(), user.gid.as_raw()))),
        Ok(Some(user)) if user.uid.as_raw() == own => Ok(None),
        Ok(Some(_)) => Err(Why::OtherUser { own, name }),
        Ok(None) => Err(Why::NoUser(name)),
        Err(error) => Err(Why::Lookup { name, error }),
    }
}

impl Usable {
    fn command(&self, asking: &Asking<'_>) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments);
        command.current_dir("/");
        command.env_clear().env("PATH", SEARCH_PATH);
        command.envs(&self.environment);
        command.env("PATCHBAY_ROLLOUT", asking.rollout);
        command.env("PATCHBAY_WAVE", asking.wave);
        command.stdin(Stdio::null());
        command.stdout(Stdio::null()).stderr(Stdio::null());
        if let Some((user, group)) = self.user {
            // This also makes the standard library drop the supplementary groups of root.
            command.uid(user).gid(group);
        }
        command
    }
}

/// The process group of a command, which is killed on drop.
struct Group {
    child: Child,
    /// The ID of the group, which is that of its first process; `None` once the process has been
    /// waited for, because the ID may then be reused.
    id: Option<Pid>,
}

impl Group {
    fn spawn(mut command: Command) -> io::Result<Self> {
        // Descriptors that the controller itself has inherited may lack CLOEXEC.
        close_fds::set_fds_cloexec_threadsafe(3, &[]);
        let child = command.process_group(0).kill_on_drop(true).spawn()?;
        let id = child.id().and_then(|id| i32::try_from(id).ok());
        let id = id.and_then(Pid::from_raw);
        Ok(Self { child, id })
    }

    /// Waits until the command has ended, and kills the remaining processes of its group.
    async fn ended(mut self) -> io::Result<ExitStatus> {
        if let Some(id) = self.id {
            // NOWAIT leaves the process waitable, so its ID and that of the group are not reused.
            // If this future is dropped, the process is killed and the thread ends, unless the
            // kernel cannot end the process because its file system hangs.
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
            in_thread(move || waitid(WaitId::Pid(id), options)).await??;
        }
        self.kill();
        self.child.wait().await
    }

    /// Kills the processes of the group if its first process has not been waited for.
    fn kill(&mut self) {
        if let Some(id) = self.id.take() {
            // There may be no process left.
            let _ = kill_process_group(id, Signal::KILL);
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.kill();
    }
}

#[cfg(test)]
mod tests;
