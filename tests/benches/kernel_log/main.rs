// SPDX-License-Identifier: Apache-2.0
//! Measures the CPU time of a host on which a client follows the log of each of many guests, all of
//! them idle, through one `patchbayd`.
//!
//! The guests exist only in the memory of a process of its own, each with the log of a kernel and
//! a socket of its own, as a monitor has. They need no KVM. Their process does what the monitors
//! of as many guests do for their clients; it has one executor per guest, but only one thread for
//! the API of all.
//!
//! Run it as `cargo xtask bench log`, or with the number of guests as argument.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use patchbay_guest::guest::Machine;
use patchbay_guest::testing::{InMemoryGuest, TestKey};
use patchbay_observe::KernelView;
use patchbay_observe::log::{Follower, Start, Terms};
use patchbay_observe::testing::{Log, Version};
use patchbay_proto::v1::guest_service_client::GuestServiceClient;
use patchbay_proto::v1::tracepoints_service_client::TracepointsServiceClient;
use patchbay_proto::v1::{
    KernelLogSource, ListGuestsRequest, StreamKernelLogRequest, StreamKernelLogResponse,
};
use patchbay_service::api::{ApiSocket, Endpoint, Guests, ServedGuest};
use patchbay_service::keys::{Keys, KeysConfig, Registry};
use patchbay_service::testing::GuestLog;
use patchbay_service::trace::Tracing;
use patchbay_tests::connect;
use rustix::process::{Resource, getrlimit, setrlimit};
use tonic::Streaming;
use tonic::transport::Channel;

#[path = "../trace/process.rs"]
mod process;

/// The environment variables of the process with the guests: its folder and the number of guests.
const FOLDER: &str = "PATCHBAY_FOLLOWERS_FOLDER";
const GUESTS: &str = "PATCHBAY_FOLLOWERS_GUESTS";
const DEFAULT_GUESTS: usize = 1000;
/// The number of guests that fit into one page of the daemon's list.
const MAX_GUESTS: i32 = 10_000;
/// The line that this process prints when it serves, and after each line that it was asked for.
const READY: &str = "ready";
/// The number of streams of one connection. The daemon permits 128 calls.
const STREAMS: usize = 100;
/// The duration of one measurement. The daemon lists its guests every 5 to 10 s.
const MEASURED: Duration = Duration::from_secs(30);
/// The time in which the pace of new streams slows down to that of idle ones.
const SETTLES: Duration = Duration::from_secs(12);
/// The number of polls of which the mean time is printed.
const POLLS: u32 = 100_000;

fn main() -> Result<()> {
    if let Some(folder) = std::env::var_os(FOLDER) {
        let guests = std::env::var(GUESTS)?.parse()?;
        return serve(&PathBuf::from(folder), guests);
    }
    idle_poll();
    let number = std::env::args().skip(1).find_map(|word| word.parse().ok());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(follow(number.unwrap_or(DEFAULT_GUESTS)))
}

/// A view that counts reads and bytes.
struct Counted<'a> {
    log: &'a Log,
    reads: std::cell::Cell<u64>,
    bytes: std::cell::Cell<u64>,
}

impl KernelView for Counted<'_> {
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        self.reads.set(self.reads.get() + 1);
        self.bytes.set(self.bytes.get() + bytes.len() as u64);
        self.log.read(address, bytes)
    }
}

/// Counts the reads and bytes of a poll that finds no new record.
fn idle_poll() {
    let log = Log::new(Version::V6_12, 12, 17);
    for number in 0..3000 {
        log.write(|writer| writer.print(6, &format!("record {number}")));
    }
    let view = Counted {
        log: &log,
        reads: 0.into(),
        bytes: 0.into(),
    };
    let terms = Terms {
        records: 512,
        bytes: 256 << 10,
        unfinished: false,
    };
    let mut follower = Follower::new(log.source(), Start::End);
    follower.poll(&view, terms);
    view.reads.set(0);
    view.bytes.set(0);
    let began = Instant::now();
    for _ in 0..POLLS {
        let batch = follower.poll(&view, terms);
        assert!(batch.records.is_empty() && batch.lost == 0);
    }
    let polls = u64::from(POLLS);
    println!("| a poll of a log that finds no new record | |");
    println!("|---|---|");
    println!(
        "| reads, and bytes in them | {}, {} |",
        view.reads.get() / polls,
        view.bytes.get() / polls
    );
    println!(
        "| mean time of {POLLS} polls | {:?} |",
        began.elapsed() / POLLS
    );
}

/// Raises the limit on open files, because each guest has a connection.
fn allow_descriptors() -> Result<()> {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    Ok(setrlimit(Resource::Nofile, limit)?)
}

/// Serves guests until the standard input ends. Prints a line in the log of each guest for each
/// line of the input.
fn serve(folder: &Path, number: usize) -> Result<()> {
    allow_descriptors()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let mut logs = vec![];
        for number in 0..number {
            logs.push(start(folder, number)?);
        }
        println!("{READY}");
        let (sender, mut lines) = tokio::sync::mpsc::unbounded_channel();
        std::thread::spawn(move || {
            for line in std::io::stdin().lines().map_while(Result::ok) {
                // The receiver lives as long as this process serves.
                let _ = sender.send(line);
            }
        });
        while let Some(line) = lines.recv().await {
            for log in &logs {
                log.print(6, &line);
            }
            println!("{READY}");
        }
        Ok(())
    })
}

/// Starts a guest with a log, and serves it on a socket.
fn start(folder: &Path, number: usize) -> Result<GuestLog> {
    let registry = Arc::new(Registry::default());
    let guest = InMemoryGuest::named(Arc::clone(&registry), &format!("guest-{number:04}"));
    guest.run(&[TestKey::new("alpha", 1)]);
    let log = GuestLog::new(&guest);
    log.found_by(&registry);
    log.print(6, "the first line");
    let name = guest.description().name;
    let (keys, _executor) = Keys::start(guest, registry, KeysConfig::default())?;
    let guests = Guests::default();
    let added = guests.add(ServedGuest::start(keys, Tracing::default())?);
    ensure!(added.is_ok(), "two guests have one name");
    let socket = ApiSocket::bind(&folder.join(format!("{name}.sock")))?;
    let endpoint = Endpoint::new(socket, guests);
    tokio::spawn(async move { endpoint.serve(std::future::pending()).await });
    Ok(log)
}

/// The process with the guests. It ends when its standard input is closed.
struct Host {
    child: Child,
    input: ChildStdin,
    output: BufReader<std::process::ChildStdout>,
}

impl Host {
    fn start(folder: &Path, guests: usize) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .env(FOLDER, folder)
            .env(GUESTS, guests.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let input = child.stdin.take().context("piped")?;
        let output = BufReader::new(child.stdout.take().context("piped")?);
        let mut host = Self {
            child,
            input,
            output,
        };
        host.wait()?;
        Ok(host)
    }

    fn wait(&mut self) -> Result<()> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        ensure!(line.trim() == READY, "the guests' process says {line:?}");
        Ok(())
    }

    /// Prints a line in the log of each guest.
    fn print(&mut self, line: &str) -> Result<()> {
        writeln!(self.input, "{line}")?;
        self.wait()
    }
}

/// The processes whose time is measured.
struct Processes {
    host: Host,
    daemon: Child,
}

impl Drop for Processes {
    fn drop(&mut self) {
        for child in [&mut self.daemon, &mut self.host.child] {
            // It may have ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Processes {
    /// Returns the time of the guests' process, of the daemon and of this process.
    fn times(&self) -> Result<[Duration; 3]> {
        let (host, daemon) = (self.host.child.id(), self.daemon.id());
        Ok([
            process::time(&host.to_string())?,
            process::time(&daemon.to_string())?,
            process::time("self")?,
        ])
    }

    /// Returns the resident memory of the daemon.
    fn daemon_memory(&self) -> Result<String> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.daemon.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        Ok(line.context("VmRSS is missing")?.trim().to_owned())
    }
}

async fn follow(number: usize) -> Result<()> {
    ensure!(
        i32::try_from(number).is_ok_and(|number| (1..=MAX_GUESTS).contains(&number)),
        "the number of guests must be between 1 and {MAX_GUESTS}"
    );
    let Some(program) = std::env::var_os("PATCHBAYD") else {
        patchbay_tests::skip("PATCHBAYD is not set; `cargo xtask bench log` sets it");
        return Ok(());
    };
    allow_descriptors()?;
    let folder = tempfile::tempdir()?;
    let run = folder.path().join("run");
    std::fs::create_dir(&run)?;
    let socket = folder.path().join("patchbayd.sock");
    let host = Host::start(&run, number)?;
    let daemon = Command::new(program)
        .arg("--run-dir")
        .arg(&run)
        .arg("--socket")
        .arg(&socket)
        .arg("--audit-log")
        .arg(folder.path().join("audit.jsonl"))
        .stdout(Stdio::null())
        .spawn()?;
    let mut processes = Processes { host, daemon };
    let names = list(&mut processes.daemon, &socket, number).await?;
    println!(
        "\n| {number} guests in memory, of one daemon | guests' process | patchbayd | client |"
    );
    println!("|---|---|---|---|");
    measure(&processes, "nobody follows").await?;
    let before = processes.daemon_memory()?;
    let mut streams = open(&socket, &names).await?;
    tokio::time::sleep(SETTLES).await;
    measure(&processes, "each guest's log is followed, and idle").await?;
    let after = processes.daemon_memory()?;
    let began = Instant::now();
    let times = processes.times()?;
    processes.host.print("the second line")?;
    for stream in &mut streams {
        let message = stream.message().await?.context("the stream ended")?;
        let texts: Vec<_> = message.records.iter().map(|record| &*record.text).collect();
        ensure!(
            texts == ["the second line"] && message.lost == 0,
            "{message:?}"
        );
    }
    let waited = began.elapsed();
    let spent = spent(&processes, times)?;
    println!(
        "| one line in each log: ms of CPU, after {} ms at the client | {} |",
        waited.as_millis(),
        row(spent, |time| format!("{:.0}", time.as_secs_f64() * 1e3))
    );
    println!("\nResident memory of patchbayd: {before}, and {after} with all streams.");
    Ok(())
}

/// Waits until the daemon serves all guests, and returns their names.
async fn list(daemon: &mut Child, socket: &Path, number: usize) -> Result<Vec<String>> {
    while !socket.exists() {
        ensure!(daemon.try_wait()?.is_none(), "patchbayd has ended");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let mut client = GuestServiceClient::new(connect(socket).await?);
    loop {
        let request = ListGuestsRequest {
            page_size: MAX_GUESTS,
            ..Default::default()
        };
        let guests = client.list_guests(request).await?.into_inner().guests;
        if guests.len() == number {
            return Ok(guests.into_iter().map(|guest| guest.guest).collect());
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

/// Follows the log of each guest.
async fn open(socket: &Path, names: &[String]) -> Result<Vec<Streaming<StreamKernelLogResponse>>> {
    let mut streams = vec![];
    for names in names.chunks(STREAMS) {
        let channel: Channel = connect(socket).await?;
        for guest in names {
            let request = StreamKernelLogRequest {
                guest: guest.clone(),
                source: KernelLogSource::Memory.into(),
                ..Default::default()
            };
            let mut client = TracepointsServiceClient::new(channel.clone());
            let mut stream = client.stream_kernel_log(request).await?.into_inner();
            stream.message().await?.context("no first message")?;
            streams.push(stream);
        }
    }
    Ok(streams)
}

fn spent(processes: &Processes, before: [Duration; 3]) -> Result<[Duration; 3]> {
    let mut times = processes.times()?;
    for (time, before) in times.iter_mut().zip(before) {
        *time -= before;
    }
    Ok(times)
}

fn row(times: [Duration; 3], show: impl Fn(Duration) -> String) -> String {
    times.map(show).join(" | ")
}

/// Prints the percentage of one CPU that each process takes.
async fn measure(processes: &Processes, what: &str) -> Result<()> {
    let (began, before) = (Instant::now(), processes.times()?);
    tokio::time::sleep(MEASURED).await;
    let spent = spent(processes, before)?;
    let percent = |time: Duration| {
        let share = time.as_secs_f64() / began.elapsed().as_secs_f64();
        format!("{:.1} %", share * 100.0)
    };
    println!("| {what}: share of one CPU | {} |", row(spent, percent));
    Ok(())
}
