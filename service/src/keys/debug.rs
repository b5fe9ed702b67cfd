// SPDX-License-Identifier: Apache-2.0
//! The lines that dynamic debug can print, and the kernel's language that selects them.
//!
//! A source of tables finds the descriptors (`struct _ddebug`) and passes them with the tables. The
//! key is a member of the descriptor, so each key has one descriptor. The language is that of
//! `Documentation/admin-guide/dynamic-debug-howto.rst` without the flags, as `ddebug_parse_query()`
//! in `lib/dynamic_debug.c` reads it.

pub(super) mod parse;

use std::collections::HashMap;
use std::fmt::{self, Write};

use patchbay_kernel_image::DebugLine;
use static_keys::{KEYS_MAX, KeyId};

use super::registration::Refused;

pub use self::parse::QueryError;
use self::parse::{MAX_SHOWN, Query};

/// Longest text of a descriptor, in bytes; the rest is cut off.
const MAX_TEXT: usize = 1024;
/// Limit on the texts of all descriptors, in bytes.
const MAX_TEXTS: usize = 64 << 20;

/// The descriptors of a kernel, ordered by file, line and address of the key.
#[derive(Clone, Debug, Default)]
pub struct DebugSites {
    sites: Vec<(KeyId, DebugLine)>,
    by_key: HashMap<KeyId, usize>,
}

impl DebugSites {
    /// Indexes the descriptors by the addresses of their keys.
    ///
    /// # Errors
    /// [`Refused`]: there are too many, their texts are too long, or two have the same key.
    pub fn new(found: Vec<(u64, DebugLine)>) -> Result<Self, Refused> {
        if found.len() > KEYS_MAX {
            return Err(Refused(format!(
                "{} descriptors of dynamic debug exceed the limit of {KEYS_MAX}",
                found.len()
            )));
        }
        let mut texts = 0_usize;
        let mut sites = Vec::with_capacity(found.len());
        for (address, mut site) in found {
            for text in [
                &mut site.module,
                &mut site.file,
                &mut site.function,
                &mut site.format,
            ] {
                cut(text);
                texts += text.len();
            }
            if texts > MAX_TEXTS {
                return Err(Refused(format!(
                    "the texts of dynamic debug exceed the limit of {MAX_TEXTS} bytes"
                )));
            }
            sites.push((KeyId(address), site));
        }
        sites.sort_by(|(a, one), (b, other)| {
            (&one.file, one.line, a).cmp(&(&other.file, other.line, b))
        });
        let mut by_key = HashMap::with_capacity(sites.len());
        for (index, (key, _)) in sites.iter().enumerate() {
            if by_key.insert(*key, index).is_some() {
                return Err(Refused(format!(
                    "two descriptors of dynamic debug have the key {key}"
                )));
            }
        }
        Ok(Self { sites, by_key })
    }

    /// Returns the descriptor that a key belongs to.
    #[must_use]
    pub fn of(&self, key: KeyId) -> Option<&DebugLine> {
        Some(&self.sites.get(*self.by_key.get(&key)?)?.1)
    }

    /// Returns all descriptors with their keys, in order.
    pub fn iter(&self) -> impl Iterator<Item = (KeyId, &DebugLine)> {
        self.sites.iter().map(|(key, site)| (*key, site))
    }
}

fn cut(text: &mut String) {
    if text.len() > MAX_TEXT {
        text.truncate(text.floor_char_boundary(MAX_TEXT));
    }
}

/// Queries, at least one of which must match; the empty set matches every descriptor.
#[derive(Clone, Debug, Default)]
pub struct DebugQueries {
    texts: Vec<String>,
    queries: Vec<Query>,
}

impl DebugQueries {
    /// Parses queries.
    ///
    /// # Errors
    /// [`QueryError`] names the word that is wrong, and its column.
    pub fn parse(texts: &[String]) -> Result<Self, QueryError> {
        let queries = texts.iter().map(|text| Query::parse(text));
        Ok(Self {
            queries: queries.collect::<Result<_, _>>()?,
            texts: texts.to_vec(),
        })
    }

    /// Returns the queries as they were given.
    #[must_use]
    pub fn texts(&self) -> &[String] {
        &self.texts
    }

    /// Returns whether any query selects this descriptor.
    #[must_use]
    pub fn select(&self, site: &DebugLine) -> bool {
        self.queries.is_empty() || self.queries.iter().any(|query| query.selects(site))
    }
}

/// The texts of the queries, cut if they are long.
impl fmt::Display for DebugQueries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown: String = self.texts.join("; ").chars().take(MAX_SHOWN).collect();
        f.write_str(&shown)
    }
}

/// Escapes a text of the guest as in a C string literal, as one line of printable ASCII.
#[must_use]
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            '\r' => out.push_str("\\r"),
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            ' '..='~' => out.push(c),
            c => {
                // In a format each character stands for one byte. Other characters are escaped as
                // UTF-8.
                let mut utf8 = [0; 4];
                let bytes = match u8::try_from(u32::from(c)) {
                    Ok(byte) => {
                        utf8[0] = byte;
                        &utf8[..1]
                    }
                    Err(_) => c.encode_utf8(&mut utf8).as_bytes(),
                };
                for byte in bytes {
                    let _ = write!(out, "\\{byte:03o}");
                }
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn site(file: &str, line: u32, function: &str, module: &str, format: &str) -> DebugLine {
        DebugLine {
            module: module.to_owned(),
            file: file.to_owned(),
            function: function.to_owned(),
            line,
            format: format.to_owned(),
            classed: false,
        }
    }

    fn selects(query: &str) -> Vec<u32> {
        let sites = [
            site("drivers/net/veth.c", 10, "veth_open", "veth", "opened %s\n"),
            site("drivers/net/tun.c", 20, "tun_open", "tun", "tun_chr_open\n"),
            site("net/ipv4/tcp.c", 30, "tcp_init", "tcp", "say \"hi\"\t%d"),
            DebugLine {
                classed: true,
                ..site("drivers/net/veth.c", 40, "veth_open", "veth", "classed")
            },
        ];
        let queries = DebugQueries::parse(&[query.to_owned()]).expect(query);
        let selected = sites.iter().filter(|site| queries.select(site));
        selected.map(|site| site.line).collect()
    }

    #[test]
    fn queries_select_as_the_kernels_do() {
        for (query, lines) in [
            ("file *", &[10, 20, 30][..]),
            ("file drivers/net/*", &[10, 20]),
            ("file veth.c", &[10]),
            ("file net/veth.c", &[]),
            ("file t?n.c", &[20]),
            ("file veth.c:veth_*", &[10]),
            ("file veth.c:10-", &[10]),
            ("file tun.c:-19", &[]),
            ("func *_open", &[10, 20]),
            ("func open", &[]),
            ("module tcp", &[30]),
            ("module t*", &[20, 30]),
            ("line 10-20", &[10, 20]),
            ("line 20-", &[20, 30]),
            ("line -20", &[10, 20]),
            ("line 20", &[20]),
            ("format open", &[10, 20]),
            ("format ^open", &[10]),
            ("format open line 15-", &[20]),
            ("format 'opened %s'", &[10]),
            (r"format opened\040%s", &[10]),
            (r"format s\n", &[10]),
            ("format n", &[10, 20]),
            (r#"format 'say \"hi\"\t'"#, &[30]),
            ("func *_open  module tun # of two", &[20]),
        ] {
            assert_eq!(selects(query), lines, "{query}");
        }
    }

    #[test]
    fn several_queries_select_what_one_of_them_does() {
        let queries = ["module a".to_owned(), "module b line 2".to_owned()];
        let queries = DebugQueries::parse(&queries).expect("well-formed");
        for (module, line, selected) in [("a", 1, true), ("b", 2, true), ("b", 1, false)] {
            let site = site("f", line, "g", module, "");
            assert_eq!(queries.select(&site), selected, "{module} {line}");
        }
    }

    #[test]
    fn escaped_text_is_one_printable_line() {
        let text: String = (0..=255_u8).map(char::from).collect();
        let escaped = escape(&text);
        assert!(escaped.bytes().all(|byte| (b' '..=b'~').contains(&byte)));
        assert_eq!(
            escape("a\n\t\u{1b}[2J\u{ff}\"\\"),
            r#"a\n\t\033[2J\377\"\\"#
        );
        assert_eq!(escape("\u{20ac}"), r"\342\202\254");
    }

    #[test]
    fn descriptors_are_bounded_and_have_their_own_keys() {
        let long = site(&"\u{ff}".repeat(MAX_TEXT), 1, "f", "m", "");
        let sites = DebugSites::new(vec![(0x10, long.clone())]).expect("cut");
        let cut = sites.of(KeyId(0x10)).expect("there");
        assert_eq!(cut.file.len(), MAX_TEXT);
        let twice = vec![(0x10, long.clone()), (0x10, long.clone())];
        assert!(DebugSites::new(twice).is_err());
        let many = MAX_TEXTS / MAX_TEXT + 1;
        let many = (0..many as u64).map(|at| (16 * at, long.clone()));
        assert!(DebugSites::new(many.collect()).is_err());
        let many = (0..=KEYS_MAX as u64).map(|at| (16 * at, DebugLine::default()));
        assert!(DebugSites::new(many.collect()).is_err());
    }
}
