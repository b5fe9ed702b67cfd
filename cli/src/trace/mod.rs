// SPDX-License-Identifier: Apache-2.0
//! `patchbay trace`.

pub mod args;
mod status;
mod timeline;
mod view;

use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

use patchbay_proto::v1;
use patchbay_proto::v1::tracepoints_service_client::TracepointsServiceClient;
use tokio_stream::StreamExt;
use tonic::Streaming;
use tonic::transport::Channel;

use self::args::{Probe, StreamArgs, SwitchArgs, TraceCommand};
use self::timeline::Timeline;
use self::view::{Change, Line, Losses, Tracepoint};
use crate::args::{Output, OutputArgument};
use crate::client::{Monitor, result_view};
use crate::failure::{Failure, PARTLY};
use crate::print::{print, print_streamed, write};

type Client = TracepointsServiceClient<Channel>;

/// Runs one verb.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
pub async fn run(monitor: &Monitor, command: TraceCommand, output: Output) -> Result<(), Failure> {
    let mut client = monitor.tracepoints();
    match command {
        TraceCommand::List {
            patterns,
            armed,
            refresh,
        } => list(monitor, patterns, armed, refresh, output).await,
        TraceCommand::Arm {
            patterns,
            probe:
                Probe {
                    filter,
                    trigger,
                    even_if_others,
                },
            dry_run,
            request_id,
        } => {
            let request = v1::ArmTracepointsRequest {
                patterns,
                filter,
                trigger,
                even_if_others,
                validate_only: dry_run,
                request_id,
                ..Default::default()
            };
            let response = client
                .arm_tracepoints(monitor.request(request))
                .await?
                .into_inner();
            print(
                output,
                &Change::new(response.results, response.report, dry_run),
            )
        }
        TraceCommand::Fire {
            patterns,
            switch:
                SwitchArgs {
                    dry_run,
                    summary,
                    stop_timeout,
                    request_id,
                },
        } => {
            let request = v1::FireTracepointsRequest {
                patterns,
                validate_only: dry_run,
                stop_timeout: stop_timeout.and_then(|timeout| timeout.try_into().ok()),
                request_id,
                result_view: result_view(summary),
                ..Default::default()
            };
            let response = client
                .fire_tracepoints(monitor.request(request))
                .await?
                .into_inner();
            let change = Change::new(response.results, response.report, dry_run);
            print(output, &change.with_summary(response.summary))
        }
        TraceCommand::Park {
            patterns,
            switch:
                SwitchArgs {
                    dry_run,
                    summary,
                    stop_timeout,
                    request_id,
                },
            force,
            even_if_others,
        } => {
            let request = v1::ParkTracepointsRequest {
                patterns,
                validate_only: dry_run,
                stop_timeout: stop_timeout.and_then(|timeout| timeout.try_into().ok()),
                even_if_others,
                force,
                request_id,
                result_view: result_view(summary),
                ..Default::default()
            };
            let response = client
                .park_tracepoints(monitor.request(request))
                .await?
                .into_inner();
            let change = Change::new(response.results, response.report, dry_run)
                .with_summary(response.summary);
            print(output, &change)?;
            partly(change.firing, dry_run, "fired by other clients and go on")
        }
        TraceCommand::Disarm {
            patterns,
            force,
            request_id,
        } => {
            let request = v1::DisarmTracepointsRequest {
                patterns,
                force,
                request_id,
                ..Default::default()
            };
            let results = client
                .disarm_tracepoints(monitor.request(request))
                .await?
                .into_inner()
                .results;
            let change = Change::new(results, None, false);
            let kept = if change.is_partial() {
                change
                    .results
                    .iter()
                    .filter(|result| !result.kept_by.is_empty())
                    .count()
            } else {
                0
            };
            print(output, &change)?;
            partly(kept, false, "armed by other clients too and stay so")
        }
        TraceCommand::Tail { stream, events } => tail(client, stream, events, output).await,
        TraceCommand::Record {
            stream,
            output,
            duration,
        } => match output {
            OutputArgument::File(path) => record(client, stream, &path, duration).await,
            OutputArgument::Format(_) => Err(Failure::error("-o must name the file to record to")),
        },
        TraceCommand::Stat { interval } => stat(monitor, interval, output).await,
        TraceCommand::Agent => agent(monitor, output).await,
    }
}

fn partly(kept: usize, dry_run: bool, why: &str) -> Result<(), Failure> {
    if kept == 0 || dry_run {
        return Ok(());
    }
    Err(Failure {
        message: format!("{kept} events are {why} (--force)"),
        exit_code: PARTLY,
    })
}

async fn list(
    monitor: &Monitor,
    patterns: Vec<String>,
    armed_only: bool,
    refresh: bool,
    output: Output,
) -> Result<(), Failure> {
    let request = v1::ListTracepointsRequest {
        patterns,
        armed_only,
        refresh,
        ..Default::default()
    };
    let (tracepoints, stale) = pages(monitor, request).await?;
    if !stale.is_empty() {
        eprintln!("patchbay: the event list is the last known one: {stale}");
    }
    let tracepoints: Vec<_> = tracepoints.into_iter().map(Tracepoint::from).collect();
    print(output, &tracepoints)
}

async fn armed(monitor: &Monitor) -> Result<Vec<v1::Tracepoint>, Failure> {
    let request = v1::ListTracepointsRequest {
        armed_only: true,
        ..Default::default()
    };
    Ok(pages(monitor, request).await?.0)
}

/// All pages, and why the list is stale; empty if it is not.
async fn pages(
    monitor: &Monitor,
    mut request: v1::ListTracepointsRequest,
) -> Result<(Vec<v1::Tracepoint>, String), Failure> {
    let mut tracepoints = vec![];
    loop {
        let page = monitor
            .tracepoints()
            .list_tracepoints(monitor.request(request.clone()))
            .await?
            .into_inner();
        tracepoints.extend(page.tracepoints);
        if page.next_page_token.is_empty() {
            return Ok((tracepoints, page.stale));
        }
        request.page_token = page.next_page_token;
    }
}

async fn open(
    client: &mut Client,
    arguments: StreamArgs,
) -> Result<Streaming<v1::StreamTracepointEventsResponse>, Failure> {
    let arm_and_fire = !arguments.listen && !arguments.patterns.is_empty();
    let request = v1::StreamTracepointEventsRequest {
        patterns: arguments.patterns,
        arm_and_fire,
        filter: arguments.probe.filter,
        trigger: arguments.probe.trigger,
        even_if_others: arguments.probe.even_if_others,
        max_events_per_second: arguments.max_rate,
        ..Default::default()
    };
    // No deadline: a stream has no end.
    let mut stream = client
        .stream_tracepoint_events(tonic::Request::new(request))
        .await?
        .into_inner();
    let first = stream.next().await.ok_or_else(ended)??;
    match first.names.len() {
        _ if !arm_and_fire => eprintln!("patchbay: listening to what is armed; Ctrl-C ends"),
        count => {
            eprintln!("patchbay: {count} events fire; Ctrl-C ends, and parks and disarms them")
        }
    }
    Ok(stream)
}

fn ended() -> Failure {
    Failure::error("the monitor ended the stream; see `patchbay guests`")
}

async fn tail(
    mut client: Client,
    arguments: StreamArgs,
    events: Option<u64>,
    output: Output,
) -> Result<(), Failure> {
    let mut left = events.unwrap_or(u64::MAX);
    let mut stream = open(&mut client, arguments).await?;
    while let Some(batch) = stream.next().await {
        let mut text = String::new();
        for line in view::lines(batch?) {
            if left == 0 {
                break;
            }
            left -= u64::from(matches!(line, Line::Event(_)));
            match output {
                // One write for many lines.
                Output::Table => text.push_str(&crate::print::Printable::table(&line)),
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

/// Opens the stream and begins the file. A new file is begun first, so that a disk without room for it
/// leaves the guest alone; one that exists only when the events come, so that a refusal leaves it alone.
async fn begin(
    client: &mut Client,
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
                // Without events it is of no use; if it stays, it is whole.
                let _ = std::fs::remove_file(path);
            })?;
            Ok((timeline, stream))
        }
        Err(error) => Err(unwritable(error)),
    }
}

async fn record(
    mut client: Client,
    arguments: StreamArgs,
    path: &Path,
    duration: Option<Duration>,
) -> Result<(), Failure> {
    let name = path.display().to_string();
    let unwritable = |error: std::io::Error, recorded: u64| match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            let kept = match recorded {
                0 => "nothing was recorded".to_owned(),
                _ => format!("the file holds the {recorded} events until then"),
            };
            Failure::error(format!("{name}: the disk is full; {kept}"))
        }
        _ => Failure::error(format!("{name} cannot be written: {error}")),
    };
    let (mut timeline, mut stream) =
        begin(&mut client, arguments, path, |error| unwritable(error, 0)).await?;
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
            losses.overwritten += lost.overwritten;
            losses.slow_client += lost.slow_client;
            losses.flood += lost.flood;
            losses.malformed += lost.malformed;
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

async fn stat(monitor: &Monitor, interval: Duration, output: Output) -> Result<(), Failure> {
    let get = || async {
        let request = monitor.request(v1::GetTracepointStatsRequest::default());
        let stats = monitor.tracepoints().get_tracepoint_stats(request).await?;
        Ok::<_, Failure>(status::Sample {
            stats: stats.into_inner(),
            tracepoints: armed(monitor).await?,
        })
    };
    let before = get().await?;
    let started = std::time::Instant::now();
    tokio::time::sleep(interval).await;
    let after = get().await?;
    print(
        output,
        &status::Stat::new(&before, after, started.elapsed()),
    )
}

async fn agent(monitor: &Monitor, output: Output) -> Result<(), Failure> {
    let request = monitor.request(v1::DescribeAgentRequest::default());
    let agent = monitor
        .tracepoints()
        .describe_agent(request)
        .await?
        .into_inner();
    if agent.protocol_version == 0 {
        return Err(Failure::error(agent.absent));
    }
    print(output, &status::Agent::from(agent))
}
