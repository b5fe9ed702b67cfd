// SPDX-License-Identifier: Apache-2.0
//! Tests listing and reading keys.

use patchbay_guest::testing::TestKey;
use patchbay_proto::v1;
use tonic::Code;

use super::support::{Served, Setup, assert_refused};

fn names(response: &v1::ListStaticKeysResponse) -> Vec<String> {
    response.keys.iter().map(|key| key.name.clone()).collect()
}

#[tokio::test]
async fn lists_keys_of_every_kind_by_name() {
    let served = Served::start().await;
    let response = served
        .list(v1::ListStaticKeysRequest::default())
        .await
        .expect("registered");
    let expected = [
        "alpha",
        "beta",
        "guarded",
        "likely",
        "sched_switch",
        "sched_waking",
        "sealed",
        "siteless",
    ];
    assert_eq!(names(&response), expected);
    assert_eq!(response.total_size, 8);
    assert!(response.next_page_token.is_empty());
    let by_name = |name: &str| {
        response
            .keys
            .iter()
            .find(|key| key.name == name)
            .expect("listed")
    };
    assert_eq!(by_name("beta").site_count, 3);
    assert_eq!(by_name("beta").patchable_sites, 3);
    assert_eq!(by_name("siteless").site_count, 0);
    assert!(by_name("likely").initially_true && by_name("likely").enabled);
    assert!(by_name("sealed").sealed);
    assert_eq!(by_name("sealed").patchable_sites, 0);
    assert_eq!(by_name("guarded").key_class(), v1::KeyClass::Guarded);
    assert_eq!(by_name("alpha").key_class(), v1::KeyClass::Ref);
    assert_eq!(
        by_name("sched_switch").key_class(),
        v1::KeyClass::Tracepoint
    );
    assert!(
        by_name("alpha").sites.is_empty(),
        "sites come with get alone"
    );
}

#[tokio::test]
async fn filters_by_pattern_class_and_state() {
    let served = Served::start().await;
    assert_eq!(
        served.guest.add_module("ext4", &[TestKey::new("alpha", 1)]),
        0
    );
    let list = async |patterns: &[&str], classes: &[v1::KeyClass], enabled| {
        let request = v1::ListStaticKeysRequest {
            patterns: patterns.iter().map(|&pattern| pattern.to_owned()).collect(),
            classes: classes.iter().map(|&class| class.into()).collect(),
            enabled,
            ..Default::default()
        };
        names(&served.list(request).await.expect("well-formed"))
    };
    assert_eq!(
        list(&["sched_*"], &[], None).await,
        ["sched_switch", "sched_waking"]
    );
    assert_eq!(list(&["alpha"], &[], None).await, ["alpha", "ext4:alpha"]);
    assert_eq!(list(&["alpha", "!ext4:*"], &[], None).await, ["alpha"]);
    assert_eq!(list(&["ext4:*"], &[], None).await, ["ext4:alpha"]);
    assert_eq!(list(&[], &[v1::KeyClass::Guarded], None).await, ["guarded"]);
    assert_eq!(list(&[], &[], Some(true)).await, ["likely"]);
    assert_eq!(
        list(&["likely"], &[], Some(false)).await,
        Vec::<String>::new()
    );
    assert_eq!(list(&["nothing*"], &[], None).await, Vec::<String>::new());
}

#[tokio::test]
async fn pages_cover_every_key_once() {
    let served = Served::start().await;
    let mut request = v1::ListStaticKeysRequest {
        page_size: 3,
        ..Default::default()
    };
    let mut seen = vec![];
    loop {
        let page = served.list(request.clone()).await.expect("well-formed");
        assert_eq!(page.total_size, 8);
        assert!(page.keys.len() <= 3);
        seen.extend(names(&page));
        if page.next_page_token.is_empty() {
            break;
        }
        request.page_token = page.next_page_token;
    }
    assert_eq!(
        seen,
        names(
            &served
                .list(v1::ListStaticKeysRequest::default())
                .await
                .expect("all")
        )
    );
}

#[tokio::test]
async fn malformed_list_requests_are_refused() {
    let served = Served::start().await;
    let first = served
        .list(v1::ListStaticKeysRequest {
            page_size: 1,
            ..Default::default()
        })
        .await
        .expect("well-formed");
    let bad = [
        v1::ListStaticKeysRequest {
            page_size: -1,
            ..Default::default()
        },
        v1::ListStaticKeysRequest {
            page_token: "nonsense".into(),
            ..Default::default()
        },
        v1::ListStaticKeysRequest {
            page_token: "xyz.alpha".into(),
            ..Default::default()
        },
        v1::ListStaticKeysRequest {
            patterns: vec!["key[".into()],
            ..Default::default()
        },
        v1::ListStaticKeysRequest {
            patterns: vec![String::new()],
            ..Default::default()
        },
        v1::ListStaticKeysRequest {
            classes: vec![99],
            ..Default::default()
        },
        v1::ListStaticKeysRequest {
            classes: vec![0],
            ..Default::default()
        },
    ];
    for request in bad {
        assert_refused(
            served.list(request).await,
            Code::InvalidArgument,
            "INVALID_ARGUMENT",
        );
    }
    // A token stays valid across changes of keys, but not across a registration.
    assert_eq!(served.guest.register(&[TestKey::new("zeta", 1)]), 0);
    let stale = v1::ListStaticKeysRequest {
        page_token: first.next_page_token,
        ..Default::default()
    };
    let (message, _) = assert_refused(
        served.list(stale).await,
        Code::InvalidArgument,
        "INVALID_ARGUMENT",
    );
    assert!(message.contains("earlier registration"), "{message}");
}

#[tokio::test]
async fn get_shows_each_site_with_both_encodings() {
    let served = Served::start().await;
    let key = served.get("beta").await.expect("exists");
    assert_eq!(key.sites.len(), 3);
    assert_eq!(
        key.sites
            .iter()
            .map(|site| site.address)
            .collect::<Vec<_>>(),
        served.guest.sites("beta")
    );
    for site in &key.sites {
        assert_eq!(site.current_bytes, [0x0f, 0x1f, 0x44, 0, 0]);
        assert_eq!(site.disassembly, "nop dword ptr [rax+rax]");
        assert_eq!(site.size, 5);
        assert_eq!(site.other_bytes[0], 0xe9);
        assert_eq!(site.other_disassembly, format!("jmp {:#x}", site.target));
        assert_eq!(site.obstacle_message, "");
        assert!(!site.likely);
    }
    let likely = served.get("likely").await.expect("exists");
    assert!(
        likely
            .sites
            .iter()
            .all(|site| site.likely && site.current_bytes[0] == 0x0f)
    );
    let sealed = served.get("sealed").await.expect("exists");
    assert!(
        sealed.sites[0].obstacle_message.contains("sealed"),
        "{:?}",
        sealed.sites
    );
    assert!(
        served
            .get("siteless")
            .await
            .expect("exists")
            .sites
            .is_empty()
    );
}

#[tokio::test]
async fn foreign_bytes_are_shown_as_they_are() {
    let served = Served::start().await;
    served
        .guest
        .write(served.guest.sites("alpha")[0], &[0xcc, 1, 2, 3, 4]);
    let site = served.get("alpha").await.expect("exists").sites.remove(0);
    assert_eq!(site.current_bytes[0], 0xcc);
    assert_eq!(site.disassembly, "int3");
    assert_eq!(site.size, 0);
    assert!(!site.obstacle_message.is_empty());
}

#[tokio::test]
async fn unknown_keys_name_those_near_them() {
    let served = Served::start().await;
    let (message, metadata) =
        assert_refused(served.get("alpa").await, Code::NotFound, "KEY_NOT_FOUND");
    assert!(message.contains("alpha"), "{message}");
    assert_eq!(metadata["near"], "alpha");
    let (message, _) = assert_refused(
        served.get("nothing_like_it").await,
        Code::NotFound,
        "KEY_NOT_FOUND",
    );
    assert!(message.contains("list the keys"), "{message}");
    assert_refused(served.get("").await, Code::NotFound, "KEY_NOT_FOUND");
}

#[tokio::test]
async fn a_guest_that_has_not_registered_is_told_how_to() {
    let served = Served::with(Setup::default()).await;
    let listed = served.list(v1::ListStaticKeysRequest::default()).await;
    let (message, _) = assert_refused(listed, Code::FailedPrecondition, "GUEST_NOT_REGISTERED");
    assert!(message.contains("cargo xtask guest-kernel"), "{message}");
    assert_refused(
        served.get("alpha").await,
        Code::FailedPrecondition,
        "GUEST_NOT_REGISTERED",
    );
    let updated = served.op("alpha", v1::KeyOp::Inc).await;
    assert_refused(updated, Code::FailedPrecondition, "GUEST_NOT_REGISTERED");
    let holds = served
        .client()
        .list_holds(v1::ListHoldsRequest::default())
        .await;
    let holds = holds.expect("the ledger is the service's own").into_inner();
    assert!(holds.holds.is_empty());
}

#[tokio::test]
async fn keys_of_modules_come_and_go_with_them() {
    let served = Served::start().await;
    let module = [TestKey::new("own", 2)];
    assert_eq!(served.guest.add_module("ext4", &module), 0);
    assert_eq!(
        served.get("ext4:own").await.expect("loaded").sites[0].module,
        "ext4"
    );
    served
        .op("ext4:own", v1::KeyOp::Inc)
        .await
        .expect("a ref key");
    assert_eq!(served.holds().await.len(), 1);
    assert_eq!(served.guest.delete_module("ext4"), 0);
    assert_refused(
        served.get("ext4:own").await,
        Code::NotFound,
        "KEY_NOT_FOUND",
    );
    assert_eq!(served.guest.delete_module("ext4"), 0, "idempotent");
    assert!(
        served.holds().await.is_empty(),
        "a key that is gone is not held"
    );
}
