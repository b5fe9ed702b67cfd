// SPDX-License-Identifier: Apache-2.0
//! Selects the guests that a principal may see, and hides all others.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};

use patchbay_access::policy::Policy;

use crate::authority::may_view;
use crate::rollout::{Member, Rollout};

/// The text that is shown instead of a text that names a guest that the principal may not see.
const HIDDEN: &str = "about guests that you may not see";

/// A principal's view of guests, for one answer.
pub struct Sight<'p> {
    policy: &'p Policy,
    principal: &'p str,
    /// True if no rule restricts the guests.
    pub sees_all: bool,
    /// The decisions so far, by the name of the guest.
    known: RefCell<HashMap<String, bool>>,
}

/// The names of members that the principal may not see.
pub struct Hidden<'r> {
    names: HashSet<&'r str>,
    /// The hidden names that are not single words. They are searched for as substrings.
    odd: Vec<&'r str>,
}

impl<'p> Sight<'p> {
    /// Creates the view of a principal.
    pub fn new(policy: &'p Policy, principal: &'p str) -> Self {
        Self {
            policy,
            principal,
            sees_all: !policy.limits_guests(),
            known: RefCell::default(),
        }
    }

    /// Returns whether the principal may see the guest.
    pub fn sees(&self, guest: &str) -> bool {
        if self.sees_all {
            return true;
        }
        if let Some(sees) = self.known.borrow().get(guest) {
            return *sees;
        }
        let sees = may_view(self.policy, self.principal, Some(guest)).is_ok();
        self.known.borrow_mut().insert(guest.to_owned(), sees);
        sees
    }

    /// Returns whether the principal may see at least one of the rollout's guests.
    pub fn sees_rollout(&self, rollout: &Rollout) -> bool {
        let mut members = rollout.members().iter();
        self.sees_all || rollout.members().is_empty() || members.any(|one| self.sees(&one.guest))
    }

    /// Returns the members that the principal may see.
    pub fn of<'m>(&self, members: &'m [Member]) -> impl Iterator<Item = &'m Member> {
        members.iter().filter(|member| self.sees(&member.guest))
    }

    /// Returns the names of the members that the principal may not see.
    pub fn hidden<'r>(&self, rollout: &'r Rollout) -> Hidden<'r> {
        let members = rollout.members().iter().map(|member| member.guest.as_str());
        let names: HashSet<&str> = members.filter(|guest| !self.sees(guest)).collect();
        let odd = names.iter().filter(|name| !name.chars().all(is_of_word));
        Hidden {
            odd: odd.copied().collect(),
            names,
        }
    }
}

impl Hidden<'_> {
    /// Returns whether the text names a hidden guest.
    pub fn is_named_in(&self, text: &str) -> bool {
        let mut words = text.split(|c| !is_of_word(c));
        let ends = ['.', '-', '_'];
        words.any(|word| {
            self.names.contains(word) || self.names.contains(word.trim_end_matches(ends))
        }) || self.odd.iter().any(|name| text.contains(name))
    }

    /// Returns the text, or a placeholder if it names a hidden guest.
    pub fn shown(&self, text: &str) -> String {
        match self.is_named_in(text) {
            true => HIDDEN.to_owned(),
            false => text.to_owned(),
        }
    }
}

fn is_of_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_')
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: &str =
        "rules: [{name: web, principals: [alice], role: viewer, guests: ['web-*']}]";

    #[test]
    fn a_viewer_of_some_guests_sees_no_others() {
        let policy = Policy::parse(POLICY).expect("a policy");
        let sight = Sight::new(&policy, "alice");
        for _ in 0..2 {
            assert!(sight.sees("web-1") && !sight.sees("db-1"));
        }
        assert!(!Sight::new(&policy, "bob").sees("web-1"));
        let policy = POLICY.replace(", guests: ['web-*']", "");
        let policy = Policy::parse(&policy).expect("a policy");
        assert!(Sight::new(&policy, "alice").sees("db-1"));
    }

    #[test]
    fn texts_that_name_hidden_guests_are_not_shown() {
        let hidden = Hidden {
            names: HashSet::from(["db-1", "a", "x:y"]),
            odd: vec!["x:y"],
        };
        for text in [
            "db-1",
            "guest \"db-1\" failed",
            "paused at db-1.",
            "on a: no",
            "of x:y!",
        ] {
            assert_eq!(hidden.shown(text), HIDDEN, "{text}");
        }
        for text in ["web-1", "db-10 failed", "wave 1 has begun", ""] {
            assert_eq!(hidden.shown(text), text);
        }
    }
}
