// SPDX-License-Identifier: Apache-2.0
//! Tests an etcd that loses members, and certificates that expire.

use std::time::Duration;

use patchbay_access::certs;
use patchbay_proto::fleet::v1;

use super::fleet::{ProcessFleet, spec};

#[tokio::test(flavor = "multi_thread")]
async fn a_rollout_stands_while_etcd_is_gone_and_goes_on_after_it() {
    let Some(mut fleet) = ProcessFleet::start(3, 1, 3, &[1]).await else {
        return;
    };
    let replica = fleet.replica("replica", &[]);
    let text = spec(
        "waves: [{size: rest}]\nmax_concurrent: {count: 1}\n\
         gates: [{max_errors: 0, on_failure: pause}]",
    );
    replica.start("net", &text, 3).await;
    fleet.monitors[1].as_mut().expect("started").paused().await;
    // If one member is down, nothing changes. If all members are down, the rollout is blocked.
    for member in 0..3 {
        fleet.etcd.kill_member(member);
        fleet.flip_beta(0).await.expect("the host needs no etcd");
    }
    fleet.monitors[1].as_mut().expect("started").go_on();
    assert_eq!(fleet.changes(2), [], "nothing is begun that is not stored");
    for member in 0..3 {
        fleet.etcd.start_member(member);
    }
    fleet.etcd.answers().await;
    let rollout = replica.wait("net", v1::Phase::Completed).await;
    assert_eq!(rollout.waves[0].as_wanted, 3, "{rollout:?}");
    for guest in 1..3 {
        assert_eq!(fleet.changes(guest), [(0, 1)], "guest {guest}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rollout_does_not_need_every_member_of_etcd() {
    let Some(mut fleet) = ProcessFleet::start(3, 1, 2, &[]).await else {
        return;
    };
    let replica = fleet.replica("replica", &[]);
    let text = spec("waves: [{size: 1, bake: 1h}, {size: rest}]");
    replica.start("net", &text, 2).await;
    fleet.etcd.kill_member(0);
    fleet.etcd.answers().await;
    let rollout = "net".to_owned();
    let promoted = async {
        loop {
            let rollout = rollout.clone();
            let promoted = replica
                .rollouts()
                .promote(v1::PromoteRequest {
                    rollout,
                    ..Default::default()
                })
                .await;
            match promoted {
                Ok(_) => return,
                // The first wave is still in progress, or another term has begun.
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    };
    let promoted = tokio::time::timeout(super::fleet::PATIENCE, promoted).await;
    promoted.expect("promoted in time");
    replica.wait("net", v1::Phase::Completed).await;
    for guest in 0..2 {
        assert_eq!(fleet.changes(guest), [(0, 1)], "guest {guest}");
    }
}

/// Writes FOLDER/NAME.pem and its key, valid for this long.
pub fn issue(
    folder: &std::path::Path,
    name: &str,
    host: Option<&str>,
    usage: rcgen::ExtendedKeyUsagePurpose,
    valid: time::Duration,
) {
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).expect("read");
    let ca_key = rcgen::KeyPair::from_pem(&read("ca.key")).expect("a key");
    let issuer = rcgen::Issuer::from_ca_cert_pem(&read("ca.pem"), ca_key).expect("a CA");
    let mut params = rcgen::CertificateParams::new(host.map(str::to_owned).as_slice());
    let params = params.as_mut().expect("a name");
    params
        .distinguished_name
        .push(rcgen::DnType::CommonName, name);
    let id = format!("spiffe://example.org/{name}");
    let id = rcgen::string::Ia5String::try_from(id).expect("ASCII");
    params.subject_alt_names.push(rcgen::SanType::URI(id));
    params.extended_key_usages = vec![usage];
    params.not_before = time::OffsetDateTime::now_utc() - time::Duration::minutes(5);
    params.not_after = time::OffsetDateTime::now_utc() + valid;
    let key = rcgen::KeyPair::generate().expect("a key");
    let certificate = params.signed_by(&key, &issuer).expect("signed");
    let file = |extension: &str| folder.join(format!("{name}.{extension}"));
    std::fs::write(file("key"), key.serialize_pem()).expect("written");
    std::fs::write(file("pem"), certificate.pem()).expect("written");
}

fn issue_controller(folder: &std::path::Path, valid: time::Duration) {
    let usage = rcgen::ExtendedKeyUsagePurpose::ClientAuth;
    issue(folder, "fleet", None, usage, valid);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_that_expires_pauses_the_rollout_until_it_is_renewed() {
    const VALID: Duration = Duration::from_secs(30);
    let Some(mut fleet) = ProcessFleet::start(1, 1, 3, &[0]).await else {
        return;
    };
    let ca = fleet.path("ca");
    certs::init(&ca, "example.org").expect("a CA");
    let host = certs::Request {
        name: "host".to_owned(),
        hosts: vec!["host-0-tls".to_owned()],
        days: 1,
        ..certs::Request::default()
    };
    certs::issue(&ca, &host).expect("issued");
    let policy = "rules: [{name: fleet, principals: ['spiffe://example.org/fleet'], role: admin, may_assert: true}]";
    std::fs::write(ca.join("policy.yaml"), policy).expect("written");
    fleet.start_host_with_tls(0, &ca).await;
    issue_controller(&ca, VALID.try_into().expect("short"));
    // A certificate is still valid in its last second.
    let expired = tokio::time::Instant::now() + VALID + Duration::from_secs(2);
    let file = |name: &str| ca.join(name).display().to_string();
    let (cert, key, host_ca) = (file("fleet.pem"), file("fleet.key"), file("ca.pem"));
    let options = [
        "--host-cert",
        &cert,
        "--host-key",
        &key,
        "--host-ca",
        &host_ca,
    ];
    let replica = fleet.replica("replica", &options);
    let text = spec(
        "waves: [{size: rest}]\nmax_concurrent: {count: 1}\n\
         gates: [{max_errors: 0, on_failure: pause}]",
    );
    replica.start("net", &text, 3).await;
    fleet.monitors[0].as_mut().expect("started").paused().await;
    tokio::time::sleep_until(expired).await;
    fleet.monitors[0].as_mut().expect("started").go_on();
    let rollout = replica.wait("net", v1::Phase::Paused).await;
    assert_eq!(rollout.waves[0].as_wanted, 1, "{rollout:?}");
    assert_eq!(fleet.changes(2), []);
    issue_controller(&ca, time::Duration::days(1));
    let rollout = "net".to_owned();
    let resume = v1::ResumeRequest { rollout };
    replica.rollouts().resume(resume).await.expect("legal");
    replica.wait("net", v1::Phase::Completed).await;
    for guest in 0..3 {
        assert_eq!(fleet.changes(guest), [(0, 1)], "guest {guest}");
    }
}
