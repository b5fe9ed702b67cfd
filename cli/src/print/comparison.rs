// SPDX-License-Identifier: Apache-2.0
//! Prints the effects of keys on a command.

use patchbay_ci::compare::{Compared, Comparison, Verdict, percent, short};

use super::{Printable, Rows};

impl Printable for Comparison {
    fn rows(&self) -> Rows {
        let mut rows = Rows::new(&[
            "KEY", "ON/OFF", "INTERVAL", "LEVEL", "RUNS", "OFF", "ON", "RESULT",
        ]);
        for key in &self.keys {
            rows.push(row(key));
        }
        rows
    }

    fn footer(&self) -> String {
        let incomplete = match &self.ended_early {
            Some(early) => format!("incomplete: {}\n", early.why),
            None => String::new(),
        };
        format!(
            "{incomplete}{}; {} confidence for all keys together; {} runs, {} boot{}, seed {}\n",
            self.measure,
            percent(self.confidence),
            self.runs,
            self.boots,
            if self.boots == 1 { "" } else { "s" },
            self.seed
        )
    }

    fn names(&self) -> Vec<&str> {
        let found = self.keys.iter().filter(|key| key.is_difference());
        found.map(|key| key.name.as_str()).collect()
    }
}

fn row(key: &Compared) -> [String; 8] {
    let result = match key.result {
        Verdict::Difference => "difference".to_owned(),
        Verdict::NoDifference => "no difference found".to_owned(),
        Verdict::Undecided => "undecided".to_owned(),
        Verdict::Failed => format!("failed: {}", key.why),
        Verdict::Skipped => format!("skipped: {}", key.why),
    };
    let mut row = std::array::from_fn(|_| "-".to_owned());
    row[0].clone_from(&key.name);
    if let Some(figures) = &key.figures {
        let high = figures.high.map_or_else(|| "∞".to_owned(), short);
        row[1] = short(figures.ratio);
        row[2] = format!("{} to {high}", short(figures.low));
        row[3] = percent(figures.level);
    }
    if let Some(measured) = &key.measured {
        row[4] = measured.runs.to_string();
        row[5] = short(measured.median_off);
        row[6] = short(measured.median_on);
    }
    row[7] = result;
    row
}
