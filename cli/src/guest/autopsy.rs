// SPDX-License-Identifier: Apache-2.0
//! Collects what a guest's memory tells about its kernel, for `patchbay guest autopsy`.

use std::collections::{BTreeMap, VecDeque};
use std::io::Write;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use clap::Args;
use patchbay_proto::v1;
use serde::Serialize;
use tokio_stream::StreamExt;

use super::log::{self, Line as LogLine};
use crate::args::output::Output;
use crate::client::{Client, lists};
use crate::failure::Failure;
use crate::keys::claims::Claim;
use crate::print::{Printable, json_line, print};
use crate::text::one_line;
use crate::trace::view::{Event, Line, Losses, Tracepoint, lines, rfc3339};
use crate::view::{Details, GuestDetails, Hold, ListedKey, Task};

/// The maximum number of bytes of the log's records as JSON that are kept. A panic is at the end,
/// so the oldest records are left out.
const MAX_LOG_BYTES: usize = 32 << 20;
/// The maximum number of rings, with that of the top level. A guest may have any number of
/// instances.
const MAX_RINGS: usize = 32;

#[derive(Debug, Args)]
pub struct AutopsyArgs {
    /// Also write everything to FILE as JSON, readable by its owner alone.
    #[arg(long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Newest events that are kept of each ring buffer, 0 to 1000000.
    #[arg(long, value_name = "NUMBER", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(..=1_000_000))]
    pub events: u32,
    /// Read the ring buffer of this tracefs instance even if the guest has over 31; may be
    /// repeated. Those of the others are read in any case.
    #[arg(long = "instance", value_name = "NAME")]
    pub instances: Vec<String>,
}

/// Everything that was found.
#[derive(Debug, Serialize)]
pub struct Autopsy {
    /// The time at which it was begun.
    at: String,
    guest: Option<GuestDetails>,
    log: Log,
    /// The newest events of each ring buffer, by the name of its tracefs instance. The name of the
    /// top level is empty.
    rings: BTreeMap<String, Ring>,
    tracepoints: Vec<Tracepoint>,
    /// The keys that are not as the kernel was built, that are held, or that are quarantined.
    keys: Vec<ListedKey>,
    holds: Vec<Hold>,
    claims: Vec<Claim>,
    /// The reason for each part that is missing.
    missing: BTreeMap<String, String>,
}

#[derive(Debug, Default, Serialize)]
struct Log {
    /// The records that the kernel had overwritten, or never finished.
    lost: u64,
    /// The number of the oldest records that are left out because the log is too long.
    left_out: u64,
    records: VecDeque<Record>,
}

#[derive(Debug, Serialize)]
struct Record {
    #[serde(flatten)]
    line: LogLine,
    /// The record as `dmesg` shows it.
    #[serde(skip)]
    text: String,
    /// The size of `line` as JSON in bytes.
    #[serde(skip)]
    size: usize,
}

#[derive(Debug, Default, Serialize)]
struct Ring {
    losses: Losses,
    /// The number of events that are left out because newer ones took their place here.
    left_out: u64,
    events: VecDeque<Event>,
}

impl Autopsy {
    /// Takes a part, or notes why it is missing.
    fn part<T: Default>(&mut self, name: &'static str, part: Result<T, Failure>) -> T {
        part.unwrap_or_else(|failure| {
            self.missing.insert(name.to_owned(), failure.message);
            T::default()
        })
    }

    /// Returns the details of the guest, if they could be read.
    fn details(&self) -> Option<&Details> {
        self.guest.as_ref()?.details.as_ref()
    }

    /// Returns a line for each CPU.
    fn tasks(&self) -> String {
        let tasks = self.details().map_or(&[][..], |details| &details.tasks);
        let line = |task: &Task| {
            let Task {
                cpu,
                pid,
                process,
                name,
            } = task;
            let name = one_line(name);
            format!("CPU {cpu}: {name}, pid {pid} of process {process}\n")
        };
        tasks.iter().map(line).collect()
    }

    /// Collects everything that can be read. No part keeps the others from being read.
    async fn of(client: &Client, arguments: &AutopsyArgs) -> Self {
        let mut found = Self {
            at: rfc3339(Some(SystemTime::now().into())),
            guest: None,
            log: Log::default(),
            rings: BTreeMap::new(),
            tracepoints: vec![],
            keys: vec![],
            holds: vec![],
            claims: vec![],
            missing: BTreeMap::new(),
        };
        // The log comes first: the rest is of little use without it, and a guest that is about to
        // end may be gone before it is read. It also finds the kernel's state.
        let log = log_of(client).await;
        found.log = found.part("log", log);
        // The description names the tasks that run and the instances.
        let guest = super::describe_with_kernel(client).await.map(Some);
        found.guest = found.part("guest", guest);
        found.read_rings(client, arguments).await;
        let request = v1::ListStaticKeysRequest::default();
        let keys = lists::keys(client, request).await;
        let keys = found.part("keys", keys.map(|listing| listing.keys));
        let changed = |key: &v1::StaticKey| {
            key.enabled != key.initially_true || key.held_references > 0 || key.quarantine.is_some()
        };
        let keys = keys.into_iter().filter(changed);
        found.keys = keys.map(Into::into).collect();
        let holds = lists::holds(client, v1::ListHoldsRequest::default()).await;
        let holds = found.part("holds", holds);
        found.holds = holds.into_iter().map(Into::into).collect();
        let claims = lists::claims(client, v1::ListClaimsRequest::default()).await;
        let claims = found.part("claims", claims);
        found.claims = claims.into_iter().map(Into::into).collect();
        let request = v1::ListTracepointsRequest {
            armed_only: true,
            ..Default::default()
        };
        let tracepoints = lists::tracepoints(client, request).await;
        let (tracepoints, _) = found.part("tracepoints", tracepoints);
        found.tracepoints = tracepoints.into_iter().map(Into::into).collect();
        found
    }

    /// Reads the rings of the top level, of the instances that are given, and of those that the
    /// guest has.
    async fn read_rings(&mut self, client: &Client, arguments: &AutopsyArgs) {
        let own = self.details();
        let own = own.map_or(&[][..], |details| &details.trace_instances);
        let mut names: Vec<String> = vec![String::new()];
        for name in arguments.instances.iter().chain(own) {
            if !names.contains(name) {
                names.push(name.clone());
            }
        }
        let left_out = names.len().saturating_sub(MAX_RINGS);
        names.truncate(MAX_RINGS);
        for instance in names {
            match ring_of(client, &instance, arguments.events as usize).await {
                Ok(ring) => {
                    self.rings.insert(instance, ring);
                }
                Err(failure) => {
                    let part = match instance.as_str() {
                        "" => "rings".to_owned(),
                        name => format!("ring of the instance {name}"),
                    };
                    self.missing.insert(part, failure.message);
                }
            }
        }
        if left_out > 0 {
            let why = format!("they are over {MAX_RINGS}; name one with --instance");
            let part = format!("rings of {left_out} more instances");
            self.missing.insert(part, why);
        }
    }

    /// Writes the JSON to a file that only its owner can read, because the log and the events of a
    /// guest are secret.
    fn save(&self, path: &Path) -> Result<(), Failure> {
        let text = json_line(self)?;
        let written = || {
            let mut options = std::fs::File::options();
            options.write(true).create(true).truncate(true).mode(0o600);
            let mut file = options.open(path)?;
            // A file that exists has kept its mode. A device, as /dev/null, belongs to all.
            let is_file = file.metadata()?.is_file();
            if is_file {
                file.set_permissions(std::fs::Permissions::from_mode(0o600))?;
            }
            file.write_all(text.as_bytes())?;
            match is_file {
                true => file.sync_all(),
                false => Ok(()),
            }
        };
        written().map_err(|error| {
            Failure::error(format!("{} cannot be written: {error}", path.display()))
        })
    }
}

/// Appends a part of the text, below a heading.
fn section(text: &mut String, heading: &str, part: &str) {
    if !part.is_empty() {
        text.push_str(&format!("\n== {heading}\n\n{part}"));
    }
}

impl Printable for Autopsy {
    fn table(&self) -> String {
        let mut text = self.guest.as_ref().map_or(String::new(), Printable::table);
        let missing = self.missing.iter();
        let missing: String = missing
            .map(|(part, why)| one_line(&format!("{part}: {why}")) + "\n")
            .collect();
        section(&mut text, "Not found", &missing);
        fn table<T>(all: &Vec<T>) -> String
        where
            Vec<T>: Printable,
        {
            match all.is_empty() {
                true => String::new(),
                false => all.table(),
            }
        }
        section(
            &mut text,
            "Changed, held or quarantined keys",
            &table(&self.keys),
        );
        section(&mut text, "Claims", &table(&self.claims));
        section(&mut text, "Holds", &table(&self.holds));
        section(&mut text, "Running tasks", &self.tasks());
        section(&mut text, "Armed tracepoints", &table(&self.tracepoints));
        for (instance, ring) in &self.rings {
            let events = ring.events.iter();
            let events: String = events.map(|event| event.text.as_str()).collect();
            let heading = match instance.as_str() {
                "" => "Newest trace events".to_owned(),
                name => format!("Newest trace events of the instance {}", one_line(name)),
            };
            section(&mut text, &heading, &events);
        }
        let mut log = String::new();
        if self.log.lost > 0 {
            log = format!("({} messages are lost)\n", self.log.lost);
        }
        if self.log.left_out > 0 {
            log += &format!("({} older messages are left out)\n", self.log.left_out);
        }
        log.extend(self.log.records.iter().map(|record| record.text.as_str()));
        section(&mut text, "Log", &log);
        text
    }

    fn names(&self) -> Vec<&str> {
        self.keys.iter().map(|key| key.name.as_str()).collect()
    }
}

async fn log_of(client: &Client) -> Result<Log, Failure> {
    use v1::stream_kernel_log_request::Start;
    let request = client.stream(v1::StreamKernelLogRequest {
        start: Some(Start::FirstSeq(0)),
        no_follow: true,
        ..Default::default()
    });
    let stream = client.tracepoints().stream_kernel_log(request).await?;
    let mut stream = stream.into_inner();
    let (mut log, mut is_memory) = (Log::default(), false);
    let mut bytes = 0;
    while let Some(message) = stream.next().await {
        let message = message?;
        is_memory |= message.source() == v1::KernelLogSource::Memory;
        log.lost = log.lost.saturating_add(message.lost);
        for record in message.records {
            let text = log::text(&record);
            let line = log::line(record, is_memory);
            let size = json_line(&line)?.len();
            log.records.push_back(Record { line, text, size });
            bytes += size;
            while bytes > MAX_LOG_BYTES
                && let Some(oldest) = log.records.pop_front()
            {
                bytes -= oldest.size;
                log.left_out += 1;
            }
        }
    }
    Ok(log)
}

async fn ring_of(client: &Client, instance: &str, events: usize) -> Result<Ring, Failure> {
    let request = client.stream(v1::StreamTracepointEventsRequest {
        source: v1::TraceSource::Memory.into(),
        instance: instance.to_owned(),
        buffered: true,
        no_follow: true,
        max_events_per_second: u32::MAX,
        ..Default::default()
    });
    let stream = client
        .tracepoints()
        .stream_tracepoint_events(request)
        .await?;
    let mut stream = stream.into_inner();
    let mut ring = Ring::default();
    while let Some(message) = stream.next().await {
        for line in lines(message?) {
            match line {
                Line::Event(event) => {
                    ring.events.push_back(*event);
                    if ring.events.len() > events {
                        ring.events.pop_front();
                        ring.left_out += 1;
                    }
                }
                Line::Lost { lost } => ring.losses.add(&lost),
                Line::Mark { .. } => {}
            }
        }
    }
    Ok(ring)
}

/// Collects everything, and prints it, also to a file.
///
/// # Errors
/// Nothing was found, or the file cannot be written.
pub async fn autopsy(
    client: &Client,
    arguments: AutopsyArgs,
    output: Output,
) -> Result<(), Failure> {
    let found = Autopsy::of(client, &arguments).await;
    if found.guest.is_none() && found.log.records.is_empty() {
        let why = found.missing.get("guest").map_or("", String::as_str);
        return Err(Failure::error(format!("the guest cannot be read: {why}")));
    }
    if let Some(path) = &arguments.file {
        found.save(path)?;
    }
    print(output, &found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn empty() -> Autopsy {
        Autopsy {
            at: String::new(),
            guest: None,
            log: Log::default(),
            rings: BTreeMap::new(),
            tracepoints: vec![],
            keys: vec![],
            holds: vec![],
            claims: vec![],
            missing: BTreeMap::new(),
        }
    }

    /// Names that a guest chooses are part of lines, but none of them begins a line.
    #[test]
    fn a_guest_forges_no_section() {
        const FORGED: &str = "a\n\n== Log\n\n[    0.000000] all is well\u{2028}\u{202e}";
        let state = v1::KernelState {
            tasks: vec![v1::CpuTask {
                name: FORGED.to_owned(),
                ..Default::default()
            }],
            trace_instances: vec![FORGED.to_owned()],
            ..Default::default()
        };
        let guest = v1::DescribeGuestResponse {
            kernel_state: Some(state),
            ..Default::default()
        };
        let event = |name: &str| v1::TraceEvent {
            name: name.to_owned(),
            comm: name.to_owned(),
            ..Default::default()
        };
        let mut found = empty();
        found.guest = Some(GuestDetails::described("web-1".into(), "".into(), guest));
        let ring = found.rings.entry(FORGED.to_owned()).or_default();
        ring.events.push_back(event(FORGED).into());
        let missing = [(FORGED.to_owned(), FORGED.to_owned())];
        found.missing.extend(missing);
        let text = found.table();
        let lines: Vec<&str> = text.lines().collect();
        let headings = lines.iter().filter(|line| line.starts_with("=="));
        let headings: Vec<&str> = headings.copied().collect();
        let of_ring = r"== Newest trace events of the instance a\n\n== Log\n\n[    0.000000] all is well\u{2028}\u{202e}";
        assert_eq!(headings, ["== Not found", "== Running tasks", of_ring]);
        let well = |line: &&&str| line.starts_with("[    0.000000]");
        assert_eq!(lines.iter().filter(well).count(), 0, "{text}");
        assert!(!text.contains(['\u{2028}', '\u{202e}']), "{text:?}");
        let json = json_line(&found).expect("JSON");
        let read: serde_json::Value = serde_json::from_str(&json).expect("JSON");
        assert_eq!(read["rings"][FORGED]["events"][0]["name"], FORGED);
        assert_eq!(read["missing"][FORGED], FORGED);
    }
}
