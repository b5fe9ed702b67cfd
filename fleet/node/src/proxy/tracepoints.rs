// SPDX-License-Identifier: Apache-2.0
//! Resolves tracepoints that patterns select, where the policy limits keys.
//!
//! Changes of tracepoints cannot be prepared. So the patterns are replaced by the names of the
//! events that they select now, and the policy decides about the keys of these events. An event
//! that is added later is not part of the call.

use patchbay_proto::pages::Pages;
use patchbay_proto::v1;
use patchbay_proto::v1::tracepoints_service_client::TracepointsServiceClient;
use prost::Message;
use static_keys::{MAX_PATTERNS, Patterns};
use tonic::{Code, Status};

use super::allowed::{Allowed, decode};
use super::call::Call;
use super::frame::MAX_ANSWER_BYTES;
use super::status;
use crate::monitors::HostedGuest;
use patchbay_proto::methods::Effect;

/// The characters that have a meaning in a pattern.
const METACHARACTERS: [char; 4] = ['*', '?', '[', '!'];

/// Replaces the call's patterns by the names of events, and returns the keys of the events.
pub async fn name(
    call: &mut Call,
    guest: &HostedGuest,
    allowed: &Allowed,
) -> Result<Vec<String>, Status> {
    let armed_only = call.method.effect == Effect::Armed;
    let texts = patterns(call)?;
    let patterns =
        Patterns::parse(&texts).map_err(|error| status::invalid("patterns", &error.to_string()))?;
    if texts.is_empty() {
        return Err(status::invalid(
            "patterns",
            "the request has no patterns; give at least one",
        ));
    }
    let mut events = vec![];
    let mut keys = vec![];
    for tracepoint in list(call, guest, allowed, texts, armed_only).await? {
        let (system, event) = static_keys::split_name(&tracepoint.name);
        // The monitor does the same. Globs skip events that cannot be parked, but literal names do
        // not.
        if !armed_only && !tracepoint.refused.is_empty() && !patterns.name(system, event) {
            continue;
        }
        if tracepoint.name.contains(METACHARACTERS) {
            let message = format!(
                "event {:?} has a name that could be read as a pattern, so the policy cannot decide about it",
                tracepoint.name
            );
            return Err(status::status(
                Code::FailedPrecondition,
                "TRACEPOINT_REFUSED",
                message,
            ));
        }
        // If the key is empty, the monitor refuses the event. A call that a rule without key globs
        // allows does not reach this point.
        keys.push(tracepoint.key);
        events.push(tracepoint.name);
    }
    if events.len() > MAX_PATTERNS {
        let message = format!(
            "the patterns select {} events, and a rule that limits keys allows {MAX_PATTERNS} in one call; split it",
            events.len()
        );
        return Err(status::invalid("patterns", &message));
    }
    if events.is_empty() {
        return Err(if armed_only {
            let message = "no armed event matches the patterns; arm it first, or list the events";
            status::status(Code::FailedPrecondition, "NOT_ARMED", message)
        } else {
            let message = "no event matches the patterns; list the tracepoints of the guest";
            status::status(Code::NotFound, "EVENT_NOT_FOUND", message)
        });
    }
    replace(call, events)?;
    Ok(keys)
}

async fn list(
    call: &Call,
    guest: &HostedGuest,
    allowed: &Allowed,
    patterns: Vec<String>,
    armed_only: bool,
) -> Result<Vec<v1::Tracepoint>, Status> {
    let client = TracepointsServiceClient::new(guest.monitor.channel());
    let mut client = client.max_decoding_message_size(MAX_ANSWER_BYTES + 1024);
    let mut found = vec![];
    let mut page_token = String::new();
    let mut pages = Pages::of("tracepoints");
    loop {
        let request = v1::ListTracepointsRequest {
            guest: guest.name.clone(),
            patterns: patterns.clone(),
            armed_only,
            page_token,
            ..Default::default()
        };
        let page = client.list_tracepoints(call.ask(request, allowed)?).await?;
        let page = page.into_inner();
        let next = pages.next(&page, &page.next_page_token);
        let next = next.map_err(|error| status::endless(&error))?;
        found.extend(page.tracepoints);
        match next {
            Some(token) => page_token = token,
            None => return Ok(found),
        }
    }
}

fn patterns(call: &Call) -> Result<Vec<String>, Status> {
    let message = &call.message;
    Ok(match call.method.name {
        "ArmTracepoints" => decode::<v1::ArmTracepointsRequest>(message)?.patterns,
        "FireTracepoints" => decode::<v1::FireTracepointsRequest>(message)?.patterns,
        "ParkTracepoints" => decode::<v1::ParkTracepointsRequest>(message)?.patterns,
        "DisarmTracepoints" => decode::<v1::DisarmTracepointsRequest>(message)?.patterns,
        _ => decode::<v1::StreamTracepointEventsRequest>(message)?.patterns,
    })
}

fn replace(call: &mut Call, patterns: Vec<String>) -> Result<(), Status> {
    macro_rules! with_patterns {
        ($request:ident) => {
            v1::$request {
                patterns,
                ..decode::<v1::$request>(&call.message)?
            }
            .encode_to_vec()
        };
    }
    let message = match call.method.name {
        "ArmTracepoints" => with_patterns!(ArmTracepointsRequest),
        "FireTracepoints" => with_patterns!(FireTracepointsRequest),
        "ParkTracepoints" => with_patterns!(ParkTracepointsRequest),
        "DisarmTracepoints" => with_patterns!(DisarmTracepointsRequest),
        _ => with_patterns!(StreamTracepointEventsRequest),
    };
    call.message = message.into();
    Ok(())
}
