// SPDX-License-Identifier: Apache-2.0
//! Hosts that answer with invalid data: the one of a guest, and one that pretends to have all
//! guests.

use std::collections::HashMap;

use patchbay_proto::v1;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use super::network::{Answer, Call, Sent};
use super::world::World;

/// The host that pretends to have all guests. Drivers ask it before the others.
pub const PRETENDER: &str = "a0";

impl World {
    /// Returns the answer that a call gets: an invalid one if the guest's host is such a host.
    pub fn distort(
        &mut self,
        sent: &Sent,
        answer: Result<Answer, Status>,
    ) -> Result<Answer, Status> {
        let name = match &sent.call {
            Call::SetClaims(request) => &request.guest,
            Call::NotMade { guest, .. } => guest,
        };
        let is_liar = |index: usize| {
            let guest = &self.guests[index];
            guest.name == *name && guest.host.as_ref() == Some(&sent.host)
        };
        let pretends = sent.host == PRETENDER;
        // The driver may know an invalid boot of the other host's guest.
        let is_known = self
            .liar
            .is_some_and(|index| self.guests[index].name == *name);
        assert!(
            !pretends || is_known || matches!(sent.call, Call::NotMade { .. }),
            "claims of {name} are sent to a host that does not have the guest"
        );
        if !pretends && !self.liar.is_some_and(is_liar) {
            return answer;
        }
        self.count("invalid answer");
        let boot = ["", "other", "a\nb\u{7f}", &"x".repeat(4_000)][self.rng.usize(0..4)].to_owned();
        let number = [0, 1, 1 << 62, u64::MAX / 2, u64::MAX][self.rng.usize(0..5)];
        let Call::SetClaims(request) = &sent.call else {
            let claims = (0..self.rng.u32(0..3)).map(|_| v1::Claim {
                key: "other\n".to_owned(),
                state: self.rng.i32(-1..9),
                key_replaced: self.rng.bool(),
                decided_by: self.rng.bool().then(|| v1::ClaimOwner {
                    principal: boot.clone(),
                    owner: boot.clone(),
                }),
                ..v1::Claim::default()
            });
            return Ok(Answer::NotMade(v1::ListClaimsResponse {
                claims: claims.collect(),
                ledger: boot.clone(),
                boot,
                total: self.rng.u32(0..2),
                generation_made: number,
                ..v1::ListClaimsResponse::default()
            }));
        };
        match self.rng.u32(0..5) {
            0 => Err(refusal("GENERATION_STALE", number)),
            1 => Err(refusal("BOOT_CHANGED", number)),
            2 => Err(refusal(&boot, number)),
            _ => Ok(Answer::SetClaims(Box::new(
                self.invalid(request, boot, number),
            ))),
        }
    }

    fn invalid(
        &mut self,
        request: &v1::SetClaimsRequest,
        boot: String,
        number: u64,
    ) -> v1::SetClaimsResponse {
        let seconds = [i64::MIN, -1, i64::MAX][self.rng.usize(0..3)];
        let time = prost_types::Duration {
            seconds,
            nanos: i32::MIN,
        };
        let results = request.claims.iter().map(|claim| v1::ClaimResult {
            key: [&claim.key, "other\n", ""][self.rng.usize(0..3)].to_owned(),
            want: self.rng.i32(-1..5),
            state: self.rng.i32(-1..9),
            message: "\u{0}".repeat(2_000),
            ..v1::ClaimResult::default()
        });
        v1::SetClaimsResponse {
            results: results.collect(),
            ledger: boot.clone(),
            generation_before: number,
            boot,
            repeated: self.rng.bool(),
            generation: number,
            report: Some(v1::FlipReport {
                stop_time: Some(time),
                patch_time: Some(time),
                resume_time: Some(time),
                ..v1::FlipReport::default()
            }),
            ..v1::SetClaimsResponse::default()
        }
    }
}

fn refusal(reason: &str, generation: u64) -> Status {
    let metadata = HashMap::from([("generation".to_owned(), generation.to_string())]);
    let domain = patchbay_proto::ERROR_DOMAIN;
    let details = ErrorDetails::with_error_info(reason, domain, metadata);
    Status::with_error_details(Code::FailedPrecondition, "\u{1b}[2J", details)
}
