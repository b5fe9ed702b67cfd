// SPDX-License-Identifier: Apache-2.0

//! The monitor's own messages on stderr.
//!
//! Whoever should read them may not do so. No thread waits for them: not a vCPU's, which would miss pauses,
//! nor the API's, which ends the guest when it is told to.

use std::backtrace::Backtrace;
use std::io::{self, Write};
use std::panic::PanicHookInfo;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// A pipe that is ready takes so much at once (`PIPE_BUF`, pipe(7)).
const AT_ONCE: usize = 4096;

/// How long the last message waits for its reader.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Writes to stderr what there is room for now, and drops the rest.
pub struct Stderr {
    patience: Duration,
}

impl Stderr {
    /// Does not wait for room.
    pub fn new() -> Self {
        Self {
            patience: Duration::ZERO,
        }
    }
}

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let stderr = rustix::stdio::stderr();
        let mut ready = [PollFd::new(&stderr, PollFlags::OUT)];
        let patience = Timespec::try_from(self.patience).unwrap_or_default();
        let room = poll(&mut ready, Some(&patience)).is_ok_and(|count| count > 0);
        if !room {
            return Ok(bytes.len());
        }
        Ok(rustix::io::write(
            stderr,
            &bytes[..bytes.len().min(AT_ONCE)],
        )?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Says how the monitor has ended.
pub fn say_last(text: &str) {
    let mut stderr = Stderr {
        patience: LAST_WORDS,
    };
    // Nobody is left to tell.
    let _ = writeln!(stderr, "patchbay-vmm: {text}");
}

/// The panic hook. It gives no terminal back: on most threads the filter forbids that, and the guest's end
/// does it.
pub fn report_panic(panic: &PanicHookInfo<'_>) {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("unnamed");
    let backtrace = Backtrace::capture();
    let text = format!("patchbay-vmm: thread {name}: {panic}\n{backtrace}\n");
    // As with any other message.
    let _ = Stderr::new().write_all(text.as_bytes());
}
