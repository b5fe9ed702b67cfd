// SPDX-License-Identifier: Apache-2.0
//! Changes that are made once, however often they are asked for (AIP-155).
//!
//! ```text
//!  asked ──▶ answered before? ──▶ the earlier answer
//!    ▲           │ no
//!    │           ▼
//!    │       being made? ── wait until it is made, or has failed ──┐
//!    │           │ no                                              │
//!    │           ▼                                                 │
//!    │        make it ──▶ remember the answer                      │
//!    └─────────────────────────────────────────────────────────────┘
//! ```
//!
//! Who waits, waits for that one change: no lock is held while a change is made.

use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::error::TraceError;
use super::tracer::TraceOutcome;
use crate::keys::KeysError;
use crate::keys::replay::{Content, Replay};

/// Answers that are kept for their request ids, and results in them.
const ANSWERS: usize = 256;
const RESULTS: usize = 65_536;

/// What names a change.
#[derive(Clone, Debug, Default)]
pub struct Once {
    /// Who asks.
    pub client: String,
    /// As the client named the change; empty if it may be made each time.
    pub request_id: String,
    /// Of the change.
    pub content: Content,
}

/// Answers, and changes that are being made.
#[derive(Debug)]
pub struct Answers {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// The kernel that the changes were made to.
    boot: Option<u64>,
    made: Replay<TraceOutcome>,
    /// The sender is dropped when the change has ended.
    making: HashMap<(String, String), (Content, watch::Sender<()>)>,
}

impl Default for Answers {
    fn default() -> Self {
        let state = State {
            boot: None,
            made: Replay::new(ANSWERS, RESULTS),
            making: HashMap::new(),
        };
        Self {
            state: Mutex::new(state),
        }
    }
}

enum Found {
    Made(Arc<TraceOutcome>),
    Making(watch::Receiver<()>),
    New,
}

impl Answers {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a change, or answers what it led to when it was made. What failed may be tried again, and
    /// what was made to another kernel than `boot` is forgotten.
    ///
    /// # Errors
    /// Of the change, and if the request id was used for another.
    pub async fn once(
        &self,
        once: Once,
        boot: Option<u64>,
        change: impl Future<Output = Result<TraceOutcome, TraceError>>,
    ) -> Result<TraceOutcome, TraceError> {
        if once.request_id.is_empty() {
            return change.await;
        }
        loop {
            let mut being_made = match self.find(&once, boot)? {
                Found::Made(outcome) => return Ok((*outcome).clone()),
                Found::Making(being_made) => being_made,
                Found::New => break,
            };
            // The error is the end of the change.
            let _ = being_made.changed().await;
        }
        let _making = Making {
            answers: self,
            id: (once.client.clone(), once.request_id.clone()),
        };
        let outcome = Arc::new(change.await?);
        let results = outcome.results.len();
        let mut state = self.state();
        if state.boot == boot {
            state.made.remember(
                &once.client,
                &once.request_id,
                once.content,
                &outcome,
                results,
            );
        }
        Ok((*outcome).clone())
    }

    /// A new one is being made from now on.
    fn find(&self, once: &Once, boot: Option<u64>) -> Result<Found, TraceError> {
        let mut state = self.state();
        if state.boot != boot {
            state.made.clear();
            state.boot = boot;
        }
        if let Some(earlier) = state
            .made
            .find(&once.client, &once.request_id, &once.content)?
        {
            return Ok(Found::Made(earlier));
        }
        let id = (once.client.clone(), once.request_id.clone());
        match state.making.get(&id) {
            Some((content, end)) if *content == once.content => Ok(Found::Making(end.subscribe())),
            Some(_) => Err(KeysError::RequestIdReused {
                request_id: once.request_id.clone(),
            }
            .into()),
            None => {
                let made = (once.content, watch::Sender::new(()));
                state.making.insert(id, made);
                Ok(Found::New)
            }
        }
    }
}

/// A change that is being made, until it is dropped.
struct Making<'a> {
    answers: &'a Answers,
    id: (String, String),
}

impl Drop for Making<'_> {
    fn drop(&mut self) {
        self.answers.state().making.remove(&self.id);
    }
}
