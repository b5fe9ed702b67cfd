// SPDX-License-Identifier: Apache-2.0
//! Choosing keys by name.

/// A list of patterns; those with a leading `!` take keys out.
#[derive(Debug)]
pub struct Filter<'a> {
    include: Vec<&'a str>,
    exclude: Vec<&'a str>,
}

impl<'a> Filter<'a> {
    pub fn new(patterns: &'a [String]) -> Self {
        let (exclude, include): (Vec<&str>, Vec<&str>) = patterns
            .iter()
            .map(String::as_str)
            .partition(|pattern| pattern.starts_with('!'));
        Self {
            include,
            exclude: exclude
                .iter()
                .filter_map(|pattern| pattern.strip_prefix('!'))
                .collect(),
        }
    }

    /// Without a pattern to include, every key is included.
    pub fn matches(&self, name: &str) -> bool {
        let any = |patterns: &[&str]| patterns.iter().any(|pattern| matches(pattern, name));
        (self.include.is_empty() || any(&self.include)) && !any(&self.exclude)
    }
}

/// `*` stands for any bytes, `?` for one. Goes back only to the last `*`, so the time is at most the product of the lengths.
fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name) = (pattern.as_bytes(), name.as_bytes());
    let (mut p, mut n) = (0, 0);
    let mut star = None;
    while n < name.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(b'?') => (p, n) = (p + 1, n + 1),
            Some(byte) if *byte == name[n] => (p, n) = (p + 1, n + 1),
            _ => match star {
                Some((star_p, star_n)) => {
                    star = Some((star_p, star_n + 1));
                    (p, n) = (star_p + 1, star_n + 1);
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::{Filter, matches};

    #[test]
    fn patterns() {
        for (pattern, name, expected) in [
            ("sched_*", "sched_switch", true),
            ("sched_*", "sched", false),
            ("*", "", true),
            ("", "a", false),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("*ab*ab", "abxabxab", true),
            ("*ab*abc", "abxabxab", false),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} on {name}");
        }
    }

    #[test]
    fn negation_wins() {
        let patterns = ["sched_*".to_owned(), "!*_wakeup*".to_owned()];
        let filter = Filter::new(&patterns);
        assert!(filter.matches("sched_switch"));
        assert!(!filter.matches("sched_wakeup_new"));
        assert!(!filter.matches("timer_start"));
        let only_out = ["!sched_*".to_owned()];
        assert!(Filter::new(&only_out).matches("timer_start"));
    }
}
