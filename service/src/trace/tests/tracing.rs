// SPDX-License-Identifier: Apache-2.0
//! Arming, firing, parking, streaming.

use std::sync::Arc;
use std::time::Duration;

use patchbay_proto::agent::v1::{AgentEnabledEvent, AgentInstance};
use patchbay_proto::v1::tracepoints_service_server::TracepointsService;
use patchbay_proto::v1::{
    ArmTracepointsRequest, FireTracepointsRequest, ListTracepointsRequest, ParkTracepointsRequest,
    StreamTracepointEventsRequest, TracepointState,
};
use tonic::{Code, Request};
use tonic_types::StatusExt;

use super::super::DEFAULT_GRACE;
use super::super::select::Wanted;
use super::super::tracer::{ArmTerms, SwitchTerms, TraceOutcome};
use super::fake::Fake;
use crate::api::{Access, Guests, ServedGuest, TracepointsApi};
use crate::auth::SocketAuthoriser;
use crate::keys::{Keys, KeysConfig, KeysError, Registry};
use patchbay_guest::testing::InMemoryGuest;

pub(super) fn wanted(texts: &[&str]) -> Wanted {
    Wanted::parse(texts.iter().map(|&text| text.to_owned()).collect(), true).expect("well-formed")
}

/// Returns the API of a guest with these tracepoints and this grace time.
pub(super) fn api_with_grace(fake: &Fake, grace: Duration) -> TracepointsApi {
    let registry = Arc::new(Registry::default());
    let guest = InMemoryGuest::new(Arc::clone(&registry));
    let (keys, _) = Keys::start(guest, registry, KeysConfig::default()).expect("a thread");
    let guests = Guests::default();
    let guest = ServedGuest::new(Arc::new(keys), fake.tracer.clone(), grace);
    guests.add(guest).expect("the only one");
    TracepointsApi::new(Access::new(guests, Arc::new(SocketAuthoriser), 0))
}

pub(super) fn api(fake: &Fake) -> TracepointsApi {
    api_with_grace(fake, DEFAULT_GRACE)
}

pub(super) fn reason(status: &tonic::Status) -> String {
    status.get_details_error_info().expect("error info").reason
}

pub(super) async fn arm(fake: &Fake, client: &str, texts: &[&str]) -> Vec<String> {
    let TraceOutcome { results, .. } = fake
        .tracer
        .arm(client, &wanted(texts), &ArmTerms::default())
        .await
        .expect("armed");
    results.into_iter().map(|result| result.name).collect()
}

pub(super) async fn until(mut condition: impl FnMut() -> bool) {
    let poll = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), poll)
        .await
        .expect("in time");
}

#[tokio::test]
async fn armed_is_parked_and_fire_and_park_switch_the_keys() {
    let fake = Fake::with_agent().await;
    assert_eq!(
        arm(&fake, "a", &["sched:*"]).await,
        ["sched:sched_process_fork", "sched:sched_switch"]
    );
    assert_eq!(
        *fake.script.quiet.lock().unwrap(),
        [true],
        "nothing fires, so recording can stop meanwhile"
    );
    assert!(!fake.keys.is_on("sched_switch"));
    assert_eq!(
        fake.keys.switches.lock().unwrap().len(),
        1,
        "parked in one transaction"
    );

    let switch = wanted(&["sched:*"]);
    let TraceOutcome { results, report } = fake
        .tracer
        .fire("a", &switch, &SwitchTerms::default())
        .await
        .expect("fired");
    assert!(
        results
            .iter()
            .all(|result| result.state() == TracepointState::Firing)
    );
    assert!(report.expect("a report").pause.is_some());
    assert!(fake.keys.is_on("sched_switch") && fake.keys.is_on("sched_process_fork"));
    fake.tracer
        .park("a", &switch, &SwitchTerms::default())
        .await
        .expect("parked");
    assert!(!fake.keys.is_on("sched_switch") && !fake.keys.is_on("sched_process_fork"));
    fake.tracer
        .disarm("a", &switch, false, None)
        .await
        .expect("disarmed");
    assert!(fake.script.enabled.lock().unwrap().is_empty());
    let error = fake
        .tracer
        .fire("a", &switch, &SwitchTerms::default())
        .await
        .expect_err("not armed");
    assert_eq!(reason(&error.into()), "NOT_ARMED");
}

#[tokio::test]
async fn fire_and_park_work_while_the_agent_hangs() {
    let fake = Fake::with_agent().await;
    arm(&fake, "a", &["sched_switch"]).await;
    fake.script.hung.send_replace(true);
    fake.tracer
        .fire("a", &wanted(&["sched_switch"]), &SwitchTerms::default())
        .await
        .expect("fired");
    assert!(fake.keys.is_on("sched_switch"));
    fake.tracer
        .park("a", &wanted(&["sched_switch"]), &SwitchTerms::default())
        .await
        .expect("parked");
    assert!(!fake.keys.is_on("sched_switch"));
}

#[tokio::test]
async fn two_clients_are_counted_and_the_last_one_out_parks() {
    let fake = Fake::with_agent().await;
    let switch = wanted(&["sched_switch"]);
    let terms = SwitchTerms::default();
    for client in ["a", "b"] {
        arm(&fake, client, &["sched_switch"]).await;
        fake.tracer
            .fire(client, &switch, &terms)
            .await
            .expect("fired");
    }
    let TraceOutcome { results, .. } = fake
        .tracer
        .park("a", &switch, &terms)
        .await
        .expect("released");
    assert_eq!(results[0].kept_by, ["b"]);
    assert!(fake.keys.is_on("sched_switch"));
    fake.tracer.leave("b").await;
    assert!(!fake.keys.is_on("sched_switch"));
    assert_eq!(
        fake.script.enabled.lock().unwrap().len(),
        1,
        "a keeps it armed"
    );
    let results = fake
        .tracer
        .disarm("a", &switch, false, None)
        .await
        .expect("disarmed");
    assert_eq!(results[0].state(), TracepointState::Disarmed);
}

#[tokio::test]
async fn what_cannot_be_parked_is_refused_by_name_and_passed_over_by_globs() {
    let fake = Fake::with_agent().await;
    for (name, why) in [
        ("sys_enter", "regfunc"),
        ("syscalls:sys_enter_openat", "system calls"),
    ] {
        let error = fake
            .tracer
            .arm("a", &wanted(&[name]), &ArmTerms::default())
            .await
            .expect_err("refused");
        assert!(error.to_string().contains(why), "{error}");
        assert_eq!(reason(&error.into()), "TRACEPOINT_REFUSED");
    }
    assert_eq!(arm(&fake, "a", &["*"]).await.len(), 2);
    let error = fake
        .tracer
        .arm("a", &wanted(&["sched:nothing"]), &ArmTerms::default())
        .await
        .expect_err("no such event");
    assert_eq!(reason(&error.into()), "EVENT_NOT_FOUND");
}

#[tokio::test]
async fn others_are_not_silenced_unless_asked_for() {
    let fake = Fake::with_agent().await;
    fake.keys.probe("sched:sched_switch", true);
    let other = AgentInstance {
        name: String::new(),
        events: vec!["sched:sched_switch".into()],
    };
    fake.script.others.lock().unwrap().push(other);
    let switch = wanted(&["sched_switch"]);
    let error = fake
        .tracer
        .arm("a", &switch, &ArmTerms::default())
        .await
        .expect_err("others");
    assert!(error.to_string().contains("tracefs: top level"), "{error}");
    assert_eq!(reason(&error.into()), "OTHERS_TRACE");
    assert!(fake.keys.is_on("sched_switch"), "and goes on");
    let terms = ArmTerms {
        even_if_others: true,
        ..ArmTerms::default()
    };
    fake.tracer.arm("a", &switch, &terms).await.expect("armed");
    assert!(!fake.keys.is_on("sched_switch"));

    // Another user came after the arming, and only the number of probes shows it.
    arm(&fake, "a", &["sched_process_fork"]).await;
    fake.keys.probe("sched:sched_process_fork", true);
    let fork = wanted(&["sched_process_fork"]);
    fake.tracer
        .fire("a", &fork, &SwitchTerms::default())
        .await
        .expect("fired");
    let error = fake
        .tracer
        .park("a", &fork, &SwitchTerms::default())
        .await
        .expect_err("others");
    assert!(error.to_string().contains("1 unknown probe"), "{error}");
    let terms = SwitchTerms {
        even_if_others: true,
        ..SwitchTerms::default()
    };
    fake.tracer.park("a", &fork, &terms).await.expect("parked");
}

#[tokio::test]
async fn the_kernels_message_is_passed_on_and_nothing_stays_armed() {
    let fake = Fake::with_agent().await;
    let complaint = AgentEnabledEvent {
        error: "filter: parse_error: Field not found".into(),
        ..Default::default()
    };
    fake.script
        .complaints
        .lock()
        .unwrap()
        .insert("sched:sched_switch".into(), complaint);
    let api = api(&fake);
    let request = ArmTracepointsRequest {
        patterns: vec!["sched:*".into()],
        filter: "nonsense == 1".into(),
        ..Default::default()
    };
    let status = api
        .arm_tracepoints(Request::new(request))
        .await
        .expect_err("rejected");
    assert_eq!(
        (status.code(), reason(&status)),
        (Code::InvalidArgument, "FILTER_REJECTED".to_owned())
    );
    assert!(status.message().contains("Field not found"), "{status}");
    assert!(
        fake.script.enabled.lock().unwrap().is_empty(),
        "all or none"
    );

    let vanished = AgentEnabledEvent {
        error: "gone".into(),
        vanished: true,
        ..Default::default()
    };
    fake.script
        .complaints
        .lock()
        .unwrap()
        .insert("sched:sched_switch".into(), vanished);
    let error = fake
        .tracer
        .arm("a", &wanted(&["sched_switch"]), &ArmTerms::default())
        .await
        .expect_err("vanished");
    assert_eq!(reason(&error.into()), "EVENT_NOT_FOUND");
}

#[tokio::test]
async fn arming_is_undone_if_the_keys_cannot_be_parked() {
    let fake = Fake::with_agent().await;
    *fake.keys.fail.lock().unwrap() = Some(KeysError::GuestStopped);
    let error = fake
        .tracer
        .arm("a", &wanted(&["sched_switch"]), &ArmTerms::default())
        .await
        .expect_err("busy");
    assert_eq!(reason(&error.into()), "GUEST_STOPPED");
    assert!(fake.script.enabled.lock().unwrap().is_empty());
    assert!(!fake.keys.is_on("sched_switch"));
}

pub(super) async fn open(
    api: &TracepointsApi,
    request: StreamTracepointEventsRequest,
) -> <TracepointsApi as TracepointsService>::StreamTracepointEventsStream {
    api.stream_tracepoint_events(Request::new(request))
        .await
        .expect("a stream")
        .into_inner()
}

pub(super) type Events = <TracepointsApi as TracepointsService>::StreamTracepointEventsStream;

/// The event vanished with its module, or a user in the guest removed its probe.
#[tokio::test]
async fn what_vanished_is_no_longer_armed_and_stops_nobody() {
    let fake = Fake::with_agent().await;
    arm(&fake, "a", &["sched:*"]).await;
    let switch = wanted(&["sched:*"]);
    // The key vanishes, and the first attempt to fire fails.
    let state = || fake.keys.state.lock().unwrap();
    let gone = state().remove("sched_switch").expect("a key");
    *fake.keys.fail.lock().unwrap() = Some(KeysError::KeyNotFound {
        name: "sched_switch".into(),
        near: vec![],
    });
    let TraceOutcome { results, .. } = fake
        .tracer
        .fire("a", &switch, &SwitchTerms::default())
        .await
        .expect("the other one fires");
    assert_eq!(results.len(), 1);
    assert_eq!(results[0].name, "sched:sched_process_fork");
    let only = wanted(&["sched_switch"]);
    let error = fake
        .tracer
        .fire("a", &only, &SwitchTerms::default())
        .await
        .expect_err("gone");
    assert_eq!(reason(&error.into()), "NOT_ARMED");
    // The key exists again, and its event can be armed again.
    state().insert("sched_switch".into(), (false, gone.1 - 1));
    fake.script
        .enabled
        .lock()
        .unwrap()
        .remove("sched:sched_switch");
    arm(&fake, "a", &["sched_switch"]).await;
    assert!(
        fake.script
            .enabled
            .lock()
            .unwrap()
            .contains("sched:sched_switch")
    );
    // A user in the guest removed the probe.
    fake.keys.probe("sched:sched_switch", false);
    let error = fake
        .tracer
        .park("a", &only, &SwitchTerms::default())
        .await
        .expect_err("no probe");
    assert_eq!(reason(&error.into()), "NOT_ARMED");
}

#[tokio::test]
async fn a_repeated_request_gets_the_earlier_answer() {
    let fake = Fake::with_agent().await;
    let api = api(&fake);
    let switches = || fake.keys.switches.lock().unwrap().len();
    let arm = ArmTracepointsRequest {
        patterns: vec!["sched:*".into()],
        request_id: "r1".into(),
        ..Default::default()
    };
    let ask = |request: ArmTracepointsRequest| api.arm_tracepoints(Request::new(request));
    // A validation and a failed request do not count as the answer to the change.
    let validate = ArmTracepointsRequest {
        validate_only: true,
        ..arm.clone()
    };
    ask(validate).await.expect("valid");
    *fake.keys.fail.lock().unwrap() = Some(KeysError::GuestStopped);
    ask(arm.clone()).await.expect_err("stopped");
    let first = ask(arm.clone()).await.expect("armed").into_inner();
    assert_eq!((first.results.len(), switches()), (2, 1));

    let fire = FireTracepointsRequest {
        patterns: vec!["sched_switch".into()],
        request_id: "r2".into(),
        ..Default::default()
    };
    let park = ParkTracepointsRequest {
        patterns: vec!["sched_switch".into()],
        ..Default::default()
    };
    let fired = api.fire_tracepoints(Request::new(fire.clone())).await;
    let fired = fired.expect("fired").into_inner();
    api.park_tracepoints(Request::new(park))
        .await
        .expect("parked");
    assert_eq!(switches(), 3);
    let again = api.fire_tracepoints(Request::new(fire.clone())).await;
    assert_eq!(again.expect("the earlier answer").into_inner(), fired);
    assert_eq!(ask(arm.clone()).await.expect("earlier").into_inner(), first);
    assert!(!fake.keys.is_on("sched_switch"), "nothing was fired again");
    assert_eq!(switches(), 3);

    // The same id is used for another change of the same kind, and for one of another kind.
    let other = FireTracepointsRequest {
        patterns: vec!["sched:*".into()],
        ..fire
    };
    let status = api
        .fire_tracepoints(Request::new(other))
        .await
        .expect_err("reused");
    assert_eq!(reason(&status), "REQUEST_ID_REUSED");
    let park = ParkTracepointsRequest {
        patterns: vec!["sched_switch".into()],
        request_id: "r2".into(),
        ..Default::default()
    };
    let status = api
        .park_tracepoints(Request::new(park))
        .await
        .expect_err("reused");
    assert_eq!(reason(&status), "REQUEST_ID_REUSED");
    let long = ArmTracepointsRequest {
        request_id: "x".repeat(129),
        ..arm
    };
    assert_eq!(
        reason(&ask(long).await.expect_err("too long")),
        "INVALID_ARGUMENT"
    );
}

#[tokio::test(start_paused = true)]
async fn a_client_that_is_gone_is_disarmed_after_the_grace_time() {
    let fake = Fake::new();
    let _agent = fake.agent().await;
    let api = api(&fake);
    let request = StreamTracepointEventsRequest {
        patterns: vec!["sched_switch".into()],
        arm_and_fire: true,
        ..Default::default()
    };
    let stream = open(&api, request).await;
    assert!(fake.keys.is_on("sched_switch"));
    drop(stream);
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert!(fake.keys.is_on("sched_switch"), "it may come back");
    until(|| !fake.keys.is_on("sched_switch") && fake.script.enabled.lock().unwrap().is_empty())
        .await;
}

#[tokio::test]
async fn listing_tells_states_clients_and_refusals() {
    let fake = Fake::with_agent().await;
    arm(&fake, "a", &["sched_switch"]).await;
    fake.tracer
        .fire("a", &wanted(&["sched_switch"]), &SwitchTerms::default())
        .await
        .expect("fired");
    let api = api(&fake);
    let mut seen = vec![];
    let mut request = ListTracepointsRequest {
        page_size: 3,
        ..Default::default()
    };
    loop {
        let page = api
            .list_tracepoints(Request::new(request.clone()))
            .await
            .expect("listed")
            .into_inner();
        assert_eq!(page.total_size, 4);
        seen.extend(page.tracepoints);
        if page.next_page_token.is_empty() {
            break;
        }
        request.page_token = page.next_page_token;
    }
    let states: Vec<_> = seen
        .iter()
        .map(|tracepoint| (tracepoint.name.as_str(), tracepoint.state()))
        .collect();
    assert_eq!(states[2], ("sched:sched_switch", TracepointState::Firing));
    assert_eq!(
        states[1],
        ("sched:sched_process_fork", TracepointState::Disarmed)
    );
    assert_eq!(seen[2].fired_by, ["a"]);
    assert!(seen[0].refused.contains("regfunc"));
    fake.script.hung.send_replace(true);
    // The agent's silence is reported, and everything else is unchanged.
    let request = ListTracepointsRequest {
        armed_only: true,
        ..Default::default()
    };
    let page = api
        .list_tracepoints(Request::new(request))
        .await
        .expect("listed")
        .into_inner();
    assert!(page.stale.contains("has not answered"), "{}", page.stale);
    assert_eq!(page.tracepoints.len(), 1);
}
