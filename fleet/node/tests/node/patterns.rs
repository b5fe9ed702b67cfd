// SPDX-License-Identifier: Apache-2.0
//! Tests calls where the policy limits keys: the monitor applies the rules to the keys that it is
//! about to change.

use patchbay_proto::methods::Role;
use patchbay_proto::scope::{SCOPE_METADATA, Scope};
use patchbay_proto::v1;
use prost::Message;
use tonic::Code;
use tonic::metadata::{MetadataMap, MetadataValue};

use super::fake::Fake;
use super::support::{Host, Monitor, assert_refused, own_uid, update, update_matching};

const RULE: &str = "role: operator, keys: ['net_*', '!net_b']";

fn policy(rule: &str) -> String {
    let own = own_uid();
    format!("rules: [{{name: own, principals: ['{own}'], {rule}}}]")
}

async fn limited(rule: &str) -> (Host, Monitor) {
    let mut host = Host::new(&policy(rule));
    host.start_daemon(&[]).await;
    let web = host.monitor("web-1");
    host.list_until(1).await;
    (host, web)
}

async fn reload(host: &mut Host, rule: &str) {
    host.write_policy(&policy(rule));
    host.signal(rustix::process::Signal::HUP);
    host.logged("policy read again").await;
}

/// Tests a monitor that does not check keys: it gets a role that it does not know.
#[tokio::test]
async fn a_limited_call_is_forwarded_as_it_is_with_its_rules() {
    let own = own_uid();
    let mut host = Host::new(&format!(
        "rules:\n  - {{name: net, principals: ['{own}'], role: operator, keys: ['net_*'], max_keys: 7}}\n  \
         - {{name: ext, principals: ['{own}'], role: admin, keys: ['ext4:*']}}"
    ));
    host.start_daemon(&[]).await;
    let fake = Fake::start(&host.path("run/web-1.sock"), &["web-1"]).await;
    host.list_until(1).await;
    fake.answer("UpdateStaticKeys", |_: v1::UpdateStaticKeysRequest| {
        Ok(v1::UpdateStaticKeysResponse::default())
    });
    fake.answer("ListHolds", |_: v1::ListHoldsRequest| {
        Ok(v1::ListHoldsResponse::default())
    });
    let mut keys = host.keys().await;
    let request = update_matching("web-1", &["net_*"]);
    let answer = keys.update_static_keys(request.clone()).await;
    answer.expect("the monitor decides");
    let call = fake.received("UpdateStaticKeys").remove(0);
    let forwarded = v1::UpdateStaticKeysRequest::decode(call.message);
    assert_eq!(forwarded.expect("a request"), request);
    let role = call.headers["patchbay-role"].to_str().expect("text");
    assert_eq!(role, "operator/scoped");
    assert!(role.parse::<Role>().is_err(), "older monitors refuse it");
    let metadata = MetadataMap::from_headers(call.headers);
    let scope = metadata.get_bin(SCOPE_METADATA).expect("asserted");
    let scope = Scope::decode(scope.to_bytes().expect("base64")).expect("a scope");
    let rules = scope.rules.iter();
    let rules: Vec<_> = rules
        .map(|rule| (&*rule.name, &rule.keys[..], rule.max_keys))
        .collect();
    let globs = ["net_*".to_owned(), "ext4:*".to_owned()];
    assert_eq!(
        rules,
        [("net", &globs[..1], Some(7)), ("ext", &globs[1..], None)]
    );
    assert_eq!(host.audit()[0]["rule"], "net or ext");
    // A call that changes no key is not limited.
    let list = v1::ListHoldsRequest {
        guest: "web-1".to_owned(),
        ..Default::default()
    };
    keys.list_holds(list).await.expect("allowed");
    let call = fake.received("ListHolds").remove(0);
    assert_eq!(call.headers["patchbay-role"], "operator");
    assert!(!call.headers.contains_key(SCOPE_METADATA));
}

#[tokio::test]
async fn a_client_cannot_assert_a_scope() {
    let (host, web) = limited(RULE).await;
    let mut request = tonic::Request::new(update("web-1", &["ext4_a"], v1::KeyOp::Inc));
    let every = Scope::default().encode_to_vec();
    let metadata = request.metadata_mut();
    metadata.insert_bin(SCOPE_METADATA, MetadataValue::from_bytes(&every));
    metadata.insert("patchbay-role", "admin".parse().expect("ASCII"));
    let refused = host.keys().await.update_static_keys(request).await;
    assert_refused(refused, Code::PermissionDenied, "ROLE_MISSING");
    assert_eq!(web.guest.count("ext4_a"), 0);
}

#[tokio::test]
async fn a_commit_is_permitted_by_the_policy_of_its_time() {
    let (mut host, web) = limited("role: operator, keys: ['net_*']").await;
    let mut keys = host.keys().await;
    let prepare = |patterns: &[&str]| v1::PrepareUpdateRequest {
        guest: "web-1".to_owned(),
        updates: update_matching("web-1", patterns).updates,
        ..Default::default()
    };
    let refused = keys.prepare_update(prepare(&["*_a"])).await;
    let (message, _) = assert_refused(refused, Code::PermissionDenied, "ROLE_MISSING");
    assert!(message.contains("ext4_a"), "{message}");
    let plan = keys.prepare_update(prepare(&["net_*"])).await;
    let plan = plan.expect("allowed").into_inner();
    reload(&mut host, RULE).await;
    let commit = v1::CommitUpdateRequest {
        guest: "web-1".to_owned(),
        plan_id: plan.plan_id,
        ..Default::default()
    };
    let refused = keys.commit_update(commit.clone()).await;
    let (message, _) = assert_refused(refused, Code::PermissionDenied, "ROLE_MISSING");
    assert!(message.contains("net_b"), "{message}");
    assert_eq!(web.guest.count("net_a"), 0);
    reload(&mut host, "role: operator, max_keys: 2").await;
    keys.commit_update(commit).await.expect("both may change");
    assert_eq!((web.guest.count("net_a"), web.guest.count("net_b")), (1, 1));
}

#[tokio::test]
async fn holds_are_released_and_renewed_by_their_keys() {
    let (mut host, web) = limited("role: operator").await;
    let mut keys = host.keys().await;
    for key in ["net_a", "net_b"] {
        let taken = update("web-1", &[key], v1::KeyOp::Inc);
        keys.update_static_keys(taken).await.expect("allowed");
    }
    let list = v1::ListHoldsRequest {
        guest: "web-1".to_owned(),
        ..Default::default()
    };
    let holds = keys.list_holds(list).await.expect("listed").into_inner();
    let ids: Vec<String> = holds.holds.into_iter().map(|hold| hold.id).collect();
    reload(&mut host, RULE).await;
    let release = |ids: &[String]| v1::ReleaseHoldsRequest {
        guest: "web-1".to_owned(),
        ids: ids.to_vec(),
        ..Default::default()
    };
    let renew = |ids: &[String]| v1::RenewHoldsRequest {
        guest: "web-1".to_owned(),
        ids: ids.to_vec(),
        ..Default::default()
    };
    let refused = keys.renew_holds(renew(&ids)).await;
    assert_refused(refused, Code::PermissionDenied, "ROLE_MISSING");
    let refused = keys.release_holds(release(&ids)).await;
    assert_refused(refused, Code::PermissionDenied, "ROLE_MISSING");
    keys.renew_holds(renew(&ids[..1])).await.expect("net_a");
    keys.release_holds(release(&ids[..1])).await.expect("net_a");
    assert_eq!((web.guest.count("net_a"), web.guest.count("net_b")), (0, 1));
}

#[tokio::test]
async fn a_repair_is_permitted_by_its_key() {
    let (host, _web) = limited("role: admin, keys: ['net_*'], max_keys: 1").await;
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
    // A dry run does not count towards the caps.
    for (name, validate_only) in [("net_b", true), ("net_a", true), ("net_a", false)] {
        let allowed = keys.repair_static_key(repair(name, validate_only)).await;
        allowed.expect("a key of the rule");
    }
    let refused = keys.repair_static_key(repair("net_b", false)).await;
    assert_refused(refused, Code::PermissionDenied, "ROLE_MISSING");
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
    // The change is checked, but nothing is changed.
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
