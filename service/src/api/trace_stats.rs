// SPDX-License-Identifier: Apache-2.0
//! Returns the figures of a ring buffer, from the agent or from the guest's memory.

use std::sync::Arc;
use std::time::Duration;

use patchbay_proto::agent::v1 as agent;
use patchbay_proto::agent::v1::from_agent::Message as Answer;
use patchbay_proto::agent::v1::to_agent::Message as Question;
use patchbay_proto::v1;

use super::guests::ServedGuest;
use super::requests::blocking;
use super::trace_events::{check_instance, invalid, trace_source};
use crate::trace::TraceError;
use crate::trace::memory;

const PATIENCE: Duration = Duration::from_secs(3);

/// Returns the figures of all clients, and those of the ring buffer.
///
/// # Errors
/// The request is invalid, or only the memory can serve it and the memory cannot be read.
pub async fn stats(
    guest: &Arc<ServedGuest>,
    request: v1::GetTracepointStatsRequest,
) -> Result<v1::GetTracepointStatsResponse, TraceError> {
    let v1::GetTracepointStatsRequest {
        instance, source, ..
    } = request;
    let source = trace_source(source)?;
    check_instance(&instance)?;
    let is_instance = !instance.is_empty();
    let is_memory = match source {
        v1::TraceSource::Agent if is_instance => {
            let message = "the agent has the figures of its own instance only; set the source to memory to read another one";
            return Err(invalid("source", message));
        }
        v1::TraceSource::Agent => false,
        v1::TraceSource::Memory => true,
        v1::TraceSource::Unspecified => is_instance || guest.tracer.link.peer().is_err(),
    };
    let totals = guest.tracer.hub.totals();
    let clock_error = guest.tracer.link.clock().error();
    let mut stats = v1::GetTracepointStatsResponse {
        losses: Some(totals.losses),
        events: totals.events,
        page_bytes: totals.page_bytes,
        streams: u32::try_from(totals.streams).unwrap_or(u32::MAX),
        clock_error: clock_error.and_then(|error| error.try_into().ok()),
        ..Default::default()
    };
    if is_memory {
        let keys = Arc::clone(&guest.keys);
        let read = move || memory::counters(&keys, &instance);
        match blocking("the figures cannot be read", read).await {
            Ok(counters) => {
                let sum = |of: fn(&memory::Counters) -> u64| {
                    let all = counters.iter().map(of);
                    all.fold(0, u64::saturating_add)
                };
                stats.buffered_events = sum(memory::Counters::held);
                stats.buffer_bytes = sum(|cpu| cpu.bytes);
                stats.overwritten_events = sum(|cpu| cpu.overwritten);
                stats.written_events = sum(|cpu| cpu.written);
                stats.consumed_events = sum(|cpu| cpu.consumed);
                stats.set_source(v1::TraceSource::Memory);
                return Ok(stats);
            }
            // The figures of the clients are returned without those of a ring buffer.
            Err(error) if source == v1::TraceSource::Unspecified && !is_instance => {
                tracing::debug!(%error, "the figures are not read in memory");
            }
            Err(error) => return Err(error),
        }
    }
    let question = Question::GetBufferStats(agent::AgentGetBufferStats {});
    match guest.tracer.link.ask(question, PATIENCE).await {
        Ok(Answer::BufferStats(buffer)) => {
            stats.buffered_events = buffer.entries;
            stats.buffer_bytes = buffer.buffer_bytes;
            stats.overwritten_events = buffer.overrun;
        }
        Ok(_) => {}
        Err(error) => stats.stale = error.to_string(),
    }
    stats.set_source(v1::TraceSource::Agent);
    Ok(stats)
}
