// SPDX-License-Identifier: Apache-2.0
//! A console that a test prints to.

use std::sync::{Mutex, PoisonError};

use crate::console::{Console, ConsoleChunk, Listener};

#[derive(Default)]
struct State {
    output: Vec<u8>,
    input: Vec<u8>,
    closed: bool,
}

/// A console that keeps all output and all input.
#[derive(Default)]
pub struct TestConsole {
    state: Mutex<State>,
    listeners: Mutex<Vec<Listener>>,
}

impl TestConsole {
    /// Appends output of the guest.
    pub fn print(&self, text: &[u8]) {
        self.change(|state| state.output.extend_from_slice(text));
    }

    /// Closes the console, as at the end of the guest.
    pub fn close(&self) {
        self.change(|state| state.closed = true);
    }

    /// Returns everything that was typed so far.
    #[must_use]
    pub fn typed(&self) -> Vec<u8> {
        self.look(|state| state.input.clone())
    }

    fn look<T>(&self, at: impl FnOnce(&mut State) -> T) -> T {
        at(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        self.look(change);
        let listeners = self.listeners.lock();
        for listener in listeners.unwrap_or_else(PoisonError::into_inner).iter() {
            listener();
        }
    }
}

impl Console for TestConsole {
    fn read(&self, offset: u64) -> ConsoleChunk {
        let skip = usize::try_from(offset).unwrap_or(usize::MAX);
        ConsoleChunk {
            offset,
            bytes: self.look(|state| {
                let rest = state.output.get(skip..).unwrap_or_default();
                rest[..rest.len().min(32 << 10)].to_vec()
            }),
        }
    }

    fn input(&self, bytes: &[u8]) -> usize {
        self.look(|state| state.input.extend_from_slice(bytes));
        bytes.len()
    }

    fn is_closed(&self) -> bool {
        self.look(|state| state.closed)
    }

    fn on_output(&self, listener: Listener) {
        let listeners = self.listeners.lock();
        listeners
            .unwrap_or_else(PoisonError::into_inner)
            .push(listener);
    }
}
