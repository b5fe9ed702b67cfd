// SPDX-License-Identifier: Apache-2.0
//! Tests an agent of a Linux guest that is killed, is absent, belongs to another user, or is not an
//! agent.

use anyhow::{Context, Result, ensure};
use patchbay_proto::agent::v1::from_agent::Message as Answer;
use patchbay_proto::agent::v1::{AgentHello, FromAgent};
use patchbay_proto::v1::trace_field::Value;
use patchbay_proto::v1::{
    ArmTracepointsRequest, StreamTracepointEventsRequest, TraceEvent, Tracepoint, TracepointState,
};
use patchbay_tests::{AGENT_INSTANCE, EventStream, Guest, TestGuest, reason, until};
use prost::Message;

const EXEC: &str = "sched:sched_process_exec";
const FORK: &str = "sched:sched_process_fork";

/// Runs a program with this file name, which appears in its exec event.
async fn run(guest: &mut Guest, name: &str) -> Result<()> {
    let program = format!("/tmp/{name}");
    guest
        .shell(&format!(
            "ln -s /bin/busybox {program}; {program} 2>/dev/null || true"
        ))
        .await?;
    Ok(())
}

/// Returns a predicate for the exec of a program that [`run`] ran.
fn ran(name: &str) -> impl Fn(&TraceEvent) -> bool {
    let program = format!("/tmp/{name}");
    move |event| {
        event.name == EXEC
            && event.fields.iter().any(|field| {
                field.name == "filename"
                    && matches!(&field.value, Some(Value::Text(text)) if *text == program)
            })
    }
}

async fn states(guest: &mut Guest) -> Result<Vec<(String, TracepointState, u64)>> {
    let armed = guest.armed().await?;
    let state = |event: &Tracepoint| {
        (
            event.name.clone(),
            event.state(),
            event.armed_by.len() as u64,
        )
    };
    Ok(armed.iter().map(state).collect())
}

/// Kills and restarts the agent several times. Checks that streams continue, that events recorded
/// without an agent arrive later, and that parked events stay parked.
#[tokio::test]
async fn an_agent_that_is_killed_and_started_again_goes_on() -> Result<()> {
    let Some(mut guest) = Guest::with_agent().await? else {
        return Ok(());
    };
    guest.arm(&[FORK]).await?;
    // This is the same stream as that of `patchbay trace tail sched_process_exec`.
    let request = StreamTracepointEventsRequest {
        patterns: vec![EXEC.to_owned()],
        arm_and_fire: true,
        ..Default::default()
    };
    let mut events = EventStream::open(&mut guest.tracepoints(), request).await?;
    run(&mut guest, "before").await?;
    events.until(ran("before")).await?;
    let armed = states(&mut guest).await?;
    ensure!(
        armed
            == [
                (EXEC.to_owned(), TracepointState::Firing, 1),
                (FORK.to_owned(), TracepointState::Parked, 1)
            ],
        "{armed:?}"
    );

    for round in 0..4 {
        guest.kill_agent().await?;
        run(&mut guest, &format!("without-{round}")).await?;
        // These steps do not wait for an agent.
        guest.park(&[EXEC]).await.context("parking")?;
        ensure!(
            guest.key("sched_process_exec").await?.count == 1,
            "the stream keeps it firing"
        );
        let status = guest.arm(&["sched:sched_switch"]).await;
        let status = status.expect_err("nobody attaches the probe");
        ensure!(reason(&status) == "NO_AGENT", "{status:?}");
        ensure!(states(&mut guest).await? == armed);

        guest.start_agent().await?;
        run(&mut guest, &format!("with-{round}")).await?;
        let seen = events.until(ran(&format!("with-{round}"))).await?;
        ensure!(
            seen.iter().any(ran(&format!("without-{round}"))),
            "round {round}: what was recorded without an agent is lost; there came {seen:?}"
        );
        ensure!(
            seen.iter().all(|event| event.name == EXEC),
            "a parked event fired: {seen:?}"
        );
        ensure!(guest.key("sched_process_fork").await?.count == 0);
        ensure!(states(&mut guest).await? == armed);
    }
    // The new agent arms and disarms as the first one did.
    guest.arm(&["sched:sched_process_exit"]).await?;
    drop(events);
    guest.disarm(&["sched:sched_process_exit", FORK]).await?;
    guest.assert_no_warnings().await
}

/// Kills the agent while it streams many events, and while it attaches probes.
#[tokio::test]
async fn an_agent_that_is_killed_at_work_leaves_nothing_behind() -> Result<()> {
    let Some(mut guest) = Guest::with_agent().await? else {
        return Ok(());
    };
    let mut events = guest.events().await?;
    guest.arm(&[EXEC, "sched:sched_switch"]).await?;
    guest.fire(&[EXEC, "sched:sched_switch"]).await?;
    for round in 0..3 {
        guest
            .shell("for i in 1 2 3 4 5 6 7 8; do busybox true; done; kill -KILL $(pidof patchbay-agent)")
            .await?;
        guest.wait_for_no_agent().await?;
        guest.start_agent().await?;
        run(&mut guest, &format!("with-{round}")).await?;
        events.until(ran(&format!("with-{round}"))).await?;
    }
    guest.park(&["*"]).await?;
    guest.disarm(&["*"]).await?;

    // The agent is killed while it attaches the probes of hundreds of events.
    let mut client = guest.tracepoints();
    let arming = tokio::spawn(async move {
        let request = ArmTracepointsRequest {
            patterns: vec!["*".to_owned()],
            ..Default::default()
        };
        client.arm_tracepoints(request).await
    });
    guest
        .shell(&format!(
            "until [ -n \"$(cat {AGENT_INSTANCE}/set_event)\" ]; do :; done; kill -KILL $(pidof patchbay-agent)"
        ))
        .await?;
    let status = arming.await?.expect_err("the agent was killed");
    ensure!(reason(&status) == "NO_AGENT", "{status:?}");
    guest.start_agent().await?;
    // The new agent serves this call only after it has detached the probes that the killed agent
    // left behind.
    guest.arm(&[EXEC]).await?;
    ensure!(
        guest.attached().await? == EXEC,
        "probes of a call that failed stay attached"
    );
    guest.fire(&[EXEC]).await?;
    run(&mut guest, "last").await?;
    events.until(ran("last")).await?;
    guest.disarm(&[EXEC]).await?;
    guest.assert_no_warnings().await
}

/// Returns a shell command that sends a hello of versions from `oldest` to `newest`, and prints the
/// answer.
fn hello(oldest: u32, newest: u32) -> String {
    let hello = FromAgent {
        id: 0,
        message: Some(Answer::Hello(AgentHello {
            oldest_version: oldest,
            newest_version: newest,
            agent_version: "77.8".to_owned(),
            ..Default::default()
        })),
    };
    let length = u32::try_from(hello.encoded_len()).unwrap_or(0);
    let mut frame = length.to_le_bytes().to_vec();
    frame.extend(hello.encode_to_vec());
    let escaped: String = frame.iter().map(|byte| format!("\\{byte:03o}")).collect();
    format!("printf '{escaped}' | vsock_tool connect 1024 1000 | strings")
}

#[tokio::test]
async fn nobody_else_is_taken_for_the_agent() -> Result<()> {
    let Some(mut guest) = Guest::with_agent().await? else {
        return Ok(());
    };
    let connected_at = guest.wait_for_agent().await?.connected_at;
    let mut events = guest.events().await?;
    guest.arm(&[EXEC]).await?;
    guest.fire(&[EXEC]).await?;

    // An ordinary user cannot bind a port that the monitor would accept, and the monitor refuses
    // other ports.
    guest
        .shell("mkdir -p /etc && echo user:x:1000:1000::/:/bin/sh >/etc/passwd")
        .await?;
    for (own, why) in [("1000", "bind: Permission denied"), ("", "connect: ")] {
        let command =
            format!("su user -s /bin/sh -c 'vsock_tool connect 1024 {own} </dev/null' 2>&1");
        let (status, output) = guest.console().run(&command).await?;
        ensure!(status != 0 && output.contains(why), "{own:?}: {output}");
    }
    let (status, output) = guest
        .console()
        .run("su user -s /bin/sh -c 'timeout 5 patchbay-agent' 2>&1")
        .await?;
    ensure!(
        status != 0 && output.contains("CAP_NET_BIND_SERVICE"),
        "{status} {output}"
    );

    // Root reaches the monitor, but the monitor refuses the connection while an agent is connected.
    let answer = guest.shell(&hello(1, 1)).await?;
    ensure!(answer.contains("another agent is connected"), "{answer}");
    let second = guest.shell("timeout 3 patchbay-agent 2>&1 || true").await?;
    ensure!(second.contains("another agent is connected"), "{second}");

    // The following connections send another version, garbage and a partial frame.
    let answer = guest.shell(&hello(70, 77)).await?;
    ensure!(
        answer.contains("agent 77.8 speaks versions 70 to 77") && answer.contains("monitor 1 to 1"),
        "{answer}"
    );
    for garbage in [
        "head -c 100000 /dev/urandom",
        "printf '\\020\\000\\000\\000half'",
        "printf '\\377\\377\\377\\377'",
    ] {
        guest
            .console()
            .run(&format!(
                "{garbage} | vsock_tool connect 1024 1000 >/dev/null 2>&1"
            ))
            .await?;
    }

    let agent = guest.wait_for_agent().await?;
    ensure!(agent.connected_at == connected_at, "{agent:?}");
    run(&mut guest, "after").await?;
    events.until(ran("after")).await?;
    guest.assert_no_warnings().await
}

/// Waits until the monitor's reason for the absent agent contains these words.
async fn absent_because(guest: &mut Guest, words: &[&str]) -> Result<()> {
    let mut absent = String::new();
    // The reason is recorded a moment after the agent has disconnected.
    let said = until(async || {
        absent = guest.wait_for_no_agent().await?;
        Ok(words.iter().all(|word| absent.contains(word)))
    });
    said.await
        .with_context(|| format!("{words:?} are not in {absent:?}"))
}

/// Checks invalid connections while no agent is connected: the monitor refuses each with a reason,
/// and then accepts the next real agent.
#[tokio::test]
async fn without_an_agent_it_is_said_why() -> Result<()> {
    let Some(mut guest) = Guest::with_agent().await? else {
        return Ok(());
    };
    guest.kill_agent().await?;
    guest.shell(&hello(70, 77)).await?;
    absent_because(&mut guest, &["77.8 speaks versions 70 to 77", "1 to 1"]).await?;
    guest
        .console()
        .run("head -c 100000 /dev/zero | tr '\\000' '\\377' | vsock_tool connect 1024 1000 >/dev/null 2>&1")
        .await?;
    absent_because(&mut guest, &["is the maximum", "before its hello"]).await?;
    // These connections are accepted, and then send garbage or a partial frame.
    for (more, why) in [
        ("\\020\\000\\000\\000half", "the connection broke"),
        ("\\377\\377\\377\\377", "is the maximum"),
    ] {
        guest
            .shell(&hello(1, 1).replace("' |", &format!("{more}' |")))
            .await?;
        absent_because(&mut guest, &[why]).await?;
    }
    guest.start_agent().await?;
    guest.arm(&[EXEC]).await?;
    guest.disarm(&[EXEC]).await?;
    guest.assert_no_warnings().await
}
