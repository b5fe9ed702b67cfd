// SPDX-License-Identifier: Apache-2.0
//! Evaluates the gates that depend only on the members, and records the health that other gates
//! compare with.

use super::policy::{WaveGate, WaveGateKind};
use super::state::{Failure, Health, Member, Millis, Phase, Rollout, State};

/// Returns the reason why the gate is closed, according to the wave's members so far; `None` if the
/// gate is open.
pub(super) fn closed(gate: &WaveGate, members: &[Member]) -> Option<String> {
    match gate.kind {
        WaveGateKind::Errors { max_percent } => too_many_errors(max_percent, members),
        WaveGateKind::PauseP99 { budget_us } => {
            let p99 = pause_p99(members)?;
            (p99 > budget_us).then(|| {
                format!(
                    "the 99th percentile of its pauses is {p99} us, the budget is {budget_us} us"
                )
            })
        }
        WaveGateKind::Command { .. }
        | WaveGateKind::AgentHealth { .. }
        | WaveGateKind::Grpc { .. }
        | WaveGateKind::Prometheus { .. } => None,
    }
}

impl Rollout {
    /// Records the outcome of [`super::Action::Observe`]. A guest that cannot be observed is not
    /// changed; resume retries.
    pub fn observed(&mut self, index: usize, outcome: Result<Health, String>, now: Millis) {
        self.run.in_flight.remove(&index);
        if self.members[index].state != State::Pending {
            return;
        }
        match outcome {
            Ok(health) => {
                self.members[index].health = Some(health);
                self.run.changed.insert(index);
            }
            Err(why) if matches!(self.header.phase, Phase::Running(_) | Phase::Paused) => {
                let failure = Failure::Busy;
                let why = format!("agent_health: {why}");
                self.set(index, State::Failed { failure, why });
                self.check_errors(now);
            }
            Err(_) => {}
        }
    }
}

fn too_many_errors(max_percent: u32, members: &[Member]) -> Option<String> {
    let is_failed = |member: &&Member| matches!(member.state, State::Failed { .. });
    let failed = members.iter().filter(is_failed);
    let (count, first) = (failed.clone().count(), failed.clone().next());
    let State::Failed { why, .. } = &first?.state else {
        return None;
    };
    // Integer arithmetic is exact: 1 of 3 is more than 33 percent.
    let is_over = count * 100 > members.len() * max_percent as usize;
    is_over.then(|| {
        let (all, guest) = (members.len(), &first.expect("one failed").guest);
        format!(
            "{count} of its {all} guests failed, more than {max_percent} percent; \
             the first is {guest}: {why}"
        )
    })
}

/// Returns the 99th percentile of the committed members' pauses by the nearest-rank method; `None`
/// if no member is committed.
pub(super) fn pause_p99(members: &[Member]) -> Option<u64> {
    let mut pauses: Vec<u64> = members
        .iter()
        .filter_map(|member| match member.state {
            State::Committed { pause_us } => Some(pause_us),
            _ => None,
        })
        .collect();
    pauses.sort_unstable();
    let rank = (pauses.len() * 99).div_ceil(100);
    pauses.get(rank.checked_sub(1)?).copied()
}
