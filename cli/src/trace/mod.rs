// SPDX-License-Identifier: Apache-2.0
//! Runs `patchbay trace`.

pub mod args;
mod change;
mod status;
mod stream;
mod timeline;
mod trace_dat;
pub mod view;

use std::time::Duration;

use patchbay_proto::v1;

use self::args::TraceCommand;
use self::view::Tracepoint;
use crate::args::output::{Output, OutputArgument};
use crate::client::selected::Selected;
use crate::client::{Client, lists};
use crate::failure::Failure;
use crate::guest::log::Source;
use crate::names::expand;
use crate::print::Answer;

/// Runs one subcommand.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
pub async fn run(
    selected: Selected,
    command: TraceCommand,
    timeout: Option<Duration>,
    output: Output,
) -> Result<(), Failure> {
    match command {
        TraceCommand::Events {
            patterns,
            armed,
            refresh,
        } => {
            let request = &v1::ListTracepointsRequest {
                patterns: expand(patterns)?,
                armed_only: armed,
                refresh,
                ..Default::default()
            };
            let verb = async |client: Client| list(&client, request.clone()).await;
            selected.run(output, "listing events", verb).await
        }
        TraceCommand::Arm(mut arguments) => {
            arguments.patterns = expand(arguments.patterns)?;
            let arguments = &arguments;
            let verb = async |client: Client| change::arm(&client, arguments).await;
            selected.run(output, "arming events", verb).await
        }
        TraceCommand::Fire {
            patterns,
            switch,
            ttl,
        } => {
            let (patterns, switch) = (&expand(patterns)?, &switch);
            let verb =
                async |client: Client| change::fire(&client, patterns.clone(), switch, ttl).await;
            selected.run(output, "firing events", verb).await
        }
        TraceCommand::Park {
            patterns,
            switch,
            force,
            others,
        } => {
            let (patterns, switch) = (&expand(patterns)?, &switch);
            let verb = async |client: Client| {
                let (force, others) = (force.force, others.even_if_others);
                change::park(&client, patterns.clone(), switch, force, others).await
            };
            selected.run(output, "parking events", verb).await
        }
        TraceCommand::Disarm {
            patterns,
            force,
            request_id,
        } => {
            let (patterns, id) = (&expand(patterns)?, &request_id.unwrap_or_default());
            let verb = async |client: Client| {
                change::disarm(&client, patterns.clone(), force.force, id.clone()).await
            };
            selected.run(output, "disarming events", verb).await
        }
        TraceCommand::Tail { stream, events } => {
            let client = selected.one("trace tail")?;
            Failure::after(timeout, stream::tail(&client, stream, events, output)).await
        }
        TraceCommand::Record {
            stream,
            format,
            output,
            duration,
        } => {
            let client = selected.one("trace record")?;
            let OutputArgument::File(path) = output else {
                return Err(Failure::usage("-o must name the file to record to"));
            };
            stream::record(&client, stream, format, &path, duration).await
        }
        TraceCommand::Stat {
            source,
            instance,
            interval,
        } => {
            let request = &v1::GetTracepointStatsRequest {
                source: trace_source(source).into(),
                instance: instance.unwrap_or_default(),
                ..Default::default()
            };
            let verb = async |client: Client| stat(&client, request, interval).await;
            selected.run(output, "counting events", verb).await
        }
        TraceCommand::Agent => {
            let verb = async |client: Client| agent(&client).await;
            selected.run(output, "asking the agent", verb).await
        }
    }
}

async fn list(
    client: &Client,
    request: v1::ListTracepointsRequest,
) -> Result<Answer<Vec<Tracepoint>>, Failure> {
    let (tracepoints, stale) = lists::tracepoints(client, request).await?;
    let tracepoints: Vec<_> = tracepoints.into_iter().map(Tracepoint::from).collect();
    let mut answer = Answer::from(tracepoints);
    if !stale.is_empty() {
        answer.remarks = vec![format!("the event list is the last known one: {stale}")];
    }
    Ok(answer)
}

fn trace_source(source: Option<Source>) -> v1::TraceSource {
    match source {
        None => v1::TraceSource::Unspecified,
        Some(Source::Memory) => v1::TraceSource::Memory,
        Some(Source::Agent) => v1::TraceSource::Agent,
    }
}

async fn sample(
    client: &Client,
    request: &v1::GetTracepointStatsRequest,
) -> Result<status::Sample, Failure> {
    let request = client.request(request.clone());
    let stats = client.tracepoints().get_tracepoint_stats(request).await?;
    let armed = v1::ListTracepointsRequest {
        armed_only: true,
        ..Default::default()
    };
    let (mut tracepoints, _) = lists::tracepoints(client, armed).await?;
    // The events of the guest's own users are not sent to clients.
    tracepoints.retain(|tracepoint| !tracepoint.armed_by.is_empty());
    Ok(status::Sample {
        stats: stats.into_inner(),
        tracepoints,
    })
}

async fn stat(
    client: &Client,
    request: &v1::GetTracepointStatsRequest,
    interval: Duration,
) -> Result<Answer<status::Stat>, Failure> {
    let before = sample(client, request).await?;
    let started = std::time::Instant::now();
    tokio::time::sleep(interval).await;
    let after = sample(client, request).await?;
    Ok(status::Stat::new(&before, after, started.elapsed()).into())
}

async fn agent(client: &Client) -> Result<Answer<status::Agent>, Failure> {
    let request = client.request(v1::DescribeAgentRequest::default());
    let agent = client
        .tracepoints()
        .describe_agent(request)
        .await?
        .into_inner();
    if agent.protocol_version == 0 {
        return Err(Failure::error(agent.absent));
    }
    Ok(status::Agent::from(agent).into())
}
