// SPDX-License-Identifier: Apache-2.0
//! Tests the kernel's log, read from the guest's memory, against the guest's own /dev/kmsg, with
//! the lines of pr_debug() that the host turns on, in a paused guest and after a panic.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use patchbay_proto::v1::stream_kernel_log_request::Start;
use patchbay_proto::v1::tracepoints_service_client::TracepointsServiceClient;
use patchbay_proto::v1::{
    DescribeGuestRequest, KernelLogRecord, KernelLogSource, KernelState, KeyOp, KeyUpdate,
    PauseGuestRequest, Pressure, ResultView, ResumeGuestRequest, StreamKernelLogRequest,
    StreamKernelLogResponse, UpdateStaticKeysRequest,
};
use patchbay_testing::connect;
use patchbay_tests::{Foreign, Guest, StockKernel, TestGuest, skip};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;
use tonic::Streaming;
use tonic::transport::Channel;

use super::{BINFMT, load_module};

/// Timeout for a record. It is long, because an emulated computer is slow.
const PATIENCE: Duration = Duration::from_secs(300);
/// The end of a panic's text.
const END_OF_PANIC: &str = "end Kernel panic - not syncing";
/// Prints the guest's own view of its log. A reader of /dev/kmsg waits at its end.
const KMSG: &str = "dmesg -n 1; timeout 5 cat /dev/kmsg >/tmp/kmsg; cat /tmp/kmsg";

#[tokio::test]
async fn the_log_of_debian_6_12_cloud() -> Result<()> {
    in_our_monitor("6_12").await
}

#[tokio::test]
async fn the_log_of_debian_6_1_cloud() -> Result<()> {
    in_our_monitor("6_1").await
}

of_other_kernels! { in_our_monitor:
    the_log_of_debian_5_10_cloud "5_10",
    the_log_of_debian_6_12_rt "6_12_RT",
    the_log_of_debian_6_16_cloud "6_16",
    the_log_of_debian_6_18_cloud "6_18",
    the_log_of_debian_backports_cloud "BACKPORTS",
}

#[tokio::test]
async fn the_log_of_debian_6_12_cloud_in_qemu() -> Result<()> {
    in_qemu("6_12").await
}

#[tokio::test]
async fn the_log_of_debian_6_1_cloud_in_qemu() -> Result<()> {
    in_qemu("6_1").await
}

/// Compares the numbers of warnings and the pressures in the guest's memory with those that the
/// guest reads.
async fn compare_health(guest: &mut Guest, state: &KernelState) -> Result<()> {
    let counts = guest
        .shell("cat /sys/kernel/warn_count /sys/kernel/oops_count")
        .await?;
    // The files are hexadecimal.
    let counts: Vec<_> = counts
        .split_whitespace()
        .map(|count| u64::from_str_radix(count, 16).ok())
        .collect();
    ensure!(
        counts == [state.warnings, state.oopses],
        "{counts:?} {state:?}"
    );
    // The kernel computes the pressures every 2 s, possibly between the two readings.
    for _ in 0..100 {
        let own = guest
            .shell("cd /proc/pressure; head -n 2 cpu memory io")
            .await?;
        let described = guest
            .guest_service()
            .describe_guest(DescribeGuestRequest::default())
            .await?;
        let state = described.into_inner().kernel_state.context("no state")?;
        ensure!(state.pressure.len() == 5, "{state:?}");
        let shows = |pressure: &Pressure| {
            let (file, kind) = pressure.resource.split_once(' ').unwrap_or_default();
            let (ten, sixty) = (pressure.average_10s, pressure.average_60s);
            let line = format!("{kind} avg10={ten:.2} avg60={sixty:.2} ");
            let part = own.split("==> ").find(|part| part.starts_with(file));
            part.is_some_and(|part| part.contains(&line))
        };
        if state.pressure.iter().all(shows) {
            return Ok(());
        }
    }
    bail!("the pressures always differ")
}

/// Compares the uptime in the guest's memory with the one that the guest reads before and after.
async fn compare_uptime(guest: &mut Guest) -> Result<()> {
    let before = own_uptime(guest).await?;
    let described = guest
        .guest_service()
        .describe_guest(DescribeGuestRequest::default())
        .await?;
    let after = own_uptime(guest).await?;
    let state = described.into_inner().kernel_state.context("no state")?;
    let uptime = state.uptime_seconds.context("no uptime")?;
    // The kernel counts the seconds of its two clocks separately, and only with its tick.
    ensure!(
        (before.saturating_sub(2)..=after).contains(&uptime),
        "{before} {uptime} {after}"
    );
    Ok(())
}

async fn own_uptime(guest: &mut Guest) -> Result<u64> {
    let text = guest.shell("cat /proc/uptime").await?;
    let (seconds, _) = text.split_once('.').context("no fraction")?;
    Ok(seconds.trim().parse()?)
}

async fn in_our_monitor(version: &str) -> Result<()> {
    let Some(kernel) = StockKernel::named(version) else {
        return Ok(());
    };
    let mut guest = Guest::stock(&kernel).boot().await?;
    let own = guest.shell(KMSG).await?;
    let dumped = dump(guest.tracepoints()).await?;
    let release = guest.shell("uname -r").await?;
    compare(&release, "our monitor", &own, &dumped)?;
    let tainted = guest.shell("cat /proc/sys/kernel/tainted").await?;
    let describe = DescribeGuestRequest::default();
    let described = guest.guest_service().describe_guest(describe).await?;
    let state = described.into_inner().kernel_state.context("no state")?;
    ensure!(
        state.taints.map(|taints| taints.to_string()).as_deref() == Some(tainted.trim()),
        "{state:?} {tainted:?}"
    );
    ensure!(state.load_hundredths.len() == 3, "{state:?}");
    ensure!(state.panicked == Some(false), "{state:?}");
    compare_uptime(&mut guest).await?;
    compare_health(&mut guest, &state).await?;

    load_module(&mut guest).await?;
    let mut follower = open(guest.tracepoints(), None).await?;
    let request = UpdateStaticKeysRequest {
        updates: vec![KeyUpdate {
            debug_queries: vec!["module binfmt_misc".to_owned()],
            op: KeyOp::Enable.into(),
            ..Default::default()
        }],
        result_view: ResultView::Summary.into(),
        ..Default::default()
    };
    guest.static_keys().update_static_keys(request).await?;
    guest.shell(BINFMT.command).await?;
    let line = until(&mut follower, BINFMT.printed).await?;
    ensure!(line.level == 7, "{line:?}");
    let transcript = guest.console().transcript();
    ensure!(
        !transcript.contains(BINFMT.printed),
        "the console is not silent"
    );

    let before = dump(guest.tracepoints()).await?;
    guest
        .guest_service()
        .pause_guest(PauseGuestRequest::default())
        .await?;
    let paused = dump(guest.tracepoints()).await?;
    let resume = ResumeGuestRequest::default();
    guest.guest_service().resume_guest(resume).await?;
    ensure!(
        paused.starts_with(&before),
        "a paused guest has another log"
    );

    guest.shell("echo 0 >/proc/sys/kernel/panic").await?;
    let crash = "echo c >/proc/sysrq-trigger";
    guest.console().type_line(crash).await?;
    until(&mut follower, END_OF_PANIC).await?;
    let after = dump(guest.tracepoints()).await?;
    let panic = after
        .iter()
        .any(|record| record.text.contains(END_OF_PANIC));
    ensure!(panic, "the panic is not in the log: {:?}", after.last());
    Ok(())
}

/// Makes the same checks in QEMU with the CLI. After the panic a new attacher also reads the log.
async fn in_qemu(version: &str) -> Result<()> {
    let Some(kernel) = StockKernel::named(version) else {
        return Ok(());
    };
    if !has_qemu() {
        skip("there is no qemu-system-x86_64");
        return Ok(());
    }
    let mut guest = Foreign::qemu(&kernel, &kernel.initramfs, &[])?;
    guest.wait_for_shell().await?;
    let own = guest.shell(KMSG).await?;
    guest.attach(&kernel.cli, &[]).await?;
    let dumped = dump(client(&guest.socket()).await?).await?;
    let release = guest.shell("uname -r").await?;
    compare(&release, "QEMU", &own, &dumped)?;

    let module =
        "insmod /lib/modules/*-binfmt_misc.ko; mount -t binfmt_misc none /proc/sys/fs/binfmt_misc";
    guest.shell(module).await?;
    let mut follow = Command::new(&kernel.cli)
        .arg("--socket")
        .arg(guest.socket())
        .args([
            "--timeout",
            "10m",
            "debug",
            "on",
            "module binfmt_misc",
            "--follow",
            "--whole-log",
        ])
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut lines = BufReader::new(follow.stdout.take().context("piped")?).lines();
    let mut line = async || {
        let line = tokio::time::timeout(PATIENCE, lines.next_line()).await??;
        line.context("`debug on --follow` ended")
    };
    while !line().await?.contains("keys changed") {}
    let console = guest.shell(BINFMT.command).await?;
    ensure!(
        !console.contains(BINFMT.printed),
        "the console is not silent"
    );
    while !line().await?.contains(BINFMT.printed) {}

    guest
        .shell("echo 0 >/proc/sys/kernel/panic; (sleep 1; echo c >/proc/sysrq-trigger) &")
        .await?;
    let printed = async {
        while !line().await?.contains(END_OF_PANIC) {}
        anyhow::Ok(())
    };
    printed.await?;
    guest.attach(&kernel.cli, &[]).await?;
    let after = dump(client(&guest.socket()).await?).await?;
    let panic = after
        .iter()
        .any(|record| record.text.contains(END_OF_PANIC));
    ensure!(
        panic,
        "a later service does not find the panic: {:?}",
        after.last()
    );
    Ok(())
}

fn has_qemu() -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join("qemu-system-x86_64").exists())
}

async fn client(socket: &Path) -> Result<TracepointsServiceClient<Channel>> {
    Ok(TracepointsServiceClient::new(connect(socket).await?))
}

/// Opens a stream. With `start`, it begins there and ends with the last record; without, it follows
/// the records from now on.
async fn open(
    mut client: TracepointsServiceClient<Channel>,
    start: Option<Start>,
) -> Result<Streaming<StreamKernelLogResponse>> {
    let request = StreamKernelLogRequest {
        source: KernelLogSource::Memory.into(),
        no_follow: start.is_some(),
        start,
        ..Default::default()
    };
    let mut stream = client.stream_kernel_log(request).await?.into_inner();
    let first = stream.message().await?.context("no first message")?;
    ensure!(first.source() == KernelLogSource::Memory, "{first:?}");
    Ok(stream)
}

async fn dump(client: TracepointsServiceClient<Channel>) -> Result<Vec<KernelLogRecord>> {
    let mut stream = open(client, Some(Start::FirstSeq(0))).await?;
    let mut records = vec![];
    while let Some(message) = stream.message().await? {
        ensure!(message.lost == 0 && !message.restarted, "{message:?}");
        records.extend(message.records);
    }
    Ok(records)
}

/// Returns the first record whose text contains `text`.
async fn until(
    stream: &mut Streaming<StreamKernelLogResponse>,
    text: &str,
) -> Result<KernelLogRecord> {
    let find = async {
        while let Some(message) = stream.message().await? {
            ensure!(message.lost == 0 && !message.restarted, "{message:?}");
            let mut records = message.records.into_iter();
            if let Some(record) = records.find(|record| record.text.contains(text)) {
                return Ok(record);
            }
        }
        bail!("the stream ended before {text:?}")
    };
    let found = tokio::time::timeout(PATIENCE, find).await;
    found.with_context(|| format!("no record has {text:?}"))?
}

/// A record of /dev/kmsg (Documentation/ABI/testing/dev-kmsg).
#[derive(Debug, PartialEq)]
struct Kmsg {
    priority: u32,
    sequence: u64,
    time_us: u64,
    continues: bool,
    text: String,
    device: [String; 2],
}

/// Compares the log as the guest reads it with the log from its memory, record by record.
/// Prints a row for the table in `docs/measurement-runs.md`.
fn compare(release: &str, monitor: &str, own: &str, dumped: &[KernelLogRecord]) -> Result<()> {
    let release = release.trim();
    let mut expected: Vec<Kmsg> = vec![];
    for line in own.lines() {
        match line.strip_prefix(' ') {
            Some(word) => {
                let last = expected.last_mut().context("a word without a record")?;
                for (index, name) in ["SUBSYSTEM=", "DEVICE="].into_iter().enumerate() {
                    if let Some(value) = word.strip_prefix(name) {
                        value.clone_into(&mut last.device[index]);
                    }
                }
            }
            None => expected.extend(kmsg(line)),
        }
    }
    ensure!(expected.len() > 100, "{} records: {own}", expected.len());
    let first = expected[0].sequence;
    let found: Vec<Kmsg> = dumped.iter().map(from_memory).collect();
    let skipped = found.iter().position(|record| record.sequence == first);
    let found = &found[skipped.context("the first record is missing")?..];
    ensure!(
        found.len() >= expected.len(),
        "{} of {}",
        found.len(),
        expected.len()
    );
    for (expected, found) in expected.iter().zip(found) {
        ensure!(expected == found, "{release}: {found:?}, not {expected:?}");
    }
    let compared = expected.len();
    println!("| {release} | {monitor} | log | /dev/kmsg | {compared} | 0 |");
    Ok(())
}

/// Reads a line such as "6,339,5140900,-;NET: Registered".
fn kmsg(line: &str) -> Option<Kmsg> {
    let (prefix, text) = line.split_once(';')?;
    let mut words = prefix.split(',');
    let mut number = || words.next()?.parse::<u64>().ok();
    let (priority, sequence, time_us) = (number()?, number()?, number()?);
    Some(Kmsg {
        priority: priority.try_into().ok()?,
        sequence,
        time_us,
        continues: words.next()? == "c",
        text: text.to_owned(),
        device: Default::default(),
    })
}

/// Returns a record as /dev/kmsg shows it, with its escapes.
fn from_memory(record: &KernelLogRecord) -> Kmsg {
    let time = record.time.and_then(|time| Duration::try_from(time).ok());
    let text = record.text.chars().map(|character| match character {
        '\\' => "\\x5c".to_owned(),
        ' '..='~' => character.to_string(),
        other => {
            let mut bytes = [0; 4];
            let bytes = other.encode_utf8(&mut bytes).bytes();
            bytes.map(|byte| format!("\\x{byte:02x}")).collect()
        }
    });
    Kmsg {
        priority: record.facility << 3 | record.level,
        sequence: record.sequence,
        time_us: u64::try_from(time.unwrap_or_default().as_micros()).unwrap_or(0),
        continues: record.continues,
        text: text.collect(),
        device: [record.subsystem.clone(), record.device.clone()],
    }
}
