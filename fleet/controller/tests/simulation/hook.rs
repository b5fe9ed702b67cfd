// SPDX-License-Identifier: Apache-2.0
//! A webhook that fails at random, and the delivery to it as `webhooks::deliver` makes it.

use std::collections::{BTreeMap, BTreeSet};

use fastrand::Rng;
use patchbay_access::addresses::hide_in_string;
use patchbay_fleet::rollout::{Event as Kind, Rollout};
use patchbay_fleet::runner::Command;
use patchbay_fleet::webhooks::{Due, before_first, first_due};

use super::driver::Input;
use super::world::{Event, World};

const NAME: &str = "pager";

/// The webhook's receiver.
#[derive(Default)]
pub struct Hook {
    is_used: bool,
    /// The terms that are about to deliver.
    waiting: BTreeSet<u32>,
    /// The bodies by the ids.
    got: BTreeMap<String, String>,
    /// The latest entry of each rollout.
    latest: BTreeMap<String, u64>,
}

impl Hook {
    pub fn draw(rng: &mut Rng) -> Self {
        Self {
            is_used: rng.u32(0..4) == 0,
            ..Self::default()
        }
    }
}

impl World {
    /// Lets a term deliver soon.
    pub fn notify_soon(&mut self, term: u32) {
        if self.hook.is_used && self.hook.waiting.insert(term) {
            let wait = self.rng.u64(1..2_000);
            self.schedule(wait, Event::Notify(term));
        }
    }

    /// Delivers the oldest event of a term's rollouts.
    pub fn notify(&mut self, term: u32) {
        let Some(of) = self.terms.get(&term) else {
            return;
        };
        if of.stopped_until > self.now {
            return self.schedule_at(of.stopped_until, Event::Notify(term));
        }
        self.hook.waiting.remove(&term);
        let now = self.now.saturating_add_signed(of.clock);
        let due = self.drivers_of(term).filter_map(|driver| {
            let header = driver.rollout.header();
            let due = first_due(header, NAME, driver.saved_entries, now)?;
            Some((driver.id, header.run.clone(), due))
        });
        let Some((driver, run, due)) = due.min_by_key(|(_, _, due)| due.time) else {
            return;
        };
        let fails = self.strikes("webhook failed", self.rates.hook);
        // The answer to an event that has arrived may be lost.
        if !fails || self.rng.bool() {
            self.arrives(&run, &due);
        }
        let delivered: Vec<(u32, u64)> = match fails {
            true => {
                let tried = self.drivers_of(term).filter_map(|driver| {
                    let header = driver.rollout.header();
                    let number = before_first(header, NAME, driver.saved_entries, now)?;
                    Some((driver.id, number))
                });
                tried.collect()
            }
            false => vec![(driver, due.number)],
        };
        for (driver, number) in delivered {
            let webhook = NAME.to_owned();
            let command = Command::Delivered { webhook, number };
            self.input(driver, Input::Command(command, ""));
        }
        let wait = match fails {
            true => self.rng.u64(1_000..30_000),
            false => self.rng.u64(1..2_000),
        };
        if self.hook.waiting.insert(term) {
            self.schedule(wait, Event::Notify(term));
        }
    }

    /// Lets the terms deliver that were stopped.
    pub fn notify_again(&mut self) {
        for term in self.hook.waiting.clone() {
            self.schedule(1, Event::Notify(term));
        }
    }

    fn arrives(&mut self, run: &str, due: &Due) {
        self.trace(|| format!("the webhook gets {}", due.id));
        let earlier = self.hook.got.insert(due.id.clone(), due.body.clone());
        match earlier {
            Some(earlier) => assert_eq!(earlier, due.body, "event {} is repeated", due.id),
            None => {
                let latest = self.hook.latest.entry(run.to_owned()).or_default();
                assert!(
                    *latest < due.number,
                    "event {} comes after {latest}",
                    due.id
                );
                *latest = due.number;
            }
        }
    }

    /// Checks that the webhook has every event of the rollouts as it is stored.
    pub fn check_hook(&self, rollouts: &[Rollout]) {
        if !self.hook.is_used {
            return;
        }
        for rollout in rollouts {
            let header = rollout.header();
            for entry in &header.timeline {
                if matches!(entry.event, Kind::Gate | Kind::Other) {
                    continue;
                }
                let id = format!("{}-{}", header.run, entry.number);
                let body = self.hook.got.get(&id);
                let body = body.unwrap_or_else(|| panic!("the webhook never gets {entry:?}"));
                let body: serde_json::Value = serde_json::from_str(body).expect("JSON");
                let mut text = entry.text.clone();
                // The random name of a rollout may look like an address of the kernel.
                hide_in_string(&mut text);
                assert_eq!(body["data"]["text"], text, "of event {id}");
                assert_eq!(body["data"]["phase"], entry.phase.name(), "of event {id}");
            }
        }
    }
}
