// SPDX-License-Identifier: Apache-2.0

//! The monitor's own terminal, connected to the guest's console.

use std::io::{IsTerminal, Read};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use anyhow::Context;
use patchbay_vmm::devices::Console;
use patchbay_vmm::seccomp::{self, ThreadKind};
use rustix::termios::{
    LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcgetpgrp, tcsetattr,
};

/// How long to wait before typing on, when the guest does not read.
const RETRY: Duration = Duration::from_millis(10);

/// The modes to go back to, also from the panic hook.
static BEFORE: OnceLock<Mutex<Option<Termios>>> = OnceLock::new();

/// Stdin, typed into the guest's console. Dropping it restores the terminal.
pub struct Terminal(());

impl Terminal {
    /// Starts typing stdin into the console, if `wanted`. A terminal no longer
    /// echoes or edits lines meanwhile: the guest does. Its Ctrl-C still ends the
    /// monitor.
    pub fn connect(wanted: bool, console: Arc<Console>) -> anyhow::Result<Self> {
        if !wanted {
            return Ok(Self(()));
        }
        if std::io::stdin().is_terminal() {
            if !in_foreground() {
                // Touching the terminal would stop the whole process.
                return Ok(Self(()));
            }
            set_modes().context("the terminal cannot be set up; try with </dev/null")?;
        }
        std::thread::Builder::new()
            .name("stdin".into())
            .spawn(move || {
                if let Err(error) = seccomp::enter(ThreadKind::Console) {
                    tracing::error!("stdin is read without a filter: {error}");
                }
                type_into(&console);
            })
            .context("a thread cannot be started; raise the limit on processes")?;
        Ok(Self(()))
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        restore();
    }
}

fn in_foreground() -> bool {
    tcgetpgrp(std::io::stdin()).is_ok_and(|group| group == rustix::process::getpgrp())
}

fn set_modes() -> rustix::io::Result<()> {
    let before = tcgetattr(std::io::stdin())?;
    let mut modes = before.clone();
    modes.local_modes -= LocalModes::ICANON | LocalModes::ECHO;
    modes.special_codes[SpecialCodeIndex::VMIN] = 1;
    modes.special_codes[SpecialCodeIndex::VTIME] = 0;
    let slot = BEFORE.get_or_init(Mutex::default);
    *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(before);
    tcsetattr(std::io::stdin(), OptionalActions::Now, &modes)?;
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        restore();
        report(panic);
    }));
    Ok(())
}

fn restore() {
    let Some(slot) = BEFORE.get() else {
        return;
    };
    if let Some(before) = slot.lock().unwrap_or_else(PoisonError::into_inner).take() {
        // A terminal that is gone needs no restoring.
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &before);
    }
}

/// Types stdin into the console until either ends.
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
