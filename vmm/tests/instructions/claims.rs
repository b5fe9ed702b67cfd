// SPDX-License-Identifier: Apache-2.0
//! Claims on all keys of the kernel.

use patchbay_proto::v1::static_keys_service_client::StaticKeysServiceClient;
use patchbay_proto::v1::{ClaimWant, FlipReport, KeyClaim, SetClaimsRequest};
use tonic::transport::Channel;

use super::kernel::Kernel;
use super::served::counted;

/// The call that is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claims {
    /// Claims that all keys, which are off, are on.
    Set,
    /// Makes the same claims again with another generation.
    Again,
    /// Ends the claims, so that the keys are off again.
    Clear,
    /// Sets no claims, for an owner that has none.
    Empty,
}

pub struct Turn {
    pub keys: StaticKeysServiceClient<Channel>,
    pub kernel: Kernel,
    pub is_counted: bool,
}

impl Turn {
    /// Sets the claims and ends them, and counts one of the calls. Returns the report of that call.
    pub async fn perform(mut self, claims: Claims, generation: &mut u64) -> Option<FlipReport> {
        let mut report = None;
        let keys = self.kernel.keys;
        let steps: &[(Claims, u64)] = match claims {
            Claims::Set | Claims::Clear => &[(Claims::Set, keys), (Claims::Clear, 0)],
            Claims::Again => &[
                (Claims::Set, keys),
                (Claims::Again, keys),
                (Claims::Clear, 0),
            ],
            Claims::Empty => &[(Claims::Empty, 0)],
        };
        for &(step, count) in steps {
            *generation += 1;
            let request = request(count, *generation);
            let is_counted = self.is_counted && step == claims;
            let call = self.keys.set_claims(request);
            let answer = counted(is_counted, call).await.expect("the claims are set");
            if step == claims {
                report = answer.into_inner().report;
            }
        }
        report
    }
}

fn request(count: u64, generation: u64) -> SetClaimsRequest {
    let claim = |key| KeyClaim {
        key: Kernel::name(key),
        want: ClaimWant::On.into(),
        ..Default::default()
    };
    SetClaimsRequest {
        owner: "rollout/instructions".to_owned(),
        generation,
        claims: (0..count).map(claim).collect(),
        ..Default::default()
    }
}
