// SPDX-License-Identifier: Apache-2.0
//! Chooses the reader of a stream of events, and streams those that are read in the guest's memory.

use std::sync::Arc;

use patchbay_proto::v1;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::ending::until_end;
use super::guests::ServedGuest;
use crate::trace::TraceError;
use crate::trace::memory::{MemoryStream, Wanted};
use crate::trace::select;

const DEFAULT_EVENTS_PER_SECOND: u32 = 50_000;
const MAX_EVENTS_PER_SECOND: u32 = 1_000_000;

type Events = ReceiverStream<Result<v1::StreamTracepointEventsResponse, Status>>;

/// Returns the flood limit of a request.
pub fn events_per_second(request: &v1::StreamTracepointEventsRequest) -> u32 {
    match request.max_events_per_second {
        0 => DEFAULT_EVENTS_PER_SECOND,
        limit => limit.min(MAX_EVENTS_PER_SECOND),
    }
}

/// Opens a stream of events that are read in the guest's memory. Returns `None` if the agent is to
/// read them.
///
/// # Errors
/// The request is wrong, or the memory is to be read and cannot be.
pub async fn memory(
    guest: &Arc<ServedGuest>,
    request: &v1::StreamTracepointEventsRequest,
) -> Result<Option<Events>, TraceError> {
    let source = v1::TraceSource::try_from(request.source).map_err(|_| {
        let message = format!("unknown source {}; give memory or agent", request.source);
        invalid("source", message)
    })?;
    let only_in_memory = !request.instance.is_empty() || request.buffered;
    let is_agents = request.arm_and_fire || guest.tracer.link.peer().is_ok();
    match source {
        v1::TraceSource::Memory => {}
        v1::TraceSource::Agent if only_in_memory => {
            let message = "the agent reads only its own instance, from the end; give the source memory to read another instance, or buffered events";
            return Err(invalid("source", message));
        }
        v1::TraceSource::Agent => return Ok(None),
        v1::TraceSource::Unspecified if is_agents && !only_in_memory => return Ok(None),
        v1::TraceSource::Unspecified => {}
    }
    if request.arm_and_fire {
        let message = "only the agent can arm events; in memory, read the events that the guest itself records: leave arm_and_fire out";
        return Err(invalid("arm_and_fire", message));
    }
    let wanted = Wanted {
        instance: request.instance.clone(),
        patterns: select::Wanted::parse(request.patterns.clone(), false)?
            .patterns()
            .clone(),
        events_per_second: events_per_second(request),
        buffered: request.buffered,
    };
    let keys = Arc::clone(&guest.keys);
    let opened = MemoryStream::begin(keys, guest.tracer.link.clone(), wanted).await;
    let stream = match opened {
        Ok(stream) => stream,
        Err(error) if source == v1::TraceSource::Unspecified && !only_in_memory => {
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

fn invalid(field: &'static str, message: impl Into<String>) -> TraceError {
    TraceError::Invalid {
        field,
        message: message.into(),
    }
}
