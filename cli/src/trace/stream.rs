// SPDX-License-Identifier: Apache-2.0
//! Runs `patchbay trace tail` and `record`.

use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

use patchbay_proto::v1;
use tokio_stream::StreamExt;
use tonic::Streaming;

use super::args::StreamArgs;
use super::timeline::Timeline;
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
) -> Result<Streaming<v1::StreamTracepointEventsResponse>, Failure> {
    let is_memory = arguments.is_memory();
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
        ..Default::default()
    };
    let mut stream = client
        .tracepoints()
        .stream_tracepoint_events(client.stream(request))
        .await?
        .into_inner();
    let first = stream.next().await.ok_or_else(ended)??;
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
    let mut stream = open(client, arguments).await?;
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

/// Opens the stream and writes the start of the file. A new file is written before the stream is
/// opened, so that no event is armed if the disk is full. An existing file is overwritten only
/// after the stream is open, so that it is kept if the stream is refused.
async fn begin(
    client: &Client,
    arguments: StreamArgs,
    path: &Path,
    unwritable: impl Fn(std::io::Error) -> Failure,
) -> Result<
    (
        Timeline<File>,
        Streaming<v1::StreamTracepointEventsResponse>,
    ),
    Failure,
> {
    match File::options().write(true).open(path) {
        Ok(_) => {
            let stream = open(client, arguments).await?;
            let timeline = File::create(path).and_then(Timeline::begin);
            Ok((timeline.map_err(unwritable)?, stream))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let timeline = File::create_new(path)
                .and_then(Timeline::begin)
                .map_err(unwritable)?;
            let stream = open(client, arguments).await.inspect_err(|_| {
                // The file contains no events. If it cannot be removed, it remains as a valid,
                // empty timeline.
                let _ = std::fs::remove_file(path);
            })?;
            Ok((timeline, stream))
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
    path: &Path,
    duration: Option<Duration>,
) -> Result<(), Failure> {
    let name = path.display().to_string();
    let unwritable = |error: std::io::Error, recorded: u64| match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
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
    let (mut timeline, mut stream) =
        begin(client, arguments, path, |error| unwritable(error, 0)).await?;
    let end = async {
        match duration {
            Some(duration) => tokio::time::sleep(duration).await,
            None => std::future::pending().await,
        }
    };
    let mut end = std::pin::pin!(end);
    let mut interrupt = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt())?;
    let mut losses = Losses::default();
    loop {
        let batch = tokio::select! {
            batch = stream.next() => batch,
            () = &mut end => break,
            _ = interrupt.recv() => break,
        };
        let Some(batch) = batch else {
            return Err(ended());
        };
        let batch = batch?;
        if let Some(lost) = batch.losses {
            losses.add(&lost.into());
        }
        timeline
            .add(batch)
            .map_err(|error| unwritable(error, timeline.events()))?;
    }
    let lost = match losses.sentence().as_str() {
        "" => "none lost".to_owned(),
        lost => format!("lost: {lost}"),
    };
    write(&format!(
        "{name}: {} events, {lost}; open it in https://ui.perfetto.dev\n",
        timeline.events()
    ))
}
