// SPDX-License-Identifier: Apache-2.0
//! The agent of a Linux guest is absent, is another's, or is not one.
#![forbid(unsafe_code)]

use anyhow::{Result, ensure};
use patchbay_proto::v1::from_agent::Message as Answer;
use patchbay_proto::v1::trace_field::Value;
use patchbay_proto::v1::{AgentHello, FromAgent, TraceEvent};
use patchbay_tests::Guest;
use prost::Message;

const EXEC: &str = "sched:sched_process_exec";

/// Runs a program of this name, which its exec event then tells.
async fn run(guest: &mut Guest, name: &str) -> Result<()> {
    let program = format!("/tmp/{name}");
    guest
        .shell(&format!(
            "ln -s /bin/busybox {program}; {program} 2>/dev/null || true"
        ))
        .await?;
    Ok(())
}

/// The exec of a program that [`run`] ran.
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

/// A shell command that sends a hello of versions from `oldest` to `newest`, and prints the answer.
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

    // An ordinary user gets no port that the monitor would take, and from others it is refused.
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

    // Root gets as far as the monitor, and no further while the agent answers.
    let answer = guest.shell(&hello(1, 1)).await?;
    ensure!(answer.contains("another agent is connected"), "{answer}");
    let second = guest.shell("timeout 3 patchbay-agent 2>&1 || true").await?;
    ensure!(second.contains("another agent is connected"), "{second}");

    // Another version, garbage and half a frame.
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

/// Waits until what the monitor says of the absent agent has these words.
async fn absent_because(guest: &mut Guest, words: &[&str]) -> Result<()> {
    let mut absent = String::new();
    let said = async {
        // Why it is absent is written a moment after it has gone.
        loop {
            absent = guest.wait_for_no_agent().await?;
            if words.iter().all(|word| absent.contains(word)) {
                return anyhow::Ok(());
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    match tokio::time::timeout(std::time::Duration::from_secs(60), said).await {
        Ok(said) => said,
        Err(_) => anyhow::bail!("{words:?} are not in {absent:?}"),
    }
}

/// The same without an agent: each says why there is none, and the next that is one is taken.
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
    // One that is taken, and then sends garbage, or half a frame.
    for (more, why) in [
        ("\\020\\000\\000\\000half", "connection to the agent broke"),
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
