// SPDX-License-Identifier: Apache-2.0
//! Converts the gates and next steps of a rollout, and its differences from a spec.

use std::collections::{BTreeMap, BTreeSet};

use patchbay_proto::fleet::v1;

use super::number;
use crate::clock::timestamp;
use crate::plan::diff::Diff;
use crate::rollout::{Event, GateStanding, Member, NextStep, Phase, Stage, Standing};

/// The maximum number of names of keys that a rollout lists.
const MAX_NAMES: usize = 50;

pub fn stage(phase: Phase) -> v1::Stage {
    match phase {
        Phase::Running(Stage::Changing) => v1::Stage::Changing,
        Phase::Running(Stage::Baking) => v1::Stage::Baking,
        Phase::Running(Stage::Gating) => v1::Stage::Gating,
        _ => v1::Stage::Unspecified,
    }
}

pub fn gate(gate: GateStanding) -> v1::Gate {
    use v1::gate::State;
    let (state, message, asked) = match gate.standing {
        Standing::NotAsked => (State::NotAsked, String::new(), None),
        Standing::Passed(asked) => (State::Passed, String::new(), asked),
        Standing::Inconclusive { since, why } => (State::Inconclusive, why, Some(since)),
        Standing::Closed(why) => (State::Closed, why, None),
    };
    v1::Gate {
        text: gate.text,
        state: state.into(),
        message,
        asked: asked.map(timestamp),
        aborts: gate.aborts,
    }
}

pub fn next_steps(steps: Vec<NextStep>) -> Vec<v1::NextStep> {
    let steps = steps.into_iter().map(|step| v1::NextStep {
        command: step.command.to_owned(),
        effect: step.effect,
    });
    steps.collect()
}

/// Returns the keys that any of the members claims, by their wanted state.
pub fn keys<'m>(members: impl IntoIterator<Item = &'m Member>) -> Vec<v1::ClaimedKeys> {
    let mut wanted: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let mut seen = BTreeSet::new();
    for member in members {
        // Guests with the same kernel share a set.
        if member.state.is_left_out() || !seen.insert(member.plan.set.digest()) {
            continue;
        }
        for claim in member.plan.set.claims() {
            wanted
                .entry(claim.want.name())
                .or_default()
                .insert(&claim.key);
        }
    }
    let wanted = wanted.into_iter().map(|(want, keys)| v1::ClaimedKeys {
        want: want.to_owned(),
        count: number(keys.len()),
        names: keys
            .into_iter()
            .take(MAX_NAMES)
            .map(str::to_owned)
            .collect(),
    });
    wanted.collect()
}

/// Returns the guarded keys that any of the members claims.
pub fn guarded<'m>(members: impl Iterator<Item = &'m Member>) -> Vec<v1::GuardedKey> {
    let sets = members.map(|member| &member.plan.set);
    let all = sets.flat_map(|set| set.guarded());
    let all: BTreeMap<&str, &str> = all.map(|one| (&*one.key, &*one.advice)).collect();
    let all = all.into_iter().map(|(key, advice)| v1::GuardedKey {
        key: key.to_owned(),
        advice: advice.to_owned(),
    });
    all.collect()
}

pub fn subject(event: Event) -> v1::timeline_entry::Subject {
    use v1::timeline_entry::Subject;
    match event {
        Event::Other => Subject::Unspecified,
        Event::Phase => Subject::Phase,
        Event::Gate => Subject::Gate,
        Event::GateClosed => Subject::GateClosed,
        Event::Drift => Subject::Drift,
    }
}

pub fn diff(diff: Diff, rollout: v1::Rollout) -> v1::DiffResponse {
    let Diff {
        keys,
        guests,
        conditions,
        left_out,
    } = diff;
    let keys = keys.into_iter().map(|(key, guests)| v1::KeyDifference {
        key: key.what,
        before: key.before.unwrap_or_default(),
        after: key.after.unwrap_or_default(),
        guests: number(guests),
    });
    let guests = guests.into_iter().map(|guest| {
        let message = left_out.get(&guest.what).cloned().unwrap_or_default();
        let (host, name) = guest.what;
        v1::GuestDifference {
            host,
            guest: name,
            before: guest.before.unwrap_or_default(),
            after: guest.after.unwrap_or_default(),
            message,
        }
    });
    let fields = conditions.into_iter().map(|field| v1::FieldDifference {
        field: field.what.to_owned(),
        before: field.before.unwrap_or_default(),
        after: field.after.unwrap_or_default(),
    });
    v1::DiffResponse {
        rollout: Some(rollout),
        keys: keys.collect(),
        guests: guests.collect(),
        fields: fields.collect(),
    }
}
