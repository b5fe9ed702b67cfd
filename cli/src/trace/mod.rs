// SPDX-License-Identifier: Apache-2.0
//! Runs `patchbay trace`.

pub mod args;
mod change;
mod status;
mod stream;
mod timeline;
mod view;

use std::time::Duration;

use patchbay_proto::pages::Pages;
use patchbay_proto::v1;

use self::args::TraceCommand;
use self::view::Tracepoint;
use crate::args::{Output, OutputArgument};
use crate::client::Client;
use crate::client::fleet::{Answer, Fleet};
use crate::failure::Failure;
use crate::names::expand;

/// Runs one verb.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
pub async fn run(fleet: Fleet, command: TraceCommand, output: Output) -> Result<(), Failure> {
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
            fleet.run(output, "listing events", verb).await
        }
        TraceCommand::Arm(mut arguments) => {
            arguments.patterns = expand(arguments.patterns)?;
            let arguments = &arguments;
            let verb = async |client: Client| change::arm(&client, arguments).await;
            fleet.run(output, "arming events", verb).await
        }
        TraceCommand::Fire {
            patterns,
            switch,
            ttl,
        } => {
            let (patterns, switch) = (&expand(patterns)?, &switch);
            let verb =
                async |client: Client| change::fire(&client, patterns.clone(), switch, ttl).await;
            fleet.run(output, "firing events", verb).await
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
            fleet.run(output, "parking events", verb).await
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
            fleet.run(output, "disarming events", verb).await
        }
        TraceCommand::Tail { stream, events } => {
            stream::tail(&fleet.one("trace tail")?, stream, events, output).await
        }
        TraceCommand::Record {
            stream,
            output,
            duration,
        } => {
            let client = fleet.one("trace record")?;
            let OutputArgument::File(path) = output else {
                return Err(Failure::usage("-o must name the file to record to"));
            };
            stream::record(&client, stream, &path, duration).await
        }
        TraceCommand::Stat { interval } => {
            let verb = async |client: Client| stat(&client, interval).await;
            fleet.run(output, "counting events", verb).await
        }
        TraceCommand::Agent => {
            let verb = async |client: Client| agent(&client).await;
            fleet.run(output, "asking the agent", verb).await
        }
    }
}

async fn list(
    client: &Client,
    request: v1::ListTracepointsRequest,
) -> Result<Answer<Vec<Tracepoint>>, Failure> {
    let (tracepoints, stale) = pages(client, request).await?;
    let tracepoints: Vec<_> = tracepoints.into_iter().map(Tracepoint::from).collect();
    let mut answer = Answer::from(tracepoints);
    if !stale.is_empty() {
        answer.remarks = vec![format!("the event list is the last known one: {stale}")];
    }
    Ok(answer)
}

/// Returns all pages, and the reason why the list is stale; the reason is empty if it is not.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
pub async fn pages(
    client: &Client,
    mut request: v1::ListTracepointsRequest,
) -> Result<(Vec<v1::Tracepoint>, String), Failure> {
    let (mut tracepoints, mut pages) = (vec![], Pages::of("tracepoints"));
    loop {
        let page = client
            .tracepoints()
            .list_tracepoints(client.request(request.clone()))
            .await?
            .into_inner();
        let next = pages.next(&page, &page.next_page_token)?;
        tracepoints.extend(page.tracepoints);
        match next {
            Some(token) => request.page_token = token,
            None => return Ok((tracepoints, page.stale)),
        }
    }
}

async fn sample(client: &Client) -> Result<status::Sample, Failure> {
    let request = client.request(v1::GetTracepointStatsRequest::default());
    let stats = client.tracepoints().get_tracepoint_stats(request).await?;
    let armed = v1::ListTracepointsRequest {
        armed_only: true,
        ..Default::default()
    };
    Ok(status::Sample {
        stats: stats.into_inner(),
        tracepoints: pages(client, armed).await?.0,
    })
}

async fn stat(client: &Client, interval: Duration) -> Result<Answer<status::Stat>, Failure> {
    let before = sample(client).await?;
    let started = std::time::Instant::now();
    tokio::time::sleep(interval).await;
    let after = sample(client).await?;
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
