// SPDX-License-Identifier: Apache-2.0

//! The monitor's messages on stderr.
//!
//! The reader of stderr may be stuck. No thread waits for it, because a vCPU thread would miss
//! pauses, and the API's thread could not end the guest.

use std::backtrace::Backtrace;
use std::io::{self, Write};
use std::panic::PanicHookInfo;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// A pipe that polls writable accepts this many bytes without blocking (`PIPE_BUF`, pipe(7)).
const AT_ONCE: usize = 4096;

/// Time allowed for the last message.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Writes to stderr without blocking, and drops the bytes that do not fit.
pub struct Stderr {
    patience: Duration,
}

impl Stderr {
    /// Creates a writer that never waits for room.
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

/// Reports how the monitor ended.
pub fn say_last(text: &str) {
    let mut stderr = Stderr {
        patience: LAST_WORDS,
    };
    // Nothing can be done if stderr is closed.
    let _ = writeln!(stderr, "patchbay-vmm: {text}");
}

/// The panic hook. It does not restore the terminal, because most threads' filters forbid that. The
/// terminal is restored when the guest ends.
pub fn report_panic(panic: &PanicHookInfo<'_>) {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("unnamed");
    let backtrace = Backtrace::capture();
    let text = format!("patchbay-vmm: thread {name}: {panic}\n{backtrace}\n");
    // A message that does not fit is dropped.
    let _ = Stderr::new().write_all(text.as_bytes());
}
