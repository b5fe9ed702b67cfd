// SPDX-License-Identifier: Apache-2.0
//! Sends the events that a client has asked for.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use patchbay_observe::trace::Start;
use patchbay_proto::v1::{self, TraceMark};
use static_keys::Patterns;
use tokio::sync::mpsc;
use tonic::Status;

use super::super::error::TraceError;
use super::super::link::AgentLink;
use super::super::stream::{Batch, FloodGuard, Selection};
use super::super::tasks::Tasks;
use super::reader::{Place, Polled, Reader};
use crate::keys::{Keys, KeysError};

/// Time between two polls after an event.
const BUSY: Duration = Duration::from_millis(5);
/// Maximum time between two polls. Without an event, the time doubles up to this.
const IDLE: Duration = Duration::from_millis(100);

type Sender = mpsc::Sender<Result<v1::StreamTracepointEventsResponse, Status>>;

/// The events that a client selects.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// The name of the instance; empty for the top level.
    pub instance: String,
    /// The names of the events.
    pub patterns: Patterns,
    /// Limit of events per second.
    pub events_per_second: u32,
    /// Begin with the events that the rings hold.
    pub buffered: bool,
}

/// A client's view of the events.
pub struct MemoryStream {
    reader: Reader,
    patterns: Patterns,
    guard: FloodGuard,
    tasks: Tasks,
    /// The agent, which knows the names of tasks, if it is connected.
    link: AgentLink,
}

impl MemoryStream {
    /// Finds the rings and fixes the position in them.
    ///
    /// # Errors
    /// They are not found or cannot be read, or there is no such instance.
    pub async fn begin(
        keys: Arc<Keys>,
        link: AgentLink,
        wanted: Wanted,
    ) -> Result<Self, TraceError> {
        let instance = wanted.instance;
        let start = match wanted.buffered {
            true => Start::Oldest,
            false => Start::End,
        };
        let begin = tokio::task::spawn_blocking(move || {
            let place = Place::find(&keys, &instance)?;
            Reader::begin(keys, place, start)
        });
        Ok(Self {
            reader: begin.await.map_err(failed)??,
            patterns: wanted.patterns,
            guard: FloodGuard::new(wanted.events_per_second),
            tasks: Tasks::default(),
            link,
        })
    }

    /// Sends events until the client disconnects.
    pub async fn tell(mut self, sender: &Sender) {
        let first = v1::StreamTracepointEventsResponse {
            source: v1::TraceSource::Memory.into(),
            ..Default::default()
        };
        if sender.send(Ok(first)).await.is_err() {
            return;
        }
        let mut rest = BUSY;
        loop {
            // Nothing is read until the client has taken the previous events.
            let Ok(permit) = sender.reserve().await else {
                return;
            };
            drop(permit);
            let polled = tokio::task::spawn_blocking(move || {
                let polled = self.reader.poll();
                (self, polled)
            });
            let polled = match polled.await {
                Ok((own, polled)) => {
                    self = own;
                    polled
                }
                Err(error) => {
                    let _ = sender.send(Err(failed(error).into())).await;
                    return;
                }
            };
            let more = polled.more;
            let batches = self.batches(polled).await;
            let is_idle = batches.is_empty();
            for batch in batches {
                if sender.send(Ok(batch.to_proto())).await.is_err() {
                    return;
                }
            }
            rest = match is_idle {
                true => (rest * 2).min(IDLE),
                false => BUSY,
            };
            if !more || is_idle {
                tokio::time::sleep(rest).await;
            }
        }
    }

    /// Selects the events of a poll.
    async fn batches(&mut self, polled: Polled) -> Vec<Batch> {
        let Polled {
            mut events,
            mut losses,
            restarted,
            ..
        } = polled;
        // The names are learnt from all events, not only from those that the client wants.
        self.tasks.name(&self.link, &mut events).await;
        let mut selection = Selection::default();
        events.retain(|event| selection.wants(&self.patterns, &event.source));
        let clock = self.link.clock();
        for event in &mut events {
            event.time = clock.host_time(event.guest_time_ns).map(Into::into);
        }
        drop(clock);
        let (before, now) = (events.len(), Instant::now());
        events.retain(|_| self.guard.pass(now));
        losses.flood = (before - events.len()) as u64;
        let mark = restarted.then(|| TraceMark {
            time: Some(SystemTime::now().into()),
            text: "the guest's rings begin anew: they were emptied or exchanged, or another kernel runs".to_owned(),
        });
        Batch::split(events.into_iter().map(Arc::new), losses, mark)
    }
}

fn failed(error: tokio::task::JoinError) -> TraceError {
    let message = format!("the trace events cannot be read: {error}; report it, it is a bug");
    KeysError::Internal { message }.into()
}
