// SPDX-License-Identifier: Apache-2.0
//! Sends the state of the page as server-sent events, once when a stream opens and again after each
//! change.
//!
//! Every event contains the whole state, so a browser that reconnects misses nothing. A browser
//! that reports the id of the current state gets its first event at the next change.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::{FutureExt, Stream, StreamExt, stream};
use hyper::body::Frame;
use patchbay_access::identity::Identity;
use patchbay_access::listen::DEFAULT_STREAM_AGE;
use tokio::sync::watch;

use super::{Shared, access, routes, state};

/// The minimum time between events. Changes within this time are sent as one event.
const MIN_INTERVAL: Duration = Duration::from_millis(150);
/// The interval between keepalive comments, by which each side notices that its peer is gone.
const KEEPALIVE: Duration = Duration::from_secs(15);

/// An open stream. Open streams are counted, so that guests are queried only while there is one.
struct Viewer(Arc<Shared>);

impl Viewer {
    fn new(shared: Arc<Shared>) -> Self {
        shared.viewers.send_modify(|viewers| *viewers += 1);
        Self(shared)
    }
}

impl Drop for Viewer {
    fn drop(&mut self) {
        self.0.viewers.send_modify(|viewers| *viewers -= 1);
    }
}

struct Events {
    viewer: Viewer,
    principal: String,
    rollout: Option<String>,
    changes: watch::Receiver<u64>,
    heat: watch::Receiver<Arc<super::heat::Observed>>,
    is_due: bool,
    /// Resolves with the reason when the principal may no longer see the page.
    refused: BoxFuture<'static, String>,
    is_over: bool,
}

/// Returns the stream of events. It ends when the principal may no longer see the page, and its
/// last event then gives the reason. It also ends at its maximum age, after which a browser
/// reconnects.
pub fn stream(
    shared: Arc<Shared>,
    by: &Identity,
    rollout: Option<String>,
    last_id: Option<&str>,
) -> impl Stream<Item = Result<Frame<Bytes>, Infallible>> + use<> {
    let (changes, heat) = (shared.controller.changes(), shared.heat.subscribe());
    let is_due = last_id != Some(&id(&shared, &changes, &heat));
    let events = Events {
        refused: refused(Arc::clone(&shared), by.clone()).boxed(),
        is_over: false,
        viewer: Viewer::new(shared),
        principal: by.principal.clone(),
        rollout,
        changes,
        heat,
        is_due,
    };
    let old = Box::pin(tokio::time::sleep(DEFAULT_STREAM_AGE));
    let events = stream::unfold(events, |mut events| async move {
        let text = events.next_unless_refused().await?;
        Some((Ok(Frame::data(Bytes::from(text))), events))
    });
    events.take_until(old)
}

/// Waits until the principal may no longer see the page, and returns the reason.
async fn refused(shared: Arc<Shared>, by: Identity) -> String {
    let refusal = || {
        if let Err(refusal) = shared.admission.check(&by) {
            return Some(refusal.to_string());
        }
        let policy = shared.admission.policy().current();
        access::may_view(&policy, &by.principal, None).err()
    };
    shared.admission.until(&by, refusal).await
}

fn id(
    shared: &Shared,
    changes: &watch::Receiver<u64>,
    heat: &watch::Receiver<Arc<super::heat::Observed>>,
) -> String {
    let (changes, observed) = (*changes.borrow(), heat.borrow().at);
    format!("{:x}-{changes}-{observed}", shared.incarnation)
}

impl Events {
    async fn next_unless_refused(&mut self) -> Option<String> {
        if self.is_over {
            return None;
        }
        let mut refused = std::mem::replace(&mut self.refused, std::future::pending().boxed());
        let next = tokio::select! {
            biased;
            why = &mut refused => Err(why),
            text = self.next() => Ok(text),
        };
        self.refused = refused;
        Some(next.unwrap_or_else(|why| {
            self.is_over = true;
            let data = serde_json::to_string(&why).unwrap_or_default();
            format!("event: refused\ndata: {data}\n\n")
        }))
    }

    async fn next(&mut self) -> String {
        if !std::mem::take(&mut self.is_due) {
            let changed = async {
                tokio::time::sleep(MIN_INTERVAL).await;
                tokio::select! {
                    // The senders live in `shared`, so this cannot fail.
                    _ = self.changes.changed() => {}
                    _ = self.heat.changed() => {}
                }
            };
            if tokio::time::timeout(KEEPALIVE, changed).await.is_err() {
                return ": still here\n\n".to_owned();
            }
        }
        let shared = &self.viewer.0;
        self.changes.mark_unchanged();
        self.heat.mark_unchanged();
        let id = id(shared, &self.changes, &self.heat);
        let page = state::page(shared, &self.principal, self.rollout.as_deref());
        let data = routes::shown(&page).unwrap_or_default();
        let data = String::from_utf8_lossy(&data);
        format!("id: {id}\nretry: 1000\ndata: {data}\n\n")
    }
}
