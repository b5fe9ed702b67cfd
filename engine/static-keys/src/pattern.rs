// SPDX-License-Identifier: Apache-2.0
//! Globs over key names: `*`, `?`, `[a-z]`, `[!a-z]`, and a leading `!` that excludes names.
//!
//! A pattern without `:` is matched against the name of a key in any image. A pattern with `:` is
//! matched against "module:name" (":name" is a key of the kernel image). A key is selected if it
//! matches no excluding pattern, and at least one of the other patterns if there are any.
//!
//! Names of guests are matched as a whole ([`Patterns::select_whole`]): a colon in the name or in
//! the pattern has no special meaning. Names of principals are also matched as a whole, but slashes
//! are special in them ([`Patterns::select_path`]).

use std::fmt;

/// The maximum number of patterns in one request.
pub const MAX_PATTERNS: usize = 1024;
/// The maximum length of one pattern, in bytes.
const MAX_PATTERN_BYTES: usize = 1024;
/// The approximate maximum number of bytes of patterns in a message.
const MAX_SHOWN_BYTES: usize = 200;

/// The set of patterns cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    /// There are more than [`MAX_PATTERNS`] patterns.
    #[error("{given} patterns are more than {MAX_PATTERNS}")]
    TooMany {
        /// Number of patterns given.
        given: usize,
    },
    /// A pattern is empty, too long, or has a `[` without a `]`.
    #[error("pattern {pattern:?} {why}")]
    Malformed {
        /// The pattern.
        pattern: String,
        /// The reason why it is malformed.
        why: &'static str,
    },
}

/// A set of patterns; the empty set selects every key.
#[derive(Clone, Debug, Default)]
pub struct Patterns {
    wanted: Vec<Pattern>,
    unwanted: Vec<Pattern>,
    texts: Vec<String>,
}

#[derive(Clone, Debug)]
struct Pattern {
    module: Option<Glob>,
    name: Glob,
    whole: Glob,
}

/// One glob, and the number of bytes before its first metacharacter. Most names that do not match
/// already differ in these bytes.
#[derive(Clone, Debug)]
struct Glob {
    bytes: Vec<u8>,
    literal: usize,
}

impl Patterns {
    /// Parses a list of patterns.
    ///
    /// # Errors
    /// [`PatternError`] names the pattern that is malformed.
    pub fn parse(patterns: &[String]) -> Result<Self, PatternError> {
        if patterns.len() > MAX_PATTERNS {
            let given = patterns.len();
            return Err(PatternError::TooMany { given });
        }
        let mut set = Self::default();
        for text in patterns {
            let (list, glob) = match text.strip_prefix('!') {
                Some(rest) => (&mut set.unwanted, rest),
                None => (&mut set.wanted, text.as_str()),
            };
            check(glob).map_err(|why| PatternError::Malformed {
                pattern: text.clone(),
                why,
            })?;
            list.push(Pattern::new(glob));
        }
        set.texts = patterns.to_vec();
        Ok(set)
    }

    /// Returns the texts that were parsed.
    #[must_use]
    pub fn texts(&self) -> &[String] {
        &self.texts
    }

    /// Returns the patterns that are literal names: not excluding, and without metacharacters.
    pub fn plain_names(&self) -> impl Iterator<Item = &str> {
        let plain = |text: &&String| !text.starts_with('!') && !text.contains(['*', '?', '[']);
        self.texts.iter().filter(plain).map(String::as_str)
    }

    /// Returns whether a [plain name](Self::plain_names) names the key `name` of `module`.
    #[must_use]
    pub fn is_named(plain: &str, module: &str, name: &str) -> bool {
        match plain.split_once(':') {
            Some(of) => of == (module, name),
            None => plain == name,
        }
    }

    /// Returns whether a pattern names this key literally.
    #[must_use]
    pub fn name(&self, module: &str, name: &str) -> bool {
        let mut texts = self.texts.iter();
        texts.any(|text| Self::is_named(text, module, name))
    }

    /// Returns whether the key `name` of `module` (empty for the kernel image) is selected.
    #[must_use]
    pub fn select(&self, module: &str, name: &str) -> bool {
        let hit = |pattern: &Pattern| pattern.matches(module, name);
        (self.wanted.is_empty() || self.wanted.iter().any(hit)) && !self.unwanted.iter().any(hit)
    }

    /// Returns whether the name of a guest is selected. A colon has no special meaning.
    #[must_use]
    pub fn select_whole(&self, name: &str) -> bool {
        let hit = |pattern: &Pattern| pattern.whole.matches(name);
        (self.wanted.is_empty() || self.wanted.iter().any(hit)) && !self.unwanted.iter().any(hit)
    }
}

impl Patterns {
    /// Returns whether the name of a principal is selected. `*`, `?` and classes do not match a
    /// slash, and `**` matches any text. A lone `*` selects every principal. In an excluding
    /// pattern, `*`, `?` and classes match a slash too, so that it never excludes too little.
    #[must_use]
    pub fn select_path(&self, name: &str) -> bool {
        let hit = |pattern: &Pattern| pattern.whole.matches_path(name);
        let taken = |pattern: &Pattern| pattern.whole.matches(name);
        (self.wanted.is_empty() || self.wanted.iter().any(hit)) && !self.unwanted.iter().any(taken)
    }
}

impl Pattern {
    fn new(glob: &str) -> Self {
        // This also splits at the colon of a class such as `[:]`, but no key has a colon in its
        // name.
        match glob.split_once(':') {
            Some((module, name)) => Self {
                module: Some(Glob::new(module)),
                name: Glob::new(name),
                whole: Glob::new(glob),
            },
            None => Self {
                module: None,
                name: Glob::new(glob),
                whole: Glob::new(glob),
            },
        }
    }

    fn matches(&self, module: &str, name: &str) -> bool {
        self.module.as_ref().is_none_or(|glob| glob.matches(module)) && self.name.matches(name)
    }
}

impl Glob {
    fn new(glob: &str) -> Self {
        Self {
            bytes: glob.into(),
            literal: glob.find(['*', '?', '[']).unwrap_or(glob.len()),
        }
    }

    fn matches(&self, text: &str) -> bool {
        let (literal, glob) = self.bytes.split_at(self.literal);
        let Some(rest) = text.as_bytes().strip_prefix(literal) else {
            return false;
        };
        match glob {
            b"*" => true,
            // Array elements are named `key[3]`, so the glob is also compared literally.
            glob => glob == rest || glob_matches(glob, rest),
        }
    }
}

impl Glob {
    fn matches_path(&self, text: &str) -> bool {
        self.bytes == b"*"
            || self.bytes == text.as_bytes()
            || path_matches(&self.bytes, text.as_bytes())
    }
}

/// Formats the patterns separated by spaces, and truncates a long list.
impl fmt::Display for Patterns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = 0;
        for (index, text) in self.texts.iter().enumerate() {
            shown += text.len() + 1;
            if shown > MAX_SHOWN_BYTES && index > 0 {
                return write!(f, " and {} more", self.texts.len() - index);
            }
            let space = if index > 0 { " " } else { "" };
            let cut = text.chars().take(MAX_SHOWN_BYTES);
            write!(f, "{space}{}", cut.collect::<String>())?;
        }
        Ok(())
    }
}

fn check(glob: &str) -> Result<(), &'static str> {
    if glob.is_empty() {
        return Err("is empty");
    }
    if glob.len() > MAX_PATTERN_BYTES {
        return Err("is longer than 1024 bytes");
    }
    let bytes = glob.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        match bytes[at] {
            b'[' => at += class_length(&bytes[at..]).ok_or("has a '[' without a ']'")?,
            _ => at += 1,
        }
    }
    Ok(())
}

/// Returns the length of the class that `glob` starts with, brackets included.
fn class_length(glob: &[u8]) -> Option<usize> {
    let negation = usize::from(glob.get(1) == Some(&b'!'));
    // A ']' that comes first is a member of the class.
    let first = 1 + negation;
    let close = glob.iter().skip(first + 1).position(|&byte| byte == b']')?;
    Some(first + 1 + close + 1)
}

/// Returns whether the glob matches the whole text. Only the last `*` is ever retried, so the cost
/// is at most `glob.len() * text.len()`.
fn glob_matches(glob: &[u8], text: &[u8]) -> bool {
    let (mut g, mut t) = (0, 0);
    let mut retry: Option<(usize, usize)> = None;
    while t < text.len() {
        let step = match glob.get(g) {
            Some(b'*') => {
                retry = Some((g + 1, t));
                g += 1;
                continue;
            }
            Some(b'?') => Some(1),
            Some(b'[') => match class_length(&glob[g..]) {
                Some(length) => {
                    class_matches(&glob[g + 1..g + length - 1], text[t]).then_some(length)
                }
                None => (text[t] == b'[').then_some(1),
            },
            Some(&byte) => (byte == text[t]).then_some(1),
            None => None,
        };
        match (step, retry) {
            (Some(length), _) => {
                g += length;
                t += 1;
            }
            (None, Some((star, from))) => {
                retry = Some((star, from + 1));
                g = star;
                t = from + 1;
            }
            (None, None) => return false,
        }
    }
    glob[g..].iter().all(|&byte| byte == b'*')
}

/// Like [`glob_matches`], but no wildcard except `**` matches a slash. The last `*` and the last
/// `**` are retried, so the cost is at most `glob.len() * text.len()` for each `**`.
fn path_matches(glob: &[u8], text: &[u8]) -> bool {
    let (mut g, mut t) = (0, 0);
    let mut within: Option<(usize, usize)> = None;
    let mut across: Option<(usize, usize)> = None;
    while t < text.len() {
        let is_slash = text[t] == b'/';
        let step = match glob.get(g) {
            Some(b'*') if glob.get(g + 1) == Some(&b'*') => {
                across = Some((g + 2, t));
                within = None;
                g += 2;
                continue;
            }
            Some(b'*') => {
                within = Some((g + 1, t));
                g += 1;
                continue;
            }
            Some(b'?') => (!is_slash).then_some(1),
            Some(b'[') => match class_length(&glob[g..]) {
                Some(length) => (!is_slash && class_matches(&glob[g + 1..g + length - 1], text[t]))
                    .then_some(length),
                None => (text[t] == b'[').then_some(1),
            },
            Some(&byte) => (byte == text[t]).then_some(1),
            None => None,
        };
        if let Some(length) = step {
            g += length;
            t += 1;
            continue;
        }
        // A single `*` is retried before a `**`, unless it would have to match a slash.
        match within.filter(|(_, from)| text[*from] != b'/') {
            Some((star, from)) => {
                within = Some((star, from + 1));
                (g, t) = (star, from + 1);
            }
            None => {
                let Some((stars, from)) = across else {
                    return false;
                };
                across = Some((stars, from + 1));
                within = None;
                (g, t) = (stars, from + 1);
            }
        }
    }
    glob[g..].iter().all(|&byte| byte == b'*')
}

fn class_matches(class: &[u8], byte: u8) -> bool {
    let (negated, members) = match class.split_first() {
        Some((b'!', rest)) => (true, rest),
        _ => (false, class),
    };
    let mut at = 0;
    let mut found = false;
    while at < members.len() {
        if members.get(at + 1) == Some(&b'-') && at + 2 < members.len() {
            found |= (members[at]..=members[at + 2]).contains(&byte);
            at += 3;
        } else {
            found |= members[at] == byte;
            at += 1;
        }
    }
    found != negated
}

#[cfg(test)]
mod tests {
    use super::*;

    fn select(patterns: &[&str], module: &str, name: &str) -> bool {
        let patterns: Vec<String> = patterns.iter().map(|&text| text.to_owned()).collect();
        Patterns::parse(&patterns)
            .expect("well-formed")
            .select(module, name)
    }

    #[test]
    fn stars_marks_and_classes() {
        assert!(select(&["sched_*"], "", "sched_switch"));
        assert!(!select(&["sched_*"], "", "my_sched_switch"));
        assert!(select(&["*_switch"], "", "sched_switch"));
        assert!(select(&["s*d*h"], "", "sched_switch"));
        assert!(!select(&["s*d*x"], "", "sched_switch"));
        assert!(select(&["ke?"], "", "key"));
        assert!(!select(&["ke?"], "", "ke"));
        assert!(select(&["key[0-3]"], "", "key2"));
        assert!(!select(&["key[!0-3]"], "", "key2"));
        assert!(select(&["key[]]"], "", "key]"));
        assert!(
            select(&["key[2]"], "", "key[2]"),
            "an array element by its literal name"
        );
    }

    #[test]
    fn negation_takes_away_from_all_or_from_the_others() {
        assert!(select(&[], "", "anything"));
        assert!(select(&["!virtio*:*"], "", "key"));
        assert!(!select(&["!virtio*:*"], "virtio_net", "key"));
        assert!(!select(&["key*", "!key2"], "", "key2"));
        assert!(select(&["!key2", "key*"], "", "key1"));
    }

    #[test]
    fn module_part() {
        assert!(
            select(&["key"], "ext4", "key"),
            "a bare name means any module"
        );
        assert!(select(&["ext4:*"], "ext4", "key"));
        assert!(!select(&["ext4:*"], "", "key"));
        assert!(select(&[":key"], "", "key"));
        assert!(!select(&[":key"], "ext4", "key"));
    }

    #[test]
    fn a_star_stays_between_slashes() {
        let select = |patterns: &[&str], name: &str| {
            let patterns: Vec<String> = patterns.iter().map(|&text| text.to_owned()).collect();
            Patterns::parse(&patterns)
                .expect("well-formed")
                .select_path(name)
        };
        for (pattern, yes, no) in [
            (
                "spiffe://a.org/net/*",
                "spiffe://a.org/net/x",
                "spiffe://a.org/net/x/y",
            ),
            (
                "spiffe://*/net",
                "spiffe://a.org/net",
                "spiffe://a.org/b/net",
            ),
            (
                "spiffe://a.org/*/x",
                "spiffe://a.org/net/x",
                "spiffe://a.org/net/y/x",
            ),
            (
                "spiffe://a.org/**",
                "spiffe://a.org/net/y/x",
                "spiffe://b.org/a.org/x",
            ),
            (
                "**/net/*/x",
                "spiffe://a.org/net/y/x",
                "spiffe://a.org/net/y/z/x",
            ),
            ("spiffe://a.org/?", "spiffe://a.org/x", "spiffe://a.org//"),
            ("a[!b]c", "axc", "a/c"),
            ("a[.-0]c", "a.c", "a/c"),
            ("al*", "alice", "al/ice"),
            ("uid:*", "uid:10", "guid:10"),
            ("a**b", "a/x/b", "a/x/c"),
            ("*/*", "a/b", "a/b/c"),
            ("a*/b", "axx/b", "ax/x/b"),
        ] {
            assert!(select(&[pattern], yes), "{pattern} {yes}");
            assert!(!select(&[pattern], no), "{pattern} {no}");
        }
        for everybody in [&["*"][..], &["**"], &[]] {
            assert!(select(everybody, "spiffe://a.org/net/x") && select(everybody, "uid:0"));
        }
        // In an excluding pattern, `*` also matches a slash.
        let but = ["**", "!spiffe://a.org/*"];
        assert!(!select(&but, "spiffe://a.org/net/x") && select(&but, "spiffe://b.org/net/x"));
    }

    #[test]
    fn a_whole_name_may_have_colons() {
        let patterns = ["uid:1*".to_owned(), "!uid:1".to_owned()];
        let patterns = Patterns::parse(&patterns).expect("well-formed");
        assert!(patterns.select_whole("uid:10"));
        assert!(!patterns.select_whole("uid:1") && !patterns.select_whole("xuid:10"));
    }

    #[test]
    fn malformed_patterns_are_named() {
        for bad in ["", "!", "key[", "key[abc", "key[]"] {
            let error = Patterns::parse(&[bad.to_owned()]).expect_err(bad);
            assert!(error.to_string().contains(&format!("{bad:?}")), "{error}");
        }
        assert!(Patterns::parse(&vec!["*".to_owned(); MAX_PATTERNS + 1]).is_err());
        assert!(Patterns::parse(&["x".repeat(MAX_PATTERN_BYTES + 1)]).is_err());
    }

    /// With naive backtracking, matching a pattern of many stars against a long name would take
    /// exponential time.
    #[test]
    fn hostile_pattern_is_cheap() {
        let pattern = "*a".repeat(500);
        assert!(!select(&[&pattern], "", &"a".repeat(499)));
        assert!(!select(&[&format!("{pattern}b")], "", &"a".repeat(2000)));
    }
}
