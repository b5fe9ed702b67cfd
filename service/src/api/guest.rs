// SPDX-License-Identifier: Apache-2.0
//! `patchbay.v1.GuestService`.

use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use patchbay_proto::v1;
use patchbay_proto::v1::guest_service_server::GuestService;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status, Streaming};

use crate::guest::Transport;
use crate::keys::{Keys, RegistrationPhase, to_proto};

const DEFAULT_PAUSE_TIMEOUT: Duration = Duration::from_secs(1);
const MAX_PAUSE_TIMEOUT: Duration = Duration::from_secs(30);

/// Serves [`GuestService`].
pub struct GuestApi {
    keys: Arc<Keys>,
    started_at: SystemTime,
    ending: watch::Receiver<bool>,
    /// Changes with each console output and when the guest has ended.
    printed: watch::Receiver<()>,
}

impl GuestApi {
    pub fn new(keys: Arc<Keys>, ending: watch::Receiver<bool>) -> Self {
        let (sender, printed) = watch::channel(());
        keys.machine().console().on_output(Box::new(move || {
            sender.send_replace(());
        }));
        Self {
            keys,
            started_at: SystemTime::now(),
            ending,
            printed,
        }
    }
}

#[tonic::async_trait]
impl GuestService for GuestApi {
    async fn describe_guest(
        &self,
        _request: Request<v1::DescribeGuestRequest>,
    ) -> Result<Response<v1::DescribeGuestResponse>, Status> {
        let description = self.keys.machine().description();
        let registration = self.keys.describe();
        let transports: Vec<i32> = description
            .transports
            .iter()
            .map(|&transport| to_transport(transport) as i32)
            .collect();
        let phase = match registration.phase {
            RegistrationPhase::Absent => v1::RegistrationState::Absent,
            RegistrationPhase::Registered => v1::RegistrationState::Registered,
            RegistrationPhase::Withdrawn => v1::RegistrationState::Withdrawn,
            RegistrationPhase::Refused => v1::RegistrationState::Refused,
        };
        let state = if self.keys.machine().has_ended() {
            v1::GuestState::Stopped
        } else if self.keys.is_paused() {
            v1::GuestState::Paused
        } else {
            v1::GuestState::Running
        };
        let transport = match (phase, transports.first()) {
            (v1::RegistrationState::Absent, _) | (_, None) => v1::Transport::Unspecified as i32,
            (_, Some(&first)) => first,
        };
        Ok(Response::new(v1::DescribeGuestResponse {
            name: description.name,
            state: state.into(),
            vcpus: description.vcpus,
            memory_bytes: description.memory_bytes,
            monitor_pid: std::process::id(),
            monitor_version: env!("CARGO_PKG_VERSION").to_owned(),
            started_at: Some(self.started_at.into()),
            registration: phase.into(),
            registration_error: registration.error,
            transport,
            kernel_release: registration.release,
            kernel_build_id: registration.build_id,
            generation: registration.generation,
            keys: registration.keys,
            sites: registration.sites,
            modules: registration.modules,
            revision: self.keys.revision(),
            kaslr: registration.kaslr,
            page_table_isolation: registration.page_table_isolation,
            five_level_paging: registration.five_level_paging,
            transports,
        }))
    }

    async fn pause_guest(
        &self,
        request: Request<v1::PauseGuestRequest>,
    ) -> Result<Response<v1::PauseGuestResponse>, Status> {
        let range = Duration::from_micros(1)..=MAX_PAUSE_TIMEOUT;
        let timeout = super::from_proto("timeout", request.into_inner().timeout, range)?;
        let stop_time = self
            .keys
            .pause(timeout.unwrap_or(DEFAULT_PAUSE_TIMEOUT))
            .await?;
        Ok(Response::new(v1::PauseGuestResponse {
            stop_time: Some(to_proto(stop_time)),
        }))
    }

    async fn resume_guest(
        &self,
        _request: Request<v1::ResumeGuestRequest>,
    ) -> Result<Response<v1::ResumeGuestResponse>, Status> {
        self.keys.resume().await?;
        Ok(Response::new(v1::ResumeGuestResponse {}))
    }

    async fn shutdown_guest(
        &self,
        _request: Request<v1::ShutdownGuestRequest>,
    ) -> Result<Response<v1::ShutdownGuestResponse>, Status> {
        self.keys.machine().shut_down();
        Ok(Response::new(v1::ShutdownGuestResponse {}))
    }

    type StreamConsoleStream =
        Pin<Box<dyn Stream<Item = Result<v1::StreamConsoleResponse, Status>> + Send>>;

    async fn stream_console(
        &self,
        request: Request<Streaming<v1::StreamConsoleRequest>>,
    ) -> Result<Response<Self::StreamConsoleStream>, Status> {
        let (sender, receiver) = mpsc::channel(4);
        let keys = Arc::clone(&self.keys);
        let mut ending = self.ending.clone();
        let printed = self.printed.clone();
        let mut typed = request.into_inner();
        tokio::spawn(async move {
            let first = match typed.next().await {
                Some(Ok(first)) => first,
                None => v1::StreamConsoleRequest::default(),
                Some(Err(_)) => return,
            };
            // What the console has no room for is lost, as on a serial line without flow control.
            let _ = keys.machine().console().input(&first.input);
            let typing = async {
                while let Some(Ok(message)) = typed.next().await {
                    let _ = keys.machine().console().input(&message.input);
                }
                // A client that has nothing more to type may still want to read.
                std::future::pending::<()>().await;
            };
            tokio::select! {
                () = typing => {}
                () = print(&keys, &first, printed, &sender) => {}
                () = sender.closed() => {}
                () = super::wait_for_end(&mut ending) => {
                    let _ = sender.send(Err(Status::unavailable("the monitor ends"))).await;
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }
}

/// Sends output until the client or the guest is gone or, for a client that does not follow, until
/// there is no more.
async fn print(
    keys: &Keys,
    first: &v1::StreamConsoleRequest,
    mut printed: watch::Receiver<()>,
    sender: &mpsc::Sender<Result<v1::StreamConsoleResponse, Status>>,
) {
    let console = keys.machine().console();
    let mut offset = first.offset;
    loop {
        printed.mark_unchanged();
        let closed = console.is_closed();
        let chunk = console.read(offset);
        if chunk.bytes.is_empty() {
            // The sender lives in the console's listener, and so as long as the guest.
            if first.no_follow || closed || printed.changed().await.is_err() {
                return;
            }
            continue;
        }
        offset = chunk.offset + chunk.bytes.len() as u64;
        let message = v1::StreamConsoleResponse {
            offset: chunk.offset,
            output: chunk.bytes,
        };
        if sender.send(Ok(message)).await.is_err() {
            return;
        }
    }
}

fn to_transport(transport: Transport) -> v1::Transport {
    match transport {
        Transport::Hypercall => v1::Transport::Hypercall,
        Transport::Msr => v1::Transport::Msr,
    }
}
