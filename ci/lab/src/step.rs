// SPDX-License-Identifier: Apache-2.0
//! Runs long commands. Their output goes to a log file, and one line shows the progress.

use std::fs::{self, File, OpenOptions};
use std::io::{self, IsTerminal, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// The number of lines at the end of the log that are shown when a step fails.
const SHOWN_LINES: usize = 25;

/// Prefix of a log line that names a command.
const COMMAND_MARK: &str = "--- ";

/// Runs commands under one heading; all of them append to one log.
pub struct Steps {
    log_path: PathBuf,
}

impl Steps {
    /// Starts an empty log and prints the heading and the log's name.
    pub fn new(heading: &str, log_path: &Path) -> Result<Self> {
        if let Some(folder) = log_path.parent() {
            fs::create_dir_all(folder)
                .with_context(|| format!("cannot create {}", folder.display()))?;
        }
        File::create(log_path).with_context(|| format!("cannot write {}", log_path.display()))?;
        eprintln!("{heading} (log: {})", log_path.display());
        Ok(Self {
            log_path: log_path.to_path_buf(),
        })
    }

    /// Runs a command. If it fails, the error contains the end of the log.
    pub fn run(&self, what: &str, command: &mut Command) -> Result<()> {
        let mut log = OpenOptions::new().append(true).open(&self.log_path)?;
        writeln!(log, "{COMMAND_MARK}{what}: {command:?}")?;
        let program = command.get_program().to_string_lossy().into_owned();
        let mut progress = Progress::new(what);
        let mut child = dying_with_us(command)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("cannot start {program}"))?;
        // The process is polled, because the line of progress is redrawn meanwhile.
        let status = loop {
            match child.try_wait()? {
                Some(status) => break status,
                None => std::thread::sleep(Duration::from_millis(50)),
            }
            progress.tick(&self.log_path);
        };
        progress.end(status);
        if !status.success() {
            bail!(
                "{what} failed ({status}); the end of {}:\n{}",
                self.log_path.display(),
                tail(&self.log_path, SHOWN_LINES)
            );
        }
        Ok(())
    }
}

/// Returns the same command, run by setpriv(1) so that it is killed when this process ends.
pub fn dying_with_us(command: &Command) -> Command {
    let mut wrapped = Command::new("setpriv");
    wrapped
        .args(["--pdeathsig", "KILL"])
        .arg(command.get_program())
        .args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => wrapped.env(name, value),
            None => wrapped.env_remove(name),
        };
    }
    if let Some(folder) = command.get_current_dir() {
        wrapped.current_dir(folder);
    }
    wrapped
}

/// Returns the last lines of a file, or an empty text if it cannot be read.
pub fn tail(path: &Path, lines: usize) -> String {
    let Ok(text) = read_end(path, 16 * 1024) else {
        return String::new();
    };
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

fn read_end(path: &Path, bytes: u64) -> io::Result<String> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(bytes)))?;
    let mut end = Vec::new();
    file.read_to_end(&mut end)?;
    Ok(String::from_utf8_lossy(&end).into_owned())
}

/// Shows progress: on a terminal as one line that is redrawn, otherwise as a line at the start and
/// one at the end.
struct Progress {
    what: String,
    start: Instant,
    drawn: Option<Instant>,
    terminal: bool,
}

impl Progress {
    fn new(what: &str) -> Self {
        let terminal = io::stderr().is_terminal();
        if !terminal {
            eprintln!("  {what} ...");
        }
        Self {
            what: what.to_owned(),
            start: Instant::now(),
            drawn: None,
            terminal,
        }
    }

    fn tick(&mut self, log: &Path) {
        let due = self
            .drawn
            .is_none_or(|drawn| drawn.elapsed() > Duration::from_millis(250));
        if self.terminal && due {
            self.drawn = Some(Instant::now());
            let end = tail(log, 1);
            let last = if end.starts_with(COMMAND_MARK) {
                ""
            } else {
                &end
            };
            let line: String = last.chars().filter(|c| !c.is_control()).take(60).collect();
            eprint!("\r\x1b[K  {} {}  {line}", self.what, self.elapsed());
        }
    }

    fn end(&self, status: ExitStatus) {
        let verdict = if status.success() { "done" } else { "FAILED" };
        let redraw = if self.terminal { "\r\x1b[K" } else { "" };
        eprintln!("{redraw}  {} {verdict}, {}", self.what, self.elapsed());
    }

    fn elapsed(&self) -> String {
        let seconds = self.start.elapsed().as_secs();
        format!("{}:{:02}", seconds / 60, seconds % 60)
    }
}
