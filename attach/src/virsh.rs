// SPDX-License-Identifier: Apache-2.0
//! A `virsh` that reads commands from a pipe. It stays connected to libvirt between commands.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Instant;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::qmp::{MAX_COMMAND, MAX_MESSAGE};

/// The prompts that virsh prints when it is ready for a command. The second is that of a read-only
/// connection.
const PROMPTS: [&[u8]; 2] = [b"virsh # ", b"virsh > "];

/// A terminal width that is larger than any command.
const COLUMNS: &str = "60000";

/// The reason why a command has no output.
#[derive(Debug)]
pub enum Failure {
    /// The command was not sent.
    NotACommand(String),
    /// The command timed out. The next command first waits for the output of this one.
    Late,
    /// The command was not sent: it timed out while the previous command still had no output. After
    /// this and the following failures, start a new virsh.
    Hangs,
    /// virsh has ended; the text is what it printed before.
    Ended(String),
    /// virsh printed more than this attacher reads.
    TooLong,
}

/// A running `virsh`, killed on drop.
#[derive(Debug)]
pub struct Virsh {
    child: Child,
    input: ChildStdin,
    output: Receiver<Vec<u8>>,
    commands: u64,
    /// The output of the last command, if it is incomplete.
    late: Option<Output>,
}

impl Virsh {
    /// Starts virsh with this command line.
    ///
    /// # Errors
    /// virsh is not installed, or no process can be started.
    pub fn start(command_line: &[String]) -> io::Result<Self> {
        let (program, arguments) = command_line
            .split_first()
            .ok_or(io::ErrorKind::InvalidInput)?;
        // Output and errors share one pipe, so that they stay in order.
        let (reader, writer) = io::pipe()?;
        let mut child = Command::new(program)
            .args(arguments)
            // virsh reads lines with readline. No configuration may change how readline treats a
            // line, and messages must not be translated.
            .env("LC_ALL", "C.UTF-8")
            .env_remove("LANGUAGE")
            .env("INPUTRC", "/dev/null")
            .env("TERM", "dumb")
            // readline echoes only a part of a line that is longer than this.
            .env("COLUMNS", COLUMNS)
            .env("LINES", "24")
            // Ctrl-C at the terminal must reach only the attacher, because the attacher may need
            // virsh while it exits.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(writer.try_clone()?)
            .stderr(writer)
            .spawn()?;
        let input = child.stdin.take().ok_or(io::ErrorKind::BrokenPipe)?;
        let (sender, output) = sync_channel(4);
        std::thread::spawn(move || forward(reader, &sender));
        Ok(Self {
            child,
            input,
            output,
            commands: 0,
            late: None,
        })
    }

    /// Returns whether the process still runs.
    pub fn runs(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Returns a handle that can kill virsh while another thread uses it.
    ///
    /// # Errors
    /// No descriptor is free.
    pub fn kill(&self) -> io::Result<Kill> {
        let id = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        let id = id.ok_or(io::ErrorKind::NotFound)?;
        Ok(Kill(pidfd_open(id, PidfdFlags::empty())?))
    }

    /// Sends a last command, which does not end, and passes each line that virsh prints to `each`
    /// until virsh ends.
    pub fn follow(&mut self, words: &[&str], mut each: impl FnMut(&str)) {
        let Ok((input, _)) = lines(words, 0) else {
            return;
        };
        let command = input.lines().next().unwrap_or_default();
        let _ = writeln!(self.input, "{command}");
        let mut text = Vec::new();
        while let Ok(chunk) = self.output.recv() {
            for part in chunk.split_inclusive(|byte| *byte == b'\n') {
                text.extend(part);
                if part.ends_with(b"\n") {
                    let line = String::from_utf8_lossy(without_prompt(&text));
                    each(line.trim_end_matches('\n'));
                    text.clear();
                } else if text.len() > MAX_MESSAGE {
                    return;
                }
            }
        }
    }

    /// Waits for virsh to end.
    #[cfg(test)]
    pub fn wait(&mut self) {
        self.child.wait().expect("its own");
    }

    /// Carries out a command and returns the text that virsh printed.
    ///
    /// # Errors
    /// [`Failure`].
    pub fn run(&mut self, words: &[&str], deadline: Instant) -> Result<String, Failure> {
        self.commands += 1;
        let (input, mark) = lines(words, self.commands)?;
        if let Some(mut late) = self.late.take() {
            self.read(&mut late, deadline)?;
            if !late.is_complete() {
                return Err(Failure::Hangs);
            }
        }
        // If virsh has ended, its last output says why.
        let _ = self.input.write_all(input.as_bytes());
        let mut output = Output::new(mark, input);
        self.read(&mut output, deadline)?;
        if output.is_complete() {
            return Ok(output.text());
        }
        self.late = Some(output);
        Err(Failure::Late)
    }

    /// Reads until the output is complete or the deadline passes.
    fn read(&self, output: &mut Output, deadline: Instant) -> Result<(), Failure> {
        while !output.is_complete() {
            if output.text.len() > MAX_MESSAGE {
                return Err(Failure::TooLong);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.output.recv_timeout(left) {
                Ok(chunk) => output.add(&chunk),
                Err(RecvTimeoutError::Timeout) => return Ok(()),
                Err(RecvTimeoutError::Disconnected) => return Err(Failure::Ended(output.text())),
            }
        }
        Ok(())
    }
}

/// A handle that can kill a virsh.
#[derive(Debug)]
pub struct Kill(OwnedFd);

impl Kill {
    /// Kills virsh, or does nothing if it has ended.
    pub fn kill(&self) {
        let _ = pidfd_send_signal(&self.0, Signal::KILL);
    }
}

impl Drop for Virsh {
    fn drop(&mut self) {
        // If virsh ended by itself, it would add these commands to the user's history.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn forward(mut reader: impl Read, sender: &SyncSender<Vec<u8>>) {
    let mut chunk = vec![0; 64 << 10];
    loop {
        match reader.read(&mut chunk) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(0) | Err(_) => return,
            Ok(length) => {
                if sender.send(chunk[..length].to_vec()).is_err() {
                    return;
                }
            }
        }
    }
}

/// The output of virsh up to the line that begins with the mark.
#[derive(Debug)]
struct Output {
    mark: String,
    input: String,
    text: Vec<u8>,
    last_line: usize,
    complete: bool,
}

impl Output {
    fn new(mark: String, input: String) -> Self {
        Self {
            mark,
            input,
            text: Vec::new(),
            last_line: 0,
            complete: false,
        }
    }

    fn add(&mut self, chunk: &[u8]) {
        for part in chunk.split_inclusive(|byte| *byte == b'\n') {
            self.text.extend(part);
            let line = &self.text[self.last_line..];
            if without_prompt(line).starts_with(self.mark.as_bytes()) {
                self.complete = true;
                self.text.truncate(self.last_line);
                return;
            }
            if part.ends_with(b"\n") {
                self.last_line = self.text.len();
            }
        }
    }

    fn is_complete(&self) -> bool {
        self.complete
    }

    /// Returns the output without the lines in which virsh echoes its input.
    fn text(&self) -> String {
        let mut text = String::new();
        for line in self.text.split_inclusive(|byte| *byte == b'\n') {
            let line = String::from_utf8_lossy(without_prompt(line));
            if !self
                .input
                .lines()
                .any(|input| input == line.trim_end_matches('\n'))
            {
                text.push_str(&line);
            }
        }
        text
    }
}

fn without_prompt(line: &[u8]) -> &[u8] {
    let prompt = PROMPTS.iter().find_map(|prompt| line.strip_prefix(*prompt));
    prompt.unwrap_or(line)
}

/// Returns the lines of a command, and the mark that the second line prints. virsh echoes the lines
/// that it reads, so the second line contains the mark in two parts.
fn lines(words: &[&str], number: u64) -> Result<(String, String), Failure> {
    let mut line = String::new();
    for word in words {
        // readline would interpret a control character as an editing key.
        if let Some(found) = word.chars().find(|found| found.is_control()) {
            return Err(Failure::NotACommand(format!(
                "{word:?} contains {found:?}, which virsh cannot be given"
            )));
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(&quoted(word));
    }
    if line.len() > MAX_COMMAND {
        return Err(Failure::NotACommand(format!(
            "a command of {} bytes was not sent",
            line.len()
        )));
    }
    line.push_str(&format!("\necho 'end of '\"command {number}.\"\n"));
    Ok((line, format!("end of command {number}.")))
}

/// Quotes a word for virsh's parser, which treats no character between single quotes specially.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_real_virsh_reads_words_back_as_they_are() {
        let command_line = ["virsh", "--quiet", "--connect", "test:///default"];
        let virsh = Virsh::start(&command_line.map(str::to_owned));
        let Ok(mut virsh) = virsh else {
            eprintln!("SKIPPED: virsh is not installed");
            return;
        };
        let deadline = Instant::now() + std::time::Duration::from_secs(60);
        let long = "long ".repeat(2000);
        for word in [
            "a",
            r#"{"a": "b'c\\d\"e"}"#,
            r"\",
            "''",
            "'",
            r#"\'"\""#,
            "a; b # c $d `e` !f",
            "größer",
            "end of command 1.",
            &long,
        ] {
            let text = virsh.run(&["echo", word], deadline).expect("carried out");
            // In quiet mode `echo` does not end its line, so the prompt follows on the same line.
            assert!(text.starts_with(word), "{word}: {text}");
        }
        let text = virsh
            .run(&["no-such-command"], deadline)
            .expect("carried out");
        assert_eq!(text, "error: unknown command: 'no-such-command'\n");
        for word in ["a\nb", "\t", "\u{7f}", "\u{9b}"] {
            let refused = virsh.run(&["echo", word], deadline);
            assert!(matches!(refused, Err(Failure::NotACommand(_))), "{word:?}");
        }
        let refused = virsh.run(&["echo", &"x".repeat(MAX_COMMAND)], deadline);
        assert!(matches!(refused, Err(Failure::NotACommand(_))));
        assert!(virsh.runs());
    }
}
