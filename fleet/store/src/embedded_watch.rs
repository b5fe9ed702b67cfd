// SPDX-License-Identifier: Apache-2.0
//! Implements a watch of the embedded store. The watch reads the history to its end, and then waits
//! for the next revision.

use std::sync::Arc;

use async_trait::async_trait;

use super::embedded::Shared;
use crate::store::{Change, Revision, StoreError, Watch};

pub(super) struct EmbeddedWatch {
    shared: Arc<Shared>,
    prefix: String,
    next: Revision,
    revisions: tokio::sync::watch::Receiver<Revision>,
}

impl EmbeddedWatch {
    pub(super) fn new(shared: Arc<Shared>, prefix: String, from: Revision) -> Self {
        let revisions = shared.revision.subscribe();
        Self {
            shared,
            prefix,
            next: from,
            revisions,
        }
    }
}

#[async_trait]
impl Watch for EmbeddedWatch {
    async fn next(&mut self) -> Result<Vec<Change>, StoreError> {
        let ended = || StoreError::Unavailable("the store is closed".to_owned());
        loop {
            let (shared, prefix) = (Arc::clone(&self.shared), self.prefix.clone());
            let from = self.next;
            let read = tokio::task::spawn_blocking(move || shared.changes(&prefix, from));
            let (changes, next) = read.await.map_err(|_| ended())??;
            self.next = next;
            if !changes.is_empty() {
                return Ok(changes);
            }
            let wanted = self.next;
            let waited = self.revisions.wait_for(|&newest| newest >= wanted).await;
            waited.map_err(|_| ended())?;
        }
    }
}
