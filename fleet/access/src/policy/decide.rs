// SPDX-License-Identifier: Apache-2.0
//! Decides whether the policy allows a call.

use std::time::Instant;

use patchbay_proto::methods::Role;

use super::file::{Policy, Rule};
use super::lack::Lack;
use super::spent::Spent;

/// The question whether the policy allows a call.
#[derive(Clone, Debug)]
pub struct Question<'a> {
    /// The name that the connection proves, which is a SPIFFE id, a common name, or "uid:N".
    pub principal: &'a str,
    /// The role that the method needs.
    pub role: Role,
    /// The guests concerned; empty for a call that concerns none.
    pub guests: &'a [&'a str],
    /// The keys that would change.
    pub want: Want<'a>,
}

/// The keys of a change.
#[derive(Clone, Copy, Debug)]
pub enum Want<'a> {
    /// The call changes no key.
    Nothing,
    /// These keys, each "name" or "module:name", as a prepared plan lists them.
    Keys(&'a [&'a str]),
    /// Any keys in any number. Only a rule that limits neither the keys nor their number allows
    /// this.
    AnyKeys,
}

impl<'a> Want<'a> {
    /// Returns the keys that are known by name.
    pub(super) fn keys(self) -> &'a [&'a str] {
        match self {
            Self::Keys(keys) => keys,
            Self::Nothing | Self::AnyKeys => &[],
        }
    }
}

/// The answer of the policy, with the rule that decides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// A rule allows the call.
    Allowed {
        /// The name of the first rule that allows the call.
        rule: String,
        /// The role that the rule gives.
        role: Role,
    },
    /// No rule allows the call.
    Denied {
        /// A sentence that names the closest rule and the condition that it does not meet.
        why: String,
    },
}

/// The keys that a call may change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Permission {
    /// A rule allows every key.
    Every {
        /// The rule's name.
        rule: String,
        /// The role that the rule gives.
        role: Role,
    },
    /// These rules allow some keys. The monitor, which knows the keys of the call, applies the
    /// first rule that allows all of them.
    Some(Vec<KeyRule>),
}

/// A rule that allows some keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRule {
    /// The rule's name.
    pub name: String,
    /// The globs of the keys; empty for all keys.
    pub keys: Vec<String>,
    /// The number of different keys that the principal may change in a guest within an hour.
    pub max_keys: Option<usize>,
    /// The reason why the rule's cap on guests is reached; empty if it is not reached. If it is,
    /// the rule allows only calls that release what the principal holds.
    pub exhausted: String,
}

impl Decision {
    /// Returns whether the policy allows the call.
    #[must_use]
    pub fn is_allowed(&self) -> bool {
        matches!(self, Self::Allowed { .. })
    }
}

impl Policy {
    /// Decides a question. The caps are compared with this change alone, and earlier changes are
    /// not counted.
    #[must_use]
    pub fn decide(&self, question: &Question<'_>) -> Decision {
        self.first(question.principal, |rule| rule.lacks(question))
    }

    /// Decides about a change that only releases what the principal holds, or stops something. No
    /// cap refuses such a change, because it must be possible to undo the changes that a cap
    /// bounds.
    #[must_use]
    pub fn decide_without_caps(&self, question: &Question<'_>) -> Decision {
        self.first(question.principal, |rule| rule.lacks_rights(question))
    }

    /// Returns whether any rule with exactly this role allows the call. The caps are compared with
    /// this change alone.
    #[must_use]
    pub fn gives(&self, question: &Question<'_>, role: Role) -> bool {
        let mut rules = self.rules.iter().filter(|rule| rule.role == role);
        rules.any(|rule| rule.lacks(question).is_none())
    }

    /// Returns whether a rule lets the principal name the persons for whom it changes the guest.
    #[must_use]
    pub fn may_assert(&self, principal: &str, guest: &str) -> bool {
        let mut rules = self.rules.iter().filter(|rule| rule.may_assert);
        rules.any(|rule| rule.principals.select_path(principal) && rule.guests.select_whole(guest))
    }

    /// Returns the name of the rule that makes the principal an admin of all guests and keys,
    /// without caps; `None` if there is none.
    #[must_use]
    pub fn unlimited_admin(&self, principal: &str) -> Option<&str> {
        let everything = ["*"];
        let is_unlimited = |rule: &&Rule| {
            let guests = rule.guests.texts();
            let is_named = rule.principals.select_path(principal);
            is_named
                && rule.role >= Role::Admin
                && (guests.is_empty() || guests == everything)
                && !rule.limits_keys()
                && rule.max_guests.is_none()
        };
        let rule = self.rules.iter().find(is_unlimited)?;
        Some(&rule.name)
    }

    /// Returns whether the rules limit the calls that others make for this person. They do if one
    /// of them names the person by a pattern or an exclusion that does not select everybody.
    #[must_use]
    pub fn bounds(&self, person: &str) -> bool {
        let mut rules = self.rules.iter();
        rules.any(|rule| rule.principals.names_path(person))
    }

    /// Returns whether any rule names the principal, even if the rule allows nothing.
    #[must_use]
    pub fn names(&self, principal: &str) -> bool {
        let mut rules = self.rules.iter();
        rules.any(|rule| rule.principals.select_path(principal))
    }

    /// Decides about a change that is about to be made, and counts it in `spent` against the caps
    /// of the rule that allows it. `guests` are the names under which the guests of the question
    /// are counted. They must be unique in `spent`.
    pub(super) fn charge(
        &self,
        question: &Question<'_>,
        guests: &[&str],
        spent: &Spent,
        now: Instant,
    ) -> Decision {
        self.first(question.principal, |rule| {
            rule.lacks(question).or_else(|| {
                let keys = question.want.keys();
                let charged = spent.charge(rule, question.principal, guests, keys, now);
                charged.err()
            })
        })
    }

    /// Returns the keys that a call with the role and the guests of the question may change. With
    /// `count`, the call is counted as a change of the guests against the caps of each rule that
    /// may allow it.
    ///
    /// # Errors
    /// No rule gives the role on the guests. The sentence names the closest rule.
    pub(super) fn permission(
        &self,
        question: &Question<'_>,
        guests: &[&str],
        count: Option<(&Spent, Instant)>,
    ) -> Result<Permission, String> {
        let room = |rule: &Rule| match count {
            Some((spent, now)) => spent.charge(rule, question.principal, guests, &[], now),
            None => Ok(()),
        };
        let allows = |rule: &&Rule| rule.lacks_rights(question).is_none();
        for rule in self.rules.iter().filter(allows) {
            if !rule.limits_keys() && room(rule).is_ok() {
                return Ok(Permission::Every {
                    rule: rule.name.clone(),
                    role: rule.role,
                });
            }
        }
        let limited = self.rules.iter().filter(allows).map(|rule| KeyRule {
            name: rule.name.clone(),
            keys: rule.keys.texts().to_vec(),
            max_keys: rule.max_keys,
            exhausted: room(rule)
                .err()
                .map_or_else(String::new, |lack| lack.sentence()),
        });
        let limited: Vec<KeyRule> = limited.collect();
        match self.first(question.principal, |rule| rule.lacks_rights(question)) {
            Decision::Denied { why } => Err(why),
            Decision::Allowed { .. } => Ok(Permission::Some(limited)),
        }
    }

    /// Returns the first rule that allows the call.
    fn first(&self, principal: &str, lacks: impl Fn(&Rule) -> Option<Lack>) -> Decision {
        let mut nearest: Option<(Lack, &Rule)> = None;
        for rule in &self.rules {
            match lacks(rule) {
                None => {
                    return Decision::Allowed {
                        rule: rule.name.clone(),
                        role: rule.role,
                    };
                }
                Some(lack) if nearest.as_ref().is_none_or(|(least, _)| lack < *least) => {
                    nearest = Some((lack, rule));
                }
                Some(_) => {}
            }
        }
        let why = match nearest {
            None | Some((Lack::Principal, _)) => {
                format!("no rule of the policy names {principal:?}")
            }
            Some((lack, rule)) => format!("rule {:?} {}", rule.name, lack.sentence()),
        };
        Decision::Denied { why }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: &str = "
rules:
  - name: on-call
    principals: ['spiffe://example.org/on-call/*', 'uid:0']
    role: admin
  - name: network
    principals: ['spiffe://example.org/net/*']
    role: operator
    guests: ['web-*']
    keys: ['net_*', '!net_high*', 'virtio_net:*']
    max_keys: 2
    max_guests: 1
  - name: everybody
    principals: ['*']
    role: viewer
";
    const ALICE: &str = "spiffe://example.org/net/alice";

    fn ask(principal: &str, role: Role, guests: &[&str], keys: &[&str]) -> Decision {
        let want = Want::Keys(keys);
        Policy::parse(POLICY).expect("a policy").decide(&Question {
            principal,
            role,
            guests,
            want,
        })
    }

    fn allowed(rule: &str) -> Decision {
        let role = match rule {
            "on-call" => Role::Admin,
            "network" => Role::Operator,
            _ => Role::Viewer,
        };
        let rule = rule.to_owned();
        Decision::Allowed { rule, role }
    }

    #[track_caller]
    fn denied(decision: Decision, word: &str) {
        let Decision::Denied { why } = decision else {
            panic!("{decision:?}")
        };
        assert!(why.contains(word), "{why}");
    }

    #[test]
    fn the_first_rule_that_allows_decides() {
        let viewer = |principal| ask(principal, Role::Viewer, &["db-1"], &[]);
        assert_eq!(viewer("uid:0"), allowed("on-call"));
        assert_eq!(viewer(ALICE), allowed("everybody"));
        assert_eq!(viewer("CN=somebody"), allowed("everybody"));
        let operator = |keys| ask(ALICE, Role::Operator, &["web-1"], keys);
        assert_eq!(operator(&["net_a", "virtio_net:b"]), allowed("network"));
        assert_eq!(
            ask("uid:0", Role::Admin, &["a", "b", "c"], &["net_high_order"]),
            allowed("on-call")
        );
    }

    #[test]
    fn a_refusal_names_the_nearest_rule_and_what_it_lacks() {
        let operator = |guests: &[&str], keys: &[&str]| ask(ALICE, Role::Operator, guests, keys);
        denied(operator(&["db-1"], &["net_a"]), "guest \"db-1\"");
        denied(
            operator(&["web-1"], &["net_a", "sched_x"]),
            "key \"sched_x\"",
        );
        denied(operator(&["web-1"], &["net_high_x"]), "net_high_x");
        denied(operator(&["web-1"], &["ext4:sched_x"]), "ext4");
        denied(operator(&["web-1"], &["net_a", "net_b", "net_c"]), "2 keys");
        denied(operator(&["web-1", "web-2"], &["net_a"]), "1 guests");
        denied(
            ask(ALICE, Role::Admin, &["web-1"], &[]),
            "operator, and admin",
        );
        denied(ask("uid:1", Role::Operator, &["web-1"], &[]), "everybody");
        // A `*` does not match a slash.
        let deeper = "spiffe://example.org/on-call/guests/mallory";
        denied(ask(deeper, Role::Admin, &[], &[]), "viewer");
        // A uid that begins with the same digit is another principal.
        denied(ask("uid:01", Role::Admin, &[], &[]), "viewer");
    }

    #[test]
    fn only_rules_that_say_so_let_their_principals_assert() {
        let text = "
rules:
  - {name: a, principals: [fleet], role: operator, guests: ['web-*'], may_assert: true}
  - {name: b, principals: [fleet, bob], role: admin}
";
        let policy = Policy::parse(text).expect("a policy");
        assert!(policy.may_assert("fleet", "web-1"));
        assert!(!policy.may_assert("fleet", "db-1"));
        assert!(!policy.may_assert("bob", "web-1"));
        assert!(Policy::own_user_only(7).may_assert("uid:7", "a"));
        assert!(!Policy::own_user_only(7).may_assert("uid:8", "a"));
    }

    #[test]
    fn a_rule_for_everybody_bounds_nobody() {
        let bounds = |principals: &str, person: &str| {
            let text = format!("rules: [{{name: a, principals: [{principals}], role: viewer}}]");
            Policy::parse(&text).expect("a policy").bounds(person)
        };
        for everybody in ["'*'", "'**'", "'*', '!bob'", "'*', fleet"] {
            assert!(!bounds(everybody, ALICE), "{everybody}");
        }
        for named in [
            "'spiffe://example.org/**'",
            "'*', 'spiffe://example.org/net/*'",
        ] {
            assert!(bounds(named, ALICE), "{named}");
        }
        // A rule names everyone whom it excludes, and gives them none of its rights.
        assert!(bounds(
            "'spiffe://example.org/**', '!spiffe://example.org/net/*'",
            ALICE
        ));
    }

    #[test]
    fn an_unlimited_admin_has_a_rule_without_any_limit() {
        let is_unlimited = |limits: &str| {
            let text = format!("rules: [{{name: a, principals: ['uid:7'], {limits}}}]");
            let policy = Policy::parse(&text).expect("a policy");
            policy.unlimited_admin("uid:7").is_some()
        };
        for limits in ["role: admin", "role: admin, guests: ['*']"] {
            assert!(is_unlimited(limits), "{limits}");
        }
        for limits in [
            "role: operator",
            "role: admin, guests: ['!db-*']",
            "role: admin, guests: ['*', '!db-*']",
            "role: admin, keys: ['net_*']",
            "role: admin, max_keys: 9",
            "role: admin, max_guests: 9",
        ] {
            assert!(!is_unlimited(limits), "{limits}");
        }
        let other = Policy::parse(POLICY).expect("a policy");
        assert_eq!(other.unlimited_admin("uid:7"), None);
    }

    #[test]
    fn any_keys_need_a_rule_that_limits_none() {
        let any = |principal| {
            Policy::parse(POLICY).expect("a policy").decide(&Question {
                principal,
                role: Role::Operator,
                guests: &["web-1"],
                want: Want::AnyKeys,
            })
        };
        assert_eq!(any("uid:0"), allowed("on-call"));
        denied(any(ALICE), "every key");
        denied(any("uid:1"), "viewer");
        let capped = "rules: [{name: a, principals: ['*'], role: admin, max_keys: 9}]";
        let capped = Policy::parse(capped).expect("a policy");
        let decision = capped.decide(&Question {
            principal: "uid:0",
            role: Role::Operator,
            guests: &[],
            want: Want::AnyKeys,
        });
        denied(decision, "every key");
    }

    #[test]
    fn a_rule_whose_cap_is_reached_leaves_the_change_to_the_next() {
        let text = "
rules:
  - {name: few, principals: [alice], role: operator, keys: ['net_*'], max_keys: 1}
  - {name: night, principals: [alice], role: operator, guests: ['web-*'], max_guests: 1}
";
        let (policy, spent) = (Policy::parse(text).expect("a policy"), Spent::default());
        let charge = |guest: &str, key: &str| {
            let question = Question {
                principal: "alice",
                role: Role::Operator,
                guests: &[guest],
                want: Want::Keys(&[key]),
            };
            policy.charge(&question, &[guest], &spent, Instant::now())
        };
        let by = |rule: &str| Decision::Allowed {
            rule: rule.to_owned(),
            role: Role::Operator,
        };
        assert_eq!(charge("web-1", "net_a"), by("few"));
        assert_eq!(charge("db-1", "net_a"), by("few"));
        assert_eq!(charge("web-1", "net_b"), by("night"));
        denied(charge("web-2", "ext4_b"), "allows 1 guests in an hour");
        denied(charge("db-1", "net_b"), "allows 1 keys in an hour");
        assert_eq!(charge("web-1", "ext4_a"), by("night"));
    }

    #[test]
    fn the_rules_that_limit_keys_are_left_to_the_monitor() {
        let text = "
rules:
  - {name: net, principals: [alice], role: operator, keys: ['net_*'], max_keys: 2}
  - {name: web, principals: [alice], role: operator, keys: ['ext4_*'], guests: ['web-*'], max_guests: 1}
  - {name: all, principals: [root], role: admin, keys: ['net_*']}
  - {name: any, principals: [root], role: admin, max_guests: 1}
";
        let (policy, spent) = (Policy::parse(text).expect("a policy"), Spent::default());
        let ask = |principal: &str, guest: &str, counts: bool| {
            let question = Question {
                principal,
                role: Role::Operator,
                guests: &[guest],
                want: Want::Nothing,
            };
            let count = counts.then(|| (&spent, Instant::now()));
            policy.permission(&question, &[guest], count)
        };
        let rules = |permission| match permission {
            Ok(Permission::Some(rules)) => rules,
            other => panic!("{other:?}"),
        };
        let names = |rules: &[KeyRule]| -> Vec<(String, bool)> {
            let name = |rule: &KeyRule| (rule.name.clone(), rule.exhausted.is_empty());
            rules.iter().map(name).collect()
        };
        let of = |name: &str, room| (name.to_owned(), room);
        let both = rules(ask("alice", "web-1", true));
        assert_eq!(
            (&both[0].keys[..], both[0].max_keys),
            (&["net_*".to_owned()][..], Some(2))
        );
        assert_eq!(names(&both), [of("net", true), of("web", true)]);
        // The cap on guests is ignored for a call that is not counted. A counted change of a second
        // guest exceeds the cap.
        assert_eq!(
            names(&rules(ask("alice", "web-2", false))),
            [of("net", true), of("web", true)]
        );
        assert_eq!(
            names(&rules(ask("alice", "web-2", true))),
            [of("net", true), of("web", false)]
        );
        assert_eq!(names(&rules(ask("alice", "db-1", true))), [of("net", true)]);
        // A rule without key limits takes precedence, regardless of its position, until its cap is
        // reached.
        let every = Permission::Every {
            rule: "any".to_owned(),
            role: Role::Admin,
        };
        assert_eq!(ask("root", "db-1", true), Ok(every));
        assert_eq!(
            names(&rules(ask("root", "db-2", true))),
            [of("all", true), of("any", false)]
        );
        let why = ask("bob", "db-1", true).expect_err("no rule names him");
        assert!(why.contains("bob"), "{why}");
    }

    #[test]
    fn a_role_is_given_by_any_rule_that_has_it() {
        let policy = Policy::parse(POLICY).expect("a policy");
        let gives = |principal: &str, guest: &str, role| {
            let question = Question {
                principal,
                role: Role::Viewer,
                guests: &[guest],
                want: Want::Nothing,
            };
            policy.gives(&question, role)
        };
        assert!(gives("uid:0", "web-1", Role::Admin) && gives("uid:0", "web-1", Role::Viewer));
        assert!(gives(ALICE, "web-1", Role::Operator));
        assert!(!gives(ALICE, "web-1", Role::Admin) && !gives(ALICE, "db-1", Role::Operator));
        let everybody = POLICY.find("  - name: everybody").expect("the last rule");
        let policy = &POLICY[..everybody];
        let policy = Policy::parse(policy).expect("a policy");
        assert!(policy.names(ALICE) && policy.names("uid:0"));
        assert!(!policy.names("uid:1") && !policy.names("spiffe://example.org/build"));
    }

    #[test]
    fn nobody_may_do_anything_that_no_rule_names() {
        let policy = "rules: [{name: a, principals: ['uid:0'], role: admin}]";
        let decision = Policy::parse(policy).expect("a policy").decide(&Question {
            principal: "uid:1000",
            role: Role::Viewer,
            guests: &[],
            want: Want::Nothing,
        });
        denied(decision, "uid:1000");
    }
}
