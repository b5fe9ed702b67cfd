// SPDX-License-Identifier: Apache-2.0
//! The methods of `patchbay.v1.StaticKeysService` that verify and repair keys.

use patchbay_proto::v1;
use static_keys::Patterns;
use tonic::{Request, Status};

use super::convert;
use super::requests::{CallTimes, blocking, check_reason};
use crate::keys::{Caller, Keys, KeysError, RepairRequest, RepairedSite, TornKey};

pub(super) async fn verify(
    keys: &Keys,
    request: &v1::VerifyStaticKeysRequest,
) -> Result<v1::VerifyStaticKeysResponse, Status> {
    let patterns = Patterns::parse(&request.patterns).map_err(KeysError::from)?;
    let incarnation = keys.incarnation().to_string();
    let keys = keys.clone();
    // This reads every site of the guest.
    let found = blocking("the keys cannot be verified", move || {
        keys.verify(&patterns)
    })
    .await?;
    let torn = |key: TornKey| v1::TornKey {
        name: key.name.to_string(),
        count: key.count,
        contrary_sites: key.contrary,
        foreign_sites: key.foreign,
    };
    Ok(v1::VerifyStaticKeysResponse {
        keys: convert::to_u32(found.keys),
        sites: convert::to_u32(found.sites),
        torn: found.torn.into_iter().map(torn).collect(),
        torn_total: convert::to_u32(found.torn_total),
        revision: found.revision,
        incarnation,
    })
}

pub(super) async fn repair(
    keys: &Keys,
    caller: Caller,
    request: Request<v1::RepairStaticKeyRequest>,
) -> Result<v1::RepairStaticKeyResponse, Status> {
    let times = CallTimes::of(request.metadata());
    let request = request.into_inner();
    check_reason(&request.reason)?;
    let attempts = times.attempts(request.stop_timeout, request.retry_timeout)?;
    let request = RepairRequest {
        name: request.name,
        caller,
        reason: request.reason,
        validate_only: request.validate_only,
        stop_timeout: attempts.stop_timeout,
        deadline: attempts.deadline,
    };
    let outcome = keys.repair(request).await?;
    let site = |site: RepairedSite| v1::RepairedSite {
        address: site.address,
        bytes_before: site.before,
        bytes_after: site.after,
    };
    Ok(v1::RepairStaticKeyResponse {
        name: outcome.name.to_string(),
        count: outcome.count,
        sites: outcome.sites.into_iter().map(site).collect(),
        report: outcome.report.map(convert::report),
        incarnation: keys.incarnation().to_string(),
    })
}
