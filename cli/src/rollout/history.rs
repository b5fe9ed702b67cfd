// SPDX-License-Identifier: Apache-2.0
//! Prints the timeline of a rollout.

use serde::Serialize;

use super::view::TimelineEntry;
use crate::print::{Printable, Rows, or_dash};

#[derive(Debug, Serialize)]
#[serde(transparent)]
pub struct History {
    entries: Vec<TimelineEntry>,
    /// The positions of the entries, by which webhooks name them; 0 in an entry of an earlier
    /// version.
    #[serde(skip)]
    numbers: Vec<String>,
}

impl From<Vec<TimelineEntry>> for History {
    fn from(entries: Vec<TimelineEntry>) -> Self {
        let numbers = entries.iter().map(|entry| entry.number.to_string());
        Self {
            numbers: numbers.collect(),
            entries,
        }
    }
}

impl Printable for History {
    fn rows(&self) -> Rows {
        let mut rows = Rows::new(&["NUMBER", "TIME", "WHO", "PHASE", "WHAT"]);
        for (entry, number) in self.entries.iter().zip(&self.numbers) {
            let who = match entry.principal.as_str() {
                "" => "controller",
                principal => principal,
            };
            rows.push([
                number.clone(),
                entry.time.to_string(),
                who.to_owned(),
                or_dash(&entry.phase).to_owned(),
                entry.text.clone(),
            ]);
        }
        rows
    }

    fn names(&self) -> Vec<&str> {
        self.numbers.iter().map(String::as_str).collect()
    }
}
