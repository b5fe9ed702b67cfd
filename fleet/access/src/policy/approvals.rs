// SPDX-License-Identifier: Apache-2.0
//! Determines how many people must approve a rollout, and who may start one without approvals.

use serde::Deserialize;
use static_keys::Patterns;

use super::decide::{Decision, Question};
use super::file::{MAX_APPROVALS, Policy, PolicyError};

/// The approvals that rollouts of some keys need.
#[derive(Clone, Debug)]
pub struct Approvals {
    keys: Patterns,
    demand: Demand,
}

/// The approvals that a rollout needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demand {
    /// The number of different principals that must approve.
    pub min: usize,
    /// The principal that planned the rollout may be one of them.
    pub planner_may_approve: bool,
}

impl Demand {
    /// The demand of a policy without `approvals`: the principal that starts the rollout suffices.
    pub const NONE: Self = Self {
        min: 1,
        planner_may_approve: true,
    };
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ApprovalsInFile {
    #[serde(default)]
    keys: Vec<String>,
    min: usize,
    #[serde(default = "yes")]
    planner_may_approve: bool,
}

fn yes() -> bool {
    true
}

impl Approvals {
    pub(super) fn check(file: ApprovalsInFile) -> Result<Self, PolicyError> {
        let min = file.min;
        if !(1..=MAX_APPROVALS).contains(&min) {
            return Err(PolicyError::Approvals { min });
        }
        Ok(Self {
            keys: Patterns::parse(&file.keys).map_err(PolicyError::ApprovalKeys)?,
            demand: Demand {
                min,
                planner_may_approve: file.planner_may_approve,
            },
        })
    }
}

impl Policy {
    /// Returns the approvals that a rollout of these keys needs. If several entries cover some of
    /// the keys, the strictest value of each condition applies.
    #[must_use]
    pub fn demand(&self, keys: &[&str]) -> Demand {
        let mut demand = Demand::NONE;
        for entry in &self.approvals {
            if keys.iter().any(|key| entry.keys.select_full(key)) {
                demand.min = demand.min.max(entry.demand.min);
                demand.planner_may_approve &= entry.demand.planner_may_approve;
            }
        }
        demand
    }

    /// Decides whether the principal may break the glass for these guests and keys. Only a rule
    /// with the role `break-glass` allows this. Caps are not compared.
    #[must_use]
    pub fn decide_break_glass(&self, question: &Question<'_>) -> Decision {
        let mut rules = self.rules.iter().filter(|rule| rule.breaks_glass);
        match rules.find(|rule| rule.lacks_rights(question).is_none()) {
            Some(rule) => Decision::Allowed {
                rule: rule.name.clone(),
                role: rule.role,
            },
            None => Decision::Denied {
                why: format!(
                    "no rule of the policy gives {:?} the role break-glass for every guest and \
                     key of the rollout",
                    question.principal
                ),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Role, Want};

    const POLICY: &str = "
rules:
  - {name: ops, principals: [alice, bob], role: operator}
  - {name: on-call, principals: [bob], role: break-glass, guests: ['web-*'], keys: ['net_*']}
approvals:
  - {min: 2, keys: ['net_*']}
  - {min: 3, keys: ['net_high*', 'mem_*']}
  - {min: 1, keys: ['mem_*'], planner_may_approve: false}
";

    #[test]
    fn the_strictest_demand_of_any_key_counts() {
        let policy = Policy::parse(POLICY).expect("a policy");
        let demand = |keys: &[&str]| {
            let Demand {
                min,
                planner_may_approve,
            } = policy.demand(keys);
            (min, planner_may_approve)
        };
        assert_eq!(policy.demand(&["sched_x"]), Demand::NONE);
        assert_eq!(demand(&["sched_x", "net_a"]), (2, true));
        assert_eq!(demand(&["kvm:net_a"]), (2, true));
        assert_eq!(demand(&["net_a", "net_high_b"]), (3, true));
        assert_eq!(demand(&["mem_a"]), (3, false));
        let all = "rules: [{name: a, principals: ['*'], role: viewer}]\napprovals: [{min: 2}]";
        let all = Policy::parse(all).expect("a policy");
        assert_eq!(all.demand(&["any"]).min, 2, "no globs cover every key");
    }

    #[test]
    fn only_the_role_of_its_own_breaks_the_glass() {
        let policy = Policy::parse(POLICY).expect("a policy");
        let decide = |principal, guest, key| {
            let decision = policy.decide_break_glass(&Question {
                principal,
                role: Role::Operator,
                guests: &[guest],
                want: Want::Keys(&[key]),
            });
            decision.is_allowed()
        };
        assert!(decide("bob", "web-1", "net_a"));
        assert!(!decide("alice", "web-1", "net_a"));
        assert!(!decide("bob", "db-1", "net_a"));
        assert!(!decide("bob", "web-1", "mem_a"));
        let shown = policy.rules()[1].to_string();
        assert!(shown.starts_with("on-call: break-glass for"), "{shown}");
        let admin = "rules: [{name: a, principals: ['*'], role: admin}]";
        let admin = Policy::parse(admin).expect("a policy");
        let question = Question {
            principal: "root",
            role: Role::Operator,
            guests: &[],
            want: Want::Nothing,
        };
        assert!(!admin.decide_break_glass(&question).is_allowed());
    }

    #[test]
    fn malformed_approvals_are_refused() {
        let rules = "rules: [{name: a, principals: ['*'], role: viewer}]\napprovals: ";
        for (text, why) in [
            ("[{min: 0}]", "1 to 64"),
            ("[{min: 65}]", "1 to 64"),
            ("[{min: -1}]", "malformed"),
            ("[{keys: [a]}]", "min"),
            ("[{min: 2, keys: ['net_[']}]", "net_["),
            (
                "[{min: 2, planer_may_approve: false}]",
                "planer_may_approve",
            ),
        ] {
            let error = Policy::parse(&format!("{rules}{text}")).expect_err(text);
            assert!(error.to_string().contains(why), "{text}: {error}");
        }
        let king = "rules: [{name: a, principals: ['*'], role: king}]";
        let error = Policy::parse(king).expect_err("no role").to_string();
        assert!(
            error.contains("king") && error.contains("break-glass"),
            "{error}"
        );
    }
}
