// SPDX-License-Identifier: Apache-2.0
//! Controls the host's terminal while an interactive program runs in the lab.

use std::io;

use anyhow::Result;
use rustix::termios::{self, OptionalActions, Termios};

/// The terminal in raw mode; dropping it restores the former mode.
pub struct RawTerminal(Termios);

impl RawTerminal {
    /// Returns rows and columns if standard input and output are a terminal.
    pub fn size_if_interactive() -> Option<(u16, u16)> {
        let foreground = termios::tcgetpgrp(io::stdin()).ok()? == rustix::process::getpgrp();
        if !foreground || !termios::isatty(io::stdout()) {
            return None;
        }
        let size = termios::tcgetwinsize(io::stdout()).ok()?;
        Some((size.ws_row, size.ws_col))
    }

    /// Returns whether standard input is a terminal, on which reading could stop this process.
    pub fn is_terminal_input() -> bool {
        termios::isatty(io::stdin())
    }

    /// Enters raw mode, which forwards every key, including Ctrl-C.
    pub fn enter() -> Result<Self> {
        let before = termios::tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        termios::tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        Ok(Self(before))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        let _ = termios::tcsetattr(io::stdin(), OptionalActions::Drain, &self.0);
    }
}
