// SPDX-License-Identifier: Apache-2.0
//! Knowledge about guarded keys of Linux: the differences between a flip from outside and the
//! guest's own change.
//!
//! The catalogue `advice/guarded.yaml` is data. It is compiled into this program and parsed once.
//! It records what the kernel's source and trials show; it grants no permission.

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
    /// The condition, or the effect of the flip.
    pub text: String,
    /// Files and functions of Linux that prove the text.
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

/// A trial: keys that were flipped in a guest under load, and flipped back after `seconds`.
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
    /// Prefixes of names, with indices in `advice`.
    beginnings: Vec<(String, usize)>,
    /// Descriptions of the trials, by name of the key.
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
    /// Returns the total length of the texts in bytes.
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

    /// Returns the entry for a key of the kernel image. An entry for the full name takes precedence
    /// over an entry for a prefix.
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

/// The catalogue, parsed at the first use. A test checks that it is well-formed.
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

/// Returns the entry for a key in a kernel of this release; `None` for a key that is not guarded,
/// and for a key of a module.
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
