// SPDX-License-Identifier: Apache-2.0
//! The thread on which everything of the agent's is read and decoded.
//!
//! What the agent sends comes from the guest, and there is much of it under load. Here it takes no
//! turn from the API's thread, which answers fire and park, and meets a stricter filter.

use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::threads::{ThreadKind, Threads};

/// A thread with a runtime of its own, which ends when this is dropped.
#[derive(Debug)]
pub struct TraceThread {
    handle: Handle,
    end: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl TraceThread {
    /// Starts it. It inherits priority and filters from the calling thread, so this comes before the
    /// caller takes on any.
    ///
    /// # Errors
    /// The thread cannot be started, or has no filter.
    pub fn start(threads: &dyn Threads) -> std::io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()?;
        let handle = runtime.handle().clone();
        let (end, ended) = oneshot::channel::<()>();
        let run = move || {
            // The sender is dropped: the end.
            let _ = runtime.block_on(ended);
        };
        let thread = threads.spawn(ThreadKind::Trace, Box::new(run))?;
        Ok(Self {
            handle,
            end: Some(end),
            thread: Some(thread),
        })
    }

    /// Where to spawn what runs on it.
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
