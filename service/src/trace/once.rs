// SPDX-License-Identifier: Apache-2.0
//! Makes each change once per request id (AIP-155).
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
//! A repeat waits for the change that is in progress. No lock is held while a change is made.

use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::error::TraceError;
use super::tracer::TraceOutcome;
use crate::keys::replay::{Replay, RequestId};

/// Maximum number of answers that are kept, and of the results in them.
const ANSWERS: usize = 256;
const RESULTS: usize = 65_536;

/// Identifies a change.
#[derive(Clone, Debug)]
pub struct Once {
    /// The client.
    pub client: String,
    /// The client's id of the request.
    pub request: RequestId,
}

impl Once {
    fn id(&self) -> (String, String) {
        (self.client.clone(), self.request.as_str().to_owned())
    }
}

/// Earlier answers, and changes in progress.
#[derive(Debug)]
pub struct Answers {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// The boot to which the changes were made.
    boot: Option<u64>,
    made: Replay<TraceOutcome>,
    /// Dropping the sender signals the end of the change.
    making: HashMap<(String, String), (RequestId, watch::Sender<()>)>,
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

    /// Makes a change, or returns the answer of the earlier request with the same id. A failed
    /// change may be retried. Answers from a boot other than `boot` are dropped. Without `once`,
    /// the change is always made.
    ///
    /// # Errors
    /// The error of the change, or [`TraceError`] if the request id belongs to another change.
    pub async fn once(
        &self,
        once: Option<Once>,
        boot: Option<u64>,
        change: impl Future<Output = Result<TraceOutcome, TraceError>>,
    ) -> Result<TraceOutcome, TraceError> {
        let Some(once) = once else {
            return change.await;
        };
        loop {
            let mut being_made = match self.find(&once, boot)? {
                Found::Made(outcome) => return Ok((*outcome).clone()),
                Found::Making(being_made) => being_made,
                Found::New => break,
            };
            // An error means that the change has ended.
            let _ = being_made.changed().await;
        }
        let _making = Making {
            answers: self,
            id: once.id(),
        };
        let outcome = Arc::new(change.await?);
        let results = outcome.results.len();
        let mut state = self.state();
        if state.boot == boot {
            let request = Some(&once.request);
            state
                .made
                .remember(&once.client, request, &outcome, results);
        }
        Ok((*outcome).clone())
    }

    /// Looks for an earlier answer or a change in progress. If there is neither, registers a change
    /// that begins now.
    fn find(&self, once: &Once, boot: Option<u64>) -> Result<Found, TraceError> {
        let mut state = self.state();
        if state.boot != boot {
            state.made.clear();
            state.boot = boot;
        }
        if let Some(earlier) = state.made.find(&once.client, Some(&once.request))? {
            return Ok(Found::Made(earlier));
        }
        if let Some((request, end)) = state.making.get(&once.id()) {
            once.request.check_repeat(request)?;
            return Ok(Found::Making(end.subscribe()));
        }
        let making = (once.request.clone(), watch::Sender::new(()));
        state.making.insert(once.id(), making);
        Ok(Found::New)
    }
}

/// A change in progress. Dropping this ends it.
struct Making<'a> {
    answers: &'a Answers,
    id: (String, String),
}

impl Drop for Making<'_> {
    fn drop(&mut self) {
        self.answers.state().making.remove(&self.id);
    }
}
