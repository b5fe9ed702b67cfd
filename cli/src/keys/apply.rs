// SPDX-License-Identifier: Apache-2.0
//! Runs `patchbay keys apply` on files of changes and of states.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;
use std::path::Path;

use patchbay_proto::v1;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::change::make;
use super::class;
use crate::args::keys::{ChangeOptions, Class};
use crate::client::{Client, lists};
use crate::failure::Failure;
use crate::print::Answer;
use crate::print::counted;
use crate::view::{self, Applied};

const MAX_FILE_BYTES: u64 = 64 << 20;
const EXAMPLE: &str = "write for example [{\"key\": \"getppid_key\", \"op\": \"inc\"}], \
    [{\"patterns\": [\"net_*\"], \"op\": \"enable\"}], or what `patchbay keys list -o yaml` prints";

/// A file of entries.
#[derive(Debug)]
pub enum File {
    /// Entries that name no guest and apply to any guest.
    Entries(Vec<Entry>),
    /// The output of `keys list` for several guests.
    ByGuest(BTreeMap<String, Vec<Entry>>),
}

#[derive(Debug)]
pub enum Entry {
    Change(v1::KeyUpdate),
    /// The state that the key must have: on or off.
    State {
        name: String,
        enabled: bool,
    },
    /// The entries of one of several guests.
    Guest {
        name: String,
        entries: Vec<Entry>,
    },
}

/// Reads the op of an entry.
fn op<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<v1::KeyOp>, D::Error> {
    let op = match &*String::deserialize(deserializer)? {
        "inc" => v1::KeyOp::Inc,
        "dec" => v1::KeyOp::Dec,
        "enable" => v1::KeyOp::Enable,
        "disable" => v1::KeyOp::Disable,
        other => {
            let expected = &["inc", "dec", "enable", "disable"];
            return Err(D::Error::unknown_variant(other, expected));
        }
    };
    Ok(Some(op))
}

/// Every field that an entry of any kind may have.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    guest: Option<String>,
    result: Option<Vec<Entry>>,
    error: Option<IgnoredAny>,
    key: Option<String>,
    patterns: Option<Vec<String>>,
    classes: Option<Vec<Class>>,
    #[serde(default, deserialize_with = "op")]
    op: Option<v1::KeyOp>,
    /// The etag. Both changes and listed keys have one.
    etag: Option<String>,
    name: Option<String>,
    enabled: Option<bool>,
    // A listing contains these fields too; they are ignored.
    class: Option<IgnoredAny>,
    count: Option<IgnoredAny>,
    address: Option<IgnoredAny>,
    patchable_sites: Option<IgnoredAny>,
    site_count: Option<IgnoredAny>,
    initially_true: Option<IgnoredAny>,
    sealed: Option<IgnoredAny>,
    quarantine: Option<IgnoredAny>,
    holds: Option<IgnoredAny>,
    sites: Option<IgnoredAny>,
}

impl Fields {
    fn is_listed(&self) -> bool {
        let listed = [
            &self.class,
            &self.count,
            &self.address,
            &self.patchable_sites,
            &self.site_count,
            &self.initially_true,
            &self.sealed,
            &self.quarantine,
            &self.holds,
            &self.sites,
        ];
        self.name.is_some() || self.enabled.is_some() || listed.into_iter().any(Option::is_some)
    }

    fn entry(self) -> Result<Entry, &'static str> {
        const MIXED: &str = "the entry mixes {key, op, etag}, {patterns, classes, op} and \
            {name, enabled}; give the fields of one";
        let listed = self.is_listed();
        if self.guest.is_some() || self.result.is_some() || self.error.is_some() {
            return self.guest_entry(listed);
        }
        match self {
            Self {
                key: Some(name),
                op: Some(op),
                patterns: None,
                classes: None,
                etag,
                ..
            } if !listed => Ok(Entry::Change(v1::KeyUpdate {
                name,
                op: op.into(),
                etag: etag.unwrap_or_default(),
                ..Default::default()
            })),
            Self {
                patterns: Some(patterns),
                op: Some(op),
                key: None,
                etag: None,
                classes,
                ..
            } if !listed && !patterns.is_empty() => Ok(Entry::Change(v1::KeyUpdate {
                patterns,
                classes: classes.unwrap_or_default().iter().map(class).collect(),
                op: op.into(),
                ..Default::default()
            })),
            Self {
                name: Some(name),
                enabled: Some(enabled),
                key: None,
                patterns: None,
                classes: None,
                op: None,
                ..
            } => Ok(Entry::State { name, enabled }),
            Self {
                op: None,
                key: Some(_),
                ..
            }
            | Self {
                op: None,
                patterns: Some(_),
                ..
            } if !listed => Err("the entry has no op; give inc, dec, enable or disable"),
            Self {
                patterns: Some(patterns),
                ..
            } if patterns.is_empty() => Err("the entry has no pattern; give at least one"),
            Self {
                op: Some(_),
                key: None,
                patterns: None,
                ..
            } if !listed => Err("the entry has an op and no key; give key or patterns"),
            Self {
                key: None,
                patterns: None,
                op: None,
                classes: None,
                ..
            } => Err("the entry needs name and enabled, as `keys list` prints them"),
            _ => Err(MIXED),
        }
    }
}

impl Fields {
    fn guest_entry(self, listed: bool) -> Result<Entry, &'static str> {
        let own = self.key.is_some()
            || self.patterns.is_some()
            || self.classes.is_some()
            || self.op.is_some()
            || self.etag.is_some();
        match self {
            _ if listed || own => {
                Err("an entry with `guest` takes only `result`; remove its other fields")
            }
            Self { error: Some(_), .. } => Err(
                "the entry has an error instead of keys; remove the entry, or list the guest's keys again",
            ),
            Self {
                guest: Some(name),
                result: Some(entries),
                ..
            } => match entries
                .iter()
                .any(|entry| matches!(entry, Entry::Guest { .. }))
            {
                true => Err(
                    "the result of a guest contains another entry with `guest`; move that entry to the top level",
                ),
                false => Ok(Entry::Guest { name, entries }),
            },
            _ => Err("an entry with `guest` needs `result`, as `keys list -o yaml` prints it"),
        }
    }
}

/// Deserializes by a map visitor instead of `#[serde(try_from)]`, so that an error within an entry
/// has the entry's line number.
impl<'de> Deserialize<'de> for Entry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EntryVisitor;

        impl<'de> Visitor<'de> for EntryVisitor {
            type Value = Entry;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an entry with key and op")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Entry, A::Error> {
                let fields = Fields::deserialize(MapAccessDeserializer::new(map))?;
                fields.entry().map_err(serde::de::Error::custom)
            }
        }

        deserializer.deserialize_map(EntryVisitor)
    }
}

impl File {
    /// Reads a file of entries.
    ///
    /// # Errors
    /// The file cannot be read, is too large or is not a list of entries.
    pub fn read(path: &Path) -> Result<Self, Failure> {
        let name = path.display();
        let unreadable = |error: std::io::Error| {
            Failure::usage(format!(
                "{name} cannot be read: {error}; give a file of changes"
            ))
        };
        let mut text = String::new();
        let input: Box<dyn Read> = if path.as_os_str() == "-" {
            Box::new(std::io::stdin())
        } else {
            Box::new(std::fs::File::open(path).map_err(unreadable)?)
        };
        input
            .take(MAX_FILE_BYTES + 1)
            .read_to_string(&mut text)
            .map_err(unreadable)?;
        if text.len() as u64 > MAX_FILE_BYTES {
            return Err(Failure::usage(format!(
                "{name} has more than {} MiB; split it",
                MAX_FILE_BYTES >> 20
            )));
        }
        Self::parse(&text).map_err(|why| Failure::usage(format!("{name}: {why}; {EXAMPLE}")))
    }

    fn parse(text: &str) -> Result<Self, String> {
        // JSON is a subset of YAML.
        let entries: Vec<Entry> =
            serde_yaml_ng::from_str(text).map_err(|error| error.to_string())?;
        if entries.is_empty() {
            return Err("the file has no changes".to_owned());
        }
        let is_guest = |entry: &Entry| matches!(entry, Entry::Guest { .. });
        if !entries.iter().any(is_guest) {
            return Ok(Self::Entries(entries));
        }
        let mut guests = BTreeMap::new();
        for entry in entries {
            let Entry::Guest { name, entries } = entry else {
                return Err("some entries have `guest` and others do not; give it to all of them or to none".to_owned());
            };
            if guests.contains_key(&name) {
                return Err(format!(
                    "guest {name:?} occurs twice in the file; merge its entries"
                ));
            }
            guests.insert(name, entries);
        }
        Ok(Self::ByGuest(guests))
    }

    /// Returns the guests that the file names; empty if its entries name no guest.
    pub fn guests(&self) -> Vec<String> {
        match self {
            Self::Entries(_) => vec![],
            Self::ByGuest(guests) => guests.keys().cloned().collect(),
        }
    }

    /// Returns the entries for a guest.
    fn of(&self, guest: &str) -> Result<&[Entry], Failure> {
        match self {
            Self::Entries(entries) => Ok(entries),
            Self::ByGuest(guests) => match guests.get(guest) {
                Some(entries) => Ok(entries),
                None => Err(Failure::usage(format!(
                    "the file has no entry for guest {guest:?}; choose guests of the file with --guest, \
                     or all of them without it"
                ))),
            },
        }
    }
}

/// Makes all changes of a file, or none.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
pub async fn apply(
    client: &Client,
    file: &File,
    options: &ChangeOptions,
) -> Result<Answer<Applied>, Failure> {
    let entries = file.of(client.guest_name())?;
    let states = |entry: &Entry| matches!(entry, Entry::State { .. });
    let enabled = if entries.iter().any(states) {
        let keys = lists::keys(client, v1::ListStaticKeysRequest::default())
            .await?
            .keys;
        keys.into_iter()
            .map(|key| (key.name, key.enabled))
            .collect()
    } else {
        std::collections::HashMap::new()
    };
    let mut updates = vec![];
    for entry in entries {
        match entry {
            // This case does not occur, because the parser has split the file by guest and refuses
            // nested entries of guests.
            Entry::Guest { .. } => {}
            Entry::Change(update) => updates.push(update.clone()),
            Entry::State {
                name,
                enabled: wanted,
            } if enabled.get(name) == Some(wanted) => {}
            // An entry for a key that does not exist is passed on too, because the service's error
            // suggests similar names.
            Entry::State {
                name,
                enabled: wanted,
            } => updates.push(v1::KeyUpdate {
                name: name.clone(),
                op: match wanted {
                    true => v1::KeyOp::Enable.into(),
                    false => v1::KeyOp::Disable.into(),
                },
                ..Default::default()
            }),
        }
    }
    let skipped = entries.len() - updates.len();
    if updates.is_empty() {
        let are = are_as(skipped);
        let remarks = vec![format!("nothing to change: {are} as the file says")];
        return Ok(Answer {
            value: Applied::Update(view::Update::default()),
            undone: None,
            remarks,
        });
    }
    let mut answer = make(client, updates, options).await?;
    if skipped > 0 {
        let are = are_as(skipped);
        answer.remarks = vec![format!("{are} as the file says already")];
    }
    Ok(answer)
}

/// Returns "1 key is" or "2 keys are".
fn are_as(count: usize) -> String {
    let verb = if count == 1 { "is" } else { "are" };
    format!("{} {verb}", counted(count as u64, "key"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        File::parse(text).expect_err(text)
    }

    #[test]
    fn each_kind_of_entry_is_read() {
        let text = "- {key: alpha, op: inc, etag: x}\n\
            - {patterns: ['b*', '!bad'], classes: [ref, tracepoint], op: disable}\n\
            - name: gamma\n  class: ref\n  count: 1\n  enabled: true\n  etag: y\n";
        let Ok(File::Entries(entries)) = File::parse(text) else {
            panic!("three entries")
        };
        let [
            Entry::Change(key),
            Entry::Change(patterns),
            Entry::State { name, enabled },
        ] = entries.as_slice()
        else {
            panic!("{entries:?}")
        };
        assert_eq!(
            (key.name.as_str(), key.op(), key.etag.as_str()),
            ("alpha", v1::KeyOp::Inc, "x")
        );
        assert_eq!(patterns.patterns, ["b*", "!bad"]);
        assert_eq!(
            (patterns.classes.as_slice(), patterns.op()),
            (&[2, 3][..], v1::KeyOp::Disable)
        );
        assert_eq!((name.as_str(), *enabled), ("gamma", true));
    }

    #[test]
    fn a_wrong_entry_is_refused_with_its_line() {
        let good = "- {key: a, op: inc}\n- {key: b, op: inc}\n";
        for bad in [
            "- {key: a, op: inc, patterns: [b]}",
            "- {patterns: [b], op: inc, etag: x}",
            "- {patterns: [], op: inc}",
            "- {classes: [ref], op: inc}",
            "- {key: a, op: inc, classes: [ref]}",
            "- {key: a, op: inc, enabled: true}",
            "- {key: a, op: inc, count: 1}",
            "- {name: a, enabled: true, op: inc}",
            "- {name: a}",
            "- {enabled: true}",
            "- {key: a}",
            "- {op: inc}",
            "- {}",
            "- {key: a, op: toggle}",
            "- {key: a, op: inc, extra: 1}",
            "- {name: a, enabled: true, extra: 1}",
            "- {guest: g}",
            "- {result: [{name: a, enabled: true}]}",
            "- {guest: g, error: {message: gone, exit_code: 1}}",
            "- {guest: g, result: [{name: a, enabled: true}], key: a}",
            "- {guest: g, result: [{guest: h, result: [{name: a, enabled: true}]}]}",
            "- {guest: g, result: [{name: a}]}",
            "- key",
        ] {
            let why = refused(&format!("{good}{bad}\n"));
            assert!(why.contains("line 3"), "{bad}: {why}");
        }
        for bad in ["", "[]", "{}", "\u{1}"] {
            refused(bad);
        }
    }

    #[test]
    fn a_file_is_for_some_guests_or_for_whichever() {
        let guest = "- {guest: g, result: [{name: a, enabled: true}]}\n";
        let file = File::parse(guest).expect("one guest");
        assert_eq!(file.guests(), ["g"]);
        assert_eq!(file.of("g").expect("its entries").len(), 1);
        file.of("h").expect_err("not in the file");
        let any = File::parse("- {key: a, op: inc}\n").expect("one change");
        assert!(any.guests().is_empty() && any.of("h").is_ok());
        refused(&format!("{guest}- {{key: a, op: inc}}\n"));
        refused(&format!("{guest}{guest}"));
    }
}
