// SPDX-License-Identifier: Apache-2.0
//! Makes text from guests and clients safe to print.

use patchbay_proto::text::printable;

/// Replaces control characters, because text from guests and clients must not control the terminal.
pub fn harmless(text: &str) -> String {
    text.chars()
        .map(|c| {
            if c.is_control() && c != '\n' {
                '\u{fffd}'
            } else {
                c
            }
        })
        .collect()
}

/// Escapes control characters, line breaks among them, and the characters that reorder or hide
/// text. Text from guests and clients that is a part of a line must not begin another line. A
/// backslash stays as it is, because many of these texts are escaped already.
pub fn one_line(text: &str) -> String {
    let parts: Vec<_> = text.split('\\').map(printable).collect();
    parts.join("\\")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_a_line_does_not_begin_another_line() {
        let name = "a\nclaim: none\r\t\u{1b}[2J\u{9b}\u{2028}\u{202e}";
        let shown = r"a\nclaim: none\r\t\u{1b}[2J\u{9b}\u{2028}\u{202e}";
        assert_eq!(one_line(name), shown);
        for ordinary in ["w\u{e9}b-1 \u{65e5}", r"a\x1b \\ b\", ""] {
            assert_eq!(one_line(ordinary), ordinary);
        }
    }
}
