// SPDX-License-Identifier: Apache-2.0
//! The keys that a caller may change, according to the host's daemon, and the caps on their number.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use patchbay_proto::scope::{Scope, ScopeRule};
use static_keys::{PatternError, Patterns};

use super::error::KeysError;

/// The time within which a cap counts changed keys.
const WINDOW: Duration = Duration::from_hours(1);

/// The client that makes a change, and its permissions.
#[derive(Clone, Debug)]
pub struct Caller {
    /// The principal: "uid:N", or a name that the host's daemon asserts.
    pub name: String,
    /// The person for whom the client makes the change, according to the host's daemon. The person
    /// is recorded, and the scope may limit the person's keys. Holds and claims belong to the
    /// client.
    pub person: Option<Arc<str>>,
    /// The keys that the client may change; `None` for all.
    pub scope: Option<Arc<KeyScope>>,
}

impl From<String> for Caller {
    /// Returns a caller that may change every key.
    fn from(name: String) -> Self {
        Self {
            name,
            person: None,
            scope: None,
        }
    }
}

impl From<&str> for Caller {
    /// Returns a caller that may change every key.
    fn from(name: &str) -> Self {
        name.to_owned().into()
    }
}

/// The keys that a call may change.
#[derive(Debug)]
pub struct KeyScope {
    rules: Vec<Rule>,
    /// The person for whom the caller makes the call, and the rules that must also permit it.
    person: Option<(String, Vec<Rule>)>,
    /// The time at which the caller's credentials expire.
    expires: Option<SystemTime>,
}

#[derive(Debug)]
struct Rule {
    name: String,
    keys: Patterns,
    max_keys: Option<usize>,
    /// The reason why the rule permits no further change, because another cap is reached.
    exhausted: Option<String>,
}

/// The use that a call makes of its keys, which decides whether caps apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Checks or prepares a change. The caps are compared with this change alone.
    Check,
    /// Changes the keys. The change counts towards the caps.
    Change,
    /// Gives back what the caller holds. No cap prevents this use.
    GiveBack,
}

impl KeyScope {
    /// Parses an asserted scope.
    ///
    /// # Errors
    /// A glob is malformed.
    pub fn new(scope: Scope) -> Result<Self, PatternError> {
        let person = match scope.person {
            Some(person) => Some((person.name, parse(person.rules)?)),
            None => None,
        };
        let seconds = u64::try_from(scope.expires).ok().filter(|at| *at != 0);
        Ok(Self {
            rules: parse(scope.rules)?,
            person,
            expires: seconds.and_then(|at| UNIX_EPOCH.checked_add(Duration::from_secs(at))),
        })
    }
}

fn parse(rules: Vec<ScopeRule>) -> Result<Vec<Rule>, PatternError> {
    let rule = |rule: ScopeRule| {
        Ok(Rule {
            keys: Patterns::parse(&rule.keys)?,
            name: rule.name,
            max_keys: rule
                .max_keys
                .map(|most| usize::try_from(most).unwrap_or(usize::MAX)),
            // In the message, an empty reason means that there is none.
            exhausted: Some(rule.exhausted).filter(|why| !why.is_empty()),
        })
    };
    rules.into_iter().map(rule).collect()
}

impl Rule {
    /// Returns the reason why the rule does not permit a use of these keys; `None` if it does.
    fn lacks(&self, keys: &[&str], how: Use) -> Option<Lack> {
        if let Some(key) = keys.iter().find(|key| !self.keys.select_full(key)) {
            return Some(Lack::Key((*key).to_owned()));
        }
        let exhausted = self.exhausted.as_ref().filter(|_| how != Use::GiveBack);
        exhausted.cloned().map(Lack::Exhausted)
    }
}

/// The reason why a rule does not permit a change.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Lack {
    Keys { given: usize, most: usize },
    Exhausted(String),
    Key(String),
}

impl Lack {
    /// Returns how far the rule is from permitting the change. A refusal is explained by the
    /// closest rule.
    fn distance(&self) -> u8 {
        match self {
            Self::Keys { .. } => 0,
            Self::Exhausted(_) => 1,
            Self::Key(_) => 2,
        }
    }

    fn sentence(&self) -> String {
        match self {
            Self::Keys { given, most } => format!(
                "allows {most} keys of a guest in an hour, and this change would make it {given}"
            ),
            Self::Exhausted(why) => why.clone(),
            Self::Key(key) => format!("does not cover key {key:?}"),
        }
    }
}

/// The keys that principals changed within the last hour, under rules with a cap.
#[derive(Debug, Default)]
pub struct Spent(HashMap<(String, String), HashMap<String, Instant>>);

impl Spent {
    /// Checks whether a caller may use these keys, and counts changed keys against the caps.
    ///
    /// # Errors
    /// [`KeysError::NotPermitted`], which names the closest rule. Nothing is counted then.
    pub fn permit(
        &mut self,
        caller: &Caller,
        keys: &[&str],
        how: Use,
        now: Instant,
    ) -> Result<(), KeysError> {
        let Some(scope) = &caller.scope else {
            return Ok(());
        };
        if scope.expires.is_some_and(|at| at < SystemTime::now()) {
            let why = "its certificate has expired since it made the call".to_owned();
            return Err(refuse(&caller.name, why));
        }
        if how == Use::Change {
            self.0.retain(|_, keys| {
                keys.retain(|_, at| now.saturating_duration_since(*at) < WINDOW);
                !keys.is_empty()
            });
        }
        let own = self.find(&caller.name, &scope.rules, keys, how)?;
        let person = match &scope.person {
            Some((name, rules)) => Some((name, self.find(name, rules, keys, how)?)),
            None => None,
        };
        // The caller and the person both may make the change, so it is counted for both.
        self.count(&caller.name, own, keys, how, now);
        if let Some((name, rule)) = person {
            self.count(name, rule, keys, how, now);
        }
        Ok(())
    }

    /// Returns the first rule that permits the principal this use of the keys.
    fn find<'r>(
        &self,
        principal: &str,
        rules: &'r [Rule],
        keys: &[&str],
        how: Use,
    ) -> Result<&'r Rule, KeysError> {
        let mut nearest: Option<(Lack, &Rule)> = None;
        for rule in rules {
            let lack = rule
                .lacks(keys, how)
                .or_else(|| self.lacks_room(principal, rule, keys, how));
            match lack {
                None => return Ok(rule),
                Some(lack) => match &nearest {
                    Some((least, _)) if least.distance() <= lack.distance() => {}
                    _ => nearest = Some((lack, rule)),
                },
            }
        }
        let why = match nearest {
            Some((lack, rule)) => format!("rule {:?} {}", rule.name, lack.sentence()),
            None => "no rule of the policy permits it".to_owned(),
        };
        Err(refuse(principal, why))
    }

    /// Compares a change with the cap of a rule.
    fn lacks_room(&self, principal: &str, rule: &Rule, keys: &[&str], how: Use) -> Option<Lack> {
        let most = rule.max_keys?;
        let given = match how {
            Use::GiveBack => return None,
            Use::Check => keys.len(),
            Use::Change => {
                let known = self.0.get(&(rule.name.clone(), principal.to_owned()));
                let is_new = |key: &&&str| known.is_none_or(|known| !known.contains_key(**key));
                known.map_or(0, HashMap::len) + keys.iter().filter(is_new).count()
            }
        };
        (given > most).then_some(Lack::Keys { given, most })
    }

    /// Counts a change against the cap of a rule.
    fn count(&mut self, principal: &str, rule: &Rule, keys: &[&str], how: Use, now: Instant) {
        if rule.max_keys.is_none() || how != Use::Change {
            return;
        }
        let id = (rule.name.clone(), principal.to_owned());
        let counted = self.0.entry(id).or_default();
        counted.extend(keys.iter().map(|key| ((*key).to_owned(), now)));
    }
}

fn refuse(principal: &str, why: String) -> KeysError {
    let principal = principal.to_owned();
    KeysError::NotPermitted { principal, why }
}

#[cfg(test)]
mod tests {
    use patchbay_proto::scope::PersonScope;

    use super::*;

    fn rule(name: &str, keys: &[&str], max_keys: Option<u32>) -> ScopeRule {
        ScopeRule {
            name: name.to_owned(),
            keys: keys.iter().map(|&glob| glob.to_owned()).collect(),
            max_keys,
            exhausted: String::new(),
        }
    }

    fn caller(name: &str, rules: Vec<ScopeRule>) -> Caller {
        let scope = Scope {
            rules,
            ..Scope::default()
        };
        Caller {
            name: name.to_owned(),
            person: None,
            scope: Some(Arc::new(KeyScope::new(scope).expect("good globs"))),
        }
    }

    #[track_caller]
    fn refused(result: Result<(), KeysError>, words: &str) {
        let error = result.expect_err(words).to_string();
        assert!(error.contains(words), "{error}");
    }

    #[test]
    fn the_first_rule_that_covers_every_key_permits_it() {
        let rules = || {
            vec![
                rule("net", &["net_*", "!net_secret"], None),
                rule("e", &["ext4:*"], None),
            ]
        };
        let (alice, now) = (caller("alice", rules()), Instant::now());
        let permit = |keys: &[&str]| Spent::default().permit(&alice, keys, Use::Change, now);
        permit(&["net_a", "net_b"]).expect("rule net");
        permit(&["ext4:a"]).expect("rule e");
        refused(
            permit(&["net_a", "net_secret"]),
            "does not cover key \"net_secret\"",
        );
        refused(
            permit(&["net_a", "ext4:a"]),
            "rule \"net\" does not cover key \"ext4:a\"",
        );
        let nobody = caller("bob", vec![]);
        let none = Spent::default().permit(&nobody, &["a"], Use::GiveBack, now);
        refused(none, "no rule");
        Spent::default()
            .permit(&"root".into(), &["a"], Use::Change, now)
            .expect("it has no scope");
    }

    #[test]
    fn a_cap_counts_the_keys_of_an_hour_once_for_each_principal() {
        let (mut spent, start) = (Spent::default(), Instant::now());
        let mut change = |name: &str, keys: &[&str], minutes| {
            let now = start + Duration::from_mins(minutes);
            let capped = caller(name, vec![rule("few", &[], Some(2))]);
            spent.permit(&capped, keys, Use::Change, now)
        };
        change("alice", &["a"], 0).expect("the first");
        change("alice", &["a", "b"], 1).expect("one more");
        let third = change("alice", &["c"], 2);
        refused(
            third,
            "2 keys of a guest in an hour, and this change would make it 3",
        );
        change("bob", &["c", "d"], 2).expect("another principal");
        // Refused changes are not counted, and a name is forgotten an hour after its last change.
        change("alice", &["b"], 30).expect("counted already");
        change("alice", &["c"], 61).expect("a has left");
        refused(change("alice", &["d"], 61), "would make it 3");
    }

    #[test]
    fn checks_are_not_counted_and_what_is_held_can_be_given_back() {
        let alice = caller("alice", vec![rule("few", &["net_*"], Some(1))]);
        let (mut spent, now) = (Spent::default(), Instant::now());
        let mut permit = |keys: &[&str], how| spent.permit(&alice, keys, how, now);
        permit(&["net_a"], Use::Check).expect("one");
        permit(&["net_b"], Use::Check).expect("one");
        refused(permit(&["net_a", "net_b"], Use::Check), "would make it 2");
        permit(&["net_a"], Use::Change).expect("the first");
        refused(permit(&["net_b"], Use::Change), "would make it 2");
        permit(&["net_a", "net_b"], Use::GiveBack).expect("no cap applies");
        refused(permit(&["ext4_a"], Use::GiveBack), "does not cover");
    }

    #[test]
    fn a_rule_without_room_leaves_the_change_to_the_next() {
        let exhausted = ScopeRule {
            exhausted: "allows 1 guests in an hour".to_owned(),
            ..rule("few", &[], None)
        };
        let now = Instant::now();
        let alice = caller("alice", vec![exhausted.clone()]);
        let permit = |caller: &Caller, how| Spent::default().permit(caller, &["a"], how, now);
        refused(permit(&alice, Use::Change), "allows 1 guests in an hour");
        permit(&alice, Use::GiveBack).expect("no cap applies");
        let alice = caller("alice", vec![exhausted, rule("next", &[], Some(1))]);
        permit(&alice, Use::Change).expect("the next rule");
    }

    #[test]
    fn the_rules_of_the_caller_and_of_the_person_must_both_permit() {
        let scope = Scope {
            rules: vec![rule("fleet", &["net_*", "ext4_*"], Some(2))],
            person: Some(PersonScope {
                name: "alice".to_owned(),
                rules: vec![rule("net", &["net_*", "tcp_*"], Some(1))],
            }),
            ..Scope::default()
        };
        let fleet = Caller {
            scope: Some(Arc::new(KeyScope::new(scope).expect("good globs"))),
            ..Caller::from("fleet")
        };
        let (mut spent, now) = (Spent::default(), Instant::now());
        let mut permit = |keys: &[&str]| spent.permit(&fleet, keys, Use::Change, now);
        refused(permit(&["ext4_a"]), "alice");
        refused(permit(&["tcp_a"]), "fleet");
        permit(&["net_a"]).expect("both");
        // A change that only one of the two may make is counted for neither.
        refused(permit(&["net_b"]), "rule \"net\" allows 1 keys");
        permit(&["net_a"]).expect("counted already");
        let own = caller("fleet", vec![rule("fleet", &[], Some(2))]);
        spent
            .permit(&own, &["ext4_a"], Use::Change, now)
            .expect("one was counted");
        let own = caller("fleet", vec![rule("fleet", &[], Some(2))]);
        refused(
            spent.permit(&own, &["ext4_b"], Use::Change, now),
            "would make it 3",
        );
        let scope = Scope {
            rules: vec![rule("fleet", &[], None)],
            person: Some(PersonScope::default()),
            ..Scope::default()
        };
        let nobody = Caller {
            scope: Some(Arc::new(KeyScope::new(scope).expect("good globs"))),
            ..Caller::from("fleet")
        };
        refused(spent.permit(&nobody, &["a"], Use::Check, now), "no rule");
    }

    #[test]
    fn an_expired_assertion_permits_nothing() {
        let scope = |expires| {
            let rules = vec![rule("all", &[], None)];
            let scope = KeyScope::new(Scope {
                rules,
                expires,
                ..Scope::default()
            })
            .expect("no globs");
            Caller {
                name: "alice".to_owned(),
                person: None,
                scope: Some(Arc::new(scope)),
            }
        };
        let permit = |caller| Spent::default().permit(&caller, &["a"], Use::Check, Instant::now());
        refused(permit(scope(1)), "expired");
        permit(scope(i64::MAX)).expect("it lasts");
        let malformed = vec![rule("all", &["["], None)];
        let scope = Scope {
            rules: malformed,
            ..Scope::default()
        };
        assert!(KeyScope::new(scope).is_err());
    }
}
