// SPDX-License-Identifier: Apache-2.0
//! Claims on events that are being armed or disarmed.

use std::time::Duration;

use super::Tracer;
use crate::trace::error::TraceError;

/// Exclusive right to arm and disarm these events. Dropping this value releases the events.
pub(in crate::trace) struct Moving<'a> {
    tracer: &'a Tracer,
    pub names: Vec<String>,
}

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        {
            let mut book = self.tracer.book();
            for name in &self.names {
                book.moving.remove(name);
            }
        }
        self.tracer.moved.send_modify(|count| *count += 1);
    }
}

impl Tracer {
    /// Claims all of the events as soon as none of them is claimed by another call.
    ///
    /// # Errors
    /// [`TraceError::Busy`] if that takes longer than `patience`.
    pub(super) async fn claim(
        &self,
        names: &[String],
        patience: Duration,
    ) -> Result<Moving<'_>, TraceError> {
        let claimed = tokio::time::timeout(patience, self.claim_whenever(names));
        claimed.await.map_err(|_| {
            let book = self.book();
            let mut busy = names.iter().filter(|name| book.moving.contains(*name));
            TraceError::Busy {
                name: busy.next().cloned().unwrap_or_default(),
                waited: patience,
            }
        })
    }

    /// Like [`Tracer::claim`], without a time limit. Each claim ends after the agent's timeout at
    /// the latest.
    pub(in crate::trace) async fn claim_whenever(&self, names: &[String]) -> Moving<'_> {
        let mut moved = self.moved.subscribe();
        loop {
            if let Some(moving) = self.try_claim(names) {
                return moving;
            }
            // This fails only if the sender is dropped, and this tracer owns the sender.
            let _ = moved.changed().await;
        }
    }

    fn try_claim(&self, names: &[String]) -> Option<Moving<'_>> {
        let mut book = self.book();
        if names.iter().any(|name| book.moving.contains(name)) {
            return None;
        }
        book.moving.extend(names.iter().cloned());
        Some(Moving {
            tracer: self,
            names: names.to_vec(),
        })
    }

    /// Claims the events that are neither claimed nor armed by the agent, so that they can be
    /// detached.
    pub(super) fn claim_unarmed(&self, mut names: Vec<String>) -> Moving<'_> {
        let mut book = self.book();
        names.retain(|name| !book.is_agents(name) && !book.moving.contains(name));
        book.moving.extend(names.iter().cloned());
        Moving {
            tracer: self,
            names,
        }
    }
}
