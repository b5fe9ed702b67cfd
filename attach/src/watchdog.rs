// SPDX-License-Identifier: Apache-2.0
//! A stop over QMP must not outlive the process that asked for it. QEMU keeps no account of who stopped a guest, so a small process
//! shares the connection and says `cont` when the attacher has died in a stop.
//!
//! ```text
//!   attacher ── "s" before `stop`, "r" after `cont` ──▶ pipe ──▶ watchdog
//!      └───────────────── QMP connection, shared ─────────────────┘
//! ```
//!
//! The kernel closes the pipe with its writer. What was written before stays in it, so the watchdog knows of each stop that QEMU can
//! know of. It is in a process group of its own and ignores what ends a terminal's or a service's processes: only SIGKILL of both
//! leaves a guest stopped.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{SigSet, Signal};
use serde_json::Value;

use crate::qmp::message;

/// The argument that makes the program a watchdog.
pub const ARGUMENT: &str = "watchdog";
/// The id of its command; those of the attacher are smaller.
const ID: u64 = u64::MAX;
/// How long QEMU may take to answer.
const PATIENCE: Duration = Duration::from_secs(60);
const STOPPED: u8 = b's';
const RUNS: u8 = b'r';

/// The attacher's side.
#[derive(Debug)]
pub struct Watchdog {
    child: Child,
    pipe: Option<ChildStdin>,
}

impl Watchdog {
    /// Starts the watchdog of a connection: `program` with [`ARGUMENT`].
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start(program: &Path, connection: OwnedFd) -> io::Result<Self> {
        let mut child = Command::new(program)
            .arg(ARGUMENT)
            .stdin(Stdio::piped())
            .stdout(Stdio::from(connection))
            .process_group(0)
            .spawn()?;
        let mut started = Self {
            pipe: child.stdin.take(),
            child,
        };
        // It has the pipe, even if it does not read it yet.
        started.say(RUNS)?;
        Ok(started)
    }

    /// Before a stop.
    ///
    /// # Errors
    /// The watchdog is dead: the guest must not be stopped.
    pub fn arm(&mut self) -> io::Result<()> {
        if let Some(status) = self.child.try_wait()? {
            return Err(io::Error::other(format!(
                "the watchdog has ended ({status})"
            )));
        }
        self.say(STOPPED)
    }

    /// The guest runs.
    pub fn disarm(&mut self) {
        // A dead watchdog is found at the next stop.
        let _ = self.say(RUNS);
    }

    fn say(&mut self, word: u8) -> io::Result<()> {
        match &mut self.pipe {
            Some(pipe) => pipe.write_all(&[word]),
            None => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.pipe = None;
        // It lets go of the connection by its end.
        let _ = self.child.wait();
    }
}

/// The watchdog's side: its standard input is the pipe, its standard output the connection.
///
/// # Errors
/// The guest may be left stopped.
pub fn run() -> io::Result<()> {
    // What is blocked stays so until the end, and the end comes with that of the attacher.
    let mut ignored = SigSet::empty();
    for signal in [
        Signal::SIGTERM,
        Signal::SIGINT,
        Signal::SIGQUIT,
        Signal::SIGHUP,
    ] {
        ignored.add(signal);
    }
    ignored.thread_block()?;
    let connection = io::stdout().as_fd().try_clone_to_owned()?;
    let pipe = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    watch(pipe, &UnixStream::from(connection))
}

fn watch(mut pipe: impl Read, connection: &UnixStream) -> io::Result<()> {
    let mut stopped = false;
    let mut word = [0];
    loop {
        match pipe.read(&mut word) {
            Ok(0) => break,
            Ok(_) => stopped = word[0] == STOPPED,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    if !stopped {
        return Ok(());
    }
    connection.set_read_timeout(Some(PATIENCE))?;
    connection.set_write_timeout(Some(PATIENCE))?;
    let mut to = connection;
    to.write_all(message("cont", Value::Null, Some(ID)).as_bytes())?;
    // QEMU may drop what it has not read when the connection ends. The first line may be the rest of one.
    let id = ID.to_string();
    for line in BufReader::new(connection).split(b'\n') {
        if String::from_utf8_lossy(&line?).contains(&id) {
            return Ok(());
        }
    }
    Err(io::ErrorKind::UnexpectedEof.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What QEMU is sent after the attacher's words.
    fn sent(words: &[u8]) -> String {
        let (ours, qemus) = UnixStream::pair().expect("a pair");
        let mut qemu = qemus.try_clone().expect("a descriptor");
        // The rest of an answer to the attacher, an event, and its own.
        write!(
            qemu,
            "123}}\r\n{{\"event\": \"RESUME\"}}\r\n{{\"return\": {{}}, \"id\": {ID}}}\r\n"
        )
        .expect("room");
        watch(words, &ours).expect("answered");
        ours.shutdown(std::net::Shutdown::Write).expect("open");
        let mut text = String::new();
        let mut qemus = qemus;
        qemus.read_to_string(&mut text).expect("text");
        text
    }

    #[test]
    fn the_guest_is_resumed_only_after_a_stop_that_has_not_ended() {
        for words in ["", "r", "rsr", "rsrsr"] {
            assert_eq!(sent(words.as_bytes()), "", "{words}");
        }
        for words in ["rs", "rsrs"] {
            let text = sent(words.as_bytes());
            assert!(text.contains("\"cont\""), "{words}: {text}");
        }
    }

    #[test]
    fn a_qemu_that_closes_the_connection_is_reported() {
        let (ours, qemus) = UnixStream::pair().expect("a pair");
        drop(qemus);
        watch(&b"rs"[..], &ours).expect_err("not answered");
    }
}
