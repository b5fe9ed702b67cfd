// SPDX-License-Identifier: Apache-2.0
//! Chooses the reader of a stream of events, and streams those of the guest's memory and of the
//! agent.

use std::sync::Arc;
use std::time::Duration;

use patchbay_proto::v1;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::ending::until_end;
use super::guests::ServedGuest;
use super::tracepoints::{text, whole};
use crate::keys::Caller;
use crate::trace::TraceError;
use crate::trace::memory::{MemoryStream, Wanted};
use crate::trace::select;
use crate::trace::stream::Subscription;
use crate::trace::tracer::{ArmTerms, SwitchTerms, TraceOutcome, Tracer};

const DEFAULT_EVENTS_PER_SECOND: u32 = 50_000;
const MAX_EVENTS_PER_SECOND: u32 = 1_000_000;
/// NAME_MAX of Linux: the maximum length of an instance's name in bytes.
const MAX_INSTANCE_BYTES: usize = 255;

type Events = ReceiverStream<Result<v1::StreamTracepointEventsResponse, Status>>;

/// Opens a stream of events that are read in memory, or that the agent sends.
///
/// # Errors
/// The request is invalid, or the reader that it needs cannot serve it; those of arming and firing.
pub async fn events(
    guest: &Arc<ServedGuest>,
    caller: Caller,
    request: v1::StreamTracepointEventsRequest,
) -> Result<Events, TraceError> {
    if let Some(stream) = memory(guest, &caller.name, &request).await? {
        return Ok(stream);
    }
    let limit = events_per_second(&request);
    let wanted = select::Wanted::parse(request.patterns, request.arm_and_fire)?;
    let terms = ArmTerms {
        filter: text("filter", request.filter)?,
        trigger: text("trigger", request.trigger)?,
        even_if_others: request.even_if_others,
        validate_only: false,
        ttl: None,
        caller: Some(caller.clone()),
    };
    let subscription =
        guest
            .tracer
            .hub
            .subscribe(&caller.name, wanted.patterns().clone(), limit)?;
    let client = format!("{}/stream-{}", caller.name, subscription.id);
    let guard = StreamGuard {
        tracer: Arc::clone(&guest.tracer),
        stream: subscription.id,
        client: request.arm_and_fire.then(|| client.clone()),
        grace: guest.grace,
    };
    let (guard, names) = if request.arm_and_fire {
        let tracer = Arc::clone(&guest.tracer);
        whole(async move {
            // The task owns the guard. If the caller is gone, the guard is dropped when the
            // task ends, so that the client is removed only after it was added.
            let guard = guard;
            let TraceOutcome { results, .. } = tracer.arm(&client, &wanted, &terms).await?;
            // Events that the globs skipped must not be fired either.
            let names: Vec<String> = results.into_iter().map(|result| result.name).collect();
            let armed = select::Wanted::parse(names.clone(), true)?;
            let terms = SwitchTerms {
                caller: Some(caller),
                ..SwitchTerms::default()
            };
            tracer.fire(&client, &armed, &terms).await?;
            Ok((guard, names))
        })
        .await?
    } else {
        (guard, vec![])
    };
    let (sender, receiver) = mpsc::channel(1);
    let first = v1::StreamTracepointEventsResponse {
        names,
        source: v1::TraceSource::Agent.into(),
        ..Default::default()
    };
    guest
        .tracer
        .decoding
        .spawn(tell(subscription, first, sender.clone()));
    tokio::spawn(end_stream(sender, guest.ending(), guard));
    Ok(ReceiverStream::new(receiver))
}

/// Closes the stream when dropped, and removes its client after the grace time.
struct StreamGuard {
    tracer: Arc<Tracer>,
    stream: u64,
    client: Option<String>,
    grace: Duration,
}

impl Drop for StreamGuard {
    fn drop(&mut self) {
        self.tracer.hub.unsubscribe(self.stream);
        if let Some(client) = self.client.take() {
            let tracer = Arc::clone(&self.tracer);
            let grace = self.grace;
            tokio::spawn(async move {
                tokio::time::sleep(grace).await;
                tracer.leave(&client).await;
            });
        }
    }
}

type Sender = mpsc::Sender<Result<v1::StreamTracepointEventsResponse, Status>>;

/// Sends batches until either end closes the stream.
async fn tell(
    mut subscription: Subscription,
    first: v1::StreamTracepointEventsResponse,
    sender: Sender,
) {
    let mut message = first;
    while sender.send(Ok(message)).await.is_ok() {
        match subscription.batches.recv().await {
            Some(batch) => message = batch.to_proto(),
            None => return,
        }
    }
}

/// Closes the stream when the client is gone, the guest is removed, or the endpoint shuts down.
async fn end_stream(sender: Sender, ending: watch::Receiver<bool>, _guard: StreamGuard) {
    until_end(&sender, ending, std::future::pending()).await;
}

/// Returns the flood limit of a request.
fn events_per_second(request: &v1::StreamTracepointEventsRequest) -> u32 {
    match request.max_events_per_second {
        0 => DEFAULT_EVENTS_PER_SECOND,
        limit => limit.min(MAX_EVENTS_PER_SECOND),
    }
}

/// Opens a stream of events that are read in the guest's memory. Returns `None` if the agent must
/// read them.
///
/// # Errors
/// The request is invalid, or only the memory can serve it and the memory cannot be read.
async fn memory(
    guest: &Arc<ServedGuest>,
    principal: &str,
    request: &v1::StreamTracepointEventsRequest,
) -> Result<Option<Events>, TraceError> {
    let had_agent = *guest.tracer.link.connections().borrow() > 0;
    let source = match choose(request, had_agent)? {
        v1::TraceSource::Agent => return Ok(None),
        other => other,
    };
    check_instance(&request.instance)?;
    let permit = guest.tracer.hub.permit_in_memory(principal)?;
    let wanted = Wanted {
        instance: request.instance.clone(),
        patterns: select::Wanted::parse(request.patterns.clone(), false)?
            .patterns()
            .clone(),
        events_per_second: events_per_second(request),
        buffered: request.buffered,
        no_follow: request.no_follow,
        records: request.records,
    };
    let keys = Arc::clone(&guest.keys);
    let opened = MemoryStream::begin(keys, guest.tracer.link.clone(), permit, wanted).await;
    let stream = match opened {
        Ok(stream) => stream,
        Err(error) if source == v1::TraceSource::Unspecified && !is_only_in_memory(request) => {
            // The client waits for an agent.
            tracing::debug!(%error, "the events are not read in memory");
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    let ending = guest.ending();
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        until_end(&sender, ending, stream.tell(&sender)).await;
    });
    Ok(Some(ReceiverStream::new(receiver)))
}

/// Returns whether only the reader of the memory can serve a request.
fn is_only_in_memory(request: &v1::StreamTracepointEventsRequest) -> bool {
    !request.instance.is_empty() || request.buffered || request.no_follow || request.records
}

/// Returns the reader of a request. `Unspecified` is the memory if the rings are found there,
/// otherwise the agent.
fn choose(
    request: &v1::StreamTracepointEventsRequest,
    had_agent: bool,
) -> Result<v1::TraceSource, TraceError> {
    let source = trace_source(request.source)?;
    let only_in_memory = is_only_in_memory(request);
    match source {
        v1::TraceSource::Agent if only_in_memory => {
            let message = "the agent streams only new events of its own instance, without records; set the source to memory to read another instance, buffered events or records";
            return Err(invalid("source", message));
        }
        v1::TraceSource::Agent => return Ok(source),
        // An agent that is away for a moment comes back, and a listener waits for the events that
        // clients have armed in the agent's instance.
        v1::TraceSource::Unspecified if !only_in_memory && (request.arm_and_fire || had_agent) => {
            return Ok(v1::TraceSource::Agent);
        }
        v1::TraceSource::Memory | v1::TraceSource::Unspecified => {}
    }
    let of_agent = [
        ("arm_and_fire", request.arm_and_fire),
        ("filter", !request.filter.is_empty()),
        ("trigger", !request.trigger.is_empty()),
        ("even_if_others", request.even_if_others),
    ];
    match of_agent.into_iter().find(|(_, given)| *given) {
        None => Ok(source),
        Some((field, _)) => {
            let message = "applies only to events that the agent arms; in memory, read the events that the guest itself records, and leave it out";
            Err(invalid(field, message))
        }
    }
}

/// Returns the source that a request names.
///
/// # Errors
/// There is no source of this number.
pub fn trace_source(source: i32) -> Result<v1::TraceSource, TraceError> {
    v1::TraceSource::try_from(source).map_err(|_| {
        let message = format!("unknown source {source}; give memory or agent");
        invalid("source", message)
    })
}

/// Checks the name of an instance in the guest.
///
/// # Errors
/// The name is too long.
pub fn check_instance(instance: &str) -> Result<(), TraceError> {
    if instance.len() > MAX_INSTANCE_BYTES {
        let message = format!("is longer than {MAX_INSTANCE_BYTES} bytes");
        return Err(invalid("instance", message));
    }
    Ok(())
}

/// Returns an INVALID_ARGUMENT about a field.
pub fn invalid(field: &'static str, message: impl Into<String>) -> TraceError {
    TraceError::Invalid {
        field,
        message: message.into(),
    }
}

#[cfg(test)]
mod tests {
    use v1::TraceSource::{Agent, Memory, Unspecified};

    use super::*;

    fn request(source: v1::TraceSource) -> v1::StreamTracepointEventsRequest {
        v1::StreamTracepointEventsRequest {
            source: source.into(),
            ..Default::default()
        }
    }

    #[test]
    fn the_default_is_the_agent_once_there_was_one() {
        for (source, had_agent, chosen) in [
            (Unspecified, false, Unspecified),
            (Unspecified, true, Agent),
            (Memory, true, Memory),
            (Agent, false, Agent),
        ] {
            let found = choose(&request(source), had_agent);
            assert_eq!(found.expect("permitted"), chosen, "{source:?}");
        }
        let buffered = v1::StreamTracepointEventsRequest {
            buffered: true,
            ..request(Unspecified)
        };
        assert_eq!(choose(&buffered, true).expect("permitted"), Unspecified);
        let arms = v1::StreamTracepointEventsRequest {
            arm_and_fire: true,
            filter: "prev_pid == 0".to_owned(),
            ..request(Unspecified)
        };
        assert_eq!(choose(&arms, false).expect("permitted"), Agent);
    }

    #[test]
    fn what_the_reader_cannot_do_is_refused() {
        let of = |field: &str, change: fn(&mut v1::StreamTracepointEventsRequest)| {
            let mut request = request(Memory);
            change(&mut request);
            let error = choose(&request, false).expect_err(field).to_string();
            assert!(error.starts_with(&format!("{field}: ")), "{error}");
        };
        of("arm_and_fire", |request| request.arm_and_fire = true);
        of("filter", |request| request.filter = "1".to_owned());
        of("trigger", |request| request.trigger = "1".to_owned());
        of("even_if_others", |request| request.even_if_others = true);
        of("source", |request| request.source = 77);
        of("source", |request| {
            request.set_source(Agent);
            request.buffered = true;
        });
    }
}
