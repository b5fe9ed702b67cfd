// SPDX-License-Identifier: Apache-2.0
//! Tests changes by patterns, where the policy limits keys: the change that was checked is the one
//! that is made.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use patchbay_proto::v1;
use patchbay_proto::v1::tracepoints_service_client::TracepointsServiceClient;
use prost::Message;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use super::fake::Fake;
use super::support::{Host, assert_refused, own_uid, update, update_matching};

async fn limited() -> (Host, Fake) {
    let rule = "role: operator, keys: ['net_*', 'tp_*', '!net_secret']";
    let policy = format!(
        "rules: [{{name: own, principals: ['{}'], {rule}}}]",
        own_uid()
    );
    let mut host = Host::new(&policy);
    host.start_daemon(&[]).await;
    let fake = Fake::start(&host.path("run/web-1.sock"), &["web-1"]).await;
    host.list_until(1).await;
    fake.answer("DiscardUpdate", |_: v1::DiscardUpdateRequest| {
        Ok(v1::DiscardUpdateResponse::default())
    });
    fake.answer("CommitUpdate", |_: v1::CommitUpdateRequest| {
        Ok(v1::CommitUpdateResponse {
            revision: 7,
            ..Default::default()
        })
    });
    (host, fake)
}

/// Makes a plan of these keys. Its second page has all but the first.
fn plan(fake: &Fake, keys: &'static [&'static str]) {
    let result = |name: &&str| v1::KeyResult {
        name: (*name).to_owned(),
        ..Default::default()
    };
    let numbers = AtomicU32::new(0);
    fake.answer("PrepareUpdate", move |request: v1::PrepareUpdateRequest| {
        assert_eq!(request.result_view, i32::from(v1::ResultView::Full));
        let number = numbers.fetch_add(1, Ordering::Relaxed);
        Ok(v1::PrepareUpdateResponse {
            plan_id: format!("plan-{number}"),
            digest: format!("digest-{number}"),
            results: keys.iter().take(1).map(result).collect(),
            next_page_token: "more".to_owned(),
            summary: Some(v1::UpdateSummary {
                keys: u32::try_from(keys.len()).expect("few"),
                ..Default::default()
            }),
            ..Default::default()
        })
    });
    fake.answer(
        "ListUpdateResults",
        move |request: v1::ListUpdateResultsRequest| {
            assert_eq!(request.page_token, "more");
            Ok(v1::ListUpdateResultsResponse {
                results: keys.iter().skip(1).map(result).collect(),
                next_page_token: String::new(),
            })
        },
    );
}

fn committed(fake: &Fake) -> Vec<String> {
    let commits = fake.received("CommitUpdate").into_iter();
    let commits = commits.map(|call| v1::CommitUpdateRequest::decode(call.message));
    commits
        .map(|commit| commit.expect("a commit").plan_id)
        .collect()
}

#[tokio::test]
async fn patterns_become_a_plan_whose_keys_are_decided_about() {
    let (host, fake) = limited().await;
    let mut keys = host.keys().await;
    plan(&fake, &["net_a", "net_b"]);
    let answer = keys
        .update_static_keys(update_matching("web-1", &["net_*"]))
        .await;
    assert_eq!(answer.expect("allowed").into_inner().revision, 7);
    assert_eq!(committed(&fake), ["plan-0"]);
    assert!(fake.received("UpdateStaticKeys").is_empty());
    let intent = &host.audit()[0];
    let request = intent["request"].as_str().expect("text");
    assert!(request.contains("2 keys: net_a net_b"), "{request}");
    // The key that is not allowed is on the second page.
    plan(&fake, &["net_a", "net_secret"]);
    let refused = keys
        .update_static_keys(update_matching("web-1", &["net_*"]))
        .await;
    let (message, _) = assert_refused(refused, Code::PermissionDenied, "ROLE_MISSING");
    assert!(message.contains("net_secret"), "{message}");
    assert_eq!(committed(&fake).len(), 1);
    assert_eq!(
        fake.received("DiscardUpdate").len(),
        1,
        "the plan is given up"
    );
    // Queries of dynamic debug select keys in the guest too.
    let mut queries = update_matching("web-1", &[]);
    queries.updates[0].debug_queries = vec!["module m".to_owned()];
    let refused = keys.update_static_keys(queries).await;
    let (message, _) = assert_refused(refused, Code::PermissionDenied, "ROLE_MISSING");
    assert!(message.contains("net_secret"), "{message}");
    assert!(fake.received("UpdateStaticKeys").is_empty());
    // This monitor hides a key of its plan.
    fake.answer("ListUpdateResults", |_: v1::ListUpdateResultsRequest| {
        Ok(v1::ListUpdateResultsResponse::default())
    });
    let refused = keys
        .update_static_keys(update_matching("web-1", &["net_*"]))
        .await;
    assert_refused(refused, Code::Internal, "INTERNAL");
    assert_eq!(committed(&fake).len(), 1);
}

#[tokio::test]
async fn a_stale_plan_is_prepared_and_decided_about_again() {
    let (host, fake) = limited().await;
    plan(&fake, &["net_a", "net_b"]);
    let stale = || {
        let details = ErrorDetails::with_error_info("PLAN_STALE", "patchbay", HashMap::new());
        Status::with_error_details(Code::FailedPrecondition, "the guest has moved on", details)
    };
    let attempts = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&attempts);
    fake.answer(
        "CommitUpdate",
        move |_: v1::CommitUpdateRequest| match counted.fetch_add(1, Ordering::Relaxed) {
            0 => Err(stale()),
            _ => Ok(v1::CommitUpdateResponse::default()),
        },
    );
    let mut keys = host.keys().await;
    let answer = keys
        .update_static_keys(update_matching("web-1", &["net_*"]))
        .await;
    answer.expect("at the second attempt");
    assert_eq!(committed(&fake), ["plan-0", "plan-1"]);
    // The change is not retried forever.
    fake.answer("CommitUpdate", move |_: v1::CommitUpdateRequest| {
        Err::<v1::CommitUpdateResponse, _>(stale())
    });
    let refused = keys
        .update_static_keys(update_matching("web-1", &["net_*"]))
        .await;
    assert_refused(refused, Code::FailedPrecondition, "PLAN_STALE");
    assert_eq!(committed(&fake).len(), 2 + 3);
}

#[tokio::test]
async fn a_commit_is_decided_about_by_the_keys_of_its_plan() {
    let (mut host, fake) = limited().await;
    let mut keys = host.keys().await;
    plan(&fake, &["net_a", "net_b"]);
    let updates = update_matching("web-1", &["net_*"]).updates;
    let prepare = || v1::PrepareUpdateRequest {
        guest: "web-1".to_owned(),
        updates: updates.clone(),
        result_view: v1::ResultView::Summary.into(),
        ..Default::default()
    };
    let commit = |plan_id: &str| v1::CommitUpdateRequest {
        guest: "web-1".to_owned(),
        plan_id: plan_id.to_owned(),
        ..Default::default()
    };
    let answer = keys
        .prepare_update(prepare())
        .await
        .expect("allowed")
        .into_inner();
    assert!(
        answer.results.is_empty() && answer.next_page_token.is_empty(),
        "a summary"
    );
    keys.commit_update(commit(&answer.plan_id))
        .await
        .expect("its keys were seen");
    let unknown = keys.commit_update(commit("plan-of-another-life")).await;
    assert_refused(unknown, Code::NotFound, "PLAN_NOT_FOUND");
    // The policy has changed since the plan was prepared.
    let narrow = format!(
        "rules: [{{name: own, principals: ['{}'], role: operator, keys: [net_a]}}]",
        own_uid()
    );
    host.write_policy(&narrow);
    host.signal(rustix::process::Signal::HUP);
    host.logged("policy read again").await;
    let refused = keys.commit_update(commit(&answer.plan_id)).await;
    assert_refused(refused, Code::PermissionDenied, "ROLE_MISSING");
    assert_eq!(committed(&fake), ["plan-0"]);
    let refused = keys.prepare_update(prepare()).await;
    assert_refused(refused, Code::PermissionDenied, "ROLE_MISSING");
    let named = v1::PrepareUpdateRequest {
        updates: update("web-1", &["net_b"], v1::KeyOp::Inc).updates,
        ..prepare()
    };
    let before = fake.received("PrepareUpdate").len();
    assert_refused(
        keys.prepare_update(named).await,
        Code::PermissionDenied,
        "ROLE_MISSING",
    );
    assert_eq!(
        fake.received("PrepareUpdate").len(),
        before,
        "names need no plan"
    );
}

#[tokio::test]
async fn holds_are_decided_about_by_their_keys() {
    let (host, fake) = limited().await;
    let hold = |id: &str, key: &str| v1::Hold {
        id: id.to_owned(),
        key: key.to_owned(),
        ..Default::default()
    };
    let holds = [hold("1", "net_a"), hold("2", "ext4_a")];
    fake.answer("ListHolds", move |request: v1::ListHoldsRequest| {
        // Each page has one hold.
        let page = usize::from(request.page_token == "more");
        Ok(v1::ListHoldsResponse {
            holds: vec![holds[page].clone()],
            next_page_token: ["more", ""][page].to_owned(),
        })
    });
    fake.answer("ReleaseHolds", |_: v1::ReleaseHoldsRequest| {
        Ok(v1::ReleaseHoldsResponse::default())
    });
    let mut keys = host.keys().await;
    let release = |ids: &[&str]| v1::ReleaseHoldsRequest {
        guest: "web-1".to_owned(),
        ids: ids.iter().map(|id| (*id).to_owned()).collect(),
        ..Default::default()
    };
    keys.release_holds(release(&["1"]))
        .await
        .expect("a key of the rule");
    let refused = keys.release_holds(release(&["1", "2"])).await;
    assert_refused(refused, Code::PermissionDenied, "ROLE_MISSING");
    let refused = keys.release_holds(release(&["3"])).await;
    assert_refused(refused, Code::NotFound, "HOLD_NOT_FOUND");
    assert_eq!(fake.received("ReleaseHolds").len(), 1);
}

#[tokio::test]
async fn a_repair_is_decided_about_by_its_key() {
    let rule = "role: admin, keys: ['net_*'], max_keys: 1";
    let policy = format!(
        "rules: [{{name: own, principals: ['{}'], {rule}}}]",
        own_uid()
    );
    let mut host = Host::new(&policy);
    host.start_daemon(&[]).await;
    let fake = Fake::start(&host.path("run/web-1.sock"), &["web-1"]).await;
    host.list_until(1).await;
    fake.answer("RepairStaticKey", |_: v1::RepairStaticKeyRequest| {
        Ok(v1::RepairStaticKeyResponse::default())
    });
    let mut keys = host.keys().await;
    let repair = |name: &str, validate_only| v1::RepairStaticKeyRequest {
        guest: "web-1".to_owned(),
        name: name.to_owned(),
        validate_only,
        ..Default::default()
    };
    let refused = keys.repair_static_key(repair("ext4_a", true)).await;
    let (message, _) = assert_refused(refused, Code::PermissionDenied, "ROLE_MISSING");
    assert!(message.contains("ext4_a"), "{message}");
    assert!(fake.received("RepairStaticKey").is_empty());
    // A dry run does not count for the caps.
    for validate_only in [true, true, false] {
        let allowed = keys.repair_static_key(repair("net_a", validate_only)).await;
        allowed.expect("a key of the rule");
    }
    let refused = keys.repair_static_key(repair("net_b", false)).await;
    assert_refused(refused, Code::PermissionDenied, "ROLE_MISSING");
    assert_eq!(fake.received("RepairStaticKey").len(), 3);
}

#[tokio::test]
async fn tracepoints_are_named_in_the_place_of_patterns() {
    let (host, fake) = limited().await;
    let event = |name: &str, key: &str, refused: &str| v1::Tracepoint {
        name: name.to_owned(),
        key: key.to_owned(),
        refused: refused.to_owned(),
        ..Default::default()
    };
    let serve = |events: Vec<v1::Tracepoint>| {
        fake.answer("ListTracepoints", move |_: v1::ListTracepointsRequest| {
            Ok(v1::ListTracepointsResponse {
                tracepoints: events.clone(),
                ..Default::default()
            })
        });
    };
    fake.answer("ArmTracepoints", |_: v1::ArmTracepointsRequest| {
        Ok(v1::ArmTracepointsResponse::default())
    });
    let mut client = TracepointsServiceClient::new(host.channel().await);
    let arm = |pattern: &str| v1::ArmTracepointsRequest {
        guest: "web-1".to_owned(),
        patterns: vec![pattern.to_owned()],
        filter: "prev_pid == 0".to_owned(),
        ..Default::default()
    };
    serve(vec![
        event("net:one", "tp_one", ""),
        event("net:odd", "", "has no tracepoint"),
        event("net:two", "tp_two", ""),
    ]);
    client
        .arm_tracepoints(arm("net:*"))
        .await
        .expect("keys of the rule");
    let forwarded = fake.received("ArmTracepoints").remove(0).message;
    let forwarded = v1::ArmTracepointsRequest::decode(forwarded).expect("a request");
    assert_eq!(forwarded.patterns, ["net:one", "net:two"]);
    assert_eq!(forwarded.filter, "prev_pid == 0");
    for (events, code, reason) in [
        (
            vec![event("ext4:x", "other_key", "")],
            Code::PermissionDenied,
            "ROLE_MISSING",
        ),
        // A hostile guest chooses the names of its events.
        (
            vec![event("net:*", "tp_one", "")],
            Code::FailedPrecondition,
            "TRACEPOINT_REFUSED",
        ),
        (vec![], Code::NotFound, "EVENT_NOT_FOUND"),
    ] {
        serve(events);
        let refused = client.arm_tracepoints(arm("*")).await;
        assert_refused(refused, code, reason);
    }
    assert_eq!(fake.received("ArmTracepoints").len(), 1);
}

/// Tests with the monitor's own code, end to end.
#[tokio::test]
async fn patterns_change_the_keys_that_the_rule_covers() {
    let rule = "role: operator, keys: ['net_*']";
    let policy = format!(
        "rules: [{{name: own, principals: ['{}'], {rule}}}]",
        own_uid()
    );
    let mut host = Host::new(&policy);
    host.start_daemon(&[]).await;
    let web = host.monitor("web-1");
    host.list_until(1).await;
    let mut keys = host.keys().await;
    let counts = || ["net_a", "net_b", "ext4_a"].map(|key| web.guest.count(key));
    let answer = keys
        .update_static_keys(update_matching("web-1", &["net_*"]))
        .await;
    let answer = answer.expect("allowed").into_inner();
    assert_eq!(answer.results.len(), 2);
    assert_eq!(counts(), [1, 1, 0]);
    let refused = keys
        .update_static_keys(update_matching("web-1", &["*_a"]))
        .await;
    let (message, _) = assert_refused(refused, Code::PermissionDenied, "ROLE_MISSING");
    assert!(message.contains("ext4_a"), "{message}");
    // The change is checked, and nothing changes.
    let validate = v1::UpdateStaticKeysRequest {
        validate_only: true,
        ..update_matching("web-1", &["net_*"])
    };
    keys.update_static_keys(validate).await.expect("valid");
    assert_eq!(counts(), [1, 1, 0]);
    // A repeat with the same id changes nothing.
    for _ in 0..2 {
        let request = v1::UpdateStaticKeysRequest {
            request_id: "once".to_owned(),
            ..update_matching("web-1", &["net_a"])
        };
        keys.update_static_keys(request).await.expect("allowed");
        assert_eq!(counts(), [2, 1, 0]);
    }
    let prepare = v1::PrepareUpdateRequest {
        guest: "web-1".to_owned(),
        updates: update_matching("web-1", &["net_*"]).updates,
        ..Default::default()
    };
    let plan = keys
        .prepare_update(prepare)
        .await
        .expect("allowed")
        .into_inner();
    let commit = v1::CommitUpdateRequest {
        guest: "web-1".to_owned(),
        plan_id: plan.plan_id,
        digest: plan.digest,
        ..Default::default()
    };
    keys.commit_update(commit).await.expect("committed");
    assert_eq!(counts(), [3, 2, 0]);
    let list = v1::ListHoldsRequest {
        guest: "web-1".to_owned(),
        ..Default::default()
    };
    let holds = keys
        .list_holds(list)
        .await
        .expect("listed")
        .into_inner()
        .holds;
    let release = v1::ReleaseHoldsRequest {
        guest: "web-1".to_owned(),
        ids: holds.into_iter().map(|hold| hold.id).collect(),
        ..Default::default()
    };
    keys.release_holds(release).await.expect("its own");
    assert_eq!(counts(), [0, 0, 0]);
}
