// SPDX-License-Identifier: Apache-2.0
//! Tests the trace events that a stock kernel records from its boot on, read from the guest's memory
//! without an agent, against the guest's own `trace` file.

use std::collections::BTreeMap;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use patchbay_proto::v1::trace_field::Value;
use patchbay_proto::v1::tracepoints_service_client::TracepointsServiceClient;
use patchbay_proto::v1::{
    StreamTracepointEventsRequest, StreamTracepointEventsResponse, TraceEvent, TraceSource,
};
use patchbay_tests::{Guest, StockKernel, TestGuest, reason};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;
use tonic::Streaming;
use tonic::transport::Channel;

use super::TRACING;

/// Timeout for events. It is long, because an emulated computer is slow.
const PATIENCE: Duration = Duration::from_secs(300);
const WORDS: &str = "trace_event=sched:sched_switch,sched:sched_process_exec trace_buf_size=1M";
/// Fields of the two events that the kernel prints as `NAME=VALUE`.
const PRINTED: &[&str] = &[
    "filename",
    "next_comm",
    "next_pid",
    "next_prio",
    "old_pid",
    "prev_comm",
    "prev_pid",
    "prev_prio",
];

#[tokio::test]
async fn the_trace_events_of_debian_6_12_cloud() -> Result<()> {
    in_our_monitor("6_12").await
}

#[tokio::test]
async fn the_trace_events_of_debian_5_10_cloud() -> Result<()> {
    in_our_monitor("5_10").await
}

async fn in_our_monitor(version: &str) -> Result<()> {
    let Some(kernel) = StockKernel::named(version) else {
        return Ok(());
    };
    let mut guest = Guest::stock(&kernel)
        .vcpus(2)
        .command_line(WORDS)
        .boot()
        .await?;
    let mut live = open(guest.tracepoints(), "", false).await?;
    let mut tail = Command::new(&kernel.cli)
        .arg("--socket")
        .arg(guest.socket())
        .args([
            "trace",
            "tail",
            "sched_process_exec",
            "--source",
            "memory",
            "-n",
            "3",
        ])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut told = BufReader::new(tail.stderr.take().context("piped")?).lines();
    let first = tokio::time::timeout(PATIENCE, told.next_line()).await??;
    ensure!(
        first.is_some_and(|line| line.contains("in its memory")),
        "no first message"
    );
    let work = "for i in 1 2 3 4 5; do busybox true; done";
    guest.shell(work).await?;
    let is_exec = |event: &TraceEvent| event.name == "sched:sched_process_exec";
    let mut seen = 0;
    while seen < 5 {
        seen += next(&mut live)
            .await?
            .events
            .iter()
            .filter(|event| is_exec(event))
            .count();
    }
    let tail = tokio::time::timeout(PATIENCE, tail.wait_with_output()).await??;
    let printed = String::from_utf8_lossy(&tail.stdout).into_owned();
    ensure!(tail.status.success(), "{tail:?}");
    ensure!(
        printed.matches("sched:sched_process_exec").count() == 3,
        "{printed}"
    );

    guest
        .shell(&format!(
            "test -e {TRACING}/trace || mount -t tracefs t {TRACING}; echo 0 >{TRACING}/tracing_on"
        ))
        .await?;
    let own = guest.shell(&format!("cat {TRACING}/trace")).await?;
    let lines: Vec<&str> = own
        .lines()
        .filter(|line| line.contains(": sched_"))
        .collect();
    let mut stream = open(guest.tracepoints(), "", true).await?;
    let mut events = vec![];
    while events.len() < lines.len() {
        let message = next(&mut stream).await?;
        ensure!(message.losses.is_none(), "{:?}", message.losses);
        events.extend(message.events);
    }
    compare(version, &lines, events)?;

    let Err(error) = open(guest.tracepoints(), "nope", false).await else {
        anyhow::bail!("there is no such instance");
    };
    let status = error.downcast::<tonic::Status>()?;
    ensure!(reason(&status) == "INVALID_ARGUMENT", "{status:?}");
    Ok(())
}

async fn open(
    mut client: TracepointsServiceClient<Channel>,
    instance: &str,
    buffered: bool,
) -> Result<Streaming<StreamTracepointEventsResponse>> {
    let request = StreamTracepointEventsRequest {
        source: TraceSource::Memory.into(),
        instance: instance.to_owned(),
        buffered,
        max_events_per_second: 1_000_000,
        ..Default::default()
    };
    let mut stream = client.stream_tracepoint_events(request).await?.into_inner();
    let first = next(&mut stream).await?;
    ensure!(first.source() == TraceSource::Memory, "{first:?}");
    Ok(stream)
}

async fn next(
    stream: &mut Streaming<StreamTracepointEventsResponse>,
) -> Result<StreamTracepointEventsResponse> {
    let message = tokio::time::timeout(PATIENCE, stream.message()).await??;
    message.context("the stream ended")
}

/// Compares the lines of `trace` with the events, in the order of each CPU.
fn compare(version: &str, lines: &[&str], events: Vec<TraceEvent>) -> Result<()> {
    ensure!(
        events.len() == lines.len(),
        "{} of {}",
        events.len(),
        lines.len()
    );
    ensure!(lines.len() > 300, "{} lines", lines.len());
    let mut by_cpu: BTreeMap<u32, Vec<TraceEvent>> = BTreeMap::new();
    for event in events.into_iter().rev() {
        by_cpu.entry(event.cpu).or_default().push(event);
    }
    for line in lines {
        // "   <idle>-0   [001] d.s2.  1.234567: sched_switch: prev_comm=..."
        let (task, rest) = line.split_once(" [").context("a task")?;
        let (cpu, rest) = rest.split_once(']').context("a CPU")?;
        let event = by_cpu.get_mut(&cpu.parse()?).and_then(Vec::pop);
        let event = event.with_context(|| format!("{version}: no event for {line}"))?;
        let pid = task.rsplit_once('-').context("a pid")?.1.trim();
        let micros = (event.guest_time_ns + 500) / 1000;
        let name = event.name.trim_start_matches("sched:");
        let stamp = format!(
            " {}.{:06}: {name}: ",
            micros / 1_000_000,
            micros % 1_000_000
        );
        let printed = rest.split_once(&stamp);
        let (_, printed) = printed.with_context(|| format!("{version}: {line} {event:?}"))?;
        ensure!(pid == event.pid.to_string(), "{version}: {line} {event:?}");
        for field in &event.fields {
            let value = match &field.value {
                Some(Value::Signed(value)) => value.to_string(),
                Some(Value::Text(text)) => text.clone(),
                _ => continue,
            };
            let is_there = format!("{printed} ").contains(&format!("{}={value} ", field.name));
            ensure!(
                is_there || !PRINTED.contains(&&*field.name),
                "{version}: {line} {event:?}"
            );
        }
    }
    println!("{version}: {} events as in `trace`", lines.len());
    Ok(())
}
