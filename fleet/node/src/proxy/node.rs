// SPDX-License-Identifier: Apache-2.0
//! The state that all calls share, and the decisions about them.

use std::time::Duration;

use patchbay_access::audit::Audit;
use patchbay_access::listen::admission::Admission;
use patchbay_access::policy::{Decision, Question, Role, Want};
use patchbay_proto::methods::Effect;
use patchbay_proto::v1;
use prost::Message;
use prost_reflect::DescriptorPool;
use tonic::Status;

use super::allowed::{Allowed, decode};
use super::call::Call;
use super::frame::Held;
use super::give_back::gives_back;
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
            max_stream_age,
        })
    }
}

impl Node {
    /// Decides whether the caller may call the method on `guest`, whichever keys the call concerns.
    /// Records a denial in the audit log.
    pub(super) fn decide_role(&self, call: &Call, guest: &str) -> Result<Allowed, Status> {
        let decided = self.question(call, guest);
        decided.map_err(|why| self.deny(call, guest, &why))
    }

    /// Records a denial in the audit log, and returns its status.
    pub(super) fn deny(&self, call: &Call, guest: &str, why: &str) -> Status {
        let method = call.method.path;
        self.metrics.denied(call.method.name);
        let person = call.person.as_deref().unwrap_or_default();
        self.audit
            .denied(call.principal(), person, method, guest, why);
        status::denied(call.principal(), method, guest, why)
    }

    /// Decides like [`Self::decide_role`], but does not record a denial.
    pub(super) fn question(&self, call: &Call, guest: &str) -> Result<Allowed, String> {
        let policy = self.admission.policy().current();
        match policy.decide(&question_of(call, &[guest])) {
            Decision::Allowed { rule, role } => Ok(Allowed::by(rule, role)),
            Decision::Denied { why } => Err(why),
        }
    }

    /// Decides about a call immediately before it is forwarded, and counts a change against the
    /// caps of the policy. Only the monitor can determine which keys a call changes, so the monitor
    /// applies the rules that limit keys.
    pub(super) fn authorise(
        &self,
        call: &Call,
        guest: &str,
        allowed: Allowed,
    ) -> Result<Allowed, Status> {
        let counts = call.changes() && !is_dry_run(call) && !gives_back(call);
        let decided = if call.uses_keys() {
            self.permission(call, guest, counts)
        } else if counts {
            let guests = [guest];
            let policy = self.admission.policy();
            match policy.charge(&question_of(call, &guests), &guests) {
                Decision::Allowed { rule, role } => Ok(Allowed::by(rule, role)),
                Decision::Denied { why } => Err(why),
            }
        } else {
            Ok(allowed)
        };
        decided.map_err(|why| self.deny(call, guest, &why))
    }

    /// Returns the keys that a call may change. Both its caller and the person for whom the call is
    /// made must be allowed to change them.
    fn permission(&self, call: &Call, guest: &str, counts: bool) -> Result<Allowed, String> {
        // A call that the person may not make must not be counted for the caller.
        let mut bounds = self.bounds(call, guest, false)?;
        let guests = [guest];
        let policy = self.admission.policy();
        let permission = policy.permission(&question_of(call, &guests), &guests, counts)?;
        let allowed = Allowed::keys(permission, call.role);
        if counts {
            bounds = self.bounds(call, guest, true)?;
        }
        Ok(match bounds {
            Some((person, bounds)) => allowed.bounded(person, bounds),
            None => allowed,
        })
    }

    /// Returns whether the same stream could be opened now.
    pub(super) fn reopen(&self, call: &Call, guest: &str, allowed: &Allowed) -> Reopened {
        if !allowed.keys.is_empty() {
            return match self.permission(call, guest, false) {
                Ok(now) if now.is_like(allowed) => Reopened::Same,
                Ok(now) => Reopened::Different(now.role),
                Err(why) => Reopened::Denied(why),
            };
        }
        let guests = [guest];
        let question = Question {
            want: match call.uses_keys() {
                true => Want::AnyKeys,
                false => Want::Nothing,
            },
            ..question_of(call, &guests)
        };
        // Any rule with this role is sufficient, because the caps of earlier rules may have been
        // reached when a later rule allowed the stream.
        let policy = self.admission.policy().current();
        match policy.decide(&question) {
            Decision::Allowed { .. } if policy.gives(&question, allowed.role) => Reopened::Same,
            Decision::Allowed { role, .. } => Reopened::Different(role),
            Decision::Denied { why } => Reopened::Denied(why),
        }
    }

    /// Returns whether the caller is an operator of the guest, for any keys. Other callers do not
    /// see addresses of the guest's kernel.
    pub(super) fn sees_addresses(&self, call: &Call, guest: &str) -> bool {
        let decision = self.admission.policy().current().decide(&Question {
            role: Role::Operator,
            ..question_of(call, &[guest])
        });
        decision.is_allowed()
    }
}

/// The result of the check whether a stream could be opened again.
pub enum Reopened {
    /// The stream could be opened again with the same rights.
    Same,
    /// The stream could be opened again with other rights: with this role, or for other keys.
    Different(Role),
    /// The stream could not be opened again, for this reason.
    Denied(String),
}

/// Returns the policy question whether the caller may make this call.
pub(super) fn question_of<'a>(call: &'a Call, guests: &'a [&'a str]) -> Question<'a> {
    Question {
        principal: call.principal(),
        role: call.role,
        guests,
        want: Want::Nothing,
    }
}

/// Returns whether the call is a dry run. The monitor parses the field in the same way.
fn is_dry_run(call: &Call) -> bool {
    match call.method.effect {
        Effect::Update | Effect::Claims => {
            decode::<DryRun>(&call.message).is_ok_and(|request| request.validate_only)
        }
        Effect::Repair => decode::<v1::RepairStaticKeyRequest>(&call.message)
            .is_ok_and(|request| request.validate_only),
        _ => false,
    }
}

/// The field of an UpdateStaticKeysRequest, or of a SetClaimsRequest, that makes it a dry run.
#[derive(Clone, PartialEq, Message)]
struct DryRun {
    #[prost(bool, tag = "4")]
    validate_only: bool,
}
