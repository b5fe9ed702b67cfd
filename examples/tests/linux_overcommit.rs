// SPDX-License-Identifier: Apache-2.0
//! Tests the example `overcommit` on an unpatched guest whose vCPUs share one CPU. The example
//! turns the key on while the vCPUs wait for the CPU, and off when they are idle.

use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use patchbay_proto::v1::key_event::Kind;
use patchbay_proto::v1::{KeyEvent, WatchStaticKeysRequest, WatchStaticKeysResponse};
use patchbay_tests::{Guest, StockKernel, TestGuest};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout};
use tonic::Streaming;

const KEY: &str = "virt_spin_lock_key";
const VCPUS: u32 = 2;
/// Timeout for a change of the key. It is generous, because an emulated computer is slow.
const PATIENCE: Duration = Duration::from_secs(120);

/// A running `overcommit`, its output, and a watch of the key.
struct Overcommit {
    process: Child,
    lines: Lines<BufReader<ChildStdout>>,
    changes: Streaming<WatchStaticKeysResponse>,
}

impl Overcommit {
    async fn start(guest: &mut Guest) -> Result<Self> {
        let request = WatchStaticKeysRequest {
            patterns: vec![KEY.to_owned()],
            ..Default::default()
        };
        let changes = guest.static_keys().watch_static_keys(request).await?;
        let pid = guest.monitor_pid().context("the monitor runs")?;
        let mut process = tokio::process::Command::new(env!("CARGO_BIN_EXE_overcommit"))
            .arg("--socket")
            .arg(guest.socket())
            .args(["--pid", &pid.to_string(), "--period", "500"])
            // Two vCPUs that are never idle each wait half of the time.
            .args(["--high", "0.3", "--low", "0.15"])
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let lines = BufReader::new(process.stdout.take().context("piped")?).lines();
        Ok(Self {
            process,
            lines,
            changes: changes.into_inner(),
        })
    }

    /// Waits until the key changes, and fails unless its count is then `count`.
    async fn expect(&mut self, guest: &mut Guest, count: i32) -> Result<KeyEvent> {
        let next = async {
            loop {
                let response = self.changes.message().await?.context("the watch ended")?;
                let mut events = response.events.into_iter();
                if let Some(event) = events.find(|event| event.kind() == Kind::Changed) {
                    return Ok::<_, anyhow::Error>(event);
                }
            }
        };
        let event = tokio::time::timeout(PATIENCE, next);
        let event = event
            .await
            .with_context(|| format!("the count does not become {count}"))??;
        ensure!(event.name == KEY && event.count == count, "{event:?}");
        let key = guest.key(KEY).await?;
        ensure!(key.count == count && !key.sites.is_empty(), "{key:?}");
        for site in key.sites {
            let jumps = site.disassembly.starts_with("jmp");
            ensure!(jumps == ((count > 0) != site.likely), "{site:?}");
        }
        Ok(event)
    }

    /// Fails unless the program prints that it has chosen `lock`.
    async fn says(&mut self, lock: &str) -> Result<()> {
        let line = self.lines.next_line().await?.context("it has ended")?;
        println!("{line}");
        ensure!(line.ends_with(lock), "{line}");
        Ok(())
    }
}

/// Pins all threads of the process to the first CPU that this process may use.
fn pin_to_one_cpu(pid: u32) -> Result<()> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let mut lines = status.lines();
    let cpus = lines.find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let first = cpus.and_then(|cpus| cpus.trim().split([',', '-']).next());
    let output = Command::new("taskset")
        .args(["-a", "-p", "-c", first.context("a list of CPUs")?])
        .arg(pid.to_string())
        .output()
        .context("taskset cannot be run; install util-linux")?;
    ensure!(output.status.success(), "{output:?}");
    Ok(())
}

#[tokio::test]
async fn the_lock_follows_the_run_delay_of_the_vcpus() -> Result<()> {
    let Some(kernel) = StockKernel::named("6_12") else {
        return Ok(());
    };
    let mut guest = Guest::stock(&kernel)
        .vcpus(VCPUS)
        .command_line("nopvspin")
        .argument("--allow-guarded")
        .boot()
        .await?;
    pin_to_one_cpu(guest.monitor_pid().context("the monitor runs")?)?;
    let key = guest.key(KEY).await?;
    ensure!(key.count == 0, "the kernel uses the fair lock: {key:?}");
    let mut overcommit = Overcommit::start(&mut guest).await?;
    let load = format!("for i in $(seq {VCPUS}); do (while :; do :; done) & done");
    for _ in 0..2 {
        guest.shell(&load).await?;
        let event = overcommit.expect(&mut guest, 1).await?;
        ensure!(event.reason == "vCPUs wait for CPUs", "{event:?}");
        overcommit.says("unfair lock").await?;
        guest.shell("kill $(jobs -p); wait").await?;
        overcommit.expect(&mut guest, 0).await?;
        overcommit.says(" fair lock").await?;
    }
    // The program must not leave the unfair lock behind when it ends.
    guest.shell(&load).await?;
    overcommit.expect(&mut guest, 1).await?;
    let id = overcommit.process.id().context("it runs")?;
    let terminated = Command::new("kill").arg(id.to_string()).status()?;
    ensure!(terminated.success());
    overcommit.expect(&mut guest, 0).await?;
    let status = overcommit.process.wait().await?;
    ensure!(status.success(), "{status}");
    guest.shell("kill $(jobs -p)").await?;
    guest.assert_no_warnings().await
}
