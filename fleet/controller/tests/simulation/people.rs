// SPDX-License-Identifier: Apache-2.0
//! The commands of people, and the other owners of claims.

use patchbay_fleet::rollout::{Member, Phase, State, Verb};
use patchbay_fleet::runner::Command;

use super::driver::{Driver, Input};
use super::owners::{HOLDER, LATE};
use super::rights::PEOPLE;
use super::world::{Event, World};

/// The number of attempts at approvals, by people at random, that almost always gives two.
const APPROVALS: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deed {
    Approve,
    Start,
    Pause,
    Resume,
    Promote,
    Abort,
    Undo,
    /// Gives up a guest.
    Forget,
    /// Changes a guest again in a wave of its own.
    Extend,
    /// Takes a guest as it is.
    Adopt,
    /// Pauses, resumes and undoes within a few seconds.
    Hurry,
    /// Another owner holds keys.
    Hold,
    /// Another owner turns keys on or off.
    Decide,
}

impl World {
    pub fn act(&mut self, deed: Deed, rollout: Option<&str>) {
        let goes_on = matches!(
            deed,
            Deed::Approve | Deed::Start | Deed::Resume | Deed::Undo
        );
        if self.is_quiet && !goes_on {
            return;
        }
        match deed {
            Deed::Hold => return self.claim_other(HOLDER),
            Deed::Decide => return self.claim_other(LATE),
            _ => {}
        }
        let leading: Vec<u32> = self.leading().map(|driver| driver.id).collect();
        if leading.is_empty() {
            return;
        }
        let any = leading[self.rng.usize(0..leading.len())];
        let is_meant = |driver: &&Driver| {
            rollout.map_or(driver.id == any, |name| {
                driver.rollout.header().name == name
            })
        };
        let Some(driver) = self.leading().find(is_meant) else {
            return;
        };
        let (id, rollout) = (driver.id, driver.rollout.clone());
        let name = rollout.header().name.clone();
        if deed == Deed::Hurry {
            self.act(Deed::Pause, Some(&name));
            let resume = self.rng.u64(1..2_000);
            let undo = self.rng.u64(1..1_000);
            self.schedule(resume, Event::Deed(Deed::Resume, Some(name.clone())));
            self.schedule(resume + undo, Event::Deed(Deed::Undo, Some(name)));
            return;
        }
        let members = rollout.members();
        let index = self.rng.usize(0..members.len());
        let person = PEOPLE[self.rng.usize(0..PEOPLE.len())];
        let verb = match deed {
            Deed::Approve => Some(Verb::Approve),
            Deed::Start => Some(Verb::Start),
            _ => None,
        };
        if verb.is_some_and(|verb| !self.may(person, &rollout, verb)) {
            return;
        }
        let command = match deed {
            Deed::Approve => Command::Approve {
                digest: rollout.header().digest.clone(),
            },
            Deed::Start => Command::Start {
                digest: rollout.header().digest.clone(),
            },
            Deed::Pause => Command::Pause,
            Deed::Resume => Command::Resume,
            Deed::Promote => Command::Promote,
            Deed::Abort => Command::Abort,
            Deed::Undo => Command::Undo,
            Deed::Forget => Command::Forget { member: index },
            Deed::Extend => {
                let member = &members[index];
                if member.state == State::Superseded {
                    return;
                }
                let added = vec![Member {
                    health: None,
                    generation: 0,
                    boot: String::new(),
                    is_confirmed: false,
                    record: None,
                    expires: None,
                    state: State::Pending,
                    ..member.clone()
                }];
                Command::Extend {
                    name: format!("fix-{}", members.len()),
                    added,
                    by_waves: false,
                }
            }
            Deed::Adopt => Command::Adopt {
                drifted: vec![index],
                joined: vec![],
            },
            Deed::Hold | Deed::Decide | Deed::Hurry => return,
        };
        self.trace(|| format!("a person asks for {deed:?} of {name}"));
        self.input(id, Input::Command(command, person));
    }

    /// Forgets the guests that no driver can find, those whose claims were lost with the ledger,
    /// and the one whose host answers with invalid data.
    pub fn forget_lost(&mut self) {
        let mut lost = Vec::new();
        let liar = self.liar.map(|index| &self.guests[index].name);
        for driver in self.leading() {
            let name = &driver.rollout.header().name;
            for (index, member) in driver.rollout.members().iter().enumerate() {
                let mut guests = self.guests.iter().filter(|guest| !guest.is_namesake);
                let has_lost_ledger =
                    guests.any(|guest| guest.name == member.guest && guest.orphans.is_some());
                let is_lost = self.lost.contains(&(name.clone(), member.guest.clone()))
                    || has_lost_ledger
                    || liar == Some(&member.guest);
                if is_lost && matches!(member.state, State::Releasing { .. }) {
                    lost.push((driver.id, index));
                }
            }
        }
        for (id, member) in lost {
            self.count("guest lost, and forgotten");
            self.input(id, Input::Command(Command::Forget { member }, PEOPLE[0]));
        }
    }

    /// Starts or resumes the rollouts, so that they run unless they revert.
    pub fn run_on(&mut self) {
        let deed = |driver: &Driver| {
            let header = driver.rollout.header();
            let deed = match header.phase {
                Phase::Planned => Deed::Start,
                Phase::Paused => Deed::Resume,
                _ => return None,
            };
            Some((deed, header.name.clone()))
        };
        let deeds: Vec<(Deed, String)> = self.leading().filter_map(deed).collect();
        for (deed, name) in deeds {
            let attempts = match deed == Deed::Start && self.rights.is_some() {
                true => APPROVALS,
                false => 0,
            };
            for _ in 0..attempts {
                self.act(Deed::Approve, Some(&name));
                self.run_until(self.now + 1_000);
            }
            self.act(deed, Some(&name));
        }
    }
}
