// SPDX-License-Identifier: Apache-2.0
//! Serves tracepoints. Unless a request to park or disarm is forced, another client keeps the state
//! of each event.

use std::pin::Pin;

use patchbay_proto::v1;
use patchbay_proto::v1::tracepoints_service_server::TracepointsService;
use tokio_stream::Stream;
use tonic::{Request, Response, Status};

use super::Fake;

fn results(names: &[String], state: v1::TracepointState, kept: bool) -> Vec<v1::TracepointResult> {
    let result = |name: &String| v1::TracepointResult {
        name: name.clone(),
        state: state.into(),
        kept_by: if kept {
            vec!["uid:7".to_owned()]
        } else {
            vec![]
        },
        also_serves: vec!["probe_sched_switch".to_owned()],
    };
    names.iter().map(result).collect()
}

#[tonic::async_trait]
impl TracepointsService for Fake {
    async fn list_tracepoints(
        &self,
        request: Request<v1::ListTracepointsRequest>,
    ) -> Result<Response<v1::ListTracepointsResponse>, Status> {
        let request = request.into_inner();
        self.on(&request.guest, &request, |_| {
            let tracepoint = |name: &str| v1::Tracepoint {
                name: name.to_owned(),
                state: v1::TracepointState::Parked.into(),
                ..Default::default()
            };
            let events = ["sched:sched_switch", "sched:sched_waking"].map(tracepoint);
            let (tracepoints, next_page_token) = super::page(&events, &request.page_token);
            Ok(Response::new(v1::ListTracepointsResponse {
                tracepoints,
                next_page_token,
                total_size: 2,
                stale: "no agent is connected".to_owned(),
            }))
        })
    }

    async fn arm_tracepoints(
        &self,
        request: Request<v1::ArmTracepointsRequest>,
    ) -> Result<Response<v1::ArmTracepointsResponse>, Status> {
        let request = request.into_inner();
        self.on(&request.guest, &request, |_| {
            Ok(Response::new(v1::ArmTracepointsResponse {
                results: results(&request.patterns, v1::TracepointState::Parked, false),
                report: None,
            }))
        })
    }

    async fn fire_tracepoints(
        &self,
        request: Request<v1::FireTracepointsRequest>,
    ) -> Result<Response<v1::FireTracepointsResponse>, Status> {
        let request = request.into_inner();
        self.on(&request.guest, &request, |_| {
            Ok(Response::new(v1::FireTracepointsResponse {
                results: results(&request.patterns, v1::TracepointState::Firing, false),
                ..Default::default()
            }))
        })
    }

    async fn park_tracepoints(
        &self,
        request: Request<v1::ParkTracepointsRequest>,
    ) -> Result<Response<v1::ParkTracepointsResponse>, Status> {
        let request = request.into_inner();
        self.on(&request.guest, &request, |_| {
            let (state, kept) = match request.force {
                true => (v1::TracepointState::Parked, false),
                false => (v1::TracepointState::Firing, true),
            };
            Ok(Response::new(v1::ParkTracepointsResponse {
                results: results(&request.patterns, state, kept),
                ..Default::default()
            }))
        })
    }

    async fn disarm_tracepoints(
        &self,
        request: Request<v1::DisarmTracepointsRequest>,
    ) -> Result<Response<v1::DisarmTracepointsResponse>, Status> {
        let request = request.into_inner();
        self.on(&request.guest, &request, |_| {
            let (state, kept) = match request.force {
                true => (v1::TracepointState::Disarmed, false),
                false => (v1::TracepointState::Parked, true),
            };
            Ok(Response::new(v1::DisarmTracepointsResponse {
                results: results(&request.patterns, state, kept),
            }))
        })
    }

    async fn get_tracepoint_stats(
        &self,
        request: Request<v1::GetTracepointStatsRequest>,
    ) -> Result<Response<v1::GetTracepointStatsResponse>, Status> {
        let request = request.into_inner();
        self.on(&request.guest, &request, |_| {
            Ok(Response::new(v1::GetTracepointStatsResponse::default()))
        })
    }

    async fn describe_agent(
        &self,
        request: Request<v1::DescribeAgentRequest>,
    ) -> Result<Response<v1::DescribeAgentResponse>, Status> {
        let request = request.into_inner();
        self.on(&request.guest, &request, |_| {
            Ok(Response::new(v1::DescribeAgentResponse {
                agent_version: "1.2.3".to_owned(),
                protocol_version: 1,
                ..Default::default()
            }))
        })
    }

    type StreamKernelLogStream =
        Pin<Box<dyn Stream<Item = Result<v1::StreamKernelLogResponse, Status>> + Send>>;

    async fn stream_kernel_log(
        &self,
        _: Request<v1::StreamKernelLogRequest>,
    ) -> Result<Response<Self::StreamKernelLogStream>, Status> {
        Err(Status::unavailable("no agent is connected"))
    }

    type StreamTracepointEventsStream =
        Pin<Box<dyn Stream<Item = Result<v1::StreamTracepointEventsResponse, Status>> + Send>>;

    async fn stream_tracepoint_events(
        &self,
        request: Request<v1::StreamTracepointEventsRequest>,
    ) -> Result<Response<Self::StreamTracepointEventsStream>, Status> {
        let request = request.into_inner();
        self.on(&request.guest, &request, |_| {
            let first = v1::StreamTracepointEventsResponse {
                names: request.patterns.clone(),
                ..Default::default()
            };
            let event = |pid| v1::TraceEvent {
                name: "sched:sched_switch".to_owned(),
                pid,
                ..Default::default()
            };
            let events = v1::StreamTracepointEventsResponse {
                events: vec![event(1), event(2), event(3)],
                ..Default::default()
            };
            let answers = tokio_stream::iter([Ok(first), Ok(events)]);
            let answers: Self::StreamTracepointEventsStream = Box::pin(answers);
            Ok(Response::new(answers))
        })
    }
}
