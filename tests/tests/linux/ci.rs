// SPDX-License-Identifier: Apache-2.0
//! Tests `patchbay ci`: commands in guests that are booted for them, both sides of keys, and the
//! effect of keys on a benchmark.

use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use patchbay_proto::{EXEC_PORT, EXEC_WORD};
use patchbay_tests::{Environment, Guest, TestGuest, until};

/// The keys that may be flipped in a running guest. With the demo's getppid_key on, getppid()
/// prints a line, and each shell calls getppid().
const MATRIX: [&str; 5] = [
    "--allow-guarded",
    "--matrix",
    "getppid*",
    "sched_*",
    "!sched_core*",
];

/// Runs `patchbay ci run` with the guest kernel of the tests.
struct Ci {
    command: Command,
    folder: tempfile::TempDir,
}

impl Ci {
    fn new(environment: &Environment) -> Result<Self> {
        Self::verb("run", environment)
    }

    /// Makes `patchbay ci VERB` with the guest kernel of the tests.
    fn verb(verb: &str, environment: &Environment) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let mut command = Command::new(&environment.cli);
        command
            .args(["ci", verb, "--kernel"])
            .arg(&environment.kernel)
            .current_dir(folder.path())
            .stdin(Stdio::null());
        Ok(Self { command, folder })
    }

    fn args(mut self, arguments: &[impl AsRef<OsStr>]) -> Self {
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

    /// Fails unless the exit status is `status` and standard error contains `texts`.
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
    // Debian's ls is linked against several libraries, and busybox in the guest has no option
    // --zero.
    let script = "cat input; /bin/ls --zero --directory /patchbay/init; echo no >&2; \
                  mkdir -p /results/sub; echo yes >/results/sub/one; exit 7";
    let done = ci
        .args(&["--copy", "input", "--copy", "/bin/ls", "--vcpus", "2"])
        .args(&["--collect", "/results", "--collect", "/absent"])
        .args(&["--junit", "junit.xml"])
        .shell(script)?
        .expect(7, &["no\n", "/absent"])?;
    ensure!(
        done.stdout() == "from the host\n/patchbay/init\0",
        "{done:?}"
    );
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
fn a_key_is_set_and_a_report_of_the_kernel_fails_the_run() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    let script = "dmesg | grep -q 'true branch' || exit 9; \
                  echo '<4>WARNING: CPU: 0 PID: 1 at made/up.c:1' >/dev/kmsg; true";
    Ci::new(&environment)?
        .args(&["--set", "getppid_key=on"])
        .shell(script)?
        .expect(1, &["the guest's kernel reported:", "made/up.c:1"])?;
    Ok(())
}

#[test]
fn a_flood_ends_with_its_command() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    let done = Ci::new(&environment)?
        .args(&["--timeout", "3s", "--junit", "junit.xml"])
        .run(&["yes"])?
        .expect(124, &["did not end within 3 s"])?;
    let junit = std::fs::read_to_string(done.folder.path().join("junit.xml"))?;
    // The limit allows for the output that is kept, and for XML's escapes.
    ensure!(
        junit.contains("did not end within 3 s") && junit.len() < 2 << 20,
        "{} bytes",
        junit.len()
    );
    Ok(())
}

#[test]
fn a_kernel_without_the_device_for_commands_says_so() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    // Without the check in the guest's init, the agent would try to connect until the boot times
    // out.
    Ci::new(&environment)?
        .args(&["--append", "initcall_blacklist=virtio_vsock_init"])
        .run(&["true"])?
        .expect(125, &["its driver found no device"])?;
    Ok(())
}

/// Each command leaves a file and fails if it finds that of another command. With getppid_key on,
/// it crashes its guest, which runs at the same time as another one.
#[test]
fn fresh_copies_share_neither_files_nor_crashes() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    let script = "test -e /tmp/left && exit 9; echo left | tee /tmp/left; \
                  dmesg -c | grep -q 'true branch' && echo c >/proc/sysrq-trigger; true";
    let done = Ci::new(&environment)?
        .args(&MATRIX)
        .args(&["--fresh", "--jobs", "2", "--ktap"])
        .args(&["--collect", "/tmp/left"])
        .shell(script)?
        .expect(
            1,
            &["sysrq triggered crash", "1 failed", ", 1 boot ", " copies "],
        )?;
    let failed: Vec<String> = done
        .stdout()
        .lines()
        .filter_map(|line| Some(line.strip_prefix("not ok ")?.to_owned()))
        .collect();
    ensure!(
        failed.len() == 1 && failed[0].ends_with(" getppid_key=on"),
        "{done:?}"
    );
    let key = "sched_asym_cpucapacity=on";
    ensure!(done.stdout().contains(&format!(" {key}\n")), "{done:?}");
    for run in ["no_key_flipped", key] {
        let file = done.folder.path().join("collected").join(run).join("left");
        ensure!(std::fs::read_to_string(file)? == "left\n", "{run}");
    }
    Ok(())
}

#[test]
fn copies_have_the_keys_that_were_set() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    // Each shell calls getppid().
    let script = "dmesg -c >/dev/null; sh -c true; dmesg | grep -q 'true branch'";
    Ci::new(&environment)?
        .args(&["--set", "getppid_key=on", "--allow-guarded", "--fresh"])
        .args(&["--matrix", "sched_asym_cpucapacity"])
        .shell(script)?
        .expect(0, &["2 passed", ", 1 boot ", ", 2 copies "])?;
    Ok(())
}

#[test]
fn the_matrix_names_the_key_that_crashes_and_goes_on_after_it() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    let crashes = "dmesg -c | grep -q 'true branch' && echo c >/proc/sysrq-trigger; true";
    let done = Ci::new(&environment)?
        .args(&MATRIX)
        .args(&["--ktap", "--junit", "junit.xml"])
        .shell(crashes)?
        .expect(1, &["sysrq triggered crash", "1 failed", ", 2 boots "])?;
    let failed: Vec<String> = done
        .stdout()
        .lines()
        .filter_map(|line| Some(line.strip_prefix("not ok ")?.to_owned()))
        .collect();
    ensure!(
        failed.len() == 1 && failed[0].ends_with(" getppid_key=on"),
        "{done:?}"
    );
    for text in ["\nok 1 no key flipped\n", " sched_asym_cpucapacity=on\n"] {
        ensure!(done.stdout().contains(text), "{text:?} of {done:?}");
    }
    Ok(())
}

#[test]
fn together_finds_the_key_whose_other_side_fails() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    // The command fails only if the key is on; earlier messages do not matter.
    let notices = "dmesg -c | grep -q 'true branch' && exit 9; exit 0";
    let done = Ci::new(&environment)?
        .args(&MATRIX)
        .args(&["--together"])
        .shell(notices)?;
    // This takes one boot, so the keys were restored before smaller sets were tried.
    done.expect(
        1,
        &["fails with getppid_key=on: exit status 9", ", 1 boot "],
    )?;
    Ok(())
}

/// The command fails only with both keys on. With getppid_key on, the kernel prints a line, and the
/// state of sched_schedstats is readable in /proc.
#[test]
fn pairs_find_two_keys_that_fail_together() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    // Each shell calls getppid().
    let both = "dmesg -c >/dev/null; sh -c true; dmesg | grep -q 'true branch' && \
                grep -q 1 /proc/sys/kernel/sched_schedstats && exit 9; exit 0";
    let keys = ["getppid_key", "sched_asym_cpucapacity", "sched_schedstats"];
    Ci::new(&environment)?
        .args(&["--allow-guarded", "--pairs", "--matrix"])
        .args(&keys)
        .shell(both)?
        .expect(
            1,
            &[
                "3 keys: 7 runs, 1 with no key flipped, 3 with one, 3 with two",
                "FAIL  getppid_key=on sched_schedstats=on",
                "6 passed, 1 failed",
                ", 1 boot ",
            ],
        )?;
    // With three keys, a run of the covering array flips one pair or all keys.
    let words = ["--allow-guarded", "--pairs=covering", "--fresh", "--matrix"];
    Ci::new(&environment)?
        .args(&words)
        .args(&keys)
        .shell(both)?
        .expect(
            1,
            &[
                "fails with getppid_key=on sched_schedstats=on: exit status 9",
                ", 1 boot ",
            ],
        )?;
    Ok(())
}

/// Compares two keys by their effect on getppid(), the shortest system call. With getppid_key on,
/// each call prints a line. The other key belongs to the scheduler and has no effect on the call.
/// The confidence is high, so that a false difference is improbable.
#[test]
fn a_key_that_slows_a_system_call_is_found_and_one_that_does_not_is_not() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    let done = Ci::verb("compare", &environment)?
        .args(&[OsStr::new("--initrd"), environment.initramfs.as_os_str()])
        .args(&["--key", "getppid_key", "--key", "sched_asym_cpucapacity"])
        .args(&["--allow-guarded", "--runs", "20", "--confidence", "0.999"])
        .args(&["--metric", r"^\d+ (\d+)$", "--seed", "1"])
        .args(&["--plot", "plot.svg", "-o", "json"])
        .run(&["cost_tool", "getppid", "10", "9"])?
        .expect(0, &[", 1 boot "])?;
    let comparison: serde_json::Value = serde_json::from_str(&done.stdout())?;
    println!("{comparison}");
    let [slow, other] = [0, 1].map(|at| &comparison["keys"][at]);
    ensure!(
        slow["name"] == "getppid_key" && slow["result"] == "difference",
        "{comparison}"
    );
    let low = slow["low"].as_f64().context("a number")?;
    ensure!(low > 2.0, "{comparison}");
    ensure!(other["result"] == "no_difference", "{comparison}");
    let plot = std::fs::read_to_string(done.folder.path().join("plot.svg"))?;
    ensure!(plot.contains(">getppid_key<"), "{plot}");
    Ok(())
}

#[tokio::test]
async fn the_agent_offers_commands_only_if_the_guest_was_booted_for_them() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    let word = format!("{EXEC_WORD}ute");
    let builder = Guest::builder(&environment).agent().command_line(&word);
    let mut guest = builder.boot().await?;
    guest.wait_for_agent().await?;
    guest.kill_agent().await?;
    let listener = UnixListener::bind(guest.folder().join(format!("vsock_{EXEC_PORT}")))?;
    listener.set_nonblocking(true)?;
    guest.start_agent().await?;
    // The agent retries every 50 ms, and these commands take longer.
    guest.arm(&["sched:sched_switch"]).await?;
    guest.shell("sleep 1").await?;
    ensure!(listener.accept().is_err(), "the agent offers commands");

    // With the word on its command line, the same agent connects. This shows that a connection was
    // possible before, and that the agent did not attempt it.
    guest.kill_agent().await?;
    guest
        .shell(&format!(
            "sed s/{word}/{EXEC_WORD}/ /proc/cmdline >/tmp/cmdline && mount -o bind /tmp/cmdline /proc/cmdline"
        ))
        .await?;
    guest.start_agent().await?;
    until(async || Ok(listener.accept().is_ok())).await?;
    Ok(())
}

/// Tests guests of `patchbay-testing` that run commands.
#[tokio::test]
async fn a_guest_with_commands_starts_from_a_snapshot() -> Result<()> {
    let Some((environment, agent)) = Environment::linux_guest().zip(Environment::agent()) else {
        return Ok(());
    };
    let builder = Guest::builder(&environment.kernel)
        .monitor(&environment.monitor)
        .agent_program(&agent)
        .memory("256M");
    let mut guest = builder.clone().boot().await?;
    let write = |word| ["sh", "-c", word];
    guest.run(&write("echo saved >/word")).await?.success()?;
    let folder = tempfile::tempdir()?;
    let snapshot = folder.path().join("snapshot");
    guest.snapshot(&snapshot).await?;
    guest.run(&write("echo later >/word")).await?.success()?;
    let again = guest.snapshot(&snapshot).await;
    let error = again.err().context("the folder exists")?.to_string();
    ensure!(error.starts_with("cannot create"), "{error}");

    for _ in 0..2 {
        let mut copy = builder.clone().from_snapshot(&snapshot).boot().await?;
        ensure!(copy.run(&["cat", "/word"]).await?.success()? == "saved");
        ensure!(copy.shell("cat /word").await? == "saved");
        copy.run(&write("echo copy >/word")).await?.success()?;
    }
    ensure!(guest.run(&["cat", "/word"]).await?.success()? == "later");
    let missing = builder.from_snapshot(folder.path()).boot().await;
    let error = missing.err().context("there is no snapshot")?.to_string();
    ensure!(error.contains("monitor ended"), "{error}");
    Ok(())
}

#[test]
fn a_killed_run_leaves_no_guest() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
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
    child.kill()?;
    child.wait()?;
    // There is no event for the end of a process that is not a child.
    let gone = || !Path::new(&format!("/proc/{}", monitors[0])).exists();
    let deadline = Instant::now() + Duration::from_secs(60);
    while !gone() {
        ensure!(Instant::now() < deadline, "the monitor runs on");
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Returns the process ids of the children of a process.
fn children(pid: u32) -> Result<Vec<String>> {
    let list = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
    Ok(list.split_whitespace().map(str::to_owned).collect())
}
