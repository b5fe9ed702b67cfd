// SPDX-License-Identifier: Apache-2.0
//! Identifies the person for whom a controller makes a call.
//!
//! A controller sends an assertion with the call ([`patchbay_access::assertion`]). If the assertion
//! is not accepted, the call is refused. Otherwise it would be made with the full rights of the
//! controller, and recorded without the person. Only calls that end claims are still carried out.

use std::time::SystemTime;

use patchbay_access::assertion;
use patchbay_access::policy::Question;
use patchbay_proto::ASSERTION_METADATA;
use patchbay_proto::fleet::v1::Assertion;
use patchbay_proto::methods::Effect;
use prost::Message;
use tonic::Status;

use super::allowed::{Allowed, decode};
use super::call::Call;
use super::give_back::gives_back;
use super::node::{Node, question_of};
use super::status;

/// The fields of a SetClaimsRequest that an assertion repeats. The monitor decodes them in the same
/// way as the daemon.
#[derive(Clone, PartialEq, Message)]
struct Claimed {
    #[prost(string, tag = "2")]
    owner: String,
    #[prost(uint64, tag = "3")]
    generation: u64,
    #[prost(bool, tag = "4")]
    validate_only: bool,
    #[prost(string, tag = "6")]
    intent_digest: String,
}

impl Node {
    /// Sets the person of the call, if the caller asserts one. Records a refusal in the audit log.
    pub(super) fn identify_person(&self, call: &mut Call, guest: &str) -> Result<(), Status> {
        let asserted = self.asserted(call, guest);
        let person = asserted.or_else(|why| {
            let (principal, method) = (call.principal(), call.method);
            self.audit.denied(principal, "", method.path, guest, &why);
            // Ending claims needs no person, and a wrong clock must not prevent an undo.
            if gives_back(call) {
                return Ok(None);
            }
            self.metrics.denied(method.name);
            Err(status::not_believed(principal, &why))
        })?;
        call.person = person;
        Ok(())
    }

    fn asserted(&self, call: &Call, guest: &str) -> Result<Option<String>, String> {
        let mut values = call.assertions.get_all_bin(ASSERTION_METADATA).iter();
        let encoded = match (values.next(), values.next()) {
            (None, _) => return Ok(None),
            (Some(value), None) => value,
            (Some(_), Some(_)) => return Err("was sent more than once; send it once".to_owned()),
        };
        if call.method.effect != Effect::Claims {
            return Err("is valid only with SetClaims; leave it out".to_owned());
        }
        let policy = self.admission.policy().current();
        if !policy.may_assert(call.principal(), guest) {
            let why = "comes from a principal that no rule of the policy allows to name persons; add \
                       `may_assert: true` to a rule for it, or leave the assertion out";
            return Err(why.to_owned());
        }
        let encoded = encoded.to_bytes().map_err(|_| "is not base64".to_owned())?;
        let read = assertion::read(&encoded, &call.identity, SystemTime::now());
        let assertion = read.map_err(|error| error.to_string())?;
        match self.differs(call, &assertion) {
            Some(field) => Err(format!("is for another {field}; sign one for each call")),
            None => Ok(Some(assertion.person)),
        }
    }

    /// Returns the field in which the call differs from the assertion; `None` if they agree.
    fn differs(&self, call: &Call, assertion: &Assertion) -> Option<&'static str> {
        let Ok(claimed) = decode::<Claimed>(&call.message) else {
            return Some("request");
        };
        // An unsigned assertion comes directly from the peer on this host's unix socket, so it
        // cannot have been made for another host.
        let is_remote = call.identity.certificate.is_some();
        let differences = [
            ("host", is_remote && !self.admission.is_for(&assertion.host)),
            ("guest", assertion.guest != call.guest),
            ("owner", assertion.owner != claimed.owner),
            ("generation", assertion.generation != claimed.generation),
            (
                "kind of call",
                assertion.validate_only != claimed.validate_only,
            ),
            (
                "set of claims",
                assertion.intent_digest != claimed.intent_digest,
            ),
        ];
        let mut differences = differences.into_iter();
        differences.find_map(|(what, differs)| differs.then_some(what))
    }

    /// Returns the call's person and the permission for the call; `None` if the policy does not
    /// limit the person. If `counts` is set, the call is counted as a change by the person.
    pub(super) fn bounds<'c>(
        &self,
        call: &'c Call,
        guest: &str,
        counts: bool,
    ) -> Result<Option<(&'c str, Allowed)>, String> {
        let policy = self.admission.policy();
        let Some(person) = call.person.as_deref() else {
            return Ok(None);
        };
        // Everyone who may abort a rollout can end its claims on every host.
        if !policy.current().bounds(person) || gives_back(call) {
            return Ok(None);
        }
        let guests = [guest];
        let question = Question {
            principal: person,
            ..question_of(call, &guests)
        };
        let permission = policy.permission(&question, &guests, counts);
        let permission =
            permission.map_err(|why| format!("the call is made for {person}, and {why}"))?;
        Ok(Some((person, Allowed::keys(permission, call.role))))
    }
}
