// SPDX-License-Identifier: Apache-2.0
//! Converts rollouts to the messages of `patchbay.fleet.v1`.

mod explain;
mod standing;

use patchbay_proto::fleet::v1;

use crate::clock::{now, timestamp};
use crate::drift::{Cause, Drift};
use crate::rollout::{
    End, Header, Member, Phase, Rollout, Stage, State, Terms, TimelineEntry, Wave,
};
use crate::sight::Sight;

fn duration(micros: u64) -> prost_types::Duration {
    prost_types::Duration {
        seconds: i64::try_from(micros / 1_000_000).unwrap_or(i64::MAX),
        nanos: i32::try_from(micros % 1_000_000 * 1000).unwrap_or(0),
    }
}

fn number(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

pub use self::explain::explain;
pub use self::standing::{diff, keys};

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

/// Converts a rollout, with or without its guests. Guests that `sight` does not include are left
/// out.
pub fn rollout(rollout: &Rollout, guests: bool, sight: &Sight<'_>, terms: &Terms) -> v1::Rollout {
    let header = rollout.header();
    let wave = |wave: &Wave| self::wave(header, wave, sight.of(&rollout.members()[wave.members()]));
    let members = rollout.members().iter().enumerate();
    let members = members
        .filter(|(_, member)| member.state != State::Superseded && sight.sees(&member.guest));
    let members = members.map(|(index, member)| guest(header, index, member));
    v1::Rollout {
        name: header.name.clone(),
        title: header.title.clone(),
        phase: phase(header.phase).into(),
        digest: header.digest.clone(),
        message: rollout.message().to_owned(),
        wave: number(header.wave),
        waves: header.waves.iter().map(wave).collect(),
        guests: if guests { members.collect() } else { vec![] },
        approvals: header.approvals.clone(),
        approvals_needed: number(terms.needed),
        timeline: header.timeline.iter().map(entry).collect(),
        stage: standing::stage(header.phase).into(),
        gates: rollout
            .gate_standings()
            .into_iter()
            .map(standing::gate)
            .collect(),
        next_steps: standing::next_steps(rollout.next_steps(now(), terms)),
        keys: standing::keys(sight.of(rollout.members())),
        guarded: match guests {
            true => standing::guarded(sight.of(rollout.members())),
            false => vec![],
        },
    }
}

fn entry(entry: &TimelineEntry) -> v1::TimelineEntry {
    v1::TimelineEntry {
        time: Some(timestamp(entry.time)),
        principal: entry.principal.clone(),
        text: entry.text.clone(),
        subject: standing::subject(entry.event).into(),
        phase: match entry.number {
            0 => v1::Phase::Unspecified,
            _ => phase(entry.phase),
        }
        .into(),
        number: entry.number,
    }
}

fn wave<'m>(header: &Header, wave: &Wave, members: impl Iterator<Item = &'m Member>) -> v1::Wave {
    let members: Vec<&Member> = members
        .filter(|member| member.state != State::Superseded)
        .collect();
    let unknown = members.iter().filter(|member| member.is_unknown()).count();
    let count = |wanted: fn(&State) -> bool| {
        let states = members.iter().map(|member| &member.state);
        states.filter(|state| wanted(state)).count()
    };
    let made = count(|state| matches!(state, State::AsWanted { .. }));
    let hosts: std::collections::BTreeSet<&str> =
        members.iter().map(|member| member.host.as_str()).collect();
    let predicted = members.iter().map(|member| member.plan.predicted_pause_us);
    let is_baking = header.phase == Phase::Running(Stage::Baking);
    let is_this = header.waves.get(header.wave) == Some(wave);
    v1::Wave {
        name: wave.name.clone(),
        guests: number(members.len()),
        hosts: number(hosts.len()),
        as_wanted: number(made - unknown),
        unknown: number(unknown),
        not_yet: number(count(State::is_late)),
        released: number(count(|state| matches!(state, State::Released { .. }))),
        predicted_pause: predicted.max().map(duration),
        bakes_until: wave
            .bakes_until
            .filter(|_| is_baking && is_this)
            .map(timestamp),
        keys: members
            .iter()
            .map(|member| u64::from(member.plan.keys))
            .sum(),
        sites: members
            .iter()
            .map(|member| u64::from(member.plan.sites))
            .sum(),
        bake: Some(duration(wave.bake_ms.saturating_mul(1000))),
    }
}

/// The reason why the state of a guest is unknown.
pub const UNANSWERED: &str = "it was as wanted, and does not answer";

/// Returns the reason why the member is left out, unknown, not yet as wanted, or not yet released;
/// empty if there is none.
pub fn message(member: &Member) -> &str {
    match &member.state {
        State::Skipped { why } | State::Releasing { why } => why,
        _ if member.is_unknown() => UNANSWERED,
        state => state.late().unwrap_or_default(),
    }
}

/// Returns the phase of a guest in its rollout.
pub fn guest_phase(header: &Header, member: &Member) -> v1::GuestPhase {
    let is_over = header.phase.reverts() || header.phase == Phase::Completed;
    match &member.state {
        State::Skipped { .. } | State::Superseded => v1::GuestPhase::Skipped,
        State::Pending if is_over && member.generation == 0 => v1::GuestPhase::Unchanged,
        State::Pending => v1::GuestPhase::Pending,
        State::Claiming { again: false } => v1::GuestPhase::Changing,
        State::AsWanted { .. } if member.is_unknown() => v1::GuestPhase::Unknown,
        State::AsWanted { .. } => v1::GuestPhase::AsWanted,
        State::Claiming { again: true } | State::NotYet { .. } => v1::GuestPhase::NotYet,
        State::Releasing { .. } => v1::GuestPhase::Releasing,
        State::Released { .. } => v1::GuestPhase::Released,
        State::Adopted => v1::GuestPhase::Adopted,
        State::Forgotten => v1::GuestPhase::Forgotten,
    }
}

pub fn guest(header: &Header, index: usize, member: &Member) -> v1::RolloutGuest {
    let wave = header.wave_of(index);
    let message = match &member.state {
        State::Superseded => "it is in a later wave too",
        State::Released { void: true } => "the claims had ended before, with their TTL or a reboot",
        _ => message(member),
    };
    let pause = match &member.state {
        State::AsWanted { pause_us } if !member.is_unknown() => Some(*pause_us),
        _ => None,
    };
    v1::RolloutGuest {
        host: member.host.clone(),
        guest: member.guest.clone(),
        wave: number(wave.unwrap_or_default()),
        phase: guest_phase(header, member).into(),
        message: message.to_owned(),
        keys: member.plan.keys,
        sites: member.plan.sites,
        predicted_pause: Some(duration(member.plan.predicted_pause_us)),
        pause: pause.map(duration),
        since: member.since.map(timestamp),
        left_out: member
            .plan
            .left_out
            .iter()
            .map(|keys| v1::LeftOutKeys {
                reason: keys.reason.clone(),
                count: keys.count,
                names: keys.names.clone(),
            })
            .collect(),
        tracepoints: member
            .plan
            .set
            .tracepoints()
            .iter()
            .map(|tracepoint| tracepoint.event.clone())
            .collect(),
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
