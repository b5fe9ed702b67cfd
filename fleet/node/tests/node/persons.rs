// SPDX-License-Identifier: Apache-2.0
//! Tests calls that a controller makes for a person.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use patchbay_access::assertion::{self, MAX_SKEW, VALIDITY};
use patchbay_access::connect::TlsFiles;
use patchbay_access::policy::Role;
use patchbay_proto::fleet::v1::{Assertion, SignedAssertion};
use patchbay_proto::scope::{SCOPE_METADATA, Scope};
use patchbay_proto::{ASSERTION_METADATA, MAX_ASSERTION_BYTES, PERSON_METADATA, v1};
use prost::Message;
use rustix::process::Signal;
use serde_json::Value;
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Code, Request};

use super::fake::Fake;
use super::remote::{Remote, issue};
use super::support::{Host, assert_refused, own_uid};

const FLEET: &str = "spiffe://example.org/fleet";
const OTHER: &str = "spiffe://example.org/other";
/// A person whom a rule limits to one key.
const ALICE: &str = "spiffe://example.org/net/alice";
/// A person whom a rule makes a viewer.
const EVE: &str = "spiffe://example.org/look/eve";
/// A person whom only the rule for everybody covers.
const CAROL: &str = "spiffe://example.org/people/carol";

const POLICY: &str = "
rules:
  - {name: fleet, principals: ['spiffe://example.org/fleet'], role: operator, may_assert: true}
  - {name: other, principals: ['spiffe://example.org/other'], role: operator}
  - {name: net, principals: ['spiffe://example.org/net/*'], role: operator, keys: [net_a]}
  - {name: look, principals: ['spiffe://example.org/look/*'], role: viewer}
  - {name: all, principals: ['*'], role: viewer}
";

/// Returns a request for claims on these keys; one that ends the claims if there are none.
fn claims(generation: u64, keys: &[&str]) -> v1::SetClaimsRequest {
    let claim = |key: &&str| v1::KeyClaim {
        key: (*key).to_owned(),
        want: v1::ClaimWant::On.into(),
        ..Default::default()
    };
    v1::SetClaimsRequest {
        guest: "web-1".to_owned(),
        owner: "rollout/net/1".to_owned(),
        generation,
        claims: keys.iter().map(claim).collect(),
        ..Default::default()
    }
}

/// Returns an assertion that fits the request.
fn asserts(request: &v1::SetClaimsRequest, person: &str) -> Assertion {
    Assertion {
        person: person.to_owned(),
        owner: request.owner.clone(),
        generation: request.generation,
        host: "localhost".to_owned(),
        guest: request.guest.clone(),
        intent_digest: request.intent_digest.clone(),
        validate_only: request.validate_only,
        issued_at_ms: assertion::millis(SystemTime::now()),
    }
}

/// Returns the request with these assertions.
fn with<T>(request: T, assertions: &[Vec<u8>]) -> Request<T> {
    let mut request = Request::new(request);
    for assertion in assertions {
        let value = MetadataValue::from_bytes(assertion);
        request.metadata_mut().append_bin(ASSERTION_METADATA, value);
    }
    request
}

/// Issues a certificate for the controller, and returns its files.
fn controller(ca: &Path, name: &str, spiffe: &str) -> (PathBuf, TlsFiles) {
    let certificate = issue(ca, name, Some(spiffe), &[]);
    let files = TlsFiles {
        certificate: certificate.clone(),
        key: certificate.with_extension("key"),
        ca: ca.join("ca.pem"),
    };
    (certificate, files)
}

/// Returns the lines of the host's audit log for this event.
fn lines(host: &Host, event: &str) -> Vec<Value> {
    let lines = host.audit().into_iter();
    lines.filter(|line| line["event"] == event).collect()
}

#[tokio::test]
async fn the_audit_logs_name_the_controller_and_the_person() {
    let mut remote = Remote::start(POLICY).await;
    let (certificate, files) = controller(&remote.host.path("ca"), "fleet", FLEET);
    let (signer, mut keys) = (
        files.signer().expect("a key"),
        remote.keys(&certificate).await,
    );
    let mut set = async |request: v1::SetClaimsRequest, person: &str| {
        let signed = signer.sign(&asserts(&request, person)).expect("signed");
        keys.set_claims(with(request, &[signed])).await
    };
    // No rule names the person, so the controller's rights decide.
    set(claims(1, &["net_b"]), CAROL).await.expect("allowed");
    // The claims belong to the controller, whoever causes a change of them.
    let both = claims(2, &["net_a", "net_b"]);
    let (message, _) = assert_refused(
        set(both, ALICE).await,
        Code::PermissionDenied,
        "ROLE_MISSING",
    );
    for word in [ALICE, "rule \"net\"", "net_b"] {
        assert!(message.contains(word), "{message}");
    }
    set(claims(2, &["net_a"]), ALICE).await.expect("her key");
    let refused = set(claims(3, &["net_b"]), EVE).await;
    let (message, _) = assert_refused(refused, Code::PermissionDenied, "ROLE_MISSING");
    for word in [FLEET, EVE, "rule \"look\" gives the role viewer"] {
        assert!(message.contains(word), "{message}");
    }
    // Everyone who may abort a rollout can end its claims.
    set(claims(3, &[]), EVE).await.expect("an end");
    keys.set_claims(claims(4, &["net_b"]))
        .await
        .expect("its own");
    let owned = v1::ListClaimsRequest {
        guest: "web-1".to_owned(),
        ..Default::default()
    };
    let owned = keys.list_claims(owned).await.expect("listed").into_inner();
    assert_eq!(owned.claims[0].principal, FLEET);

    remote.host.signal(Signal::TERM);
    assert!(remote.host.ended().await.success());
    let who = |line: &Value| {
        let text = |field: &str| line[field].as_str().map(str::to_owned);
        (text("principal"), text("person"), text("rule"))
    };
    let fleet = || Some(FLEET.to_owned());
    let by = |person: &str, rule: &str| (fleet(), Some(person.to_owned()), Some(rule.to_owned()));
    let intents: Vec<_> = lines(&remote.host, "intent").iter().map(who).collect();
    let for_alice = format!("fleet; for {ALICE}: net");
    assert_eq!(
        intents,
        [
            by(CAROL, "fleet"),
            by(ALICE, &for_alice),
            by(ALICE, &for_alice),
            by(EVE, "fleet"),
            (fleet(), None, Some("fleet".to_owned())),
        ]
    );
    let denied: Vec<_> = lines(&remote.host, "denied").iter().map(who).collect();
    assert_eq!(denied, [(fleet(), Some(EVE.to_owned()), None)]);
    let log = std::fs::read_to_string(remote.host.path("web-1.audit")).expect("a log");
    let log = log
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let sets: Vec<_> = log
        .filter(|line| !line["generation"].is_null())
        .map(|line| (line["owner"].clone(), line["person"].clone()))
        .collect();
    let persons = [Some(CAROL), Some(ALICE), Some(EVE), None];
    let persons =
        persons.map(|person| (Value::from(FLEET), person.map_or(Value::Null, Value::from)));
    assert_eq!(sets, persons);
}

#[tokio::test]
async fn what_is_not_signed_for_this_call_by_this_controller_is_refused() {
    let remote = Remote::start(POLICY).await;
    let ca = remote.host.path("ca");
    let (certificate, files) = controller(&ca, "fleet", FLEET);
    let (others, other) = controller(&ca, "other", OTHER);
    let (signer, foreign) = (
        files.signer().expect("a key"),
        other.signer().expect("a key"),
    );
    let mut keys = remote.keys(&certificate).await;
    let request = v1::SetClaimsRequest {
        // The digest of "net_b on".
        intent_digest: patchbay_service::keys::claims::intent_digest(&[(
            "net_b".to_owned(),
            patchbay_service::keys::claims::Want::On,
        )]),
        ..claims(7, &["net_b"])
    };
    let good = asserts(&request, CAROL);
    let sign = |assertion: Assertion| signer.sign(&assertion).expect("signed");
    let at = |time: SystemTime| assertion::millis(time);
    let (now, minute) = (SystemTime::now(), Duration::from_secs(60));
    let tampered = {
        let mut signed = SignedAssertion::decode(&*sign(good.clone())).expect("encoded");
        let mallory = Assertion {
            person: ALICE.to_owned(),
            ..good.clone()
        };
        signed.assertion = mallory.encode_to_vec();
        signed.encode_to_vec()
    };
    let changed = |change: fn(&mut Assertion)| {
        let mut other = good.clone();
        change(&mut other);
        vec![sign(other)]
    };
    let signed_at = |issued_at_ms| {
        vec![sign(Assertion {
            issued_at_ms,
            ..good.clone()
        })]
    };
    let cases = [
        (
            vec![foreign.sign(&good).expect("signed")],
            "not signed with the key",
        ),
        (vec![tampered], "not signed with the key"),
        (vec![assertion::unsigned(&good)], "is not signed"),
        (
            changed(|other| other.host = "host-2".to_owned()),
            "another host",
        ),
        (
            changed(|other| other.guest = "db-1".to_owned()),
            "another guest",
        ),
        (
            changed(|other| other.owner = "rollout/x/1".to_owned()),
            "another owner",
        ),
        (changed(|other| other.generation = 6), "another generation"),
        (
            changed(|other| other.validate_only = true),
            "another kind of call",
        ),
        (
            changed(|other| other.intent_digest.clear()),
            "another set of claims",
        ),
        (
            changed(|other| other.person = "monitor".to_owned()),
            "an invalid name",
        ),
        (signed_at(at(now - VALIDITY - minute)), "expired"),
        (signed_at(at(now + MAX_SKEW + minute)), "future"),
        (vec![vec![0; MAX_ASSERTION_BYTES + 1]], "4097 bytes"),
        (vec![b"\xff".to_vec()], "cannot be read"),
        (
            vec![sign(good.clone()), sign(good.clone())],
            "more than once",
        ),
    ];
    let mut refusals = cases.len();
    for (assertions, word) in cases {
        let refused = keys.set_claims(with(request.clone(), &assertions)).await;
        let (message, _) = assert_refused(refused, Code::PermissionDenied, "PRINCIPAL_NOT_TRUSTED");
        assert!(
            message.contains(word) && message.contains(FLEET),
            "{message}"
        );
    }
    // Another client has the same rights as the controller, but must not name a person.
    let mut clients = remote.keys(&others).await;
    let own = foreign.sign(&good).expect("signed");
    for assertion in [own, sign(good.clone())] {
        let refused = clients
            .set_claims(with(request.clone(), &[assertion]))
            .await;
        let (message, _) = assert_refused(refused, Code::PermissionDenied, "PRINCIPAL_NOT_TRUSTED");
        assert!(message.contains("may_assert"), "{message}");
        refusals += 1;
    }
    let list = v1::ListStaticKeysRequest {
        guest: "web-1".to_owned(),
        ..Default::default()
    };
    let refused = keys
        .list_static_keys(with(list, &[sign(good.clone())]))
        .await;
    let (message, _) = assert_refused(refused, Code::PermissionDenied, "PRINCIPAL_NOT_TRUSTED");
    assert!(message.contains("only with SetClaims"), "{message}");
    refusals += 1;
    // Nothing was changed, and each refusal is recorded without the person.
    remote.host.audit_until(refusals).await;
    for line in remote.host.audit() {
        let why = line["why"].as_str().expect("a reason");
        let is_others = why.contains("may_assert");
        assert_eq!(line["principal"], if is_others { OTHER } else { FLEET });
        assert_eq!(
            (line["event"].as_str(), line.get("person")),
            (Some("denied"), None)
        );
    }
    keys.set_claims(with(request, &[sign(good)]))
        .await
        .expect("good");
}

#[tokio::test]
async fn the_uid_of_a_peer_on_the_socket_is_believed_if_it_may_assert() {
    let policy = |rule: &str| {
        format!(
            "rules:\n  - {{name: own, principals: ['{}'], role: operator{rule}}}\n  \
             - {{name: net, principals: [alice], role: operator, keys: ['net_*'], max_keys: 7}}",
            own_uid()
        )
    };
    let mut host = Host::new(&policy(""));
    host.start_daemon(&[]).await;
    let fake = Fake::start(&host.path("run/web-1.sock"), &["web-1"]).await;
    host.list_until(1).await;
    fake.answer("SetClaims", |_: v1::SetClaimsRequest| {
        Ok(v1::SetClaimsResponse::default())
    });
    let mut keys = host.keys().await;
    let request = claims(1, &["net_b"]);
    let unsigned = |person: &str| assertion::unsigned(&asserts(&request, person));
    let refused = keys
        .set_claims(with(request.clone(), &[unsigned("bob")]))
        .await;
    assert_refused(refused, Code::PermissionDenied, "PRINCIPAL_NOT_TRUSTED");
    host.write_policy(&policy(", may_assert: true"));
    host.signal(Signal::HUP);
    host.logged("policy read again").await;
    let mut made = async |person: &str| {
        let mut call = with(request.clone(), &[unsigned(person)]);
        // This name is dropped: the daemon alone names the person to the monitor.
        let forged = "mallory".parse().expect("ASCII");
        call.metadata_mut().insert(PERSON_METADATA, forged);
        keys.set_claims(call).await.expect("believed");
        let headers = fake.received("SetClaims").pop().expect("a call").headers;
        assert!(!headers.contains_key(ASSERTION_METADATA));
        let text = |name: &str| headers[name].to_str().expect("text").to_owned();
        assert_eq!(text("patchbay-principal"), own_uid());
        assert_eq!(text(PERSON_METADATA), person);
        (text("patchbay-role"), MetadataMap::from_headers(headers))
    };
    let (role, metadata) = made("bob").await;
    assert_eq!(role, "operator");
    assert!(!metadata.contains_key(SCOPE_METADATA));
    // A monitor that does not apply the person's rules does not know this role.
    let (role, metadata) = made("alice").await;
    assert_eq!(role, "operator/scoped-by-person");
    assert!(role.parse::<Role>().is_err());
    let scope = metadata.get_bin(SCOPE_METADATA).expect("asserted");
    let scope = Scope::decode(scope.to_bytes().expect("base64")).expect("a scope");
    assert!(scope.rules[0].keys.is_empty() && scope.rules[0].max_keys.is_none());
    let person = scope.person.expect("bounded");
    assert_eq!((&*person.name, &*person.rules[0].name), ("alice", "net"));
    assert_eq!(person.rules[0].max_keys, Some(7));
    let bare = keys.set_claims(claims(2, &["net_b"])).await;
    bare.expect("for nobody");
    let headers = fake.received("SetClaims").pop().expect("a call").headers;
    assert!(!headers.contains_key(PERSON_METADATA));
}
