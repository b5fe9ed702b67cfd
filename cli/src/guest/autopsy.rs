// SPDX-License-Identifier: Apache-2.0
//! Collects what a guest's memory tells about its kernel, for `patchbay guest autopsy`.

mod newest;

use std::collections::BTreeMap;
use std::io::Write;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use clap::Args;
use patchbay_proto::v1;
use serde::Serialize;
use tokio_stream::StreamExt;

use self::newest::{Log, Record, Ring, size};
use super::log;
use crate::args::output::Output;
use crate::client::{Client, lists};
use crate::failure::Failure;
use crate::keys::claims::Claim;
use crate::print::{Printable, json_line, print};
use crate::text::one_line;
use crate::trace::view::{Line, Tracepoint, lines, rfc3339};
use crate::view::{Details, GuestDetails, Hold, ListedKey, Task};

/// The maximum number of bytes of an autopsy as indented JSON. The guest chooses the number of its
/// instances, and the number and size of its events and records. `patchbayd` keeps no file of more
/// than 64 MiB.
const MAX_BYTES: usize = 48 << 20;
/// The maximum number of bytes of the log's records among these. A panic is at the end, so the
/// oldest records are left out.
const MAX_LOG_BYTES: usize = 32 << 20;
/// The number of bytes that the rings leave for keys, holds, claims and tracepoints.
const LISTS_BYTES: usize = 8 << 20;
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
#[derive(Debug, Default, Serialize)]
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
    /// The number of bytes that further parts may take.
    #[serde(skip)]
    room: usize,
}

/// Returns why a part is left out that would exceed [`MAX_BYTES`].
fn too_large() -> String {
    format!("an autopsy has at most {} MiB", MAX_BYTES >> 20)
}

impl Autopsy {
    /// Takes a part, or notes why it is missing.
    fn part<T: Default>(&mut self, name: &'static str, part: Result<T, Failure>) -> T {
        part.unwrap_or_else(|failure| {
            self.missing.insert(name.to_owned(), failure.message);
            T::default()
        })
    }

    /// Takes the first items of a list for which there is room, and notes how many are missing.
    fn fit<T: Serialize>(&mut self, name: &'static str, list: Vec<T>) -> Vec<T> {
        let all = list.len();
        let mut kept = Vec::new();
        for item in list {
            match self.room.checked_sub(size(&item)) {
                Some(room) => self.room = room,
                None => break,
            }
            kept.push(item);
        }
        if kept.len() < all {
            let part = format!("{} more {name}", all - kept.len());
            self.missing.insert(part, too_large());
        }
        kept
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
            room: MAX_BYTES,
            ..Self::default()
        };
        // The log comes first: the rest is of little use without it, and a guest that is about to
        // end may be gone before it is read. It also finds the kernel's state.
        let log = log_of(client).await;
        found.log = found.part("log", log);
        found.room = found.room.saturating_sub(found.log.bytes);
        // The description names the tasks that run and the instances.
        let guest = super::describe_with_kernel(client).await.map(Some);
        found.guest = found.part("guest", guest);
        found.room = found.room.saturating_sub(size(&found.guest));
        // The rings come next for the same reason as the log.
        found.room = found.room.saturating_sub(LISTS_BYTES);
        found.read_rings(client, arguments).await;
        found.room = found.room.saturating_add(LISTS_BYTES);
        let request = v1::ListStaticKeysRequest::default();
        let keys = lists::keys(client, request).await;
        let keys = found.part("keys", keys.map(|listing| listing.keys));
        let changed = |key: &v1::StaticKey| {
            key.enabled != key.initially_true || key.held_references > 0 || key.quarantine.is_some()
        };
        let keys = keys.into_iter().filter(changed).map(Into::into);
        found.keys = found.fit("keys", keys.collect());
        let holds = lists::holds(client, v1::ListHoldsRequest::default()).await;
        let holds = found.part("holds", holds);
        found.holds = found.fit("holds", holds.into_iter().map(Into::into).collect());
        let claims = lists::claims(client, v1::ListClaimsRequest::default()).await;
        let claims = found.part("claims", claims);
        found.claims = found.fit("claims", claims.into_iter().map(Into::into).collect());
        let request = v1::ListTracepointsRequest {
            armed_only: true,
            ..Default::default()
        };
        let tracepoints = lists::tracepoints(client, request).await;
        let (tracepoints, _) = found.part("tracepoints", tracepoints);
        let tracepoints = tracepoints.into_iter().map(Into::into).collect();
        found.tracepoints = found.fit("tracepoints", tracepoints);
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
        let mut rings = names.len();
        for instance in names {
            // No ring takes the room of the ones after it. That of the top level is the first, and
            // mostly the one that matters.
            let shares = if instance.is_empty() {
                rings.min(2)
            } else {
                rings
            };
            let limit = self.room / shares;
            rings -= 1;
            match ring_of(client, &instance, arguments.events as usize, limit).await {
                Ok(ring) => self.keep(instance, ring),
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

    /// Takes a ring, and notes how many of its events are missing.
    fn keep(&mut self, instance: String, ring: Ring) {
        self.room = self.room.saturating_sub(ring.bytes);
        if ring.too_large > 0 {
            let events = ring.too_large;
            let part = match instance.as_str() {
                "" => format!("{events} older events"),
                name => format!("{events} older events of the instance {name}"),
            };
            self.missing.insert(part, too_large());
        }
        self.rings.insert(instance, ring);
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
            let events: String = events.map(|kept| kept.event.text.as_str()).collect();
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
    while let Some(message) = stream.next().await {
        let message = message?;
        is_memory |= message.source() == v1::KernelLogSource::Memory;
        log.lost = log.lost.saturating_add(message.lost);
        for record in message.records {
            let text = log::text(&record);
            let line = log::line(record, is_memory);
            let size = size(&line);
            log.push(Record { line, text, size }, MAX_LOG_BYTES);
        }
    }
    Ok(log)
}

async fn ring_of(
    client: &Client,
    instance: &str,
    events: usize,
    limit: usize,
) -> Result<Ring, Failure> {
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
                Line::Event(event) => ring.push(*event, events, limit),
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
    use super::newest::tests::event;
    use super::*;
    use crate::print::json;
    use crate::trace::view::Event;

    fn empty() -> Autopsy {
        Autopsy {
            room: MAX_BYTES,
            ..Autopsy::default()
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
        ring.push(event(FORGED).into(), 1, MAX_BYTES);
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

    /// The JSON is never larger than the limit, and names what is left out.
    #[test]
    fn an_autopsy_has_a_maximum_size() {
        const LIMIT: usize = 20_000;
        let mut found = empty();
        let before = json(&found).expect("JSON").len();
        found.room = LIMIT;
        let claims: Vec<Event> = (0..30).map(event).collect();
        let kept = found.fit("claims", claims).len();
        assert_eq!(kept, 30);
        let names = ["", "a", "b\n"];
        let mut rings = names.len();
        for name in names {
            let limit = found.room / rings;
            rings -= 1;
            let mut ring = Ring::default();
            (0..100).for_each(|number| ring.push(event(number), 1000, limit));
            assert!(ring.bytes <= limit && !ring.events.is_empty());
            found.keep(name.to_owned(), ring);
        }
        let left = found.room;
        assert!(left < size(&event(0)), "each ring takes its part");
        let kept = found.fit("holds", (0..30).map(event).collect::<Vec<_>>());
        assert!(kept.is_empty());
        let of = |name: &str| found.rings[name].too_large;
        let expected = [
            (format!("{} older events", of("")), too_large()),
            (
                format!("{} older events of the instance a", of("a")),
                too_large(),
            ),
            (
                format!("{} older events of the instance b\n", of("b\n")),
                too_large(),
            ),
            ("30 more holds".to_owned(), too_large()),
        ];
        assert_eq!(found.missing, BTreeMap::from(expected));
        let text = json(&found).expect("JSON").len();
        // The sizes of the fields and of the notes are small and constant.
        let notes = 1000;
        assert!(text <= before + LIMIT + notes, "{text} bytes");
        let shown = found.table();
        let note = "older events of the instance a: an autopsy has at most 48 MiB\n";
        assert!(shown.contains(note), "{shown}");
    }
}
