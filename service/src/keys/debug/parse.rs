// SPDX-License-Identifier: Apache-2.0
//! A query of dynamic debug: its parts, its selection of descriptors, and its parser.

use std::fmt;
use std::mem::take;

use patchbay_kernel_image::DebugLine;

/// Maximum number of characters of queries in a message.
pub(super) const MAX_SHOWN: usize = 200;
/// Longest query in bytes.
const MAX_QUERY: usize = 1024;

const KEYWORDS: &str = "func, file, module, format or line";

/// A query that is malformed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueryError {
    query: String,
    /// Position of the error in characters, counted from 1.
    column: usize,
    why: String,
}

impl fmt::Display for QueryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown: String = self.query.chars().take(MAX_SHOWN).collect();
        if shown.len() < self.query.len() {
            shown.push_str("...");
        }
        let Self { column, why, .. } = self;
        write!(f, "{why}; at column {column} of the query: {shown}")
    }
}

impl std::error::Error for QueryError {}

/// The conditions of all parts of one query.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Query {
    function: Option<String>,
    file: Option<String>,
    module: Option<String>,
    format: Option<String>,
    /// First and last line; an open end is 0 or the maximum.
    lines: Option<(u32, u32)>,
}

impl Query {
    /// Returns whether the query selects a descriptor, by the rules of `ddebug_change()`.
    pub(super) fn selects(&self, site: &DebugLine) -> bool {
        let glob = |pattern: &Option<String>, text: &str| {
            pattern
                .as_deref()
                .is_none_or(|pattern| wildcard(pattern.as_bytes(), text.as_bytes()))
        };
        let base = site.file.rsplit('/').next().unwrap_or_default();
        !site.classed
            && glob(&self.module, &site.module)
            && (glob(&self.file, &site.file) || glob(&self.file, base))
            && glob(&self.function, &site.function)
            && self
                .lines
                .is_none_or(|(first, last)| (first..=last).contains(&site.line))
            && self
                .format
                .as_deref()
                .is_none_or(|wanted| match wanted.strip_prefix('^') {
                    Some(start) => site.format.starts_with(start),
                    None => site.format.contains(wanted),
                })
    }
}

/// Matches `*` and `?` as the kernel's `match_wildcard()` does.
fn wildcard(pattern: &[u8], text: &[u8]) -> bool {
    let (mut at, mut next) = (0, 0);
    // The position in the pattern after the last `*`, and the position in the text at which
    // matching continued after it.
    let mut retry: Option<(usize, usize)> = None;
    while at < text.len() {
        match pattern.get(next) {
            Some(b'*') => {
                retry = Some((next + 1, at));
                next += 1;
            }
            Some(&byte) if byte == b'?' || byte == text[at] => {
                at += 1;
                next += 1;
            }
            _ => {
                let Some((after, tried)) = retry else {
                    return false;
                };
                retry = Some((after, tried + 1));
                (next, at) = (after, tried + 1);
            }
        }
    }
    pattern[next..].iter().all(|byte| *byte == b'*')
}

/// A word without its quotes, and the byte at which it starts.
#[derive(Clone, Debug)]
struct Word {
    at: usize,
    text: String,
}

/// The byte at which a query becomes malformed, and the reason.
type Wrong = (usize, String);

impl Query {
    /// Parses one query.
    pub(super) fn parse(text: &str) -> Result<Self, QueryError> {
        let parse = || {
            if text.len() > MAX_QUERY {
                return Err((MAX_QUERY, format!("it is longer than {MAX_QUERY} bytes")));
            }
            let mut query = Self::default();
            let words = words(text)?;
            if words.is_empty() {
                let why = "it is empty, expected for example \"module NAME\", or \"file *\" for every line";
                return Err((0, why.to_owned()));
            }
            let mut words = words.into_iter();
            while let Some(keyword) = words.next() {
                let value = words.next();
                query.set(keyword, value)?;
            }
            Ok(query)
        };
        parse().map_err(|(at, why): Wrong| QueryError {
            query: text.to_owned(),
            column: text
                .char_indices()
                .take_while(|(index, _)| *index < at)
                .count()
                + 1,
            why,
        })
    }

    fn set(&mut self, keyword: Word, value: Option<Word>) -> Result<(), Wrong> {
        let name = keyword.text.as_str();
        match name {
            "func" | "file" | "module" | "format" | "line" => {}
            "class" => {
                let why = "classes are not supported: enable such a line by the name of its key";
                return Err((keyword.at, why.to_owned()));
            }
            flags if flags.starts_with(['+', '-', '=']) => {
                let flags = shown(flags);
                let why = format!("flags {flags:?} are not part of a query, only what it selects");
                return Err((keyword.at, why));
            }
            other => {
                let other = shown(other);
                let why = format!("unknown keyword {other:?}, expected {KEYWORDS}");
                return Err((keyword.at, why));
            }
        }
        let Some(mut value) = value else {
            let why = format!("keyword {name:?} has no value");
            return Err((keyword.at, why));
        };
        match name {
            "func" => once(&mut self.function, value, name),
            "module" => once(&mut self.module, value, name),
            "format" => {
                value.text = unescape(&value.text);
                once(&mut self.format, value, name)
            }
            "line" => self.set_lines(&value),
            // The tail ":..." is a function or a range of lines.
            _ => {
                let tail = value.text.find(':').map(|colon| Word {
                    at: value.at + colon + 1,
                    text: value.text.split_off(colon)[1..].to_owned(),
                });
                once(&mut self.file, value, name)?;
                match tail {
                    None => Ok(()),
                    Some(tail)
                        if tail.text.starts_with(|c: char| c.is_ascii_alphabetic())
                            || tail.text.starts_with(['*', '?']) =>
                    {
                        once(&mut self.function, tail, "func")
                    }
                    Some(tail) => self.set_lines(&tail),
                }
            }
        }
    }

    fn set_lines(&mut self, range: &Word) -> Result<(), Wrong> {
        if self.lines.is_some() {
            return Err((range.at, "lines are given twice; give them once".to_owned()));
        }
        let number = |text: &str, open: u32, at: usize| match text {
            "" => Ok(open),
            text => text.parse::<u32>().map_err(|_| {
                let text = shown(text);
                let why =
                    format!("{text:?} is no line, expected a number or a range such as 10-20");
                (at, why)
            }),
        };
        let (first, last) = match range.text.split_once('-') {
            None => {
                let line = number(&range.text, 0, range.at)?;
                (line, line)
            }
            Some((first, last)) => (
                number(first, 0, range.at)?,
                number(last, 0, range.at + first.len() + 1)?,
            ),
        };
        // A last line of 0 means no limit, as in the kernel.
        let last = if last == 0 { u32::MAX } else { last };
        if last < first {
            let why = format!("line {last} is before line {first}; give the lower one first");
            return Err((range.at, why));
        }
        self.lines = Some((first, last));
        Ok(())
    }
}

/// Returns the beginning of a word, for a message.
fn shown(word: &str) -> &str {
    &word[..word.floor_char_boundary(MAX_SHOWN)]
}

fn once(field: &mut Option<String>, value: Word, name: &str) -> Result<(), Wrong> {
    if field.replace(value.text).is_some() {
        let why = format!("{name:?} is given twice; give it once, or several queries");
        return Err((value.at, why));
    }
    Ok(())
}

/// Splits a query into words at white space, like `ddebug_tokenize()`. Quotes may only enclose a
/// whole word.
fn words(text: &str) -> Result<Vec<Word>, Wrong> {
    let mut words = Vec::new();
    let mut quote: Option<(char, usize)> = None;
    let mut word: Option<Word> = None;
    for (at, c) in text.char_indices() {
        match (quote, &mut word) {
            (Some((mark, _)), _) if c == mark => {
                quote = None;
                words.extend(take(&mut word));
            }
            (Some(_), Some(word)) => word.text.push(c),
            (None, Some(_)) if c.is_ascii_whitespace() => words.extend(take(&mut word)),
            (None, Some(word)) => word.text.push(c),
            (_, None) if c.is_ascii_whitespace() => {}
            (_, None) if c == '#' => break,
            (_, None) if c == '"' || c == '\'' => {
                quote = Some((c, at));
                word = Some(Word {
                    at: at + 1,
                    text: String::new(),
                });
            }
            (_, None) => {
                word = Some(Word {
                    at,
                    text: c.to_string(),
                });
            }
        }
    }
    if let Some((mark, at)) = quote {
        return Err((at, format!("the quote {mark} is not closed")));
    }
    words.extend(word);
    Ok(words)
}

/// Replaces the escapes of white space, octal numbers and `\"`, `\\`, `\a`, `\e`, like
/// `string_unescape()`. The result has one character per byte.
fn unescape(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = String::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        at += 1;
        let next = bytes.get(at).copied();
        let plain = match (byte, next) {
            (b'\\', Some(b'n')) => b'\n',
            (b'\\', Some(b'r')) => b'\r',
            (b'\\', Some(b't')) => b'\t',
            (b'\\', Some(b'v')) => 0x0b,
            (b'\\', Some(b'f')) => 0x0c,
            (b'\\', Some(b'a')) => 0x07,
            (b'\\', Some(b'e')) => 0x1b,
            (b'\\', Some(mark @ (b'"' | b'\\'))) => mark,
            (b'\\', Some(b'0'..=b'7')) => {
                let digits = &bytes[at..bytes.len().min(at + 3)];
                let digits = digits
                    .iter()
                    .take_while(|digit| matches!(digit, b'0'..=b'7'));
                let (mut value, mut length) = (0_u32, 0);
                for digit in digits {
                    value = value * 8 + u32::from(digit - b'0');
                    length += 1;
                }
                at += length;
                out.push(char::from(u8::try_from(value & 0xff).unwrap_or_default()));
                continue;
            }
            _ => {
                out.push(char::from(byte));
                continue;
            }
        };
        out.push(char::from(plain));
        at += 1;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_malformed_query_is_refused_at_the_word_that_is_wrong() {
        for (query, column, words) in [
            ("fnc tcp_*", 1, "unknown keyword \"fnc\""),
            ("file a.c fnc tcp_*", 10, "unknown keyword \"fnc\""),
            ("file 'a b' x", 12, "unknown keyword \"x\""),
            ("file ä.c x y", 10, "unknown keyword \"x\""),
            ("func", 1, "no value"),
            ("module xfs func", 12, "no value"),
            ("file a file b", 13, "twice"),
            ("file a.c:f func g", 17, "twice"),
            ("line 1 line 2", 13, "twice"),
            ("file a.c:1 line 2", 17, "twice"),
            ("line x", 6, "\"x\" is no line"),
            ("line 5-x", 8, "\"x\" is no line"),
            ("line 1-2-3", 8, "\"2-3\" is no line"),
            ("line 99999999999", 6, "is no line"),
            ("line 20-10", 6, "before line 20"),
            ("file a.c:10-x", 13, "\"x\" is no line"),
            ("module xfs +p", 12, "flags"),
            ("class DRM_UT_KMS", 1, "not supported"),
            ("format \"open", 8, "not closed"),
            ("format 'it", 8, "not closed"),
        ] {
            let error = Query::parse(query).expect_err(query);
            assert_eq!(error.column, column, "{error}");
            let text = error.to_string();
            assert!(text.contains(words) && text.contains(query), "{text}");
        }
        let long = format!("module {}", "x".repeat(MAX_QUERY));
        let text = Query::parse(&long).expect_err("too long").to_string();
        assert!(text.len() < 400 && text.contains("longer"), "{text}");
    }

    #[test]
    fn odd_text_does_not_panic() {
        for text in [
            "",
            " ",
            "#",
            "'",
            "\"\"",
            "line -",
            "line ''",
            "file :",
            "file ::",
            "format \\",
            "format \\7\\77\\777",
            "format ''",
            "é é",
            "file é:é",
            "\\ \\",
        ] {
            let _ = Query::parse(text);
        }
        assert_eq!(unescape(r"\101\60\x\\n"), "A0\\x\\n");
    }
}
