// SPDX-License-Identifier: Apache-2.0
//! Runs single tests, each in a separate process, here or in a lab.
//!
//! A lab is reused for many tests. In it, `xtask run-tests` reads one test per line from standard
//! input and answers each with one line, both in JSON. It also prints an empty line periodically,
//! so that a lab that has died or hangs is detected quickly. The test that ran in such a lab has
//! failed, and the next test starts a new lab. `test_run` repeats the tests that failed in a lab.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal};
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use crate::step::dying_with_us;

/// The prefix of the line that a skipped test prints, followed by the reason.
const SKIP_MARK: &str = "SKIPPED: ";

/// The limit on the output that is kept of a test.
const OUTPUT_CAP: usize = 256 * 1024;

/// The interval at which the lab prints an empty line, on the lab's clock.
const SIGN_OF_LIFE: Duration = Duration::from_secs(2);

/// The time without any line from a lab after which the lab counts as dead. It is long, because the
/// lab's clock may be slower than this machine's.
const SILENCE: Duration = Duration::from_secs(60);

/// The same limit before the first line. A lab that cannot boot reports an error before this limit.
const SILENCE_AT_START: Duration = Duration::from_secs(360);

/// One test function.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Test {
    /// Package and target.
    pub suite: String,
    /// Path of the function within the target.
    pub name: String,
    pub binary: PathBuf,
    /// Directory in which the test runs.
    pub folder: PathBuf,
    /// Environment variables, in addition to those of this process.
    pub variables: Vec<(String, PathBuf)>,
    /// A name that distinguishes this run of the function from its other runs, such as a kernel.
    pub with: Option<String>,
}

impl Test {
    /// Returns "suite function", followed by the name of this run if it has one.
    pub fn full_name(&self) -> String {
        let Self { suite, name, .. } = self;
        match &self.with {
            Some(with) => format!("{suite} {name} ({with})"),
            None => format!("{suite} {name}"),
        }
    }
}

/// Result of a test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    Passed,
    /// The reason, unless the output contains it.
    Failed(String),
    /// The reason that the test printed.
    Skipped(String),
}

/// A test's verdict and its output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    pub verdict: Verdict,
    pub time: Duration,
    pub output: String,
}

impl Report {
    /// Returns the report of a test that could not run.
    pub fn not_run(why: impl Into<String>) -> Self {
        Self {
            verdict: Verdict::Failed(why.into()),
            time: Duration::ZERO,
            output: String::new(),
        }
    }

    /// Returns the report of a test that is not run for this reason.
    pub fn skipped(why: impl Into<String>) -> Self {
        Self {
            verdict: Verdict::Skipped(why.into()),
            ..Self::not_run("")
        }
    }

    pub fn failed(&self) -> bool {
        matches!(self.verdict, Verdict::Failed(_))
    }
}

/// Returns the names of the tests in an executable.
pub fn list(binary: &Path, folder: &Path) -> Result<Vec<String>> {
    let output = Command::new(binary)
        .args(["--list", "--format", "terse"])
        .current_dir(folder)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {}", binary.display()))?;
    if !output.status.success() {
        bail!("{} --list failed ({})", binary.display(), output.status);
    }
    let text = String::from_utf8(output.stdout)?;
    Ok(text
        .lines()
        .filter_map(|line| line.strip_suffix(": test"))
        .map(Into::into)
        .collect())
}

/// Runs tests that share the snapshots of guests that they take. Most tests need a guest that has
/// booted and do not test the boot.
pub struct SharingSnapshots(TempDir);

impl SharingSnapshots {
    pub fn new() -> io::Result<Self> {
        tempfile::tempdir().map(Self)
    }

    /// Runs one test in a separate process.
    pub fn run(&self, test: &Test, timeout: Duration) -> Report {
        let mut test = test.clone();
        let folder = ("PATCHBAY_TEST_SNAPSHOTS".to_owned(), self.0.path().into());
        test.variables.push(folder);
        run_here(&test, timeout)
    }
}

/// Runs one test in a separate process. It boots its own guests.
pub fn run_here(test: &Test, timeout: Duration) -> Report {
    let start = Instant::now();
    let report = start_and_watch(test, timeout).unwrap_or_else(|error| {
        Report::not_run(format!("cannot run {}: {error}", test.binary.display()))
    });
    Report {
        time: start.elapsed(),
        ..report
    }
}

fn start_and_watch(test: &Test, timeout: Duration) -> io::Result<Report> {
    let (reader, writer) = io::pipe()?;
    let mut command = Command::new(&test.binary);
    command
        .args([&test.name, "--exact", "--nocapture"])
        .current_dir(&test.folder);
    command
        .env("CARGO_MANIFEST_DIR", &test.folder)
        .stdin(Stdio::null());
    command.envs(test.variables.iter().map(|(name, path)| (name, path)));
    command.stdout(writer.try_clone()?).stderr(writer);
    let mut child = command.spawn()?;
    // The command holds this process's copies of the pipe's write end. While they are open, the
    // reader does not see the end of the output.
    drop(command);
    let collector = Collector::start(reader);
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break Some(status);
        }
        if start.elapsed() > timeout {
            kill_tree(child.id());
            child.wait()?;
            break None;
        }
        thread::sleep(Duration::from_millis(5));
    };
    let output = collector.finish();
    let verdict = match status {
        Some(status) => verdict(status, &output),
        None => Verdict::Failed(format!("killed after {} s", timeout.as_secs())),
    };
    Ok(Report {
        verdict,
        time: Duration::ZERO,
        output,
    })
}

/// Returns the reason in a line of a skipped test. With one CPU, libtest has already begun the
/// line: "test NAME ... ".
fn skip_reason(line: &str) -> Option<&str> {
    let begun = line
        .strip_prefix("test ")
        .and_then(|rest| rest.split_once(" ... "));
    let printed = begun.map_or(line, |(_, printed)| printed);
    printed.strip_prefix(SKIP_MARK).map(str::trim)
}

fn verdict(status: ExitStatus, output: &str) -> Verdict {
    if !status.success() {
        return Verdict::Failed(status.to_string());
    }
    if let Some(reason) = output.lines().find_map(skip_reason) {
        return Verdict::Skipped(reason.to_owned());
    }
    // libtest also succeeds if the name matches no test.
    if output.contains("test result: ok. 1 passed") {
        Verdict::Passed
    } else {
        Verdict::Failed("the test did not run".into())
    }
}

/// Collects the output of a process in the background.
struct Collector {
    output: Arc<Mutex<Vec<u8>>>,
    done: Receiver<()>,
}

impl Collector {
    fn start(mut pipe: impl Read + Send + 'static) -> Self {
        let output = Arc::new(Mutex::new(Vec::new()));
        let (sender, done) = mpsc::channel::<()>();
        let shared = Arc::clone(&output);
        thread::spawn(move || {
            let _sender = sender;
            let mut buffer = [0; 8192];
            while let Ok(length @ 1..) = pipe.read(&mut buffer) {
                let Ok(mut output) = shared.lock() else {
                    return;
                };
                output.extend_from_slice(&buffer[..length]);
                // The end is more useful than the beginning.
                let excess = output.len().saturating_sub(OUTPUT_CAP);
                output.drain(..excess);
            }
        });
        Self { output, done }
    }

    /// Returns the output. Does not wait for a process that the test left behind and that holds the
    /// pipe open.
    fn finish(self) -> String {
        let _ = self.done.recv_timeout(Duration::from_secs(1));
        let output = self
            .output
            .lock()
            .map(|output| output.clone())
            .unwrap_or_default();
        String::from_utf8_lossy(&output).into_owned()
    }
}

/// Kills a process and its descendants. Finds children before it kills their parents.
fn kill_tree(process: u32) {
    let mut tree = vec![process];
    let mut next = 0;
    while let Some(&parent) = tree.get(next) {
        let path = format!("/proc/{parent}/task/{parent}/children");
        let children = std::fs::read_to_string(path).unwrap_or_default();
        tree.extend(
            children
                .split_whitespace()
                .filter_map(|child| child.parse::<u32>().ok()),
        );
        next += 1;
    }
    for process in tree {
        if let Some(process) = i32::try_from(process).ok().and_then(Pid::from_raw) {
            let _ = rustix::process::kill_process(process, Signal::KILL);
        }
    }
}

/// Runs tests in a loop inside a lab.
pub fn serve(timeout: Duration) -> Result<()> {
    thread::spawn(|| {
        while say("").is_ok() {
            thread::sleep(SIGN_OF_LIFE);
        }
    });
    let here = SharingSnapshots::new()?;
    for line in io::stdin().lock().lines() {
        let test = decode_test(&line?).context("a test as JSON on standard input")?;
        say(&encode_report(&here.run(&test, timeout)))?;
    }
    Ok(())
}

/// Writes one line.
fn say(line: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{line}")?;
    stdout.flush()
}

/// A lab that runs tests. It starts with the first test.
pub struct LabWorker {
    timeout: Duration,
    running: Option<Running>,
}

struct Running {
    lab: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
    /// The timeout for the next line.
    patience: Duration,
}

impl LabWorker {
    /// Creates a worker whose lab starts with the first test. `timeout` is the timeout of a single
    /// test.
    pub fn new(timeout: Duration) -> Self {
        Self {
            timeout,
            running: None,
        }
    }

    /// Runs one test in the lab. If the lab dies, the test fails, and the next test starts a new
    /// lab.
    pub fn run(&mut self, test: &Test) -> Report {
        self.try_run(test).unwrap_or_else(|error| {
            if let Some(mut running) = self.running.take() {
                let _ = running.lab.kill();
                let _ = running.lab.wait();
            }
            Report::not_run(format!("{error:#}"))
        })
    }

    fn try_run(&mut self, test: &Test) -> Result<Report> {
        let running = match &mut self.running {
            Some(running) => running,
            none => none.insert(start_lab(self.timeout)?),
        };
        let mut line = encode_test(test);
        line.push('\n');
        running
            .stdin
            .write_all(line.as_bytes())
            .context("the lab accepts no more tests")?;
        // The lab itself ends a test that takes too long.
        loop {
            let answer = running
                .lines
                .recv_timeout(running.patience)
                .context("the lab died or hangs (its messages: target/lab-logs)")?;
            running.patience = SILENCE;
            if !answer.is_empty() {
                return decode_report(&answer);
            }
        }
    }
}

impl Drop for LabWorker {
    fn drop(&mut self) {
        if let Some(Running { mut lab, stdin, .. }) = self.running.take() {
            // Closing standard input ends the loop in the lab, and thereby the lab.
            drop(stdin);
            let _ = lab.wait();
        }
    }
}

fn start_lab(timeout: Duration) -> Result<Running> {
    let this = std::env::current_exe()?;
    let mut command = Command::new(&this);
    command.args(["lab", "--"]).arg(&this).arg("run-tests");
    command.args(["--timeout", &timeout.as_secs().to_string()]);
    // Resolving symbols takes the emulated CPU longer than many tests take.
    command.env("RUST_BACKTRACE", "0");
    let mut lab = dying_with_us(&command)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let stdin = lab.stdin.take().context("the lab has no standard input")?;
    let stdout = lab
        .stdout
        .take()
        .context("the lab has no standard output")?;
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    Ok(Running {
        lab,
        stdin,
        lines,
        patience: SILENCE_AT_START,
    })
}

fn encode_test(test: &Test) -> String {
    let variables = test.variables.iter();
    let variables: Map<String, Value> = variables
        .map(|(name, path)| (name.clone(), path.to_string_lossy().into()))
        .collect();
    json!({
        "suite": test.suite,
        "name": test.name,
        "binary": test.binary.to_string_lossy(),
        "folder": test.folder.to_string_lossy(),
        "variables": variables,
    })
    .to_string()
}

fn decode_test(line: &str) -> Result<Test> {
    let value: Value = serde_json::from_str(line)?;
    let text = |field: &str| -> Result<String> {
        Ok(value[field]
            .as_str()
            .with_context(|| format!("no {field}"))?
            .to_owned())
    };
    let variables = value["variables"].as_object().context("no variables")?;
    let variable = |(name, path): (&String, &Value)| {
        let path = path.as_str().context("a variable is no text")?;
        Ok((name.clone(), path.into()))
    };
    Ok(Test {
        variables: variables.iter().map(variable).collect::<Result<_>>()?,
        suite: text("suite")?,
        name: text("name")?,
        binary: text("binary")?.into(),
        folder: text("folder")?.into(),
        with: None,
    })
}

fn encode_report(report: &Report) -> String {
    let (verdict, reason) = match &report.verdict {
        Verdict::Passed => ("passed", ""),
        Verdict::Failed(reason) => ("failed", reason.as_str()),
        Verdict::Skipped(reason) => ("skipped", reason.as_str()),
    };
    json!({
        "verdict": verdict,
        "reason": reason,
        "seconds": report.time.as_secs_f64(),
        "output": report.output,
    })
    .to_string()
}

fn decode_report(line: &str) -> Result<Report> {
    let value: Value = serde_json::from_str(line).context("the lab's answer is not a report")?;
    let reason = value["reason"].as_str().unwrap_or_default().to_owned();
    let verdict = match value["verdict"].as_str() {
        Some("passed") => Verdict::Passed,
        Some("skipped") => Verdict::Skipped(reason),
        _ => Verdict::Failed(reason),
    };
    let seconds = value["seconds"].as_f64().unwrap_or_default();
    Ok(Report {
        verdict,
        time: Duration::try_from_secs_f64(seconds)?,
        output: value["output"].as_str().unwrap_or_default().to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// A stand-in for a test executable: a shell script that gets libtest's arguments.
    fn run_script(script: &str, timeout: Duration) -> Report {
        let folder = tempfile::tempdir().unwrap();
        let binary = folder.path().join("tests");
        std::fs::write(&binary, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&binary, std::fs::Permissions::from_mode(0o755)).unwrap();
        let folder = folder.path().to_path_buf();
        let test = Test {
            suite: "s".into(),
            name: "a::b".into(),
            binary,
            folder,
            variables: vec![("WORD".into(), "x y".into())],
            with: None,
        };
        run_here(&test, timeout)
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn verdicts() {
        let passed = run_script(
            "[ \"$1 $2 $WORD\" = 'a::b --exact x y' ] && echo 'test result: ok. 1 passed'",
            LONG,
        );
        assert_eq!(passed.verdict, Verdict::Passed);
        let nothing = run_script("echo 'test result: ok. 0 passed'", LONG);
        assert_eq!(
            nothing.verdict,
            Verdict::Failed("the test did not run".into())
        );
        let skipped = run_script(
            "echo 'SKIPPED: no KVM' >&2; echo 'test result: ok. 1 passed'",
            LONG,
        );
        assert_eq!(skipped.verdict, Verdict::Skipped("no KVM".into()));
        let on_one_cpu = run_script(
            "echo 'test a::b ... SKIPPED: no KVM'; echo 'test result: ok. 1 passed'",
            LONG,
        );
        assert_eq!(on_one_cpu.verdict, Verdict::Skipped("no KVM".into()));
        let failed = run_script("echo SKIPPED: too late; echo why; exit 101", LONG);
        assert_eq!(failed.verdict, Verdict::Failed("exit status: 101".into()));
        assert!(failed.output.contains("why\n"));
        let killed = run_script("kill -SEGV $$", LONG);
        assert!(matches!(killed.verdict, Verdict::Failed(reason) if reason.contains("signal: 11")));
    }

    #[test]
    fn a_test_that_hangs_is_killed_with_its_children() {
        let report = run_script("sleep 1000 & echo $!; wait", Duration::from_millis(300));
        assert_eq!(report.verdict, Verdict::Failed("killed after 0 s".into()));
        let child = report.output.trim();
        let begun = Instant::now();
        // The child may close its pipe a moment before it is a zombie.
        let has_ended = || {
            let state = std::fs::read_to_string(format!("/proc/{child}/stat")).unwrap_or_default();
            state.is_empty() || state.contains(" Z ")
        };
        while !has_ended() {
            assert!(begun.elapsed() < LONG, "the child runs");
            std::thread::yield_now();
        }
    }

    #[test]
    fn the_lines_between_host_and_lab_read_back() {
        let test = Test {
            suite: "s".into(),
            name: "a::b".into(),
            binary: "/x y".into(),
            folder: "/".into(),
            variables: vec![("A".into(), "/a".into()), ("B".into(), "/b c".into())],
            with: None,
        };
        assert_eq!(decode_test(&encode_test(&test)).unwrap(), test);
        for verdict in [
            Verdict::Passed,
            Verdict::Failed("why".into()),
            Verdict::Skipped("no\nKVM".into()),
        ] {
            let time = Duration::from_millis(1250);
            let report = Report {
                verdict,
                time,
                output: "two\nlines \"x\" \u{fffd}".into(),
            };
            let line = encode_report(&report);
            assert!(!line.contains('\n'));
            assert_eq!(decode_report(&line).unwrap(), report);
        }
        assert!(decode_report("lab: something else").is_err());
    }
}
