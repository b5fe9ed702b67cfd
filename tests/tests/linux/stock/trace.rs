// SPDX-License-Identifier: Apache-2.0
//! Tests the events that a stock kernel records itself, read from the guest's memory, against the
//! guest's own `trace` file: while the guest runs, while it is paused and after a panic.

use anyhow::{Context, Result, bail, ensure};
use patchbay_proto::v1::trace_field::Value;
use patchbay_proto::v1::{
    PauseGuestRequest, ResumeGuestRequest, StreamTracepointEventsRequest, TraceEvent, TraceLosses,
    TraceSource,
};
use patchbay_testing::EventStream;
use patchbay_tests::{Guest, StockKernel, TestGuest};
use tonic::Status;

use super::{TRACING, crash, state};

/// The events of processes, which a shell causes with every command.
const EVENTS: &str = "sched:sched_process_exec sched:sched_process_exit sched:sched_process_fork";
/// An instance that records the same without `sched_process_fork`.
const INSTANCE: &str = "/sys/kernel/tracing/instances/one";
/// The program whose start is the last event that is compared.
const LAST: &str = "/tmp/true";

#[tokio::test]
async fn the_trace_events_of_debian_6_12_cloud() -> Result<()> {
    events_of("6_12").await
}

#[tokio::test]
async fn the_trace_events_of_debian_6_1_cloud() -> Result<()> {
    events_of("6_1").await
}

of_other_kernels! { events_of:
    the_trace_events_of_debian_5_10_cloud "5_10",
    the_trace_events_of_debian_6_12_rt "6_12_RT",
    the_trace_events_of_debian_6_16_cloud "6_16",
    the_trace_events_of_debian_6_18_cloud "6_18",
    the_trace_events_of_debian_backports_cloud "BACKPORTS",
}

async fn events_of(version: &str) -> Result<()> {
    let Some(kernel) = StockKernel::named(version) else {
        return Ok(());
    };
    let mut guest = Guest::stock(&kernel).vcpus(2).boot().await?;
    let enable = format!(
        "ln -s /bin/busybox {LAST}; for event in {EVENTS}; do echo $event >>{TRACING}/set_event; done"
    );
    guest.shell(&enable).await?;
    let enable = format!(
        "mkdir {INSTANCE}; for event in sched_process_exec sched_process_exit; do echo sched:$event >>{INSTANCE}/set_event; done"
    );
    guest.shell(&enable).await?;
    let mut stream = open(&mut guest, "", false).await?;
    let work = format!("for i in 1 2 3 4 5 6 7 8 9 10; do busybox true; done; {LAST}");
    guest.shell(&work).await?;
    let followed = until_last(&mut stream).await?;
    drop(stream);
    guest
        .shell(&format!("echo 0 >{TRACING}/tracing_on"))
        .await?;
    let own = guest.shell(&format!("cat {TRACING}/trace")).await?;
    let own: Vec<Line> = own.lines().filter_map(Line::parse).collect();
    ensure!(own.len() > 30, "{own:?}");
    compare(&own, &followed)?;
    let release = guest.shell("uname -r").await?;
    print_row(&release, "top level, followed", &followed);
    let of_instance = instance(&mut guest, own.len()).await?;
    print_row(&release, "an instance", &of_instance);
    state::compare_users(&mut guest).await?;
    for name in ["", "one"] {
        state::compare_counters(&mut guest, name).await?;
    }
    state::compare_tasks(&mut guest).await?;

    let running = buffered(&mut guest, &own).await?;
    let pause = PauseGuestRequest::default();
    guest.guest_service().pause_guest(pause).await?;
    let paused = buffered(&mut guest, &own).await?;
    let resume = ResumeGuestRequest::default();
    guest.guest_service().resume_guest(resume).await?;
    let shell = guest.shell("echo $$").await?.trim().parse()?;
    crash(&mut guest).await?;
    let panicked = buffered(&mut guest, &own).await?;
    ensure!(
        running == paused && running == panicked,
        "{running:?} {paused:?} {panicked:?}"
    );
    print_row(&release, "top level, afterwards", &running);
    state::told_after_panic(&mut guest, &kernel.cli, shell).await
}

/// Reads the instance, which has recorded less than `all` events, and one that does not exist.
async fn instance(guest: &mut Guest, all: usize) -> Result<Vec<Line>> {
    guest
        .shell(&format!("echo 0 >{INSTANCE}/tracing_on"))
        .await?;
    let own = guest.shell(&format!("cat {INSTANCE}/trace")).await?;
    let own: Vec<Line> = own.lines().filter_map(Line::parse).collect();
    let events = until_last(&mut open(guest, "one", true).await?).await?;
    compare(&own, &events)?;
    ensure!(events.first() == own.first(), "{events:?} {own:?}");
    let forks = events.iter().any(|line| line.name == "sched_process_fork");
    ensure!(!forks && own.len() < all, "{own:?}");
    let Err(error) = open(guest, "two", true).await else {
        bail!("there is no such instance");
    };
    let refusal: Status = error.downcast()?;
    ensure!(
        refusal
            .message()
            .contains("no tracefs instance \"two\"; it has one"),
        "{refusal:?}"
    );
    Ok(events)
}

async fn open(guest: &mut Guest, instance: &str, buffered: bool) -> Result<EventStream> {
    let request = StreamTracepointEventsRequest {
        source: TraceSource::Memory.into(),
        instance: instance.to_owned(),
        buffered,
        ..Default::default()
    };
    EventStream::open(&mut guest.tracepoints(), request).await
}

/// Reads the events that the ring buffer holds, compares them with the guest's own, and returns
/// them.
async fn buffered(guest: &mut Guest, own: &[Line]) -> Result<Vec<Line>> {
    let events = until_last(&mut open(guest, "", true).await?).await?;
    compare(own, &events)?;
    ensure!(events.first() == own.first(), "{events:?} {own:?}");
    Ok(events)
}

/// Reads events up to the start of [`LAST`].
async fn until_last(stream: &mut EventStream) -> Result<Vec<Line>> {
    let mut lines = vec![];
    loop {
        let batch = stream.batch().await?;
        ensure!(batch.losses.unwrap_or_default() == TraceLosses::default());
        for event in batch.events {
            lines.push(Line::from(&event)?);
            if is_last(&event) {
                return Ok(lines);
            }
        }
    }
}

fn is_last(event: &TraceEvent) -> bool {
    event.fields.iter().any(|field| {
        let is_name = matches!(&field.value, Some(Value::Text(text)) if text == LAST);
        field.name == "filename" && is_name
    })
}

/// A line of `trace`, without the event's fields.
#[derive(Clone, Debug, PartialEq)]
struct Line {
    cpu: u32,
    micros: u64,
    pid: i32,
    name: String,
}

impl Line {
    /// Parses a line such as
    /// `sh-72  [001] .....  5.123456: sched_process_exit: comm=sh pid=72 prio=120`.
    fn parse(line: &str) -> Option<Self> {
        let (task, rest) = line.split_once(" [")?;
        let (cpu, rest) = rest.split_once("] ")?;
        let mut words = rest.split_whitespace().skip(1);
        let (seconds, micros) = words.next()?.strip_suffix(':')?.split_once('.')?;
        let seconds: u64 = seconds.parse().ok()?;
        Some(Self {
            cpu: cpu.parse().ok()?,
            micros: seconds * 1_000_000 + micros.parse::<u64>().ok()?,
            pid: task.rsplit_once('-')?.1.trim().parse().ok()?,
            name: words.next()?.strip_suffix(':')?.to_owned(),
        })
    }

    fn from(event: &TraceEvent) -> Result<Self> {
        let (_, name) = event.name.split_once(':').context("a name")?;
        Ok(Self {
            cpu: event.cpu,
            // The kernel rounds in the same way.
            micros: (event.guest_time_ns + 500) / 1000,
            pid: event.pid,
            name: name.to_owned(),
        })
    }
}

/// Prints a row for the table in `docs/measurement-runs.md`. All these events are as in `trace`.
fn print_row(release: &str, rings: &str, compared: &[Line]) {
    let (release, compared) = (release.trim(), compared.len());
    println!("| {release} | our monitor | {rings} | `trace` | {compared} | 0 |");
}

/// Checks that the events that were read of each CPU are some of its own without a gap.
fn compare(own: &[Line], read: &[Line]) -> Result<()> {
    for cpu in 0..2 {
        let of_cpu = |lines: &[Line]| -> Vec<Line> {
            lines
                .iter()
                .filter(|line| line.cpu == cpu)
                .cloned()
                .collect()
        };
        let (own, read) = (of_cpu(own), of_cpu(read));
        let Some(first) = read.first() else {
            continue;
        };
        let at = own.iter().position(|line| line == first);
        let at = at.with_context(|| format!("{first:?} is not in {own:?}"))?;
        ensure!(own[at..].starts_with(&read), "{read:?}, not {own:?}");
    }
    ensure!(read.len() > 20, "{read:?}");
    Ok(())
}
