// SPDX-License-Identifier: Apache-2.0
//! Traces a guest without logging in. An armed tracepoint costs nothing and records nothing. When
//! it is fired from outside, its events are streamed. When it is parked, the stream is silent
//! again. The exit status is 0 if each step had this effect.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use patchbay_examples::{counted, environment, step};
use patchbay_proto::v1::trace_field::Value;
use patchbay_proto::v1::{FlipReport, StreamTracepointEventsResponse, TraceEvent};
use patchbay_tests::{Environment, Guest, TestGuest};
use tokio::process::Command;

const EVENTS: [&str; 3] = [
    "sched:sched_process_exec",
    "sched:sched_process_fork",
    "sched:sched_switch",
];
const WORK: &str = "for i in 1 2 3; do busybox true; done";

/// Boots a Linux guest and turns tracepoints in it on and off from outside.
#[derive(Parser)]
struct Arguments {
    /// File for the timeline [default: a new file in the lab's output directory, or in the
    /// temporary directory]
    #[arg(long, value_name = "FILE")]
    timeline: Option<PathBuf>,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let environment = environment("trace")?;

    step("Boot a Linux guest with the agent");
    let mut guest = Guest::builder(&environment).agent().boot().await?;
    guest.assert_registered().await?;
    let agent = guest.wait_for_agent().await?;
    println!(
        "   Agent {} on Linux {}: {} KiB of memory.",
        agent.agent_version,
        agent.kernel_release,
        agent.agent_memory_bytes >> 10
    );
    let mut events = guest.events().await?;

    step("Arm 3 events: probes are attached, and parked at once");
    let armed = guest.arm(&EVENTS).await?;
    for result in &armed.results {
        println!("   {:<28} {:?}", result.name, result.state());
    }
    show_report(armed.report);
    let before = guest.recorded().await?;
    guest.shell(WORK).await?;
    let recorded = guest.recorded().await? - before;
    println!("   Commands ran in the guest; its kernel recorded {recorded} events.");
    ensure!(recorded == 0, "parked events were recorded");

    step("Fire them from outside");
    let called = Instant::now();
    show_report(guest.fire(&EVENTS).await?.report);
    let first = first_event(&mut events.batch().await?, &mut events).await?;
    println!(
        "   Call to first event: {} ms.",
        called.elapsed().as_millis()
    );
    show(&first);
    guest.shell(WORK).await?;
    for event in events
        .until(|event| event.name == EVENTS[0])
        .await?
        .iter()
        .rev()
        .take(5)
        .rev()
    {
        show(event);
    }

    step("Record a timeline");
    let timeline = arguments.timeline.unwrap_or_else(default_timeline);
    record(&environment, &mut guest, &timeline).await?;
    println!("   {}", timeline.display());
    println!("   Open it in https://ui.perfetto.dev or chrome://tracing.");

    step("Park them: silent again");
    show_report(guest.park(&EVENTS).await?.report);
    let before = guest.recorded().await?;
    guest.shell(WORK).await?;
    let recorded = guest.recorded().await? - before;
    println!("   Commands ran in the guest; its kernel recorded {recorded} events.");
    ensure!(recorded == 0, "parked events were recorded");

    guest.disarm(&EVENTS).await?;
    guest.assert_no_warnings().await?;
    step("Power the guest off");
    let status = guest.power_off().await?;
    ensure!(status.success(), "the monitor ended with {status}");
    println!("\nThe guest followed every step.");
    Ok(())
}

fn show_report(report: Option<FlipReport>) {
    let Some(report) = report.filter(|report| report.paused) else {
        return;
    };
    let micros = |part: Option<prost_types::Duration>| {
        part.and_then(|part| std::time::Duration::try_from(part).ok())
            .unwrap_or_default()
            .as_micros()
    };
    println!(
        "   {} in one pause: stop {} µs, patch {} µs, resume {} µs.",
        counted(report.sites_patched, "site"),
        micros(report.stop_time),
        micros(report.patch_time),
        micros(report.resume_time)
    );
}

async fn first_event(
    batch: &mut StreamTracepointEventsResponse,
    events: &mut patchbay_tests::EventStream,
) -> Result<TraceEvent> {
    match batch.events.first() {
        Some(event) => Ok(event.clone()),
        None => events.until(|_| true).await?.pop().context("an event"),
    }
}

fn show(event: &TraceEvent) {
    let field = |field: &patchbay_proto::v1::TraceField| {
        let value = match field.value.as_ref()? {
            Value::Signed(number) => number.to_string(),
            Value::Unsigned(number) => number.to_string(),
            Value::Hexadecimal(number) => format!("{number:#x}"),
            Value::Text(text) => text.clone(),
            Value::Raw(bytes) => format!("{} bytes", bytes.len()),
        };
        Some(format!("{}={value}", field.name))
    };
    let fields: Vec<String> = event.fields.iter().filter_map(field).collect();
    println!(
        "   {:>4}.{:06} {:>14}-{:<5} {}: {}",
        event.guest_time_ns / 1_000_000_000,
        event.guest_time_ns / 1000 % 1_000_000,
        event.comm,
        event.pid,
        event.name,
        fields.join(" ")
    );
}

/// Returns the default path of the timeline, in a directory that outlives the lab.
fn default_timeline() -> PathBuf {
    let folder =
        std::env::var_os("PATCHBAY_LAB_OUT").map_or_else(std::env::temp_dir, PathBuf::from);
    folder.join("patchbay-trace.json")
}

/// Records a timeline with the operator's command while commands run in the guest.
async fn record(environment: &Environment, guest: &mut Guest, timeline: &PathBuf) -> Result<()> {
    if let Some(folder) = timeline.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let mut recorder = Command::new(&environment.cli)
        .arg("--socket")
        .arg(guest.socket())
        .args([
            "trace",
            "record",
            "--listen",
            "--duration",
            "3s",
            "--output",
        ])
        .arg(timeline)
        .kill_on_drop(true)
        .spawn()
        .with_context(|| format!("cannot start {}", environment.cli.display()))?;
    let status = loop {
        guest.shell(WORK).await?;
        if let Some(status) = recorder.try_wait()? {
            break status;
        }
    };
    ensure!(status.success(), "the recorder ended with {status}");
    Ok(())
}
