// SPDX-License-Identifier: Apache-2.0
//! Identifies the caller of a method, limits responses to what it may see, and creates errors.

use std::collections::HashMap;
use std::sync::Arc;

use patchbay_access::addresses::hide_in_string;
use patchbay_access::identity::Identity;
use patchbay_access::listen::Peer;
use patchbay_access::listen::admission::Admission;
use patchbay_access::policy::Policy;
use patchbay_proto::ERROR_DOMAIN;
use patchbay_proto::fleet::v1;
use tonic::{Code, Request, Status};
use tonic_types::{ErrorDetails, StatusExt};

use crate::authority::{Refused, may_view, operates, terms};
use crate::controller::Controller;
use crate::rollout::Rollout;
use crate::runner::NoAnswer;
use crate::sight::Sight;
use crate::view;

/// A caller that the policy names, and the policy that is in force when the call begins.
pub struct Caller {
    pub identity: Arc<Identity>,
    policy: Arc<Policy>,
}

impl Caller {
    /// Returns the caller of a request.
    ///
    /// # Errors
    /// UNAUTHENTICATED if the caller's certificate is no longer accepted, PERMISSION_DENIED if the
    /// caller may see nothing.
    pub fn of<T>(admission: &Admission, request: &Request<T>) -> Result<Self, Status> {
        let peer = request.extensions().get::<Peer>();
        let peer = peer.ok_or_else(|| Status::internal("the connection has no peer"))?;
        check(admission, &peer.identity)?;
        Ok(Self::new(admission, Arc::clone(&peer.identity)))
    }

    /// Returns the caller with the policy as it is now.
    pub fn new(admission: &Admission, identity: Arc<Identity>) -> Self {
        let policy = admission.policy().current();
        Self { identity, policy }
    }

    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    pub fn principal(&self) -> &str {
        &self.identity.principal
    }

    pub fn sight(&self) -> Sight<'_> {
        Sight::new(&self.policy, self.principal())
    }

    /// Converts a rollout, with or without its guests, and leaves out what the caller may not see.
    pub fn shown(&self, rollout: &Rollout, guests: bool) -> v1::Rollout {
        let sight = self.sight();
        let terms = terms(&self.policy, rollout);
        let mut shown = view::rollout(rollout, guests, &sight, &terms);
        if !sight.sees_all {
            let hidden = sight.hidden(rollout);
            shown.message = hidden.shown(&shown.message);
            for gate in &mut shown.gates {
                gate.message = hidden.shown(&gate.message);
            }
            let timeline = &mut shown.timeline;
            timeline.retain(|entry| !hidden.is_named_in(&entry.text));
        }
        if !self.sees_addresses(rollout) {
            hide_in_string(&mut shown.message);
            for gate in &mut shown.gates {
                hide_in_string(&mut gate.message);
            }
            for guest in &mut shown.guests {
                hide_in_string(&mut guest.message);
            }
            for entry in &mut shown.timeline {
                hide_in_string(&mut entry.text);
            }
        }
        shown
    }

    /// Returns whether the caller may see addresses of the guests' kernels, which errors of the
    /// hosts may contain.
    pub fn sees_addresses(&self, rollout: &Rollout) -> bool {
        operates(&self.policy, self.principal(), rollout)
    }

    /// Creates the error for a refused command.
    pub fn refused(&self, rollout: &Rollout, refused: &Refused) -> Status {
        let why = self.sight().hidden(rollout).shown(&refused.to_string());
        match refused {
            Refused::Denied(_) => {
                let name = &rollout.header().name;
                self.denied(&format!("rollout {name}: {why}"))
            }
            Refused::Unapproved(_) | Refused::NotLegal(_) => Status::failed_precondition(why),
            Refused::Audit(_) | Refused::NoAnswer(NoAnswer::NotSent) => Status::unavailable(why),
            Refused::NoAnswer(NoAnswer::Lost) => {
                status(Code::Aborted, "OUTCOME_UNKNOWN", why, HashMap::new())
            }
        }
    }

    /// Creates the error for a call that the policy does not allow.
    pub fn denied(&self, why: &str) -> Status {
        denied(self.principal(), why)
    }
}

/// Checks that the caller's certificate is accepted, and that it may see anything at all.
///
/// # Errors
/// UNAUTHENTICATED or PERMISSION_DENIED.
pub fn check(admission: &Admission, identity: &Identity) -> Result<(), Status> {
    let principal = &identity.principal;
    admission.check(identity).map_err(|refusal| {
        let message = format!("{principal}: {refusal}");
        status(
            Code::Unauthenticated,
            "CERTIFICATE_REFUSED",
            message,
            HashMap::new(),
        )
    })?;
    let may_view = may_view(&admission.policy().current(), principal, None);
    may_view.map_err(|why| denied(principal, &why))
}

fn denied(principal: &str, why: &str) -> Status {
    let message =
        format!("{principal} may not do this: {why}; ask whoever keeps the controller's policy");
    let code = Code::PermissionDenied;
    status(code, "ROLE_MISSING", message, HashMap::new())
}

/// Creates the error of a replica that does not lead. Its details contain the leader's address.
pub fn not_leading(controller: &Controller) -> Status {
    let (why, leader) = controller.why_not_leading();
    let leader = leader.map(|address| ("leader".to_owned(), address));
    let metadata = leader.into_iter().collect();
    status(Code::Unavailable, "NOT_LEADER", why, metadata)
}

fn status(
    code: Code,
    reason: &str,
    message: impl Into<String>,
    metadata: HashMap<String, String>,
) -> Status {
    let details = ErrorDetails::with_error_info(reason, ERROR_DOMAIN, metadata);
    Status::with_error_details(code, message, details)
}
