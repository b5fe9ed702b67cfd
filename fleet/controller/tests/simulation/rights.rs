// SPDX-License-Identifier: Apache-2.0
//! People whose rights begin and end. A start needs approvals of two people who have rights.

use std::collections::BTreeSet;

use fastrand::Rng;
use patchbay_access::policy::Policy;
use patchbay_fleet::authority::Verdicts;
use patchbay_fleet::rollout::{Rollout, Verb};

use super::world::World;

pub const PEOPLE: [&str; 3] = ["alice", "bob", "carol"];

/// The policy about rollouts.
pub struct Rights {
    policy: Policy,
    entitled: BTreeSet<&'static str>,
}

impl Rights {
    pub fn draw(rng: &mut Rng) -> Option<Self> {
        (rng.u32(0..8) == 0).then(|| Self::of(PEOPLE.into()))
    }

    fn of(entitled: BTreeSet<&'static str>) -> Self {
        let names: Vec<String> = entitled.iter().map(|name| format!("'{name}'")).collect();
        let text = format!(
            "rules: [{{name: all, principals: [{}], role: operator}}]\napprovals: [{{min: 2}}]\n",
            names.join(", ")
        );
        let policy = Policy::parse(&text).expect("a policy");
        Self { policy, entitled }
    }
}

impl World {
    /// Gives other people rights, at least one of them.
    pub fn change_rights(&mut self) {
        if self.rights.is_none() {
            return;
        }
        let mut entitled: BTreeSet<&str> = PEOPLE.into();
        if !self.is_quiet {
            let stays = self.rng.usize(0..PEOPLE.len());
            entitled.retain(|name| *name == PEOPLE[stays] || self.rng.bool());
        }
        self.count("rights changed");
        self.trace(|| format!("{entitled:?} have rights"));
        self.rights = Some(Rights::of(entitled));
    }

    /// Returns whether the person may give the command, and checks a start.
    pub fn may(&mut self, person: &str, rollout: &Rollout, verb: Verb) -> bool {
        let Some(rights) = &self.rights else {
            return true;
        };
        let verdict = Verdicts::new(&rights.policy, person, rollout).of(verb);
        if let Err(why) = verdict {
            self.count("command refused for its person");
            self.trace(|| format!("{verb:?} of {person} is refused: {why}"));
            return false;
        }
        assert!(rights.entitled.contains(person), "{person} has no rights");
        if verb == Verb::Start {
            let approvals = rollout.header().approvals.iter().map(String::as_str);
            let people: BTreeSet<&str> = approvals.chain([person]).collect();
            let count = people.intersection(&rights.entitled).count();
            assert!(
                count >= 2,
                "{person} starts with the approvals of {people:?}"
            );
        }
        true
    }
}
