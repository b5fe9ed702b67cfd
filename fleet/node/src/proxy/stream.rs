// SPDX-License-Identifier: Apache-2.0
//! Ends streams when the authorization that opened them ends.
//!
//! ```text
//!                      ┌── ended: policy reloaded, certificate refused, too old
//!                      ▼
//!  client ◀── Pumped ◀── task ◀── answer of the monitor
//!  client ──▶ Until ─────────────▶ monitor                (input of the console)
//! ```
//!
//! A separate task reads the monitor's answer, so that a client that does not read cannot keep the
//! stream or its permits. Messages that the monitor has sent before the end are still delivered.
//! After them, the client gets the status with the reason for the end.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::FutureExt;
use http::{HeaderMap, Response};
use http_body::Frame;
use http_body_util::BodyExt;
use tokio::sync::mpsc;
use tonic::Status;
use tonic::body::Body;

use super::allowed::Allowed;
use super::answer::{Ended, Finish, observed};
use super::call::Call;
use super::node::{Node, Reopened};
use super::status;

/// Returns a future that watches the authorization of a stream that `allowed` allows on `guest`.
/// `sees` is true if the client of the stream sees addresses of the kernel.
pub fn ended(
    node: &Arc<Node>,
    call: &Arc<Call>,
    guest: &str,
    allowed: &Allowed,
    sees: bool,
) -> Ended {
    let (node, call, allowed) = (Arc::clone(node), Arc::clone(call), allowed.clone());
    let guest = guest.to_owned();
    let max_age = node.max_stream_age;
    let ended = async move {
        let refused = || refused(&node, &call, &guest, &allowed, sees);
        tokio::select! {
            status = node.admission.until(&call.identity, refused) => status,
            () = tokio::time::sleep(max_age) => {
                status::stream_expired(&format!("a stream lasts {} s at most", max_age.as_secs()))
            }
        }
    };
    ended.boxed().shared()
}

/// Returns the reason why the same stream could not be opened now.
fn refused(node: &Node, call: &Call, guest: &str, allowed: &Allowed, sees: bool) -> Option<Status> {
    if let Err(refused) = node.check_certificate(&call.identity, call.method) {
        return Some(refused);
    }
    match node.reopen(call, guest, allowed) {
        // The monitor received the role and the keys when the stream was opened. For another role
        // or other keys, it might show or allow something else.
        Reopened::Different(role) => {
            let rights = format!(
                "the policy now gives {} other rights, with the role {role}",
                call.principal()
            );
            Some(status::stream_expired(&rights))
        }
        Reopened::Same if node.sees_addresses(call, guest) != sees => {
            let message = format!(
                "the policy has changed whether {} sees addresses of the kernel",
                call.principal()
            );
            Some(status::stream_expired(&message))
        }
        Reopened::Same => None,
        Reopened::Denied(why) => Some(node.deny(call, guest, &why)),
    }
}

/// Forwards the answer of a stream until the answer or its authorization ends.
pub fn guarded(answer: Response<Body>, mut finish: Finish, mut ended: Ended) -> Response<Body> {
    if Status::from_header_map(answer.headers()).is_some() {
        return observed(answer, finish);
    }
    let (parts, mut body) = answer.into_parts();
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        loop {
            let frame = tokio::select! {
                biased;
                status = &mut ended => break end(finish, body, &sender, &status).await,
                // The client has left.
                () = sender.closed() => break,
                frame = body.frame() => frame,
            };
            let Some(frame) = frame else { break };
            match &frame {
                Ok(frame) => {
                    finish.count(frame);
                    if let Some(status) = frame.trailers_ref().and_then(Status::from_header_map) {
                        finish.end(status.code(), status.message());
                    }
                }
                // An error of the body would reset the stream, and the client would not get the
                // status.
                Err(error) => {
                    let status = status::lost(&finish.caller.guest, error.message());
                    break end(finish, body, &sender, &status).await;
                }
            }
            tokio::select! {
                biased;
                status = &mut ended => break end(finish, body, &sender, &status).await,
                sent = sender.send(frame) => if sent.is_err() { break },
            }
        }
    });
    Response::from_parts(parts, Body::new(Pumped(receiver)))
}

/// Ends the stream to the monitor and releases its permits before the client gets the status.
async fn end(
    mut finish: Finish,
    body: Body,
    sender: &mpsc::Sender<Result<Frame<Bytes>, Status>>,
    status: &Status,
) {
    drop(body);
    finish.end(status.code(), status.message());
    drop(finish);
    let mut trailers = HeaderMap::new();
    let last = match status.add_header(&mut trailers) {
        Ok(()) => Ok(Frame::trailers(trailers)),
        Err(error) => Err(error),
    };
    // The client may have left.
    let _ = sender.send(last).await;
}

struct Pumped(mpsc::Receiver<Result<Frame<Bytes>, Status>>);

impl http_body::Body for Pumped {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        self.0.poll_recv(context)
    }
}

/// Forwards a client's messages until its authorization ends.
pub fn until(body: Body, ended: Ended) -> Body {
    Body::new(Until { body, ended })
}

struct Until {
    body: Body,
    ended: Ended,
}

impl http_body::Body for Until {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if let Poll::Ready(status) = self.ended.poll_unpin(context) {
            return Poll::Ready(Some(Err(status)));
        }
        Pin::new(&mut self.body).poll_frame(context)
    }
}
