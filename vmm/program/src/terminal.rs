// SPDX-License-Identifier: Apache-2.0

//! Connects the monitor's terminal to the guest's console.

use std::io::{IsTerminal, Read};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use patchbay_vmm::devices::Console;
use patchbay_vmm::seccomp::ThreadKind;
use patchbay_vmm::thread;
use rustix::termios::{
    LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcgetpgrp, tcsetattr,
};

/// Delay before a retry if the guest does not read its input.
const RETRY: Duration = Duration::from_millis(10);

/// Types stdin into the guest's console. Dropping this restores the terminal.
#[derive(Default)]
pub struct Terminal {
    /// The terminal modes to restore; `None` if stdin is not a terminal.
    before: Option<Termios>,
}

impl Terminal {
    /// Starts typing stdin into the console if `wanted`. If stdin is a terminal, its echo and line
    /// editing are turned off, because the guest does both. Ctrl-C still ends the monitor.
    pub fn connect(wanted: bool, console: Arc<Console>) -> anyhow::Result<Self> {
        let mut terminal = Self::default();
        if !wanted {
            return Ok(terminal);
        }
        if std::io::stdin().is_terminal() {
            if !in_foreground() {
                // Changing the terminal from the background would stop the whole process.
                return Ok(terminal);
            }
            let before =
                set_modes().context("the terminal cannot be set up; run with </dev/null")?;
            terminal.before = Some(before);
        }
        thread::spawn("stdin", ThreadKind::Console, move || type_into(&console))
            .context("a thread cannot be started; raise the limit on processes")?;
        Ok(terminal)
    }

    /// Returns whether stdin is a terminal, whose hang-up ends the guest.
    pub fn is_connected(&self) -> bool {
        self.before.is_some()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            // If this fails, the terminal no longer exists and needs no restoring.
            let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, before);
        }
    }
}

fn in_foreground() -> bool {
    tcgetpgrp(std::io::stdin()).is_ok_and(|group| group == rustix::process::getpgrp())
}

/// Turns off echo and line editing, and returns the previous modes.
fn set_modes() -> rustix::io::Result<Termios> {
    let before = tcgetattr(std::io::stdin())?;
    let mut modes = before.clone();
    modes.local_modes -= LocalModes::ICANON | LocalModes::ECHO;
    modes.special_codes[SpecialCodeIndex::VMIN] = 1;
    modes.special_codes[SpecialCodeIndex::VTIME] = 0;
    tcsetattr(std::io::stdin(), OptionalActions::Now, &modes)?;
    Ok(before)
}

/// Types stdin into the console until stdin or the console ends.
fn type_into(console: &Console) {
    let mut buffer = [0; 4096];
    while let Ok(count) = std::io::stdin().lock().read(&mut buffer) {
        if count == 0 {
            return;
        }
        let mut rest = &buffer[..count];
        while !rest.is_empty() {
            if console.is_closed() {
                return;
            }
            let taken = console.input(rest);
            rest = &rest[taken..];
            if taken == 0 {
                std::thread::sleep(RETRY);
            }
        }
    }
}
