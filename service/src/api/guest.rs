// SPDX-License-Identifier: Apache-2.0
//! `patchbay.v1.GuestService`.

mod status;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use patchbay_guest::guest::Machine;
use patchbay_proto::v1;
use patchbay_proto::v1::guest_service_server::GuestService;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status, Streaming};

use self::status::StatusWatch;
use super::access::Access;
use super::convert;
use super::ending::until_end;
use super::reading::{Counted, recorded};
use super::requests::{from_proto, invalid};
use super::snapshot;
use crate::keys::{Keys, KeysError, PauseRequest, PauseState, RegistrationPhase};
use crate::log::{Details, Place};

const DEFAULT_PAUSE_TIMEOUT: Duration = Duration::from_secs(1);
const MAX_PAUSE_TIMEOUT: Duration = Duration::from_secs(30);
const DEFAULT_SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(60);
const MAX_SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(3600);
const DEFAULT_SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(60);
const MAX_SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(3600);
const DEFAULT_PAUSE_TTL: Duration = Duration::from_secs(30);
const MAX_PAUSE_TTL: Duration = Duration::from_secs(3600);

/// Serves [`GuestService`].
pub struct GuestApi {
    access: Access,
}

impl GuestApi {
    pub fn new(access: Access) -> Self {
        Self { access }
    }
}

/// A press of the power button. Dropping this cancels a press that the guest has not seen, so that
/// a guest whose shutdown was cancelled does not shut down later.
struct PowerButton<'a>(&'a dyn Machine);

impl<'a> PowerButton<'a> {
    fn press(machine: &'a dyn Machine) -> Self {
        machine.press_power_button();
        Self(machine)
    }

    /// Withdraws the press. Returns false if the guest has seen it.
    fn take_back(&self) -> bool {
        self.0.take_back_press()
    }
}

impl Drop for PowerButton<'_> {
    fn drop(&mut self) {
        self.take_back();
    }
}

#[tonic::async_trait]
impl GuestService for GuestApi {
    async fn list_guests(
        &self,
        request: Request<v1::ListGuestsRequest>,
    ) -> Result<Response<v1::ListGuestsResponse>, Status> {
        let (guests, request) = self.access.admit_to_all(request)?;
        Ok(Response::new(status::page(&guests, &request)?))
    }

    type WatchGuestStream =
        Pin<Box<dyn Stream<Item = Result<v1::WatchGuestResponse, Status>> + Send>>;

    async fn watch_guest(
        &self,
        request: Request<v1::WatchGuestRequest>,
    ) -> Result<Response<Self::WatchGuestStream>, Status> {
        let (guest, _, _) = self.access.admit(request)?;
        let ending = guest.ending();
        // The watch holds the newest status; a longer queue would only hold outdated ones.
        let (sender, receiver) = mpsc::channel(1);
        tokio::spawn(async move {
            let mut watch = StatusWatch::new(guest);
            let tell = async {
                loop {
                    let status = Some(watch.next().await);
                    let message = v1::WatchGuestResponse { status };
                    if sender.send(Ok(message)).await.is_err() {
                        return;
                    }
                }
            };
            until_end(&sender, ending, tell).await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn describe_guest(
        &self,
        request: Request<v1::DescribeGuestRequest>,
    ) -> Result<Response<v1::DescribeGuestResponse>, Status> {
        let (guest, _, request) = self.access.admit(request)?;
        let details = match request.get_ref().find_kernel_state {
            true => Place::search_for(&guest.keys, |place| place.details()).await?,
            false => Details::default(),
        };
        let description = guest.keys.machine().description();
        let registration = guest.keys.describe();
        let transports: Vec<i32> = description
            .transports
            .iter()
            .map(|&transport| convert::transport(transport).into())
            .collect();
        let transport = match (registration.phase, transports.first()) {
            _ if registration.discovery.is_some() => v1::Transport::Unspecified.into(),
            (RegistrationPhase::Absent, _) | (_, None) => v1::Transport::Unspecified.into(),
            (_, Some(&first)) => first,
        };
        Ok(Response::new(v1::DescribeGuestResponse {
            vcpus: description.vcpus,
            memory_bytes: description.memory_bytes,
            monitor_pid: std::process::id(),
            monitor_version: env!("CARGO_PKG_VERSION").to_owned(),
            started_at: Some(guest.started_at.into()),
            transport,
            transports,
            keys: registration.keys,
            sites: registration.sites,
            modules: registration.modules,
            revision: guest.keys.revision(),
            kaslr: registration.kaslr,
            page_table_isolation: registration.page_table_isolation,
            five_level_paging: registration.five_level_paging,
            discovery: registration.discovery.as_deref().map(convert::discovery),
            declared_keys: registration.declared,
            declaration_errors: registration.undeclared.clone(),
            kernel_state: Place::state(&guest.keys)
                .map(|state| convert::kernel_state(state, details)),
            status: Some(status::status(&guest, registration)),
        }))
    }

    async fn pause_guest(
        &self,
        request: Request<v1::PauseGuestRequest>,
    ) -> Result<Response<v1::PauseGuestResponse>, Status> {
        let (guest, _, request) = self.access.admit(request)?;
        let request = request.into_inner();
        let range = Duration::from_micros(1)..=MAX_PAUSE_TIMEOUT;
        let timeout = from_proto("timeout", request.timeout, range)?;
        let range = Duration::from_millis(1)..=MAX_PAUSE_TTL;
        let ttl = from_proto("ttl", request.ttl, range)?;
        let request = PauseRequest {
            timeout: timeout.unwrap_or(DEFAULT_PAUSE_TIMEOUT),
            ttl: ttl.unwrap_or(DEFAULT_PAUSE_TTL),
        };
        let outcome = guest.keys.pause(request).await?;
        Ok(Response::new(v1::PauseGuestResponse {
            stop_time: Some(convert::duration(outcome.stop_time)),
            expires_at: outcome.expires_at.map(Into::into),
        }))
    }

    async fn resume_guest(
        &self,
        request: Request<v1::ResumeGuestRequest>,
    ) -> Result<Response<v1::ResumeGuestResponse>, Status> {
        let (guest, _, _) = self.access.admit(request)?;
        if guest.keys.machine().has_ended() {
            return Err(KeysError::GuestStopped.into());
        }
        guest.keys.resume().await?;
        Ok(Response::new(v1::ResumeGuestResponse {}))
    }

    async fn shutdown_guest(
        &self,
        request: Request<v1::ShutdownGuestRequest>,
    ) -> Result<Response<v1::ShutdownGuestResponse>, Status> {
        let (guest, _, request) = self.access.admit(request)?;
        let request = request.into_inner();
        let range = Duration::from_millis(1)..=MAX_SHUTDOWN_TIMEOUT;
        let timeout = from_proto("timeout", request.timeout, range)?;
        let timeout = timeout.unwrap_or(DEFAULT_SHUTDOWN_TIMEOUT);
        let machine = guest.keys.machine();
        let power_cut = if request.force {
            machine.shut_down();
            true
        } else if machine.has_ended() {
            false
        } else if guest.keys.pause_state() != PauseState::Running {
            return Err(KeysError::GuestPaused.into());
        } else if !machine.has_power_button() {
            let message = "the guest has no power button that its monitor shows: shut it down from inside, or set this to cut its power";
            return Err(invalid("force", message).into());
        } else {
            let button = PowerButton::press(machine);
            if tokio::time::timeout(timeout, guest.ended()).await.is_ok() {
                false
            } else if request.cut_after_timeout {
                machine.shut_down();
                true
            } else {
                let seen = !button.take_back();
                let waited = timeout;
                return Err(KeysError::NotPoweredOff { waited, seen }.into());
            }
        };
        Ok(Response::new(v1::ShutdownGuestResponse { power_cut }))
    }

    type SnapshotGuestStream = Counted<v1::SnapshotGuestResponse>;

    async fn snapshot_guest(
        &self,
        request: Request<v1::SnapshotGuestRequest>,
    ) -> Result<Response<Self::SnapshotGuestStream>, Status> {
        let (guest, caller, request) = self.access.admit(request)?;
        let range = Duration::from_millis(1)..=MAX_SNAPSHOT_TIMEOUT;
        let timeout = from_proto("timeout", request.into_inner().timeout, range)?;
        let timeout = timeout.unwrap_or(DEFAULT_SNAPSHOT_TIMEOUT);
        let open = async { Ok(snapshot::save(&guest, timeout)) };
        let stream = recorded(&guest, &caller, "snapshot", "", open).await?;
        Ok(Response::new(stream))
    }

    type StreamConsoleStream =
        Pin<Box<dyn Stream<Item = Result<v1::StreamConsoleResponse, Status>> + Send>>;

    async fn stream_console(
        &self,
        request: Request<Streaming<v1::StreamConsoleRequest>>,
    ) -> Result<Response<Self::StreamConsoleStream>, Status> {
        let admit = self.access.admit_stream(&request)?;
        let (sender, receiver) = mpsc::channel(4);
        let mut typed = request.into_inner();
        tokio::spawn(async move {
            let first = match typed.next().await {
                Some(Ok(first)) => first,
                None => v1::StreamConsoleRequest::default(),
                Some(Err(_)) => return,
            };
            let guest = match admit(&first) {
                Ok(guest) => guest,
                Err(error) => {
                    let _ = sender.send(Err(error.into())).await;
                    return;
                }
            };
            let (keys, ending) = (Arc::clone(&guest.keys), guest.ending());
            // Input beyond the console's buffer is lost, as on a serial line without flow control.
            let _ = keys.machine().console().input(&first.input);
            let typing = async {
                while let Some(Ok(message)) = typed.next().await {
                    let _ = keys.machine().console().input(&message.input);
                }
                // A client that has closed its input may still read.
                std::future::pending::<()>().await;
            };
            let tell = async {
                tokio::select! {
                    () = typing => {}
                    () = print(&keys, &first, guest.printed.clone(), &sender) => {}
                }
            };
            until_end(&sender, ending, tell).await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }
}

/// Sends output until the client or the guest is gone. With `no_follow`, ends after the present
/// output.
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
            // The console's listener owns the sender and lives as long as the guest.
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
