// SPDX-License-Identifier: Apache-2.0
//! Tests faults around a live guest: late vCPUs, clients that are killed, a full disk, and the end
//! of the monitor in the middle of its work.

use std::collections::HashMap;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use patchbay_proto::v1::{
    KeyOp, KeyUpdate, UpdateStaticKeysRequest, UpdateStaticKeysResponse, WatchStaticKeysRequest,
};
use patchbay_tests::{Environment, Guest, TestGuest};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tonic::{Code, Status};

const TEST: &str = "/sys/kernel/debug/patchbay_test";
const REF_KEY: &str = "patchbay_test:ref_key";

fn request(op: KeyOp) -> UpdateStaticKeysRequest {
    UpdateStaticKeysRequest {
        updates: vec![KeyUpdate {
            name: REF_KEY.to_owned(),
            op: op.into(),
            ..Default::default()
        }],
        ..Default::default()
    }
}

async fn flip(guest: &mut Guest, op: KeyOp) -> Result<UpdateStaticKeysResponse, Status> {
    let answer = guest.static_keys().update_static_keys(request(op)).await?;
    Ok(answer.into_inner())
}

/// Returns the count and the branch of the key, as the guest sees them.
async fn seen(guest: &mut Guest) -> Result<String> {
    guest
        .shell(&format!(
            "cd {TEST}/keys/ref_key && echo $(cat raw unlikely); cd /"
        ))
        .await
}

fn signal(guest: &Guest, signal: Signal) -> Result<()> {
    let pid = guest.monitor_pid().context("the monitor has ended")?;
    let pid = Pid::from_raw(pid.cast_signed()).context("its pid")?;
    Ok(kill_process(pid, signal)?)
}

/// Returns the lines of an audit log: JSON, or `None` for a line that a full disk has cut off.
fn audit_lines(path: &Path) -> Result<Vec<Option<Value>>> {
    let text = std::fs::read_to_string(path)?;
    Ok(text
        .lines()
        .map(|line| serde_json::from_str(line).ok())
        .collect())
}

/// Returns the outcomes of intents by their number.
fn outcomes(lines: &[Option<Value>]) -> Result<HashMap<u64, Option<String>>> {
    let mut outcomes = HashMap::new();
    for line in lines.iter().flatten() {
        let id = line["id"].as_u64().context("a line without a number")?;
        match line["event"].as_str() {
            Some("intent") => ensure!(outcomes.insert(id, None).is_none(), "{id} twice"),
            Some("outcome") => {
                let outcome = outcomes.get_mut(&id).context("an outcome without intent")?;
                *outcome = line["result"].as_str().map(str::to_owned);
            }
            _ => bail!("{line}"),
        }
    }
    Ok(outcomes)
}

/// Boots a guest with the test's keys and an audit log at `path`. If no guest can run here, prints
/// the reason and returns `None`.
async fn audited(path: &Path) -> Result<Option<Guest>> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(None);
    };
    let mut guest = Guest::builder(&environment)
        .argument("--audit-log")
        .argument(&path.display().to_string())
        .boot()
        .await?;
    guest.shell("insmod /lib/modules/patchbay_test.ko").await?;
    Ok(Some(guest))
}

/// Checks that a change fails with the name of the vCPU that did not stop in time and has no
/// effect, and that the reference of a client that has ended expires.
#[tokio::test]
async fn late_vcpus_and_dead_clients() -> Result<()> {
    let Some(mut guest) = Guest::with_test_keys(2).await? else {
        return Ok(());
    };
    // Both vCPUs are busy, so that at least one sometimes fails to stop within a microsecond.
    guest
        .shell("for cpu in 0 1; do while [ ! -e /calm ]; do :; done & done")
        .await?;
    let mut tries = 0;
    let late = loop {
        let hurried = UpdateStaticKeysRequest {
            stop_timeout: Some(Duration::from_micros(1).try_into()?),
            ..request(KeyOp::Inc)
        };
        match guest.static_keys().update_static_keys(hurried).await {
            Ok(_) => flip(&mut guest, KeyOp::Dec).await?,
            Err(late) => break late,
        };
        tries += 1;
        ensure!(tries < 1000, "every vCPU always stops within a microsecond");
    };
    ensure!(late.code() == Code::DeadlineExceeded, "{late:?}");
    ensure!(
        late.message().contains("vCPU ") && late.message().contains("nothing has changed"),
        "{late:?}"
    );
    ensure!(seen(&mut guest).await? == "0 0", "something has changed");
    guest.shell("touch /calm; wait").await?;
    flip(&mut guest, KeyOp::Inc).await?;
    flip(&mut guest, KeyOp::Dec).await?;

    // A separate process takes a reference with a time to live, and then ends.
    let environment = Environment::linux_guest().context("it was there")?;
    let mut changes = guest
        .static_keys()
        .watch_static_keys(WatchStaticKeysRequest::default())
        .await?
        .into_inner();
    let taken = Command::new(&environment.cli)
        .args(["keys", "inc", REF_KEY, "--ttl", "2s", "--socket"])
        .arg(guest.socket())
        .stdin(Stdio::null())
        .output()?;
    ensure!(taken.status.success(), "{taken:?}");
    let mut owners = vec![];
    while owners.len() < 2 {
        let change = changes.message().await?.context("the watch ended")?;
        owners.extend(
            change
                .events
                .into_iter()
                .map(|event| (event.principal, event.count)),
        );
    }
    ensure!(
        owners[0].1 == 1 && owners[0].0.starts_with("uid:"),
        "{owners:?}"
    );
    ensure!(owners[1] == ("monitor".to_owned(), 0), "{owners:?}");
    ensure!(
        seen(&mut guest).await? == "0 0",
        "the branch is still taken"
    );
    guest.assert_no_warnings().await
}

/// A small disk, unmounted on drop.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    /// Mounts a disk of this size. If that is not possible, prints the reason and returns `None`.
    fn mount(size: &str) -> Result<Option<Self>> {
        let folder = tempfile::tempdir()?;
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o"])
            .arg(format!("size={size}"))
            .arg("small")
            .arg(folder.path())
            .output()?;
        if mounted.status.success() {
            return Ok(Some(Self(folder)));
        }
        patchbay_tests::skip("no file system may be mounted here");
        Ok(None)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

/// Checks that there are no flips while the disk of the audit log is full. A monitor that is killed
/// then leaves a log of its changes, and a socket that does not prevent the next one from starting.
#[tokio::test]
async fn a_full_disk_and_a_killed_monitor() -> Result<()> {
    let Some(disk) = SmallDisk::mount("64k")? else {
        return Ok(());
    };
    let log = disk.0.path().join("audit.jsonl");
    let Some(mut guest) = audited(&log).await? else {
        return Ok(());
    };
    flip(&mut guest, KeyOp::Inc).await?;

    let filler = disk.0.path().join("filler");
    let mut full = std::fs::File::create(&filler)?;
    while full.write_all(&[0; 512]).is_ok() {}
    // The log can still grow to the end of its last page, so some flips may still succeed.
    let mut op = KeyOp::Dec;
    let mut flips = 0;
    let refusal = loop {
        match flip(&mut guest, op).await {
            Ok(_) => flips += 1,
            Err(refusal) => break refusal,
        }
        ensure!(flips < 100, "a full disk took {flips} flips");
        op = if op == KeyOp::Dec {
            KeyOp::Inc
        } else {
            KeyOp::Dec
        };
    };
    ensure!(refusal.code() == Code::FailedPrecondition, "{refusal:?}");
    let message = refusal.message();
    ensure!(
        message.contains("audit.jsonl") && message.contains("nothing was changed"),
        "{message}"
    );
    let (before, there, back) = match op {
        KeyOp::Dec => ("1 1", KeyOp::Dec, KeyOp::Inc),
        _ => ("0 0", KeyOp::Inc, KeyOp::Dec),
    };
    ensure!(seen(&mut guest).await? == before, "changed all the same");
    drop(full);
    std::fs::remove_file(&filler)?;
    flip(&mut guest, there).await.context("with room again")?;
    flip(&mut guest, back).await?;

    // The monitor is killed during flips whose answers no client awaits.
    let mut client = guest.static_keys();
    let storm = tokio::spawn(async move {
        let mut answered = 0;
        let mut op = there;
        while client.update_static_keys(request(op)).await.is_ok() {
            answered += 1;
            op = if op == there { back } else { there };
        }
        answered
    });
    tokio::time::sleep(Duration::from_millis(300)).await;
    signal(&guest, Signal::KILL)?;
    let answered: usize = storm.await?;
    let status = guest.wait().await?;
    ensure!(status.signal() == Some(9), "{status}");
    let lines = audit_lines(&log)?;
    let cut_short = lines.iter().filter(|line| line.is_none()).count();
    ensure!(cut_short <= 2, "{cut_short} lines of the log are broken");
    let outcomes = outcomes(&lines)?;
    let open = outcomes
        .values()
        .filter(|outcome| outcome.is_none())
        .count();
    // Two outcomes may be missing: the last one on the full disk, and that of the change during
    // which the monitor was killed.
    ensure!(open <= 2, "{open} intents without an outcome");
    let made = outcomes
        .values()
        .filter(|outcome| outcome.as_deref() == Some("committed"))
        .count();
    ensure!(
        made + open >= answered + flips + 3,
        "{answered} + {flips} + 3 flips were answered, {made} are in the log"
    );

    let environment = Environment::linux_guest().context("it was there")?;
    ensure!(guest.socket().exists(), "a killed monitor cleans up?");
    let mut next = Command::new(&environment.monitor)
        .arg("--kernel")
        .arg(&environment.kernel)
        .arg("--api-socket")
        .arg(guest.socket())
        .arg("--audit-log")
        .arg(&log)
        .args(["--console", "none"])
        .stdin(Stdio::null())
        .spawn()?;
    let socket = guest.socket().to_owned();
    let listening = async {
        while tokio::net::UnixStream::connect(&socket).await.is_err() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let started = tokio::time::timeout(Duration::from_secs(60), listening).await;
    let alive = next.try_wait()?.is_none();
    next.kill()?;
    next.wait()?;
    ensure!(started.is_ok() && alive, "no new monitor on the old socket");
    Ok(())
}

/// Sends SIGTERM while a change waits for the guest. The client gets an error, the log is complete,
/// the socket is gone, and the exit status is that of a shutdown.
#[tokio::test]
async fn sigterm_while_a_change_waits() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let log = folder.path().join("audit.jsonl");
    let Some(mut guest) = audited(&log).await? else {
        return Ok(());
    };
    flip(&mut guest, KeyOp::Inc).await?;
    guest
        .shell(&format!("echo 600000 > {TEST}/hold/text_mutex"))
        .await?;
    let mut client = guest.static_keys();
    let waiting = tokio::spawn(async move { client.update_static_keys(request(KeyOp::Dec)).await });
    // The service answers this call after it has received the change, which is then waiting.
    guest.key(REF_KEY).await?;
    signal(&guest, Signal::TERM)?;
    let refusal = waiting.await?.expect_err("the guest is gone");
    // The reason is GUEST_STOPPED, unless the monitor ended before it could send it.
    let told = [Code::FailedPrecondition, Code::Unavailable].contains(&refusal.code());
    ensure!(told, "{refusal:?}");
    let status = guest.wait().await?;
    ensure!(status.success(), "{status}: {}", guest.monitor_log());
    ensure!(!guest.socket().exists(), "the socket is still there");
    let outcomes = outcomes(&audit_lines(&log)?)?;
    ensure!(
        outcomes.values().all(Option::is_some) && outcomes[&0].as_deref() == Some("committed"),
        "{outcomes:?}"
    );
    Ok(())
}

/// Checks that the monitor restores the terminal when it is ended.
#[tokio::test]
async fn sigterm_restores_the_terminal() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    let folder = tempfile::tempdir()?;
    let path = |name: &str| folder.path().join(name);
    let script = format!(
        "tty > {tty}; stty -g > {before}; {monitor} --kernel {kernel} --api-socket {socket}; \
         echo $? > {status}; stty -g > {after}",
        tty = path("tty").display(),
        before = path("before").display(),
        monitor = environment.monitor.display(),
        kernel = environment.kernel.display(),
        socket = path("api.sock").display(),
        status = path("status").display(),
        after = path("after").display(),
    );
    let mut terminal = Command::new("script")
        .args(["--quiet", "--command", &script, "/dev/null"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .context("script, of the package bsdutils")?;
    let describe = async {
        loop {
            if let Ok(channel) = patchbay_tests::connect(&path("api.sock")).await {
                let mut client =
                    patchbay_proto::v1::guest_service_client::GuestServiceClient::new(channel);
                return client
                    .describe_guest(patchbay_proto::v1::DescribeGuestRequest::default())
                    .await;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let guest = tokio::time::timeout(Duration::from_secs(60), describe)
        .await
        .context("the monitor opened no socket")??
        .into_inner();
    let read = |name: &str| std::fs::read_to_string(path(name)).context(name.to_owned());
    let before = read("before")?;
    let during = Command::new("stty")
        .args(["-F", read("tty")?.trim(), "-g"])
        .output()?;
    let during = String::from_utf8(during.stdout)?;
    ensure!(
        !during.is_empty() && during != before,
        "the terminal was not taken over"
    );
    let pid = Pid::from_raw(guest.monitor_pid.cast_signed()).context("its pid")?;
    kill_process(pid, Signal::TERM)?;
    terminal.wait()?;
    ensure!(
        read("status")?.trim() == "0",
        "it ended with {}",
        read("status")?
    );
    ensure!(read("after")? == before, "the terminal is not as it was");
    Ok(())
}

/// Checks that an audit log that cannot be opened is reported before a guest exists.
#[tokio::test]
async fn an_audit_log_that_cannot_be_opened() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    for log in ["/proc", "/nonexistent/audit.jsonl"] {
        let ended = Command::new(&environment.monitor)
            .arg("--kernel")
            .arg(&environment.kernel)
            .args(["--audit-log", log, "--console", "none"])
            .stdin(Stdio::null())
            .output()?;
        let said = String::from_utf8_lossy(&ended.stderr);
        ensure!(ended.status.code() == Some(1), "{log}: {}", ended.status);
        ensure!(said.contains(log) && said.contains("use a file"), "{said}");
    }
    Ok(())
}
