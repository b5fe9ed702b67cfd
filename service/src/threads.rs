// SPDX-License-Identifier: Apache-2.0
//! How the service's threads are started.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::JoinHandle;

/// A thread of the service. The monitor decides by its kind what the thread may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadKind {
    /// Changes the keys. Beside memory and clocks it needs what [`crate::guest::Guest::pause`] needs,
    /// and to write and sync the audit log.
    Keys,
    /// Reads and decodes what the agent in the guest sends. It needs epoll and the agent's connections.
    Trace,
}

impl ThreadKind {
    /// The thread's name, at most 15 bytes.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Keys => "keys",
            Self::Trace => "trace",
        }
    }
}

/// What a thread runs.
pub type Body = Box<dyn FnOnce() + Send>;

/// Starts the service's threads.
///
/// The thread must be a plain thread that runs nothing but `body`: it writes to a guest that stands
/// still, and must not wait for other work. An implementation may filter its system calls, set its
/// priority, and decide what a panic of it means.
pub trait Threads: Send + Sync {
    /// Starts a thread that runs `body`.
    ///
    /// # Errors
    /// If the operating system refuses the thread, or the filter that it is to have; `body` was not run
    /// then.
    fn spawn(&self, kind: ThreadKind, body: Body) -> io::Result<JoinHandle<()>>;
}

/// Threads without a filter.
#[derive(Clone, Copy, Debug, Default)]
pub struct PlainThreads;

impl Threads for PlainThreads {
    fn spawn(&self, kind: ThreadKind, body: Body) -> io::Result<JoinHandle<()>> {
        std::thread::Builder::new()
            .name(kind.name().to_owned())
            .spawn(body)
    }
}

/// Runs `body`; a panic in it becomes a sentence about `whose` thread.
///
/// The panic hook has reported where it happened. Values that `body` shares with other threads must be
/// sound wherever it stops.
///
/// # Errors
/// It panicked.
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
