// SPDX-License-Identifier: Apache-2.0
//! The state that all calls share, and the decisions about them.

use std::collections::BTreeSet;
use std::time::Duration;

use patchbay_access::audit::Audit;
use patchbay_access::listen::admission::Admission;
use patchbay_access::policy::{Decision, Question, Role, Want};
use patchbay_proto::methods::Effect;
use patchbay_proto::v1;
use prost::Message;
use prost_reflect::DescriptorPool;
use tonic::Status;

use super::allowed::{Allowed, Keys, decode};
use super::call::Call;
use super::frame::Held;
use super::plans::Plans;
use super::status;
use crate::metrics::Metrics;
use crate::monitors::Directory;

/// The state that all calls share.
pub struct Node {
    /// The guests of the host.
    pub directory: Directory,
    /// The admission of callers, with the policy.
    pub admission: Admission,
    /// The audit log.
    pub audit: Audit,
    /// The metrics.
    pub metrics: Metrics,
    pub(super) descriptors: DescriptorPool,
    pub(super) held: Held,
    pub(super) plans: Plans,
    pub(super) max_stream_age: Duration,
}

impl Node {
    /// Creates the proxy for these guests. A stream is open for at most `max_stream_age`.
    ///
    /// # Errors
    /// The interface's compiled-in description is invalid.
    pub fn new(
        directory: Directory,
        admission: Admission,
        audit: Audit,
        metrics: Metrics,
        max_stream_age: Duration,
    ) -> Result<Self, prost_reflect::DescriptorError> {
        Ok(Self {
            directory,
            admission,
            audit,
            metrics,
            descriptors: DescriptorPool::decode(patchbay_proto::FILE_DESCRIPTOR_SET)?,
            held: Held::default(),
            plans: Plans::default(),
            max_stream_age,
        })
    }
}

impl Node {
    /// Decides whether the caller may call the method on `guest`, without regard to keys.
    pub(super) fn decide_role(&self, call: &Call, guest: &str) -> Result<Allowed, Status> {
        self.decide(call, guest, Want::Nothing)
    }

    /// Decides about the call, and records a denial in the audit log.
    pub(super) fn decide(
        &self,
        call: &Call,
        guest: &str,
        want: Want<'_>,
    ) -> Result<Allowed, Status> {
        let decided = self.question(call, guest, want);
        decided.map_err(|why| self.deny(call, guest, &why))
    }

    /// Records a denial in the audit log, and returns its status.
    pub(super) fn deny(&self, call: &Call, guest: &str, why: &str) -> Status {
        let method = call.method.path;
        self.metrics.denied(call.method.name);
        self.audit.denied(call.principal(), method, guest, why);
        status::denied(call.principal(), method, guest, why)
    }

    /// Decides like [`Self::decide`], without a record of a denial.
    pub(super) fn question(
        &self,
        call: &Call,
        guest: &str,
        want: Want<'_>,
    ) -> Result<Allowed, String> {
        let keys = Keys::from(want);
        match self.decision(call, guest, want) {
            Decision::Allowed { rule, role } => Ok(Allowed::new(rule, role, keys)),
            Decision::Denied { why } => Err(why),
        }
    }

    /// Returns the policy's decision.
    pub(super) fn decision(&self, call: &Call, guest: &str, want: Want<'_>) -> Decision {
        let guests = [guest];
        let question = question_of(call, &guests, want);
        let policy = self.admission.policy().current();
        match call.gives_back {
            true => policy.decide_without_caps(&question),
            false => policy.decide(&question),
        }
    }

    /// Decides about a change again immediately before it is made, and counts it against the caps
    /// of the policy. No cap refuses a call that only gives back what the caller holds.
    pub(super) fn charge(
        &self,
        call: &Call,
        guest: &str,
        allowed: Allowed,
    ) -> Result<Allowed, Status> {
        if is_dry_run(call) {
            return Ok(allowed);
        }
        let decision = allowed.ask(|want| match call.gives_back {
            true => self.decision(call, guest, want),
            false => {
                let guests = [guest];
                let question = question_of(call, &guests, want);
                self.admission.policy().charge(&question, &guests)
            }
        });
        match decision {
            Decision::Allowed { rule, role } => Ok(allowed.again(rule, role)),
            Decision::Denied { why } => Err(self.deny(call, guest, &why)),
        }
    }

    /// Returns whether a rule still allows the call with the role of `allowed`.
    pub(super) fn gives(&self, call: &Call, guest: &str, allowed: &Allowed) -> bool {
        allowed.ask(|want| {
            let policy = self.admission.policy().current();
            policy.gives(&question_of(call, &[guest], want), allowed.role)
        })
    }

    /// Returns whether the caller is an operator of the guest, for any keys. Other callers do not
    /// see addresses of its kernel.
    pub(super) fn sees_addresses(&self, call: &Call, guest: &str) -> bool {
        let decision = self.admission.policy().current().decide(&Question {
            role: Role::Operator,
            ..question_of(call, &[guest], Want::Nothing)
        });
        decision.is_allowed()
    }

    /// Decides about the keys of a call.
    pub(super) fn decide_keys(
        &self,
        call: &Call,
        guest: &str,
        keys: &[String],
    ) -> Result<Allowed, Status> {
        let keys: BTreeSet<&str> = keys.iter().map(String::as_str).collect();
        let keys: Vec<&str> = keys.into_iter().collect();
        self.decide(call, guest, Want::Keys(&keys))
    }
}

/// Returns the policy question whether the caller may make this call.
fn question_of<'a>(call: &'a Call, guests: &'a [&'a str], want: Want<'a>) -> Question<'a> {
    Question {
        principal: call.principal(),
        role: call.role,
        guests,
        want,
    }
}

/// Returns whether the call is a dry run. The monitor parses the field in the same way.
fn is_dry_run(call: &Call) -> bool {
    match call.method.effect {
        Effect::Update => {
            decode::<DryRun>(&call.message).is_ok_and(|request| request.validate_only)
        }
        Effect::Repair => decode::<v1::RepairStaticKeyRequest>(&call.message)
            .is_ok_and(|request| request.validate_only),
        _ => false,
    }
}

/// The field of an UpdateStaticKeysRequest that makes it a dry run.
#[derive(Clone, PartialEq, Message)]
struct DryRun {
    #[prost(bool, tag = "4")]
    validate_only: bool,
}
