// SPDX-License-Identifier: Apache-2.0
//! Finds what a rule lacks to allow a call.

use std::cmp::Reverse;

use super::Role;
use super::decide::{Question, Want};
use super::file::Rule;

/// The first condition that a rule does not meet. A rule that lacks an earlier variant is closer to
/// allowing the call, and the closest rule explains a refusal best.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Lack {
    AnyKeys,
    TooManyKeys { given: usize, most: usize },
    TooManyGuests { given: usize, most: usize },
    Key(String),
    Guest(String),
    Role { has: Reverse<Role>, needs: Role },
    Principal,
}

impl Rule {
    pub(super) fn lacks(&self, question: &Question<'_>) -> Option<Lack> {
        self.lacks_rights(question)
            .or_else(|| self.lacks_room(question))
    }

    pub(super) fn lacks_rights(&self, question: &Question<'_>) -> Option<Lack> {
        if !self.principals.select_path(question.principal) {
            return Some(Lack::Principal);
        }
        if self.role < question.role {
            let (has, needs) = (Reverse(self.role), question.role);
            return Some(Lack::Role { has, needs });
        }
        let mut guests = question.guests.iter();
        if let Some(guest) = guests.find(|guest| !self.guests.select_whole(guest)) {
            return Some(Lack::Guest((*guest).to_owned()));
        }
        if matches!(question.want, Want::AnyKeys) && self.limits_keys() {
            return Some(Lack::AnyKeys);
        }
        let mut keys = question.want.keys().iter();
        let key = keys.find(|key| !self.keys.select_full(key))?;
        Some(Lack::Key((*key).to_owned()))
    }

    /// Returns the cap that this change alone exceeds; `None` if it exceeds none.
    fn lacks_room(&self, question: &Question<'_>) -> Option<Lack> {
        let keys = question.want.keys();
        if let Some(most) = self.max_guests.filter(|&most| question.guests.len() > most) {
            let given = question.guests.len();
            return Some(Lack::TooManyGuests { given, most });
        }
        if let Some(most) = self.max_keys.filter(|&most| keys.len() > most) {
            let given = keys.len();
            return Some(Lack::TooManyKeys { given, most });
        }
        None
    }

    pub(super) fn limits_keys(&self) -> bool {
        !self.keys.texts().is_empty() || self.max_keys.is_some()
    }
}

impl Lack {
    pub(super) fn sentence(&self) -> String {
        match self {
            Self::AnyKeys => "does not cover every key".to_owned(),
            Self::TooManyKeys { given, most } => {
                format!("allows {most} keys in an hour, and this change would make it {given}")
            }
            Self::TooManyGuests { given, most } => {
                format!("allows {most} guests in an hour, and this change would make it {given}")
            }
            Self::Key(key) => format!("does not cover key {key:?}"),
            Self::Guest(guest) => format!("does not cover guest {guest:?}"),
            Self::Role {
                has: Reverse(has),
                needs,
            } => format!("gives the role {has}, and {needs} is needed"),
            Self::Principal => "does not name the principal".to_owned(),
        }
    }
}
