// SPDX-License-Identifier: Apache-2.0
//! Recognizes the records of the kernel's log that were printed by selected pr_debug() lines.
//!
//! A record does not name the line that printed it. Its text is compared with the formats of the
//! lines: the literal parts of a format must occur in the text in the same order, and a literal
//! part at the end of a format must end the text. Text before the first literal part is ignored,
//! because dynamic debug and dev_dbg() print prefixes. Lines with equal formats cannot be
//! distinguished.

/// The formats of the selected lines.
pub struct Formats(Vec<Format>);

struct Format {
    /// The texts between conversions, none of which is empty.
    literals: Vec<String>,
    /// The format ends with a literal part, which must end the text.
    ends: bool,
}

impl Formats {
    /// Reads formats as the service prints them, with escaped control characters.
    pub fn new<'a>(formats: impl IntoIterator<Item = &'a str>) -> Self {
        Self(formats.into_iter().map(Format::new).collect())
    }

    pub fn print(&self, text: &str) -> bool {
        self.0.iter().any(|format| format.prints(text))
    }
}

impl Format {
    fn new(escaped: &str) -> Self {
        let (mut literals, mut literal, mut rest) = (Vec::new(), String::new(), escaped);
        while let Some(at) = rest.find(['%', '\\']) {
            literal.push_str(&rest[..at]);
            let special = &rest[at..];
            let known = [
                ("%%", '%'),
                ("\\n", '\n'),
                ("\\t", '\t'),
                ("\\\"", '"'),
                ("\\\\", '\\'),
            ];
            let known = known
                .iter()
                .find_map(|(escape, c)| Some((c, special.strip_prefix(escape)?)));
            if let Some((c, after)) = known {
                literal.push(*c);
                rest = after;
                continue;
            }
            literals.push(std::mem::take(&mut literal));
            rest = match special.strip_prefix('%') {
                Some(conversion) => after_conversion(conversion),
                // The log escapes other control characters differently, so they match any text.
                None => special[1..].trim_start_matches(|c: char| c.is_ascii_digit() || c == 'r'),
            };
        }
        literal.push_str(rest);
        // printk() removes the end of line.
        let literal = literal.strip_suffix('\n').unwrap_or(&literal).to_owned();
        let ends = !literal.is_empty();
        literals.push(literal);
        literals.retain(|literal| !literal.is_empty());
        Self { literals, ends }
    }

    fn prints(&self, text: &str) -> bool {
        let mut literals = self.literals.as_slice();
        let mut text = text;
        if self.ends
            && let Some((last, others)) = literals.split_last()
        {
            let Some(before) = text.strip_suffix(last.as_str()) else {
                return false;
            };
            (literals, text) = (others, before);
        }
        literals.iter().all(|literal| {
            let found = text.split_once(literal.as_str());
            text = found.map_or("", |(_, after)| after);
            found.is_some()
        })
    }
}

/// Returns the text after a conversion; `text` begins after the `%`. The kernel's own conversions,
/// such as `%pI4`, consist of a `p` and letters or digits (lib/vsprintf.c, `format_decode()` and
/// `pointer()`).
fn after_conversion(text: &str) -> &str {
    let text = text.trim_start_matches(|c: char| "-+ #0".contains(c));
    let text = text.trim_start_matches(|c: char| c.is_ascii_digit() || "*.".contains(c));
    let text = text.trim_start_matches(|c: char| "hlLqjzt".contains(c));
    match text.strip_prefix('p') {
        Some(pointer) => pointer.trim_start_matches(|c: char| c.is_ascii_alphanumeric()),
        None => text.get(1..).unwrap_or(""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_compared_with_the_literal_parts_of_a_format() {
        for (format, text, expected) in [
            (r"open %s\n", "open eth0", true),
            (r"open %s\n", "net: a_open:10: open eth0", true),
            (r"open %s\n", "close eth0", false),
            (r"%s: up\n", "eth0: up", true),
            (r"%s: up\n", "eth0: up again", false),
            (r"%s: up", ": up", true),
            (r"up\n", "link up", true),
            ("a %d of %d", "b 1 of 2", false),
            ("a %d of %d", "a 1 of 2", true),
            ("of %d a", "a 1 of 2 a", true),
            // One occurrence does not serve two parts.
            ("ab%sab", "ab", false),
            ("ab%sab", "abab", true),
            ("%pI4 up", "10.0.0.1 up", true),
            ("%-08.3llx!", "1f      !", true),
            ("100%% of %*pE.", "100% of a.", true),
            ("100%% of %*pE.", "100 of a.", false),
            (r"a\tb\033c\n", "a\tb\\x1bc", true),
            (r#"\"%s\" C:\\n"#, r#""x" C:\n"#, true),
            (r#"\"%s\""#, "'x'", false),
            ("%s", "anything", true),
            ("%", "anything", true),
            (r"\", "anything", true),
            (r"\r", "anything", true),
            ("", "anything", true),
        ] {
            let formats = Formats::new([format]);
            assert_eq!(formats.print(text), expected, "{format:?} {text:?}");
        }
    }

    #[test]
    fn a_text_of_any_format_is_recognized() {
        let formats = Formats::new(["a %d", "b %d"]);
        assert!(formats.print("b 1") && !formats.print("c 1"));
        assert!(!Formats::new([]).print("a 1"));
    }
}
