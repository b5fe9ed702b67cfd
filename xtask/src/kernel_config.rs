// SPDX-License-Identifier: Apache-2.0
//! Checks that a kernel's configuration has the requested options. `make` silently drops an option
//! whose dependencies are not met.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::cache;

/// Fails if an option of the fragment is missing from the configuration. Options that the tree does
/// not know are ignored, because names differ between kernel versions, unless they are `required`.
pub fn verify(fragment: &str, config: &str, tree: &Path, required: &[&str]) -> Result<()> {
    let config = parse(config);
    let mut lost = differences(&parse(fragment), &config);
    if !lost.is_empty() {
        let known = known_options(tree)?;
        lost.retain(|option| known.contains(option.name.trim_start_matches("CONFIG_")));
    }
    for name in required {
        if !config.contains_key(*name) && !lost.iter().any(|option| option.name == *name) {
            lost.push(Lost {
                name: (*name).into(),
                wanted: "y".into(),
                got: "n".into(),
            });
        }
    }
    if lost.is_empty() {
        return Ok(());
    }
    let list: Vec<String> = lost
        .iter()
        .map(|option| format!("{}={} (became {})", option.name, option.wanted, option.got))
        .collect();
    bail!(
        "the kernel's configuration lacks these options of the fragment, so one of their \
         dependencies is missing:\n  {}",
        list.join("\n  ")
    )
}

#[derive(Debug, PartialEq, Eq)]
struct Lost {
    name: String,
    wanted: String,
    got: String,
}

fn differences(
    fragment: &BTreeMap<String, String>,
    config: &BTreeMap<String, String>,
) -> Vec<Lost> {
    let value = |name: &String| config.get(name).map_or("n", String::as_str).to_owned();
    fragment
        .iter()
        .filter(|(name, wanted)| value(name) != **wanted)
        .map(|(name, wanted)| Lost {
            name: name.clone(),
            wanted: wanted.clone(),
            got: value(name),
        })
        .collect()
}

/// Parses `CONFIG_X=value` lines; the last one counts. "# CONFIG_X is not set" means absent.
fn parse(text: &str) -> BTreeMap<String, String> {
    text.lines()
        .filter_map(|line| line.trim().split_once('='))
        .filter(|(name, _)| name.starts_with("CONFIG_"))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

/// Returns the names that follow `config` or `menuconfig` in the tree's Kconfig files.
fn known_options(tree: &Path) -> Result<BTreeSet<String>> {
    let mut known = BTreeSet::new();
    for path in cache::files_below(tree)? {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if !name.starts_with("Kconfig") {
            continue;
        }
        let text =
            std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        for line in String::from_utf8_lossy(&text).lines() {
            let mut words = line.split_whitespace();
            if let (Some("config" | "menuconfig"), Some(option)) = (words.next(), words.next()) {
                known.insert(option.to_owned());
            }
        }
    }
    Ok(known)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KCONFIG: &str = "config FOO\n\tbool\nmenuconfig BAR\n\ttristate\nconfig TEXT\n";

    fn verify_in_tree(fragment: &str, config: &str, required: &[&str]) -> Result<()> {
        let tree = tempfile::tempdir().unwrap();
        std::fs::create_dir(tree.path().join("lib")).unwrap();
        std::fs::write(tree.path().join("lib/Kconfig.debug"), KCONFIG).unwrap();
        verify(fragment, config, tree.path(), required)
    }

    #[test]
    fn what_was_asked_for_passes() {
        let fragment = "# note\nCONFIG_FOO=y\nCONFIG_BAR=m\nCONFIG_TEXT=\"a=b\"\n";
        verify_in_tree(
            fragment,
            &format!("{fragment}CONFIG_MORE=y\n"),
            &["CONFIG_FOO"],
        )
        .unwrap();
        verify_in_tree("CONFIG_FOO=n\n", "# CONFIG_FOO is not set\n", &[]).unwrap();
    }

    #[test]
    fn a_dropped_or_changed_option_is_named() {
        let fragment = "CONFIG_FOO=y\nCONFIG_BAR=y\n";
        let error = verify_in_tree(fragment, "CONFIG_BAR=m\n", &[])
            .unwrap_err()
            .to_string();
        assert!(error.contains("CONFIG_FOO=y (became n)"), "{error}");
        assert!(error.contains("CONFIG_BAR=y (became m)"), "{error}");
        let error = verify_in_tree("CONFIG_FOO=n\n", "CONFIG_FOO=y\n", &[]).unwrap_err();
        assert!(error.to_string().contains("CONFIG_FOO=n (became y)"));
    }

    #[test]
    fn only_an_option_the_tree_does_not_know_may_be_missing() {
        verify_in_tree("CONFIG_OTHER_VERSION=y\n", "", &[]).unwrap();
        let error = verify_in_tree("CONFIG_NEW=y\n", "", &["CONFIG_NEW"]).unwrap_err();
        assert!(error.to_string().contains("CONFIG_NEW=y (became n)"));
    }
}
