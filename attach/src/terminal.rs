// SPDX-License-Identifier: Apache-2.0
//! Writes messages to standard error, which may be a terminal of root.
//!
//! Messages contain text that the guest's monitor and other processes choose: the guest's name, the
//! description of an error, the path of a mapping. Such text must not control the terminal.

use std::fmt::Display;

use patchbay_proto::text::printable;

/// Writes a message as one line, with the characters escaped that control a terminal.
pub fn say(message: impl Display) {
    eprintln!("{}", printable(&message.to_string()));
}
