// SPDX-License-Identifier: Apache-2.0
//! Runs `patchbay trace tail` and `record`.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::time::Duration;

use patchbay_proto::v1;
use tokio_stream::StreamExt;
use tonic::Streaming;

use super::args::{Format, StreamArgs};
use super::timeline::Timeline;
use super::trace_dat::{TraceDat, is_about_space};
use super::view::{self, Line, Losses};
use crate::args::output::Output;
use crate::client::Client;
use crate::failure::Failure;
use crate::guest::log::Source;
use crate::print::{Printable, complain, print_streamed, write};
use crate::text::harmless;

async fn open(
    client: &Client,
    arguments: StreamArgs,
    records: bool,
) -> Result<Streaming<v1::StreamTracepointEventsResponse>, Failure> {
    let is_memory = arguments.is_memory() || records;
    let arm_and_fire = !arguments.listen && !is_memory && !arguments.patterns.is_empty();
    let source = match arguments.source {
        Some(Source::Agent) => v1::TraceSource::Agent,
        _ if is_memory => v1::TraceSource::Memory,
        _ => v1::TraceSource::Unspecified,
    };
    let request = v1::StreamTracepointEventsRequest {
        patterns: arguments.patterns,
        arm_and_fire,
        filter: arguments.probe.filter,
        trigger: arguments.probe.trigger,
        even_if_others: arguments.probe.others.even_if_others,
        max_events_per_second: arguments.max_rate.unwrap_or(0),
        source: source.into(),
        instance: arguments.instance.unwrap_or_default(),
        buffered: arguments.buffered,
        records,
        ..Default::default()
    };
    let needs_agent = !request.filter.is_empty()
        || !request.trigger.is_empty()
        || request.even_if_others
        || source == v1::TraceSource::Agent;
    let opened = match begun(client, request.clone()).await {
        Err(failure) if arm_and_fire && !needs_agent && has_no_agent(client, &failure).await => {
            let opened = in_memory(client, request, failure).await?;
            complain("no agent is connected, so no event is armed");
            opened
        }
        opened => opened?,
    };
    let (first, stream) = opened;
    match first.names.len() {
        _ if first.source() == v1::TraceSource::Memory => {
            complain(
                "reading the events that the guest records, in its memory; Ctrl-C ends the command",
            );
        }
        _ if !arm_and_fire => {
            complain("listening to the armed events; Ctrl-C ends the command");
        }
        count => {
            complain(&format!(
                "{count} events fire; Ctrl-C parks and disarms them"
            ));
        }
    }
    Ok(stream)
}

/// The first message of a stream, and the stream of the others.
type Begun = (
    v1::StreamTracepointEventsResponse,
    Streaming<v1::StreamTracepointEventsResponse>,
);

/// Opens a stream and waits for its first message, which confirms that it is open.
async fn begun(
    client: &Client,
    request: v1::StreamTracepointEventsRequest,
) -> Result<Begun, Failure> {
    let mut stream = client
        .tracepoints()
        .stream_tracepoint_events(client.stream(request))
        .await?
        .into_inner();
    let first = stream.next().await.ok_or_else(ended)??;
    Ok((first, stream))
}

/// Returns whether a stream that was to arm events was refused, and no agent is connected that
/// could arm them. A viewer may not arm events, and is refused before an agent is looked for.
async fn has_no_agent(client: &Client, failure: &Failure) -> bool {
    match failure.reason.as_str() {
        "NO_AGENT" => true,
        "ROLE_MISSING" => {
            let request = client.request(v1::DescribeAgentRequest::default());
            let agent = client.tracepoints().describe_agent(request).await;
            agent.is_ok_and(|agent| !agent.into_inner().absent.is_empty())
        }
        _ => false,
    }
}

/// Opens the stream of a request that no agent can serve in the guest's memory. If that fails too,
/// the error has both reasons.
async fn in_memory(
    client: &Client,
    request: v1::StreamTracepointEventsRequest,
    mut refused: Failure,
) -> Result<Begun, Failure> {
    let request = v1::StreamTracepointEventsRequest {
        arm_and_fire: false,
        source: v1::TraceSource::Memory.into(),
        ..request
    };
    begun(client, request).await.map_err(|failure| {
        refused.message = format!("{}, and {}", refused.message, failure.message);
        refused
    })
}

fn ended() -> Failure {
    Failure::ended("stream")
}

/// Prints events until the requested number is reached.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
pub async fn tail(
    client: &Client,
    arguments: StreamArgs,
    events: Option<u64>,
    output: Output,
) -> Result<(), Failure> {
    let mut left = events.unwrap_or(u64::MAX);
    let mut stream = open(client, arguments, false).await?;
    while let Some(batch) = stream.next().await {
        let mut text = String::new();
        for line in view::lines(batch?) {
            if left == 0 {
                break;
            }
            left -= u64::from(matches!(line, Line::Event(_)));
            match output {
                // The lines are collected, so that one write prints them all.
                Output::Table => text.push_str(&harmless(&line.table())),
                _ => print_streamed(output, &line)?,
            }
        }
        write(&text)?;
        if left == 0 {
            return Ok(());
        }
    }
    Err(ended())
}

/// A file that is being recorded.
enum Recording {
    Timeline(Timeline<File>),
    TraceDat(TraceDat<File>),
}

impl Recording {
    fn begin(format: Format, file: File) -> std::io::Result<Self> {
        Ok(match format {
            Format::Perfetto => Self::Timeline(Timeline::begin(file)?),
            Format::TraceDat => Self::TraceDat(TraceDat::begin(file)?),
        })
    }

    fn add(&mut self, batch: v1::StreamTracepointEventsResponse) -> std::io::Result<()> {
        match self {
            Self::Timeline(timeline) => timeline.add(batch),
            Self::TraceDat(file) => file.add(batch),
        }
    }

    /// Completes the file. A timeline is complete after each batch.
    fn finish(&mut self) -> std::io::Result<()> {
        match self {
            Self::Timeline(_) => Ok(()),
            Self::TraceDat(file) => file.finish(),
        }
    }

    /// Returns the number of events in the file.
    fn events(&self) -> u64 {
        match self {
            Self::Timeline(timeline) => timeline.events(),
            Self::TraceDat(file) => file.events(),
        }
    }

    /// Returns a sentence about events that the file cannot hold; empty if there are none.
    fn left_out(&self) -> String {
        match self {
            Self::TraceDat(file) if file.left_out() > 0 => format!(
                ", {} left out because they are longer than a page or their format has changed",
                file.left_out()
            ),
            _ => String::new(),
        }
    }

    /// Returns the next step of the operator.
    fn opened_by(&self, name: &str) -> String {
        match self {
            Self::Timeline(_) => "open it in https://ui.perfetto.dev".to_owned(),
            Self::TraceDat(_) => format!("read it with `trace-cmd report -i {name}`"),
        }
    }
}

/// Opens the stream and writes the start of the file. A new file is written before the stream is
/// opened, so that no event is armed if the disk is full. An existing file is overwritten only
/// after the stream is open, so that it is kept if the stream is refused.
async fn begin(
    client: &Client,
    arguments: StreamArgs,
    format: Format,
    path: &Path,
    unwritable: impl Fn(std::io::Error) -> Failure,
) -> Result<(Recording, Streaming<v1::StreamTracepointEventsResponse>), Failure> {
    let records = format == Format::TraceDat;
    // A trace.dat is read again when its pages are sorted.
    let mut options = File::options();
    options.read(records).write(true);
    // A pipe cannot be written at any place, and without a reader it would not even open.
    if std::fs::metadata(path).is_ok_and(|file| file.file_type().is_fifo()) {
        return Err(unwritable(ErrorKind::NotSeekable.into()));
    }
    match options.open(path) {
        Ok(_) => {
            let stream = open(client, arguments, records).await?;
            let file = options.create(true).truncate(true).open(path);
            let recording = file.and_then(|file| Recording::begin(format, file));
            Ok((recording.map_err(unwritable)?, stream))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let recording = options
                .create_new(true)
                .open(path)
                .and_then(|file| Recording::begin(format, file))
                .map_err(unwritable)?;
            let stream = open(client, arguments, records).await.inspect_err(|_| {
                // The file contains no events. If it cannot be removed, it remains as a valid,
                // empty recording.
                let _ = std::fs::remove_file(path);
            })?;
            Ok((recording, stream))
        }
        Err(error) => Err(unwritable(error)),
    }
}

/// Records events until `duration` has passed or at Ctrl-C.
///
/// # Errors
/// [`Failure`] with the sentence for the operator. The file is then valid up to the last batch.
pub async fn record(
    client: &Client,
    arguments: StreamArgs,
    format: Format,
    path: &Path,
    duration: Option<Duration>,
) -> Result<(), Failure> {
    let name = path.display().to_string();
    let unwritable = |error: std::io::Error, recorded: u64| match error.kind() {
        _ if is_about_space(&error) => {
            let kept = match recorded {
                0 => "nothing was recorded".to_owned(),
                _ => format!("the file holds the {recorded} events that were recorded before"),
            };
            Failure::error(format!("{name}: the disk is full; {kept}"))
        }
        // No event was recorded, so the file could not be opened or started: the path is wrong.
        _ if recorded == 0 => Failure::usage(format!(
            "{name} cannot be written: {error}; give another file"
        )),
        _ => Failure::error(format!("{name} cannot be written: {error}")),
    };
    let begun = begin(client, arguments, format, path, |error| {
        unwritable(error, 0)
    });
    let (mut recording, mut stream) = begun.await?;
    let mut losses = Losses::default();
    let ended = follow(&mut recording, &mut stream, duration, &mut losses).await;
    let finished = recording.finish();
    match (ended, finished) {
        (Err(Ended::Unwritable(error)), _) | (Ok(()), Err(error)) => {
            return Err(unwritable(error, recording.events()));
        }
        (Err(Ended::Stream(failure)), _) => return Err(failure),
        (Ok(()), Ok(())) => {}
    }
    let lost = match losses.sentence().as_str() {
        "" => "none lost".to_owned(),
        lost => format!("lost: {lost}"),
    };
    write(format!(
        "{name}: {} events, {lost}{}; {}\n",
        recording.events(),
        recording.left_out(),
        recording.opened_by(&name)
    ))
}

/// The reason why a recording ended early.
enum Ended {
    Stream(Failure),
    Unwritable(std::io::Error),
}

/// Adds events to a recording until `duration` has passed or at Ctrl-C.
async fn follow(
    recording: &mut Recording,
    stream: &mut Streaming<v1::StreamTracepointEventsResponse>,
    duration: Option<Duration>,
    losses: &mut Losses,
) -> Result<(), Ended> {
    let end = async {
        match duration {
            Some(duration) => tokio::time::sleep(duration).await,
            None => std::future::pending().await,
        }
    };
    let mut end = std::pin::pin!(end);
    let mut interrupt = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt())
        .map_err(|error| Ended::Stream(error.into()))?;
    loop {
        let batch = tokio::select! {
            batch = stream.next() => batch,
            () = &mut end => return Ok(()),
            _ = interrupt.recv() => return Ok(()),
        };
        let batch = batch.ok_or_else(|| Ended::Stream(ended()))?;
        let batch = batch.map_err(|status| Ended::Stream(status.into()))?;
        if let Some(lost) = batch.losses {
            losses.add(&lost.into());
        }
        recording.add(batch).map_err(Ended::Unwritable)?;
    }
}
