// SPDX-License-Identifier: Apache-2.0
//! Serves `patchbay.fleet.v1` on a unix socket.

use std::collections::BTreeSet;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use futures_util::{Stream, StreamExt, stream};
use patchbay_proto::TraceParent;
use patchbay_proto::fleet::v1;
use patchbay_proto::fleet::v1::inventory_service_server::{
    InventoryService, InventoryServiceServer,
};
use patchbay_proto::fleet::v1::rollout_service_server::{RolloutService, RolloutServiceServer};
use patchbay_proto::socket::ListeningSocket;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::server::UdsConnectInfo;
use tonic::{Request, Response, Status};

use crate::controller::{Controller, Leadership, PlanError};
use crate::plan::diff::DiffError;
use crate::rollout::{Member, Rollout, State};
use crate::runner::{Command, NotDeleted, Running, now};
use crate::store::StoreError;
use crate::{drift, hosts, plan, view};

/// The maximum number of hosts that are queried at the same time.
const FAN_OUT: usize = 128;

#[derive(Clone)]
struct Api {
    controller: Arc<Controller>,
}

/// Serves the API on the socket until `shutdown` is ready.
///
/// # Errors
/// The socket cannot be used, or HTTP/2 fails.
pub async fn serve(
    controller: Arc<Controller>,
    socket: &ListeningSocket,
    shutdown: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let incoming = UnixListenerStream::new(socket.tokio_listener()?);
    let api = Api { controller };
    tonic::transport::Server::builder()
        .add_service(RolloutServiceServer::new(api.clone()))
        .add_service(InventoryServiceServer::new(api))
        .serve_with_incoming_shutdown(incoming, shutdown)
        .await?;
    Ok(())
}

/// Returns the principal of a peer on the unix socket, such as "uid:1000".
fn principal<T>(request: &Request<T>) -> Result<String, Status> {
    let peer = request.extensions().get::<UdsConnectInfo>();
    let peer = peer.and_then(|peer| peer.peer_cred);
    let peer = peer.ok_or_else(|| Status::permission_denied("the peer has no credentials"))?;
    Ok(format!("uid:{}", peer.uid()))
}

impl Api {
    fn leadership(&self) -> Result<Arc<Leadership>, Status> {
        let leads = self.controller.leadership();
        leads.ok_or_else(|| Status::unavailable("this replica does not lead; ask another"))
    }

    fn running(&self, name: &str) -> Result<Arc<Running>, Status> {
        let leads = self.leadership()?;
        if let Some(running) = leads.rollout(name) {
            return Ok(running);
        }
        Err(match leads.unreadable().remove(name) {
            Some(why) => Status::failed_precondition(format!(
                "rollout {name} is out of service, and its guests stay as they are: {why}"
            )),
            None => Status::not_found(format!(
                "there is no rollout {name:?}; `rollout list` names them"
            )),
        })
    }

    async fn command(
        &self,
        name: &str,
        command: Command,
        principal: &str,
    ) -> Result<Option<v1::Rollout>, Status> {
        let running = self.running(name)?;
        match running.command(command, principal).await {
            Some(Ok(())) => Ok(Some(view::rollout(&running.rollout(), false))),
            Some(Err(error)) => Err(Status::failed_precondition(error.to_string())),
            None => Err(deposed()),
        }
    }
}

/// Returns the index of the guest's member. `host` may be empty if only one host has such a guest.
fn find(rollout: &Rollout, host: &str, guest: &str) -> Result<usize, Status> {
    let members = rollout.members();
    let is_meant = |member: &Member| {
        let is_on_host = host.is_empty() || member.host == host;
        is_on_host && member.guest == guest && member.state != State::Superseded
    };
    let meant = members.iter().filter(|member| is_meant(member));
    let hosts: BTreeSet<&str> = meant.map(|member| member.host.as_str()).collect();
    if hosts.len() > 1 {
        let several = hosts.len();
        let text = format!("{several} hosts have a guest {guest:?}; name the host with --host");
        return Err(Status::invalid_argument(text));
    }
    members.iter().rposition(is_meant).ok_or_else(|| {
        let name = &rollout.header().name;
        let text = format!("the spec of rollout {name} does not select a guest {guest:?}");
        Status::not_found(text)
    })
}

fn deposed() -> Status {
    Status::unavailable("this replica does not lead any more; ask another")
}

fn plan_status(error: &PlanError) -> Status {
    let message = error.to_string();
    match error {
        PlanError::Spec(_) | PlanError::Name(_) => Status::invalid_argument(message),
        PlanError::NameTaken(_)
        | PlanError::Ended { .. }
        | PlanError::Unreadable { .. }
        | PlanError::Overlap { .. } => Status::already_exists(message),
        PlanError::Nothing(_)
        | PlanError::Held { .. }
        | PlanError::KeysUnknown { .. }
        | PlanError::TooLarge(_)
        | PlanError::Store(StoreError::TooLarge { .. }) => Status::failed_precondition(message),
        PlanError::Store(_) | PlanError::Deposed => Status::unavailable(message),
    }
}

type WatchStream = Pin<Box<dyn Stream<Item = Result<v1::WatchResponse, Status>> + Send>>;

#[tonic::async_trait]
impl RolloutService for Api {
    async fn plan(
        &self,
        request: Request<v1::PlanRequest>,
    ) -> Result<Response<v1::PlanResponse>, Status> {
        let principal = principal(&request)?;
        let trace = TraceParent::of(request.metadata().as_ref());
        let request = request.into_inner();
        let leads = self.leadership()?;
        let planning = leads.plan(&request.rollout, &request.spec, &principal);
        let planned = match trace {
            Some(parent) => hosts::traced(parent.trace_id, planning).await,
            None => planning.await,
        };
        let running = planned.map_err(|error| plan_status(&error))?;
        let rollout = Some(view::rollout(&running.rollout(), true));
        Ok(Response::new(v1::PlanResponse { rollout }))
    }

    async fn diff(
        &self,
        request: Request<v1::DiffRequest>,
    ) -> Result<Response<v1::DiffResponse>, Status> {
        let v1::DiffRequest { rollout, spec } = request.into_inner();
        let (leads, running) = (self.leadership()?, self.running(&rollout)?);
        let diff = plan::diff::compare(leads.hosts(), &running, &spec).await;
        let diff = diff.map_err(|error| match error {
            DiffError::Spec(error) => Status::invalid_argument(error.to_string()),
            DiffError::Over { .. } => Status::failed_precondition(error.to_string()),
        })?;
        let rollout = view::rollout(&running.rollout(), false);
        Ok(Response::new(view::diff(diff, rollout)))
    }

    async fn approve(
        &self,
        request: Request<v1::ApproveRequest>,
    ) -> Result<Response<v1::ApproveResponse>, Status> {
        let principal = principal(&request)?;
        let v1::ApproveRequest { rollout, digest } = request.into_inner();
        let rollout = self
            .command(&rollout, Command::Approve { digest }, &principal)
            .await?;
        Ok(Response::new(v1::ApproveResponse { rollout }))
    }

    async fn drift(
        &self,
        request: Request<v1::DriftRequest>,
    ) -> Result<Response<v1::DriftResponse>, Status> {
        let principal = principal(&request)?;
        let request = request.into_inner();
        let action = match request.action() {
            v1::DriftAction::Unspecified | v1::DriftAction::Report => drift::Action::Report,
            v1::DriftAction::Fix => drift::Action::Fix,
            v1::DriftAction::Adopt => drift::Action::Adopt,
        };
        let leads = self.leadership()?;
        let running = self.running(&request.rollout)?;
        let report = drift::drift(leads.hosts(), &running, action, &principal).await;
        let report = report.map_err(|error| match error {
            drift::DriftError::NotLegal(error) => Status::failed_precondition(error.to_string()),
            drift::DriftError::Deposed => deposed(),
        })?;
        Ok(Response::new(v1::DriftResponse {
            drifts: report.drifts.iter().map(view::drift).collect(),
            compared: u32::try_from(report.compared).unwrap_or(u32::MAX),
            rollout: Some(view::rollout(&running.rollout(), false)),
        }))
    }

    async fn start(
        &self,
        request: Request<v1::StartRequest>,
    ) -> Result<Response<v1::StartResponse>, Status> {
        let principal = principal(&request)?;
        let v1::StartRequest { rollout, digest } = request.into_inner();
        let rollout = self
            .command(&rollout, Command::Start { digest }, &principal)
            .await?;
        Ok(Response::new(v1::StartResponse { rollout }))
    }

    async fn get(
        &self,
        request: Request<v1::GetRequest>,
    ) -> Result<Response<v1::GetResponse>, Status> {
        let running = self.running(&request.into_inner().rollout)?;
        let rollout = Some(view::rollout(&running.rollout(), true));
        Ok(Response::new(v1::GetResponse { rollout }))
    }

    async fn list(
        &self,
        _: Request<v1::ListRequest>,
    ) -> Result<Response<v1::ListResponse>, Status> {
        let leads = self.leadership()?;
        let mut all = leads.rollouts();
        all.sort_by_key(|running| std::cmp::Reverse(running.rollout().header().created));
        let rollouts = all
            .iter()
            .map(|running| view::rollout(&running.rollout(), false));
        let unreadable = leads.unreadable().into_iter();
        let unreadable = unreadable.map(|(name, reason)| v1::UnreadableRollout { name, reason });
        Ok(Response::new(v1::ListResponse {
            rollouts: rollouts.collect(),
            unreadable: unreadable.collect(),
        }))
    }

    type WatchStream = WatchStream;

    async fn watch(
        &self,
        request: Request<v1::WatchRequest>,
    ) -> Result<Response<WatchStream>, Status> {
        let running = self.running(&request.into_inner().rollout)?;
        let mut version = running.version();
        version.mark_changed();
        let changes = stream::unfold(Some((running, version)), |state| async move {
            let (running, mut version) = state?;
            tokio::select! {
                biased;
                _ = version.changed() => {}
                // A rollout that is out of service, or whose leader is another, changes no more.
                () = running.ended() => {
                    let name = running.rollout().header().name.clone();
                    let status = Status::unavailable(format!(
                        "this replica does not run rollout {name} any more; `rollout status {name}` \
                         says why"
                    ));
                    return Some((Err(status), None));
                }
            }
            let rollout = Some(view::rollout(&running.rollout(), false));
            let is_active = running.rollout().header().phase.is_active();
            let next = is_active.then_some((running, version));
            Some((Ok(v1::WatchResponse { rollout }), next))
        });
        Ok(Response::new(changes.boxed()))
    }

    async fn pause(
        &self,
        request: Request<v1::PauseRequest>,
    ) -> Result<Response<v1::PauseResponse>, Status> {
        let (principal, request) = (principal(&request)?, request.into_inner());
        let rollout = self
            .command(&request.rollout, Command::Pause, &principal)
            .await?;
        Ok(Response::new(v1::PauseResponse { rollout }))
    }

    async fn resume(
        &self,
        request: Request<v1::ResumeRequest>,
    ) -> Result<Response<v1::ResumeResponse>, Status> {
        let (principal, request) = (principal(&request)?, request.into_inner());
        let rollout = self
            .command(&request.rollout, Command::Resume, &principal)
            .await?;
        Ok(Response::new(v1::ResumeResponse { rollout }))
    }

    async fn promote(
        &self,
        request: Request<v1::PromoteRequest>,
    ) -> Result<Response<v1::PromoteResponse>, Status> {
        let (principal, request) = (principal(&request)?, request.into_inner());
        let rollout = self
            .command(&request.rollout, Command::Promote, &principal)
            .await?;
        Ok(Response::new(v1::PromoteResponse { rollout }))
    }

    async fn abort(
        &self,
        request: Request<v1::AbortRequest>,
    ) -> Result<Response<v1::AbortResponse>, Status> {
        let (principal, request) = (principal(&request)?, request.into_inner());
        let rollout = self
            .command(&request.rollout, Command::Abort, &principal)
            .await?;
        Ok(Response::new(v1::AbortResponse { rollout }))
    }

    async fn undo(
        &self,
        request: Request<v1::UndoRequest>,
    ) -> Result<Response<v1::UndoResponse>, Status> {
        let (principal, request) = (principal(&request)?, request.into_inner());
        let rollout = self
            .command(&request.rollout, Command::Undo, &principal)
            .await?;
        Ok(Response::new(v1::UndoResponse { rollout }))
    }

    async fn forget(
        &self,
        request: Request<v1::ForgetRequest>,
    ) -> Result<Response<v1::ForgetResponse>, Status> {
        let (principal, request) = (principal(&request)?, request.into_inner());
        let running = self.running(&request.rollout)?;
        let member = find(&running.rollout(), &request.host, &request.guest)?;
        let command = Command::Forget { member };
        let rollout = self.command(&request.rollout, command, &principal).await?;
        Ok(Response::new(v1::ForgetResponse { rollout }))
    }

    async fn delete(
        &self,
        request: Request<v1::DeleteRequest>,
    ) -> Result<Response<v1::DeleteResponse>, Status> {
        let (principal, request) = (principal(&request)?, request.into_inner());
        let (leads, name) = (self.leadership()?, &request.rollout);
        let deleted = match request.unreadable && leads.unreadable().contains_key(name) {
            true => Some(leads.delete_unreadable(name, &principal).await),
            false => self.running(name)?.delete(&principal).await,
        };
        match deleted {
            Some(Ok(archived)) => Ok(Response::new(v1::DeleteResponse {
                archived: archived.display().to_string(),
            })),
            Some(Err(NotDeleted::Store(error))) => Err(Status::unavailable(error.to_string())),
            Some(Err(error)) => Err(Status::failed_precondition(error.to_string())),
            None => Err(deposed()),
        }
    }

    async fn explain(
        &self,
        request: Request<v1::ExplainRequest>,
    ) -> Result<Response<v1::ExplainResponse>, Status> {
        let request = request.into_inner();
        let running = self.running(&request.rollout)?;
        let rollout = running.rollout();
        let index = find(&rollout, &request.host, &request.guest)?;
        let members = rollout.members();
        let guest = Some(view::guest(rollout.header(), index, &members[index]));
        let reasons = view::explain(&rollout, index, now());
        Ok(Response::new(v1::ExplainResponse { guest, reasons }))
    }
}

#[tonic::async_trait]
impl InventoryService for Api {
    async fn list_hosts(
        &self,
        _: Request<v1::ListHostsRequest>,
    ) -> Result<Response<v1::ListHostsResponse>, Status> {
        let leads = self.leadership()?;
        let asked = stream::iter(leads.hosts().all()).map(|host| async move {
            let (guests, unreachable) = match host.list_guests().await {
                Ok(guests) => (
                    u32::try_from(guests.len()).unwrap_or(u32::MAX),
                    String::new(),
                ),
                Err(status) => (0, status.message().to_owned()),
            };
            v1::Host {
                name: host.config.name.clone(),
                endpoint: host.config.endpoint.to_string(),
                registered: host.registered,
                labels: host.config.labels.clone().into_iter().collect(),
                guests,
                unreachable,
            }
        });
        let hosts = asked.buffered(FAN_OUT).collect().await;
        Ok(Response::new(v1::ListHostsResponse { hosts }))
    }

    async fn list_guests(
        &self,
        request: Request<v1::ListGuestsRequest>,
    ) -> Result<Response<v1::ListGuestsResponse>, Status> {
        let wanted = request.into_inner().host;
        let leads = self.leadership()?;
        if !wanted.is_empty() && leads.hosts().get(&wanted).is_none() {
            return Err(Status::not_found(format!("there is no host {wanted:?}")));
        }
        let mut hosts = leads.hosts().all();
        hosts.retain(|host| wanted.is_empty() || host.config.name == wanted);
        let asked = stream::iter(hosts).map(|host| async move {
            // An error is ignored here, because ListHosts shows which hosts cannot be reached.
            let list = host.list_guests().await.unwrap_or_default();
            (host, list)
        });
        let lists: Vec<_> = asked.buffered(FAN_OUT).collect().await;
        let registered = patchbay_proto::v1::RegistrationState::Registered;
        let guests = lists.into_iter().flat_map(|(host, list)| {
            list.into_iter().map(move |status| v1::Guest {
                host: host.config.name.clone(),
                registered: status.registration() == registered,
                name: status.guest,
                kernel_release: status.kernel_release,
                kernel_build_id: status.kernel_build_id,
            })
        });
        let guests = guests.collect();
        Ok(Response::new(v1::ListGuestsResponse { guests }))
    }
}
