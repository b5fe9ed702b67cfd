// SPDX-License-Identifier: Apache-2.0
//! Records how long each test took when it last ran. The longest tests start first, so that no
//! worker still runs a long test while the others are idle.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;

use crate::cache;
use crate::test_runner::Test;

/// Durations by the tests' full names, in milliseconds, and the file that stores them.
pub struct Durations {
    file: PathBuf,
    milliseconds: BTreeMap<String, u64>,
}

impl Durations {
    /// Reads the durations of this user's last run, in this clone or another one.
    pub fn of_the_last_run() -> Result<Self> {
        Ok(Self::of(&cache::root()?.join("test-durations.json")))
    }

    /// Reads a file. If the file is missing, or is not one that [`Self::save`] writes, there are no
    /// durations.
    pub fn of(file: &Path) -> Self {
        let text = std::fs::read(file).unwrap_or_default();
        Self {
            file: file.to_owned(),
            milliseconds: serde_json::from_slice(&text).unwrap_or_default(),
        }
    }

    pub fn add(&mut self, test: &Test, time: Duration) {
        let milliseconds = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        self.milliseconds.insert(test.full_name(), milliseconds);
    }

    /// Orders tests that have not run yet before those that took longest.
    pub fn compare(&self, one: &Test, other: &Test) -> Ordering {
        let of = |test: &Test| self.milliseconds.get(&test.full_name()).copied();
        let of = |test| of(test).unwrap_or(u64::MAX);
        of(other).cmp(&of(one))
    }

    /// Writes the file. If that fails, the next run is only slower.
    pub fn save(&self) {
        let text = serde_json::to_vec(&self.milliseconds).unwrap_or_default();
        if let Err(error) = std::fs::write(&self.file, text) {
            eprintln!("{} cannot be written: {error}", self.file.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test(name: &str) -> Test {
        Test {
            suite: "s".into(),
            name: name.into(),
            ..Test::default()
        }
    }

    #[test]
    fn new_tests_come_first_and_then_the_longest() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("durations");
        let mut durations = Durations::of(&file);
        durations.add(&test("short"), Duration::from_millis(5));
        durations.add(&test("long"), Duration::from_secs(44));
        let again = Test {
            with: Some("Linux 6.1".into()),
            ..test("short")
        };
        durations.add(&again, Duration::from_secs(7));
        durations.save();

        let durations = Durations::of(&file);
        let mut tests = [test("short"), again, test("new"), test("long")];
        tests.sort_by(|one, other| durations.compare(one, other));
        let names = tests.map(|test| test.full_name());
        assert_eq!(names, ["s new", "s long", "s short (Linux 6.1)", "s short"]);

        std::fs::write(&file, "{\"s long\": \"x\"}").unwrap();
        assert!(Durations::of(&file).milliseconds.is_empty());
    }
}
