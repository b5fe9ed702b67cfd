// SPDX-License-Identifier: Apache-2.0
//! Measures the rate at which the log of a guest is followed while the guest writes to it, in our
//! monitor and in QEMU, and the cost for the guest.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use patchbay_proto::v1::tracepoints_service_client::TracepointsServiceClient;
use patchbay_proto::v1::{KernelLogSource, StreamKernelLogRequest, StreamKernelLogResponse};
use patchbay_tests::{Foreign, Guest};
use tonic::Streaming;
use tonic::transport::Channel;

use crate::cpu;
use crate::figures::Samples;
use crate::memory::spread;
use crate::process;

/// The number of records that a turn writes, of 51 bytes each.
const RECORDS: u64 = 20_000;
const TURNS: usize = 7;
/// Writes the records to a file, in which each has 64 bytes with its level and a newline. The
/// kernel's limit on the rate of such records is turned off.
const PREPARE: &str = r#"awk 'BEGIN { for (i = 0; i < 20000; i++) printf "<13>record %052d\n", i }' >/tmp/lines; echo on >/proc/sys/kernel/printk_devkmsg"#;

/// The ways in which the guest writes the records. The first is the fastest.
const WRITERS: [(&str, &str); 2] = [
    ("dd", "dd bs=64 if=/tmp/lines of=/dev/kmsg 2>/dev/null"),
    (
        "a loop of the shell",
        "while read -r line; do echo \"$line\" >&3; done </tmp/lines 3>/dev/kmsg",
    ),
];

/// A guest with a shell, and the process that serves its API.
pub trait Writer {
    async fn execute(&mut self, command: &str) -> Result<String>;

    fn server(&self) -> Option<u32>;
}

impl Writer for Guest {
    async fn execute(&mut self, command: &str) -> Result<String> {
        self.shell(command).await
    }

    fn server(&self) -> Option<u32> {
        self.monitor_pid()
    }
}

impl Writer for Foreign {
    async fn execute(&mut self, command: &str) -> Result<String> {
        self.shell(command).await
    }

    fn server(&self) -> Option<u32> {
        self.attacher_pid()
    }
}

/// The sums of all turns in which a client follows.
#[derive(Default)]
struct Followed {
    records: u64,
    lost: u64,
    time: Duration,
    server: Duration,
    client: Duration,
}

/// Opens a stream of the records from now on.
async fn follow(
    client: &mut TracepointsServiceClient<Channel>,
) -> Result<Streaming<StreamKernelLogResponse>> {
    let request = StreamKernelLogRequest {
        source: KernelLogSource::Memory.into(),
        ..Default::default()
    };
    let mut stream = client.stream_kernel_log(request).await?.into_inner();
    stream.message().await?.context("no first message")?;
    Ok(stream)
}

/// Reads up to the last record of a turn. Returns the numbers of records and of losses, and checks
/// that both together are all records.
async fn until_last(stream: &mut Streaming<StreamKernelLogResponse>) -> Result<(u64, u64)> {
    let last = format!("record {:052}", RECORDS - 1);
    let (mut records, mut lost) = (0, 0);
    let mut next = None;
    while let Some(message) = stream.message().await? {
        lost += message.lost;
        for (number, record) in (0..).zip(message.records) {
            let skipped = if number == 0 { message.lost } else { 0 };
            let expected = next.map(|next| next + skipped);
            ensure!(
                expected.is_none_or(|expected| expected == record.sequence),
                "record {} instead of {expected:?}",
                record.sequence
            );
            next = Some(record.sequence + 1);
            records += 1;
            if record.text == last {
                return Ok((records, lost));
            }
        }
    }
    anyhow::bail!("the stream ended before the last record")
}

async fn turn(
    guest: &mut impl Writer,
    client: &mut TracepointsServiceClient<Channel>,
    command: &str,
    sums: &mut Followed,
) -> Result<Duration> {
    let server = guest.server().context("the server runs")?;
    let mut stream = follow(client).await?;
    let before = (cpu::without_vcpus(server)?, process::time("self")?);
    let began = Instant::now();
    let write = async {
        guest.execute(command).await?;
        anyhow::Ok(began.elapsed())
    };
    let read = async {
        let read = until_last(&mut stream).await?;
        anyhow::Ok((read, began.elapsed()))
    };
    let (written, ((records, lost), time)) = tokio::try_join!(write, read)?;
    sums.server += cpu::without_vcpus(server)?.saturating_sub(before.0);
    sums.client += process::time("self")?.saturating_sub(before.1);
    sums.records += records;
    sums.lost += lost;
    sums.time += time;
    Ok(written)
}

/// Lets the guest write in each way, in turns with and without a client that follows.
pub async fn compare(
    guest: &mut impl Writer,
    mut client: TracepointsServiceClient<Channel>,
) -> Result<()> {
    guest.execute(PREPARE).await?;
    println!(
        "\n| {RECORDS} records, {TURNS} times, written by | records read | lost | read per second | ms of the guest: nobody follows, p50 / p99 / max | a client follows | ratio of the turns: median, least and most | µs of CPU per record: service | client |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for (name, command) in WRITERS {
        let mut sums = Followed::default();
        // This turn is not counted.
        turn(guest, &mut client, command, &mut Followed::default()).await?;
        let (mut alone, mut followed) = (Samples::default(), Samples::default());
        let mut ratios = vec![];
        for _ in 0..TURNS {
            let began = Instant::now();
            guest.execute(command).await?;
            let without = began.elapsed();
            let with = turn(guest, &mut client, command, &mut sums).await?;
            // Samples are printed in microseconds.
            alone.add(without / 1000);
            followed.add(with / 1000);
            ratios.push(with.as_secs_f64() / without.as_secs_f64());
        }
        let per_record = |time: Duration| time.as_secs_f64() * 1e6 / sums.records as f64;
        println!(
            "| {name} | {} | {} | {:.0} | {alone} | {followed} | {} | {:.1} | {:.1} |",
            sums.records,
            sums.lost,
            sums.records as f64 / sums.time.as_secs_f64(),
            spread(ratios.into_iter()),
            per_record(sums.server),
            per_record(sums.client),
        );
    }
    Ok(())
}
