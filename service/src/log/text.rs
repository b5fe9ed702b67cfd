// SPDX-License-Identifier: Apache-2.0
//! Texts of the guest, made printable.

use std::fmt::Write;

/// The maximum number of bytes of a text; the kernel limits a record to 2048.
const MAX_TEXT: usize = 4096;

/// Escapes control characters but newline and tab, and bytes that are not UTF-8, as /dev/kmsg does:
/// as `\x1b`. A longer text is truncated.
pub fn printable(text: &[u8]) -> String {
    let text = &text[..text.len().min(MAX_TEXT)];
    let mut printable = String::with_capacity(text.len());
    for chunk in text.utf8_chunks() {
        for character in chunk.valid().chars() {
            if !character.is_control() || matches!(character, '\n' | '\t') {
                printable.push(character);
                continue;
            }
            let mut bytes = [0; 4];
            escape(character.encode_utf8(&mut bytes).as_bytes(), &mut printable);
        }
        escape(chunk.invalid(), &mut printable);
    }
    printable
}

fn escape(bytes: &[u8], out: &mut String) {
    for byte in bytes {
        // Writing to a String does not fail.
        let _ = write!(out, "\\x{byte:02x}");
    }
}
