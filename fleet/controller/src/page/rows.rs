// SPDX-License-Identifier: Apache-2.0
//! Returns tables of bounded size. They list the guests of a rollout, the reasons for a guest's
//! state, and the audit trail.

use patchbay_access::policy::Policy;
use serde::Serialize;

use super::access;
use super::sight::Sight;
use super::state::{guest_state, newest};
use crate::controller::Leadership;
use crate::rollout::{Member, Millis, Rollout, State};
use crate::view;

const MAX_ROWS: usize = 100;

#[derive(Serialize)]
pub struct Guests {
    /// The number of guests that match. `rows` contains a part of them.
    total: usize,
    from: usize,
    rows: Vec<GuestRow>,
}

#[derive(Serialize)]
struct GuestRow {
    /// The index among the members. A guest that was changed again is a member twice.
    index: usize,
    host: String,
    guest: String,
    wave: Option<String>,
    state: &'static str,
    /// The time since when the guest is unknown, not yet as wanted, or cannot be released.
    since: Option<Millis>,
    message: String,
    pause_us: Option<u64>,
    predicted_pause_us: u64,
}

/// The filter for guests.
#[derive(Default)]
pub struct Wanted<'q> {
    /// A part of the guest's or the host's name.
    pub find: &'q str,
    /// A state, as a row names it; all states if empty.
    pub state: &'q str,
    pub from: usize,
}

/// Returns the guests that the principal may see and that match the filter.
pub fn guests(rollout: &Rollout, wanted: &Wanted<'_>, policy: &Policy, principal: &str) -> Guests {
    let is_wanted = |member: &Member| {
        (member.guest.contains(wanted.find) || member.host.contains(wanted.find))
            && (wanted.state.is_empty() || guest_state(rollout.header(), member) == wanted.state)
            && access::may_view(policy, principal, Some(&member.guest)).is_ok()
    };
    let (mut total, mut rows) = (0, Vec::new());
    for (index, member) in rollout.members().iter().enumerate() {
        if member.state == State::Superseded || !is_wanted(member) {
            continue;
        }
        if total >= wanted.from && rows.len() < MAX_ROWS {
            rows.push(row(rollout, index, member));
        }
        total += 1;
    }
    let from = wanted.from;
    Guests { total, from, rows }
}

fn row(rollout: &Rollout, index: usize, member: &Member) -> GuestRow {
    let header = rollout.header();
    let wave = header.wave_of(index).map(|wave| &header.waves[wave]);
    GuestRow {
        index,
        host: member.host.clone(),
        guest: member.guest.clone(),
        wave: wave.map(|wave| wave.name.clone()),
        state: guest_state(rollout.header(), member),
        since: member.since,
        message: view::message(member).to_owned(),
        pause_us: member.pause(),
        predicted_pause_us: member.plan.predicted_pause_us,
    }
}

/// Returns the reasons for the state of the guest's last member; `None` if the rollout has no such
/// guest.
pub fn explain(
    rollout: &Rollout,
    host: &str,
    guest: &str,
    now: Millis,
    policy: &Policy,
) -> Option<Vec<String>> {
    let mut members = rollout.members().iter();
    let index = members.rposition(|member| member.host == host && member.guest == guest)?;
    Some(view::explain(rollout, index, now, policy))
}

#[derive(Serialize)]
pub struct Trail {
    total: usize,
    rows: Vec<TrailRow>,
}

#[derive(Serialize)]
struct TrailRow {
    time: Millis,
    rollout: String,
    principal: String,
    text: String,
}

/// Lists the actions of people and the controller in all visible rollouts, newest first.
pub fn trail(leads: &Leadership, find: &str, sight: &Sight<'_>) -> Trail {
    let mut rows = Vec::new();
    for running in newest(leads) {
        let rollout = running.rollout();
        if !sight.sees_rollout(&rollout) {
            continue;
        }
        let hidden = sight.hidden(&rollout);
        let name = &rollout.header().name;
        let entries = rollout.header().timeline.iter();
        let entries = entries.filter(|entry| {
            let mut fields = [name, &entry.principal, &entry.text].into_iter();
            fields.any(|field| field.contains(find)) && !hidden.is_named_in(&entry.text)
        });
        rows.extend(entries.map(|entry| TrailRow {
            time: entry.time,
            rollout: name.clone(),
            principal: entry.principal.clone(),
            text: entry.text.clone(),
        }));
    }
    let total = rows.len();
    // Entries of one rollout with the same time are listed in reverse order, the last one first.
    rows.reverse();
    rows.sort_by_key(|row| std::cmp::Reverse(row.time));
    rows.truncate(MAX_ROWS);
    Trail { total, rows }
}
