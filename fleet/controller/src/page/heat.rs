// SPDX-License-Identifier: Apache-2.0
//! Compares the keys of each host with the state that rollouts want.
//!
//! While a page is open, sweeps query every guest for the keys that rollouts change. The time
//! between two sweeps is nine times the duration of the last sweep, but at least [`MIN_INTERVAL`]
//! and at most [`MAX_INTERVAL`], so that a large fleet is queried less often. Partial results are
//! shown during a sweep, so hosts that do not answer do not delay the others.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, stream};
use serde::Serialize;
use tokio::sync::watch;

use super::Shared;
use super::sight::Sight;
use super::state::newest;
use crate::controller::Leadership;
use crate::hosts::{Host, Hosts};
use crate::rollout::{Millis, Phase, Rollout, State, Want};
use crate::runner::now;

/// The maximum number of keys that are observed. Keys of the newest rollouts come first. Each key
/// is a bit of a `u32` for each guest.
const MAX_KEYS: usize = 24;
/// The maximum number of hosts in one answer.
const MAX_HOSTS: usize = 64;
/// The basis of the limits on concurrent queries. A sweep queries `FAN_OUT / 2` hosts at the same
/// time, and `FAN_OUT / 4` guests of each host.
const FAN_OUT: usize = 32;
const MIN_INTERVAL: Duration = Duration::from_secs(1);
const MAX_INTERVAL: Duration = Duration::from_secs(30);
/// The interval at which the results of a sweep in progress are shown.
const SHOW_INTERVAL: Duration = Duration::from_millis(500);
/// The maximum number of guests that are named in a cell.
const MAX_NAMES: usize = 8;

/// The latest results of the sweeps.
#[derive(Clone, Default)]
pub struct Observed {
    /// The time of the results; 0 before the first sweep.
    pub at: Millis,
    keys: Vec<String>,
    hosts: BTreeMap<String, Arc<Answer>>,
}

/// The guests of a host, or the reason why it does not answer.
type Answer = Result<Vec<ObservedGuest>, String>;

struct ObservedGuest {
    name: String,
    /// One bit for each observed key. The bit is set if the guest has the key.
    known: u32,
    enabled: u32,
}

/// Sweeps repeatedly while pages are open.
pub async fn observe(shared: Arc<Shared>) {
    let mut viewers = shared.viewers.subscribe();
    loop {
        if viewers.wait_for(|&viewers| viewers > 0).await.is_err() {
            return;
        }
        let start = tokio::time::Instant::now();
        if let Some(leads) = shared.controller.leadership() {
            sweep(&leads, &shared.heat).await;
        }
        tokio::time::sleep((start.elapsed() * 9).clamp(MIN_INTERVAL, MAX_INTERVAL)).await;
    }
}

/// Queries all hosts, and replaces each host's earlier results as soon as it answers.
async fn sweep(leads: &Leadership, shown: &watch::Sender<Arc<Observed>>) {
    let keys = keys(leads);
    let all = leads.hosts().all();
    let mut observed = Observed::clone(&shown.borrow());
    if observed.keys != keys {
        // The bits of the earlier results denote other keys.
        observed.hosts.clear();
    }
    let is_there = |name: &String| leads.hosts().get(name).is_some();
    observed.hosts.retain(|name, _| is_there(name));
    observed.keys.clone_from(&keys);
    if !keys.is_empty() {
        let answers = stream::iter(all).map(|host| {
            let keys = &keys;
            async move { (host.config.name.clone(), ask_host(&host, keys).await) }
        });
        // Only a few hosts are queried at the same time, so that a sweep leaves capacity for the
        // rollouts.
        let mut answers = std::pin::pin!(answers.buffer_unordered(FAN_OUT / 2));
        let mut ticks = tokio::time::interval(SHOW_INTERVAL);
        let mut is_new = false;
        loop {
            tokio::select! {
                answer = answers.next() => {
                    let Some((name, answer)) = answer else { break };
                    let before = observed.hosts.get(&name).map(|before| &**before);
                    compare(leads.hosts(), &name, before, &answer);
                    observed.hosts.insert(name, Arc::new(answer));
                    is_new = true;
                }
                _ = ticks.tick(), if is_new => {
                    observed.at = now();
                    shown.send_replace(Arc::new(observed.clone()));
                    is_new = false;
                }
            }
        }
    }
    observed.at = now();
    shown.send_replace(Arc::new(observed));
}

/// Makes the rollouts query guests that have stopped or resumed answering the sweep, so that both
/// show the same state.
fn compare(hosts: &Hosts, host: &str, before: Option<&Answer>, now: &Answer) {
    match (before, now) {
        (Some(Ok(_)) | None, Err(_)) | (Some(Err(_)), Ok(_)) => hosts.changed(host, None),
        (Some(Ok(before)), Ok(now)) => {
            let now: BTreeSet<&str> = now.iter().map(|guest| guest.name.as_str()).collect();
            for guest in before {
                if !now.contains(guest.name.as_str()) {
                    hosts.changed(host, Some(&guest.name));
                }
            }
        }
        _ => {}
    }
}

/// Returns the keys that rollouts change, those of the newest rollouts first.
fn keys(leads: &Leadership) -> Vec<String> {
    let mut keys: Vec<String> = Vec::new();
    for running in newest(leads) {
        let rollout = running.rollout();
        let claims = rollout
            .members()
            .iter()
            .flat_map(|member| member.plan.set.claims());
        let named: BTreeSet<&str> = claims.map(|claim| claim.key.as_str()).collect();
        for key in named {
            if keys.len() == MAX_KEYS {
                return keys;
            }
            if !keys.iter().any(|known| known == key) {
                keys.push(key.to_owned());
            }
        }
    }
    keys
}

async fn ask_host(host: &Arc<Host>, keys: &[String]) -> Answer {
    let guests = host.list_guests().await;
    let guests = guests.map_err(|status| status.message().to_owned())?;
    let asked = stream::iter(guests).map(|guest| async move {
        let found = host.list_keys(&guest.guest, keys.to_vec()).await;
        // A guest that does not answer is shown without known keys.
        let found = found.unwrap_or_default();
        let (mut known, mut enabled) = (0, 0);
        for key in &found {
            let Some(index) = keys.iter().position(|name| *name == key.name) else {
                continue;
            };
            known |= 1 << index;
            enabled |= u32::from(key.enabled) << index;
        }
        ObservedGuest {
            name: guest.guest,
            known,
            enabled,
        }
    });
    Ok(asked.buffered(FAN_OUT / 4).collect().await)
}

#[derive(Serialize)]
pub struct Heat {
    at: Millis,
    keys: Vec<String>,
    /// The number of hosts that match. `hosts` contains a part of them, and hosts with differences
    /// come first.
    total: usize,
    from: usize,
    differing: usize,
    /// The number of guests for which a rollout wants key states that could not be read.
    unknown: usize,
    hosts: Vec<HostColumn>,
}

#[derive(Serialize)]
struct HostColumn {
    name: String,
    labels: BTreeMap<String, String>,
    unreachable: String,
    guests: usize,
    /// The cells, one for each key.
    cells: Vec<Cell>,
    differs: usize,
    /// The number of guests for which a rollout wants key states that could not be read.
    unknown: usize,
}

#[derive(Clone, Default, Serialize)]
struct Cell {
    /// The number of guests that have the key.
    guests: usize,
    /// The number of guests on which the key is on.
    on: usize,
    /// The number of guests on which a rollout wants the key on. `want_off` is the number of guests
    /// on which a rollout wants it off.
    want_on: usize,
    want_off: usize,
    /// The number of guests on which the key differs from the state that a rollout wants.
    differs: usize,
    /// The names of the first [`MAX_NAMES`] guests that differ.
    names: Vec<String>,
}

/// The states that rollouts want for a guest's keys, with one bit for each key.
#[derive(Clone, Copy, Default)]
struct Wish {
    stated: u32,
    on: u32,
}

/// Returns a page of the hosts whose name or label value contains `find`, with the guests that the
/// principal may see.
pub fn heat(
    leads: &Leadership,
    observed: &Observed,
    find: &str,
    from: usize,
    sight: &Sight<'_>,
) -> Heat {
    let Wishes { by_host, absent } = wishes(leads, observed);
    let is_wanted = |name: &str, labels: &BTreeMap<String, String>| {
        name.contains(find) || labels.values().any(|value| value.contains(find))
    };
    let mut columns: Vec<HostColumn> = Vec::new();
    let known = leads.hosts().all();
    let known = known.iter().map(|host| &host.config);
    let mut hosts: BTreeMap<&str, BTreeMap<String, String>> = known
        .map(|host| (host.name.as_str(), host.labels.clone()))
        .collect();
    // A host that is no longer registered may still have guests in rollouts.
    for host in absent.keys() {
        hosts.entry(host).or_default();
    }
    for (name, labels) in hosts {
        if is_wanted(name, &labels) {
            let mut column = column(name, observed, &by_host, sight);
            let absent = absent.get(name).into_iter().flatten();
            column.unknown += absent.filter(|guest| sight.sees(guest)).count();
            let is_gone = leads.hosts().get(name).is_none();
            // A principal that sees none of its guests must not learn of a host that is gone.
            if is_gone && column.unknown == 0 {
                continue;
            }
            if is_gone {
                column.unreachable = "the host is not registered any more".to_owned();
            }
            column.labels = labels;
            columns.push(column);
        }
    }
    let total = columns.len();
    let differing = columns.iter().filter(|column| column.differs > 0).count();
    let unknown = columns.iter().map(|column| column.unknown).sum();
    // Stable sort: ties stay in name order.
    columns.sort_by_key(|column| {
        let is_known = column.unreachable.is_empty() && column.unknown == 0;
        (column.differs == 0, is_known)
    });
    Heat {
        at: observed.at,
        keys: observed.keys.clone(),
        total,
        from,
        differing,
        unknown,
        hosts: columns.into_iter().skip(from).take(MAX_HOSTS).collect(),
    }
}

/// The wishes for each observed guest of each host.
type ByHost<'o> = HashMap<&'o str, HashMap<&'o str, Wish>>;

struct Wishes<'o> {
    by_host: ByHost<'o>,
    /// The guests that rollouts want changed and that were not observed, by host.
    absent: BTreeMap<String, BTreeSet<String>>,
}

fn column(name: &str, observed: &Observed, wishes: &ByHost<'_>, sight: &Sight<'_>) -> HostColumn {
    let mut cells = vec![Cell::default(); observed.keys.len()];
    let (guests, unreachable): (&[ObservedGuest], &str) =
        match observed.hosts.get(name).map(|host| &**host) {
            None => (&[], ""),
            Some(Ok(guests)) => (guests, ""),
            Some(Err(why)) => (&[], why),
        };
    let (mut seen, mut unknown) = (0, 0);
    for guest in guests.iter().filter(|guest| sight.sees(&guest.name)) {
        seen += 1;
        let wish = wishes
            .get(name)
            .and_then(|host| host.get(guest.name.as_str()));
        let wish = wish.copied().unwrap_or_default();
        unknown += usize::from(guest.known == 0 && wish.stated != 0);
        for (index, cell) in cells.iter_mut().enumerate() {
            let bit = |bits: u32| bits >> index & 1 == 1;
            let (is_on, is_known) = (bit(guest.enabled), bit(guest.known));
            cell.guests += usize::from(is_known);
            cell.on += usize::from(is_on);
            cell.want_on += usize::from(bit(wish.stated) && bit(wish.on));
            cell.want_off += usize::from(bit(wish.stated) && !bit(wish.on));
            if is_known && bit(wish.stated) && bit(wish.on) != is_on {
                cell.differs += 1;
                if cell.names.len() < MAX_NAMES {
                    cell.names.push(guest.name.clone());
                }
            }
        }
    }
    HostColumn {
        name: name.to_owned(),
        labels: BTreeMap::new(),
        unreachable: unreachable.to_owned(),
        guests: seen,
        differs: cells.iter().map(|cell| cell.differs).sum(),
        unknown,
        cells,
    }
}

/// Returns the states that rollouts want for each guest. Later rollouts override earlier ones.
fn wishes<'o>(leads: &Leadership, observed: &'o Observed) -> Wishes<'o> {
    let mut wishes = ByHost::new();
    let mut absent: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (host, guests) in &observed.hosts {
        let guests = guests.iter().flatten();
        let none = guests.map(|guest| (guest.name.as_str(), Wish::default()));
        wishes.insert(host, none.collect());
    }
    for running in newest(leads).into_iter().rev() {
        let rollout = running.rollout();
        for (index, member) in rollout.members().iter().enumerate() {
            let Some(is_changed) = wants_change(&rollout, index) else {
                continue;
            };
            let host = wishes.get_mut(member.host.as_str());
            let Some(wish) = host.and_then(|host| host.get_mut(member.guest.as_str())) else {
                // The first sweep may not have queried the host yet.
                let is_queried = observed.hosts.contains_key(&member.host);
                let is_gone = observed.at > 0 && leads.hosts().get(&member.host).is_none();
                if member.may_be_changed() && (is_queried || is_gone) {
                    let guests = absent.entry(member.host.clone()).or_default();
                    guests.insert(member.guest.clone());
                }
                continue;
            };
            for claim in member.plan.set.claims() {
                let key = observed.keys.iter().position(|key| *key == claim.key);
                if let (Some(key), Some(on)) = (key, wants_on(claim.want, is_changed)) {
                    wish.stated |= 1 << key;
                    wish.on = wish.on & !(1 << key) | u32::from(on) << key;
                }
            }
        }
    }
    Wishes {
        by_host: wishes,
        absent,
    }
}

/// Returns whether the rollout wants the member changed (true) or unchanged (false); `None` if it
/// wants neither.
fn wants_change(rollout: &Rollout, index: usize) -> Option<bool> {
    let header = rollout.header();
    let member = &rollout.members()[index];
    let is_left = matches!(
        member.state,
        State::Skipped { .. } | State::Adopted | State::Forgotten | State::Superseded
    );
    if is_left {
        return None;
    }
    match header.phase {
        Phase::Planned => None,
        Phase::Completed => Some(true),
        Phase::Running(_) | Phase::Paused => {
            let reached = header.waves.get(header.wave);
            let has_begun = reached.is_none_or(|wave| index < wave.members().end);
            has_begun.then_some(true)
        }
        Phase::Reverting(_) | Phase::Ended(_) => {
            let was_changed = matches!(
                member.state,
                State::Releasing { .. } | State::Released { void: false }
            );
            was_changed.then_some(false)
        }
    }
}

/// Returns whether the key should be on; `None` if that depends on the claims and references of
/// others.
fn wants_on(want: Want, is_changed: bool) -> Option<bool> {
    match (want, is_changed) {
        (Want::On, _) => Some(is_changed),
        (Want::Off, _) => Some(!is_changed),
        (Want::Held, true) => Some(true),
        (Want::Held, false) => None,
    }
}
