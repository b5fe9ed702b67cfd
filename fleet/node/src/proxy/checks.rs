// SPDX-License-Identifier: Apache-2.0
//! Checks the keys of calls against the policy and determines how the calls are forwarded.

use std::sync::Arc;

use patchbay_access::policy::Want;
use patchbay_proto::methods::Effect;
use patchbay_proto::v1;
use tonic::{Code, Status};

use super::allowed::{Allowed, Forward, decode};
use super::call::Call;
use super::node::Node;
use super::{fields, holds, status, tracepoints, updates};
use crate::monitors::HostedGuest;

/// The number of the field `updates` in the requests that have it.
const UPDATES: u32 = 2;

/// Decides about the keys of a call whose role is allowed. May replace the call's message.
pub async fn check(
    node: &Node,
    call: &mut Call,
    guest: &HostedGuest,
    allowed: Allowed,
) -> Result<Forward, Status> {
    let effect = call.method.effect;
    let touches_keys = match effect {
        Effect::Read | Effect::Guest | Effect::Discard => false,
        Effect::Stream => call.changes(),
        _ => true,
    };
    if !touches_keys {
        return Ok(Forward::Call(allowed));
    }
    if let Ok(allowed) = node.question(call, &guest.name, Want::AnyKeys) {
        // The commit must know whether the plan counts against the caps.
        if effect == Effect::Prepare && call.gives_back {
            fields::weigh(&call.message, Some(UPDATES))?;
            return Ok(Forward::Prepare(allowed));
        }
        return Ok(Forward::Call(allowed));
    }
    let nested = matches!(effect, Effect::Update | Effect::Prepare).then_some(UPDATES);
    fields::weigh(&call.message, nested)?;
    match effect {
        Effect::Update => updates::check(node, call, guest, &allowed).await,
        Effect::Prepare => updates::check_prepare(node, call, guest, allowed),
        Effect::Commit => {
            let request: v1::CommitUpdateRequest = decode(&call.message)?;
            let keys = node.plans.keys(&guest.name, &request.plan_id);
            let keys: Arc<[String]> = keys.ok_or_else(|| plan_not_found(&request.plan_id))?;
            node.decide_keys(call, &guest.name, &keys)
                .map(Forward::Call)
        }
        Effect::Holds => {
            let keys = holds::keys(call, guest, &allowed).await?;
            node.decide_keys(call, &guest.name, &keys)
                .map(Forward::Call)
        }
        Effect::Repair => {
            let request: v1::RepairStaticKeyRequest = decode(&call.message)?;
            node.decide_keys(call, &guest.name, &[request.name])
                .map(Forward::Call)
        }
        Effect::Arm | Effect::Armed | Effect::Stream => {
            let keys = tracepoints::name(call, guest, &allowed).await?;
            node.decide_keys(call, &guest.name, &keys)
                .map(Forward::Call)
        }
        Effect::Read | Effect::Guest | Effect::Discard => Ok(Forward::Call(allowed)),
    }
}

fn plan_not_found(id: &str) -> Status {
    let id: String = id.chars().take(128).collect();
    let message = format!(
        "the keys of plan {id:?} are not known to this host: it was prepared elsewhere, or before the host's daemon started; prepare it again"
    );
    status::status(Code::NotFound, "PLAN_NOT_FOUND", message)
}
