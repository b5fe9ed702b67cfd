// SPDX-License-Identifier: Apache-2.0
//! Tests tracepoints of a Linux guest, armed by its agent and switched from outside.

use std::process::{Output, Stdio};

use anyhow::{Context, Result, ensure};
use patchbay_proto::v1::trace_field::Value;
use patchbay_proto::v1::{
    ArmTracepointsRequest, FlipReport, ListTracepointsRequest, ParkTracepointsRequest, ResultView,
    TraceEvent, TracepointState, TracepointSummary,
};
use patchbay_tests::{AGENT_INSTANCE, Environment, Guest, TestGuest, reason, until};
use tokio::process::Command;

/// Events that every command in the guest causes.
const EVENTS: [&str; 3] = [
    "sched:sched_process_exec",
    "sched:sched_process_exit",
    "sched:sched_process_fork",
];

async fn work(guest: &mut Guest) -> Result<()> {
    guest
        .shell("for i in 1 2 3 4 5; do busybox true; done")
        .await?;
    Ok(())
}

/// Returns whether the event is the exec of `busybox true`. The shell runs it as another instance
/// of itself, by "/proc/self/exe".
fn is_exec(event: &TraceEvent) -> bool {
    let is_program =
        |value: &Option<Value>| matches!(value, Some(Value::Text(text)) if text.starts_with('/'));
    event.name == "sched:sched_process_exec"
        && event
            .fields
            .iter()
            .any(|field| field.name == "filename" && is_program(&field.value))
}

#[tokio::test]
async fn armed_is_silent_firing_streams_and_parked_is_silent() -> Result<()> {
    let Some(mut guest) = Guest::with_agent().await? else {
        return Ok(());
    };
    let mut events = guest.events().await?;

    let armed = guest.arm(&EVENTS).await?;
    ensure!(
        armed
            .results
            .iter()
            .all(|result| result.state() == TracepointState::Parked),
        "{armed:?}"
    );
    ensure!(
        guest.key("sched_process_exec").await?.count == 0,
        "armed must be parked"
    );
    let before = guest.recorded().await?;
    work(&mut guest).await?;
    ensure!(
        guest.recorded().await? == before,
        "a parked event was recorded"
    );

    let fired = guest.fire(&EVENTS).await?;
    let report = fired.report.unwrap_or_default();
    ensure!(report.paused && report.sites_patched >= 3, "{report:?}");
    work(&mut guest).await?;
    let seen = events.until(is_exec).await?;
    let exec = seen.last().expect("until() found it");
    // The process's name may be empty, because the process may have ended before the agent read its
    // name.
    ensure!(exec.pid > 1 && exec.context.len() == 5, "{exec:?}");
    ensure!(exec.time.is_some() && exec.guest_time_ns > 0, "{exec:?}");

    guest.park(&EVENTS).await?;
    ensure!(guest.key("sched_process_exec").await?.count == 0);
    let before = guest.recorded().await?;
    work(&mut guest).await?;
    ensure!(
        guest.recorded().await? == before,
        "a parked event was recorded"
    );

    guest.disarm(&EVENTS).await?;
    let enabled = guest.attached().await?;
    ensure!(enabled.trim().is_empty(), "still enabled: {enabled}");
    guest.assert_no_warnings().await?;
    ensure!(guest.power_off().await?.success());
    Ok(())
}

/// Checks that with the agent stopped only the keys change, and that the ring buffer keeps the
/// events for later.
#[tokio::test]
async fn fire_and_park_work_on_a_guest_whose_agent_is_stopped() -> Result<()> {
    let Some(mut guest) = Guest::with_agent().await? else {
        return Ok(());
    };
    let mut events = guest.events().await?;
    guest.arm(&EVENTS).await?;
    guest.shell("kill -STOP $(pidof patchbay-agent)").await?;
    let before = guest.recorded().await?;

    guest.fire(&EVENTS).await?;
    work(&mut guest).await?;
    guest.park(&EVENTS).await?;
    let recorded = guest.recorded().await? - before;
    ensure!(
        recorded >= 15,
        "5 commands were run and {recorded} events recorded"
    );
    work(&mut guest).await?;
    ensure!(
        guest.recorded().await? - before == recorded,
        "a parked event was recorded"
    );

    guest.shell("kill -CONT $(pidof patchbay-agent)").await?;
    events.until(is_exec).await?;
    guest.disarm(&EVENTS).await?;
    guest.assert_no_warnings().await
}

fn summary(events: usize, firing: usize) -> TracepointSummary {
    let to_u32 = |count| u32::try_from(count).expect("hundreds");
    TracepointSummary {
        events: to_u32(events),
        firing: to_u32(firing),
    }
}

/// Fires and parks all tracepoints that can be parked, in one pause each.
#[tokio::test]
async fn hundreds_fire_and_park_in_one_pause() -> Result<()> {
    let Some(mut guest) = Guest::with_agent().await? else {
        return Ok(());
    };
    let armed = guest.arm(&["*"]).await?.results.len();
    ensure!(armed > 200, "only {armed} events can be armed");
    let before = guest.recorded().await?;
    work(&mut guest).await?;
    ensure!(
        guest.recorded().await? == before,
        "a parked event was recorded"
    );
    let fired = guest.fire(&["*"]).await?;
    ensure!(
        fired.results.len() == armed,
        "{} of {armed} fired",
        fired.results.len()
    );
    let report = fired.report.unwrap_or_default();
    ensure!(report.sites_patched as usize > armed / 2, "{report:?}");
    ensure!(fired.summary == Some(summary(armed, armed)), "{fired:?}");
    let request = ParkTracepointsRequest {
        patterns: vec!["*".to_owned()],
        result_view: ResultView::Summary.into(),
        ..Default::default()
    };
    let parked = guest.tracepoints().park_tracepoints(request).await?;
    let parked = parked.into_inner();
    ensure!(parked.results.is_empty(), "{parked:?}");
    ensure!(parked.summary == Some(summary(armed, 0)), "{parked:?}");
    let enabled = guest.armed().await?;
    let enabled = enabled.iter().filter(|tracepoint| tracepoint.enabled);
    ensure!(enabled.count() == 0, "some go on");
    guest.disarm(&["*"]).await?;
    guest.assert_no_warnings().await
}

#[tokio::test]
async fn refusals_have_their_reasons() -> Result<()> {
    let Some(mut guest) = Guest::with_agent().await? else {
        return Ok(());
    };
    for (name, why) in [
        ("raw_syscalls:sys_enter", "regfunc"),
        ("syscalls:sys_enter_openat", "system calls"),
    ] {
        let status = guest.arm(&[name]).await.expect_err("cannot be parked");
        ensure!(
            reason(&status) == "TRACEPOINT_REFUSED" && status.message().contains(why),
            "{status:?}"
        );
    }
    let status = guest
        .fire(&["sched:sched_switch"])
        .await
        .expect_err("no probe");
    ensure!(reason(&status) == "NOT_ARMED", "{status:?}");

    let request = ArmTracepointsRequest {
        patterns: vec!["sched:sched_switch".to_owned()],
        filter: "nonsense == 1".to_owned(),
        ..Default::default()
    };
    let status = guest
        .tracepoints()
        .arm_tracepoints(request.clone())
        .await
        .expect_err("a wrong filter");
    ensure!(
        reason(&status) == "FILTER_REJECTED" && status.message().contains("Field not found"),
        "{status:?}"
    );
    // A valid filter is accepted after the invalid one.
    let request = ArmTracepointsRequest {
        filter: "prev_pid == 0".to_owned(),
        ..request
    };
    guest.tracepoints().arm_tracepoints(request).await?;
    let filter = guest
        .shell(&format!(
            "cat {AGENT_INSTANCE}/events/sched/sched_switch/filter"
        ))
        .await?;
    ensure!(filter.trim() == "prev_pid == 0", "{filter}");
    guest.assert_no_warnings().await
}

#[tokio::test]
async fn others_in_the_guest_are_seen_and_not_silenced() -> Result<()> {
    let Some(mut guest) = Guest::with_agent().await? else {
        return Ok(());
    };
    let event = "sched:sched_process_fork";
    guest
        .shell("echo 1 > /sys/kernel/tracing/events/sched/sched_process_fork/enable")
        .await?;
    let status = guest.arm(&[event]).await.expect_err("another user");
    ensure!(
        reason(&status) == "OTHERS_TRACE" && status.message().contains("top level"),
        "{status:?}"
    );
    ensure!(
        guest.key("sched_process_fork").await?.count == 1,
        "the other user goes on"
    );
    let request = ListTracepointsRequest {
        patterns: vec![event.to_owned()],
        ..Default::default()
    };
    let listed = guest
        .tracepoints()
        .list_tracepoints(request)
        .await?
        .into_inner()
        .tracepoints;
    ensure!(
        listed.len() == 1
            && listed[0].others == ["tracefs: top level"]
            && listed[0].probes == Some(1),
        "{listed:?}"
    );
    let request = ArmTracepointsRequest {
        patterns: vec![event.to_owned()],
        even_if_others: true,
        ..Default::default()
    };
    guest.tracepoints().arm_tracepoints(request).await?;
    ensure!(
        guest.key("sched_process_fork").await?.count == 0,
        "now it is silenced"
    );
    guest
        .shell("echo 0 > /sys/kernel/tracing/events/sched/sched_process_fork/enable")
        .await?;
    guest.disarm(&[event]).await?;
    guest.assert_no_warnings().await
}

/// Waits until the fork event's key has this count.
async fn until_count(guest: &mut Guest, count: i32) -> Result<()> {
    until(async || Ok(guest.key("sched_process_fork").await?.count == count))
        .await
        .with_context(|| format!("the key does not become {count}"))
}

/// Waits until the monitor reports that other clients in the guest trace the event.
async fn until_fired_by_others(guest: &mut Guest, event: &str) -> Result<()> {
    until(async || {
        let request = ListTracepointsRequest {
            patterns: vec![event.to_owned()],
            ..Default::default()
        };
        let listed = guest.tracepoints().list_tracepoints(request).await?;
        let listed = listed.into_inner().tracepoints;
        Ok(listed[0].fired_by == ["others in the guest"])
    })
    .await
    .context("the monitor does not see the others")
}

/// Checks that ftrace and perf can begin to trace an armed and parked event, and can continue when
/// the event is disarmed.
#[tokio::test]
async fn who_begins_to_trace_a_parked_event_is_not_silenced() -> Result<()> {
    let Some(mut guest) = Guest::with_agent().await? else {
        return Ok(());
    };
    let event = "sched:sched_process_fork";
    let enable = "/sys/kernel/tracing/events/sched/sched_process_fork/enable";
    guest.arm(&[event]).await?;
    guest.shell(&format!("echo 1 >{enable}")).await?;
    // The kernel turns the key on when ftrace attaches its probe, and the monitor notices that.
    ensure!(guest.key("sched_process_fork").await?.count == 1);
    until_fired_by_others(&mut guest, event).await?;
    work(&mut guest).await?;
    let count = "grep -c sched_process_fork: /sys/kernel/tracing/trace";
    guest.shell(count).await?;
    let parked = guest.park(&[event]).await?;
    let stopped = |report: &FlipReport| report.paused || report.sites_patched > 0;
    ensure!(
        parked.results[0].kept_by == ["others in the guest"]
            && !parked.report.as_ref().is_some_and(stopped),
        "{parked:?}"
    );
    guest.shell(&format!("echo 0 >{enable}")).await?;
    until_count(&mut guest, 0).await?;

    guest
        .shell(
            "cd /tmp && mkfifo end && id=$(cat /sys/kernel/tracing/events/sched/sched_process_fork/id) && \
             (trace_tool count $id <end >counted &) && exec 5>end && until grep -q counting counted; do :; done",
        )
        .await?;
    ensure!(guest.key("sched_process_fork").await?.count == 1);
    until_fired_by_others(&mut guest, event).await?;
    let listed = ListTracepointsRequest {
        patterns: vec![event.to_owned()],
        ..Default::default()
    };
    let listed = guest.tracepoints().list_tracepoints(listed).await?;
    let listed = listed.into_inner().tracepoints;
    ensure!(
        listed[0].others == ["1 unknown probe (perf, BPF or a module)"]
            && listed[0].fired_by == ["others in the guest"],
        "{listed:?}"
    );
    // perf's probe stays when the agent's is detached.
    guest.disarm(&[event]).await?;
    ensure!(guest.key("sched_process_fork").await?.count == 1);
    work(&mut guest).await?;
    let counted = guest
        .shell(
            "exec 5>&-; until [ $(wc -l </tmp/counted) = 2 ]; do :; done; tail -n 1 /tmp/counted",
        )
        .await?;
    ensure!(
        counted.trim().parse::<u32>()? >= 5,
        "perf counted {counted}"
    );
    until_count(&mut guest, 0).await?;
    guest.assert_no_warnings().await
}

/// Records to a disk of 64 KiB in a separate mount namespace. Returns the command's output, which
/// includes the recorded file, and its standard error as text.
async fn record_to_small_disk(
    environment: &Environment,
    guest: &Guest,
    first: &str,
) -> Result<(Output, String)> {
    let script = "mount -t tmpfs -o size=64k none \"$1\" && cd \"$1\" || exit; eval \"$3\"; \
                  \"$2\" --socket \"$4\" trace record -o events.json 'sched:sched_process_*'; status=$?; cat events.json; exit $status";
    let folder = guest.folder().join("disk");
    std::fs::create_dir_all(&folder)?;
    let output = Command::new("unshare")
        .args([
            "--user",
            "--map-root-user",
            "--mount",
            "sh",
            "-c",
            script,
            "sh",
        ])
        .arg(folder)
        .arg(&environment.cli)
        .arg(first)
        .arg(guest.socket())
        .stdin(Stdio::null())
        .output()
        .await?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    Ok((output, said))
}

/// Checks that a recording that fills the disk leaves a valid file and disarms its events.
#[tokio::test]
async fn a_recording_ends_when_the_disk_is_full() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    let mut guest = Guest::builder(&environment)
        .agent()
        .argument("--trace-grace=0")
        .boot()
        .await?;
    guest.assert_registered().await?;
    guest.wait_for_agent().await?;
    guest
        .shell("(while [ ! -e /tmp/calm ]; do busybox true; done) &")
        .await?;

    let (output, said) = record_to_small_disk(&environment, &guest, ":").await?;
    let file: serde_json::Value = serde_json::from_slice(&output.stdout)
        .with_context(|| format!("the file is not whole JSON; {said}"))?;
    let records = file["traceEvents"].as_array().context("no events")?;
    let events = records.iter().filter(|record| record["cat"] == "sched");
    let events = events.count();
    let full = format!(
        "events.json: the disk is full; the file holds the {events} events that were recorded before"
    );
    ensure!(
        output.status.code() == Some(1) && said.contains(&full),
        "{events} events, {said}"
    );
    // 64 KiB hold a hundred events or more.
    ensure!(events > 50, "only {events} events fit");
    until_disarmed(&mut guest).await?;

    let (output, said) = record_to_small_disk(&environment, &guest, "cat /dev/zero >rest").await?;
    ensure!(
        output.status.code() == Some(1)
            && output.stdout.is_empty()
            && said.contains("events.json: the disk is full; nothing was recorded")
            && !said.contains("events fire"),
        "{said}"
    );
    until_disarmed(&mut guest).await?;
    guest.shell("echo >/tmp/calm; wait").await?;
    guest.assert_no_warnings().await
}

/// Waits until no event is armed, and checks that none is on in the guest's kernel.
async fn until_disarmed(guest: &mut Guest) -> Result<()> {
    until(async || Ok(guest.armed().await?.is_empty()))
        .await
        .context("events stay armed")?;
    let enabled = guest.attached().await?;
    ensure!(enabled.trim().is_empty(), "still enabled: {enabled}");
    for key in [
        "sched_process_exec",
        "sched_process_exit",
        "sched_process_fork",
    ] {
        ensure!(guest.key(key).await?.count == 0, "{key} still fires");
    }
    Ok(())
}
