// SPDX-License-Identifier: Apache-2.0
//! Tests principals, and the rights of each role.

use std::collections::BTreeSet;

use patchbay_proto::{PRINCIPAL_METADATA, ROLE_METADATA, v1};
use patchbay_service::auth::{Authoriser, Denied, Principal, Role, SocketAuthoriser};
use tonic::metadata::MetadataValue;
use tonic::{Code, Request, Status};

use super::several::{Host, by, every_call};
use super::support::{assert_refused, request};

/// Gives a principal the role that its name contains, on all guests or on the guest after an "@".
struct Named;

impl Authoriser for Named {
    fn may(&self, principal: &Principal, needed: Role, _: &str, guest: &str) -> Result<(), Denied> {
        let (role, on) = match principal.as_str().split_once('@') {
            Some((role, on)) => (role, on),
            None => (principal.as_str(), guest),
        };
        let found = role.parse().ok().filter(|_| on == guest);
        match found {
            Some(role) if role >= needed => Ok(()),
            found => Err(Denied { found }),
        }
    }
}

fn is_role_missing(result: &Result<(), Status>) -> bool {
    result
        .as_ref()
        .is_err_and(|status| status.code() == Code::PermissionDenied)
}

#[tokio::test]
async fn each_role_may_call_its_methods_and_no_others() {
    const OPERATORS: [&str; 13] = [
        "pause_guest",
        "resume_guest",
        "update_static_keys",
        "prepare_update",
        "commit_update",
        "discard_update",
        "release_holds",
        "renew_holds",
        "set_claims",
        "arm_tracepoints",
        "fire_tracepoints",
        "park_tracepoints",
        "disarm_tracepoints",
    ];
    const ADMINS: [&str; 4] = [
        "shutdown_guest",
        "snapshot_guest",
        "stream_console",
        "repair_static_key",
    ];
    let host = Host::with_two(Named).await;
    for role in ["viewer", "operator", "nobody", "admin"] {
        let mut refused = BTreeSet::new();
        for (method, result) in every_call(&host, "web-1", role).await {
            if is_role_missing(&result) {
                refused.insert(method);
                let (message, metadata) =
                    assert_refused(result, Code::PermissionDenied, "ROLE_MISSING");
                let path = metadata["method"].rsplit('/').next().unwrap_or_default();
                assert_eq!(path.to_lowercase(), method.replace('_', ""));
                assert!(message.contains(&metadata["method"]), "{message}");
                assert!(message.contains(&metadata["role"]), "{message}");
            }
        }
        let mut expected = BTreeSet::new();
        if role == "viewer" {
            expected.extend(OPERATORS);
        }
        if role != "admin" {
            expected.extend(ADMINS);
        }
        if role == "nobody" {
            assert_eq!(refused.len(), 32, "{refused:?}");
        } else {
            assert_eq!(refused, expected, "{role}");
        }
    }
}

/// A key and a value of the call's metadata.
type Metadata<'v> = (&'static str, &'v [u8]);

/// Returns the call with exactly this metadata.
fn with<T>(message: T, metadata: &[Metadata<'_>]) -> Request<T> {
    let mut request = Request::new(message);
    for (key, value) in metadata {
        let value = MetadataValue::try_from(*value).expect("a header's value");
        request.metadata_mut().append(*key, value);
    }
    request
}

#[tokio::test]
async fn force_and_guarded_keys_are_for_admins() {
    let host = Host::with_two(Named).await;
    let mut keys = host.keys();
    let guest = || "web-1".to_owned();
    let update = |force, allow_guarded| v1::UpdateStaticKeysRequest {
        guest: guest(),
        force,
        allow_guarded,
        ..request(&[("key-web-1", v1::KeyOp::Inc)])
    };
    for (force, allow_guarded) in [(true, false), (false, true)] {
        let refused = keys.update_static_keys(by("operator", update(force, allow_guarded)));
        let (message, metadata) =
            assert_refused(refused.await, Code::PermissionDenied, "ROLE_MISSING");
        assert_eq!(
            (metadata["role"].as_str(), metadata["found"].as_str()),
            ("admin", "operator")
        );
        assert!(message.contains("web-1"), "{message}");
        let done = keys.update_static_keys(by("admin", update(force, allow_guarded)));
        done.await.expect("an admin");
    }
    let done = keys.update_static_keys(by("operator", update(false, false)));
    assert_eq!(
        done.await.expect("an operator").into_inner().results[0].count_before,
        2
    );

    let prepare = v1::PrepareUpdateRequest {
        guest: guest(),
        force: true,
        ..Default::default()
    };
    let release = v1::ReleaseHoldsRequest {
        guest: guest(),
        force: true,
        ..Default::default()
    };
    let park = v1::ParkTracepointsRequest {
        guest: guest(),
        force: true,
        ..Default::default()
    };
    let disarm = v1::DisarmTracepointsRequest {
        guest: guest(),
        force: true,
        ..Default::default()
    };
    let stream = v1::StreamTracepointEventsRequest {
        guest: guest(),
        arm_and_fire: true,
        ..Default::default()
    };
    let refused = [
        host.keys()
            .prepare_update(by("operator", prepare))
            .await
            .map(drop),
        host.keys()
            .release_holds(by("operator", release))
            .await
            .map(drop),
        host.tracepoints()
            .park_tracepoints(by("operator", park))
            .await
            .map(drop),
        host.tracepoints()
            .disarm_tracepoints(by("operator", disarm))
            .await
            .map(drop),
        host.tracepoints()
            .stream_tracepoint_events(by("viewer", stream))
            .await
            .map(drop),
    ];
    for refused in refused {
        assert_refused(refused, Code::PermissionDenied, "ROLE_MISSING");
    }
}

/// Checks that the holder is the principal that the proxy asserts, and not the peer of the
/// connection.
#[tokio::test]
async fn an_asserted_principal_is_the_holder() {
    let host = Host::with_two(SocketAuthoriser).await;
    let update = |op| v1::UpdateStaticKeysRequest {
        guest: "web-1".to_owned(),
        ..request(&[("key-web-1", op)])
    };
    let name = "spiffe://example.org/alice";
    host.keys()
        .update_static_keys(by(name, update(v1::KeyOp::Inc)))
        .await
        .expect("taken");
    let list = v1::ListHoldsRequest {
        guest: "web-1".to_owned(),
        ..Default::default()
    };
    let holds = host
        .keys()
        .list_holds(list)
        .await
        .expect("registered")
        .into_inner()
        .holds;
    assert_eq!(holds[0].holder, name);
    for other in ["spiffe://example.org/bob", ""] {
        let refused = host
            .keys()
            .update_static_keys(by(other, update(v1::KeyOp::Dec)))
            .await;
        assert_refused(refused, Code::FailedPrecondition, "NOT_HOLDER");
    }
    host.keys()
        .update_static_keys(by(name, update(v1::KeyOp::Dec)))
        .await
        .expect("her own");
}

#[tokio::test]
async fn an_asserted_role_limits_the_call() {
    let host = Host::with_two(SocketAuthoriser).await;
    let pause = |role: &'static [u8]| {
        let guest = "web-1".to_owned();
        let request = v1::PauseGuestRequest {
            guest,
            ..Default::default()
        };
        let mut client = host.guest();
        async move {
            client
                .pause_guest(with(request, &[(ROLE_METADATA, role)]))
                .await
        }
    };
    let (_, metadata) = assert_refused(
        pause(b"viewer").await,
        Code::PermissionDenied,
        "ROLE_MISSING",
    );
    assert_eq!(
        (metadata["role"].as_str(), metadata["found"].as_str()),
        ("operator", "viewer")
    );
    pause(b"operator").await.expect("enough");
    pause(b"admin").await.expect("more than enough");
    // The limit does not grant a role that the policy has not granted.
    let host = Host::with_two(Named).await;
    let request = v1::PauseGuestRequest {
        guest: "web-1".to_owned(),
        ..Default::default()
    };
    let metadata = [
        (PRINCIPAL_METADATA, &b"viewer"[..]),
        (ROLE_METADATA, b"admin"),
    ];
    let refused = host.guest().pause_guest(with(request, &metadata)).await;
    assert_refused(refused, Code::PermissionDenied, "ROLE_MISSING");
}

#[tokio::test]
async fn malformed_assertions_are_refused() {
    let host = Host::with_two(SocketAuthoriser).await;
    let long = [b'x'; 257];
    let bad: [(&[Metadata<'_>], &str); 7] = [
        (&[(PRINCIPAL_METADATA, b"")], "0 bytes"),
        (&[(PRINCIPAL_METADATA, &long)], "257 bytes"),
        (&[(PRINCIPAL_METADATA, b"n\xc3\xa9")], "printable ASCII"),
        (&[(PRINCIPAL_METADATA, b"monitor")], "of the service itself"),
        (
            &[(PRINCIPAL_METADATA, b"a"), (PRINCIPAL_METADATA, b"b")],
            "more than once",
        ),
        (&[(ROLE_METADATA, b"root")], "unknown role"),
        (
            &[(ROLE_METADATA, b"admin"), (ROLE_METADATA, b"viewer")],
            "more than once",
        ),
    ];
    for (metadata, word) in bad {
        let message = v1::DescribeGuestRequest {
            guest: "web-1".to_owned(),
            ..v1::DescribeGuestRequest::default()
        };
        let refused = host.guest().describe_guest(with(message, metadata)).await;
        let (message, _) = assert_refused(refused, Code::InvalidArgument, "INVALID_ARGUMENT");
        assert!(message.contains(word), "{word}: {message}");
    }
}

#[tokio::test]
async fn a_principal_sees_its_own_guests_alone() {
    let host = Host::with_two(Named).await;
    let list = async |principal| {
        let request = by(principal, v1::ListGuestsRequest::default());
        let page = host
            .guest()
            .list_guests(request)
            .await
            .expect("listed")
            .into_inner();
        page.guests
            .into_iter()
            .map(|status| status.guest)
            .collect::<Vec<_>>()
    };
    assert_eq!(list("viewer").await, ["web-1", "web-2"]);
    assert_eq!(list("viewer@web-2").await, ["web-2"]);
    assert!(list("nobody").await.is_empty());
    let unknown = v1::DescribeGuestRequest {
        guest: "web".to_owned(),
        ..v1::DescribeGuestRequest::default()
    };
    let refused = host
        .guest()
        .describe_guest(by("viewer@web-2", unknown))
        .await;
    let (message, _) = assert_refused(refused, Code::NotFound, "GUEST_NOT_FOUND");
    assert!(
        message.contains("web-2") && !message.contains("web-1"),
        "{message}"
    );
}
