// SPDX-License-Identifier: Apache-2.0
//! What the policy has allowed, and the way in which the call is then forwarded.

use std::sync::Arc;

use bytes::Bytes;
use patchbay_access::policy::{Role, Want};
use prost::Message;
use tonic::Status;

use super::status;

/// The rule that allows a call.
#[derive(Clone, Debug)]
pub struct Allowed {
    pub rule: String,
    pub role: Role,
    keys: Keys,
}

/// The keys that the policy checked.
#[derive(Clone, Debug)]
pub enum Keys {
    Nothing,
    These(Arc<[String]>),
    Any,
}

impl From<Want<'_>> for Keys {
    fn from(want: Want<'_>) -> Self {
        match want {
            Want::Nothing => Self::Nothing,
            Want::AnyKeys => Self::Any,
            Want::Keys(keys) => Self::These(keys.iter().map(|key| (*key).to_owned()).collect()),
        }
    }
}

impl Allowed {
    /// Returns the permission of a rule for what was asked.
    pub fn new(rule: String, role: Role, keys: Keys) -> Self {
        Self { rule, role, keys }
    }

    /// Returns the permission of another rule for the same question.
    pub fn again(self, rule: String, role: Role) -> Self {
        Self { rule, role, ..self }
    }

    /// Repeats the checked question, for a second check.
    pub fn ask<T>(&self, ask: impl FnOnce(Want<'_>) -> T) -> T {
        match &self.keys {
            Keys::Nothing => ask(Want::Nothing),
            Keys::Any => ask(Want::AnyKeys),
            Keys::These(keys) => {
                let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
                ask(Want::Keys(&keys))
            }
        }
    }
}

/// A plan whose keys were checked.
pub struct Plan {
    pub id: String,
    pub digest: String,
    pub keys: Vec<String>,
}

/// The way in which a call is forwarded.
pub enum Forward {
    /// The call is forwarded unchanged.
    Call(Allowed),
    /// The commit of this plan replaces the call.
    Plan(Allowed, Plan),
    /// The change is prepared, and the keys of the plan are checked before the client gets it.
    Prepare(Allowed),
}

/// Decodes a request.
pub fn decode<M: Message + Default>(message: &Bytes) -> Result<M, Status> {
    M::decode(message.clone()).map_err(|error| {
        status::invalid("request", &format!("the request cannot be read: {error}"))
    })
}
