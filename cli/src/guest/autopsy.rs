// SPDX-License-Identifier: Apache-2.0
//! Collects what a guest's memory tells about its kernel, for `patchbay guest autopsy`.

use std::collections::{BTreeMap, VecDeque};
use std::io::Write;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use clap::Args;
use patchbay_proto::text::printable_json;
use patchbay_proto::v1;
use serde::Serialize;
use tokio_stream::StreamExt;

use super::log::{self, Line as LogLine};
use crate::args::output::Output;
use crate::client::{Client, lists};
use crate::failure::Failure;
use crate::keys::claims::Claim;
use crate::print::{Printable, print};
use crate::text::harmless;
use crate::trace::view::{Event, Line, Losses, Tracepoint, lines, rfc3339};
use crate::view::{GuestDetails, Hold, ListedKey};

/// The maximum number of records of the log that are kept. The kernel's largest log has some
/// million.
const MAX_RECORDS: usize = 1 << 20;

#[derive(Debug, Args)]
pub struct AutopsyArgs {
    /// Also write everything to FILE as JSON, readable by its owner alone.
    #[arg(long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Newest events that are kept of each ring buffer, 0 to 1000000.
    #[arg(long, value_name = "NUMBER", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(..=1_000_000))]
    pub events: u32,
    /// Also read the ring buffer of this tracefs instance in the guest; may be repeated.
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
    /// By the name of the instance; the top level has the empty name.
    rings: BTreeMap<String, Ring>,
    tracepoints: Vec<Tracepoint>,
    /// The keys that are not as the kernel was built, that are held, or that are quarantined.
    keys: Vec<ListedKey>,
    holds: Vec<Hold>,
    claims: Vec<Claim>,
    /// The reason for each part that is missing.
    missing: BTreeMap<&'static str, String>,
}

#[derive(Debug, Default, Serialize)]
struct Log {
    /// The records that the kernel had overwritten, or never finished.
    lost: u64,
    records: Vec<LogLine>,
    #[serde(skip)]
    text: String,
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
            self.missing.insert(name, failure.message);
            T::default()
        })
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
        for instance in [String::new()].iter().chain(&arguments.instances) {
            let ring = ring_of(client, instance, arguments.events as usize).await;
            let ring = found.part("rings", ring);
            found.rings.insert(instance.clone(), ring);
        }
        let guest = guest(client).await.map(Some);
        found.guest = found.part("guest", guest);
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

    fn json(&self) -> Result<String, Failure> {
        let text = serde_json::to_string(self);
        let text = text.map_err(|error| Failure::error(format!("no JSON: {error}")))?;
        Ok(printable_json(&text).into_owned() + "\n")
    }

    /// Writes the JSON to a file that only its owner can read, because the log and the events of a
    /// guest are secret.
    fn save(&self, path: &Path) -> Result<(), Failure> {
        let text = self.json()?;
        let written = || {
            let mut options = std::fs::File::options();
            options.write(true).create(true).truncate(true).mode(0o600);
            let mut file = options.open(path)?;
            // A file that exists keeps its mode.
            file.set_permissions(std::fs::Permissions::from_mode(0o600))?;
            file.write_all(text.as_bytes())?;
            file.sync_all()
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
            .map(|(part, why)| harmless(&format!("{part}: {why}")) + "\n")
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
        section(&mut text, "Armed tracepoints", &table(&self.tracepoints));
        for (instance, ring) in &self.rings {
            let events = ring.events.iter();
            let events: String = events.map(|event| harmless(&event.text)).collect();
            let heading = match instance.as_str() {
                "" => "Newest trace events".to_owned(),
                name => format!("Newest trace events of the instance {}", harmless(name)),
            };
            section(&mut text, &heading, &events);
        }
        let mut log = self.log.text.clone();
        if self.log.lost > 0 {
            log = format!("({} messages are lost)\n{log}", self.log.lost);
        }
        section(&mut text, "Log", &log);
        text
    }

    fn names(&self) -> Vec<&str> {
        self.keys.iter().map(|key| key.name.as_str()).collect()
    }
}

/// Describes the guest.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
pub async fn guest(client: &Client) -> Result<GuestDetails, Failure> {
    let request = client.request(v1::DescribeGuestRequest::default());
    let answer = client.guest().describe_guest(request).await?.into_inner();
    let name = answer.status.clone().unwrap_or_default().guest;
    let socket = client.socket().display().to_string();
    Ok(GuestDetails::described(name, socket, answer))
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
    while let Some(message) = stream.next().await {
        let message = message?;
        is_memory |= message.source() == v1::KernelLogSource::Memory;
        log.lost = log.lost.saturating_add(message.lost);
        for record in message.records {
            if log.records.len() == MAX_RECORDS {
                return Ok(log);
            }
            log.text.push_str(&log::text(&record));
            log.records.push(log::line(record, is_memory));
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
