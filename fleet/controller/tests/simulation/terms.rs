// SPDX-License-Identifier: Apache-2.0
//! The terms of replicas that lead: elections, and the faults by which terms end.

use patchbay_fleet::rollout::Millis;
use patchbay_fleet::storage::RecordKeys;
use patchbay_fleet::store::{Fence, commit_all};

use super::driver::{Driver, Stage};
use super::network::Network;
use super::registry::Changes;
use super::world::{Event, World};

/// The time in which one replica leads. Its drivers are killed and stopped together.
pub struct Term {
    pub fence: Fence,
    /// The difference between the replica's wall clock and the right time.
    pub clock: i64,
    /// The keys by which the replica signs and verifies records.
    pub keys: RecordKeys,
    /// Its end of the network, with the hosts that it has found in the registry.
    pub network: Network,
    /// The guests that have changed since the term's watch of the registry was lost, and the
    /// revision at that time; `None` while the watch works.
    pub missed: Option<(Changes, u64)>,
    /// Its keys verify no record, so it runs no rollout.
    is_blind: bool,
    /// The time until which it does nothing.
    pub stopped_until: Millis,
    /// The time at which it notices that it no longer leads.
    pub ends_at: Option<Millis>,
}

impl World {
    /// Ends all drivers of a term. Nobody reads the answers to their calls.
    pub fn end_term(&mut self, term: u32) {
        self.drivers.retain(|_, driver| driver.term != term);
        self.terms.remove(&term);
        self.leader = self.leader.filter(|leader| *leader != term);
    }

    /// Kills, stops or deposes the driver's term at random. Returns whether it is killed.
    pub fn is_hit(&mut self, driver: &Driver) -> bool {
        let term = driver.term;
        if Some(term) != self.leader {
            return false;
        }
        let stage = match driver.stage {
            Stage::Idle => "before a step",
            Stage::Stepped { .. } => "between step and save",
            Stage::Saving { .. } => "while it saves",
            Stage::Sending { .. } => "between save and send",
        };
        if self.strikes("controller killed", self.rates.kill_driver) {
            self.trace(|| format!("term {term} is killed {stage}"));
            self.end_term(term);
            let wait = self.rng.u64(1_000..15_000);
            self.schedule(wait, Event::Elect);
            return true;
        }
        if self.strikes("controller stopped", self.rates.stop_driver) {
            let most = if self.rng.bool() { 60_000 } else { 1_500_000 };
            let time = self.rng.u64(5_000..most);
            self.trace(|| format!("term {term} is stopped for {time} ms {stage}"));
            let until = self.now + time;
            self.terms
                .entry(term)
                .and_modify(|term| term.stopped_until = until);
            let lease = self.rng.u64(10_000..20_000);
            if time > lease {
                self.schedule(lease, Event::Elect);
            }
        } else if self.strikes("lease lost", self.rates.lease) {
            self.trace(|| format!("term {term} has lost its lease {stage}"));
            self.depose();
            self.schedule(0, Event::Elect);
        }
        false
    }

    /// Lets the leader continue for some time although another replica may lead.
    fn depose(&mut self) {
        let Some(former) = self.leader.take() else {
            return;
        };
        let wait = self.rng.u64(0..30_000);
        let term = self.terms.get_mut(&former).expect("it leads");
        let ends_at = self.now.max(term.stopped_until) + wait;
        term.ends_at = Some(ends_at);
        let drivers: Vec<u32> = self.drivers_of(former).map(|driver| driver.id).collect();
        for id in drivers {
            self.schedule_at(ends_at, Event::Drive(id));
        }
    }

    /// Returns the drivers of a term.
    pub fn drivers_of(&self, term: u32) -> impl Iterator<Item = &Driver> {
        self.drivers
            .values()
            .filter(move |driver| driver.term == term)
    }

    /// Returns the leader's drivers, one per rollout.
    pub fn leading(&self) -> impl Iterator<Item = &Driver> {
        self.leader
            .into_iter()
            .flat_map(|term| self.drivers_of(term))
    }

    /// Makes another replica the leader, which loads the rollouts from the store.
    pub fn elect(&mut self) {
        if let Some(former) = self.leader {
            if self.terms[&former].stopped_until <= self.now {
                return;
            }
            self.count("controller deposed while stopped");
            self.depose();
        }
        let fence = self.new_fence();
        let term = self.terms_made;
        self.terms_made += 1;
        let is_blind = self.keys.is_signing() && self.strikes("other record key", self.rates.key);
        let keys = match is_blind {
            true => self.keys.other(),
            false => self.keys.right(),
        };
        let clock = self.draw_clock();
        let network = self.network.of_another_term();
        self.list_registry(&network, 0);
        self.terms.insert(
            term,
            Term {
                network,
                missed: None,
                fence: fence.clone(),
                clock,
                keys,
                is_blind,
                stopped_until: 0,
                ends_at: None,
            },
        );
        self.leader = Some(term);
        self.trace(|| format!("term {term} leads"));
        if is_blind {
            self.check_blind();
            let wait = self.rng.u64(1_000..60_000);
            self.schedule(wait, Event::Resign(term));
            return;
        }
        let loaded = self.load_all();
        // A rollout of which one record is signed by the former key may have others by the new one.
        let signed = commit_all(self.store.as_ref(), &fence, &loaded.signed_again);
        self.runtime.block_on(signed).expect("it leads");
        self.keys.are_signed();
        self.notify_soon(term);
        for (rollout, spec) in loaded.rollouts {
            // A driver may have been killed after the store took its change, and before it knew.
            self.oracle.loaded(&rollout);
            self.start_driver(term, rollout, spec);
        }
    }

    /// Returns the leader's fence and record keys, if there is one that is not stopped and can
    /// read the rollouts.
    pub fn leader_fence(&self) -> Option<(u32, Fence, RecordKeys)> {
        let id = self.leader?;
        let term = &self.terms[&id];
        let plans = term.stopped_until <= self.now && !term.is_blind;
        plans.then(|| (id, term.fence.clone(), term.keys.clone()))
    }

    /// Ends the term of a replica that runs no rollout, and elects another.
    pub fn resign(&mut self, term: u32) {
        if self.leader == Some(term) {
            self.end_term(term);
            self.elect();
        }
    }

    /// Returns whether the leader runs no rollout.
    pub fn is_blind(&self) -> bool {
        self.leader.is_some_and(|term| self.terms[&term].is_blind)
    }
}
