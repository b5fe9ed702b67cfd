// SPDX-License-Identifier: Apache-2.0
//! Evaluates the gates that depend only on the members, and records the health that other gates
//! compare with.

use super::policy::{ErrorsOf, WaveGate, WaveGateKind};
use super::state::{Failure, Health, Member, Millis, Rollout, State, Wave};

/// Returns the reason why the gate is closed, according to the members so far; `None` if the gate
/// is open.
///
/// The guests of earlier waves on which claims have no effect any more do not close the gate of a
/// wave that was added: another rollout may have changed them since.
pub(super) fn closed(gate: &WaveGate, wave: &Wave, all: &[Member]) -> Option<String> {
    let range = wave.members();
    let of_wave = &all[range.clone()];
    match gate.kind {
        WaveGateKind::Errors { max_percent, of } => match of {
            ErrorsOf::Wave => too_many_errors(max_percent, of_wave.iter(), "its"),
            ErrorsOf::Rollout => {
                let members = all.iter().enumerate();
                let counted = members.filter(|(index, member)| {
                    !wave.is_added || range.contains(index) || !member.state.is_ineffective()
                });
                let counted = counted.map(|(_, member)| member);
                too_many_errors(max_percent, counted, "the rollout's")
            }
        },
        WaveGateKind::PauseP99 { budget_us } => {
            let p99 = pause_p99(of_wave)?;
            (p99 > budget_us).then(|| {
                format!(
                    "the 99th percentile of its pauses is {p99} us, the budget is {budget_us} us"
                )
            })
        }
        WaveGateKind::Command { .. }
        | WaveGateKind::NamedCommand { .. }
        | WaveGateKind::AgentHealth { .. }
        | WaveGateKind::Grpc { .. }
        | WaveGateKind::Prometheus { .. } => None,
    }
}

impl Rollout {
    /// Records the outcome of [`super::Action::Observe`]. A guest that cannot be observed is not
    /// changed, and is observed again later.
    pub fn observed(
        &mut self,
        index: usize,
        generation: u64,
        outcome: Result<Health, String>,
        now: Millis,
    ) {
        let is_waiting = matches!(
            self.members[index].state,
            State::Pending | State::NotYet { .. }
        );
        let wants = self.header.phase.has_desired_state();
        if !self.ends(index, generation) || !is_waiting || !wants {
            return;
        }
        match outcome {
            Ok(health) => {
                self.members[index].health = Some(health);
                self.run.changed.insert(index);
            }
            Err(why) => {
                self.put_off(index, now);
                let failure = Failure::Busy;
                let why = format!("agent_health: {why}");
                self.set(index, State::NotYet { failure, why });
                self.check_errors(now);
            }
        }
    }
}

/// Returns the reason why too few members are as wanted; `None` if enough are.
pub(super) fn too_few(wanted: usize, members: &[Member]) -> Option<String> {
    let members: Vec<&Member> = members.iter().filter(|member| is_wanted(member)).collect();
    let wanted = wanted.min(members.len());
    let is_made = |member: &&&Member| matches!(member.state, State::AsWanted { .. });
    let found = members.iter().filter(is_made).count();
    let late = members.iter().find(|member| !is_made(member));
    (found < wanted).then(|| {
        let late = late.map_or("", |member| &member.guest);
        format!("{found} of its guests are as wanted, and {wanted} must be; {late} is not")
    })
}

/// Returns whether the rollout wants the member changed.
fn is_wanted(member: &Member) -> bool {
    matches!(
        member.state,
        State::Pending | State::Claiming { .. } | State::AsWanted { .. } | State::NotYet { .. }
    )
}

fn too_many_errors<'m>(
    max_percent: u32,
    members: impl Iterator<Item = &'m Member> + Clone,
    whose: &str,
) -> Option<String> {
    let all = members.clone().filter(|member| is_wanted(member)).count();
    let mut failed = members
        // The keys of a guest whose service has lost its record may be as wanted.
        .filter(|member| !member.state.has_lost_record())
        .filter_map(|member| Some((&member.guest, member.state.late()?)));
    let count = failed.clone().count();
    let (guest, why) = failed.next()?;
    // Integer arithmetic is exact: 1 of 3 is more than 33 percent.
    let is_over = count * 100 > all * max_percent as usize;
    is_over.then(|| {
        format!(
            "{count} of {whose} {all} guests are not yet as wanted, more than {max_percent} percent; \
             the first is {guest}: {why}"
        )
    })
}

/// Returns the 99th percentile of the changed members' pauses by the nearest-rank method; `None`
/// if no member is changed.
pub(super) fn pause_p99(members: &[Member]) -> Option<u64> {
    let mut pauses: Vec<u64> = members
        .iter()
        .filter_map(|member| match member.state {
            State::AsWanted { pause_us } => Some(pause_us),
            _ => None,
        })
        .collect();
    pauses.sort_unstable();
    let rank = (pauses.len() * 99).div_ceil(100);
    pauses.get(rank.checked_sub(1)?).copied()
}
