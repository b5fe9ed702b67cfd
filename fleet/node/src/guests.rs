// SPDX-License-Identifier: Apache-2.0
//! Runs guests that a file lists:
//!
//! ```yaml
//! guests:
//!   - name: web-1                       # systemd runs it, and restarts it as its unit says
//!     unit: patchbay@web-1.service
//!   - name: web-2                       # patchbayd runs it; --name and --api-socket are added
//!     command: [patchbay-vmm, --kernel, /srv/vmlinux]
//!     restart: on-failure               # never (default), on-failure, always
//! ```
//!
//! A guest keeps running however this process ends. A later process does not start the guest a
//! second time, because the guest's socket shows that it runs. `patchbay guest shutdown` ends a
//! guest. Powering off does not count as a failure.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};

use patchbay_supervisor::{Backoff, LOOK_INTERVAL, runs};
use serde::Deserialize;
use tokio::process::{Child, Command};
use tokio::time::Instant;

use crate::monitors::MAX_GUESTS;

const MAX_FILE_BYTES: u64 = 1 << 20;
const MAX_NAME_BYTES: usize = 64;
/// The reason why the file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum GuestsError {
    /// The file cannot be read, or its content is invalid.
    #[error("{path}: {error}")]
    File {
        /// The path of the file.
        path: String,
        /// The fault, with line and column if the file is malformed.
        error: String,
    },
}

/// The content of the file.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Guests {
    /// The guests, one entry each.
    pub guests: Vec<GuestEntry>,
}

/// A guest to run.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestEntry {
    /// The guest's name, which is also that of its socket.
    pub name: String,
    /// A systemd unit to start.
    pub unit: Option<String>,
    /// A monitor to start, as a program and its arguments.
    pub command: Option<Vec<String>>,
    /// The condition under which the command is restarted.
    #[serde(default)]
    pub restart: Restart,
}

/// The condition under which a guest is restarted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Restart {
    /// The guest is not restarted.
    #[default]
    Never,
    /// The guest is restarted if its monitor was killed, or ended with an error.
    OnFailure,
    /// The guest is always restarted.
    Always,
}

impl Restart {
    /// Returns whether the guest is restarted. `None` means that the monitor was not a child of
    /// this process, so its exit status is unknown.
    fn wants(self, status: Option<ExitStatus>) -> bool {
        match self {
            Self::Never => false,
            Self::OnFailure => status.is_some_and(|status| !status.success()),
            Self::Always => true,
        }
    }
}

impl Guests {
    /// Reads the file.
    ///
    /// # Errors
    /// [`GuestsError`].
    pub fn read(path: &Path) -> Result<Self, GuestsError> {
        let wrong = |error: String| GuestsError::File {
            path: path.display().to_string(),
            error,
        };
        let bytes = std::fs::metadata(path)
            .map_err(|error| wrong(error.to_string()))?
            .len();
        if bytes > MAX_FILE_BYTES {
            return Err(wrong(format!(
                "{bytes} bytes, at most {MAX_FILE_BYTES} are read"
            )));
        }
        let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
        Self::parse(&text).map_err(wrong)
    }

    fn parse(text: &str) -> Result<Self, String> {
        let all: Self = serde_yaml_ng::from_str(text).map_err(|error| error.to_string())?;
        if all.guests.len() > MAX_GUESTS {
            return Err(format!(
                "{} guests, a host serves at most {MAX_GUESTS}",
                all.guests.len()
            ));
        }
        let mut names = BTreeSet::new();
        for guest in &all.guests {
            let name = &guest.name;
            let letters = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            let is_name = !name.is_empty()
                && name.len() <= MAX_NAME_BYTES
                && !name.starts_with('.')
                && name.chars().all(letters);
            if !is_name {
                return Err(format!(
                    "{name:?} cannot be a guest's name; use up to {MAX_NAME_BYTES} letters, digits, '-', '_' and '.', and no '.' first"
                ));
            }
            if !names.insert(name) {
                return Err(format!(
                    "two guests are named {name}; give one of them another name"
                ));
            }
            match (&guest.unit, guest.command.as_deref()) {
                (Some(_), None) if guest.restart == Restart::Never => {}
                (Some(_), None) => {
                    return Err(format!(
                        "guest {name}: its unit says when it is started again; leave out restart"
                    ));
                }
                (None, Some([_, ..])) => {}
                _ => return Err(format!("guest {name}: give either a unit or a command")),
            }
        }
        Ok(all)
    }
}

/// Keeps one guest running as its entry requires, with its socket in `run_dir`.
pub async fn keep(guest: GuestEntry, run_dir: PathBuf) {
    let name = &guest.name;
    let Some(command) = &guest.command else {
        return start_unit(&guest).await;
    };
    if let Err(error) = std::fs::create_dir_all(&run_dir) {
        let folder = run_dir.display();
        return tracing::error!(guest = name, "the folder {folder} cannot be made: {error}");
    }
    let socket = run_dir.join(format!("{name}.sock"));
    let mut backoff = Backoff::default();
    loop {
        let started = Instant::now();
        let status = if runs(&socket) {
            tracing::info!(guest = name, "it runs already");
            while runs(&socket) {
                tokio::time::sleep(LOOK_INTERVAL).await;
            }
            None
        } else {
            match spawn(name, command, &socket) {
                Ok(mut child) => {
                    tracing::info!(guest = name, pid = child.id(), "started");
                    child.wait().await.ok()
                }
                Err(error) => {
                    let program = &command[0];
                    tracing::error!(
                        guest = name,
                        "{program} cannot be started: {error}; correct its entry and start the daemon again"
                    );
                    return;
                }
            }
        };
        let how = status.map_or("it was no child".to_owned(), |status| status.to_string());
        if !guest.restart.wants(status) {
            tracing::info!(guest = name, how, "ended");
            return;
        }
        let delay = backoff.after(started.elapsed());
        tracing::warn!(guest = name, how, "ended; started again in {delay:?}");
        tokio::time::sleep(delay).await;
    }
}

fn spawn(name: &str, command: &[String], socket: &Path) -> std::io::Result<Child> {
    let (program, arguments) = command
        .split_first()
        .ok_or(std::io::ErrorKind::InvalidInput)?;
    Command::new(program)
        .args(arguments)
        .args(["--name", name, "--api-socket"])
        .arg(socket)
        .stdin(Stdio::null())
        // In its own process group, the child does not get the signals that the terminal sends to
        // this process.
        .process_group(0)
        .spawn()
}

async fn start_unit(guest: &GuestEntry) {
    let name = &guest.name;
    let unit = guest.unit.as_deref().unwrap_or_default();
    let mut command = Command::new("systemctl");
    let started = command
        .args(["start", "--", unit])
        .stdin(Stdio::null())
        .output()
        .await;
    match started {
        Ok(output) if output.status.success() => tracing::info!(guest = name, unit, "started"),
        Ok(output) => {
            let why = String::from_utf8_lossy(&output.stderr);
            tracing::error!(
                guest = name,
                unit,
                why = why.trim(),
                "systemd does not start it"
            );
        }
        Err(error) => tracing::error!(guest = name, unit, %error, "systemctl cannot be started"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_entry_is_refused_with_its_place_or_name() {
        for (text, why) in [
            ("guests: [{name: a}]", "guest a: give either"),
            (
                "guests: [{name: a, unit: u, command: [x]}]",
                "guest a: give either",
            ),
            ("guests: [{name: a, command: []}]", "guest a: give either"),
            (
                "guests: [{name: a, unit: u, restart: always}]",
                "guest a: its unit",
            ),
            ("guests: [{name: a/b, unit: u}]", "\"a/b\" cannot be"),
            (
                "guests: [{name: a, unit: u}, {name: a, unit: v}]",
                "two guests are named a",
            ),
            ("guests:\n  - {name: a, unti: u}", "at line 2 column"),
            (
                "guests: [{name: a, unit: u, restart: sometimes}]",
                "at line 1 column",
            ),
        ] {
            let error = Guests::parse(text).expect_err(text);
            assert!(error.contains(why), "{text}: {error}");
        }
        let good = "guests: [{name: a, command: [x, --y], restart: on-failure}]";
        assert_eq!(
            Guests::parse(good).expect("right").guests[0].restart,
            Restart::OnFailure
        );
    }

    /// Runs a guest whose monitor records each start and ends with these codes in turn, repeating
    /// the last one. Returns the number of starts.
    async fn starts(restart: Restart, codes: &str) -> usize {
        let folder = tempfile::tempdir().expect("a folder");
        let notes = folder.path().join("notes");
        let script = format!(
            "echo \"$@\" >>{0}; set -- {codes}; shift $(($(wc -l <{0}) - 1)); exit ${{1:-0}}",
            notes.display()
        );
        let program = folder.path().join("monitor");
        std::fs::write(&program, script).expect("written");
        let entry = GuestEntry {
            name: "a".to_owned(),
            unit: None,
            command: Some(vec!["sh".to_owned(), program.display().to_string()]),
            restart,
        };
        keep(entry, folder.path().to_owned()).await;
        let notes = std::fs::read_to_string(notes).expect("notes");
        let socket = folder.path().join("a.sock").display().to_string();
        for line in notes.lines() {
            assert_eq!(line, format!("--name a --api-socket {socket}"));
        }
        notes.lines().count()
    }

    #[tokio::test(start_paused = true)]
    async fn a_guest_is_started_again_as_its_entry_says() {
        assert_eq!(starts(Restart::Never, "1").await, 1);
        assert_eq!(starts(Restart::OnFailure, "1 3 0").await, 3);
        assert_eq!(starts(Restart::OnFailure, "0").await, 1);
    }

    #[tokio::test]
    async fn a_guest_that_runs_is_not_started_a_second_time() {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("a.sock");
        let listener = std::os::unix::net::UnixListener::bind(&socket).expect("bound");
        let entry = GuestEntry {
            name: "a".to_owned(),
            unit: None,
            command: Some(vec!["/nonexistent".to_owned()]),
            restart: Restart::OnFailure,
        };
        let kept = tokio::spawn(keep(entry, folder.path().to_owned()));
        // Once the connection arrives, `keep` has checked the socket.
        let accepted = tokio::task::spawn_blocking(move || listener.accept().map(|_| ()));
        accepted.await.expect("ran").expect("accepted");
        // The listener is closed by now, and the guest's exit status is unknown.
        kept.await.expect("it ends");
    }
}
