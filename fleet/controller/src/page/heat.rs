// SPDX-License-Identifier: Apache-2.0
//! Keys × hosts: what rollouts want, and what guests have.
//!
//! While somebody looks, a sweep asks every guest for the keys that rollouts change. Sweeps take a
//! tenth of the time, so that a large fleet is asked less often, but a pause between two is no
//! longer than [`MAX_INTERVAL`]. What a sweep has seen is shown while it goes on: hosts that do not
//! answer, for which it waits longest, delay nobody else.

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
use crate::hosts::Host;
use crate::rollout::{InverseOp, Millis, Phase, Rollout, State};
use crate::runner::now;
use patchbay_proto::v1::KeyOp;

/// Keys that are observed: those of the newest rollouts. A guest's are the bits of a word.
const MAX_KEYS: usize = 24;
/// Hosts that an answer has.
const MAX_HOSTS: usize = 64;
/// Guests that are asked at once, and hosts.
const FAN_OUT: usize = 32;
const MIN_INTERVAL: Duration = Duration::from_secs(1);
const MAX_INTERVAL: Duration = Duration::from_secs(30);
/// A sweep under way is shown as often as this.
const SHOW_INTERVAL: Duration = Duration::from_millis(500);
/// Guests that are named in a cell.
const MAX_NAMES: usize = 8;

/// What the sweeps have seen last.
#[derive(Clone, Default)]
pub struct Observed {
    /// 0 before the first sweep.
    pub at: Millis,
    keys: Vec<String>,
    hosts: BTreeMap<String, Arc<Result<Vec<Guest>, String>>>,
}

struct Guest {
    name: String,
    /// A bit for each of the keys.
    known: u32,
    enabled: u32,
}

/// Sweeps for ever, while pages are open.
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

/// Asks all hosts, and shows what they answer in the place of what they answered before.
async fn sweep(leads: &Leadership, shown: &watch::Sender<Arc<Observed>>) {
    let keys = keys(leads);
    let all = leads.hosts().all();
    let mut observed = Observed::clone(&shown.borrow());
    if observed.keys != keys {
        // The bits would mean other keys.
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
        // A few hosts at a time, so that the sweep takes no more than a part of what rollouts may.
        let mut answers = std::pin::pin!(answers.buffer_unordered(FAN_OUT / 2));
        let mut ticks = tokio::time::interval(SHOW_INTERVAL);
        let mut is_new = false;
        loop {
            tokio::select! {
                answer = answers.next() => {
                    let Some((name, answer)) = answer else { break };
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

/// The keys that rollouts change, the newest first.
fn keys(leads: &Leadership) -> Vec<String> {
    let mut keys: Vec<String> = Vec::new();
    for running in newest(leads) {
        let rollout = running.rollout();
        let ops = rollout
            .members()
            .iter()
            .flat_map(|member| &member.plan.inverse);
        let named: BTreeSet<&str> = ops.map(|op| op.key.as_str()).collect();
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

async fn ask_host(host: &Arc<Host>, keys: &[String]) -> Result<Vec<Guest>, String> {
    let guests = host.list_guests().await;
    let guests = guests.map_err(|status| status.message().to_owned())?;
    let asked = stream::iter(guests).map(|guest| async move {
        let found = host.list_keys(&guest.guest, keys.to_vec()).await;
        // A guest that does not answer has no known key.
        let found = found.unwrap_or_default();
        let (mut known, mut enabled) = (0, 0);
        for key in &found {
            let Some(index) = keys.iter().position(|name| *name == key.name) else {
                continue;
            };
            known |= 1 << index;
            enabled |= u32::from(key.enabled) << index;
        }
        Guest {
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
    /// Hosts that match, of which `hosts` are some; those with differences come first.
    total: usize,
    from: usize,
    differing: usize,
    hosts: Vec<HostColumn>,
}

#[derive(Serialize)]
struct HostColumn {
    name: String,
    labels: BTreeMap<String, String>,
    unreachable: String,
    guests: usize,
    /// One for each key.
    cells: Vec<Cell>,
    differs: usize,
}

#[derive(Clone, Default, Serialize)]
struct Cell {
    /// Guests that have the key.
    guests: usize,
    /// Guests on which it is on.
    on: usize,
    /// Guests on which a rollout wants it on, and off.
    want_on: usize,
    want_off: usize,
    /// Guests that have it otherwise than a rollout wants it.
    differs: usize,
    /// Some of these.
    names: Vec<String>,
}

/// What rollouts want of a guest: a bit for each of the keys.
#[derive(Clone, Copy, Default)]
struct Wish {
    stated: u32,
    on: u32,
}

/// The hosts whose name or label contains `find`, with their visible guests.
pub fn heat(
    leads: &Leadership,
    observed: &Observed,
    find: &str,
    from: usize,
    sight: &Sight<'_>,
) -> Heat {
    let wishes = wishes(leads, observed);
    let is_wanted = |name: &str, labels: &BTreeMap<String, String>| {
        name.contains(find) || labels.values().any(|value| value.contains(find))
    };
    let mut columns: Vec<HostColumn> = Vec::new();
    for host in leads.hosts().all() {
        let (name, labels) = (&host.config.name, &host.config.labels);
        if is_wanted(name, labels) {
            let mut column = column(name, observed, &wishes, sight);
            column.labels.clone_from(labels);
            columns.push(column);
        }
    }
    let total = columns.len();
    let differing = columns.iter().filter(|column| column.differs > 0).count();
    // Stable: beside that they stay in the order of their names.
    columns.sort_by_key(|column| (column.differs == 0, column.unreachable.is_empty()));
    Heat {
        at: observed.at,
        keys: observed.keys.clone(),
        total,
        from,
        differing,
        hosts: columns.into_iter().skip(from).take(MAX_HOSTS).collect(),
    }
}

/// The wishes of each guest of each host.
type Wishes<'o> = HashMap<&'o str, HashMap<&'o str, Wish>>;

fn column(name: &str, observed: &Observed, wishes: &Wishes<'_>, sight: &Sight<'_>) -> HostColumn {
    let mut cells = vec![Cell::default(); observed.keys.len()];
    let (guests, unreachable): (&[Guest], &str) = match observed.hosts.get(name).map(|host| &**host)
    {
        None => (&[], ""),
        Some(Ok(guests)) => (guests, ""),
        Some(Err(why)) => (&[], why),
    };
    let mut seen = 0;
    for guest in guests.iter().filter(|guest| sight.sees(&guest.name)) {
        seen += 1;
        let wish = wishes
            .get(name)
            .and_then(|host| host.get(guest.name.as_str()));
        let wish = wish.copied().unwrap_or_default();
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
        cells,
    }
}

/// Later rollouts overrule earlier ones.
fn wishes<'o>(leads: &Leadership, observed: &'o Observed) -> Wishes<'o> {
    let mut wishes = Wishes::new();
    for (host, guests) in &observed.hosts {
        let guests = guests.iter().flatten();
        let none = guests.map(|guest| (guest.name.as_str(), Wish::default()));
        wishes.insert(host, none.collect());
    }
    for running in newest(leads).into_iter().rev() {
        let rollout = running.rollout();
        for (index, member) in rollout.members().iter().enumerate() {
            let host = wishes.get_mut(member.host.as_str());
            let Some(wish) = host.and_then(|host| host.get_mut(member.guest.as_str())) else {
                continue;
            };
            let Some(is_changed) = wants_change(&rollout, index) else {
                continue;
            };
            for op in &member.plan.inverse {
                let key = observed.keys.iter().position(|key| *key == op.key);
                if let (Some(key), Some(on)) = (key, wants_on(op, is_changed)) {
                    wish.stated |= 1 << key;
                    wish.on = wish.on & !(1 << key) | u32::from(on) << key;
                }
            }
        }
    }
    wishes
}

/// Whether the rollout wants the member changed, or as it was; `None` while it wants neither.
fn wants_change(rollout: &Rollout, index: usize) -> Option<bool> {
    let header = rollout.header();
    let member = &rollout.members()[index];
    if matches!(member.state, State::Skipped { .. } | State::Adopted) {
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
                State::Committed { .. }
                    | State::Reverted { void: false }
                    | State::RevertFailed { .. }
            );
            was_changed.then_some(false)
        }
    }
}

/// Whether the key is to be on. After INC and DEC are taken back, and after DEC, that depends on
/// the references of others.
fn wants_on(inverse: &InverseOp, is_changed: bool) -> Option<bool> {
    match KeyOp::try_from(inverse.op).ok()? {
        KeyOp::Disable => Some(is_changed),
        KeyOp::Enable => Some(!is_changed),
        KeyOp::Dec if is_changed => Some(true),
        _ => None,
    }
}
