// SPDX-License-Identifier: Apache-2.0
//! Makes text from guests and clients safe for terminals and logs.

use std::borrow::Cow;
use std::fmt::Write;

/// Returns whether the character controls a terminal or reorders the text around it.
fn acts_on_terminal(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{61c}'
                | '\u{180e}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
                | '\u{fff9}'..='\u{fffb}'
                | '\u{e0000}'..='\u{e007f}'
        )
}

/// Formats bytes as hexadecimal digits, two for each.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// Escapes control characters, C1 among them, and the characters that reorder or hide text, so that
/// the text is one line that a terminal only prints. A backslash is escaped too.
#[must_use]
pub fn printable(text: &str) -> Cow<'_, str> {
    if !text.chars().any(|c| acts_on_terminal(c) || c == '\\') {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match c {
            '\\' => escaped.push_str("\\\\"),
            c if acts_on_terminal(c) => escaped.extend(c.escape_default()),
            c => escaped.push(c),
        }
    }
    Cow::Owned(escaped)
}

/// Escapes the same characters in JSON on one line: its serialisers escape only those below U+0020.
/// The value stays the same.
#[must_use]
pub fn printable_json(json: &str) -> Cow<'_, str> {
    // Nearly every line is printable ASCII. Without an early exit the compiler checks many bytes at
    // once.
    let is_plain = |plain: bool, byte: &u8| plain & matches!(byte, b' '..=b'~');
    if json.as_bytes().iter().fold(true, is_plain) || !json.chars().any(acts_on_terminal) {
        return Cow::Borrowed(json);
    }
    let mut escaped = String::with_capacity(json.len() + 16);
    for c in json.chars() {
        if acts_on_terminal(c) {
            for unit in c.encode_utf16(&mut [0; 2]) {
                // Writing to a string cannot fail.
                let _ = write!(escaped, "\\u{unit:04x}");
            }
        } else {
            escaped.push(c);
        }
    }
    Cow::Owned(escaped)
}

/// Returns at most this many bytes of the text, with `…` if it is longer.
#[must_use]
pub fn cut(text: &str, bytes: usize) -> Cow<'_, str> {
    if text.len() <= bytes {
        return Cow::Borrowed(text);
    }
    let mut end = bytes;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    Cow::Owned(format!("{}…", &text[..end]))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTILE: [&str; 6] = [
        "\u{1b}]0;title\u{7}",
        "\u{9b}2J",
        "a\nb\r\u{7f}",
        "\u{202e}txet",
        "\u{2028}\u{feff}",
        "\u{e0041}",
    ];

    #[test]
    fn nothing_that_a_terminal_acts_on_is_left() {
        for text in HOSTILE {
            let shown = printable(text);
            assert!(!shown.chars().any(acts_on_terminal), "{shown:?}");
            let quoted = format!("\"{}\"", text.replace(|c: char| c < ' ', " "));
            assert!(!printable_json(&quoted).chars().any(acts_on_terminal));
        }
        assert_eq!(printable("\u{1b}[2J\u{9b}\n"), "\\u{1b}[2J\\u{9b}\\n");
        assert_eq!(
            printable_json("\"\u{9b}\u{e0041}\""),
            "\"\\u009b\\udb40\\udc41\""
        );
    }

    #[test]
    fn ordinary_text_stays_as_it_is() {
        for text in ["{\"guest\": \"wéb-1\"} 日本", "", "100 %"] {
            assert!(matches!(printable(text), Cow::Borrowed(same) if same == text));
            assert!(matches!(printable_json(text), Cow::Borrowed(same) if same == text));
        }
        // Otherwise a client could write text that looks like one of our escapes.
        assert_eq!(printable("\\n"), "\\\\n");
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        assert_eq!(cut("ääää", 4), "ää…");
        assert_eq!(cut("ääää", 5), "ää…");
        assert_eq!(cut("ää", 4), "ää");
    }
}
