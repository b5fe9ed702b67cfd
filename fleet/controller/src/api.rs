// SPDX-License-Identifier: Apache-2.0
//! Serves `patchbay.fleet.v1` on a unix socket, and over TCP with mutual TLS.

mod caller;

use std::collections::BTreeSet;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::{FutureExt, Stream, StreamExt, stream};
use patchbay_access::addresses::hide_in_string;
use patchbay_access::listen::admission::Admission;
use patchbay_access::listen::tls::Tls;
use patchbay_access::listen::{DEFAULT_STREAM_AGE, Incoming, MAX_CALLS};
use patchbay_proto::TraceParent;
use patchbay_proto::fleet::v1;
use patchbay_proto::fleet::v1::inventory_service_server::{
    InventoryService, InventoryServiceServer,
};
use patchbay_proto::fleet::v1::rollout_service_server::{RolloutService, RolloutServiceServer};
use patchbay_proto::socket::ListeningSocket;
use tokio::net::TcpListener;
use tonic::{Request, Response, Status};

use self::caller::{Caller, not_leading};
use crate::authority::Refused;
use crate::controller::{Controller, Leadership, PlanError};
use crate::plan::diff::DiffError;
use crate::rollout::{Member, Rollout, State};
use crate::runner::{Command, NoAnswer, NotDeleted, Running, now};
use crate::store::StoreError;
use crate::{drift, hosts, plan, view};

/// The maximum number of hosts that are queried at the same time.
const FAN_OUT: usize = 128;
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);
/// The time after which a peer that has not answered a ping is considered gone.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);

#[derive(Clone)]
struct Api {
    controller: Arc<Controller>,
    admission: Admission,
}

/// Serves the API on the socket, and over TCP if there is a listener, until `shutdown` is ready and
/// the calls in progress have ended.
///
/// # Errors
/// The socket cannot be used, or HTTP/2 fails.
pub async fn serve(
    controller: Arc<Controller>,
    socket: &ListeningSocket,
    tcp: Option<(TcpListener, Tls)>,
    shutdown: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let authority = controller.authority();
    let tls = tcp.as_ref().map(|(_, tls)| tls.clone());
    let admission = Admission::new(authority.policy().clone(), tls);
    let (incoming, connections) = Incoming::new(admission.clone());
    let incoming = incoming.recording(authority.audit().cloned());
    let api = Api {
        controller: Arc::clone(&controller),
        admission,
    };
    let server = tonic::transport::Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .max_concurrent_streams(u32::try_from(MAX_CALLS).ok())
        .add_service(RolloutServiceServer::new(api.clone()))
        .add_service(InventoryServiceServer::new(api))
        .serve_with_incoming_shutdown(connections, shutdown);
    let accept_tcp = async {
        if let Some((listener, tls)) = tcp {
            incoming.serve_tcp(listener, tls).await;
        }
        Ok(())
    };
    let accept = async { tokio::try_join!(incoming.serve_unix(socket), accept_tcp) };
    let (mut server, mut accept) = (std::pin::pin!(server), std::pin::pin!(accept));
    tokio::select! {
        served = &mut server => served?,
        accepted = &mut accept => {
            accepted?;
            server.await?;
        }
    }
    Ok(())
}

impl Api {
    fn caller<T>(&self, request: &Request<T>) -> Result<Caller, Status> {
        Caller::of(&self.admission, request)
    }

    fn leadership(&self) -> Result<Arc<Leadership>, Status> {
        let leads = self.controller.leadership();
        leads.ok_or_else(|| not_leading(&self.controller))
    }

    /// Returns a rollout if the caller may see at least one of its guests.
    fn running(&self, caller: &Caller, name: &str) -> Result<Arc<Running>, Status> {
        let (leads, sight) = (self.leadership()?, caller.sight());
        let running = leads.rollout(name);
        if let Some(running) = running.filter(|one| sight.sees_rollout(&one.rollout())) {
            return Ok(running);
        }
        let mut unreadable = leads.unreadable();
        Err(match unreadable.remove(name).filter(|_| sight.sees_all) {
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
        caller: &Caller,
        name: &str,
        command: Command,
    ) -> Result<Option<v1::Rollout>, Status> {
        let running = self.running(caller, name)?;
        let authority = self.controller.authority();
        let given = authority.give(caller.principal(), &running, command).await;
        given.map_err(|refused| self.refused(caller, &running, &refused))?;
        Ok(Some(caller.shown(&running.rollout(), false)))
    }

    fn refused(&self, caller: &Caller, running: &Running, refused: &Refused) -> Status {
        match refused {
            Refused::NoAnswer(NoAnswer::NotSent) => not_leading(&self.controller),
            refused => caller.refused(&running.rollout(), refused),
        }
    }

    /// Returns a future that resolves with the error of a stream whose authorization has ended.
    fn ended(&self, caller: &Caller) -> BoxFuture<'static, Status> {
        let (admission, identity) = (self.admission.clone(), Arc::clone(&caller.identity));
        async move {
            let refused = || caller::check(&admission, &identity).err();
            let refused = admission.until(&identity, refused);
            let refused = tokio::time::timeout(DEFAULT_STREAM_AGE, refused).await;
            refused.unwrap_or_else(|_| Status::unavailable("the stream has expired; open it again"))
        }
        .boxed()
    }

    fn plan_status(&self, caller: &Caller, error: &PlanError) -> Status {
        let message = error.to_string();
        match error {
            PlanError::Denied(why) => caller.denied(why),
            PlanError::Deposed => not_leading(&self.controller),
            PlanError::Spec(_) | PlanError::Name(_) => Status::invalid_argument(message),
            PlanError::NameTaken(_)
            | PlanError::Ended { .. }
            | PlanError::Unreadable { .. }
            | PlanError::Overlap { .. } => Status::already_exists(message),
            PlanError::Nothing(_)
            | PlanError::Held { .. }
            | PlanError::KeysUnknown { .. }
            | PlanError::Gate(_)
            | PlanError::TooLarge(_)
            | PlanError::Store(StoreError::TooLarge { .. }) => Status::failed_precondition(message),
            PlanError::Audit(_) | PlanError::Store(_) => Status::unavailable(message),
        }
    }
}

/// Returns the index of the member of a guest that the caller may see. `host` may be empty if only
/// one host has such a guest.
fn find(rollout: &Rollout, caller: &Caller, host: &str, guest: &str) -> Result<usize, Status> {
    let members = rollout.members();
    let sees = caller.sight().sees(guest);
    let is_meant = |member: &Member| {
        let is_on_host = host.is_empty() || member.host == host;
        sees && is_on_host && member.guest == guest && member.state != State::Superseded
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

type WatchStream = Pin<Box<dyn Stream<Item = Result<v1::WatchResponse, Status>> + Send>>;

#[tonic::async_trait]
impl RolloutService for Api {
    async fn plan(
        &self,
        request: Request<v1::PlanRequest>,
    ) -> Result<Response<v1::PlanResponse>, Status> {
        let caller = self.caller(&request)?;
        let trace = TraceParent::of(request.metadata().as_ref());
        let request = request.into_inner();
        let leads = self.leadership()?;
        let planning = leads.plan(&request.rollout, &request.spec, caller.principal());
        let planned = match trace {
            Some(parent) => hosts::traced(parent.trace_id, planning).await,
            None => planning.await,
        };
        let running = planned.map_err(|error| self.plan_status(&caller, &error))?;
        let rollout = Some(caller.shown(&running.rollout(), true));
        Ok(Response::new(v1::PlanResponse { rollout }))
    }

    async fn diff(
        &self,
        request: Request<v1::DiffRequest>,
    ) -> Result<Response<v1::DiffResponse>, Status> {
        let caller = self.caller(&request)?;
        let v1::DiffRequest { rollout, spec } = request.into_inner();
        let (leads, running) = (self.leadership()?, self.running(&caller, &rollout)?);
        let authority = self.controller.authority();
        let may_plan = |rollout: &Rollout| {
            let rule = authority.may_plan(caller.principal(), rollout);
            rule.map(drop)
        };
        let diff =
            plan::diff::compare(leads.hosts(), &running, &spec, caller.principal(), may_plan).await;
        let diff = diff.map_err(|error| match error {
            DiffError::Denied(why) => caller.denied(&why),
            DiffError::Spec(error) => Status::invalid_argument(error.to_string()),
            DiffError::Over { .. } => Status::failed_precondition(error.to_string()),
        })?;
        let rollout = caller.shown(&running.rollout(), false);
        Ok(Response::new(view::diff(diff, rollout)))
    }

    async fn approve(
        &self,
        request: Request<v1::ApproveRequest>,
    ) -> Result<Response<v1::ApproveResponse>, Status> {
        let caller = self.caller(&request)?;
        let v1::ApproveRequest { rollout, digest } = request.into_inner();
        let command = Command::Approve { digest };
        let rollout = self.command(&caller, &rollout, command).await?;
        Ok(Response::new(v1::ApproveResponse { rollout }))
    }

    async fn drift(
        &self,
        request: Request<v1::DriftRequest>,
    ) -> Result<Response<v1::DriftResponse>, Status> {
        let caller = self.caller(&request)?;
        let request = request.into_inner();
        let action = match request.action() {
            v1::DriftAction::Unspecified | v1::DriftAction::Report => drift::Action::Report,
            v1::DriftAction::Fix => drift::Action::Fix,
            v1::DriftAction::Adopt => drift::Action::Adopt,
        };
        let leads = self.leadership()?;
        let running = self.running(&caller, &request.rollout)?;
        let authority = self.controller.authority();
        if action != drift::Action::Report {
            let may_operate = authority.may_operate(caller.principal());
            may_operate.map_err(|why| {
                authority.denied(caller.principal(), "Drift", &request.rollout, &why);
                caller.denied(&why)
            })?;
        }
        let (hosts, principal) = (leads.hosts(), caller.principal());
        let report = drift::drift(hosts, authority, &running, action, principal).await;
        let report = report.map_err(|error| match error {
            drift::DriftError::NotLegal(error) => Status::failed_precondition(error.to_string()),
            drift::DriftError::Refused(refused) => self.refused(&caller, &running, &refused),
        })?;
        let sight = caller.sight();
        let drifts = report.drifts.iter();
        let drifts = drifts.filter(|drift| sight.sees(&drift.guest));
        let mut drifts: Vec<v1::Drift> = drifts.map(view::drift).collect();
        if !caller.sees_addresses(&running.rollout()) {
            for drift in &mut drifts {
                hide_in_string(&mut drift.actual);
            }
        }
        let waiting = report.waiting.iter();
        let waiting = waiting.filter(|guest| sight.sees(guest)).count();
        Ok(Response::new(v1::DriftResponse {
            drifts,
            compared: u32::try_from(report.compared).unwrap_or(u32::MAX),
            waiting: u32::try_from(waiting).unwrap_or(u32::MAX),
            rollout: Some(caller.shown(&running.rollout(), false)),
        }))
    }

    async fn start(
        &self,
        request: Request<v1::StartRequest>,
    ) -> Result<Response<v1::StartResponse>, Status> {
        let caller = self.caller(&request)?;
        let v1::StartRequest {
            rollout,
            digest,
            break_glass,
        } = request.into_inner();
        let command = match break_glass {
            true => Command::StartUnapproved { digest },
            false => Command::Start { digest },
        };
        let rollout = self.command(&caller, &rollout, command).await?;
        Ok(Response::new(v1::StartResponse { rollout }))
    }

    async fn get(
        &self,
        request: Request<v1::GetRequest>,
    ) -> Result<Response<v1::GetResponse>, Status> {
        let caller = self.caller(&request)?;
        let running = self.running(&caller, &request.into_inner().rollout)?;
        let rollout = Some(caller.shown(&running.rollout(), true));
        Ok(Response::new(v1::GetResponse { rollout }))
    }

    async fn list(
        &self,
        request: Request<v1::ListRequest>,
    ) -> Result<Response<v1::ListResponse>, Status> {
        let caller = self.caller(&request)?;
        let (leads, sight) = (self.leadership()?, caller.sight());
        let mut all = leads.rollouts();
        all.retain(|running| sight.sees_rollout(&running.rollout()));
        all.sort_by_key(|running| std::cmp::Reverse(running.rollout().header().created));
        let rollouts = all
            .iter()
            .map(|running| caller.shown(&running.rollout(), false));
        let unreadable = Some(leads.unreadable()).filter(|_| sight.sees_all);
        let unreadable = unreadable.unwrap_or_default().into_iter();
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
        let caller = self.caller(&request)?;
        let running = self.running(&caller, &request.into_inner().rollout)?;
        let mut version = running.version();
        version.mark_changed();
        let (admission, ended) = (self.admission.clone(), self.ended(&caller));
        let state = Some((running, version, caller, ended));
        let changes = stream::unfold(state, move |state| {
            let admission = admission.clone();
            async move {
                let (running, mut version, caller, mut ended) = state?;
                tokio::select! {
                    biased;
                    status = &mut ended => return Some((Err(status), None)),
                    _ = version.changed() => {}
                    // This replica no longer runs the rollout, so no further change is reported.
                    () = running.ended() => {
                        let name = running.rollout().header().name.clone();
                        let status = Status::unavailable(format!(
                            "this replica no longer runs rollout {name}; `rollout status {name}` \
                             says why"
                        ));
                        return Some((Err(status), None));
                    }
                }
                let caller = Caller::new(&admission, caller.identity);
                if !caller.sight().sees_rollout(&running.rollout()) {
                    let status = caller.denied("no rule covers a guest of the rollout any more");
                    return Some((Err(status), None));
                }
                let rollout = Some(caller.shown(&running.rollout(), false));
                let is_active = running.rollout().header().phase.is_active();
                let next = is_active.then_some((running, version, caller, ended));
                Some((Ok(v1::WatchResponse { rollout }), next))
            }
        });
        Ok(Response::new(changes.boxed()))
    }

    async fn pause(
        &self,
        request: Request<v1::PauseRequest>,
    ) -> Result<Response<v1::PauseResponse>, Status> {
        let (caller, request) = (self.caller(&request)?, request.into_inner());
        let command = Command::Pause;
        let rollout = self.command(&caller, &request.rollout, command).await?;
        Ok(Response::new(v1::PauseResponse { rollout }))
    }

    async fn resume(
        &self,
        request: Request<v1::ResumeRequest>,
    ) -> Result<Response<v1::ResumeResponse>, Status> {
        let (caller, request) = (self.caller(&request)?, request.into_inner());
        let command = Command::Resume;
        let rollout = self.command(&caller, &request.rollout, command).await?;
        Ok(Response::new(v1::ResumeResponse { rollout }))
    }

    async fn promote(
        &self,
        request: Request<v1::PromoteRequest>,
    ) -> Result<Response<v1::PromoteResponse>, Status> {
        let (caller, request) = (self.caller(&request)?, request.into_inner());
        let command = match request.break_glass {
            true => Command::PromoteUnapproved,
            false => Command::Promote,
        };
        let rollout = self.command(&caller, &request.rollout, command).await?;
        Ok(Response::new(v1::PromoteResponse { rollout }))
    }

    async fn abort(
        &self,
        request: Request<v1::AbortRequest>,
    ) -> Result<Response<v1::AbortResponse>, Status> {
        let (caller, request) = (self.caller(&request)?, request.into_inner());
        let command = Command::Abort;
        let rollout = self.command(&caller, &request.rollout, command).await?;
        Ok(Response::new(v1::AbortResponse { rollout }))
    }

    async fn undo(
        &self,
        request: Request<v1::UndoRequest>,
    ) -> Result<Response<v1::UndoResponse>, Status> {
        let (caller, request) = (self.caller(&request)?, request.into_inner());
        let command = Command::Undo;
        let rollout = self.command(&caller, &request.rollout, command).await?;
        Ok(Response::new(v1::UndoResponse { rollout }))
    }

    async fn forget(
        &self,
        request: Request<v1::ForgetRequest>,
    ) -> Result<Response<v1::ForgetResponse>, Status> {
        let (caller, request) = (self.caller(&request)?, request.into_inner());
        let running = self.running(&caller, &request.rollout)?;
        let member = find(&running.rollout(), &caller, &request.host, &request.guest)?;
        let command = Command::Forget { member };
        let rollout = self.command(&caller, &request.rollout, command).await?;
        Ok(Response::new(v1::ForgetResponse { rollout }))
    }

    async fn delete(
        &self,
        request: Request<v1::DeleteRequest>,
    ) -> Result<Response<v1::DeleteResponse>, Status> {
        let (caller, request) = (self.caller(&request)?, request.into_inner());
        let (leads, name) = (self.leadership()?, &request.rollout);
        let (authority, principal) = (self.controller.authority(), caller.principal());
        let deleted = if request.unreadable && leads.unreadable().contains_key(name) {
            let deleting = leads.delete_unreadable(name, principal);
            let deleted = authority.delete_unreadable(principal, name, deleting).await;
            deleted.map_err(|refused| match refused {
                Refused::Denied(why) => caller.denied(&why),
                refused => Status::unavailable(refused.to_string()),
            })?
        } else {
            let running = self.running(&caller, name)?;
            let deleted = authority.delete(principal, &running).await;
            deleted.map_err(|refused| self.refused(&caller, &running, &refused))?
        };
        match deleted {
            Ok(archived) => Ok(Response::new(v1::DeleteResponse {
                archived: archived.display().to_string(),
            })),
            Err(NotDeleted::Store(error)) => Err(Status::unavailable(error.to_string())),
            Err(error) => Err(Status::failed_precondition(error.to_string())),
        }
    }

    async fn explain(
        &self,
        request: Request<v1::ExplainRequest>,
    ) -> Result<Response<v1::ExplainResponse>, Status> {
        let (caller, request) = (self.caller(&request)?, request.into_inner());
        let running = self.running(&caller, &request.rollout)?;
        let rollout = running.rollout();
        let index = find(&rollout, &caller, &request.host, &request.guest)?;
        let members = rollout.members();
        let mut guest = view::guest(rollout.header(), index, &members[index]);
        let sight = caller.sight();
        let hidden = sight.hidden(&rollout);
        let reasons = view::explain(&rollout, index, now(), caller.policy()).into_iter();
        let mut reasons: Vec<String> = reasons.map(|reason| hidden.shown(&reason)).collect();
        if !caller.sees_addresses(&rollout) {
            let texts = reasons.iter_mut().chain([&mut guest.message]);
            texts.for_each(hide_in_string);
        }
        let guest = Some(guest);
        Ok(Response::new(v1::ExplainResponse { guest, reasons }))
    }
}

#[tonic::async_trait]
impl InventoryService for Api {
    async fn list_hosts(
        &self,
        request: Request<v1::ListHostsRequest>,
    ) -> Result<Response<v1::ListHostsResponse>, Status> {
        let caller = self.caller(&request)?;
        let leads = self.leadership()?;
        let caller = &caller;
        let asked = stream::iter(leads.hosts().all()).map(|host| async move {
            let (guests, unreachable) = match host.list_guests().await {
                Ok(guests) => {
                    let sight = caller.sight();
                    let guests = guests.iter().filter(|status| sight.sees(&status.guest));
                    (
                        u32::try_from(guests.count()).unwrap_or(u32::MAX),
                        String::new(),
                    )
                }
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
        let caller = self.caller(&request)?;
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
        let mut lists: Vec<_> = asked.buffered(FAN_OUT).collect().await;
        let sight = caller.sight();
        for (_, list) in &mut lists {
            list.retain(|status: &patchbay_proto::v1::GuestStatus| sight.sees(&status.guest));
        }
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
