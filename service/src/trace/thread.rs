// SPDX-License-Identifier: Apache-2.0
//! The thread that reads and decodes the agent's messages.
//!
//! The messages come from the guest, in large numbers under load. A dedicated thread keeps them
//! from delaying the API's thread, which answers fire and park. It also has a stricter filter.

use tokio::runtime::Handle;
use tokio::sync::oneshot;

use patchbay_guest::threads::{ThreadKind, Threads};

/// A thread with its own tokio runtime. Dropping this ends it.
#[derive(Debug)]
pub struct TraceThread {
    handle: Handle,
    end: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl TraceThread {
    /// Starts the thread, which inherits the priority and the filters of the calling thread. So the
    /// caller must start the thread before it changes its own priority and filters.
    ///
    /// # Errors
    /// The thread cannot be started, or its filter cannot be installed.
    pub fn start(threads: &dyn Threads) -> std::io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()?;
        let handle = runtime.handle().clone();
        let (end, ended) = oneshot::channel::<()>();
        let run = move || {
            // Dropping the sender ends the thread.
            let _ = runtime.block_on(ended);
        };
        let thread = threads.spawn(ThreadKind::Trace, Box::new(run))?;
        Ok(Self {
            handle,
            end: Some(end),
            thread: Some(thread),
        })
    }

    /// Returns a handle to spawn tasks on the thread.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }
}

impl Drop for TraceThread {
    fn drop(&mut self) {
        self.end.take();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of the agent's events panicked");
        }
    }
}
