// SPDX-License-Identifier: Apache-2.0
//! Runs calls that a hung file system blocks for ever.
//!
//! Each call has a thread of its own. Threads of the runtime's pool would be lost for everything
//! else that needs them, and the runtime would wait for them when it ends.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

/// Threads by name, at most one for each. However often a hung file is asked for, it occupies one
/// thread, and other files are not affected.
#[derive(Clone, Debug, Default)]
pub struct Threads(Arc<Mutex<HashMap<String, Weak<Semaphore>>>>);

impl Threads {
    /// Runs `work` in a thread as soon as the previous thread of this name has ended. If the future
    /// is dropped, the thread continues, and its result is dropped.
    ///
    /// # Errors
    /// There is no further thread, or `work` panicked.
    pub async fn run<T: Send + 'static>(
        &self,
        name: &str,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        let turn = self.turn(name).await?;
        in_thread(move || {
            let done = work();
            drop(turn);
            done
        })
        .await
    }

    /// Waits until no thread has this name. The name is taken while the permit exists.
    async fn turn(&self, name: &str) -> io::Result<OwnedSemaphorePermit> {
        let turns = {
            let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            // Specs may name any number of commands.
            all.retain(|_, turns| turns.strong_count() > 0);
            let known = all.get(name).and_then(Weak::upgrade);
            known.unwrap_or_else(|| {
                let turns = Arc::new(Semaphore::new(1));
                all.insert(name.to_owned(), Arc::downgrade(&turns));
                turns
            })
        };
        turns.acquire_owned().await.map_err(io::Error::other)
    }
}

/// Runs `work` in a thread of its own. If the future is dropped, the thread continues, and its
/// result is dropped.
///
/// # Errors
/// There is no further thread, or `work` panicked.
pub async fn in_thread<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let (done, result) = oneshot::channel();
    let thread = std::thread::Builder::new().name("gate".to_owned());
    // A thread that hangs is never joined.
    drop(thread.spawn(move || drop(done.send(work())))?);
    result.await.map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use std::fs::{File, OpenOptions};
    use std::time::Duration;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    /// Checks a FIFO that nobody writes, which blocks its reader as a hung file system does.
    #[tokio::test]
    async fn a_file_that_hangs_occupies_one_thread_and_no_other_name() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let fifo = folder.path().join("fifo");
        let made = mknodat(CWD, &fifo, FileType::Fifo, Mode::RWXU, 0);
        made.expect("created");
        let threads = Threads::default();
        let open = |path: &std::path::Path| {
            let path = path.to_owned();
            move || File::open(path).map(drop)
        };
        let late = async |limit| {
            let opening = threads.run("hung", open(&fifo));
            tokio::time::timeout(limit, opening).await.is_err()
        };
        assert!(late(Duration::from_millis(50)).await);
        // The second call waits for its turn and has no thread: only one reader is released below.
        assert!(late(Duration::from_millis(50)).await);
        let other = threads.run("other", || 7).await.expect("a thread");
        assert_eq!(other, 7);
        let writer = OpenOptions::new().write(true).open(&fifo);
        drop(writer.expect("there is a reader"));
        let next = threads.run("hung", || 8).await.expect("a thread");
        assert_eq!(next, 8, "the thread has ended");
        let all = threads.0.lock().expect("no panic");
        assert!(all.len() <= 2, "{all:?}");
    }
}
