// SPDX-License-Identifier: Apache-2.0
//! Makes text from guests and clients safe to print.

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
