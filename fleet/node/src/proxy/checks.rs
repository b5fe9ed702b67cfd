// SPDX-License-Identifier: Apache-2.0
//! Checks calls against the policy and determines how they are forwarded.

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;
use patchbay_access::policy::{Decision, Question, Role, Want};
use patchbay_proto::v1;
use prost::Message;
use tonic::{Code, Status};

use super::call::Call;
use super::{Node, fields, frame, holds, status, tracepoints, updates};
use crate::monitors::Guest;
use patchbay_proto::methods::Effect;

/// The number of the field `updates` in the requests that have it.
const UPDATES: u32 = 2;

/// The rule that allows a call.
#[derive(Clone, Debug)]
pub struct Allowed {
    pub rule: String,
    pub role: Role,
    keys: Keys,
}

/// The keys that the policy checked.
#[derive(Clone, Debug)]
enum Keys {
    Nothing,
    These(Arc<[String]>),
    Any,
}

impl Allowed {
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
        let keys = match want {
            Want::Nothing => Keys::Nothing,
            Want::AnyKeys => Keys::Any,
            Want::Keys(keys) => Keys::These(keys.iter().map(|key| (*key).to_owned()).collect()),
        };
        match self.decision(call, guest, want) {
            Decision::Allowed { rule, role } => Ok(Allowed { rule, role, keys }),
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
            Decision::Allowed { rule, role } => Ok(Allowed {
                rule,
                role,
                ..allowed
            }),
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

    /// Decides about the keys of a call whose role is allowed. May replace the call's message.
    pub(super) async fn check(
        &self,
        call: &mut Call,
        guest: &Guest,
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
        if let Ok(allowed) = self.question(call, &guest.name, Want::AnyKeys) {
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
            Effect::Update => updates::check(self, call, guest, &allowed).await,
            Effect::Prepare => updates::check_prepare(self, call, guest, allowed),
            Effect::Commit => {
                let request: v1::CommitUpdateRequest = decode(&call.message)?;
                let keys = self.plans.keys(&guest.name, &request.plan_id);
                let keys: Arc<[String]> = keys.ok_or_else(|| plan_not_found(&request.plan_id))?;
                self.decide_keys(call, &guest.name, &keys)
                    .map(Forward::Call)
            }
            Effect::Holds => {
                let keys = holds::keys(call, guest, &allowed).await?;
                self.decide_keys(call, &guest.name, &keys)
                    .map(Forward::Call)
            }
            Effect::Repair => {
                let request: v1::RepairStaticKeyRequest = decode(&call.message)?;
                self.decide_keys(call, &guest.name, &[request.name])
                    .map(Forward::Call)
            }
            Effect::Arm | Effect::Armed | Effect::Stream => {
                let keys = tracepoints::name(call, guest, &allowed).await?;
                self.decide_keys(call, &guest.name, &keys)
                    .map(Forward::Call)
            }
            Effect::Read | Effect::Guest | Effect::Discard => Ok(Forward::Call(allowed)),
        }
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

fn plan_not_found(id: &str) -> Status {
    let id: String = id.chars().take(128).collect();
    let message = format!(
        "the keys of plan {id:?} are not known to this host: it was prepared elsewhere, or before the host's daemon started; prepare it again"
    );
    status::status(Code::NotFound, "PLAN_NOT_FOUND", message)
}

/// Decodes a request.
pub fn decode<M: Message + Default>(message: &Bytes) -> Result<M, Status> {
    M::decode(message.clone()).map_err(|error| {
        status::invalid("request", &format!("the request cannot be read: {error}"))
    })
}

/// The fields of an answer that report the cost of a change.
#[derive(Clone, PartialEq, Message)]
struct Flip {
    #[prost(message, optional, tag = "4")]
    report: Option<v1::FlipReport>,
}

#[derive(Clone, PartialEq, Message)]
struct TracepointFlip {
    #[prost(message, optional, tag = "2")]
    report: Option<v1::FlipReport>,
}

/// Records the pause of a change in the metrics.
pub fn count_flip(node: &Node, effect: Effect, answer: &Bytes) {
    let Some(message) = frame::unframed(answer) else {
        return;
    };
    let report = match effect {
        Effect::Update | Effect::Commit | Effect::Holds => {
            Flip::decode(message).ok().and_then(|flip| flip.report)
        }
        Effect::Arm | Effect::Armed => TracepointFlip::decode(message)
            .ok()
            .and_then(|flip| flip.report),
        _ => None,
    };
    if let Some(report) = report {
        count_report(node, &report);
    }
}

/// Records the pause in a flip report in the metrics, like [`count_flip`].
pub fn count_report(node: &Node, report: &v1::FlipReport) {
    let times = [report.stop_time, report.patch_time, report.resume_time];
    let seconds = times.iter().flatten().map(|time| {
        let time = std::time::Duration::try_from(*time).unwrap_or_default();
        time.as_secs_f64()
    });
    if report.paused {
        node.metrics.pause(seconds.sum());
    }
    node.metrics.sites(report.sites_patched);
}
