// SPDX-License-Identifier: Apache-2.0
//! Tests the kernel's state, the users of its events, and the counters of its rings, read from the
//! guest's memory, against what the guest reads itself. The guest is that of the trace events.

use anyhow::{Context, Result, bail, ensure};
use patchbay_proto::v1::{
    CpuTask, DescribeGuestRequest, GetTracepointStatsRequest, KernelState, ListTracepointsRequest,
    TraceSource,
};
use patchbay_tests::Guest;
use serde_json::Value;

use super::TRACING;
use crate::snapshot::patchbay;

/// A command that starts a task that never sleeps, on CPU 1, and prints its id.
const BUSY: &str = "rm -f /tmp/busy; taskset 2 sh -c 'echo >/tmp/busy; while :; do :; done' & until [ -e /tmp/busy ]; do sleep 0.1; done; echo busy $!";

/// Describes the guest, with the parts that need a search.
pub async fn state(guest: &mut Guest) -> Result<KernelState> {
    let request = DescribeGuestRequest {
        find_kernel_state: true,
        ..Default::default()
    };
    let described = guest.guest_service().describe_guest(request).await?;
    described.into_inner().kernel_state.context("no state")
}

/// Compares the tasks that the CPUs run, and the names of the instances.
pub async fn compare_tasks(guest: &mut Guest) -> Result<()> {
    let printed = guest.shell(BUSY).await?;
    let pid = printed.split("busy ").nth(1).context("no pid")?;
    let pid: u32 = pid.trim().parse()?;
    let busy = CpuTask {
        cpu: 1,
        pid,
        process: pid,
        name: "sh".to_owned(),
    };
    let mut seen = vec![];
    // A thread of the kernel may run on this CPU at any moment.
    while !seen.contains(&busy) {
        ensure!(seen.len() < 10_000, "{busy:?} never runs: {seen:?}");
        let state = state(guest).await?;
        let cpus: Vec<u32> = state.tasks.iter().map(|task| task.cpu).collect();
        ensure!(cpus == [0, 1], "{state:?}");
        ensure!(state.trace_instances == ["one"], "{state:?}");
        ensure!(state.panic.is_none(), "{state:?}");
        ensure!(state.log_overwritten == Some(0), "{state:?}");
        ensure!(state.log_refused == Some(0), "{state:?}");
        seen.extend(state.tasks);
    }
    guest.shell(&format!("kill -9 {pid}")).await?;
    Ok(())
}

/// Compares which instances have enabled the events of processes.
pub async fn compare_users(guest: &mut Guest) -> Result<()> {
    let request = ListTracepointsRequest {
        patterns: vec!["sched:sched_process_*".to_owned()],
        armed_only: true,
        ..Default::default()
    };
    let listed = guest.tracepoints().list_tracepoints(request).await?;
    for event in listed.into_inner().tracepoints {
        let mut users = event.enabled_in.clone();
        users.sort();
        let expected: &[&str] = match event.name.as_str() {
            "sched:sched_process_fork" => &["top level"],
            "sched:sched_process_exec" | "sched:sched_process_exit" => &["one", "top level"],
            _ => bail!("{event:?} is not enabled"),
        };
        ensure!(users == expected, "{event:?}");
    }
    Ok(())
}

/// Compares the counters of the rings of the top level or an instance. The guest must record no
/// events meanwhile.
pub async fn compare_counters(guest: &mut Guest, instance: &str) -> Result<()> {
    let folder = match instance {
        "" => TRACING.to_owned(),
        name => format!("{TRACING}/instances/{name}"),
    };
    let own = guest
        .shell(&format!("cat {folder}/per_cpu/cpu*/stats"))
        .await?;
    let sum = |name: &str| -> u64 {
        let numbers = own.lines().filter_map(|line| line.strip_prefix(name));
        numbers
            .filter_map(|number| number.trim().parse::<u64>().ok())
            .sum()
    };
    let kib = guest
        .shell(&format!("cat {folder}/buffer_total_size_kb"))
        .await?;
    let kib: u64 = kib.trim().parse().with_context(|| kib.clone())?;
    let request = GetTracepointStatsRequest {
        instance: instance.to_owned(),
        ..Default::default()
    };
    let stats = guest.tracepoints().get_tracepoint_stats(request).await?;
    let stats = stats.into_inner();
    ensure!(stats.source() == TraceSource::Memory, "{stats:?}");
    let figures = [
        stats.buffered_events,
        stats.overwritten_events,
        stats.consumed_events,
    ];
    let expected = ["entries:", "overrun:", "read events:"].map(sum);
    ensure!(figures == expected && figures[0] > 20, "{stats:?} {own}");
    ensure!(
        stats.written_events == figures.iter().sum::<u64>(),
        "{stats:?}"
    );
    // The kernel does not count the headers of the pages, and rounds down.
    let bytes = stats.buffer_bytes;
    ensure!(
        (kib << 10..=(kib << 10) + (kib << 10) / 64).contains(&bytes),
        "{bytes} {kib}"
    );
    Ok(())
}

/// Checks the kernel's state after a panic that the shell `pid` caused, and that an autopsy has
/// every part.
pub async fn told_after_panic(guest: &mut Guest, cli: &std::path::Path, pid: u32) -> Result<()> {
    let state = state(guest).await?;
    ensure!(state.panicked == Some(true), "{state:?}");
    let panic = state.panic.clone().context("no panic")?;
    ensure!(
        panic.text.starts_with("Kernel panic - not syncing: "),
        "{panic:?}"
    );
    let cpus: Vec<u32> = state.tasks.iter().map(|task| task.cpu).collect();
    let shell = state.tasks.iter().find(|task| task.pid == pid);
    // A CPU that the panic has stopped is not online any more.
    ensure!(!cpus.is_empty() && shell.is_some(), "{pid}: {state:?}");
    let words = ["guest", "autopsy", "-o", "json"];
    let autopsy: Value = serde_json::from_str(&patchbay(cli, guest.socket(), &words).await?)?;
    let rings = autopsy["rings"].as_object().context("no rings")?;
    ensure!(rings.keys().eq(["", "one"]), "{:?}", rings.keys());
    for (instance, ring) in rings {
        let events = ring["events"].as_array().context("no events")?;
        ensure!(events.len() > 20, "{instance}: {ring}");
    }
    ensure!(
        autopsy["missing"] == serde_json::json!({}),
        "{}",
        autopsy["missing"]
    );
    ensure!(
        !autopsy["tracepoints"]
            .as_array()
            .context("no list")?
            .is_empty()
    );
    let details = &autopsy["guest"]["details"];
    let last = details["last_panic"].as_str().context("no panic")?;
    ensure!(last.contains(&panic.text), "{last}");
    let tasks = details["tasks"].as_array().context("no tasks")?;
    ensure!(tasks.len() == cpus.len(), "{details}");
    println!("tasks after the panic: {}", details["tasks"]);
    Ok(())
}
