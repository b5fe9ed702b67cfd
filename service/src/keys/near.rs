// SPDX-License-Identifier: Apache-2.0
//! Suggests names for a misspelt one.

/// Maximum number of suggestions.
const MAX_NAMES: usize = 5;
/// The maximum length of a name that is compared.
const MAX_COMPARED: usize = 128;

/// Maximum number of names that are compared, which limits the time.
const MOST_NAMES: usize = 1 << 15;

/// Returns the names most similar to `wanted`, best first. A name is similar if it is within a few
/// edits, or if one of the two contains the other.
pub fn near<'a>(wanted: &str, names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let most_edits = wanted.len() / 3 + 1;
    let mut found: Vec<(usize, &str)> = names
        .take(MOST_NAMES)
        .filter_map(|name| {
            let bare = name.rsplit_once(':').map_or(name, |(_, bare)| bare);
            // The edit distance is at least the difference of the lengths.
            let near = |name: &str| match wanted.len().abs_diff(name.len()) <= most_edits {
                true => edits(wanted, name),
                false => usize::MAX,
            };
            let edits = near(name).min(near(bare));
            if edits <= most_edits {
                return Some((edits, name));
            }
            let contained = wanted.len() >= 3 && name.contains(wanted)
                || bare.len() >= 3 && wanted.contains(bare);
            contained.then_some((most_edits + 1, name))
        })
        .collect();
    found.sort_unstable();
    found
        .into_iter()
        .take(MAX_NAMES)
        .map(|(_, name)| name.to_owned())
        .collect()
}

/// Returns the Levenshtein distance in bytes.
fn edits(a: &str, b: &str) -> usize {
    if a.len() > MAX_COMPARED || b.len() > MAX_COMPARED {
        return usize::MAX;
    }
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, byte) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, other) in b.bytes().enumerate() {
            let substitute = diagonal + usize::from(byte != other);
            diagonal = row[j + 1];
            row[j + 1] = substitute.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distance() {
        assert_eq!(edits("kitten", "sitting"), 3);
        assert_eq!(edits("", "abc"), 3);
        assert_eq!(edits("same", "same"), 0);
    }

    #[test]
    fn typos_and_parts_are_found_best_first() {
        let names = ["getppid_key", "sched_switch", "ext4:getppid_kez", "other"];
        assert_eq!(
            near("getpid_key", names.into_iter()),
            ["getppid_key", "ext4:getppid_kez"]
        );
        assert_eq!(near("switch", names.into_iter()), ["sched_switch"]);
        assert!(near("nothing_like_it", names.into_iter()).is_empty());
    }
}
