// SPDX-License-Identifier: Apache-2.0
//! The methods of `patchbay.v1.StaticKeysService` on prepared changes, and results in pages.

use std::sync::Arc;
use std::time::{Duration, Instant};

use patchbay_proto::v1;
use tonic::{Request, Response, Status};

use super::convert;
use super::requests::{
    CallTimes, check_reason, from_proto, hold_ttl, invalid, key_updates, request_id, summary_only,
};
use crate::keys::{
    Caller, CommitRequest, DiscardRequest, Keys, KeysError, PrepareRequest, UpdateRequest,
};

const MIN_PLAN_TTL: Duration = Duration::from_secs(1);
const MAX_PLAN_TTL: Duration = Duration::from_secs(24 * 3600);
const DEFAULT_PLAN_TTL: Duration = Duration::from_secs(600);

pub(super) async fn prepare(
    keys: &Keys,
    caller: Caller,
    request: Request<v1::PrepareUpdateRequest>,
) -> Result<Response<v1::PrepareUpdateResponse>, Status> {
    let CallTimes { deadline, .. } = CallTimes::of(request.metadata());
    let request = prepare_request(request.into_inner(), caller.clone(), deadline)?;
    let plan = keys.prepare(request).await?;
    let page = keys.first_results(Arc::clone(&plan.outcome), &caller.name);
    let outcome = page.outcome();
    Ok(Response::new(v1::PrepareUpdateResponse {
        plan_id: plan.plan_id.clone(),
        digest: plan.digest.clone(),
        results: convert::results(page.results()),
        next_page_token: page.next_page_token.clone(),
        summary: Some(convert::summary(outcome.summary)),
        predicted_pause: plan.predicted_pause.map(convert::duration),
        expires_at: Some(plan.expires_at.into()),
        revision: outcome.revision,
        incarnation: keys.incarnation().to_string(),
    }))
}

pub(super) async fn commit(
    keys: &Keys,
    caller: Caller,
    request: Request<v1::CommitUpdateRequest>,
) -> Result<Response<v1::CommitUpdateResponse>, Status> {
    let times = CallTimes::of(request.metadata());
    let request = request.into_inner();
    check_plan_id(&request.plan_id)?;
    let attempts = times.attempts(request.stop_timeout, request.retry_timeout)?;
    let request = CommitRequest {
        plan_id: request.plan_id,
        // In the message an empty digest means none.
        digest: Some(request.digest).filter(|digest| !digest.is_empty()),
        caller: caller.clone(),
        summary_only: summary_only(request.result_view)?,
        stop_timeout: attempts.stop_timeout,
        deadline: attempts.deadline,
    };
    let outcome = keys.commit(request).await?;
    let page = keys.first_results(outcome, &caller.name);
    let outcome = page.outcome();
    Ok(Response::new(v1::CommitUpdateResponse {
        results: convert::results(page.results()),
        next_page_token: page.next_page_token.clone(),
        summary: Some(convert::summary(outcome.summary)),
        report: outcome.report.map(convert::report),
        revision: outcome.revision,
        incarnation: keys.incarnation().to_string(),
    }))
}

pub(super) async fn discard(
    keys: &Keys,
    caller: Caller,
    request: Request<v1::DiscardUpdateRequest>,
) -> Result<Response<v1::DiscardUpdateResponse>, Status> {
    let plan_id = request.into_inner().plan_id;
    check_plan_id(&plan_id)?;
    keys.discard(DiscardRequest {
        plan_id,
        principal: caller.name,
    })
    .await?;
    Ok(Response::new(v1::DiscardUpdateResponse {}))
}

pub(super) fn list_results(
    keys: &Keys,
    principal: &str,
    request: &Request<v1::ListUpdateResultsRequest>,
) -> Result<Response<v1::ListUpdateResultsResponse>, Status> {
    let page = keys.more_results(&request.get_ref().page_token, principal)?;
    Ok(Response::new(v1::ListUpdateResultsResponse {
        results: convert::results(page.results()),
        next_page_token: page.next_page_token,
    }))
}

fn prepare_request(
    mut request: v1::PrepareUpdateRequest,
    caller: Caller,
    deadline: Instant,
) -> Result<PrepareRequest, KeysError> {
    let id = std::mem::take(&mut request.request_id);
    let request_id = request_id(id, &request)?;
    check_reason(&request.reason)?;
    let plan_ttl = from_proto("plan_ttl", request.plan_ttl, MIN_PLAN_TTL..=MAX_PLAN_TTL)?;
    let summary_only = summary_only(request.result_view)?;
    let ttl = hold_ttl("hold_ttl", request.hold_ttl)?;
    let updates = key_updates(request.updates)?;
    Ok(PrepareRequest {
        update: UpdateRequest {
            request_id,
            allow_guarded: request.allow_guarded,
            force: request.force,
            summary_only,
            ttl,
            reason: request.reason,
            // The commit provides the stop timeout.
            ..UpdateRequest::new(updates, caller, Duration::ZERO, deadline)
        },
        plan_ttl: plan_ttl.unwrap_or(DEFAULT_PLAN_TTL),
    })
}

fn check_plan_id(plan_id: &str) -> Result<(), KeysError> {
    if plan_id.is_empty() {
        let message = "is empty; give the plan_id that PrepareUpdate has answered";
        return Err(invalid("plan_id", message));
    }
    Ok(())
}
