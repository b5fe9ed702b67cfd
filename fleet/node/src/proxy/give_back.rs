// SPDX-License-Identifier: Apache-2.0
//! Recognizes calls that only release what the caller holds. They are not counted as changes of a
//! guest. The monitor decides for itself whether a cap applies.

use bytes::Bytes;
use patchbay_proto::v1::{DisarmTracepointsRequest, KeyOp, ReleaseHoldsRequest};
use prost::Message;

use super::call::Call;

/// The fields of an UpdateStaticKeysRequest that determine whether it only releases what the caller
/// holds. Decoding only these fields bounds the memory.
#[derive(Clone, PartialEq, Message)]
struct UpdateFields {
    #[prost(message, repeated, tag = "2")]
    updates: Vec<OpField>,
    #[prost(bool, tag = "6")]
    force: bool,
}

#[derive(Clone, PartialEq, Message)]
struct OpField {
    #[prost(enumeration = "KeyOp", tag = "2")]
    op: i32,
}

/// The field of a SetClaimsRequest that determines whether it only releases claims.
#[derive(Clone, PartialEq, Message)]
struct Claims {
    #[prost(message, repeated, tag = "7")]
    claims: Vec<()>,
}

/// Returns whether the updates only drop references of the caller. Without `force`, this is true
/// for DEC and DISABLE.
fn drops(updates: &[OpField], force: bool) -> bool {
    let is_drop = |change: &OpField| matches!(change.op(), KeyOp::Dec | KeyOp::Disable);
    !force && !updates.is_empty() && updates.iter().all(is_drop)
}

fn decoded<M: Message + Default>(message: &Bytes) -> Option<M> {
    M::decode(message.clone()).ok()
}

/// Returns whether a call only releases what its caller holds.
pub fn gives_back(call: &Call) -> bool {
    let message = &call.message;
    match call.method.name {
        "UpdateStaticKeys" => decoded::<UpdateFields>(message)
            .is_some_and(|request| drops(&request.updates, request.force)),
        "ReleaseHolds" => {
            decoded::<ReleaseHoldsRequest>(message).is_some_and(|request| !request.force)
        }
        "SetClaims" => decoded::<Claims>(message).is_some_and(|request| request.claims.is_empty()),
        "DisarmTracepoints" => {
            decoded::<DisarmTracepointsRequest>(message).is_some_and(|request| !request.force)
        }
        _ => false,
    }
}
