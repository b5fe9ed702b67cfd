// SPDX-License-Identifier: Apache-2.0
//! Tests that streams end when the authorization that opened them ends.

use patchbay_proto::v1;
use patchbay_proto::v1::tracepoints_service_client::TracepointsServiceClient;
use rustix::process::Signal;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

use super::fake::Fake;
use super::remote::{ALICE, Remote, fingerprint, issue, issue_for, policy};
use super::support::{Host, PATIENCE, assert_refused, own_uid, update};

fn rule(rest: &str) -> String {
    format!(
        "rules: [{{name: own, principals: ['{}'], {rest}}}]",
        own_uid()
    )
}

fn watch_keys() -> v1::WatchStaticKeysRequest {
    v1::WatchStaticKeysRequest {
        guest: "web-1".to_owned(),
        ..Default::default()
    }
}

/// Waits for the status that ends a stream.
async fn end<T: std::fmt::Debug>(stream: &mut Streaming<T>) -> Result<(), Status> {
    let last = async {
        loop {
            match stream.message().await {
                Ok(Some(_)) => {}
                Ok(None) => return Ok(()),
                Err(status) => return Err(status),
            }
        }
    };
    let last = tokio::time::timeout(PATIENCE, last).await;
    last.expect("the stream goes on")
}

async fn reload(host: &mut Host, policy: &str) {
    host.write_policy(policy);
    host.signal(Signal::HUP);
    host.logged("policy read again").await;
}

#[tokio::test]
async fn streams_end_when_the_policy_allows_them_no_more() {
    let mut host = Host::new(&rule("role: admin"));
    host.start_daemon(&[]).await;
    let web = host.monitor("web-1");
    host.list_until(1).await;
    let (mut keys, mut guests) = (host.keys().await, host.guests().await);
    let watched = keys.watch_static_keys(watch_keys()).await;
    let mut watched = watched.expect("allowed").into_inner();
    let describe = v1::WatchGuestRequest {
        guest: "web-1".to_owned(),
    };
    let status = guests.watch_guest(describe).await;
    let mut status = status.expect("allowed").into_inner();
    let (typed, typing) = tokio::sync::mpsc::channel(4);
    let first = v1::StreamConsoleRequest {
        guest: "web-1".to_owned(),
        ..Default::default()
    };
    typed.send(first).await.expect("open");
    let console = guests.stream_console(ReceiverStream::new(typing)).await;
    let mut console = console.expect("allowed").into_inner();

    // Streams that are still allowed continue.
    let same = rule("role: admin, guests: ['web-*']");
    reload(&mut host, &same).await;
    let request = update("web-1", &["net_a"], v1::KeyOp::Inc);
    keys.update_static_keys(request).await.expect("allowed");
    let event = tokio::time::timeout(PATIENCE, watched.message()).await;
    assert!(event.expect("in time").expect("open").is_some());

    reload(&mut host, &rule("role: admin, guests: ['db-*']")).await;
    let ends = [
        end(&mut watched).await,
        end(&mut status).await,
        end(&mut console).await,
    ];
    for end in ends {
        let (message, _) = assert_refused(end, Code::PermissionDenied, "ROLE_MISSING");
        assert!(message.contains("guest \"web-1\""), "{message}");
    }
    // The request is cut off too, so the client can send no further input.
    let closed = tokio::time::timeout(PATIENCE, typed.closed()).await;
    closed.expect("the console takes no more input");
    drop(web);
    host.signal(Signal::TERM);
    assert!(host.ended().await.success());
    let log = host.audit();
    let outcome = log.iter().find(|line| line["code"] == "PERMISSION_DENIED");
    assert!(outcome.is_some(), "the console's outcome: {log:?}");
}

#[tokio::test]
async fn the_monitor_hears_that_a_stream_has_ended() {
    let mut host = Host::new(&rule("role: viewer"));
    host.start_daemon(&[]).await;
    let fake = Fake::start(&host.path("run/web-1.sock"), &["web-1"]).await;
    let cancelled = fake.hang("WatchStaticKeys");
    host.list_until(1).await;
    let mut keys = host.keys().await;
    let watching = tokio::spawn(async move { keys.watch_static_keys(watch_keys()).await });
    while fake.received("WatchStaticKeys").is_empty() {
        tokio::task::yield_now().await;
    }
    reload(&mut host, &rule("role: viewer, guests: ['db-*']")).await;
    let ended = watching.await.expect("ended");
    assert_refused(ended, Code::PermissionDenied, "ROLE_MISSING");
    let cancelled = tokio::time::timeout(PATIENCE, cancelled).await;
    cancelled
        .expect("the monitor's call is cancelled")
        .expect_err("dropped");
}

#[tokio::test]
async fn a_stream_does_not_keep_a_role_that_the_policy_takes_back() {
    let mut host = Host::new(&rule("role: admin"));
    host.start_daemon(&[]).await;
    let _web = host.monitor("web-1");
    host.list_until(1).await;
    let mut keys = host.keys().await;
    let watched = keys.watch_static_keys(watch_keys()).await;
    let mut watched = watched.expect("allowed").into_inner();
    reload(&mut host, &rule("role: viewer")).await;
    let (message, _) = assert_refused(end(&mut watched).await, Code::Unavailable, "STREAM_EXPIRED");
    assert!(message.contains("the role viewer"), "{message}");
    // A viewer may open the stream.
    keys.watch_static_keys(watch_keys()).await.expect("allowed");
}

/// Checks a stream after the cap of the file's first rule is used up. The next rule gives another
/// role.
#[tokio::test]
async fn a_stream_lasts_under_the_rule_that_a_cap_has_left_it_to() {
    let own = own_uid();
    let mut host = Host::new(&format!(
        "rules:\n  - {{name: few, principals: ['{own}'], role: operator, max_guests: 1}}\n  \
         - {{name: rest, principals: ['{own}'], role: admin}}"
    ));
    host.start_daemon(&[]).await;
    let fake = Fake::start(&host.path("run/web-1.sock"), &["web-1", "web-2"]).await;
    fake.answer("PauseGuest", |_: v1::PauseGuestRequest| {
        Ok(v1::PauseGuestResponse::default())
    });
    let cancelled = fake.hang("StreamTracepointEvents");
    host.list_until(2).await;
    let mut guests = host.guests().await;
    let pause = v1::PauseGuestRequest {
        guest: "web-2".to_owned(),
        ..Default::default()
    };
    guests.pause_guest(pause).await.expect("by the first rule");
    let mut traces = TracepointsServiceClient::new(host.channel().await);
    let fire = v1::StreamTracepointEventsRequest {
        guest: "web-1".to_owned(),
        patterns: vec!["sched:sched_switch".to_owned()],
        arm_and_fire: true,
        ..Default::default()
    };
    let streaming = tokio::spawn(async move { traces.stream_tracepoint_events(fire).await });
    let arrived = async {
        while fake.received("StreamTracepointEvents").is_empty() && !streaming.is_finished() {
            tokio::task::yield_now().await;
        }
    };
    let arrived = tokio::time::timeout(PATIENCE, arrived).await;
    arrived.expect("neither opened nor refused");
    let call = fake.received("StreamTracepointEvents");
    let call = call.first().expect("the stream is refused");
    assert_eq!(call.headers["patchbay-role"], "admin");
    streaming.abort();
    let cancelled = tokio::time::timeout(PATIENCE, cancelled).await;
    cancelled.expect("in time").expect_err("dropped");
}

#[tokio::test]
async fn a_stream_has_a_maximum_age() {
    let mut host = Host::new(&rule("role: admin"));
    host.start_daemon(&["--max-stream-age", "1"]).await;
    let _web = host.monitor("web-1");
    host.list_until(1).await;
    let mut keys = host.keys().await;
    let watched = keys.watch_static_keys(watch_keys()).await;
    let mut watched = watched.expect("allowed").into_inner();
    let (message, _) = assert_refused(end(&mut watched).await, Code::Unavailable, "STREAM_EXPIRED");
    assert!(message.contains("1 s at most"), "{message}");
}

#[tokio::test]
async fn a_client_that_does_not_read_keeps_no_stream() {
    let mut host = Host::new(&rule("role: admin"));
    host.start_daemon(&[]).await;
    let web = host.monitor("web-1");
    host.list_until(1).await;
    let mut open = vec![];
    let mut keys = host.keys().await;
    // These streams take all places for reading calls.
    while let Ok(watched) = keys.watch_static_keys(watch_keys()).await {
        open.push(watched);
        assert!(open.len() <= 64);
    }
    reload(&mut host, &rule("role: viewer")).await;
    // None of the clients reads, but the places are free.
    let watching = async {
        while keys.watch_static_keys(watch_keys()).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    let watching = tokio::time::timeout(PATIENCE, watching).await;
    watching.expect("the streams keep their places");
    drop((open, web));
}

#[tokio::test]
async fn streams_end_with_their_certificate() {
    let mut remote = Remote::start(&policy("")).await;
    let ca = remote.host.path("ca");
    let alice = issue(&ca, "alice", Some(ALICE), &[]);
    let mut keys = remote.keys(&alice).await;
    let watched = keys.watch_static_keys(watch_keys()).await;
    let mut watched = watched.expect("allowed").into_inner();
    let revoked = policy(&format!("'{}'", fingerprint(&alice)));
    reload(&mut remote.host, &revoked).await;
    let refused = assert_refused(
        end(&mut watched).await,
        Code::Unauthenticated,
        "CERTIFICATE_REFUSED",
    );
    assert!(refused.0.contains("revoked"), "{}", refused.0);

    let short = issue_for(&ca, ALICE, time::Duration::seconds(5));
    let mut keys = remote.keys(&short).await;
    let watched = keys.watch_static_keys(watch_keys()).await;
    let mut watched = watched.expect("allowed").into_inner();
    let refused = assert_refused(
        end(&mut watched).await,
        Code::Unauthenticated,
        "CERTIFICATE_REFUSED",
    );
    assert!(refused.0.contains("expired"), "{}", refused.0);
}
