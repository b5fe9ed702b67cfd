// SPDX-License-Identifier: Apache-2.0
//! Checks changes of keys where the policy limits them.
//!
//! The policy decides about literal names directly. Only the guest can resolve patterns and queries
//! to keys, so such a change is prepared first. The policy decides about the keys of the plan, and
//! then the plan is committed. If the guest's keys change in between, the plan is stale, and
//! another one is prepared and checked.

use http::Response;
use patchbay_proto::pages::Pages;
use patchbay_proto::v1;
use patchbay_proto::v1::static_keys_service_client::StaticKeysServiceClient;
use tonic::body::Body;
use tonic::transport::Channel;
use tonic::{Code, Status};
use tonic_types::StatusExt;

use super::allowed::{Allowed, Forward, Plan, decode};
use super::answer::{Finish, unary};
use super::call::Call;
use super::frame::MAX_ANSWER_BYTES;
use super::node::Node;
use super::reports::count_report;
use super::status;
use crate::monitors::HostedGuest;

/// The maximum number of plans that are prepared for one change. If all of them are stale, the
/// client is told that the guest changes too fast.
const MAX_PLANS: usize = 3;
/// The lifetime of a plan for a change that follows at once.
const PLAN_TTL_SECONDS: i64 = 60;

type Client = StaticKeysServiceClient<Channel>;

fn client(guest: &HostedGuest) -> Client {
    let client = StaticKeysServiceClient::new(guest.monitor.channel());
    client.max_decoding_message_size(MAX_ANSWER_BYTES + 1024)
}

/// Returns the names of `updates`; `None` if there are patterns or queries among them.
fn names(updates: &[v1::KeyUpdate]) -> Option<Vec<String>> {
    let patterns = updates
        .iter()
        .any(|update| !update.patterns.is_empty() || !update.debug_queries.is_empty());
    (!patterns).then(|| updates.iter().map(|update| update.name.clone()).collect())
}

/// Decides about an UpdateStaticKeys call.
pub async fn check(
    node: &Node,
    call: &Call,
    guest: &HostedGuest,
    allowed: &Allowed,
) -> Result<Forward, Status> {
    let request: v1::UpdateStaticKeysRequest = decode(&call.message)?;
    if let Some(names) = names(&request.updates) {
        let decided = node.decide_keys(call, &guest.name, &names);
        return decided.map(Forward::Call);
    }
    let validate_only = request.validate_only;
    let prepare = v1::PrepareUpdateRequest {
        guest: request.guest,
        updates: request.updates,
        allow_guarded: request.allow_guarded,
        force: request.force,
        reason: request.reason,
        hold_ttl: request.ttl,
        plan_ttl: Some(prost_types::Duration {
            seconds: PLAN_TTL_SECONDS,
            nanos: 0,
        }),
        request_id: request.request_id,
        result_view: v1::ResultView::Full.into(),
    };
    let (plan, _) = prepare_plan(call, guest, allowed, prepare).await?;
    match node.decide_keys(call, &guest.name, &plan.keys) {
        Ok(allowed) if validate_only => {
            discard(call, guest, &allowed, plan.id).await;
            // Nothing changes, so it does not matter that the monitor selects the keys again.
            Ok(Forward::Call(allowed))
        }
        Ok(allowed) => Ok(Forward::Plan(allowed, plan)),
        Err(denied) => {
            discard(call, guest, allowed, plan.id).await;
            Err(denied)
        }
    }
}

/// Decides about a PrepareUpdate call as far as possible before the plan exists.
pub fn check_prepare(
    node: &Node,
    call: &Call,
    guest: &HostedGuest,
    allowed: Allowed,
) -> Result<Forward, Status> {
    let request: v1::PrepareUpdateRequest = decode(&call.message)?;
    let Some(names) = names(&request.updates) else {
        return Ok(Forward::Prepare(allowed));
    };
    node.decide_keys(call, &guest.name, &names)
        .map(Forward::Prepare)
}

/// Prepares a plan for the client, and stores its keys for the decision about the commit.
pub async fn prepare_for_client(
    node: &Node,
    call: &Call,
    guest: &HostedGuest,
    allowed: &Allowed,
) -> Result<Response<Body>, Status> {
    let request: v1::PrepareUpdateRequest = decode(&call.message)?;
    let summary = request.result_view == i32::from(v1::ResultView::Summary);
    // The policy needs the keys even if the client does not request them.
    let request = v1::PrepareUpdateRequest {
        result_view: if summary {
            v1::ResultView::Full.into()
        } else {
            request.result_view
        },
        ..request
    };
    let (plan, mut answer) = prepare_plan(call, guest, allowed, request).await?;
    if let Err(denied) = node.decide_keys(call, &guest.name, &plan.keys) {
        discard(call, guest, allowed, plan.id).await;
        return Err(denied);
    }
    node.plans
        .keep(&guest.name, &plan.id, plan.keys, call.gives_back);
    if summary {
        answer.results.clear();
        answer.next_page_token.clear();
    }
    Ok(unary(&answer))
}

/// Commits the plan that replaces an UpdateStaticKeys.
pub async fn commit(
    node: &Node,
    call: &Call,
    guest: &HostedGuest,
    mut allowed: Allowed,
    mut plan: Plan,
    finish: &mut Finish,
) -> Result<Response<Body>, Status> {
    let request: v1::UpdateStaticKeysRequest = decode(&call.message)?;
    for attempt in 1.. {
        allowed = node.charge(call, &guest.name, allowed)?;
        let pending = node.intend(call, guest, &allowed, Some(&plan.keys)).await?;
        finish.pending = Some(pending);
        let commit = v1::CommitUpdateRequest {
            guest: request.guest.clone(),
            plan_id: plan.id.clone(),
            digest: plan.digest.clone(),
            stop_timeout: request.stop_timeout,
            retry_timeout: request.retry_timeout,
            result_view: request.result_view,
        };
        let answer = client(guest)
            .commit_update(call.ask(commit, &allowed)?)
            .await;
        let error = match answer {
            Ok(answer) => {
                let answer = answer.into_inner();
                if let Some(report) = &answer.report {
                    count_report(node, report);
                }
                finish.end(Code::Ok, "");
                return Ok(unary(&v1::UpdateStaticKeysResponse {
                    results: answer.results,
                    next_page_token: answer.next_page_token,
                    summary: answer.summary,
                    report: answer.report,
                    revision: answer.revision,
                    incarnation: answer.incarnation,
                }));
            }
            Err(error) => error,
        };
        discard(call, guest, &allowed, plan.id).await;
        if !is_stale(&error) || attempt >= MAX_PLANS {
            return Err(error);
        }
        if let Some(pending) = finish.pending.take() {
            pending.finish(status::code_name(error.code()), error.message());
        }
        match check(node, call, guest, &allowed).await? {
            Forward::Plan(again, prepared) => (allowed, plan) = (again, prepared),
            _ => return Err(error),
        }
    }
    Err(Status::internal("a change without attempts"))
}

fn is_stale(error: &Status) -> bool {
    let info = error.get_details_error_info();
    info.is_some_and(|info| info.reason == "PLAN_STALE")
}

/// Prepares a plan, and reads all its keys.
async fn prepare_plan(
    call: &Call,
    guest: &HostedGuest,
    allowed: &Allowed,
    request: v1::PrepareUpdateRequest,
) -> Result<(Plan, v1::PrepareUpdateResponse), Status> {
    let name = request.guest.clone();
    let mut client = client(guest);
    let answer = client.prepare_update(call.ask(request, allowed)?).await?;
    let answer = answer.into_inner();
    let key = |result: &v1::KeyResult| result.name.clone();
    let mut keys: Vec<String> = answer.results.iter().map(key).collect();
    let mut pages = Pages::of("results");
    let mut next = pages.next(&answer, &answer.next_page_token);
    while let Ok(Some(page_token)) = next {
        let request = v1::ListUpdateResultsRequest {
            guest: name.clone(),
            page_token,
        };
        let page = client
            .list_update_results(call.ask(request, allowed)?)
            .await?;
        let page = page.into_inner();
        next = pages.next(&page, &page.next_page_token);
        keys.extend(page.results.iter().map(key));
    }
    if let Err(error) = next {
        discard(call, guest, allowed, answer.plan_id).await;
        return Err(status::endless(&error));
    }
    let planned = answer.summary.as_ref().map(|summary| summary.keys);
    if planned != u32::try_from(keys.len()).ok() {
        discard(call, guest, allowed, answer.plan_id).await;
        let message = format!(
            "the monitor lists {} keys of a plan of {planned:?}, so the policy cannot decide; nothing was changed",
            keys.len()
        );
        return Err(status::status(Code::Internal, "INTERNAL", message));
    }
    let plan = Plan {
        id: answer.plan_id.clone(),
        digest: answer.digest.clone(),
        keys,
    };
    Ok((plan, answer))
}

/// Discards a plan. If that fails, the plan expires.
async fn discard(call: &Call, guest: &HostedGuest, allowed: &Allowed, plan_id: String) {
    let request = v1::DiscardUpdateRequest {
        guest: call.guest.clone(),
        plan_id,
    };
    if let Ok(request) = call.ask(request, allowed) {
        let _ = client(guest).discard_update(request).await;
    }
}
