// SPDX-License-Identifier: Apache-2.0
//! Prints the differences between a rollout and a spec.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use patchbay_proto::fleet::v1;
use serde::Serialize;

use super::print::and_more;
use super::view::Rollout;
use crate::failure::{DRIFT, Failure};
use crate::print::{Printable, counted};

/// The number of guests that are named for each change of a wave. JSON contains all of them.
const SHOWN_GUESTS: usize = 10;
/// The number of keys that are shown. JSON contains all of them.
const SHOWN_KEYS: usize = 50;

#[derive(Debug, Serialize)]
pub struct Diff {
    pub rollout: String,
    /// The phase of the rollout.
    pub phase: String,
    pub keys: Vec<Key>,
    pub guests: Vec<Guest>,
    pub fields: Vec<Field>,
}

#[derive(Debug, Serialize)]
pub struct Key {
    pub key: String,
    pub before: String,
    pub after: String,
    pub guests: u32,
}

#[derive(Debug, Serialize)]
pub struct Guest {
    pub host: String,
    pub guest: String,
    pub before: String,
    pub after: String,
    pub message: String,
}

#[derive(Debug, Serialize)]
pub struct Field {
    pub field: String,
    pub before: String,
    pub after: String,
}

impl Diff {
    /// Returns a failure with exit code 4 if there is a difference.
    pub fn check(&self) -> Result<(), Failure> {
        match self.keys.len() + self.guests.len() + self.fields.len() {
            0 => Ok(()),
            count => Err(Failure::new(
                DRIFT,
                format!(
                    "{} from rollout {}; plan the spec under another --name, or undo and delete \
                     the rollout first",
                    counted(count as u64, "difference"),
                    self.rollout
                ),
            )),
        }
    }
}

impl Printable for Diff {
    fn table(&self) -> String {
        let (name, phase) = (&self.rollout, &self.phase);
        if self.keys.is_empty() && self.guests.is_empty() && self.fields.is_empty() {
            return format!("{name} is {phase}; the spec would change nothing\n");
        }
        let mut text = format!("{name} is {phase}; the spec would change:\n");
        for key in self.keys.iter().take(SHOWN_KEYS) {
            let (before, after) = (or_none(&key.before), or_none(&key.after));
            let guests = counted(key.guests.into(), "guest");
            let _ = writeln!(text, "  key {}: {before} -> {after} on {guests}", key.key);
        }
        if self.keys.len() > SHOWN_KEYS {
            let more = self.keys.len() - SHOWN_KEYS;
            let _ = writeln!(text, "  and {more} more keys");
        }
        let mut moves: BTreeMap<(&str, &str, &str), Vec<&Guest>> = BTreeMap::new();
        for guest in &self.guests {
            let kind = (&*guest.before, &*guest.after, &*guest.message);
            moves.entry(kind).or_default().push(guest);
        }
        for ((before, after, why), guests) in moves {
            let wave = |name: &str| match name {
                "" => "no wave".to_owned(),
                name => format!("wave {name}"),
            };
            let shown = guests.iter().take(SHOWN_GUESTS);
            let shown: Vec<String> = shown
                .map(|guest| format!("{} on {}", guest.guest, guest.host))
                .collect();
            let more = and_more(guests.len() - shown.len());
            let (before, after, shown) = (wave(before), wave(after), shown.join(", "));
            let _ = write!(text, "  {before} -> {after}: {shown}{more}");
            let _ = match why {
                "" => writeln!(text),
                why => writeln!(text, " ({why})"),
            };
        }
        for field in &self.fields {
            for (sign, value) in [("-", &field.before), ("+", &field.after)] {
                if !value.is_empty() {
                    let _ = writeln!(text, "  {sign} {}: {value}", field.field);
                }
            }
        }
        text
    }

    fn names(&self) -> Vec<&str> {
        vec![&self.rollout]
    }
}

fn or_none(want: &str) -> &str {
    match want {
        "" => "not claimed",
        want => want,
    }
}

impl From<v1::DiffResponse> for Diff {
    fn from(answer: v1::DiffResponse) -> Self {
        let rollout = Rollout::from(answer.rollout.unwrap_or_default());
        let keys = answer.keys.into_iter().map(|key| Key {
            key: key.key,
            before: key.before,
            after: key.after,
            guests: key.guests,
        });
        let guests = answer.guests.into_iter().map(|guest| Guest {
            host: guest.host,
            guest: guest.guest,
            before: guest.before,
            after: guest.after,
            message: guest.message,
        });
        let fields = answer.fields.into_iter().map(|field| Field {
            field: field.field,
            before: field.before,
            after: field.after,
        });
        Self {
            rollout: rollout.name,
            phase: rollout.phase,
            keys: keys.collect(),
            guests: guests.collect(),
            fields: fields.collect(),
        }
    }
}
