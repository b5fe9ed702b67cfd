// SPDX-License-Identifier: Apache-2.0
//! The console of a guest whose monitor keeps the real one: it has no output, takes no input, and
//! closes with the guest.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use patchbay_guest::console::{Console, ConsoleChunk, Listener};

/// A console that reports only the guest's end.
#[derive(Default)]
pub struct NoConsole {
    closed: AtomicBool,
    listeners: Mutex<Vec<Listener>>,
}

impl NoConsole {
    /// Reports that the guest has ended.
    pub fn close(&self) {
        if self.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        for listener in self
            .listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .iter()
        {
            listener();
        }
    }
}

impl Console for NoConsole {
    fn read(&self, _offset: u64) -> ConsoleChunk {
        ConsoleChunk::default()
    }

    fn input(&self, _bytes: &[u8]) -> usize {
        0
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    fn on_output(&self, listener: Listener) {
        let mut listeners = self
            .listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if self.is_closed() {
            listener();
        }
        listeners.push(listener);
    }
}
