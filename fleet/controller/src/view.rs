// SPDX-License-Identifier: Apache-2.0
//! Converts rollouts to the messages of `patchbay.fleet.v1`.

use patchbay_proto::fleet::v1;

use crate::drift::{Cause, Drift};
use crate::rollout::{
    End, Failure, Header, Member, Millis, Phase, Rollout, Stage, State, TimelineEntry, Wave,
};

fn time(millis: Millis) -> prost_types::Timestamp {
    prost_types::Timestamp {
        seconds: i64::try_from(millis / 1000).unwrap_or(i64::MAX),
        nanos: i32::try_from(millis % 1000 * 1_000_000).unwrap_or(0),
    }
}

fn duration(micros: u64) -> prost_types::Duration {
    prost_types::Duration {
        seconds: i64::try_from(micros / 1_000_000).unwrap_or(i64::MAX),
        nanos: i32::try_from(micros % 1_000_000 * 1000).unwrap_or(0),
    }
}

fn number(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

pub fn phase(phase: Phase) -> v1::Phase {
    match phase {
        Phase::Planned => v1::Phase::Planned,
        Phase::Running(_) => v1::Phase::Running,
        Phase::Paused => v1::Phase::Paused,
        Phase::Completed => v1::Phase::Completed,
        Phase::Reverting(_) => v1::Phase::Reverting,
        Phase::Ended(End::Aborted) => v1::Phase::Aborted,
        Phase::Ended(End::Undone) => v1::Phase::Undone,
    }
}

/// Converts a rollout, with or without its guests.
pub fn rollout(rollout: &Rollout, guests: bool) -> v1::Rollout {
    let header = rollout.header();
    let wave = |wave: &Wave| self::wave(header, wave, &rollout.members()[wave.members()]);
    let members = rollout.members().iter().enumerate();
    let members = members.map(|(index, member)| guest(header, index, member));
    v1::Rollout {
        name: header.name.clone(),
        title: header.title.clone(),
        phase: phase(header.phase).into(),
        digest: header.digest.clone(),
        message: header.message.clone(),
        wave: number(header.wave),
        waves: header.waves.iter().map(wave).collect(),
        guests: if guests { members.collect() } else { vec![] },
        approvals: header.approvals.clone(),
        approvals_needed: number(header.policy.approvals),
        timeline: header.timeline.iter().map(entry).collect(),
    }
}

fn entry(entry: &TimelineEntry) -> v1::TimelineEntry {
    v1::TimelineEntry {
        time: Some(time(entry.time)),
        principal: entry.principal.clone(),
        text: entry.text.clone(),
    }
}

fn wave(header: &Header, wave: &Wave, members: &[Member]) -> v1::Wave {
    let count = |wanted: fn(&State) -> bool| {
        number(
            members
                .iter()
                .filter(|member| wanted(&member.state))
                .count(),
        )
    };
    let hosts: std::collections::BTreeSet<&str> =
        members.iter().map(|member| member.host.as_str()).collect();
    let predicted = members.iter().map(|member| member.plan.predicted_pause_us);
    let is_baking = header.phase == Phase::Running(Stage::Baking);
    let is_this = header.waves.get(header.wave) == Some(wave);
    v1::Wave {
        name: wave.name.clone(),
        guests: number(wave.count),
        hosts: number(hosts.len()),
        committed: count(|state| matches!(state, State::Committed { .. })),
        failed: count(|state| matches!(state, State::Failed { .. } | State::RevertFailed { .. })),
        reverted: count(|state| matches!(state, State::Reverted { .. })),
        predicted_pause: predicted.max().map(duration),
        bakes_until: wave.bakes_until.filter(|_| is_baking && is_this).map(time),
        keys: members
            .iter()
            .map(|member| u64::from(member.plan.keys))
            .sum(),
        sites: members
            .iter()
            .map(|member| u64::from(member.plan.sites))
            .sum(),
    }
}

pub fn guest(header: &Header, index: usize, member: &Member) -> v1::RolloutGuest {
    let wave = header
        .waves
        .iter()
        .position(|wave| wave.members().contains(&index));
    let is_reverting = matches!(header.phase, Phase::Reverting(_));
    let is_over = matches!(header.phase, Phase::Ended(_) | Phase::Completed);
    let (phase, message, pause) = match &member.state {
        State::Skipped { why } => (v1::GuestPhase::Skipped, why.as_str(), None),
        State::Pending if is_over => (v1::GuestPhase::Released, "", None),
        State::Pending => (v1::GuestPhase::Pending, "", None),
        State::Committing { .. } => (v1::GuestPhase::Committing, "", None),
        State::Unresolved => (v1::GuestPhase::Committing, "the outcome is not known", None),
        State::Committed { pause_us } if is_reverting => {
            (v1::GuestPhase::Reverting, "", Some(*pause_us))
        }
        State::Committed { pause_us } => (v1::GuestPhase::Committed, "", Some(*pause_us)),
        State::Failed { why, .. } => (v1::GuestPhase::Failed, why.as_str(), None),
        State::Reverted { void: true } => (
            v1::GuestPhase::Reverted,
            "the guest had dropped the change by itself",
            None,
        ),
        State::Reverted { void: false } => (v1::GuestPhase::Reverted, "", None),
        State::RevertFailed { why, .. } => (v1::GuestPhase::RevertFailed, why.as_str(), None),
        State::Adopted => (v1::GuestPhase::Adopted, "", None),
    };
    v1::RolloutGuest {
        host: member.host.clone(),
        guest: member.guest.clone(),
        wave: number(wave.unwrap_or_default()),
        phase: phase.into(),
        message: message.to_owned(),
        keys: member.plan.keys,
        sites: member.plan.sites,
        predicted_pause: Some(duration(member.plan.predicted_pause_us)),
        pause: pause.map(duration),
        tracepoints: member.plan.set.changed_tracepoints(),
    }
}

pub fn drift(drift: &Drift) -> v1::Drift {
    let cause = match drift.cause {
        Cause::Late => v1::drift::Cause::Late,
        Cause::Key => v1::drift::Cause::Key,
        Cause::Bytes => v1::drift::Cause::Bytes,
        Cause::Unreachable => v1::drift::Cause::Unreachable,
    };
    v1::Drift {
        host: drift.host.clone(),
        guest: drift.guest.clone(),
        cause: cause.into(),
        key: drift.key.clone().unwrap_or_default(),
        desired: drift.desired.clone(),
        actual: drift.actual.clone(),
        left: drift.left.clone().unwrap_or_default(),
    }
}

/// Explains why the guest is in its state, and how that can change.
pub fn explain(rollout: &Rollout, index: usize, now: Millis) -> Vec<String> {
    let member = &rollout.members()[index];
    let mut reasons = Vec::new();
    match &member.state {
        State::Skipped { why } => reasons.push(format!("the plan leaves it out: {why}")),
        State::Pending => explain_pending(rollout, index, now, &mut reasons),
        State::Committing { attempt: 0, .. } => reasons.push("it is being changed".to_owned()),
        State::Committing { attempt, .. } => reasons.push(format!(
            "{attempt} attempts to change it got no answer; it is tried again"
        )),
        State::Unresolved => reasons.push(
            "its change got no answer; it is sent again to learn the outcome, as the caps allow"
                .to_owned(),
        ),
        State::Committed { pause_us } => {
            reasons.push(format!("it is changed; it was stopped for {pause_us} us"));
        }
        State::Failed { failure, why } => {
            let next = match failure {
                Failure::Final => "plan another rollout for it",
                Failure::Busy => "pause and resume to try again",
                Failure::Unknown => "pause and resume, or abort, to learn the outcome",
            };
            reasons.push(format!("it is not changed: {why}; {next}"));
        }
        State::Reverted { void: true } => {
            reasons.push("the guest had dropped the change by itself".to_owned());
        }
        State::Reverted { void: false } => reasons.push("its change is taken back".to_owned()),
        State::Adopted => reasons.push(
            "it drifted and was taken as it is; the rollout wants nothing of it any more"
                .to_owned(),
        ),
        State::RevertFailed { why, .. } => {
            reasons.push(format!(
                "its change is not taken back: {why}; abort tries again"
            ));
        }
    }
    reasons
}

fn explain_pending(rollout: &Rollout, index: usize, now: Millis, reasons: &mut Vec<String>) {
    let header = rollout.header();
    let wave = header
        .waves
        .iter()
        .position(|wave| wave.members().contains(&index));
    let wave = wave.unwrap_or_default();
    match header.phase {
        Phase::Planned => {
            let (given, needed) = (header.approvals.len(), header.policy.approvals.max(1));
            reasons.push(format!(
                "the rollout is planned and has {given} of {needed} approvals; start it"
            ));
        }
        Phase::Paused => reasons.push(format!(
            "the rollout is paused: {}; resume or promote it",
            header.message
        )),
        Phase::Completed | Phase::Ended(_) | Phase::Reverting(_) => {
            reasons.push(format!("the rollout is {}", header.phase.name()));
        }
        Phase::Running(_) if wave > header.wave => {
            let (its, current) = (&header.waves[wave].name, &header.waves[header.wave]);
            let mut reason = format!(
                "it is in wave {its}, and wave {} is in progress",
                current.name
            );
            if let Some(until) = current.bakes_until.filter(|&until| now < until) {
                reason += &format!(
                    "; that bakes for another {} s",
                    (until - now).div_ceil(1000)
                );
            }
            reasons.push(reason);
        }
        Phase::Running(_) => reasons
            .push("the caps do not allow one more guest to change at the same time".to_owned()),
    }
    if let Some(freeze) = header.policy.frozen(now) {
        let seconds = (freeze.until - now).div_ceil(1000);
        reasons.push(format!("a freeze ends in {seconds} s: {}", freeze.reason));
    }
}
