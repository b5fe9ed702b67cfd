// SPDX-License-Identifier: Apache-2.0
//! Traces a guest that has an agent.

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

use crate::Guest;
use crate::console::patience;

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

    /// Returns the next batch, which may contain only marks or losses.
    pub async fn batch(&mut self) -> Result<StreamTracepointEventsResponse> {
        let limit = patience();
        match tokio::time::timeout(limit, self.stream.message()).await {
            Ok(batch) => batch?.context("the stream of events ended"),
            Err(_) => bail!("no events in {limit:?}"),
        }
    }

    /// Returns the events up to and including the first that `wanted` selects.
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
    /// Returns a client of the tracepoints service.
    pub fn tracepoints(&mut self) -> TracepointsServiceClient<Channel> {
        TracepointsServiceClient::new(self.channel())
    }

    /// Lists the tracepoints that clients have armed.
    pub async fn armed(&mut self) -> Result<Vec<Tracepoint>> {
        let request = ListTracepointsRequest {
            armed_only: true,
            ..Default::default()
        };
        let listed = self.tracepoints().list_tracepoints(request).await?;
        let mut listed = listed.into_inner().tracepoints;
        // The kernel itself attaches probes while an event is recorded.
        listed.retain(|tracepoint| !tracepoint.armed_by.is_empty());
        Ok(listed)
    }

    /// Waits for the agent; the guest must have been built with `agent()`.
    pub async fn wait_for_agent(&mut self) -> Result<DescribeAgentResponse> {
        let deadline = tokio::time::Instant::now() + patience();
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

    /// Waits until no agent is connected, and returns the reason.
    pub async fn wait_for_no_agent(&mut self) -> Result<String> {
        let deadline = tokio::time::Instant::now() + patience();
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
}

fn owned(patterns: &[&str]) -> Vec<String> {
    patterns.iter().map(|&pattern| pattern.to_owned()).collect()
}
