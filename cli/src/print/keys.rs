// SPDX-License-Identifier: Apache-2.0
//! Prints keys, changes and holds.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{Printable, Rows, counted, or_dash};
use crate::text::one_line;
use crate::view;

impl Printable for Vec<view::ListedKey> {
    fn rows(&self) -> Rows {
        let mut rows = Rows::new(&["NAME", "CLASS", "COUNT", "SITES", "HOLDS", "NOTES"]);
        for key in self {
            rows.push([
                key.name.clone(),
                key.class.to_owned(),
                key.count.to_string(),
                format!("{}/{}", key.patchable_sites, key.site_count),
                key.holds.to_string(),
                notes(key),
            ]);
        }
        rows
    }

    fn nouns(&self) -> Option<&'static str> {
        Some("keys")
    }

    fn names(&self) -> Vec<&str> {
        self.iter().map(|key| key.name.as_str()).collect()
    }
}

fn notes(key: &view::ListedKey) -> String {
    let safety = key.advice.as_ref().map(|advice| advice.safety);
    let safety = safety.map_or(String::new(), |safety| format!("flip: {safety}"));
    let notes = [
        (key.initially_true, "initially true"),
        (key.sealed, "sealed"),
        (!key.quarantine.is_empty(), "quarantined"),
        (!safety.is_empty(), &safety),
    ];
    let notes: Vec<&str> = notes
        .into_iter()
        .filter(|(holds, _)| *holds)
        .map(|(_, note)| note)
        .collect();
    notes.join(", ")
}

/// Keys with their sites.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub struct Detailed(pub Vec<view::ListedKey>);

const SITE_HEADER: [&str; 7] = [
    "ADDRESS",
    "FUNCTION",
    "BYTES",
    "INSTRUCTION",
    "OTHER BYTES",
    "OTHER INSTRUCTION",
    "NOTES",
];

impl Printable for Detailed {
    fn rows(&self) -> Rows {
        let mut rows = Rows::new(&["KEY"]);
        rows.header.extend(SITE_HEADER);
        for key in &self.0 {
            for site in &key.sites {
                rows.push([key.name.clone()].into_iter().chain(site_row(site)));
            }
        }
        rows
    }

    fn table(&self) -> String {
        self.0.iter().map(detailed).collect::<Vec<_>>().join("\n")
    }

    fn names(&self) -> Vec<&str> {
        self.0.names()
    }
}

fn detailed(key: &view::ListedKey) -> String {
    let mut out = format!(
        "{}: {}, count {}, {} class\n  struct static_key at {}, etag {}\n  {} of {} sites patchable, {} held by clients\n",
        key.name,
        if key.enabled { "on" } else { "off" },
        key.count,
        key.class,
        key.address,
        key.etag,
        key.patchable_sites,
        key.site_count,
        key.holds,
    );
    let notes = notes(key);
    if !notes.is_empty() {
        out += &format!("  {notes}\n");
    }
    if !key.quarantine.is_empty() {
        out += &format!("  {}\n", key.quarantine);
    }
    if let Some(advice) = &key.advice {
        out += &format!("  {}: {}\n", advice.safety, advice.message);
        out += &format!("  source: {}\n", advice.source);
        if !advice.tried.is_empty() {
            out += &format!("  tried: {}\n", advice.tried);
        }
    }
    if key.sites.is_empty() {
        return out;
    }
    let mut rows = Rows::new(&SITE_HEADER);
    for site in &key.sites {
        rows.push(site_row(site));
    }
    for line in rows.text().lines() {
        out += &format!("  {line}\n");
    }
    out
}

fn site_row(site: &view::Site) -> [String; 7] {
    let mut notes = vec![];
    if site.likely {
        notes.push("likely".to_owned());
    }
    if !site.not_patchable.is_empty() {
        notes.push(format!("not patched: {}", site.not_patchable));
    }
    [
        site.address.clone(),
        or_dash(&site.symbol).to_owned(),
        site.bytes.clone(),
        site.disassembly.clone(),
        or_dash(&site.other_bytes).to_owned(),
        or_dash(&site.other_disassembly).to_owned(),
        notes.join(", "),
    ]
}

fn change_rows(changes: &[view::KeyChange]) -> Rows {
    let mut rows = Rows::new(&["NAME", "COUNT", "SITES PATCHED"]);
    for change in changes {
        rows.push([
            change.name.clone(),
            format!("{} -> {}", change.before, change.after),
            change.sites_patched.to_string(),
        ]);
    }
    rows
}

/// Returns "2 of 3 keys changed", and the number of keys that patterns left out.
fn changed(verb: &str, changed: u32, keys: u32, left_out: u32) -> String {
    let mut out = format!("{changed} of {} {verb}", counted(keys.into(), "key"));
    if left_out > 0 {
        let are = match left_out {
            1 => "matches and is",
            _ => "match and are",
        };
        out += &format!(
            "; {left_out} more {are} left out: sealed, of class never, or guarded without --allow-guarded"
        );
    }
    out + "\n"
}

/// Returns the advice on the changed guarded keys, with one line for all keys that have the same
/// advice. Keys that are safe to change are left out.
fn warnings(changes: &[view::KeyChange]) -> String {
    let mut by_text: BTreeMap<(&str, &str), Vec<&str>> = BTreeMap::new();
    for change in changes {
        if let Some(advice) = change.advice.as_ref().filter(|of| of.safety != "safe") {
            let names = by_text.entry((advice.safety, &advice.message)).or_default();
            names.push(&change.name);
        }
    }
    by_text
        .into_iter()
        .map(|((safety, message), names)| {
            let more = match names.len() {
                1 => String::new(),
                others => format!(" and {} more", others - 1),
            };
            format!("{safety}: {}{more}: {message}\n", names[0])
        })
        .collect()
}

impl Printable for view::Update {
    fn rows(&self) -> Rows {
        change_rows(&self.results)
    }

    fn footer(&self) -> String {
        let mut out = changed("changed", self.keys_changed, self.keys, self.keys_left_out);
        if self.paused {
            let tries = if self.attempts > 1 {
                format!(", {} attempts", self.attempts)
            } else {
                String::new()
            };
            out += &format!(
                "{} patched; stop {:.1} us, patch {:.1} us, resume {:.1} us{tries}\n",
                counted(self.sites_patched.into(), "site"),
                self.stop_us,
                self.patch_us,
                self.resume_us
            );
        } else {
            out += "no site had to be patched: the guest was not stopped\n";
        }
        out
    }

    fn names(&self) -> Vec<&str> {
        change_names(&self.results)
    }
}

fn change_names(changes: &[view::KeyChange]) -> Vec<&str> {
    changes.iter().map(|change| change.name.as_str()).collect()
}

impl Printable for view::PreparedUpdate {
    fn rows(&self) -> Rows {
        change_rows(&self.results)
    }

    fn footer(&self) -> String {
        let mut out = changed(
            "would change",
            self.keys_changed,
            self.keys,
            self.keys_left_out,
        );
        let sites = counted(self.sites_patched.into(), "site");
        let pause = match self.predicted_pause_us {
            None => "the pause is not known: no change has been made yet".to_owned(),
            Some(0.0) => "no pause".to_owned(),
            Some(pause) => format!("predicted pause {pause:.1} us"),
        };
        out += &format!(
            "dry run: nothing was changed; {sites} to patch, {pause}\nplan {}, kept until {}\ndigest {}\n",
            self.plan_id, self.expires_at, self.digest
        );
        out += &warnings(&self.results);
        let (command, plan) = (&self.command, &self.plan_id);
        out + &format!("make it with: {command}keys commit {plan}\n")
    }

    /// Returns the names that `keys commit` takes.
    fn names(&self) -> Vec<&str> {
        vec![&self.plan_id]
    }
}

impl Printable for view::Verification {
    fn rows(&self) -> Rows {
        let mut rows = Rows::new(&["NAME", "COUNT", "CONTRARY SITES", "FOREIGN SITES"]);
        for key in &self.torn {
            rows.push([
                key.name.clone(),
                key.count.to_string(),
                key.contrary_sites.to_string(),
                key.foreign_sites.to_string(),
            ]);
        }
        rows
    }

    fn footer(&self) -> String {
        let looked = format!(
            "{} with {}",
            counted(self.keys.into(), "key"),
            counted(self.sites.into(), "site")
        );
        match self.torn_total {
            0 => format!("{looked}: each site does what its key's count says\n"),
            torn => format!(
                "{looked}: {torn} do not agree with their counts; look with: patchbay keys repair KEY\n"
            ),
        }
    }

    fn names(&self) -> Vec<&str> {
        self.torn.iter().map(|key| key.name.as_str()).collect()
    }
}

impl Printable for view::Repair {
    fn rows(&self) -> Rows {
        let mut rows = Rows::new(&["SITE", "BYTES", "BYTES OF THE COUNT"]);
        for site in &self.sites {
            rows.push([site.address.as_str(), &site.before, &site.after]);
        }
        rows
    }

    fn footer(&self) -> String {
        let Self { name, count, .. } = self;
        let sites = counted(self.sites.len() as u64, "site");
        if self.sites.is_empty() {
            return format!(
                "{name}: count {count}, each site does what it says; nothing to repair\n"
            );
        }
        if self.repaired {
            return format!("{name}: count {count}, {sites} repaired\n");
        }
        format!(
            "dry run: nothing was changed; {name} has count {count} and {sites} to repair\n\
             write it with: patchbay keys repair {name} --yes\n"
        )
    }

    fn names(&self) -> Vec<&str> {
        vec![&self.name]
    }
}

impl Printable for view::NoPlan {
    fn rows(&self) -> Rows {
        let mut rows = Rows::new(&["PLAN", "STATE"]);
        rows.push([self.plan_id.as_str(), "discarded"]);
        rows
    }

    fn table(&self) -> String {
        format!("plan {} is discarded\n", self.plan_id)
    }

    fn names(&self) -> Vec<&str> {
        vec![&self.plan_id]
    }
}

impl Printable for view::Applied {
    fn rows(&self) -> Rows {
        match self {
            Self::Update(update) => update.rows(),
            Self::Plan(plan) => plan.rows(),
        }
    }

    fn footer(&self) -> String {
        match self {
            Self::Update(update) => update.footer(),
            Self::Plan(plan) => plan.footer(),
        }
    }

    fn names(&self) -> Vec<&str> {
        match self {
            Self::Update(update) => update.names(),
            Self::Plan(plan) => plan.names(),
        }
    }
}

impl Printable for view::Event {
    fn table(&self) -> String {
        let mut out = format!(
            "{}  {}  {}  {}",
            self.revision,
            or_dash(&self.time),
            self.kind,
            or_dash(&self.name)
        );
        if ["changed", "listed"].contains(&self.kind) {
            out += &format!("  count {}", self.count);
        }
        for (label, value) in [("by", &self.principal), ("reason", &self.reason)] {
            if !value.is_empty() {
                out += &format!("  {label} {value}");
            }
        }
        one_line(&out) + "\n"
    }

    fn names(&self) -> Vec<&str> {
        match self.name.as_str() {
            "" => vec![],
            name => vec![name],
        }
    }
}

impl Printable for view::KeyState {
    fn rows(&self) -> Rows {
        let mut rows = Rows::new(&["NAME", "STATE", "COUNT"]);
        let state = if self.enabled { "on" } else { "off" };
        rows.push([self.name.clone(), state.to_owned(), self.count.to_string()]);
        rows
    }

    fn table(&self) -> String {
        let state = if self.enabled { "on" } else { "off" };
        format!("{}: {state}, count {}\n", self.name, self.count)
    }

    fn names(&self) -> Vec<&str> {
        vec![&self.name]
    }
}

impl Printable for Vec<view::Hold> {
    fn rows(&self) -> Rows {
        let mut rows = Rows::new(&[
            "ID",
            "KEY",
            "HOLDER",
            "REFERENCES",
            "SINCE",
            "EXPIRES",
            "REASON",
        ]);
        for hold in self {
            rows.push([
                hold.id.as_str(),
                &hold.key,
                &hold.holder,
                &hold.references.to_string(),
                &hold.since,
                hold.expires_at.as_deref().unwrap_or("never"),
                &hold.reason,
            ]);
        }
        rows
    }

    fn nouns(&self) -> Option<&'static str> {
        Some("holds")
    }

    /// Returns the names that `holds release` and `holds renew` take.
    fn names(&self) -> Vec<&str> {
        self.iter().map(|hold| hold.id.as_str()).collect()
    }
}
