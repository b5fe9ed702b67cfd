// SPDX-License-Identifier: Apache-2.0

use std::pin::Pin;

use patchbay_kernel_image::Patterns;
use patchbay_proto::v1;
use patchbay_proto::v1::guest_service_server::GuestService;
use tokio_stream::wrappers::WatchStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Code, Request, Response, Status, Streaming};

use super::{Fake, refuse};

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl GuestService for Fake {
    async fn list_guests(
        &self,
        request: Request<v1::ListGuestsRequest>,
    ) -> Result<Response<v1::ListGuestsResponse>, Status> {
        let request = request.into_inner();
        let patterns = Patterns::parse(&request.patterns)
            .map_err(|error| Status::invalid_argument(error.to_string()))?;
        let state = self.state();
        let guests: Vec<v1::GuestStatus> = state
            .guests
            .iter()
            .filter(|(name, _)| patterns.select_whole(name))
            .map(|(_, guest)| guest.status.borrow().clone())
            .collect();
        let (guests, next_page_token) = super::page(&guests, &request.page_token);
        Ok(Response::new(v1::ListGuestsResponse {
            guests,
            next_page_token,
        }))
    }

    async fn describe_guest(
        &self,
        request: Request<v1::DescribeGuestRequest>,
    ) -> Result<Response<v1::DescribeGuestResponse>, Status> {
        let request = request.into_inner();
        self.on(&request.guest, &request, |guest| {
            let has_state = request.find_kernel_state && guest.has_kernel_log;
            if request.find_kernel_state && !has_state {
                let message = "the kernel's log is not found in its memory";
                let code = Code::FailedPrecondition;
                return Err(refuse(code, "GUEST_NOT_REGISTERED", message));
            }
            Ok(Response::new(v1::DescribeGuestResponse {
                status: Some(guest.status.borrow().clone()),
                kernel_state: has_state.then(|| v1::KernelState {
                    uptime_seconds: Some(61),
                    ..Default::default()
                }),
                vcpus: 2,
                revision: guest.revision,
                ..Default::default()
            }))
        })
    }

    type WatchGuestStream = Answers<v1::WatchGuestResponse>;

    async fn watch_guest(
        &self,
        request: Request<v1::WatchGuestRequest>,
    ) -> Result<Response<Self::WatchGuestStream>, Status> {
        let request = request.into_inner();
        self.on(&request.guest, &request, |guest| {
            let statuses = WatchStream::new(guest.status.subscribe());
            let answers = statuses.map(|status| {
                Ok(v1::WatchGuestResponse {
                    status: Some(status),
                })
            });
            let answers: Self::WatchGuestStream = Box::pin(answers);
            Ok(Response::new(answers))
        })
    }

    async fn pause_guest(
        &self,
        request: Request<v1::PauseGuestRequest>,
    ) -> Result<Response<v1::PauseGuestResponse>, Status> {
        let request = request.into_inner();
        self.on(&request.guest, &request, |guest| {
            guest
                .status
                .send_modify(|status| status.set_state(v1::GuestState::Paused));
            Ok(Response::new(v1::PauseGuestResponse::default()))
        })
    }

    async fn resume_guest(
        &self,
        request: Request<v1::ResumeGuestRequest>,
    ) -> Result<Response<v1::ResumeGuestResponse>, Status> {
        let request = request.into_inner();
        self.on(&request.guest, &request, |guest| {
            if !guest.stays {
                guest
                    .status
                    .send_modify(|status| status.set_state(v1::GuestState::Running));
            }
            Ok(Response::new(v1::ResumeGuestResponse {}))
        })
    }

    async fn shutdown_guest(
        &self,
        _request: Request<v1::ShutdownGuestRequest>,
    ) -> Result<Response<v1::ShutdownGuestResponse>, Status> {
        Err(Status::unimplemented("not faked"))
    }

    type SnapshotGuestStream = Answers<v1::SnapshotGuestResponse>;

    async fn snapshot_guest(
        &self,
        request: Request<v1::SnapshotGuestRequest>,
    ) -> Result<Response<Self::SnapshotGuestStream>, Status> {
        let request = request.into_inner();
        self.on(&request.guest, &request, |guest| {
            let answers = tokio_stream::iter(guest.snapshot.clone());
            let answers: Self::SnapshotGuestStream = match guest.stays {
                true => Box::pin(answers.chain(tokio_stream::pending())),
                false => Box::pin(answers),
            };
            Ok(Response::new(answers))
        })
    }

    type StreamConsoleStream = Answers<v1::StreamConsoleResponse>;

    async fn stream_console(
        &self,
        request: Request<Streaming<v1::StreamConsoleRequest>>,
    ) -> Result<Response<Self::StreamConsoleStream>, Status> {
        let first = request.into_inner().message().await?.unwrap_or_default();
        self.on(&first.guest, &first, |guest| {
            let name = guest.status.borrow().guest.clone();
            let output = v1::StreamConsoleResponse {
                offset: 0,
                output: format!("console of {name}\n").into_bytes(),
            };
            let answers: Self::StreamConsoleStream = Box::pin(tokio_stream::once(Ok(output)));
            Ok(Response::new(answers))
        })
    }
}
