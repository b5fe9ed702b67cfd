// SPDX-License-Identifier: Apache-2.0
//! Parks and fires events that a stock kernel's command line has armed, and reads them in memory.
//! The guest has no agent.

use std::sync::Arc;
use std::time::{Duration, Instant};

use patchbay_attach::PauseWay;
use patchbay_guest::guest::Guest;
use patchbay_guest::kernel_memory::KernelMemory;
use patchbay_observe::trace::{Rings, Start};
use patchbay_proto::v1::tracepoints_service_server::TracepointsService;
use patchbay_proto::v1::{
    FireTracepointsRequest, ListTracepointsRequest, ParkTracepointsRequest, Tracepoint,
    TracepointState,
};
use patchbay_service::api::{Access, Guests, ServedGuest, TracepointsApi};
use patchbay_service::auth::SocketAuthoriser;
use patchbay_service::keys::registry::Look;
use patchbay_service::testing::registry;
use patchbay_service::trace::{BootEvents, Tracing};
use serde_json::json;
use tonic::Request;

use super::stock::Boot;
use super::{Accelerator, Memory, PATIENCE, Qemu};

/// Creates a process again and again.
const INIT: &[u8] = b"#!/bin/busybox sh
/bin/busybox echo READY
while :; do
    /bin/busybox usleep 50000
    /bin/busybox echo alive
done
";
const EVENTS: &str = "sched:sched_process_fork,sched:sched_process_exit";
const ALL: usize = 1 << 20;

/// Sets a mode of TCG, so that it translates the guest's code again. TCG does not notice that
/// another process has changed code. It keeps the translations of each mode, so a mode serves for
/// one change only.
fn translate(qemu: &Qemu, mode: &str) {
    qemu.other("human-monitor-command", json!({ "command-line": mode }));
}

async fn list(api: &TracepointsApi) -> Vec<Tracepoint> {
    let request = ListTracepointsRequest {
        patterns: vec!["sched_process_*".to_owned()],
        armed_only: true,
        ..Default::default()
    };
    match api.list_tracepoints(Request::new(request)).await {
        Ok(listed) => listed.into_inner().tracepoints,
        // It boots.
        Err(_) => vec![],
    }
}

/// Waits until the events have this state. Returns them.
async fn until(api: &TracepointsApi, state: TracepointState) -> Vec<Tracepoint> {
    let end = Instant::now() + PATIENCE;
    loop {
        let found = list(api).await;
        if found.len() == 2 && found.iter().all(|found| found.state() == state) {
            return found;
        }
        assert!(Instant::now() < end, "{state:?}: {found:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

pub async fn boot_events(accelerator: Accelerator) {
    let Some(boot) = Boot::with(INIT, &[], Vec::new()) else {
        return;
    };
    let events = BootEvents::parse(EVENTS).expect("well-formed");
    let line = format!("{} {}", Boot::COMMAND_LINE, events.word());
    let append = ["-append", &line];
    let Some(qemu) = boot.start(accelerator, Memory::SharedMemfd, &append) else {
        return;
    };
    let (guest, keys) = qemu.keys(PauseWay::Qmp);
    let tracing = Tracing {
        boot_events: events,
        ..Tracing::default()
    };
    let guests = Guests::default();
    let served = ServedGuest::start(keys.clone(), tracing).expect("served");
    guests.add(served).expect("the only one");
    let api = TracepointsApi::new(Access::new(guests, Arc::new(SocketAuthoriser), 0));
    let parked = until(&api, TracepointState::Parked).await;
    for found in &parked {
        assert_eq!(found.armed_by, ["--trace-events"], "{found:?}");
        assert!(!found.enabled && found.probe_functions.len() == 1);
    }
    println!("parked: {parked:?}");
    boot.boots();
    translate(&qemu, "log nochain");
    boot.lives();

    let log = registry(&keys).find_log(Look::Known).expect("found").log;
    let memory = KernelMemory::new(guest.ram(), log.page_table);
    let source = log.trace.expect("described");
    let array = source.instance(&memory, "").expect("the top level");
    let mut rings = Rings::new(source, array, Start::End);
    assert!(rings.begin(&memory));
    let mut events = || {
        boot.lives();
        let chunks = rings.poll(&memory, ALL).chunks;
        chunks.iter().map(|chunk| chunk.events).sum::<u64>()
    };
    assert_eq!(events(), 0, "the events are parked");
    let request = FireTracepointsRequest {
        patterns: vec!["sched:*".to_owned()],
        ..Default::default()
    };
    let fired = api.fire_tracepoints(Request::new(request)).await;
    println!("fired: {:?}", fired.expect("fired").into_inner());
    assert!(list(&api).await.iter().all(|found| found.enabled));
    // The older and the newer name of the same mode.
    translate(&qemu, "singlestep on");
    translate(&qemu, "one-insn-per-tb on");
    boot.lives();
    let count = events();
    println!("{count} events while they fire");
    assert!(count > 3, "{count}");
    let request = ParkTracepointsRequest {
        patterns: vec!["sched:*".to_owned()],
        ..Default::default()
    };
    let parked = api.park_tracepoints(Request::new(request)).await;
    let summary = parked.expect("parked").into_inner().summary;
    assert_eq!(summary.map(|summary| summary.firing), Some(0));
    until(&api, TracepointState::Parked).await;
}
