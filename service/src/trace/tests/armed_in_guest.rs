// SPDX-License-Identifier: Apache-2.0
//! Events that the guest's own kernel has armed, without an agent.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use patchbay_proto::v1::tracepoints_service_server::TracepointsService;
use patchbay_proto::v1::{ListTracepointsRequest, Tracepoint, TracepointState};
use tonic::Request;

use super::super::tracer::{ArmTerms, SwitchTerms};
use super::super::{BootEvents, park_boot_events};
use super::fake::{EVENTS, Fake};
use super::tracing::{api_with_grace, until, wanted};
use crate::keys::{KeysError, TracepointUpdate};

/// A guest whose kernel records `sched_switch`, but not the other events, and has no agent.
fn recording() -> Fake {
    let fake = Fake::new();
    let events = ["raw_syscalls:sys_enter", "sched:sched_process_fork", SWITCH];
    *fake.keys.events.lock().unwrap() = events.map(str::to_owned).to_vec();
    for function in ["probe_sched_switch", "trace_event_raw_event_sched_switch"] {
        fake.keys.probe(SWITCH, true);
        let mut functions = fake.keys.functions.lock().unwrap();
        let of_switch = functions.entry("sched_switch".to_owned()).or_default();
        of_switch.push(function.to_owned());
    }
    fake
}

const SWITCH: &str = "sched:sched_switch";
const FORK: &str = "sched:sched_process_fork";

async fn list(fake: &Fake, armed_only: bool) -> Vec<Tracepoint> {
    let api = api_with_grace(fake, Duration::ZERO);
    let request = ListTracepointsRequest {
        armed_only,
        ..Default::default()
    };
    let listed = api.list_tracepoints(Request::new(request)).await;
    listed.expect("listed").into_inner().tracepoints
}

#[tokio::test]
async fn the_guests_own_events_are_listed_with_their_probes() {
    let fake = recording();
    let all = list(&fake, false).await;
    let names: Vec<_> = all.iter().map(|found| found.name.as_str()).collect();
    // The last one has no event in memory.
    let expected = [
        ":sched_process_exec",
        "raw_syscalls:sys_enter",
        "sched:sched_process_fork",
        SWITCH,
    ];
    assert_eq!(names, expected);
    let armed = list(&fake, true).await;
    let [switch] = &armed[..] else {
        panic!("{armed:?}")
    };
    assert_eq!((&*switch.name, switch.enabled), (SWITCH, true));
    assert_eq!(switch.state(), TracepointState::Disarmed);
    let functions = ["probe_sched_switch", "trace_event_raw_event_sched_switch"];
    assert_eq!(switch.probe_functions, functions);
    let user = "tracefs or trace_event= (trace_event_raw_event_sched_switch)";
    assert!(switch.others.contains(&user.to_owned()), "{switch:?}");
    assert!(switch.armed_by.is_empty());
}

/// Parks the events of the system `sched` as `--trace-events` does.
async fn parked() -> Fake {
    let fake = recording();
    let events = BootEvents::parse("sched:*,raw_syscalls:sys_enter").expect("well-formed");
    park_boot_events(&fake.tracer, events).expect("few");
    until(|| !fake.tracer.book().events.is_empty()).await;
    fake
}

#[tokio::test(start_paused = true)]
async fn events_of_the_command_line_are_parked_and_fired_without_an_agent() {
    let fake = parked().await;
    let only = list(&fake, true).await;
    let [switch] = &only[..] else {
        panic!("{only:?}")
    };
    assert_eq!(
        (&*switch.name, switch.state()),
        (SWITCH, TracepointState::Parked)
    );
    assert_eq!(switch.armed_by, ["--trace-events"]);
    assert!(!fake.keys.is_on("sched_switch"));
    let (all, terms) = (wanted(&["sched:*"]), SwitchTerms::default());
    let fired = fake.tracer.fire("a", &all, &terms).await.expect("fired");
    assert_eq!(fired.results[0].state(), TracepointState::Firing);
    assert!(fake.keys.is_on("sched_switch"));
    // The kernel has two probes, and no other user is fired for.
    tokio::time::sleep(Duration::from_secs(10)).await;
    let parked = fake.tracer.park("a", &all, &terms).await.expect("parked");
    assert_eq!(parked.results[0].state(), TracepointState::Parked);
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(!fake.keys.is_on("sched_switch"));
}

/// The kernel is known late, and its events are parked in each boot.
#[tokio::test(start_paused = true)]
async fn events_of_the_command_line_are_parked_in_each_boot() {
    let fake = recording();
    let error = KeysError::NotRegistered {
        why: "it boots".to_owned(),
    };
    *fake.keys.fail.lock().unwrap() = Some(error);
    park_boot_events(&fake.tracer, BootEvents::parse(SWITCH).expect("one")).expect("few");
    until(|| !fake.keys.is_on("sched_switch")).await;
    // The probes go, and come again. Without another boot, nothing is parked.
    fake.keys
        .state
        .lock()
        .unwrap()
        .insert("sched_switch".to_owned(), (false, 0));
    let facts = fake.tracer.facts().await.expect("read");
    assert!(fake.tracer.forget_vanished(&facts));
    fake.keys.probe(SWITCH, true);
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(fake.keys.is_on("sched_switch"), "the same boot");
    fake.keys.boot.store(2, Ordering::Relaxed);
    until(|| !fake.keys.is_on("sched_switch")).await;
}

/// The guest boots again while its events are parked, and the next kernel has attached its probes
/// before it is looked at.
#[tokio::test(start_paused = true)]
async fn a_boot_that_begins_during_an_attempt_has_its_own() {
    let fake = recording();
    fake.keys.reboots.store(true, Ordering::Relaxed);
    park_boot_events(&fake.tracer, BootEvents::parse(SWITCH).expect("one")).expect("few");
    until(|| !fake.keys.is_on("sched_switch")).await;
    let fire = |held: &[&str]| {
        let holders = held.iter().map(|&holder| holder.to_owned()).collect();
        let mut state = fake.keys.state.lock().unwrap();
        state.insert("sched_switch".to_owned(), (true, 2));
        let mut held = fake.keys.held.lock().unwrap();
        held.insert("sched_switch".to_owned(), holders);
    };
    fire(&[]);
    until(|| !fake.keys.is_on("sched_switch")).await;
    // What a client fires stays on.
    fire(&["a"]);
    let found = fake.tracer.park_own(&wanted(&[SWITCH])).await;
    assert_eq!(found.expect("read"), Some(1));
    assert!(fake.keys.is_on("sched_switch"));
}

#[tokio::test]
async fn a_refused_key_does_not_keep_the_other_events_firing() {
    let fake = recording();
    fake.keys.probe(FORK, true);
    let refused = || fake.keys.refused.lock().unwrap();
    refused().insert("sched_process_fork".to_owned());
    let both = wanted(&[SWITCH, FORK]);
    let parked = fake.tracer.park_own(&both).await.expect("one");
    assert_eq!(parked, Some(1));
    assert!(!fake.keys.is_on("sched_switch") && fake.keys.is_on("sched_process_fork"));
    let events: Vec<_> = fake.tracer.book().events.keys().cloned().collect();
    assert_eq!(events, [SWITCH]);
    // An attempt that parks nothing fails, so that it is repeated.
    let error = fake.tracer.park_own(&both).await.expect_err("refused");
    assert!(error.to_string().contains("the test refuses it"), "{error}");
    refused().clear();
    assert_eq!(fake.tracer.park_own(&both).await.expect("both"), Some(2));
    assert!(!fake.keys.is_on("sched_process_fork"));
}

/// A gate that stays closed would block all changes of keys.
#[tokio::test]
async fn an_attempt_waits_a_second_for_a_gate() {
    let fake = recording();
    let parked = fake.tracer.park_own(&wanted(&[SWITCH])).await;
    parked.expect("parked");
    let limit = Instant::now() + Duration::from_secs(1);
    let switches = fake.keys.switches.lock().unwrap();
    assert!(switches[0].deadline <= limit);
}

#[tokio::test]
async fn a_list_that_is_not_found_is_not_taken_for_an_empty_one() {
    let fake = recording();
    let park = |pattern: &str| {
        let wanted = wanted(&[pattern]);
        let tracer = fake.tracer.clone();
        async move { tracer.park_own(&wanted).await.expect("read") }
    };
    assert_eq!(park(FORK).await, Some(0));
    fake.keys.events.lock().unwrap().clear();
    assert_eq!(park(SWITCH).await, None);
}

/// A key without a probe cannot be turned on.
#[tokio::test(start_paused = true)]
async fn an_event_whose_probes_are_gone_is_disarmed_by_force() {
    let fake = parked().await;
    let state = || fake.keys.state.lock().unwrap();
    state().insert("sched_switch".to_owned(), (false, 0));
    let switch = wanted(&[SWITCH]);
    let disarmed = fake.tracer.disarm("a", &switch, true, None).await;
    let disarmed = disarmed.expect("disarmed");
    assert_eq!(disarmed[0].state(), TracepointState::Disarmed);
    let switches = fake.keys.switches.lock().unwrap();
    let last = switches.last().expect("one");
    assert_eq!(last.update, TracepointUpdate::Silence);
}

#[tokio::test(start_paused = true)]
async fn arming_does_not_park_what_another_client_fires() {
    let fake = parked().await;
    let _agent = fake.agent().await;
    until(|| fake.tracer.link.peer().is_ok()).await;
    let both = wanted(&[SWITCH, FORK]);
    let fired = fake
        .tracer
        .fire("b", &wanted(&[SWITCH]), &SwitchTerms::default())
        .await;
    fired.expect("fired");
    let terms = ArmTerms {
        even_if_others: true,
        ..ArmTerms::default()
    };
    let armed = fake.tracer.arm("a", &both, &terms).await.expect("armed");
    let states = armed.results.iter().map(|result| result.state());
    let expected = [TracepointState::Parked, TracepointState::Firing];
    assert_eq!(states.collect::<Vec<_>>(), expected);
    assert_eq!(armed.results[1].kept_by, ["b"]);
    assert!(fake.keys.is_on("sched_switch"));
    assert!(!fake.keys.is_on("sched_process_fork"));
}

#[tokio::test]
async fn tracepoints_that_no_event_uses_are_listed_with_an_agent_too() {
    let fake = recording();
    let _agent = fake.agent().await;
    until(|| fake.tracer.link.peer().is_ok()).await;
    let names = async |armed_only| {
        let listed = list(&fake, armed_only).await.into_iter();
        listed.map(|found| found.name).collect::<Vec<_>>()
    };
    assert_eq!(names(true).await, [SWITCH]);
    fake.keys.probe(":sched_process_exec", true);
    let expected = [":sched_process_exec", SWITCH];
    assert_eq!(names(true).await, expected);
    let all = names(false).await;
    assert!(all.len() > EVENTS.len() && all[0] == expected[0], "{all:?}");
    fake.keys.probe(":sched_process_exec", false);
    assert_eq!(names(false).await, EVENTS);
}

/// An agent has nothing to detach from an event of the command line.
#[tokio::test(start_paused = true)]
async fn an_agent_leaves_the_events_of_the_command_line_alone() {
    let fake = parked().await;
    let _agent = fake.agent().await;
    until(|| fake.tracer.link.peer().is_ok()).await;
    let switch = wanted(&[SWITCH]);
    let fired = fake
        .tracer
        .fire("a", &switch, &SwitchTerms::default())
        .await;
    fired.expect("still armed");
    // The agent's own probe would come to a tracepoint that others use.
    let terms = ArmTerms::default();
    let refused = fake.tracer.arm("a", &switch, &terms).await;
    assert_eq!(refused.expect_err("others").reason(), "OTHERS_TRACE");
    let kept = fake.tracer.disarm("a", &switch, false, None).await;
    assert_eq!(kept.expect("kept")[0].kept_by, ["--trace-events"]);
    // With force, the event is disarmed, and its key stays on for the guest's own users.
    let left = fake.tracer.disarm("a", &switch, true, None).await;
    assert_eq!(left.expect("left")[0].state(), TracepointState::Disarmed);
    assert!(fake.keys.is_on("sched_switch"));
    let book = fake.tracer.book();
    assert!(book.events.is_empty() && book.overdue.is_empty());
}
