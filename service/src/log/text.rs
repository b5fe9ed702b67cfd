// SPDX-License-Identifier: Apache-2.0
//! Makes the guest's texts printable.

use std::fmt::Write;

/// The maximum number of bytes of a text. The kernel limits a record to 1024
/// (`PRINTKRB_RECORD_MAX`; in earlier kernels `LOG_LINE_MAX`, which is slightly less), but a
/// hostile guest may claim any length.
const MAX_TEXT: usize = 4096;

/// Escapes bytes that are not UTF-8, and control characters except newline and tab, in the form
/// `\x1b`. /dev/kmsg has the same form, but also escapes newlines, tabs, backslashes and all bytes
/// outside ASCII (`msg_add_ext_text()`). A text of more than `MAX_TEXT` bytes is truncated.
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

/// The maximum number of bytes of a text in a description of the guest.
const MAX_LINE: usize = 512;

/// Makes the first line of a text printable, and truncates it to `MAX_LINE` bytes.
pub fn first_line(text: &[u8]) -> String {
    let line = text.split(|byte| *byte == b'\n').next();
    let mut line = printable(line.unwrap_or_default());
    // A tab would move the cursor.
    line = line.replace('\t', " ");
    line.truncate(line.floor_char_boundary(MAX_LINE));
    line
}

fn escape(bytes: &[u8], out: &mut String) {
    for byte in bytes {
        // Writing to a String does not fail.
        let _ = write!(out, "\\x{byte:02x}");
    }
}
