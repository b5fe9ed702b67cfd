// SPDX-License-Identifier: Apache-2.0
//! Tests the policy and the audit log over the unix socket.

use patchbay_proto::v1;
use rustix::process::Signal;
use tonic::Code;

use super::fake::Fake;
use super::records::assert_no_records;
use super::support::{Host, assert_refused, own_uid, update, update_matching};

fn policy(rule: &str) -> String {
    format!(
        "rules: [{{name: own, principals: ['{}'], {rule}}}]",
        own_uid()
    )
}

#[tokio::test]
async fn whoever_no_rule_names_is_refused_a_list() {
    let mut host = Host::new("rules: [{name: other, principals: [nobody], role: admin}]");
    host.start_daemon(&[]).await;
    let _guest = host.monitor("web-1");
    host.logged("guest found").await;
    let mut guests = host.guests().await;
    let refused = guests.list_guests(v1::ListGuestsRequest::default()).await;
    let (message, _) = assert_refused(refused, Code::PermissionDenied, "ROLE_MISSING");
    assert!(message.contains("no rule of the policy names"), "{message}");
    // A rule about other guests does not change the reason of a refusal.
    let mut host = Host::new(&policy("role: viewer, guests: ['db-*']"));
    host.start_daemon(&[]).await;
    let _guest = host.monitor("web-1");
    host.logged("guest found").await;
    let mut guests = host.guests().await;
    let list = guests.list_guests(v1::ListGuestsRequest::default()).await;
    assert!(list.expect("an empty list").into_inner().guests.is_empty());
}

#[tokio::test]
async fn each_call_is_decided_and_written_down() {
    let mut host = Host::new(&policy(
        "role: operator, guests: ['web-*'], keys: ['net_*'], max_keys: 1",
    ));
    host.start_daemon(&[]).await;
    let [web, db] = ["web-1", "db-1"].map(|name| host.monitor(name));
    // The other guest is not even listed.
    host.logged("guest found").await;
    host.logged("guest found").await;
    assert_eq!(host.list_until(1).await[0].guest, "web-1");
    let mut keys = host.keys().await;
    let inc = v1::KeyOp::Inc;
    keys.update_static_keys(update("web-1", &["net_a"], inc))
        .await
        .expect("allowed");
    for (request, word) in [
        (update("db-1", &["net_a"], inc), "guest \"db-1\""),
        (update("no-such", &["net_a"], inc), "guest \"no-such\""),
        (update("web-1", &["ext4_a"], inc), "key \"ext4_a\""),
        (update("web-1", &["net_a", "net_b"], inc), "1 keys"),
        (
            v1::UpdateStaticKeysRequest {
                force: true,
                ..update("web-1", &["net_a"], inc)
            },
            "admin is needed",
        ),
    ] {
        let refused = keys.update_static_keys(request).await;
        let (message, metadata) = assert_refused(refused, Code::PermissionDenied, "ROLE_MISSING");
        assert!(
            message.contains(word) && message.contains(&own_uid()),
            "{message}"
        );
        assert!(metadata["why"].contains("rule \"own\""), "{metadata:?}");
    }
    let mut guests = host.guests().await;
    let shutdown = guests.shutdown_guest(v1::ShutdownGuestRequest {
        guest: "web-1".to_owned(),
        ..Default::default()
    });
    assert_refused(shutdown.await, Code::PermissionDenied, "ROLE_MISSING");
    let counts = [
        web.guest.count("net_a"),
        web.guest.count("net_b"),
        db.guest.count("net_a"),
    ];
    assert_eq!(counts, [1, 0, 0]);
    assert_eq!(web.guest.count("ext4_a"), 0);
    host.signal(Signal::TERM);
    assert!(host.ended().await.success());
    let log = host.audit();
    let events: Vec<_> = log
        .iter()
        .map(|line| line["event"].as_str().expect("an event"))
        .collect();
    // The monitor refuses keys, and the host refuses everything else.
    let made = ["intent", "outcome"];
    let (denied, refused) = (["denied"; 2], [made, made].concat());
    let expected = [&made[..], &denied, &refused, &denied].concat();
    assert_eq!(events, expected);
    for line in [&log[5], &log[7]] {
        assert_eq!(line["code"], "PERMISSION_DENIED");
    }
    let intent = &log[0];
    assert_eq!(intent["principal"], own_uid());
    assert_eq!(
        (&intent["guest"], &intent["rule"]),
        (&"web-1".into(), &"own".into())
    );
    assert!(
        intent["request"].as_str().expect("text").contains("net_a"),
        "{intent}"
    );
    assert_eq!(log[1]["code"], "OK");
}

#[tokio::test]
async fn caps_count_the_changes_of_an_hour() {
    let capped = policy("role: operator, max_keys: 1, max_guests: 1");
    let mut host = Host::new(&capped);
    host.start_daemon(&[]).await;
    let [web, db] = ["web-1", "db-1"].map(|name| host.monitor(name));
    host.list_until(2).await;
    let (mut keys, mut guests) = (host.keys().await, host.guests().await);
    let inc = v1::KeyOp::Inc;
    let dry_run = v1::UpdateStaticKeysRequest {
        validate_only: true,
        ..update("db-1", &["net_b"], inc)
    };
    keys.update_static_keys(dry_run).await.expect("tried");
    for _ in 0..2 {
        let request = update("web-1", &["net_a"], inc);
        keys.update_static_keys(request).await.expect("allowed");
    }
    for round in 0..2 {
        for (request, cap) in [
            (
                update("web-1", &["net_b"], inc),
                "1 keys of a guest in an hour",
            ),
            (
                update_matching("web-1", &["*_b"]),
                "1 keys of a guest in an hour",
            ),
            (update("db-1", &["net_a"], inc), "1 guests in an hour"),
        ] {
            let refused = keys.update_static_keys(request).await;
            let (message, _) = assert_refused(refused, Code::PermissionDenied, "ROLE_MISSING");
            assert!(message.contains(cap), "{round}: {message}");
        }
        let pause = v1::PauseGuestRequest {
            guest: "db-1".to_owned(),
            ..Default::default()
        };
        let refused = guests.pause_guest(pause).await;
        let (message, _) = assert_refused(refused, Code::PermissionDenied, "ROLE_MISSING");
        assert!(message.contains("1 guests in an hour"), "{message}");
        // A reload of the policy keeps the counts.
        host.write_policy(&capped);
        host.signal(Signal::HUP);
        host.logged("policy read again").await;
    }
    assert_eq!((web.guest.count("net_a"), web.guest.count("net_b")), (2, 0));
    assert_eq!(db.guest.count("net_a"), 0);
}

/// Without this rule, a user who has changed more than a new cap allows could not undo it.
#[tokio::test]
async fn what_gives_back_is_neither_counted_nor_refused_by_caps() {
    let mut host = Host::new(&policy("role: operator"));
    host.start_daemon(&[]).await;
    let [web, db] = ["web-1", "db-1"].map(|name| host.monitor(name));
    host.list_until(2).await;
    let mut keys = host.keys().await;
    for name in ["web-1", "db-1"] {
        for _ in 0..3 {
            let request = update(name, &["net_a"], v1::KeyOp::Inc);
            keys.update_static_keys(request).await.expect("no cap");
        }
    }
    host.write_policy(&policy("role: operator, max_guests: 1"));
    host.signal(Signal::HUP);
    host.logged("policy read again").await;
    for name in ["web-1", "db-1"] {
        let request = update(name, &["net_a"], v1::KeyOp::Dec);
        keys.update_static_keys(request).await.expect("gives back");
        let prepare = v1::PrepareUpdateRequest {
            guest: name.to_owned(),
            updates: update(name, &["net_a"], v1::KeyOp::Dec).updates,
            ..Default::default()
        };
        let plan = keys.prepare_update(prepare).await.expect("prepared");
        let plan = plan.into_inner();
        let commit = v1::CommitUpdateRequest {
            guest: name.to_owned(),
            plan_id: plan.plan_id,
            digest: plan.digest,
            ..Default::default()
        };
        keys.commit_update(commit).await.expect("gives back");
    }
    let counts = || [web.guest.count("net_a"), db.guest.count("net_a")];
    assert_eq!(counts(), [1, 1]);
    // A cap does not limit the keys of one such call either.
    let two = |op| update("web-1", &["net_a", "net_b"], op);
    host.write_policy(&policy("role: operator"));
    host.signal(Signal::HUP);
    host.logged("policy read again").await;
    keys.update_static_keys(two(v1::KeyOp::Inc))
        .await
        .expect("no cap");
    host.write_policy(&policy("role: operator, max_keys: 1"));
    host.signal(Signal::HUP);
    host.logged("policy read again").await;
    let refused = keys.update_static_keys(two(v1::KeyOp::Inc)).await;
    assert_refused(refused, Code::PermissionDenied, "ROLE_MISSING");
    keys.update_static_keys(two(v1::KeyOp::Dec))
        .await
        .expect("gives back");
    host.write_policy(&policy("role: operator, max_guests: 1"));
    host.signal(Signal::HUP);
    host.logged("policy read again").await;
    // None of these calls was counted. All other calls are counted.
    let request = |name| update(name, &["net_a"], v1::KeyOp::Inc);
    keys.update_static_keys(request("web-1"))
        .await
        .expect("the first guest");
    let forced = v1::UpdateStaticKeysRequest {
        force: true,
        ..update("db-1", &["net_a"], v1::KeyOp::Dec)
    };
    for request in [request("db-1"), forced] {
        let refused = keys.update_static_keys(request).await;
        assert_refused(refused, Code::PermissionDenied, "ROLE_MISSING");
    }
    assert_eq!(counts(), [2, 1]);
}

#[tokio::test]
async fn without_a_line_in_the_log_nothing_changes() {
    let host = Host::start().await;
    let web = host.monitor("web-1");
    host.list_until(1).await;
    let mut keys = host.keys().await;
    let request = || update("web-1", &["net_a"], v1::KeyOp::Inc);
    host.let_write(false);
    let refused = keys.update_static_keys(request()).await;
    assert_refused(refused, Code::FailedPrecondition, "AUDIT_LOG_UNWRITABLE");
    assert_eq!(web.guest.count("net_a"), 0);
    // Keys may be read without a line in the log, the guest's log and its events may not.
    assert_no_records(&host, Code::FailedPrecondition, "AUDIT_LOG_UNWRITABLE").await;
    let list = v1::ListStaticKeysRequest {
        guest: "web-1".to_owned(),
        ..Default::default()
    };
    keys.list_static_keys(list).await.expect("listed");
    host.let_write(true);
    keys.update_static_keys(request())
        .await
        .expect("there is room again");
    assert_eq!(web.guest.count("net_a"), 1);
}

#[tokio::test]
async fn a_broken_policy_is_refused_loudly_and_the_old_one_stays() {
    let mut host = Host::new(&policy("role: admin"));
    host.start_daemon(&[]).await;
    let web = host.monitor("web-1");
    host.list_until(1).await;
    let mut keys = host.keys().await;
    let request = || update("web-1", &["net_a"], v1::KeyOp::Inc);
    host.write_policy("rules: [{name: a, principals: ['*'], role: king}]");
    host.signal(Signal::HUP);
    let line = host.logged("the new policy is refused").await;
    assert!(
        line["error"].as_str().expect("why").contains("king"),
        "{line}"
    );
    keys.update_static_keys(request())
        .await
        .expect("the old policy");
    host.write_policy(&policy("role: viewer"));
    host.signal(Signal::HUP);
    host.logged("policy read again").await;
    // The call uses the connection that was open before.
    let refused = keys.update_static_keys(request()).await;
    assert_refused(refused, Code::PermissionDenied, "ROLE_MISSING");
    assert_eq!(web.guest.count("net_a"), 1);
}

#[tokio::test]
async fn a_bad_start_says_what_is_wrong() {
    for (name, text, args, word) in [
        ("policy.yaml", "rules: []", &[][..], "no rule"),
        ("audit.jsonl", "{}\n", &[], "line 1"),
        (
            "cert.pem",
            "no certificate",
            &["--listen", "127.0.0.1:0"],
            "cert.pem",
        ),
        ("node.sock", "precious", &[], "not a socket"),
    ] {
        let host = Host::new(&policy("role: admin"));
        std::fs::write(host.path(name), text).expect("written");
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_patchbayd"));
        for (option, file) in [
            ("--run-dir", "run"),
            ("--socket", "node.sock"),
            ("--policy", "policy.yaml"),
            ("--audit-log", "audit.jsonl"),
        ] {
            command.arg(option).arg(host.path(file));
        }
        if !args.is_empty() {
            for option in ["--cert", "--key", "--common-name-ca"] {
                command.arg(option).arg(host.path("cert.pem"));
            }
        }
        let output = command.args(args).output().expect("it runs");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && stderr.contains(word),
            "{name}: {stderr}"
        );
        assert_eq!(
            std::fs::read_to_string(host.path(name)).expect("kept"),
            text
        );
    }
}

#[tokio::test]
async fn metrics_count_calls_and_pauses() {
    let mut host = Host::new(&policy("role: operator, keys: ['net_*']"));
    let socket = host.path("metrics.sock");
    let address = format!("unix:{}", socket.display());
    host.start_daemon(&["--metrics", &address]).await;
    let _web = host.monitor("web-1");
    // The daemon serves the guest now, but reveals nothing about it.
    let _db = Fake::start(&host.path("run/db.sock"), &["db"]).await;
    host.list_until(2).await;
    let mut keys = host.keys().await;
    let request = |key| update("web-1", &[key], v1::KeyOp::Inc);
    keys.update_static_keys(request("net_a"))
        .await
        .expect("changed");
    let refused = keys.update_static_keys(request("ext4_a")).await;
    refused.expect_err("denied");
    let text = read_metrics(&socket, "/metrics").await;
    for line in [
        "patchbayd_calls_total{method=\"UpdateStaticKeys\",code=\"OK\"} 1",
        "patchbayd_calls_total{method=\"UpdateStaticKeys\",code=\"PERMISSION_DENIED\"} 1",
        "patchbayd_denied_calls_total{method=\"UpdateStaticKeys\"} 1",
        "patchbayd_flip_pause_seconds_count 1",
        "patchbayd_patched_sites_total 1",
        "patchbayd_guests 2",
        "patchbayd_guest_up{guest=\"web-1\"} 1",
        "patchbayd_guest_up{guest=\"db\"} 0",
        "patchbayd_guest_registered{guest=\"web-1\"} 1",
        "patchbayd_guest_paused{guest=\"web-1\"} 0",
        "patchbayd_guest_agent_connected{guest=\"web-1\"} 0",
        "patchbayd_guest_revision{guest=\"web-1\"} 2",
        "patchbayd_guest_trace_events_total{guest=\"web-1\"} 0",
        "patchbayd_guest_trace_lost_events_total{guest=\"web-1\",cause=\"flood\"} 0",
    ] {
        assert!(
            text.lines().any(|found| found == line),
            "{line} is missing in\n{text}"
        );
    }
    assert!(!text.contains("registered{guest=\"db\"}"), "{text}");
    assert!(
        read_metrics(&socket, "/other")
            .await
            .starts_with("HTTP/1.1 404")
    );
}

async fn read_metrics(socket: &std::path::Path, path: &str) -> String {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut stream = tokio::net::UnixStream::connect(socket)
        .await
        .expect("served");
    let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("sent");
    let mut text = String::new();
    stream.read_to_string(&mut text).await.expect("answered");
    text
}

#[tokio::test]
async fn only_operators_see_addresses_of_the_kernel() {
    const ADDRESS: u64 = 0xffff_ffff_8123_4567;
    let mut host = Host::new(&policy("role: viewer"));
    host.start_daemon(&[]).await;
    let fake = Fake::start(&host.path("run/web-1.sock"), &["web-1"]).await;
    fake.answer("GetStaticKey", |request: v1::GetStaticKeyRequest| {
        if request.name == "gone" {
            return Err(tonic::Status::not_found(format!("nothing at {ADDRESS:#x}")));
        }
        let site = v1::Site {
            address: ADDRESS,
            target: ADDRESS + 0x20,
            ..Default::default()
        };
        let key = v1::StaticKey {
            name: request.name,
            address: ADDRESS,
            sites: vec![site],
            ..Default::default()
        };
        Ok(v1::GetStaticKeyResponse {
            key: Some(key),
            ..Default::default()
        })
    });
    fake.answer("ListGuests", |_: v1::ListGuestsRequest| {
        let status = v1::GuestStatus {
            guest: "web-1".to_owned(),
            registration_error: format!("no table at {ADDRESS:#x}"),
            ..Default::default()
        };
        Ok(v1::ListGuestsResponse {
            guests: vec![status],
            ..Default::default()
        })
    });
    let mut keys = host.keys().await;
    let get = |name: &str| v1::GetStaticKeyRequest {
        guest: "web-1".to_owned(),
        name: name.to_owned(),
        ..Default::default()
    };
    let error = host.list_until(1).await[0].registration_error.clone();
    assert_eq!(error, format!("no table at 0x{}", "x".repeat(16)));
    let key = keys.get_static_key(get("k")).await.expect("allowed");
    let key = key.into_inner().key.expect("a key");
    assert_eq!((key.name.as_str(), key.address), ("k", 0));
    assert_eq!((key.sites[0].address, key.sites[0].target), (0, 0));
    let gone = keys.get_static_key(get("gone")).await.expect_err("gone");
    assert_eq!(gone.code(), Code::NotFound);
    assert!(!gone.message().contains("ffff"), "{gone}");

    host.write_policy(&policy("role: operator, keys: ['net_*']"));
    host.signal(Signal::HUP);
    host.logged("policy read again").await;
    let key = keys.get_static_key(get("k")).await.expect("allowed");
    let key = key.into_inner().key.expect("a key");
    assert_eq!(
        (key.address, key.sites[0].target),
        (ADDRESS, ADDRESS + 0x20)
    );
    let error = host.list_until(1).await[0].registration_error.clone();
    assert!(error.contains("ffffffff81234567"), "{error}");
}
