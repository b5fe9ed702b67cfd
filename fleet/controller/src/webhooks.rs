// SPDX-License-Identifier: Apache-2.0
//! Delivers events of rollouts to webhooks, at least once and in order.
//!
//! The timelines serve as the queue. Each rollout stores, for each webhook, the number of the
//! latest entry that the webhook has accepted. A new leader continues after this entry. If the
//! acceptance of an event was not stored, the event is sent again with the same ID, so none is
//! lost.

mod config;
mod send;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use patchbay_access::addresses::hide_in_string;
use serde_json::json;
use tokio::task::JoinSet;

pub use self::config::{ConfigError, Webhook, read};
use crate::clock::{Clocks, timestamp};
use crate::controller::Leadership;
use crate::metrics::Metrics;
use crate::rollout::{Event, Header, Millis, TimelineEntry, lasting};
use crate::runner::{Command, Running, now};

/// The age at which an event is given up. A new webhook does not get events that are already older.
const MAX_AGE: Millis = 24 * 3_600_000;
/// The delay after the first failure. It doubles with each further one.
const BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(300);
/// The time after which events of other rollouts do not wait for a runner's answer any more.
const ANSWER_WAIT: Duration = Duration::from_secs(2);

/// An event that a webhook has not accepted yet.
pub struct Due {
    pub number: u64,
    pub time: Millis,
    pub id: String,
    pub body: String,
    /// The number of earlier entries that the timeline has dropped.
    dropped: u64,
}

/// The commands to runners that have no answer yet. A runner gives none while the file system of
/// the archive hangs, which must not delay the events of other rollouts.
#[derive(Default)]
struct Unanswered {
    commands: JoinSet<String>,
    rollouts: BTreeSet<String>,
}

impl Unanswered {
    /// Asks the rollout's runner to store this number for the webhook. Does not wait for the
    /// answer.
    fn send(&mut self, running: Arc<Running>, webhook: &str, number: u64) {
        let webhook = webhook.to_owned();
        let name = running.rollout().header().name.clone();
        self.rollouts.insert(name.clone());
        self.commands.spawn(async move {
            let command = Command::Delivered { webhook, number };
            // If the rollout has been deleted meanwhile, nothing needs to be stored.
            let _ = running.command(command, "").await;
            name
        });
    }

    /// Waits for the next answer. Never ends if no command is open.
    async fn next(&mut self) {
        match self.commands.join_next().await {
            Some(Ok(name)) => _ = self.rollouts.remove(&name),
            // A command does not panic.
            Some(Err(_)) => {}
            None => std::future::pending().await,
        }
    }

    /// Waits for the answers, for a limited time.
    async fn settle(&mut self) {
        let answers = async {
            while !self.commands.is_empty() {
                self.next().await;
            }
        };
        let _ = tokio::time::timeout(ANSWER_WAIT, answers).await;
    }

    /// Removes the rollouts whose runner has not yet answered an earlier command.
    fn others(&self, mut rollouts: Vec<Arc<Running>>) -> Vec<Arc<Running>> {
        rollouts.retain(|running| !self.rollouts.contains(&running.rollout().header().name));
        rollouts
    }
}

/// Delivers the events of the leader's rollouts. This never ends.
pub async fn deliver(leadership: &Leadership, webhooks: &[Webhook], metrics: &Metrics) {
    let all = webhooks.iter();
    join_all(all.map(|webhook| deliver_to(leadership, webhook, metrics))).await;
    std::future::pending().await
}

async fn deliver_to(leadership: &Leadership, webhook: &Webhook, metrics: &Metrics) {
    let mut changes = leadership.changes();
    let (mut delay, mut files) = (BACKOFF, send::Files::default());
    let mut unanswered = Unanswered::default();
    // A clock that is set forward makes no event old.
    let began = Clocks::read();
    let time = || began.time_until(&Clocks::read());
    loop {
        unanswered.settle().await;
        changes.mark_unchanged();
        let rollouts = unanswered.others(leadership.rollouts());
        let Some((running, due)) = oldest(&rollouts, &webhook.name, time()) else {
            tokio::select! {
                // The sender is dropped when the leader's term ends.
                changed = changes.changed() => if changed.is_err() {
                    return;
                },
                () = unanswered.next() => {}
            }
            continue;
        };
        let sent = send::send(webhook, &mut files, &due.id, &due.body, now()).await;
        match sent {
            Ok(()) => delay = BACKOFF,
            Err(why) => {
                metrics.webhook_failed();
                mark_tried(leadership, &webhook.name, &mut unanswered, time());
                let (name, id, age) = (&webhook.name, &due.id, time().saturating_sub(due.time));
                if age < MAX_AGE {
                    tracing::warn!(webhook = name, id, "an event is not delivered yet: {why}");
                    tokio::time::sleep(delay).await;
                    delay = (delay * 2).min(MAX_BACKOFF);
                    continue;
                }
                metrics.webhook_lost(1);
                let age = lasting(age);
                tracing::error!(
                    webhook = name,
                    id,
                    "an event is given up after {age}: {why}"
                );
            }
        }
        metrics.webhook_lost(due.dropped);
        unanswered.send(running, &webhook.name, due.number);
    }
}

/// Stores that the webhook is tried with the events of all rollouts, so that from now on those that
/// are given up or dropped before it accepts any are counted as lost.
fn mark_tried(leadership: &Leadership, webhook: &str, unanswered: &mut Unanswered, now: Millis) {
    for running in unanswered.others(leadership.rollouts()) {
        let saved = running.saved_entries();
        let number = before_first(running.rollout().header(), webhook, saved, now);
        if let Some(number) = number {
            unanswered.send(running, webhook, number);
        }
    }
}

/// Returns the number of the entry before the first event that is due. Returns `None` if none is
/// due, or if the rollout has stored that the webhook is tried.
pub fn before_first(header: &Header, webhook: &str, saved: u64, now: Millis) -> Option<u64> {
    if header.delivered.contains_key(webhook) {
        return None;
    }
    let (entry, _) = first_of(header, webhook, saved, now)?;
    Some(entry.number.saturating_sub(1))
}

/// Returns the oldest event that the webhook has not accepted.
fn oldest(rollouts: &[Arc<Running>], webhook: &str, now: Millis) -> Option<(Arc<Running>, Due)> {
    let due = rollouts.iter().filter_map(|running| {
        let saved = running.saved_entries();
        let due = first_due(running.rollout().header(), webhook, saved, now)?;
        Some((Arc::clone(running), due))
    });
    due.min_by_key(|(_, due)| due.time)
}

/// Returns the first event of a rollout that the webhook has not accepted. Entries after number
/// `saved` are not stored yet.
pub fn first_due(header: &Header, webhook: &str, saved: u64, now: Millis) -> Option<Due> {
    let (entry, dropped) = first_of(header, webhook, saved, now)?;
    Some(Due {
        number: entry.number,
        time: entry.time,
        id: format!("{}-{}", header.run, entry.number),
        body: body(header, entry),
        dropped,
    })
}

/// Returns the first entry of the timeline that must be delivered to the webhook, and the number of
/// earlier entries that the timeline has dropped. Entries after number `saved` are not stored yet.
fn first_of<'h>(
    header: &'h Header,
    webhook: &str,
    saved: u64,
    now: Millis,
) -> Option<(&'h TimelineEntry, u64)> {
    let done = header.delivered.get(webhook).copied();
    let is_subject = |entry: &TimelineEntry| {
        matches!(entry.event, Event::Phase | Event::GateClosed | Event::Drift)
    };
    // If the webhook was never tried, old events are not lost: it was configured later.
    let is_tried = done.is_some();
    let done = done.unwrap_or(0);
    let is_recent = |entry: &TimelineEntry| now.saturating_sub(entry.time) < MAX_AGE;
    let left = header.timeline.iter();
    let mut left = left.filter(|entry| entry.number > done && entry.number <= saved);
    let first_left = left.clone().next()?.number;
    let entry = left.find(|entry| is_subject(entry) && (is_tried || is_recent(entry)))?;
    let dropped = match is_tried {
        true => first_left.saturating_sub(done + 1),
        false => 0,
    };
    Some((entry, dropped))
}

/// Returns the JSON of an event. It depends only on stored values, so a repeat has the same text.
/// Addresses of a guest's kernel are hidden from other parties.
fn body(header: &Header, entry: &TimelineEntry) -> String {
    let mut text = entry.text.clone();
    hide_in_string(&mut text);
    let event = match entry.event {
        Event::GateClosed => "rollout.gate_closed",
        Event::Drift => "rollout.drift",
        Event::Phase | Event::Gate | Event::Other => "rollout.phase",
    };
    let body = json!({
        "type": event,
        "timestamp": timestamp(entry.time).to_string(),
        "data": {
            "rollout": header.name,
            "title": header.title,
            "digest": header.digest,
            "phase": entry.phase.name(),
            "principal": entry.principal,
            "text": text,
            "number": entry.number,
        },
    });
    body.to_string()
}
