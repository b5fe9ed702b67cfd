// SPDX-License-Identifier: Apache-2.0
//! Tests processes that do not answer, and clocks that jump.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use patchbay_proto::fleet::v1;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::etcd::Etcd;
use super::fleet::{LIBFAKETIME, PATIENCE, ProcessFleet, Replica, spec};

/// The command of a gate, killed on drop. A killed controller leaves the command running.
struct GateCommand(OwnedFd);

impl GateCommand {
    /// Waits until the command has written its process id.
    async fn started(file: &Path) -> Self {
        let started = async {
            loop {
                let pid = std::fs::read_to_string(file).unwrap_or_default();
                if let Some(pid) = pid.strip_suffix('\n') {
                    return pid.parse().ok().and_then(Pid::from_raw).expect("a pid");
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let pid = tokio::time::timeout(PATIENCE, started).await;
        Self(pidfd_open(pid.expect("in time"), PidfdFlags::empty()).expect("it hangs"))
    }

    fn has_ended(&self) -> bool {
        let limit = Timespec {
            tv_sec: 60,
            tv_nsec: 0,
        };
        // The descriptor becomes readable once the process has ended.
        let ends = poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&limit));
        ends == Ok(1)
    }
}

impl Drop for GateCommand {
    fn drop(&mut self) {
        let _ = pidfd_send_signal(&self.0, Signal::KILL);
    }
}

/// Returns a spec with a gate whose command writes its process id and hangs.
fn hanging(fleet: &ProcessFleet, file: &Path, timeout: &str) -> String {
    let script = format!("echo $$ > {}; exec sleep infinity", file.display());
    fleet.gate("probe", &script);
    spec(&format!(
        "waves: [{{size: 1}}, {{size: rest}}]\n\
         gates: [{{command: probe, timeout: {timeout}, patience: 1ms, on_failure: abort}}]"
    ))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gate_that_hangs_is_killed_and_pauses_the_rollout() {
    let Some(fleet) = ProcessFleet::start(1, 1, 2, &[]).await else {
        return;
    };
    let replica = fleet.replica("replica", &[]);
    let file = fleet.path("gate.pid");
    replica.start("net", &hanging(&fleet, &file, "2s"), 2).await;
    let gate = GateCommand::started(&file).await;
    let rollout = replica.wait("net", v1::Phase::Paused).await;
    assert!(
        rollout.message.contains("did not end within"),
        "{rollout:?}"
    );
    assert!(gate.has_ended(), "the command is killed");
    assert_eq!(fleet.changes(0), [(0, 1)], "nothing is taken back");
    assert_eq!(fleet.changes(1), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gate_that_hangs_holds_up_no_abort() {
    let Some(fleet) = ProcessFleet::start(1, 1, 2, &[]).await else {
        return;
    };
    let replica = fleet.replica("replica", &[]);
    let file = fleet.path("gate.pid");
    replica.start("net", &hanging(&fleet, &file, "1h"), 2).await;
    let _gate = GateCommand::started(&file).await;
    let rollout = "net".to_owned();
    let abort = v1::AbortRequest { rollout };
    replica.rollouts().abort(abort).await.expect("legal");
    replica.wait("net", v1::Phase::Aborted).await;
    assert_eq!(fleet.changes(0), [(0, 1), (1, 0)]);
    assert_eq!(fleet.changes(1), []);
}

/// Stops one host in ten: its connections stay open, and nothing answers.
#[tokio::test(flavor = "multi_thread")]
async fn a_tenth_of_the_guests_that_does_not_answer_is_left_and_changed_later() {
    let Some(mut fleet) = ProcessFleet::start(1, 10, 1, &[]).await else {
        return;
    };
    let replica = fleet.replica("replica", &[]);
    let text = spec("waves: [{size: rest}]\ngates: [{max_errors: 10, on_failure: abort}]");
    let digest = replica.plan("net", &text, 10).await;
    fleet.signal_host(3, Signal::STOP);
    let started = replica.start_planned("net", digest).await;
    started.expect("started");
    let rollout = replica.wait("net", v1::Phase::Completed).await;
    let wave = &rollout.waves[0];
    assert_eq!((wave.as_wanted, wave.not_yet), (9, 1), "{rollout:?}");
    for guest in (0..10).filter(|guest| *guest != 3) {
        assert_eq!(fleet.changes(guest), [(0, 1)], "guest {guest}");
    }
    fleet.signal_host(3, Signal::CONT);
    fleet.registered(10, 10).await;
    fix(&replica, "web-3").await;
    let changes = fleet.changes(3);
    assert_eq!(changes, [(0, 1)], "once, whatever arrived late");
    fleet.hosts[3] = None;
}

/// Fixes the drift until this guest has the state that the rollout wants.
async fn fix(replica: &Replica, guest: &str) {
    let fixed = async {
        loop {
            let request = v1::DriftRequest {
                rollout: "net".to_owned(),
                action: v1::DriftAction::Fix.into(),
            };
            let report = replica.rollouts().drift(request).await;
            if let Ok(report) = report
                && report.get_ref().drifts.is_empty()
                && report.get_ref().compared == 10
            {
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let fixed = tokio::time::timeout(PATIENCE, fixed).await;
    fixed.unwrap_or_else(|_| panic!("{guest} is never fixed"));
}

/// Sets the clock two days forward, and then two days back. No wait becomes shorter or longer.
#[tokio::test(flavor = "multi_thread")]
async fn a_wall_clock_that_jumps_ends_no_plan_no_hold_no_bake_and_no_lease() {
    if !Path::new(LIBFAKETIME).exists() {
        eprintln!("SKIPPED: no libfaketime on this machine; apt-get install faketime");
        return;
    }
    let Some(etcd) = Etcd::start(1).await else {
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    let clock = folder.path().join("clock");
    let jump = |to: &str| {
        let new = folder.path().join("new");
        std::fs::write(&new, to).expect("written");
        std::fs::rename(&new, &clock).expect("renamed");
    };
    jump("+0d");
    let variables = [
        ("LD_PRELOAD", LIBFAKETIME.to_owned()),
        ("FAKETIME_TIMESTAMP_FILE", clock.display().to_string()),
        ("FAKETIME_NO_CACHE", "1".to_owned()),
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned()),
        ("DONT_FAKE_MONOTONIC", "1".to_owned()),
    ];
    let fleet = ProcessFleet::on(etcd, &variables, 1, 3, &[]).await;
    let replica = fleet.replica("replica", &[]);
    let text = spec("waves: [{size: 1, bake: 1h}, {size: 1, bake: 1h}, {size: rest}]\nttl: 2h");
    replica.start("net", &text, 3).await;
    replica.as_wanted("net", 0).await;
    for (wave, to) in [(0, "+2d"), (1, "+0d")] {
        jump(to);
        // Each command makes the rollout read its clock.
        replica.pause_and_resume("net").await;
        let rollout = replica.wait("net", v1::Phase::Running).await;
        assert_eq!(rollout.waves[wave + 1].as_wanted, 0, "{rollout:?}");
        assert_eq!(
            fleet.changes(wave),
            [(0, 1)],
            "the hold of guest {wave} is kept"
        );
        let rollout = "net".to_owned();
        let promote = v1::PromoteRequest {
            rollout,
            ..Default::default()
        };
        replica.rollouts().promote(promote).await.expect("legal");
        replica.as_wanted("net", wave + 1).await;
    }
    replica.wait("net", v1::Phase::Completed).await;
    for guest in 0..3 {
        assert_eq!(fleet.changes(guest), [(0, 1)], "guest {guest}");
    }
}
