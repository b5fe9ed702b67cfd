// SPDX-License-Identifier: Apache-2.0
//! `patchbay.v1.TracepointsService`: checks requests and passes them to [`Tracer`].
//!
//! Changes run in separate tasks. Otherwise a client that disconnects during a change could leave
//! events armed that no client is responsible for.

use std::collections::HashSet;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use patchbay_observe::trace::Enabled;
use patchbay_proto::agent::v1 as agent;
use patchbay_proto::agent::v1::from_agent::Message as Answer;
use patchbay_proto::agent::v1::to_agent::Message as Question;
use patchbay_proto::v1;
use patchbay_proto::v1::tracepoints_service_server::TracepointsService;
use prost::Message;
use static_keys::split_name;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::access::Access;
use super::convert;
use super::ending::until_end;
use super::kernel_log::Log;
use super::reading::{Counted, recorded};
use super::requests::{CallTimes, MAX_TTL, from_proto, page_size, summary_only};
use super::trace_events::{self, invalid};
use super::trace_stats;
use crate::keys::KeysError;
use crate::keys::replay::RequestId;
use crate::trace::link::bounded;
use crate::trace::once::Once;
use crate::trace::select::{self, Wanted};
use crate::trace::tracer::{ArmTerms, SwitchTerms, TraceOutcome, Tracer};
use crate::trace::{AgentError, TraceError, TracepointFacts, link};
use crate::trace_id;

const MAX_TEXT_BYTES: usize = 1024;
const MAX_REQUEST_ID_BYTES: usize = 128;
const MAX_STOP_TIMEOUT: Duration = Duration::from_secs(30);
const TTL_RANGE: std::ops::RangeInclusive<Duration> = Duration::from_millis(1)..=MAX_TTL;
const PATIENCE: Duration = Duration::from_secs(3);

/// Serves [`TracepointsService`].
pub struct TracepointsApi {
    access: Access,
}

impl TracepointsApi {
    /// Serves the guests of `access`.
    #[must_use]
    pub fn new(access: Access) -> Self {
        Self { access }
    }
}

#[tonic::async_trait]
impl TracepointsService for TracepointsApi {
    async fn list_tracepoints(
        &self,
        request: Request<v1::ListTracepointsRequest>,
    ) -> Result<Response<v1::ListTracepointsResponse>, Status> {
        let CallTimes { deadline, .. } = CallTimes::of(request.metadata());
        let (guest, _, request) = self.access.admit(request)?;
        let request = request.into_inner();
        let wanted = Wanted::parse(request.patterns, false)?;
        let size = page_size(request.page_size)?;
        guest.keys.find_kernel(deadline).await;
        let (listed, stale) = list(&guest.tracer, &wanted, request.armed_only).await?;
        if let (true, Some(error)) = (request.refresh, &stale) {
            return Err(TraceError::from(error.clone()).into());
        }
        let total_size = i32::try_from(listed.len()).unwrap_or(i32::MAX);
        let start = listed.partition_point(|tracepoint| tracepoint.name <= request.page_token);
        let mut page: Vec<_> = listed.into_iter().skip(start).take(size + 1).collect();
        let next_page_token = if page.len() > size {
            page.pop();
            page.last()
                .map(|tracepoint| tracepoint.name.clone())
                .unwrap_or_default()
        } else {
            String::new()
        };
        Ok(Response::new(v1::ListTracepointsResponse {
            tracepoints: page,
            next_page_token,
            total_size,
            stale: stale.map(|error| error.to_string()).unwrap_or_default(),
        }))
    }

    async fn arm_tracepoints(
        &self,
        request: Request<v1::ArmTracepointsRequest>,
    ) -> Result<Response<v1::ArmTracepointsResponse>, Status> {
        let (guest, caller, request) = self.access.admit(request)?;
        let client = caller.name.clone();
        let mut request = request.into_inner();
        let id = std::mem::take(&mut request.request_id);
        let once = once("arm", &client, id, request.validate_only, &request)?;
        let wanted = Wanted::parse(request.patterns, true)?;
        let terms = ArmTerms {
            filter: text("filter", request.filter)?,
            trigger: text("trigger", request.trigger)?,
            even_if_others: request.even_if_others,
            validate_only: request.validate_only,
            ttl: from_proto("ttl", request.ttl, TTL_RANGE)?,
            caller: Some(caller),
        };
        let tracer = Arc::clone(&guest.tracer);
        let change = async move { tracer.arm(&client, &wanted, &terms).await };
        let TraceOutcome { results, report } = change_once(&guest.tracer, once, change).await?;
        Ok(Response::new(v1::ArmTracepointsResponse {
            results,
            report: report.map(convert::report),
        }))
    }

    async fn fire_tracepoints(
        &self,
        request: Request<v1::FireTracepointsRequest>,
    ) -> Result<Response<v1::FireTracepointsResponse>, Status> {
        let (guest, caller, request) = self.access.admit(request)?;
        let client = caller.name.clone();
        let CallTimes { deadline, .. } = CallTimes::of(request.metadata());
        let mut request = request.into_inner();
        let id = std::mem::take(&mut request.request_id);
        let once = once("fire", &client, id, request.validate_only, &request)?;
        let wanted = Wanted::parse(request.patterns, true)?;
        let mut terms = switch_terms(request.validate_only, request.stop_timeout)?;
        terms.deadline = deadline;
        terms.caller = Some(caller);
        terms.ttl = from_proto("ttl", request.ttl, TTL_RANGE)?;
        let summary_only = summary_only(request.result_view)?;
        let tracer = Arc::clone(&guest.tracer);
        guest.keys.find_kernel(deadline).await;
        let change = async move { tracer.fire(&client, &wanted, &terms).await };
        let TraceOutcome { results, report } = change_once(&guest.tracer, once, change).await?;
        let (results, summary) = viewed(&guest.tracer, results, summary_only);
        Ok(Response::new(v1::FireTracepointsResponse {
            results,
            report: report.map(convert::report),
            summary: Some(summary),
        }))
    }

    async fn park_tracepoints(
        &self,
        request: Request<v1::ParkTracepointsRequest>,
    ) -> Result<Response<v1::ParkTracepointsResponse>, Status> {
        let (guest, caller, request) = self.access.admit(request)?;
        let client = caller.name.clone();
        let CallTimes { deadline, .. } = CallTimes::of(request.metadata());
        let mut request = request.into_inner();
        let id = std::mem::take(&mut request.request_id);
        let once = once("park", &client, id, request.validate_only, &request)?;
        let wanted = Wanted::parse(request.patterns, true)?;
        let mut terms = switch_terms(request.validate_only, request.stop_timeout)?;
        terms.deadline = deadline;
        terms.caller = Some(caller);
        terms.even_if_others = request.even_if_others;
        terms.force = request.force;
        let summary_only = summary_only(request.result_view)?;
        let tracer = Arc::clone(&guest.tracer);
        guest.keys.find_kernel(deadline).await;
        let change = async move { tracer.park(&client, &wanted, &terms).await };
        let TraceOutcome { results, report } = change_once(&guest.tracer, once, change).await?;
        let (results, summary) = viewed(&guest.tracer, results, summary_only);
        Ok(Response::new(v1::ParkTracepointsResponse {
            results,
            report: report.map(convert::report),
            summary: Some(summary),
        }))
    }

    async fn disarm_tracepoints(
        &self,
        request: Request<v1::DisarmTracepointsRequest>,
    ) -> Result<Response<v1::DisarmTracepointsResponse>, Status> {
        let (guest, caller, request) = self.access.admit(request)?;
        let client = caller.name.clone();
        let mut request = request.into_inner();
        let id = std::mem::take(&mut request.request_id);
        let once = once("disarm", &client, id, false, &request)?;
        let wanted = Wanted::parse(request.patterns, true)?;
        let tracer = Arc::clone(&guest.tracer);
        let change = async move {
            let results = tracer
                .disarm(&client, &wanted, request.force, Some(&caller))
                .await?;
            Ok(TraceOutcome {
                results,
                report: None,
            })
        };
        let TraceOutcome { results, .. } = change_once(&guest.tracer, once, change).await?;
        Ok(Response::new(v1::DisarmTracepointsResponse { results }))
    }

    type StreamTracepointEventsStream = Counted<v1::StreamTracepointEventsResponse>;

    async fn stream_tracepoint_events(
        &self,
        request: Request<v1::StreamTracepointEventsRequest>,
    ) -> Result<Response<Self::StreamTracepointEventsStream>, Status> {
        let (guest, caller, request) = self.access.admit(request)?;
        let request = request.into_inner();
        let instance = request.instance.clone();
        let events = trace_events::events(&guest, caller.clone(), request);
        let stream = recorded(&guest, &caller, "trace events", &instance, events).await?;
        Ok(Response::new(stream))
    }

    async fn get_tracepoint_stats(
        &self,
        request: Request<v1::GetTracepointStatsRequest>,
    ) -> Result<Response<v1::GetTracepointStatsResponse>, Status> {
        let (guest, _, request) = self.access.admit(request)?;
        let stats = trace_stats::stats(&guest, request.into_inner()).await?;
        Ok(Response::new(stats))
    }

    type StreamKernelLogStream = Counted<v1::StreamKernelLogResponse>;

    async fn stream_kernel_log(
        &self,
        request: Request<v1::StreamKernelLogRequest>,
    ) -> Result<Response<Self::StreamKernelLogStream>, Status> {
        let (guest, caller, request) = self.access.admit(request)?;
        let ending = guest.ending();
        let open = async {
            let log = Log::open(&guest, request.into_inner()).await?;
            // The log is read again only after the client has taken the previous records.
            let (sender, receiver) = mpsc::channel(1);
            tokio::spawn(async move {
                until_end(&sender, ending, log.tell(&sender)).await;
            });
            Ok(ReceiverStream::new(receiver))
        };
        let stream = recorded(&guest, &caller, "kernel log", "", open).await?;
        Ok(Response::new(stream))
    }

    async fn describe_agent(
        &self,
        request: Request<v1::DescribeAgentRequest>,
    ) -> Result<Response<v1::DescribeAgentResponse>, Status> {
        let (guest, _, _) = self.access.admit(request)?;
        let peer = match guest.tracer.link.peer() {
            Ok(peer) => peer,
            Err(error) => {
                let absent = error.to_string();
                return Ok(Response::new(v1::DescribeAgentResponse {
                    absent,
                    ..Default::default()
                }));
            }
        };
        let (health, absent) = match guest
            .tracer
            .link
            .ask(Question::GetHealth(agent::AgentGetHealth {}), PATIENCE)
            .await
        {
            Ok(Answer::Health(health)) => (health, String::new()),
            Ok(_) => (
                agent::AgentHealth::default(),
                AgentError::Confused.to_string(),
            ),
            Err(error) => (agent::AgentHealth::default(), error.to_string()),
        };
        Ok(Response::new(description(peer, health, absent)))
    }
}

fn description(
    peer: link::Peer,
    health: agent::AgentHealth,
    absent: String,
) -> v1::DescribeAgentResponse {
    let pressure = health
        .pressure
        .into_iter()
        .take(16)
        .map(|pressure| v1::Pressure {
            resource: bounded(pressure.resource),
            average_10s: pressure.average_10s,
            average_60s: pressure.average_60s,
        });
    v1::DescribeAgentResponse {
        absent,
        agent_version: peer.hello.agent_version,
        protocol_version: peer.version,
        connected_at: Some(peer.connected_at.into()),
        no_tracing: peer.hello.no_tracing,
        kernel_release: peer.hello.kernel_release,
        build_id: bounded(health.build_id),
        labels: health
            .labels
            .into_iter()
            .take(64)
            .map(|(key, value)| (bounded(key), bounded(value)))
            .collect(),
        uptime: Duration::from_millis(health.uptime_ms).try_into().ok(),
        load: health.load.into_iter().take(3).collect(),
        pressure: pressure.collect(),
        memory_total_bytes: health.memory_total_bytes,
        memory_available_bytes: health.memory_available_bytes,
        warnings: health.warnings.into_iter().take(16).map(bounded).collect(),
        agent_memory_bytes: health.agent_memory_bytes,
        kernel_warnings: health.kernel_warnings,
        boot_id: peer.hello.boot_id,
    }
}

/// Makes a change, or returns the answer of an earlier request with the same id.
async fn change_once(
    tracer: &Arc<Tracer>,
    once: Option<Once>,
    change: impl Future<Output = Result<TraceOutcome, TraceError>> + Send + 'static,
) -> Result<TraceOutcome, Status> {
    let tracer = Arc::clone(tracer);
    let changed = whole(async move {
        let boot = tracer.keys.boot();
        tracer.answers.once(once, boot, change).await
    })
    .await;
    Ok(changed?)
}

/// Identifies a change by its request id. `rest` is the request without the id.
fn once(
    method: &str,
    client: &str,
    request_id: String,
    validate_only: bool,
    rest: &impl Message,
) -> Result<Option<Once>, TraceError> {
    if request_id.len() > MAX_REQUEST_ID_BYTES {
        return Err(invalid(
            "request_id",
            format!("is longer than {MAX_REQUEST_ID_BYTES} bytes"),
        ));
    }
    // A validation may be repeated.
    if validate_only {
        return Ok(None);
    }
    let content = || [method.as_bytes(), &rest.encode_to_vec()].concat();
    Ok(RequestId::new(request_id, content).map(|request| Once {
        client: client.to_owned(),
        request,
    }))
}

/// Completes a change even if the caller disconnects.
pub(super) async fn whole<T: Send + 'static>(
    change: impl Future<Output = Result<T, TraceError>> + Send + 'static,
) -> Result<T, TraceError> {
    match tokio::spawn(trace_id::carry(change)).await {
        Ok(result) => result,
        Err(_) => Err(KeysError::Internal {
            message: "the change panicked; see the monitor's log".to_owned(),
        }
        .into()),
    }
}

async fn list(
    tracer: &Tracer,
    wanted: &Wanted,
    armed_only: bool,
) -> Result<(Vec<v1::Tracepoint>, Option<AgentError>), TraceError> {
    let (events, stale) = tracer.events().await;
    let facts = tracer.facts().await?;
    tracer.forget_vanished(&facts);
    // Until the first agent connects, the events are those in the guest's memory.
    let is_told = !events.names.is_empty();
    let mut all = match is_told {
        true => events.names.clone(),
        false => tracer.events_in_memory().await,
    };
    let armed: Vec<String> = tracer.book().events.keys().cloned().collect();
    let has_probe = |name: &str| {
        let facts = select::of_event(&facts.by_name, name);
        facts.is_some_and(TracepointFacts::has_probe)
    };
    // The systems of tracepoints without an event are unknown.
    let known = all.iter().chain(&armed);
    let known: HashSet<&str> = known.map(|event| split_name(event).1).collect();
    let eventless = facts.by_name.keys().filter(|name| {
        let is_listed = !is_told || has_probe(name);
        is_listed && !known.contains(name.as_str())
    });
    let eventless: Vec<_> = eventless.map(|name| format!(":{name}")).collect();
    all.extend(eventless);
    let fired_by = tracer.fired_by(&armed);
    let enabled_in = match armed_only {
        true => tracer.enabled_in_memory().await,
        false => Enabled::default(),
    };
    let book = tracer.book();
    all.extend(armed);
    all.sort_unstable();
    all.dedup();
    let others = select::others(&events, &all, &facts.by_name, |event| {
        book.may_have_probe(event) || book.moving.contains(event)
    });
    let tell = |name: String| {
        let armed = book.events.get(&name);
        let of_event = select::of_event(&facts.by_name, &name);
        let enabled = of_event.is_some_and(|facts| facts.enabled);
        let fired_by = fired_by.get(&name).map(Vec::as_slice).unwrap_or_default();
        v1::Tracepoint {
            state: match (armed, enabled) {
                (None, _) => v1::TracepointState::Disarmed,
                (Some(_), false) => v1::TracepointState::Parked,
                (Some(_), true) => v1::TracepointState::Firing,
            }
            .into(),
            enabled,
            probes: of_event.and_then(|facts| facts.probes),
            others: others.get(&name).cloned().unwrap_or_default(),
            armed_by: armed.map_or_else(Vec::new, |armed| armed.armed_by.keys().cloned().collect()),
            fired_by: fired_by.iter().map(ToString::to_string).collect(),
            refused: select::refusal(of_event).unwrap_or_default(),
            filter: armed.map(|armed| armed.filter.clone()).unwrap_or_default(),
            trigger: armed.map(|armed| armed.trigger.clone()).unwrap_or_default(),
            events: armed
                .and_then(|armed| armed.source.as_ref())
                .map_or(0, |source| source.events.load(Ordering::Relaxed)),
            key: of_event.map(|facts| facts.key.clone()).unwrap_or_default(),
            also_serves: of_event.map_or_else(Vec::new, |facts| names(&facts.also_serves)),
            probe_functions: of_event.map_or_else(Vec::new, |facts| facts.functions.clone()),
            enabled_in: instances(enabled_in.get(&name)),
            name,
        }
    };
    let is_armed = |name: &String| book.events.contains_key(name) || has_probe(name);
    let chosen = all
        .into_iter()
        .filter(|name| wanted.matches(name) && (!armed_only || is_armed(name)));
    Ok((chosen.map(tell).collect(), stale))
}

/// Returns the names of instances for people.
fn instances(enabled: Option<&Vec<String>>) -> Vec<String> {
    let shown = |name: &String| match name.as_str() {
        "" => "top level".to_owned(),
        name => name.to_owned(),
    };
    enabled.into_iter().flatten().map(shown).collect()
}

/// Returns the summary of the results, and the results unless only the summary is wanted.
fn viewed(
    tracer: &Tracer,
    mut results: Vec<v1::TracepointResult>,
    summary_only: bool,
) -> (Vec<v1::TracepointResult>, v1::TracepointSummary) {
    let to_u32 = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let fires = |result: &&v1::TracepointResult| result.state() == v1::TracepointState::Firing;
    let summary = v1::TracepointSummary {
        events: to_u32(results.len()),
        firing: to_u32(results.iter().filter(fires).count()),
    };
    if summary_only {
        return (vec![], summary);
    }
    for result in &mut results {
        let (_, key) = split_name(&result.name);
        result.also_serves = names(&tracer.keys.also_serves(key));
    }
    (results, summary)
}

fn names(of: &[&str]) -> Vec<String> {
    of.iter().map(|&name| name.to_owned()).collect()
}

pub(super) fn text(field: &'static str, text: String) -> Result<String, TraceError> {
    if text.len() > MAX_TEXT_BYTES || text.contains(['\n', '\0']) {
        return Err(invalid(
            field,
            format!("is longer than {MAX_TEXT_BYTES} bytes or has several lines"),
        ));
    }
    Ok(text)
}

fn switch_terms(
    validate_only: bool,
    stop_timeout: Option<prost_types::Duration>,
) -> Result<SwitchTerms, Status> {
    let range = Duration::from_micros(1)..=MAX_STOP_TIMEOUT;
    let mut terms = SwitchTerms {
        validate_only,
        ..SwitchTerms::default()
    };
    if let Some(timeout) = from_proto("stop_timeout", stop_timeout, range)? {
        terms.stop_timeout = timeout;
    }
    Ok(terms)
}
