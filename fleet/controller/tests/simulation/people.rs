// SPDX-License-Identifier: Apache-2.0
//! The commands of people, and the other owners of claims.

use patchbay_fleet::rollout::{Member, Phase, State};
use patchbay_fleet::runner::Command;

use super::driver::Input;
use super::guest::{HOLDER, LATE};
use super::world::{Event, World};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deed {
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
    pub fn act(&mut self, deed: Deed) {
        if self.is_quiet && !matches!(deed, Deed::Start | Deed::Resume | Deed::Undo) {
            return;
        }
        match deed {
            Deed::Hold => return self.claim_other(HOLDER),
            Deed::Decide => return self.claim_other(LATE),
            Deed::Hurry => {
                self.act(Deed::Pause);
                let resume = self.rng.u64(1..2_000);
                let undo = self.rng.u64(1..1_000);
                self.schedule(resume, Event::Deed(Deed::Resume));
                self.schedule(resume + undo, Event::Deed(Deed::Undo));
                return;
            }
            _ => {}
        }
        let Some(driver) = self.leader.and_then(|id| self.drivers.get(&id)) else {
            return;
        };
        let (id, rollout) = (driver.id, &driver.rollout);
        let members = rollout.members();
        let index = self.rng.usize(0..members.len());
        let command = match deed {
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
        self.trace(|| format!("a person asks for {deed:?}"));
        self.input(id, Input::Command(command));
    }

    /// Forgets the guests that no driver can find.
    pub fn forget_lost(&mut self) {
        let Some(driver) = self.leader.and_then(|id| self.drivers.get(&id)) else {
            return;
        };
        let (id, members) = (driver.id, driver.rollout.members().iter().enumerate());
        let is_lost = |member: &Member| {
            self.lost.contains(&member.guest) && matches!(member.state, State::Releasing { .. })
        };
        let lost = members.filter(|(_, member)| is_lost(member));
        let lost: Vec<usize> = lost.map(|(index, _)| index).collect();
        for member in lost {
            self.count("guest lost, and forgotten");
            self.input(id, Input::Command(Command::Forget { member }));
        }
    }

    /// Starts or resumes the rollout, so that it runs unless it reverts.
    pub fn run_on(&mut self) {
        let driver = self.leader.and_then(|id| self.drivers.get(&id));
        match driver.map(|driver| driver.rollout.header().phase) {
            Some(Phase::Planned) => self.act(Deed::Start),
            Some(Phase::Paused) => self.act(Deed::Resume),
            _ => {}
        }
    }
}
