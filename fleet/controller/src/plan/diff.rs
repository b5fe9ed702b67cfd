// SPDX-License-Identifier: Apache-2.0
//! Compares a spec with an existing rollout.

use std::collections::BTreeMap;

use crate::hosts::Hosts;
use crate::rollout::{Member, Rollout, State};
use crate::runner::{Running, now};
use crate::spec::{Spec, SpecError};

/// The reason why a spec cannot be compared with a rollout.
#[derive(Debug, thiserror::Error)]
pub enum DiffError {
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The caller may not plan one of the two.
    #[error("{0}")]
    Denied(String),
    #[error(
        "rollout {rollout} is {phase}; diff is legal while it is planned, running, paused or completed"
    )]
    Over {
        rollout: String,
        phase: &'static str,
    },
}

/// The difference between two values; `None` on the side that has none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference<K> {
    pub what: K,
    pub before: Option<String>,
    pub after: Option<String>,
}

/// The differences between a rollout and the plan of another spec.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Diff {
    /// The wanted states of keys, and the number of guests on which each of them differs.
    pub keys: Vec<(Difference<String>, usize)>,
    /// The waves of guests, by host and guest. A guest that the plan leaves out has no wave.
    pub guests: Vec<Difference<(String, String)>>,
    /// The lines of the spec's other fields.
    pub conditions: Vec<Difference<&'static str>>,
    /// The reasons why the plan leaves guests out, by host and guest.
    pub left_out: BTreeMap<(String, String), String>,
}

/// Plans the spec without storing it, and compares the plan with the rollout. `may_plan` decides
/// about both, because the comparison names guests and keys.
///
/// # Errors
/// [`DiffError`].
pub async fn compare(
    hosts: &Hosts,
    running: &Running,
    text: &str,
    principal: &str,
    may_plan: impl Fn(&Rollout) -> Result<(), String>,
) -> Result<Diff, DiffError> {
    let spec = Spec::parse(text)?;
    let name = {
        let rollout = running.rollout();
        let header = rollout.header();
        if header.phase.reverts() {
            return Err(DiffError::Over {
                rollout: header.name.clone(),
                phase: header.phase.name(),
            });
        }
        may_plan(&rollout).map_err(DiffError::Denied)?;
        header.name.clone()
    };
    let planned = super::plan(hosts, &name, text, &spec, principal, now()).await;
    may_plan(&planned).map_err(DiffError::Denied)?;
    let rollout = running.rollout();
    Ok(diff((&rollout, &running.spec), (&planned, &spec)))
}

/// Compares a rollout with the plan of another spec.
pub fn diff(before: (&Rollout, &Spec), after: (&Rollout, &Spec)) -> Diff {
    let (old, new) = (wanted(before.0), wanted(after.0));
    Diff {
        keys: keys(&old, &new),
        guests: guests(&old, &new),
        conditions: conditions(before.1, after.1),
        left_out: left_out(after.0),
    }
}

type Guests<'r> = BTreeMap<(&'r str, &'r str), (&'r str, &'r Member)>;

/// Returns the guests that the rollout changes, and the names of their waves.
fn wanted(rollout: &Rollout) -> Guests<'_> {
    let mut guests = Guests::new();
    for wave in &rollout.header().waves {
        for member in &rollout.members()[wave.members()] {
            let is_left = matches!(
                member.state,
                State::Superseded | State::Skipped { .. } | State::Adopted | State::Forgotten
            );
            if !is_left {
                let name = (&*member.host, &*member.guest);
                guests.insert(name, (&wave.name, member));
            }
        }
    }
    guests
}

fn left_out(rollout: &Rollout) -> BTreeMap<(String, String), String> {
    let reason = |member: &Member| match &member.state {
        State::Skipped { why } => Some(why.clone()),
        _ => None,
    };
    let members = rollout.members().iter();
    let left_out = members.filter_map(|member| {
        let name = (member.host.clone(), member.guest.clone());
        Some((name, reason(member)?))
    });
    left_out.collect()
}

fn guests(old: &Guests<'_>, new: &Guests<'_>) -> Vec<Difference<(String, String)>> {
    let wave = |guests: &Guests<'_>, name| {
        let (wave, _) = guests.get(name)?;
        Some((*wave).to_owned())
    };
    let mut names: Vec<_> = old.keys().chain(new.keys()).collect();
    names.sort_unstable();
    names.dedup();
    let all = names.into_iter().map(|name| Difference {
        what: (name.0.to_owned(), name.1.to_owned()),
        before: wave(old, name),
        after: wave(new, name),
    });
    all.filter(|one| one.before != one.after).collect()
}

/// Compares the claims on guests that both rollouts change. [`guests`] reports a guest that only
/// one of them changes.
fn keys(old: &Guests<'_>, new: &Guests<'_>) -> Vec<(Difference<String>, usize)> {
    let mut found: BTreeMap<(&str, Option<&str>, Option<&str>), usize> = BTreeMap::new();
    for (name, (_, before)) in old {
        let Some((_, after)) = new.get(name) else {
            continue;
        };
        let sets = [before, after].map(|member| &member.plan.set);
        if sets[0].intent_digest() == sets[1].intent_digest() {
            continue;
        }
        let [before, after] = sets.map(|set| {
            let claims = set.claims().iter();
            let claims = claims.map(|claim| (&*claim.key, claim.want.name()));
            claims.collect::<BTreeMap<&str, &str>>()
        });
        let both = before.keys().chain(after.keys());
        let both: std::collections::BTreeSet<&str> = both.copied().collect();
        for key in both {
            let (before, after) = (before.get(key).copied(), after.get(key).copied());
            if before != after {
                *found.entry((key, before, after)).or_default() += 1;
            }
        }
    }
    let text = |want: Option<&str>| want.map(str::to_owned);
    let found = found.into_iter().map(|((key, before, after), guests)| {
        let difference = Difference {
            what: key.to_owned(),
            before: text(before),
            after: text(after),
        };
        (difference, guests)
    });
    found.collect()
}

fn conditions(old: &Spec, new: &Spec) -> Vec<Difference<&'static str>> {
    let (old, new) = (old.conditions(), new.conditions());
    let gone = old.iter().filter(|line| !new.contains(line));
    let gone = gone.map(|(what, line)| Difference {
        what: *what,
        before: Some(line.clone()),
        after: None,
    });
    let added = new.iter().filter(|line| !old.contains(line));
    let added = added.map(|(what, line)| Difference {
        what: *what,
        before: None,
        after: Some(line.clone()),
    });
    let mut all: Vec<_> = gone.chain(added).collect();
    // Stable sort: a line that is gone precedes the one that replaces it.
    all.sort_by_key(|difference| difference.what);
    all
}
