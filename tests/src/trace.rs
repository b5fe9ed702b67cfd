// SPDX-License-Identifier: Apache-2.0
//! A guest with an agent, and its tracepoints.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use patchbay_proto::v1::tracepoints_service_client::TracepointsServiceClient;
use patchbay_proto::v1::{
    ArmTracepointsRequest, ArmTracepointsResponse, DescribeAgentRequest, DescribeAgentResponse,
    DisarmTracepointsRequest, FireTracepointsRequest, FireTracepointsResponse,
    ListTracepointsRequest, ParkTracepointsRequest, ParkTracepointsResponse,
    StreamTracepointEventsRequest, StreamTracepointEventsResponse, TraceEvent, Tracepoint,
};
use tonic::transport::Channel;
use tonic::{Status, Streaming};
use tonic_types::StatusExt;

use crate::Guest;
use crate::console::PATIENCE;

/// The reason in an error's details; empty if there is none.
pub fn reason(status: &Status) -> String {
    status
        .get_details_error_info()
        .map(|info| info.reason)
        .unwrap_or_default()
}

/// The agent's instance of the guest's tracefs.
pub const AGENT_INSTANCE: &str = "/sys/kernel/tracing/instances/patchbay";

/// Polls until the condition holds; fails after a minute.
pub async fn until(mut so: impl AsyncFnMut() -> Result<bool>) -> Result<()> {
    let asked = async {
        while !so().await? {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    };
    tokio::time::timeout(Duration::from_secs(60), asked)
        .await
        .context("the condition does not hold after a minute")?
}

/// A stream of events.
#[derive(Debug)]
pub struct EventStream {
    stream: Streaming<StreamTracepointEventsResponse>,
}

impl EventStream {
    /// Opens a stream.
    pub async fn open(
        client: &mut TracepointsServiceClient<Channel>,
        request: StreamTracepointEventsRequest,
    ) -> Result<Self> {
        let stream = client.stream_tracepoint_events(request).await?.into_inner();
        let mut stream = Self { stream };
        // The first message confirms that the stream is open.
        stream.batch().await?;
        Ok(stream)
    }

    /// The next batch, which may contain only marks or losses.
    pub async fn batch(&mut self) -> Result<StreamTracepointEventsResponse> {
        match tokio::time::timeout(PATIENCE, self.stream.message()).await {
            Ok(batch) => batch?.context("the stream of events ended"),
            Err(_) => bail!("no events in {PATIENCE:?}"),
        }
    }

    /// Events up to and including the first that is wanted.
    pub async fn until(&mut self, wanted: impl Fn(&TraceEvent) -> bool) -> Result<Vec<TraceEvent>> {
        let mut events = vec![];
        loop {
            let batch = self.batch().await?;
            let found = batch.events.iter().position(&wanted);
            events.extend(
                batch
                    .events
                    .into_iter()
                    .take(found.map_or(usize::MAX, |at| at + 1)),
            );
            if found.is_some() {
                return Ok(events);
            }
        }
    }
}

impl Guest {
    /// A client of the tracepoints service.
    pub fn tracepoints(&mut self) -> TracepointsServiceClient<Channel> {
        TracepointsServiceClient::new(self.channel())
    }

    /// Lists the armed tracepoints.
    pub async fn armed(&mut self) -> Result<Vec<Tracepoint>> {
        let request = ListTracepointsRequest {
            armed_only: true,
            ..Default::default()
        };
        let listed = self.tracepoints().list_tracepoints(request).await?;
        Ok(listed.into_inner().tracepoints)
    }

    /// Lists the events to which the agent has attached probes, one per line.
    pub async fn attached(&mut self) -> Result<String> {
        self.shell(&format!("cat {AGENT_INSTANCE}/set_event")).await
    }

    /// Waits for the agent; the guest must have been built with `agent()`.
    pub async fn wait_for_agent(&mut self) -> Result<DescribeAgentResponse> {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        loop {
            let agent = self
                .tracepoints()
                .describe_agent(DescribeAgentRequest::default())
                .await?
                .into_inner();
            if agent.absent.is_empty() {
                ensure!(
                    agent.no_tracing.is_empty(),
                    "the agent cannot trace: {}",
                    agent.no_tracing
                );
                return Ok(agent);
            }
            ensure!(
                tokio::time::Instant::now() < deadline,
                "no agent: {}\n{}",
                agent.absent,
                self.console().transcript()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until no agent is connected, and returns why.
    pub async fn wait_for_no_agent(&mut self) -> Result<String> {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        loop {
            let request = DescribeAgentRequest::default();
            let agent = self.tracepoints().describe_agent(request).await?;
            let agent = agent.into_inner();
            if agent.protocol_version == 0 {
                return Ok(agent.absent);
            }
            ensure!(
                tokio::time::Instant::now() < deadline,
                "the agent {} is still connected",
                agent.agent_version
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Kills the agent in the guest, so that it cannot clean up, and waits until it is gone.
    pub async fn kill_agent(&mut self) -> Result<()> {
        self.shell("kill -KILL $(pidof patchbay-agent)").await?;
        self.wait_for_no_agent().await?;
        Ok(())
    }

    /// Starts an agent in the guest like its init does, and waits for it.
    pub async fn start_agent(&mut self) -> Result<DescribeAgentResponse> {
        self.shell("patchbay-agent </dev/null >/dev/kmsg 2>&1 &")
            .await?;
        self.wait_for_agent().await
    }

    /// Arms events.
    pub async fn arm(&mut self, patterns: &[&str]) -> Result<ArmTracepointsResponse, Status> {
        let request = ArmTracepointsRequest {
            patterns: owned(patterns),
            ..Default::default()
        };
        Ok(self
            .tracepoints()
            .arm_tracepoints(request)
            .await?
            .into_inner())
    }

    /// Fires armed events.
    pub async fn fire(&mut self, patterns: &[&str]) -> Result<FireTracepointsResponse, Status> {
        let request = FireTracepointsRequest {
            patterns: owned(patterns),
            ..Default::default()
        };
        Ok(self
            .tracepoints()
            .fire_tracepoints(request)
            .await?
            .into_inner())
    }

    /// Parks armed events.
    pub async fn park(&mut self, patterns: &[&str]) -> Result<ParkTracepointsResponse, Status> {
        let request = ParkTracepointsRequest {
            patterns: owned(patterns),
            ..Default::default()
        };
        Ok(self
            .tracepoints()
            .park_tracepoints(request)
            .await?
            .into_inner())
    }

    /// Disarms armed events.
    pub async fn disarm(&mut self, patterns: &[&str]) -> Result<(), Status> {
        let request = DisarmTracepointsRequest {
            patterns: owned(patterns),
            ..Default::default()
        };
        self.tracepoints().disarm_tracepoints(request).await?;
        Ok(())
    }

    /// Opens a stream of the armed events.
    pub async fn events(&mut self) -> Result<EventStream> {
        let request = StreamTracepointEventsRequest::default();
        EventStream::open(&mut self.tracepoints(), request).await
    }

    /// Number of events that the guest's kernel has recorded for the agent, read or not, by the
    /// kernel's own counters.
    pub async fn recorded(&mut self) -> Result<u64> {
        let stats = format!("cat {AGENT_INSTANCE}/per_cpu/cpu*/stats");
        let output = self.shell(&stats).await?;
        let mut sum = 0;
        let mut seen = BTreeSet::new();
        for line in output.lines() {
            let Some((name, value)) = line.trim().split_once(": ") else {
                continue;
            };
            if matches!(name, "entries" | "overrun" | "read events") {
                seen.insert(name);
                sum += value.parse::<u64>()?;
            }
        }
        ensure!(
            seen.len() == 3,
            "the kernel's counts are missing:\n{output}"
        );
        Ok(sum)
    }
}

fn owned(patterns: &[&str]) -> Vec<String> {
    patterns.iter().map(|&pattern| pattern.to_owned()).collect()
}
