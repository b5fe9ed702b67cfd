// SPDX-License-Identifier: Apache-2.0
//! `patchbay ci run`: commands in guests that are booted for them, and both sides of keys.

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, ensure};
use patchbay_tests::{Environment, Guest, until};

/// The demo's key: with it on, getppid() prints a line, and each shell calls getppid().
const KEY: &str = "getppid_key";
/// Fails with the key on, whatever was printed before.
const NOTICES: &str = "dmesg -c | grep -q 'true branch' && exit 9; exit 0";

/// Runs `patchbay ci run` with the guest kernel of the tests.
struct Ci {
    command: Command,
    folder: tempfile::TempDir,
}

impl Ci {
    fn new(environment: &Environment) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let mut command = Command::new(&environment.cli);
        command
            .args(["ci", "run", "--kernel"])
            .arg(&environment.kernel)
            .current_dir(folder.path())
            .stdin(Stdio::null());
        Ok(Self { command, folder })
    }

    fn args(mut self, arguments: &[&str]) -> Self {
        self.command.args(arguments);
        self
    }

    /// Runs a shell in the guest.
    fn shell(self, script: &str) -> Result<Done> {
        self.run(&["sh", "-c", script])
    }

    fn run(mut self, command: &[&str]) -> Result<Done> {
        let output = self.command.arg("--").args(command).output();
        let output = output.context("the command-line program cannot be run")?;
        Ok(Done {
            output,
            folder: self.folder,
        })
    }
}

#[derive(Debug)]
struct Done {
    output: Output,
    folder: tempfile::TempDir,
}

impl Done {
    fn stdout(&self) -> String {
        String::from_utf8_lossy(&self.output.stdout).into_owned()
    }

    fn stderr(&self) -> String {
        String::from_utf8_lossy(&self.output.stderr).into_owned()
    }

    /// Fails unless this is the exit status and standard error contains the texts.
    fn expect(self, status: i32, texts: &[&str]) -> Result<Self> {
        let missing = texts.iter().find(|text| !self.stderr().contains(*text));
        ensure!(
            self.output.status.code() == Some(status) && missing.is_none(),
            "expected status {status} and {texts:?}, found {:?}\n{}\n{}",
            self.output.status,
            self.stdout(),
            self.stderr()
        );
        Ok(self)
    }
}

#[test]
fn status_output_and_files_come_back() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    let ci = Ci::new(&environment)?;
    std::fs::write(ci.folder.path().join("input"), "from the host\n")?;
    let script =
        "cat input; echo no >&2; mkdir -p /results/sub; echo yes >/results/sub/one; exit 7";
    let done = ci
        .args(&["--copy", "input", "--copy", "/bin/ls", "--vcpus", "2"])
        .args(&["--collect", "/results", "--collect", "/absent"])
        .args(&["--junit", "junit.xml"])
        .shell(script)?
        .expect(7, &["no\n", "/absent"])?;
    ensure!(done.stdout() == "from the host\n", "{done:?}");
    let read = |name: &str| std::fs::read_to_string(done.folder.path().join(name));
    ensure!(read("collected/results/sub/one")? == "yes\n");
    let junit = read("junit.xml")?;
    ensure!(
        junit.contains("failures=\"1\"") && junit.contains("exit status 7"),
        "{junit}"
    );
    ensure!(junit.contains("from the host"), "{junit}");
    Ok(())
}

#[test]
fn a_dynamic_program_runs_with_its_libraries() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    // Debian's coreutils are linked against several libraries; busybox in the guest has no such
    // option.
    let done = Ci::new(&environment)?
        .args(&["--copy", "/bin/ls", "--ktap"])
        .run(&["/bin/ls", "--zero", "--directory", "/patchbay/init"])?
        .expect(0, &[])?;
    ensure!(
        done.stdout()
            .ends_with("\nok 1 /bin/ls --zero --directory /patchbay/init\n"),
        "{done:?}"
    );
    Ok(())
}

#[test]
fn a_report_of_the_kernel_fails_the_run_and_is_shown() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    let script = "echo '<4>WARNING: CPU: 0 PID: 1 at made/up.c:1' >/dev/kmsg; true";
    Ci::new(&environment)?
        .shell(script)?
        .expect(1, &["the guest's kernel reported:", "made/up.c:1"])?;
    Ci::new(&environment)?
        .shell("echo c >/proc/sysrq-trigger; sleep 1000")?
        .expect(125, &["Kernel panic - not syncing: sysrq triggered crash"])?;
    Ok(())
}

#[test]
fn commands_that_do_not_run_or_end_are_named() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    let new = || Ci::new(&environment);
    new()?
        .run(&["no-such-program"])?
        .expect(127, &["no program no-such-program"])?;
    new()?
        .args(&["--copy", "/etc/passwd"])
        .run(&["/etc/passwd"])?
        .expect(127, &["/etc/passwd is not executable"])?;
    new()?
        .args(&["--timeout", "2s"])
        .shell("echo started; sleep 1000")?
        .expect(124, &["did not end within 2 s"])?;
    // A flood ends with the command, and its end is the junit report's.
    new()?
        .args(&["--timeout", "3s", "--junit", "junit.xml"])
        .run(&["yes"])?
        .expect(124, &["did not end within 3 s"])?;
    new()?
        .shell("kill -KILL $(pidof patchbay-agent); sleep 1000")?
        .expect(125, &["the agent in the guest ended"])?;
    new()?
        .shell("poweroff -f; sleep 1000")?
        .expect(125, &["powered off or reset"])?;
    Ok(())
}

#[test]
fn what_cannot_boot_says_why() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    let new = || Ci::new(&environment);
    new()?
        .args(&["--append", "rdinit=/none init=/none root=/dev/none"])
        .run(&["true"])?
        .expect(
            125,
            &[
                "did not boot: Kernel panic",
                "the guest's console ends with",
            ],
        )?;
    new()?
        .args(&["--append", "initcall_blacklist=virtio_vsock_init"])
        .run(&["true"])?
        .expect(125, &["agent"])?;
    let copy = "/no/such/file";
    new()?
        .args(&["--copy", copy])
        .run(&["true"])?
        .expect(125, &["cannot copy /no/such/file"])?;
    Ok(())
}

#[test]
fn the_matrix_names_the_key_whose_other_side_fails() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    let matrix = [
        "--allow-guarded",
        "--matrix",
        "getppid*",
        "sched_*",
        "!sched_core*",
    ];
    let done = Ci::new(&environment)?
        .args(&matrix)
        .args(&["--ktap", "--junit", "junit.xml"])
        .shell(NOTICES)?
        .expect(1, &["1 failed", ", 1 boot "])?;
    let failed: Vec<String> = done
        .stdout()
        .lines()
        .filter_map(|line| Some(line.strip_prefix("not ok ")?.to_owned()))
        .collect();
    ensure!(
        failed.len() == 1 && failed[0].ends_with(" getppid_key=on"),
        "{done:?}"
    );
    ensure!(
        done.stdout().contains("\nok 1 no key flipped\n"),
        "{done:?}"
    );

    let together = Ci::new(&environment)?
        .args(&matrix)
        .args(&["--together"])
        .shell(NOTICES)?
        .expect(1, &["fails with getppid_key=on: exit status 9"])?;
    ensure!(
        !together.stderr().contains("getppid_key=on sched"),
        "{together:?}"
    );
    Ok(())
}

#[test]
fn a_guest_that_crashes_is_booted_anew_and_the_rest_goes_on() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    let crashes = "dmesg -c | grep -q 'true branch' && echo c >/proc/sysrq-trigger; true";
    Ci::new(&environment)?
        .args(&["--allow-guarded", "--matrix", "getppid*", "sched_*"])
        .shell(crashes)?
        .expect(
            1,
            &[
                "FAIL  getppid_key=on",
                "sysrq triggered crash",
                "1 failed",
                ", 2 boots ",
            ],
        )?;
    Ok(())
}

#[test]
fn keys_are_set_and_bad_keys_are_named() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    let new = || Ci::new(&environment);
    new()?
        .args(&["--set", "getppid_key=on"])
        .shell(NOTICES)?
        .expect(9, &[])?;
    // The command's failure says nothing about a key if it fails without one.
    new()?
        .args(&["--matrix", KEY])
        .run(&["false"])?
        .expect(1, &["FAIL  no key flipped", "no key was flipped"])?;
    new()?
        .args(&["--matrix", "getppid_kez"])
        .run(&["true"])?
        .expect(125, &["no key getppid_kez"])?;
    new()?
        .args(&["--matrix", "sched_schedstats"])
        .run(&["true"])?
        .expect(125, &["sched_schedstats", "--allow-guarded"])?;
    Ok(())
}

/// A guest whose agent is connected, and the socket to which an agent that runs commands connects.
async fn with_exec_socket(environment: &Environment, words: &str) -> Result<(Guest, UnixListener)> {
    let builder = Guest::builder(environment).agent().command_line(words);
    let mut guest = builder.boot().await?;
    guest.wait_for_agent().await?;
    guest.kill_agent().await?;
    let listener = UnixListener::bind(guest.folder().join("vsock_1025"))?;
    listener.set_nonblocking(true)?;
    guest.start_agent().await?;
    Ok((guest, listener))
}

#[tokio::test]
async fn the_agent_offers_commands_only_if_the_guest_was_booted_for_them() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    let (_guest, listener) = with_exec_socket(&environment, "patchbay.exec").await?;
    until(async || Ok(listener.accept().is_ok())).await?;
    let (mut guest, listener) = with_exec_socket(&environment, "patchbay.execute").await?;
    // The agent tries again every 50 ms; these take longer.
    guest.arm(&["sched:sched_switch"]).await?;
    guest.shell("sleep 1").await?;
    ensure!(listener.accept().is_err(), "the agent offers commands");
    Ok(())
}

#[test]
fn an_interrupted_run_leaves_no_guest() -> Result<()> {
    use std::io::Read;
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    for signal in ["INT", "KILL"] {
        let mut ci = Ci::new(&environment)?;
        let mut child = ci
            .command
            .args(["--", "sh", "-c", "echo ready; sleep 1000"])
            .stdout(Stdio::piped())
            .spawn()?;
        let mut ready = [0; 6];
        let mut stdout = child.stdout.take().context("a pipe")?;
        stdout.read_exact(&mut ready)?;
        let monitors = children(child.id())?;
        ensure!(monitors.len() == 1, "{monitors:?}");
        let pid = child.id().to_string();
        ensure!(
            Command::new("kill")
                .args(["-s", signal, &pid])
                .status()?
                .success()
        );
        child.wait()?;
        // The end of a process that is not a child has no event here.
        let gone = || !Path::new(&format!("/proc/{}", monitors[0])).exists();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while !gone() {
            ensure!(std::time::Instant::now() < deadline, "the monitor runs on");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
    Ok(())
}

/// Process ids of the children of a process.
fn children(pid: u32) -> Result<Vec<String>> {
    let list = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
    Ok(list.split_whitespace().map(str::to_owned).collect())
}
