// SPDX-License-Identifier: Apache-2.0
//! Reads the guest's serial console and finds the kernel's reports and the agent's marks.

use std::sync::{Arc, Mutex, PoisonError};

use patchbay_proto::KERNEL_REPORTS;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::watch;

/// The number of bytes that are kept of the console's output when it exceeds twice this number.
/// Older output is dropped.
const KEPT: usize = 1 << 20;
/// Limit on the lines of one report.
const REPORT_LINES: usize = 80;
/// The maximum length of a line. A longer one is split.
const LINE: usize = 1024;
/// Limit on the reports kept between two calls of [`Console::take_reports`].
const REPORTS: usize = 16;

/// The prefix of the message of a kernel that cannot continue.
const PANIC: &str = "Kernel panic - not syncing";
/// The markers that end a report.
const ENDS: &[&str] = &["---[ end trace", "---[ end Kernel panic", "patchbay-exec: "];
/// The line above a report.
const CUT: &str = "------------[ cut here ]------------";

/// Returns the message of a line, without the time and the task or CPU that the kernel prints
/// before it.
fn message(line: &str) -> &str {
    let mut rest = line.trim_end();
    // "[    1.234567]", and with CONFIG_PRINTK_CALLER "[    T1]" or "[   C12]".
    while let Some((inside, after)) = rest.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        let inside = inside.trim();
        let is_time = inside.chars().all(|c| c.is_ascii_digit() || c == '.');
        let caller = inside.strip_prefix(['T', 'C']).unwrap_or("x");
        let is_caller = !caller.is_empty() && caller.chars().all(|c| c.is_ascii_digit());
        if inside.is_empty() || !(is_time || is_caller) {
            break;
        }
        rest = after.trim_start();
    }
    rest
}

/// Finds reports in the lines of a console.
#[derive(Debug, Default)]
pub struct Scanner {
    /// Lines of the report that is being printed.
    report: Vec<String>,
    reports: Vec<String>,
    panicked: Option<String>,
    /// The error message of the guest's init.
    init_error: Option<String>,
    /// The agent's last mark: the text after `patchbay-exec: ` in a line that the agent prints
    /// around each command.
    mark: String,
}

impl Scanner {
    /// Scans the next line.
    pub fn line(&mut self, line: &str) {
        let text = message(line);
        if let Some(mark) = text.strip_prefix("patchbay-exec: ") {
            self.finish();
            mark.clone_into(&mut self.mark);
            return;
        }
        if let Some(error) = text.strip_prefix("patchbay-init: error: ") {
            self.init_error = Some(error.to_owned());
            return;
        }
        if text.starts_with(PANIC) {
            self.panicked.get_or_insert_with(|| text.to_owned());
        }
        let alarm = KERNEL_REPORTS.iter().any(|report| text.starts_with(report));
        if self.report.is_empty() && !alarm {
            return;
        }
        if text == CUT {
            self.finish();
            return;
        }
        self.report.push(line.trim_end().to_owned());
        let ends = ENDS.iter().any(|end| text.starts_with(end));
        if ends || self.report.len() >= REPORT_LINES {
            self.finish();
        }
    }

    /// Ends the report that is being printed.
    fn finish(&mut self) {
        let report = std::mem::take(&mut self.report).join("\n");
        if !report.is_empty() && self.reports.len() < REPORTS {
            self.reports.push(report);
        }
    }
}

/// Returns the reports in a kernel's log.
pub fn reports(log: &str) -> Vec<String> {
    let mut scanner = Scanner::default();
    for line in log.lines() {
        scanner.line(line);
    }
    scanner.finish();
    scanner.reports
}

#[derive(Debug, Default)]
struct State {
    kept: Vec<u8>,
    line: Vec<u8>,
    scanner: Scanner,
    closed: bool,
}

impl State {
    fn add(&mut self, data: &[u8]) {
        self.kept.extend(data);
        if self.kept.len() > 2 * KEPT {
            self.kept.drain(..self.kept.len() - KEPT);
        }
        for &byte in data {
            if byte != b'\n' {
                self.line.push(byte);
            }
            if byte == b'\n' || self.line.len() >= LINE {
                let line = String::from_utf8_lossy(&self.line).into_owned();
                self.line.clear();
                self.scanner.line(&line);
            }
        }
    }
}

/// The console output of a guest.
#[derive(Clone, Debug)]
pub struct Console {
    state: Arc<Mutex<State>>,
    changes: watch::Receiver<()>,
}

impl Console {
    /// Starts a task that reads the stream to its end. With `echo`, the task also copies the output
    /// to standard error.
    pub fn read(mut stream: impl AsyncRead + Unpin + Send + 'static, echo: bool) -> Self {
        let (sender, changes) = watch::channel(());
        let console = Self {
            state: Arc::default(),
            changes,
        };
        let state = console.state.clone();
        tokio::spawn(async move {
            let mut buffer = vec![0; 64 << 10];
            loop {
                let length = stream.read(&mut buffer).await.unwrap_or(0);
                if echo {
                    let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
                    // A closed standard error does not end the guest.
                    let _ = std::io::Write::write_all(
                        &mut std::io::stderr(),
                        printable(&text).as_bytes(),
                    );
                }
                let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
                state.add(&buffer[..length]);
                state.closed |= length == 0;
                // Sending fails if every receiver was dropped, which is no error.
                let _ = sender.send(());
                if length == 0 {
                    return;
                }
            }
        });
        console
    }

    fn with<T>(&self, ask: impl FnOnce(&mut State) -> T) -> T {
        ask(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Waits until `ask` returns a value; returns `None` if the console ends first.
    async fn when<T>(&self, ask: impl Fn(&State) -> Option<T>) -> Option<T> {
        let mut changes = self.changes.clone();
        loop {
            changes.mark_unchanged();
            let (answer, closed) = self.with(|state| (ask(state), state.closed));
            if answer.is_some() || closed || changes.changed().await.is_err() {
                return answer.or_else(|| self.with(|state| ask(state)));
            }
        }
    }

    /// Waits until the agent's mark appears, or the console ends.
    pub async fn mark(&self, mark: &str) {
        self.when(|state| (state.scanner.mark == mark).then_some(()))
            .await;
    }

    /// Waits for an error of the guest's init, or a panic. Without either, returns when the console
    /// closes.
    pub async fn boot_error(&self) -> Option<String> {
        self.when(|state| {
            let scanner = &state.scanner;
            scanner
                .init_error
                .clone()
                .or_else(|| scanner.panicked.clone())
        })
        .await
    }

    /// Waits for the end of the output.
    pub async fn end(&self) {
        self.when(|_| None::<()>).await;
    }

    /// Returns the kernel's reports since the last call.
    pub fn take_reports(&self) -> Vec<String> {
        self.with(|state| {
            state.scanner.finish();
            std::mem::take(&mut state.scanner.reports)
        })
    }

    /// Returns the message of the kernel's panic.
    pub fn panic(&self) -> Option<String> {
        self.with(|state| state.scanner.panicked.clone())
    }

    /// Returns the last lines, without control characters.
    pub fn tail(&self, lines: usize) -> String {
        let text = self.with(|state| String::from_utf8_lossy(&state.kept).into_owned());
        let text = printable(&text);
        let all: Vec<&str> = text.lines().collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }
}

/// Removes control characters, which a guest could use to attack a terminal.
pub fn printable(text: &str) -> String {
    let keep = |c: &char| !c.is_control() || matches!(c, '\n' | '\t');
    text.chars().filter(keep).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(text: &str) -> Scanner {
        let mut scanner = Scanner::default();
        text.lines().for_each(|line| scanner.line(line));
        scanner.finish();
        scanner
    }

    const WARNING: &str = "\
[    2.100000] some driver: fine
[    2.106000] ------------[ cut here ]------------
[    2.106100] WARNING: CPU: 0 PID: 71 at kernel/x.c:12 f+0x1/0x2 [mod]
[    2.106200] Call Trace:
[    2.106300]  <TASK>
[    2.106400] ---[ end trace 0000000000000000 ]---
[    2.200000] later
";

    #[test]
    fn a_warning_is_one_report_from_its_first_line_to_its_end() {
        let scanner = scan(WARNING);
        assert_eq!(scanner.reports.len(), 1);
        let report = &scanner.reports[0];
        assert!(
            report.contains("PID: 71") && report.ends_with("]---"),
            "{report}"
        );
        assert!(
            !report.contains("later") && !report.contains("fine"),
            "{report}"
        );
    }

    #[test]
    fn reports_of_each_kind_are_found() {
        for line in [
            "BUG: KASAN: slab-use-after-free in f+0x1/0x2",
            "WARNING: possible circular locking dependency detected",
            "WARNING: suspicious RCU usage",
            "Oops: 0000 [#1] PREEMPT SMP",
            "BUG: kernel NULL pointer dereference, address: 0000000000000000",
            "watchdog: BUG: soft lockup - CPU#0 stuck for 26s!",
            "rcu: INFO: rcu_preempt self-detected stall on CPU",
            "kernel BUG at mm/slub.c:1!",
        ] {
            for prefix in [
                "",
                "[    1.000000] ",
                "[    1.000000][    T1] ",
                "[ 1.0][ C12] ",
            ] {
                let text = format!("{prefix}{line}\n");
                assert_eq!(scan(&text).reports.len(), 1, "{text}");
            }
        }
    }

    #[test]
    fn programs_and_other_messages_fail_nothing() {
        for line in [
            "traps: prog[77] general protection fault ip:1 sp:2 error:0 in prog",
            "prog[78]: segfault at 0 ip 1 sp 2 error 4",
            "x86/cpu: VMX: no WARNING: here",
            "[x] WARNING: not a time",
            "init: Oops, said a script",
        ] {
            let text = format!("[    1.000000] {line}\n");
            assert!(scan(&text).reports.is_empty(), "{text}");
        }
    }

    #[test]
    fn a_mark_ends_a_report_and_marks_are_remembered() {
        let scanner =
            scan("[ 1.0] BUG: KASAN: x\n[ 1.1] more\n[ 1.2] patchbay-exec: 7 ends\n[ 1.3] other\n");
        assert_eq!(scanner.mark, "7 ends");
        assert_eq!(scanner.reports, ["[ 1.0] BUG: KASAN: x\n[ 1.1] more"]);
    }

    #[test]
    fn an_endless_report_is_cut() {
        let text = format!("BUG: x\n{}", "line\n".repeat(100_000));
        let scanner = scan(&text);
        assert_eq!(scanner.reports.len(), 1);
        assert_eq!(scanner.reports[0].lines().count(), REPORT_LINES);
        let flood = scan(&"BUG: x\n---[ end trace\n".repeat(1000));
        assert_eq!(flood.reports.len(), REPORTS);
    }

    #[test]
    fn panics_and_complaints_of_the_first_program_are_kept() {
        let scanner =
            scan("[ 1.0] Kernel panic - not syncing: VFS\n[ 1.1] patchbay-init: error: no vsock\n");
        assert_eq!(
            scanner.panicked.as_deref(),
            Some("Kernel panic - not syncing: VFS")
        );
        assert_eq!(scanner.init_error.as_deref(), Some("no vsock"));
    }

    #[test]
    fn memory_is_bounded() {
        let mut state = State::default();
        for _ in 0..100 {
            state.add(&vec![b'x'; 64 << 10]);
        }
        assert!(state.kept.len() <= 2 * KEPT && state.line.len() <= LINE);
    }

    #[tokio::test]
    async fn waits_end_with_the_console() {
        let (mut guest, host) = tokio::io::duplex(64);
        let console = Console::read(host, false);
        use tokio::io::AsyncWriteExt;
        guest.write_all(b"patchbay-exec: 1 ends\n").await.unwrap();
        console.mark("1 ends").await;
        drop(guest);
        console.mark("2 ends").await;
        assert_eq!(console.boot_error().await, None);
    }
}
