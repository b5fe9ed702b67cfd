// SPDX-License-Identifier: Apache-2.0
//! Compares the cost of tracing from outside with that of tracing by the guest itself, in one run:
//!
//! - the time from the call to the first event at the client;
//! - firing and parking all tracepoints in one transaction, and the guest's own `echo 1` and
//!   `echo 0` to `events/enable`;
//! - a pipe between two processes of the guest with nothing armed, everything parked, everything
//!   firing;
//! - events per second, losses, and the agent's memory;
//! - all tracepoints of an unpatched kernel in one transaction, and its own `echo 1` and `echo 0`.
//!
//! Run it as `cargo xtask bench trace`. With the argument `memory` or `log` it runs only the
//! comparison in `memory.rs` or `first_line.rs`. In the lab only ratios are meaningful.

mod cpu;
#[path = "../flip/figures.rs"]
mod figures;
mod first_line;
mod log;
mod memory;
mod process;
mod stock;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use figures::Samples;
use patchbay_proto::v1::{
    FireTracepointsRequest, FlipReport, ParkTracepointsRequest, ResultView,
    StreamTracepointEventsRequest, TraceLosses,
};
use patchbay_tests::{EventStream, Guest, TestGuest};

const SWITCH: &str = "sched:sched_switch";
const ALL: &str = "*";
/// The number of turns. There are several, so that a drift of the machine affects all cases.
const TURNS: usize = 4;
/// The time without events after which a stream counts as drained.
const QUIET: Duration = Duration::from_millis(600);
/// The number of passes of the byte in one sample, and of samples in one turn.
const ROUNDS: usize = 500;
const SAMPLES: usize = 5;
/// The number of turns of the comparison from nothing armed to everything firing.
const SLOWDOWN_TURNS: usize = 15;
/// The limit on the rate of events, which is higher than the rate that the client can read.
const MAX_RATE: u32 = 1_000_000;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let is_given = |word: &str| std::env::args().any(|argument| argument == word);
    if is_given("memory") || is_given("log") {
        println!("Host: {}", figures::host());
        if is_given("memory") {
            memory::run().await?;
        }
        if is_given("log") {
            first_line::run().await?;
        }
        return Ok(());
    }
    let Some(mut guest) = Guest::with_agent().await? else {
        return Ok(());
    };
    println!("Host: {}", figures::host());
    println!("Microseconds, p50 / p99 / max; ratios of the p50.");
    println!("\nAgent at rest: {}.", memory(&mut guest).await?);
    first_event(&mut guest).await?;
    all_at_once(&mut guest).await?;
    slowdown(&mut guest).await?;
    rate(&mut guest).await?;
    println!("\nAgent afterwards: {}.", memory(&mut guest).await?);
    guest.assert_no_warnings().await?;
    drop(guest);
    stock::all_at_once().await
}

/// Returns the memory of the agent, as the guest's kernel reports it.
async fn memory(guest: &mut Guest) -> Result<String> {
    let command = "grep -E 'VmHWM|VmRSS' /proc/$(pidof patchbay-agent)/status";
    let words = guest.shell(command).await?;
    Ok(words.split_whitespace().collect::<Vec<_>>().join(" "))
}

async fn listen(guest: &mut Guest) -> Result<EventStream> {
    let request = StreamTracepointEventsRequest {
        max_events_per_second: MAX_RATE,
        ..Default::default()
    };
    EventStream::open(&mut guest.tracepoints(), request).await
}

/// Counts events and losses until the stream is quiet.
async fn drain(stream: &mut EventStream) -> Result<(u64, TraceLosses)> {
    let (mut events, mut losses) = (0, TraceLosses::default());
    while let Ok(batch) = tokio::time::timeout(QUIET, stream.batch()).await {
        let batch = batch?;
        events += batch.events.len() as u64;
        add(&mut losses, batch.losses);
    }
    Ok((events, losses))
}

fn add(losses: &mut TraceLosses, more: Option<TraceLosses>) {
    let more = more.unwrap_or_default();
    losses.overwritten += more.overwritten;
    losses.slow_client += more.slow_client;
    losses.flood += more.flood;
    losses.malformed += more.malformed;
}

async fn first_event(guest: &mut Guest) -> Result<()> {
    let mut stream = listen(guest).await?;
    guest.arm(&[SWITCH]).await?;
    guest
        .shell("trace_tool ping-pong 1000 1000000 >/dev/null &")
        .await?;
    let (mut call, mut first) = (Samples::default(), Samples::default());
    for _ in 0..30 {
        drain(&mut stream).await?;
        let began = Instant::now();
        guest.fire(&[SWITCH]).await?;
        call.add(began.elapsed());
        while stream.batch().await?.events.is_empty() {}
        first.add(began.elapsed());
        guest.park(&[SWITCH]).await?;
    }
    guest.shell("kill $(pidof trace_tool)").await?;
    drain(&mut stream).await?;
    guest.disarm(&[SWITCH]).await?;
    println!("\n| one event, {} times | p50 / p99 / max |", first.len());
    println!("|---|---|");
    println!("| fire: call to answer | {call} |");
    println!("| fire: call to the first event at the client | {first} |");
    Ok(())
}

/// Durations of the host's transactions.
#[derive(Default)]
struct HostTimes {
    call: Samples,
    window: Samples,
}

impl HostTimes {
    fn add(&mut self, began: Instant, report: Option<FlipReport>) -> Result<u32> {
        self.call.add(began.elapsed());
        let report = report.context("a change without a report")?;
        let time = |part: Option<prost_types::Duration>| {
            Duration::try_from(part.unwrap_or_default()).unwrap_or_default()
        };
        self.window
            .add(time(report.stop_time) + time(report.patch_time) + time(report.resume_time));
        Ok(report.sites_patched)
    }
}

/// Parses one number per line.
fn nanoseconds(output: &str, samples: &mut Samples) -> Result<()> {
    for line in output.lines() {
        samples.add(Duration::from_nanos(line.trim().parse()?));
    }
    Ok(())
}

/// Makes the guest itself switch all its events.
async fn switch(guest: &mut Guest, text: &str, samples: &mut Samples) -> Result<()> {
    let command = format!("trace_tool write /sys/kernel/tracing/events/enable {text}");
    nanoseconds(&guest.shell(&command).await?, samples)
}

/// Prints a table of the host's times next to the guest's own.
fn print_beside(what: &str, rows: [(&str, &HostTimes, &Samples); 2]) {
    println!(
        "\n| {what} | n | host: whole call | guest stopped | guest itself | times faster | guest itself / stopped |"
    );
    println!("|---|---|---|---|---|---|---|");
    for (what, host, itself) in rows {
        println!(
            "| {what} | {} and {} | {} | {} | {itself} | {:.1} | {:.0} |",
            host.call.len(),
            itself.len(),
            host.call,
            host.window,
            itself.times(&host.call),
            itself.times(&host.window),
        );
    }
}

async fn all_at_once(guest: &mut Guest) -> Result<()> {
    let (mut fire, mut park) = (HostTimes::default(), HostTimes::default());
    let (mut on, mut off) = (Samples::default(), Samples::default());
    let (mut armed, mut sites) = (0, 0);
    let (mut arm, mut disarm) = (Samples::default(), Samples::default());
    for _ in 0..TURNS {
        for (text, samples) in [("1", &mut on), ("0", &mut off)] {
            switch(guest, text, samples).await?;
        }
        let began = Instant::now();
        armed = guest.arm(&[ALL]).await?.results.len();
        arm.add(began.elapsed());
        for _ in 0..10 {
            // The summary makes this comparable with `echo`, which does not report each event
            // either.
            let view = ResultView::Summary.into();
            let request = FireTracepointsRequest {
                patterns: vec![ALL.to_owned()],
                result_view: view,
                ..Default::default()
            };
            let began = Instant::now();
            let fired = guest.tracepoints().fire_tracepoints(request).await?;
            sites = fire.add(began, fired.into_inner().report)?;
            let request = ParkTracepointsRequest {
                patterns: vec![ALL.to_owned()],
                result_view: view,
                ..Default::default()
            };
            let began = Instant::now();
            let parked = guest.tracepoints().park_tracepoints(request).await?;
            park.add(began, parked.into_inner().report)?;
        }
        let began = Instant::now();
        guest.disarm(&[ALL]).await?;
        disarm.add(began.elapsed());
    }
    let count = "wc -l </sys/kernel/tracing/available_events";
    let events = guest.shell(count).await?;
    let what = format!(
        "{armed} events, {sites} sites; in the guest {} events",
        events.trim()
    );
    print_beside(&what, [("fire", &fire, &on), ("park", &park, &off)]);
    println!(
        "| arm (once, through the agent) | {} | {arm} | | | | |",
        arm.len()
    );
    println!("| disarm | {} | {disarm} | | | | |", disarm.len());
    Ok(())
}

/// Adds the samples to the total and to this turn.
async fn ping_pong(guest: &mut Guest, all: &mut Samples, turn: &mut Samples) -> Result<()> {
    let command = format!("trace_tool ping-pong {ROUNDS} {SAMPLES}");
    let output = guest.shell(&command).await?;
    nanoseconds(&output, all)?;
    nanoseconds(&output, turn)
}

async fn slowdown(guest: &mut Guest) -> Result<()> {
    let cases = [
        "nothing armed",
        "everything armed and parked",
        "everything firing, nobody reads",
        "everything firing, with a stream",
        "nothing armed, again",
    ];
    let mut all = cases.map(|_| Samples::default());
    // The ratios are computed per turn, because the machine's speed may change by a factor of two
    // within a minute.
    let mut ratios = cases.map(|_| Vec::new());
    // This run is not counted. It warms the caches and the emulator's translations.
    ping_pong(guest, &mut Samples::default(), &mut Samples::default()).await?;
    for _ in 0..SLOWDOWN_TURNS {
        let mut turn = cases.map(|_| Samples::default());
        ping_pong(guest, &mut all[0], &mut turn[0]).await?;
        guest.arm(&[ALL]).await?;
        ping_pong(guest, &mut all[1], &mut turn[1]).await?;
        guest.fire(&[ALL]).await?;
        ping_pong(guest, &mut all[2], &mut turn[2]).await?;
        let mut stream = listen(guest).await?;
        {
            // The stream is read during the measurement, so that the client is not the bottleneck.
            let reading = async { while stream.batch().await.is_ok() {} };
            tokio::select! {
                result = ping_pong(guest, &mut all[3], &mut turn[3]) => result?,
                () = reading => anyhow::bail!("the event stream ended"),
            }
        }
        guest.park(&[ALL]).await?;
        drop(stream);
        guest.disarm(&[ALL]).await?;
        ping_pong(guest, &mut all[4], &mut turn[4]).await?;
        for (ratios, of_turn) in ratios.iter_mut().zip(&turn) {
            ratios.push(of_turn.times(&turn[0]));
        }
    }
    println!(
        "\n| pipe ping-pong, one round | n | p50 / p99 / max | times as long as with nothing armed: median, least and most of {SLOWDOWN_TURNS} turns |"
    );
    println!("|---|---|---|---|");
    for ((what, samples), mut ratios) in cases.iter().zip(&all).zip(ratios) {
        ratios.sort_by(f64::total_cmp);
        let [least, median, most] = [0, ratios.len() / 2, ratios.len() - 1].map(|at| ratios[at]);
        println!(
            "| {what} | {} | {samples} | {median:.2} ({least:.2} to {most:.2}) |",
            samples.len()
        );
    }
    Ok(())
}

/// Generates as many events as the guest can while two processes play ping-pong.
async fn rate(guest: &mut Guest) -> Result<()> {
    println!(
        "\n| events at the client | events | per second | in the guest | lost: overwritten, slow client, flood, malformed |"
    );
    println!("|---|---|---|---|---|");
    for (what, patterns) in [(SWITCH, [SWITCH]), ("everything", [ALL])] {
        let mut stream = listen(guest).await?;
        guest.arm(&patterns).await?;
        let before = guest.recorded().await?;
        guest.fire(&patterns).await?;
        guest
            .shell("trace_tool ping-pong 1000 1000000 >/dev/null &")
            .await?;
        let began = Instant::now();
        let (mut events, mut losses) = (0, TraceLosses::default());
        while began.elapsed() < Duration::from_secs(15) {
            let batch = stream.batch().await?;
            events += batch.events.len() as u64;
            add(&mut losses, batch.losses);
        }
        let (while_firing, time) = (events, began.elapsed());
        guest.park(&patterns).await?;
        guest.shell("kill $(pidof trace_tool)").await?;
        let (late, more) = drain(&mut stream).await?;
        events += late;
        add(&mut losses, Some(more));
        let recorded = guest.recorded().await? - before;
        ensure!(events > 0, "no event arrived");
        println!(
            "| {what} | {events} | {:.0} | {recorded} | {}, {}, {}, {} |",
            while_firing as f64 / time.as_secs_f64(),
            losses.overwritten,
            losses.slow_client,
            losses.flood,
            losses.malformed,
        );
        guest.disarm(&patterns).await?;
    }
    Ok(())
}
