// SPDX-License-Identifier: Apache-2.0
//! Builds the state that every open page gets after each change. Its size does not grow with the
//! number of guests.

use std::sync::Arc;

use patchbay_access::policy::Policy;
use patchbay_proto::fleet::v1::GuestPhase;
use serde::Serialize;

use super::Shared;
use super::sight::{Hidden, Sight};
use super::standing::{self, Gate, Keys, Safety};
use crate::authority::{Verdicts, terms};
use crate::controller::Leadership;
use crate::rollout::{
    Header, Member, Millis, NextStep, NotLegal, Phase, Rollout, Stage, State, TimelineEntry, Verb,
    WaveGateKind,
};
use crate::runner::{Running, now};
use crate::storage::Unreadable;
use crate::view;

/// The maximum number of rollouts in the list, the newest first.
const MAX_ROLLOUTS: usize = 200;
/// The maximum number of entries of the timeline, the newest first.
const MAX_ENTRIES: usize = 100;
/// The maximum number of guests that are named below the waves.
const MAX_TROUBLED: usize = 20;
/// Upper bounds of the buckets of the histogram of pauses, in microseconds. The last bucket has no
/// upper bound and is not listed.
const BOUNDS_US: [u64; 18] = [
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000,
    200_000, 500_000,
];

#[derive(Serialize)]
pub struct Page {
    pub principal: String,
    pub now: Millis,
    pub leads: bool,
    /// The reason why this replica does not lead; empty if it does.
    pub why_not: String,
    /// The time of the latest results of the sweeps over the guests' keys.
    pub observed: Millis,
    pub rollouts: Vec<Summary>,
    /// The rollouts that are out of service, for principals that may see all guests.
    pub unreadable: Vec<Unreadable>,
    pub rollout: Option<Detail>,
}

/// A rollout in the list.
#[derive(Serialize)]
pub struct Summary {
    name: String,
    title: String,
    phase: &'static str,
    created: Millis,
    counts: Counts,
    /// The reason why the rollout waits for a person.
    needs: Option<&'static str>,
}

/// The number of guests in each state.
#[derive(Clone, Copy, Default, Serialize)]
pub struct Counts {
    pending: usize,
    changing: usize,
    as_wanted: usize,
    /// Guests that were as wanted, and do not answer any more.
    unknown: usize,
    not_yet: usize,
    releasing: usize,
    released: usize,
    adopted: usize,
    forgotten: usize,
    skipped: usize,
}

#[derive(Serialize)]
pub struct Detail {
    name: String,
    title: String,
    phase: &'static str,
    message: String,
    digest: String,
    created: Millis,
    approvals: Vec<String>,
    approvals_needed: usize,
    counts: Counts,
    waves: Vec<WaveView>,
    pauses: Pauses,
    frozen: Option<String>,
    safety: Safety,
    keys: Vec<Keys>,
    /// The number of hosts of the guests.
    hosts: usize,
    gates: Vec<Gate>,
    next_steps: Vec<NextStep>,
    commands: Vec<CommandView>,
    timeline: Vec<TimelineEntry>,
}

#[derive(Serialize)]
struct WaveView {
    name: String,
    state: &'static str,
    guests: usize,
    hosts: usize,
    counts: Counts,
    predicted_pause_us: u64,
    bake_ms: u64,
    bakes_until: Option<Millis>,
    /// The first guests of the wave that are unknown, not yet as wanted, or cannot be released.
    troubled: Vec<Troubled>,
    /// The number of such guests that are not among them.
    more_troubled: usize,
}

/// A guest for which the rollout waits although its wave has changed it, or has tried to.
#[derive(Serialize)]
struct Troubled {
    guest: String,
    host: String,
    state: &'static str,
    since: Option<Millis>,
    message: String,
}

/// Statistics of the times for which changes have stopped guests.
#[derive(Default, Serialize)]
struct Pauses {
    count: usize,
    p50_us: u64,
    p99_us: u64,
    max_us: u64,
    /// The tightest budget of the gates.
    budget_us: Option<u64>,
    /// The upper bound and the count of each bucket. The last bucket has no bound.
    buckets: Vec<(Option<u64>, usize)>,
}

/// A button of the page.
#[derive(Serialize)]
struct CommandView {
    name: &'static str,
    /// True if the command is legal in the rollout's phase.
    legal: bool,
    enabled: bool,
    /// The reason why the button is disabled.
    why: String,
}

impl Counts {
    pub fn add(&mut self, member: &Member) {
        *match &member.state {
            State::Superseded => return,
            State::Skipped { .. } => &mut self.skipped,
            State::Pending => &mut self.pending,
            State::Claiming { again: false } => &mut self.changing,
            State::AsWanted { .. } if member.is_unknown() => &mut self.unknown,
            State::AsWanted { .. } => &mut self.as_wanted,
            State::Claiming { again: true } | State::NotYet { .. } => &mut self.not_yet,
            State::Releasing { .. } => &mut self.releasing,
            State::Released { .. } => &mut self.released,
            State::Adopted => &mut self.adopted,
            State::Forgotten => &mut self.forgotten,
        } += 1;
    }

    fn of<'m>(members: impl Iterator<Item = &'m Member>) -> Self {
        let mut counts = Self::default();
        members.for_each(|member| counts.add(member));
        counts
    }
}

/// Returns the rollouts, the newest first.
pub fn newest(leads: &Leadership) -> Vec<Arc<Running>> {
    let mut all = leads.rollouts();
    all.sort_by_key(|running| std::cmp::Reverse(running.rollout().header().created));
    all
}

/// Returns the state that `principal` may see, with the details of one rollout.
pub fn page(shared: &Shared, principal: &str, rollout: Option<&str>) -> Page {
    let leads = shared.controller.leadership();
    let all = leads.as_deref().map(newest).unwrap_or_default();
    let shown = rollout.and_then(|name| leads.as_deref()?.rollout(name));
    let policy = shared.admission.policy().current();
    let sight = Sight::new(&policy, principal);
    let unreadable = leads.as_deref().map(Leadership::unreadable);
    let unreadable = unreadable.filter(|_| sight.sees_all).unwrap_or_default();
    Page {
        principal: principal.to_owned(),
        now: now(),
        leads: leads.is_some(),
        why_not: match leads {
            Some(_) => String::new(),
            None => shared.controller.why_not_leading().0,
        },
        observed: shared.heat.borrow().at,
        rollouts: all
            .iter()
            .filter_map(|one| summary(&one.rollout(), &sight))
            .take(MAX_ROLLOUTS)
            .collect(),
        unreadable: unreadable
            .into_iter()
            .map(|(name, why)| Unreadable { name, why })
            .take(MAX_ROLLOUTS)
            .collect(),
        rollout: shown.and_then(|running| detail(&policy, principal, &running.rollout(), &sight)),
    }
}

/// Returns a rollout's entry in the list; `None` if the principal may see none of its guests.
fn summary(rollout: &Rollout, sight: &Sight<'_>) -> Option<Summary> {
    let header = rollout.header();
    sight.sees_rollout(rollout).then(|| Summary {
        name: header.name.clone(),
        title: header.title.clone(),
        phase: header.phase.name(),
        created: header.created,
        counts: Counts::of(sight.of(rollout.members())),
        needs: standing::needs(rollout, sight.of(rollout.members())),
    })
}

/// Returns a rollout's details; `None` if the principal may see none of its guests.
fn detail(
    policy: &Policy,
    principal: &str,
    rollout: &Rollout,
    sight: &Sight<'_>,
) -> Option<Detail> {
    if !sight.sees_rollout(rollout) {
        return None;
    }
    let header = rollout.header();
    let hidden = sight.hidden(rollout);
    let waves = header.waves.iter().enumerate();
    let mut named = MAX_TROUBLED;
    let frozen = header.policy.frozen(now());
    let terms = terms(policy, rollout);
    Some(Detail {
        name: header.name.clone(),
        title: header.title.clone(),
        phase: header.phase.name(),
        message: hidden.shown(rollout.message()),
        digest: header.digest.clone(),
        created: header.created,
        approvals: header.approvals.clone(),
        approvals_needed: terms.needed,
        counts: Counts::of(sight.of(rollout.members())),
        waves: waves
            .map(|(index, _)| wave(header, index, rollout.members(), sight, &mut named))
            .collect(),
        pauses: pauses(header, sight.of(rollout.members())),
        frozen: frozen.map(|freeze| freeze.reason.clone()),
        safety: standing::safety(rollout, sight.of(rollout.members())),
        keys: standing::keys(sight.of(rollout.members())),
        hosts: hosts(sight.of(rollout.members())),
        gates: standing::gates(rollout, &hidden),
        next_steps: rollout.next_steps(now(), &terms),
        commands: commands(policy, principal, rollout, &hidden),
        timeline: header
            .timeline
            .iter()
            .rev()
            .filter(|entry| !hidden.is_named_in(&entry.text))
            .take(MAX_ENTRIES)
            .cloned()
            .collect(),
    })
}

fn hosts<'m>(members: impl Iterator<Item = &'m Member>) -> usize {
    let hosts = members
        .filter(|member| !member.state.is_left_out())
        .map(|member| member.host.as_str());
    hosts.collect::<std::collections::HashSet<&str>>().len()
}

/// Returns the view of a wave. `named` is the number of guests that may still be named.
fn wave(
    header: &Header,
    index: usize,
    members: &[Member],
    sight: &Sight<'_>,
    named: &mut usize,
) -> WaveView {
    let wave = &header.waves[index];
    let members = sight.of(&members[wave.members()]);
    let members: Vec<&Member> = members
        .filter(|member| member.state != State::Superseded)
        .collect();
    let hosts: std::collections::HashSet<&str> =
        members.iter().map(|member| member.host.as_str()).collect();
    let predicted = members.iter().map(|member| member.plan.predicted_pause_us);
    let is_troubled = |member: &&&Member| {
        member.is_unknown() || member.state.is_late() || member.state.is_stuck()
    };
    let all_troubled = members.iter().filter(is_troubled);
    let count = all_troubled.clone().count();
    let troubled: Vec<Troubled> = all_troubled
        .take(*named)
        .map(|member| Troubled {
            guest: member.guest.clone(),
            host: member.host.clone(),
            state: guest_state(header, member),
            since: member.since,
            message: view::message(member).to_owned(),
        })
        .collect();
    *named -= troubled.len();
    let is_current = index == header.wave;
    let state = match header.phase {
        _ if index < header.wave => "done",
        Phase::Running(Stage::Changing) if is_current => "changing",
        Phase::Running(Stage::Baking) if is_current => "baking",
        Phase::Running(Stage::Gating) if is_current => "at its gates",
        Phase::Paused if is_current => "paused",
        _ => "",
    };
    WaveView {
        name: wave.name.clone(),
        state,
        guests: members.len(),
        hosts: hosts.len(),
        counts: Counts::of(members.iter().copied()),
        predicted_pause_us: predicted.max().unwrap_or(0),
        bake_ms: wave.bake_ms,
        bakes_until: wave.bakes_until.filter(|_| state == "baking"),
        more_troubled: count - troubled.len(),
        troubled,
    }
}

fn pauses<'m>(header: &Header, members: impl Iterator<Item = &'m Member>) -> Pauses {
    let mut pauses: Vec<u64> = members
        .filter(|member| member.state != State::Superseded)
        .filter_map(Member::pause)
        .collect();
    pauses.sort_unstable();
    let rank = |percent: usize| {
        let rank = (pauses.len() * percent).div_ceil(100);
        rank.checked_sub(1).map_or(0, |index| pauses[index])
    };
    let budgets = header
        .policy
        .gates
        .iter()
        .filter_map(|gate| match gate.kind {
            WaveGateKind::PauseP99 { budget_us } => Some(budget_us),
            _ => None,
        });
    let mut below = 0;
    let bounds = BOUNDS_US.into_iter().map(Some).chain([None]);
    let buckets = bounds.map(|bound| {
        let up_to = bound.map_or(pauses.len(), |bound| {
            pauses.partition_point(|&us| us <= bound)
        });
        let count = up_to - std::mem::replace(&mut below, up_to);
        (bound, count)
    });
    let buckets = buckets.collect();
    Pauses {
        count: pauses.len(),
        p50_us: rank(50),
        p99_us: rank(99),
        max_us: rank(100),
        budget_us: budgets.min(),
        buckets,
    }
}

fn commands(
    policy: &Policy,
    principal: &str,
    rollout: &Rollout,
    hidden: &Hidden<'_>,
) -> Vec<CommandView> {
    let verdicts = Verdicts::new(policy, principal, rollout);
    let command = |verb: Verb| {
        let legal = rollout.would_change(verb, principal);
        let is_legal = !matches!(legal, Err(NotLegal::Phase { .. }));
        let legal = legal.map_err(|error| error.to_string());
        let verdict = verdicts.of(verb).and(legal);
        CommandView {
            name: verb.name(),
            legal: is_legal,
            enabled: verdict.is_ok(),
            why: hidden.shown(&verdict.err().unwrap_or_default()),
        }
    };
    Verb::ALL.into_iter().map(command).collect()
}

/// Returns the name of the member's state, which is shown to users and accepted by filters.
pub fn guest_state(header: &Header, member: &Member) -> &'static str {
    match view::guest_phase(header, member) {
        GuestPhase::Skipped => "skipped",
        GuestPhase::Pending => "pending",
        GuestPhase::Unchanged => "unchanged",
        GuestPhase::Changing => "changing",
        GuestPhase::AsWanted => "as wanted",
        GuestPhase::NotYet => "not yet",
        GuestPhase::Releasing => "releasing",
        GuestPhase::Released => "released",
        GuestPhase::Adopted => "adopted",
        GuestPhase::Forgotten => "forgotten",
        GuestPhase::Unspecified | GuestPhase::Unknown => "unknown",
    }
}
