// SPDX-License-Identifier: Apache-2.0
//! Starts the service's threads.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::JoinHandle;

/// A kind of thread. The monitor derives the thread's permissions from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadKind {
    /// Changes the keys, and writes and syncs the audit log. Needs memory, clocks and everything
    /// that [`crate::guest::Guest::pause`] needs.
    Keys,
    /// Reads and decodes messages of the agent in the guest. Needs epoll and the agent's
    /// connections.
    Trace,
}

impl ThreadKind {
    /// Returns the thread's name, at most 15 bytes.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Keys => "keys",
            Self::Trace => "trace",
        }
    }
}

/// The body of a thread.
pub type Body = Box<dyn FnOnce() + Send>;

/// Starts the service's threads.
///
/// Each `body` runs on a thread of its own. The keys thread in particular writes to a stopped
/// guest, so it must not wait for other work. An implementation may filter the thread's system
/// calls, set its priority, and decide what happens if it panics.
pub trait Threads: Send + Sync {
    /// Starts a thread that runs `body`.
    ///
    /// # Errors
    /// The thread cannot be started or its filter cannot be installed; then `body` does not run.
    fn spawn(&self, kind: ThreadKind, body: Body) -> io::Result<JoinHandle<()>>;
}

/// Starts threads without a filter.
#[derive(Clone, Copy, Debug, Default)]
pub struct PlainThreads;

impl Threads for PlainThreads {
    fn spawn(&self, kind: ThreadKind, body: Body) -> io::Result<JoinHandle<()>> {
        std::thread::Builder::new()
            .name(kind.name().to_owned())
            .spawn(body)
    }
}

/// Runs `body` and converts a panic in it to an error message. `whose` names the thread in the
/// message.
///
/// The panic hook has already reported the location. Values that `body` shares with other threads
/// must be consistent wherever it panics.
///
/// # Errors
/// The message, if `body` panicked.
pub fn contain<T>(whose: &str, body: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(body)).map_err(|panic| {
        format!(
            "the monitor's thread of {whose} panicked: {}; report it, it is a bug",
            text_of(&*panic)
        )
    })
}

fn text_of(panic: &(dyn Any + Send)) -> &str {
    match panic.downcast_ref::<String>() {
        Some(text) => text,
        None => panic.downcast_ref::<&str>().copied().unwrap_or("no text"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_its_text() {
        for body in [|| panic!("literal"), || panic!("{}", "literal")] {
            let error = contain("a test", body).unwrap_err();
            assert!(error.contains("a test panicked: literal"), "{error}");
        }
        assert_eq!(contain("a test", || 1), Ok(1));
    }
}
