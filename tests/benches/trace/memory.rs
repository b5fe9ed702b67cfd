// SPDX-License-Identifier: Apache-2.0
//! Compares three ways to follow the events of a stock kernel, in one guest and in turns: the host
//! reads them from the guest's memory, the agent sends them, `trace-cmd record` in the guest writes
//! them to a file. All record the same events while two processes play ping-pong.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use patchbay_proto::v1::{StreamTracepointEventsRequest, TraceLosses, TraceSource};
use patchbay_tests::{AGENT_INSTANCE, EventStream, Guest, StockKernel, skip};

use crate::cpu::Cpu;
use crate::figures::Samples;
use crate::{MAX_RATE, QUIET, add, drain, nanoseconds};

const TRACING: &str = "/sys/kernel/tracing";
const TRACE_CMD: &str = "/usr/bin/trace-cmd";
/// The size of each ring buffer. It is the agent's own choice.
const BUFFER_KIB: u32 = 1024;
const TURNS: usize = 9;
/// The events that the turns compare.
const SCHED: Load = Load {
    name: "sched:*",
    tracefs: "sched:*",
    agent: "sched:*",
    trace_cmd: "sched:*",
};
/// More and more events, until some are lost. The agent's events do not include those of system
/// calls.
const LOADS: [Load; 3] = [
    Load {
        name: "sched:sched_switch",
        tracefs: "sched:sched_switch",
        agent: "sched:sched_switch",
        trace_cmd: "sched:sched_switch",
    },
    SCHED,
    Load {
        name: "everything",
        tracefs: "*:*",
        agent: "*",
        trace_cmd: "all",
    },
];

/// Events, as each way selects them.
#[derive(Clone, Copy)]
struct Load {
    name: &'static str,
    tracefs: &'static str,
    agent: &'static str,
    trace_cmd: &'static str,
}

/// The reader of the events.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reader {
    /// The kernel records no events.
    NoEvents,
    /// The kernel records events, and overwrites them.
    Nobody,
    Memory,
    Agent,
    TraceCmd,
}

const CASES: [Reader; 6] = [
    Reader::Nobody,
    Reader::Memory,
    Reader::Agent,
    Reader::TraceCmd,
    Reader::NoEvents,
    Reader::Nobody,
];

impl Reader {
    fn name(self) -> &'static str {
        match self {
            Self::NoEvents => "nothing recorded",
            Self::Nobody => "recorded, nobody reads",
            Self::Memory => "read from memory",
            Self::Agent => "sent by the agent",
            Self::TraceCmd => "`trace-cmd record` in the guest",
        }
    }

    /// Returns the instance in which the kernel records the events.
    fn instance(self) -> &'static str {
        match self {
            Self::Agent => AGENT_INSTANCE,
            _ => TRACING,
        }
    }

    /// Returns the program in the guest that reads events.
    fn program(self) -> Option<&'static str> {
        match self {
            Self::Agent => Some("patchbay-agent"),
            Self::TraceCmd => Some("trace-cmd"),
            Self::NoEvents | Self::Nobody | Self::Memory => None,
        }
    }
}

/// Boots a stock guest with the agent, trace-cmd and `trace_tool`.
pub async fn boot() -> Result<Option<Guest>> {
    let Some(kernel) = StockKernel::named("6_12") else {
        return Ok(None);
    };
    if !Path::new(TRACE_CMD).exists() {
        skip("/usr/bin/trace-cmd does not exist; install Debian's package trace-cmd");
        return Ok(None);
    }
    let programs = kernel.initramfs.parent().context("a folder")?;
    let mut guest = Guest::builder(&kernel.kernel)
        .monitor(&kernel.monitor)
        .modules(&kernel.modules)
        .copy(Path::new(TRACE_CMD), TRACE_CMD)
        .copy(&programs.join("trace_tool"), "/bin/trace_tool")
        .agent()
        .boot()
        .await?;
    guest.wait_for_agent().await?;
    let size = format!("echo {BUFFER_KIB} >{TRACING}/buffer_size_kb; mkfifo /tmp/stop");
    guest.shell(&size).await?;
    Ok(Some(guest))
}

/// The result of one case in one turn.
#[derive(Default)]
struct Turn {
    /// Nanoseconds of a round, one sample per line.
    output: String,
    round: Samples,
    /// The time of all rounds.
    time: Duration,
    /// The events that the reader got.
    read: u64,
    recorded: u64,
    losses: TraceLosses,
    cpu: Cpu,
}

/// The work of a turn.
#[derive(Clone, Copy)]
struct Work {
    rounds: usize,
    samples: usize,
    events: Load,
}

const WORK: Work = Work {
    rounds: 1000,
    samples: 5,
    events: SCHED,
};

async fn follow(guest: &mut Guest, source: TraceSource) -> Result<EventStream> {
    let request = StreamTracepointEventsRequest {
        source: source.into(),
        max_events_per_second: MAX_RATE,
        ..Default::default()
    };
    EventStream::open(&mut guest.tracepoints(), request).await
}

/// Starts to record.
async fn begin(guest: &mut Guest, reader: Reader, events: Load) -> Result<Option<EventStream>> {
    let top = format!("cd {TRACING}; echo 0 >tracing_on; echo >trace; cd /");
    guest.shell(&top).await?;
    match reader {
        Reader::NoEvents => return Ok(None),
        Reader::Nobody => {}
        Reader::Memory => {
            let stream = follow(guest, TraceSource::Memory).await?;
            enable(guest, events.tracefs).await?;
            return Ok(Some(stream));
        }
        Reader::Agent => {
            let stream = follow(guest, TraceSource::Agent).await?;
            guest.arm(&[events.agent]).await?;
            guest.fire(&[events.agent]).await?;
            return Ok(Some(stream));
        }
        Reader::TraceCmd => {
            // trace-cmd records while its command runs.
            let command = format!(
                "rm -f /tmp/ready; trace-cmd record -e '{}' -o /tmp/trace.dat sh -c ': >/tmp/ready; read line </tmp/stop' >/tmp/record.log 2>&1 & \
                 until [ -e /tmp/ready ]; do usleep 20000; done",
                events.trace_cmd
            );
            guest.shell(&command).await?;
            return Ok(None);
        }
    }
    enable(guest, events.tracefs).await?;
    Ok(None)
}

async fn enable(guest: &mut Guest, events: &str) -> Result<()> {
    let command = format!("cd {TRACING}; echo '{events}' >set_event; echo 1 >tracing_on; cd /");
    guest.shell(&command).await.map(drop)
}

/// Stops recording, before the last events are read.
async fn stop(guest: &mut Guest, reader: Reader, events: Load) -> Result<()> {
    match reader {
        Reader::Agent => guest.park(&[events.agent]).await.map(drop)?,
        _ => guest
            .shell(&format!("echo 0 >{TRACING}/tracing_on"))
            .await
            .map(drop)?,
    }
    Ok(())
}

/// Removes the events after the turn.
async fn end(guest: &mut Guest, reader: Reader, events: Load) -> Result<()> {
    match reader {
        Reader::Agent => guest.disarm(&[events.agent]).await?,
        Reader::TraceCmd => {
            guest.shell("echo >/tmp/stop; wait").await?;
        }
        _ => {
            guest.shell(&format!("echo >{TRACING}/set_event")).await?;
        }
    }
    Ok(())
}

/// The counters of an instance.
#[derive(Clone, Copy, Default)]
struct Counters {
    entries: u64,
    overrun: u64,
    read: u64,
}

async fn counters(guest: &mut Guest, instance: &str) -> Result<Counters> {
    let text = guest
        .shell(&format!("cat {instance}/per_cpu/cpu*/stats"))
        .await?;
    let mut counters = Counters::default();
    for line in text.lines() {
        let Some((name, value)) = line.trim().split_once(": ") else {
            continue;
        };
        match name {
            "entries" => counters.entries += value.parse::<u64>()?,
            "overrun" => counters.overrun += value.parse::<u64>()?,
            "read events" => counters.read += value.parse::<u64>()?,
            _ => {}
        }
    }
    Ok(counters)
}

/// Lets the guest work in one case.
async fn turn(guest: &mut Guest, reader: Reader, work: Work) -> Result<Turn> {
    let mut turn = Turn::default();
    let mut stream = begin(guest, reader, work.events).await?;
    let counted = counters(guest, reader.instance()).await?;
    let cpu = Cpu::read(guest, reader.program()).await?;
    let command = format!("trace_tool ping-pong {} {}", work.rounds, work.samples);
    let began = Instant::now();
    let output = match &mut stream {
        None => guest.shell(&command).await?,
        Some(stream) => {
            let (read, losses) = (&mut turn.read, &mut turn.losses);
            let reading = async {
                while let Ok(batch) = stream.batch().await {
                    *read += batch.events.len() as u64;
                    add(losses, batch.losses);
                }
            };
            tokio::select! {
                output = guest.shell(&command) => output?,
                () = reading => anyhow::bail!("the event stream ended"),
            }
        }
    };
    turn.time = began.elapsed();
    nanoseconds(&output, &mut turn.round)?;
    turn.output = output;
    stop(guest, reader, work.events).await?;
    match &mut stream {
        Some(stream) => {
            let (read, losses) = drain(stream).await?;
            turn.read += read;
            add(&mut turn.losses, Some(losses));
        }
        None => tokio::time::sleep(QUIET).await,
    }
    turn.cpu = Cpu::read(guest, reader.program()).await?.since(&cpu);
    let after = counters(guest, reader.instance()).await?;
    turn.recorded = (after.entries + after.overrun + after.read)
        .saturating_sub(counted.entries + counted.overrun + counted.read);
    drop(stream);
    if reader == Reader::TraceCmd {
        turn.losses.overwritten = after.overrun - counted.overrun;
        turn.read = turn.recorded - turn.losses.overwritten;
    }
    end(guest, reader, work.events).await?;
    if reader == Reader::TraceCmd {
        println!(
            "{}",
            guest
                .shell("tail -n 20 /tmp/record.log; ls -l /tmp/trace.dat; rm /tmp/trace.dat")
                .await?
        );
    }
    Ok(turn)
}

pub async fn compare(guest: &mut Guest) -> Result<()> {
    let mut all: Vec<Vec<Turn>> = CASES.iter().map(|_| vec![]).collect();
    for reader in CASES {
        // This turn is not counted. It warms the caches and the emulator's translations.
        turn(guest, reader, WORK).await?;
    }
    for number in 0..TURNS {
        for (at, reader) in CASES.into_iter().enumerate() {
            let turn = turn(guest, reader, WORK).await?;
            eprintln!(
                "turn {number}: {}: {} µs, {:?}, read {}, recorded {}, {:?}, vcpus {:?}, monitor {:?}, client {:?}, in the guest {:?}",
                reader.name(),
                turn.round,
                turn.time,
                turn.read,
                turn.recorded,
                turn.losses,
                turn.cpu.vcpus,
                turn.cpu.monitor,
                turn.cpu.client,
                turn.cpu.in_guest,
            );
            all[at].push(turn);
        }
    }
    print(&all)
}

fn print(all: &[Vec<Turn>]) -> Result<()> {
    println!(
        "\n| `{}` while two processes play ping-pong | one round, p50 / p99 / max | ratio of the rounds: median, least and most of {TURNS} turns | ratio of the vCPU's CPU time |",
        SCHED.name
    );
    println!("|---|---|---|---|");
    for (reader, turns) in CASES.iter().zip(all) {
        let mut rounds = Samples::default();
        for turn in turns {
            nanoseconds(&turn.output, &mut rounds)?;
        }
        let beside = || turns.iter().zip(&all[0]);
        println!(
            "| {} | {rounds} | {} | {} |",
            reader.name(),
            spread(beside().map(|(turn, base)| turn.round.times(&base.round))),
            spread(beside().map(|(turn, base)| ratio(turn.cpu.vcpus, base.cpu.vcpus))),
        );
    }
    println!(
        "\n| the same turns | recorded | read | lost: overwritten, slow client, flood, malformed | events per second | ms of CPU: monitor | client | reader in the guest | host's CPU, s per million events |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    let sum = |turns: &[Turn]| {
        turns
            .iter()
            .fold(Cpu::default(), |sum, turn| sum.plus(&turn.cpu))
    };
    let base = sum(&all[0]);
    for (reader, turns) in CASES.iter().zip(all) {
        let cpu = sum(turns);
        let recorded: u64 = turns.iter().map(|turn| turn.recorded).sum();
        let read: u64 = turns.iter().map(|turn| turn.read).sum();
        let time: Duration = turns.iter().map(|turn| turn.time).sum();
        let mut losses = TraceLosses::default();
        for turn in turns {
            add(&mut losses, Some(turn.losses));
        }
        let millis = |time: Duration| time.as_secs_f64() * 1e3;
        let more = cpu.since(&base);
        let host = (more.monitor + more.client).as_secs_f64() * 1e6 / read.max(1) as f64;
        println!(
            "| {} | {recorded} | {read} | {}, {}, {}, {} | {:.0} | {:.0} | {:.0} | {:.0} | {host:.1} |",
            reader.name(),
            losses.overwritten,
            losses.slow_client,
            losses.flood,
            losses.malformed,
            read.max(recorded) as f64 / time.as_secs_f64(),
            millis(cpu.monitor),
            millis(cpu.client),
            millis(cpu.in_guest),
        );
    }
    Ok(())
}

fn ratio(time: Duration, base: Duration) -> f64 {
    time.as_secs_f64() / base.as_secs_f64()
}

/// Formats the median, the least and the most.
pub fn spread(ratios: impl Iterator<Item = f64>) -> String {
    let mut ratios: Vec<_> = ratios.collect();
    ratios.sort_by(f64::total_cmp);
    let [least, median, most] = [0, ratios.len() / 2, ratios.len() - 1].map(|at| ratios[at]);
    format!("{median:.2} ({least:.2} to {most:.2})")
}

/// Finds the rate at which each way begins to lose events.
async fn loads(guest: &mut Guest) -> Result<()> {
    println!(
        "\n| events | reader | recorded | recorded per second | read per second | lost: overwritten, slow client, flood, malformed |"
    );
    println!("|---|---|---|---|---|---|");
    for events in LOADS {
        for reader in [Reader::Memory, Reader::Agent, Reader::TraceCmd] {
            let turn = turn(guest, reader, Work { events, ..WORK }).await?;
            let rate = |events: u64| events as f64 / turn.time.as_secs_f64();
            println!(
                "| {} | {} | {} | {:.0} | {:.0} | {}, {}, {}, {} |",
                events.name,
                reader.name(),
                turn.recorded,
                rate(turn.recorded),
                rate(turn.read),
                turn.losses.overwritten,
                turn.losses.slow_client,
                turn.losses.flood,
                turn.losses.malformed,
            );
        }
    }
    Ok(())
}

pub async fn run() -> Result<()> {
    let Some(mut guest) = boot().await? else {
        return Ok(());
    };
    println!("Guest: Linux {}", guest.shell("uname -r").await?);
    loads(&mut guest).await?;
    compare(&mut guest).await?;
    guest.assert_no_warnings().await
}
