// SPDX-License-Identifier: Apache-2.0
//! How the service's threads are started.

use std::io;
use std::thread::JoinHandle;

/// A thread of the service. The monitor decides by its kind what the thread may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadKind {
    /// Changes the keys. Beside memory and clocks it needs what [`crate::guest::Guest::pause`] needs,
    /// and to write and sync the audit log.
    Keys,
}

impl ThreadKind {
    /// The thread's name, at most 15 bytes.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Keys => "keys",
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
    /// If the operating system refuses the thread; `body` was not run then.
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
