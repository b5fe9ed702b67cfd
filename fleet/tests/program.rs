// SPDX-License-Identifier: Apache-2.0
//! The program as an operator runs it: a controller on an embedded store, and commands.

#[path = "rollouts/support.rs"]
#[allow(dead_code)]
mod support;

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use support::{Fleet, spec};

const PROGRAM: &str = env!("CARGO_BIN_EXE_patchbay-fleet");

struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        // As a crash would.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn serve(folder: &Path, fleet: &Fleet) -> Program {
    let mut command = Command::new(PROGRAM);
    command
        .arg("--standalone")
        .arg("--socket")
        .arg(folder.join("fleet.sock"));
    command.arg("--store").arg(folder.join("program.redb"));
    for host in &fleet.hosts {
        command
            .arg("--host")
            .arg(format!("{}={}", host.name, host.socket.display()));
    }
    let child = command.stderr(Stdio::null()).spawn().expect("starts");
    Program(child)
}

async fn rollout(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = tokio::process::Command::new(PROGRAM);
    command.arg("--socket").arg(folder.join("fleet.sock"));
    command
        .arg("rollout")
        .args(arguments)
        .output()
        .await
        .expect("runs")
}

/// Repeats the command until the controller leads.
async fn answered(folder: &Path, arguments: &[&str]) -> String {
    let answered = async {
        loop {
            let output = rollout(folder, arguments).await;
            if output.status.success() {
                return String::from_utf8(output.stdout).expect("text");
            }
            tokio::task::yield_now().await;
        }
    };
    let answered = tokio::time::timeout(support::PATIENCE, answered).await;
    answered.expect("in time")
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_plans_starts_and_takes_back_across_a_crash() {
    let fleet = Fleet::start(1, 2).await;
    let folder = tempfile::tempdir().expect("temporary folder");
    let folder = folder.path();
    let text = folder.join("net.yaml");
    std::fs::write(&text, spec("waves: [{size: 1, bake: 1h}, {size: rest}]")).expect("written");
    let program = serve(folder, &fleet);
    answered(folder, &["list"]).await;

    let plan = answered(folder, &["plan", text.to_str().expect("text")]).await;
    assert!(
        plan.contains("wave 1: 1 guests on 1 hosts, 1 keys, 1 sites"),
        "{plan}"
    );
    let digest = plan
        .trim()
        .rsplit(' ')
        .next()
        .expect("the last word")
        .to_owned();
    let wrong = rollout(folder, &["start", "net", "--digest", "0"]).await;
    assert_eq!(wrong.status.code(), Some(1));
    answered(folder, &["start", "net", "--digest", &digest]).await;
    let explained = answered(folder, &["explain", "net", "web-1"]).await;
    assert!(explained.contains("it is in wave 2"), "{explained}");

    drop(program);
    let _program = serve(folder, &fleet);
    answered(folder, &["promote", "net"]).await;
    let status = answered(folder, &["status", "net", "--watch"]).await;
    assert!(status.contains("net is completed"), "{status}");
    assert_eq!(fleet.counts("alpha"), [1, 1]);
    answered(folder, &["undo", "net"]).await;
    let list = async { while !answered(folder, &["list"]).await.contains("undone") {} };
    tokio::time::timeout(support::PATIENCE, list)
        .await
        .expect("undone in time");
    assert_eq!(fleet.counts("alpha"), [0, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_spec_is_refused_with_its_place() {
    let fleet = Fleet::start(1, 1).await;
    let folder = tempfile::tempdir().expect("temporary folder");
    let folder = folder.path();
    let text = folder.join("net.yaml");
    std::fs::write(&text, spec("waves: [{size: 1, bkae: 1h}]")).expect("written");
    let _program = serve(folder, &fleet);
    answered(folder, &["list"]).await;
    let output = rollout(folder, &["plan", text.to_str().expect("text")]).await;
    let error = String::from_utf8(output.stderr).expect("text");
    assert!(
        error.contains("line 3, column ") && error.contains("`bkae`"),
        "{error}"
    );
}
