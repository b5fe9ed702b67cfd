// SPDX-License-Identifier: Apache-2.0
//! Knowledge about guarded keys of Linux: the differences between a flip from outside and the
//! guest's own change.
//!
//! The catalogue `advice/guarded.yaml` is data. It is part of this program, and is read once. It
//! says what was read in the kernel's source and what was tried; it permits nothing.

use std::collections::HashMap;
use std::sync::LazyLock;

use serde::Deserialize;
use static_keys::{Class, Key};

use super::declared::{KernelRange, Text};

/// The catalogue of guarded keys.
const GUARDED: &str = include_str!("advice/guarded.yaml");

/// The safety of a flip from outside.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Safety {
    /// The code behind the branch needs no preparation.
    Safe,
    /// Safe under the condition in the text.
    Conditional,
    /// Needs state that only the guest's own code sets up.
    GuestState,
    /// The guest crashes, corrupts its memory, or reports a fault.
    Crashes,
}

/// Knowledge about a guarded key in a range of kernels.
#[derive(Debug)]
pub struct Advice {
    /// The safety of a flip.
    pub safety: Safety,
    /// The condition, or what happens.
    pub text: String,
    /// Files and functions of Linux that prove it.
    pub source: String,
    kernel: KernelRange,
}

/// The result of a trial: a guest with one key flipped.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// The guest continued without an error message.
    Fine,
    /// The service refused the change.
    Refused,
    /// The guest's kernel printed an error message.
    Complained,
    /// The guest no longer answered.
    Died,
}

impl Outcome {
    fn words(self) -> &'static str {
        match self {
            Self::Fine => "the guest went on without a complaint",
            Self::Refused => "refused",
            Self::Complained => "the guest's kernel complained",
            Self::Died => "the guest died",
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Contents {
    kernel: KernelRange,
    entries: Vec<Entry>,
    trials: Vec<Trial>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    keys: Vec<Text>,
    kernel: Option<KernelRange>,
    safety: Safety,
    text: Text,
    source: Text,
}

/// Keys that were flipped in a loaded guest for some time, and back.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Trial {
    kernel: Text,
    seconds: u32,
    outcome: Outcome,
    keys: Vec<Text>,
}

/// The entries and trials of a catalogue.
#[derive(Debug, Default)]
struct Catalogue {
    advice: Vec<Advice>,
    /// Indices in `advice`, by name.
    names: HashMap<String, Vec<usize>>,
    /// The beginnings of names, and indices in `advice`.
    beginnings: Vec<(String, usize)>,
    /// Sentences by name.
    trials: HashMap<String, String>,
}

/// Advice about one key.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    /// The entry.
    pub advice: &'static Advice,
    /// The trials with the key, in sentences; empty if there were none.
    pub tried: &'static str,
}

impl Known {
    /// Bytes of its texts.
    pub(super) fn text_bytes(self) -> usize {
        self.advice.text.len() + self.advice.source.len() + self.tried.len()
    }
}

impl Catalogue {
    fn read(text: &str) -> Result<Self, serde_yaml_ng::Error> {
        let contents: Contents = serde_yaml_ng::from_str(text)?;
        let mut catalogue = Self::default();
        for entry in contents.entries {
            let index = catalogue.advice.len();
            catalogue.advice.push(Advice {
                safety: entry.safety,
                text: entry.text.0,
                source: entry.source.0,
                kernel: entry.kernel.unwrap_or_else(|| contents.kernel.clone()),
            });
            for Text(key) in entry.keys {
                match key.strip_suffix('*') {
                    Some(beginning) => catalogue.beginnings.push((beginning.to_owned(), index)),
                    None => catalogue.names.entry(key).or_default().push(index),
                }
            }
        }
        for trial in contents.trials {
            for Text(key) in trial.keys {
                let said = catalogue.trials.entry(key).or_default();
                if !said.is_empty() {
                    said.push_str("; ");
                }
                *said += &format!(
                    "flipped for {} s in {}: {}",
                    trial.seconds,
                    trial.kernel.0,
                    trial.outcome.words()
                );
            }
        }
        Ok(catalogue)
    }

    /// Returns the entry for a key of the kernel image. A whole name precedes the beginning of one.
    fn find(&self, name: &str, release: &str) -> Option<&Advice> {
        let named = self.names.get(name).into_iter().flatten().copied();
        let begun = self
            .beginnings
            .iter()
            .filter(|(beginning, _)| name.starts_with(&**beginning))
            .map(|(_, index)| *index);
        named
            .chain(begun)
            .filter_map(|index| self.advice.get(index))
            .find(|advice| advice.kernel.includes(release, ""))
    }
}

/// Read at the first use; a test proves that it can be read.
static CATALOGUE: LazyLock<Catalogue> = LazyLock::new(|| {
    Catalogue::read(GUARDED).unwrap_or_else(|error| {
        tracing::error!(%error, "the catalogue of guarded keys cannot be read");
        Catalogue::default()
    })
});

/// Reads the catalogue before the first call needs it.
pub(super) fn load() {
    LazyLock::force(&CATALOGUE);
}

/// Returns the entry for a key in a kernel of this release; `None` for keys that are not guarded,
/// and for those of modules.
pub(super) fn of(key: &Key, release: &str) -> Option<Known> {
    if key.class != Class::Guarded || !key.module().is_empty() {
        return None;
    }
    let advice = CATALOGUE.find(&key.full_name, release)?;
    let tried = CATALOGUE.trials.get(&*key.full_name);
    Some(Known {
        advice,
        tried: tried.map_or("", String::as_str),
    })
}

#[cfg(test)]
mod tests;
