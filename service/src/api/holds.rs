// SPDX-License-Identifier: Apache-2.0
//! The methods of `patchbay.v1.StaticKeysService` on holds.

use std::time::Duration;

use patchbay_proto::v1;
use static_keys::Patterns;
use tonic::Request;

use super::convert;
use super::requests::{
    CallTimes, MAX_TTL, blocking, from_proto, invalid, page_size, request_id, summary_only,
};
use crate::keys::{Caller, HoldQuery, Keys, KeysError, MAX_UPDATES, ReleaseRequest, RenewRequest};

pub async fn list(
    keys: &Keys,
    request: v1::ListHoldsRequest,
) -> Result<v1::ListHoldsResponse, KeysError> {
    let query = HoldQuery {
        page_size: page_size(request.page_size)?,
        page_token: request.page_token,
        patterns: Patterns::parse(&request.patterns)?,
        // In the message an empty holder means all.
        holder: Some(request.holder).filter(|holder| !holder.is_empty()),
    };
    keys.adopt_ledger().await?;
    let keys = keys.clone();
    // This reads the count of every held key.
    let page = blocking("the holds cannot be listed", move || keys.holds(&query)).await?;
    Ok(v1::ListHoldsResponse {
        holds: page.holds.into_iter().map(convert::hold).collect(),
        next_page_token: page.next_page_token,
    })
}

pub async fn release(
    keys: &Keys,
    request: Request<v1::ReleaseHoldsRequest>,
    caller: Caller,
) -> Result<v1::ReleaseHoldsResponse, KeysError> {
    let times = CallTimes::of(request.metadata());
    let mut request = request.into_inner();
    check_ids(&request.ids)?;
    let id = std::mem::take(&mut request.request_id);
    let request_id = request_id(id, &request)?;
    let attempts = times.attempts(request.stop_timeout, request.retry_timeout)?;
    let request = ReleaseRequest {
        caller: caller.clone(),
        force: request.force,
        request_id,
        summary_only: summary_only(request.result_view)?,
        stop_timeout: attempts.stop_timeout,
        deadline: attempts.deadline,
        ids: request.ids,
    };
    let outcome = keys.release(request).await?;
    let page = keys.first_results(outcome, &caller.name);
    let outcome = page.outcome();
    Ok(v1::ReleaseHoldsResponse {
        results: convert::results(page.results()),
        next_page_token: page.next_page_token.clone(),
        summary: Some(convert::summary(outcome.summary)),
        report: outcome.report.map(convert::report),
        revision: outcome.revision,
        incarnation: keys.incarnation().to_string(),
    })
}

pub async fn renew(
    keys: &Keys,
    request: v1::RenewHoldsRequest,
    caller: Caller,
) -> Result<v1::RenewHoldsResponse, KeysError> {
    check_ids(&request.ids)?;
    let request = RenewRequest {
        ttl: from_proto("ttl", request.ttl, Duration::from_millis(1)..=MAX_TTL)?,
        ids: request.ids,
        caller,
    };
    let holds = keys.renew(request).await?;
    Ok(v1::RenewHoldsResponse {
        holds: holds.into_iter().map(convert::hold).collect(),
    })
}

fn check_ids(ids: &[String]) -> Result<(), KeysError> {
    if ids.is_empty() || ids.len() > MAX_UPDATES {
        let message = format!("{} given; give 1 to {MAX_UPDATES}", ids.len());
        return Err(invalid("ids", message));
    }
    Ok(())
}
