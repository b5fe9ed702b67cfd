// SPDX-License-Identifier: Apache-2.0
//! Tests the list of guests, and which guest a call reaches.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;

use patchbay_proto::v1;
use patchbay_proto::v1::guest_service_client::GuestServiceClient;
use prost::Message;
use tonic::{Code, Request};

use super::fake::Fake;
use super::support::{Host, assert_refused, update, update_matching};

fn describe(guest: &str) -> v1::DescribeGuestRequest {
    v1::DescribeGuestRequest {
        guest: guest.to_owned(),
        ..v1::DescribeGuestRequest::default()
    }
}

fn names(guests: &[v1::GuestStatus]) -> Vec<&str> {
    guests.iter().map(|status| status.guest.as_str()).collect()
}

#[tokio::test]
async fn a_call_reaches_the_guest_that_it_names() {
    let mut host = Host::start().await;
    let [one, two] = ["web-1", "web-2"].map(|name| host.monitor(name));
    let listed = host.list_until(2).await;
    assert_eq!(names(&listed), ["web-1", "web-2"]);
    assert!(listed.iter().all(|status| !status.incarnation.is_empty()));
    let mut keys = host.keys().await;
    let request = update("web-2", &["net_a"], v1::KeyOp::Inc);
    keys.update_static_keys(request).await.expect("changed");
    assert_eq!((one.guest.count("net_a"), two.guest.count("net_a")), (0, 1));
    let mut guests = host.guests().await;
    for name in ["web-1", "web-2"] {
        let answer = guests
            .describe_guest(describe(name))
            .await
            .expect("described");
        assert_eq!(answer.into_inner().guest_status().guest, name);
    }
    let unknown = guests.describe_guest(describe("web-3")).await;
    let (message, _) = assert_refused(unknown, Code::NotFound, "GUEST_NOT_FOUND");
    assert!(message.contains("web-1, web-2"), "{message}");
    let unnamed = guests.describe_guest(describe("")).await;
    assert_refused(unnamed, Code::InvalidArgument, "GUEST_NOT_NAMED");
    // One guest remains, and a call need not name it.
    two.end().await;
    host.logged("guest gone").await;
    let answer = guests
        .describe_guest(describe(""))
        .await
        .expect("the only one");
    assert_eq!(answer.into_inner().guest_status().guest, "web-1");
}

#[tokio::test]
async fn guests_are_listed_in_pages_and_by_patterns() {
    let host = Host::start().await;
    let _fake = Fake::start(&host.path("run/many.sock"), &["a-1", "a-2", "a-3", "b-1"]).await;
    host.list_until(4).await;
    let mut client = host.guests().await;
    let mut found = vec![];
    let mut page_token = String::new();
    loop {
        let request = v1::ListGuestsRequest {
            page_size: 2,
            page_token,
            patterns: vec!["a-*".to_owned()],
        };
        let page = client
            .list_guests(request)
            .await
            .expect("a page")
            .into_inner();
        assert!(page.guests.len() <= 2);
        found.extend(page.guests.into_iter().map(|status| status.guest));
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    assert_eq!(found, ["a-1", "a-2", "a-3"]);
    for bad in [
        v1::ListGuestsRequest {
            page_size: -1,
            ..Default::default()
        },
        v1::ListGuestsRequest {
            patterns: vec!["[".to_owned()],
            ..Default::default()
        },
    ] {
        let refused = client.list_guests(bad).await;
        assert_refused(refused, Code::InvalidArgument, "INVALID_ARGUMENT");
    }
}

#[tokio::test]
async fn a_monitor_that_restarts_is_found_again() {
    let mut host = Host::start().await;
    let [one, two] = ["web-1", "web-2"].map(|name| host.monitor(name));
    let before = host.list_until(2).await;
    one.end().await;
    host.logged("guest gone").await;
    assert_eq!(names(&host.list_until(1).await), ["web-2"]);
    let one = host.monitor("web-1");
    let after = host.list_until(2).await;
    assert_ne!(before[0].incarnation, after[0].incarnation);
    assert_eq!(before[1].incarnation, after[1].incarnation);
    let mut keys = host.keys().await;
    let request = update("web-1", &["net_a"], v1::KeyOp::Inc);
    keys.update_static_keys(request).await.expect("changed");
    assert_eq!((one.guest.count("net_a"), two.guest.count("net_a")), (1, 0));
}

#[tokio::test]
async fn a_killed_daemon_leaves_the_guests_and_finds_them_again() {
    let mut host = Host::start().await;
    let one = host.monitor("web-1");
    let before = host.list_until(1).await;
    let request = || update("web-1", &["net_a"], v1::KeyOp::Inc);
    host.keys()
        .await
        .update_static_keys(request())
        .await
        .expect("changed");
    // The outcome is written concurrently with the answer.
    host.audit_until(2).await;
    host.kill_daemon();
    host.start_daemon(&[]).await;
    let after = host.list_until(1).await;
    assert_eq!(
        before[0].incarnation, after[0].incarnation,
        "the same process"
    );
    host.keys()
        .await
        .update_static_keys(request())
        .await
        .expect("changed");
    assert_eq!(one.guest.count("net_a"), 2);
    // The chain covers both processes.
    host.audit_until(4).await;
    let checked = patchbay_access::audit::verify(&host.path("audit.jsonl"), |_| {});
    assert_eq!(checked.expect("unbroken").records, 4);
}

#[tokio::test]
async fn a_name_that_two_monitors_claim_stays_the_first_ones() {
    let mut host = Host::start().await;
    let first = Fake::start(&host.path("run/first.sock"), &["web-1"]).await;
    host.list_until(1).await;
    let second = Fake::start(
        &host.path("run/second.sock"),
        &["web-1", "web-2", "", "a b"],
    )
    .await;
    let line = host.logged("another monitor serves").await;
    assert!(line.to_string().contains("second.sock"), "{line}");
    assert_eq!(names(&host.list_until(2).await), ["web-1", "web-2"]);
    for fake in [&first, &second] {
        fake.answer("DescribeGuest", |_: v1::DescribeGuestRequest| {
            Ok(v1::DescribeGuestResponse::default())
        });
    }
    let mut guests = host.guests().await;
    guests
        .describe_guest(describe("web-1"))
        .await
        .expect("described");
    assert_eq!(first.received("DescribeGuest").len(), 1);
    assert!(second.received("DescribeGuest").is_empty());
}

#[tokio::test]
async fn a_monitor_whose_list_never_ends_is_not_served() {
    let mut host = Host::start().await;
    // This monitor answers the first list as soon as it listens.
    let aside = host.path("aside.sock");
    let fake = Fake::start(&aside, &["web-1"]).await;
    let mut page = 0;
    fake.answer("ListGuests", move |_: v1::ListGuestsRequest| {
        page += 1;
        Ok(v1::ListGuestsResponse {
            guests: vec![],
            next_page_token: page.to_string(),
        })
    });
    std::fs::rename(&aside, host.path("run/web-1.sock")).expect("renamed");
    let line = host.logged("a monitor is not served").await;
    assert!(
        line["error"].as_str().expect("why").contains("1000 pages"),
        "{line}"
    );
    assert_eq!(fake.received("ListGuests").len() % 1000, 0);
}

#[tokio::test]
async fn metadata_and_deadlines_pass_and_principals_do_not() {
    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let host = Host::start().await;
    let fake = Fake::start(&host.path("run/web-1.sock"), &["web-1"]).await;
    fake.answer("PauseGuest", |_: v1::PauseGuestRequest| {
        Ok(v1::PauseGuestResponse::default())
    });
    host.list_until(1).await;
    let mut request = Request::new(v1::PauseGuestRequest {
        guest: "web-1".to_owned(),
        ..Default::default()
    });
    for (key, value) in [
        ("traceparent", PARENT),
        ("patchbay-principal", "uid:4711"),
        ("patchbay-role", "viewer"),
        ("x-other", "kept"),
    ] {
        request
            .metadata_mut()
            .insert(key, value.parse().expect("a value"));
    }
    request.set_timeout(std::time::Duration::from_secs(50));
    host.guests()
        .await
        .pause_guest(request)
        .await
        .expect("paused");
    let received = fake.received("PauseGuest").remove(0);
    let header = |name: &str| received.headers[name].to_str().expect("text");
    assert_eq!(header("patchbay-principal"), super::support::own_uid());
    assert_eq!(header("patchbay-role"), "admin");
    assert_eq!(
        received
            .headers
            .get_all("patchbay-principal")
            .iter()
            .count(),
        1
    );
    assert_eq!((header("traceparent"), header("x-other")), (PARENT, "kept"));
    let log = std::fs::read_to_string(host.path("audit.jsonl")).expect("a log");
    let trace_id = "\"trace_id\":\"0af7651916cd43dd8448eb211c80319c\"";
    assert!(log.contains(trace_id), "{log}");
    let timeout = header("grpc-timeout");
    let micros: u64 = timeout.trim_end_matches('u').parse().expect(timeout);
    assert!((1..=50_000_000).contains(&micros), "{timeout}");
}

#[tokio::test]
async fn a_call_that_its_client_gives_up_is_cancelled_at_the_monitor() {
    let mut host = Host::start().await;
    let fake = Fake::start(&host.path("run/web-1.sock"), &["web-1"]).await;
    host.list_until(1).await;
    let cancelled = fake.hang("PauseGuest");
    let channel = host.channel().await;
    let call = tokio::spawn(async move {
        let request = v1::PauseGuestRequest {
            guest: "web-1".to_owned(),
            ..Default::default()
        };
        let _ = GuestServiceClient::new(channel).pause_guest(request).await;
    });
    while fake.received("PauseGuest").is_empty() {
        tokio::task::yield_now().await;
    }
    call.abort();
    let ended = tokio::time::timeout(super::support::PATIENCE, cancelled).await;
    ended.expect("cancelled").expect_err("without an answer");
    // If a monitor ends during a call, the outcome is unknown, and the error reports that.
    let mut guests = host.guests().await;
    let answer = guests.resume_guest(v1::ResumeGuestRequest {
        guest: "web-1".to_owned(),
    });
    assert_eq!(
        answer.await.expect_err("not known").code(),
        Code::Unimplemented
    );
    host.signal(rustix::process::Signal::TERM);
    assert!(host.ended().await.success());
    let codes: Vec<_> = host
        .audit()
        .iter()
        .filter_map(|line| line["code"].as_str().map(str::to_owned))
        .collect();
    assert_eq!(codes, ["CANCELLED", "UNIMPLEMENTED"]);
}

/// Uses monitors like those of `patchbay@NAME`: each has its own user, and trusts only that user.
#[tokio::test]
async fn a_monitor_of_another_user_is_reached_as_that_user() {
    const USER: u32 = 54_321;
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can become another user");
        return;
    }
    let mut host = Host::start().await;
    let open = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(host.folder.path(), open).expect("set");
    let folder = host.path("run/web-1");
    std::fs::create_dir(&folder).expect("created");
    std::os::unix::fs::chown(&folder, Some(USER), None).expect("given away");
    let bind = move || {
        let user = rustix::thread::Uid::from_raw(USER);
        rustix::thread::set_thread_res_uid(None, Some(user), None).expect("root");
        let socket = folder.join("api.sock");
        let listener = UnixListener::bind(&socket).expect("its own folder");
        let private = std::fs::Permissions::from_mode(0o600);
        std::fs::set_permissions(&socket, private).expect("its own socket");
        listener
    };
    let listener = std::thread::spawn(bind).join().expect("bound");
    // The monitor claims a guest that belongs to another monitor.
    let fake = Fake::serve(listener, &["web-1", "db-1"]).await;
    let line = host
        .logged("a monitor of another user may serve only")
        .await;
    assert_eq!(line["guest"], "db-1");
    assert_eq!(names(&host.list_until(1).await), ["web-1"]);
    assert!(
        fake.received("ListGuests")
            .iter()
            .all(|call| call.uid == USER)
    );
}

#[tokio::test]
async fn a_rule_without_limits_forwards_patterns_as_they_are() {
    let host = Host::start().await;
    let fake = Fake::start(&host.path("run/web-1.sock"), &["web-1"]).await;
    host.list_until(1).await;
    fake.answer("UpdateStaticKeys", |_: v1::UpdateStaticKeysRequest| {
        Ok(v1::UpdateStaticKeysResponse::default())
    });
    let request = update_matching("web-1", &["*"]);
    let bytes = request.encode_to_vec();
    host.keys()
        .await
        .update_static_keys(request)
        .await
        .expect("allowed");
    assert_eq!(fake.received("UpdateStaticKeys")[0].message, bytes);
    assert!(fake.received("PrepareUpdate").is_empty());
}
