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
    /// The bytes from the first metacharacter on.
    tokens: Vec<Token>,
    /// The classes of the tokens.
    classes: Vec<Class>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Token {
    Byte(u8),
    /// `?`
    Any,
    /// `*`
    Star,
    /// The index of a class. A pattern has fewer classes than [`MAX_PATTERN_BYTES`].
    Class(u16),
}

/// The bytes that a class matches, as a bitmap: a class may have hundreds of members, and each is
/// compared with many bytes of many names.
#[derive(Clone, Debug)]
struct Class([u64; 4]);

impl Token {
    fn matches(self, classes: &[Class], byte: u8) -> bool {
        match self {
            Self::Byte(own) => own == byte,
            Self::Any | Self::Star => true,
            Self::Class(index) => classes[usize::from(index)].has(byte),
        }
    }
}

impl Class {
    /// Parses the bytes between the brackets.
    fn parse(class: &[u8]) -> Self {
        let (negated, members) = match class.split_first() {
            Some((b'!', rest)) => (true, rest),
            _ => (false, class),
        };
        let mut bits = [0; 4];
        let mut at = 0;
        while at < members.len() {
            let (last, next) = match members.get(at + 1..at + 3) {
                Some([b'-', last]) => (*last, at + 3),
                _ => (members[at], at + 1),
            };
            for byte in members[at]..=last {
                bits[usize::from(byte >> 6)] |= 1_u64 << (byte & 63);
            }
            at = next;
        }
        Self(bits.map(|bits| if negated { !bits } else { bits }))
    }

    fn has(&self, byte: u8) -> bool {
        self.0[usize::from(byte >> 6)] >> (byte & 63) & 1 == 1
    }
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

    /// Returns whether a key is selected, by its full name: "name" or "module:name".
    #[must_use]
    pub fn select_full(&self, full_name: &str) -> bool {
        let (module, name) = crate::split_name(full_name);
        self.select(module, name)
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

    /// Returns whether one of the patterns, excluding ones included, matches the name of a
    /// principal. A wanted `*` or `**`, which selects everybody, does not count.
    #[must_use]
    pub fn names_path(&self, name: &str) -> bool {
        let is_everybody = |pattern: &Pattern| matches!(&*pattern.whole.bytes, b"*" | b"**");
        let wanted = self.wanted.iter().filter(|pattern| !is_everybody(pattern));
        let mut all = wanted.chain(&self.unwanted);
        all.any(|pattern| pattern.whole.matches_path(name))
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
        let literal = glob.find(['*', '?', '[']).unwrap_or(glob.len());
        let (mut tokens, mut classes) = (Vec::new(), Vec::new());
        let mut rest = &glob.as_bytes()[literal..];
        while let Some(&byte) = rest.first() {
            let class = class_length(rest).filter(|_| byte == b'[');
            tokens.push(match (byte, class) {
                (_, Some(length)) => {
                    classes.push(Class::parse(&rest[1..length - 1]));
                    Token::Class((classes.len() - 1) as u16)
                }
                (b'*', _) => Token::Star,
                (b'?', _) => Token::Any,
                _ => Token::Byte(byte),
            });
            rest = &rest[class.unwrap_or(1)..];
        }
        Self {
            bytes: glob.into(),
            literal,
            tokens,
            classes,
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
            glob => glob == rest || glob_matches(&self.tokens, &self.classes, rest),
        }
    }
}

impl Glob {
    fn matches_path(&self, text: &str) -> bool {
        let rest = text.as_bytes().strip_prefix(&self.bytes[..self.literal]);
        self.bytes == b"*"
            || self.bytes == text.as_bytes()
            || rest.is_some_and(|rest| path_matches(&self.tokens, &self.classes, rest))
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
fn glob_matches(glob: &[Token], classes: &[Class], text: &[u8]) -> bool {
    let (mut g, mut t) = (0, 0);
    let mut retry: Option<(usize, usize)> = None;
    while t < text.len() {
        let is_match = match glob.get(g) {
            Some(Token::Star) => {
                retry = Some((g + 1, t));
                g += 1;
                continue;
            }
            Some(token) => token.matches(classes, text[t]),
            None => false,
        };
        match (is_match, retry) {
            (true, _) => {
                g += 1;
                t += 1;
            }
            (false, Some((star, from))) => {
                retry = Some((star, from + 1));
                g = star;
                t = from + 1;
            }
            (false, None) => return false,
        }
    }
    glob[g..].iter().all(|token| *token == Token::Star)
}

/// Like [`glob_matches`], but no wildcard except `**` matches a slash. The last `*` and the last
/// `**` are retried, so the cost is at most `glob.len() * text.len()` for each `**`.
fn path_matches(glob: &[Token], classes: &[Class], text: &[u8]) -> bool {
    let (mut g, mut t) = (0, 0);
    let mut within: Option<(usize, usize)> = None;
    let mut across: Option<(usize, usize)> = None;
    while t < text.len() {
        let is_match = match glob.get(g) {
            Some(Token::Star) if glob.get(g + 1) == Some(&Token::Star) => {
                across = Some((g + 2, t));
                within = None;
                g += 2;
                continue;
            }
            Some(Token::Star) => {
                within = Some((g + 1, t));
                g += 1;
                continue;
            }
            Some(Token::Any | Token::Class(_)) if text[t] == b'/' => false,
            Some(token) => token.matches(classes, text[t]),
            None => false,
        };
        if is_match {
            g += 1;
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
    glob[g..].iter().all(|token| *token == Token::Star)
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
        // Each pattern is one class of many members, which is compared with each byte of each name.
        let pattern = format!("*[{}]", "b".repeat(MAX_PATTERN_BYTES - 3));
        let patterns = Patterns::parse(&vec![pattern; MAX_PATTERNS]).expect("well-formed");
        for length in 0..100 {
            assert!(!patterns.select("", &"a".repeat(length)));
        }
    }
}
