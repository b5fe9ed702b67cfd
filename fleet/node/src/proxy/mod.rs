// SPDX-License-Identifier: Apache-2.0
//! Forwards every call of `patchbay.v1` from a client to the monitor of its guest.
//!
//! ```text
//!  caller    ─▶ first message ─▶ guest ─▶ role, rules ─▶ intent ─▶ monitor ─▶ outcome
//!  (listen)      (frame, fields)           (policy)        (audit)  (keys)     (answer)
//! ```
//!
//! Messages are forwarded unchanged. Where the policy limits keys, the rules are sent with the
//! call, and the monitor applies them to the keys that it is about to change.

mod addresses;
mod allowed;
mod answer;
mod call;
mod console;
mod fields;
mod frame;
mod give_back;
mod guests;
mod node;
mod person;
mod received;
mod reports;
mod status;
mod stream;

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Request, Response};
use patchbay_access::audit::Entry;
use patchbay_access::identity::Identity;
use patchbay_access::listen::{MAX_CALLS, Peer};
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::{Code, Status};
use tower::Service;

use self::allowed::Allowed;
use self::answer::{Finish, Whole, observed};
use self::call::Call;
use self::console::{Typed, Watched};
use self::frame::{First, first_message};
pub use self::node::Node;
use self::received::Received;
use self::stream::{guarded, until};
use crate::monitors::HostedGuest;
use patchbay_proto::methods::Method;

/// The timeout for the first message of a call.
const FIRST_MESSAGE_TIMEOUT: Duration = Duration::from_secs(30);

impl Node {
    async fn handle(self: &Arc<Self>, request: Request<Body>) -> Response<Body> {
        let Some(method) = Method::of_path(request.uri().path()) else {
            return Status::unimplemented("no such method in patchbay.v1").into_http();
        };
        let answered = self.admitted(method, request).await;
        answered.unwrap_or_else(|(status, finish)| {
            if let Some(mut finish) = finish {
                finish.end(status.code(), status.message());
            } else {
                self.metrics
                    .call(method.name, status::code_name(status.code()));
            }
            status.into_http()
        })
    }

    async fn admitted(
        self: &Arc<Self>,
        method: &'static Method,
        request: Request<Body>,
    ) -> Result<Response<Body>, (Status, Option<Finish>)> {
        let (parts, body) = request.into_parts();
        let peer = parts.extensions.get::<Peer>();
        let peer = peer.ok_or_else(|| (Status::internal("the connection has no peer"), None))?;
        let permit = Arc::clone(&peer.calls).try_acquire_owned().map_err(|_| {
            let message = format!(
                "this connection carries {MAX_CALLS} calls already; end some or open another connection"
            );
            (status::exhausted("TOO_MANY_CALLS", &message), None)
        })?;
        let mut finish = Finish::new(self.metrics.clone(), method.name, permit);
        let identity = Arc::clone(&peer.identity);
        let answered = async {
            self.check_certificate(&identity, method)?;
            let first =
                tokio::time::timeout(FIRST_MESSAGE_TIMEOUT, first_message(body, &self.held));
            let first = first.await.map_err(|_| {
                Status::deadline_exceeded(format!("no message within {FIRST_MESSAGE_TIMEOUT:?}"))
            })??;
            let First {
                message,
                rest,
                permit,
            } = first;
            finish.permits.extend(permit);
            let mut call = Call::new(method, identity, &parts.headers, message)?;
            finish.caller = call.caller();
            if method.name == "ListGuests" {
                self.identify_person(&mut call, "")?;
                return guests::list(self, &call).await;
            }
            let (guest, allowed) = self.guest_of(&call)?;
            self.identify_person(&mut call, &guest.name)?;
            finish.caller = call.caller();
            self.forward(call, guest, allowed, rest, &mut finish).await
        };
        match answered.await {
            Ok(answer) => Ok(match finish.ended.take() {
                Some(ended) => guarded(answer, finish, ended),
                None => observed(answer, finish),
            }),
            Err(status) => Err((status, Some(finish))),
        }
    }

    /// Checks the caller's certificate, because a connection may outlive it. Records a refusal in
    /// the audit log.
    fn check_certificate(&self, identity: &Identity, method: &Method) -> Result<(), Status> {
        let checked = self.admission.check(identity);
        checked.map_err(|refusal| {
            let principal = &identity.principal;
            self.metrics.denied(method.name);
            self.audit
                .denied(principal, "", method.path, "", &refusal.to_string());
            status::certificate_refused(principal, refusal)
        })
    }

    /// Returns the guest that the call names. The policy decides about the name first, so that the
    /// answer reveals nothing about guests that the caller may not see.
    fn guest_of(&self, call: &Call) -> Result<(HostedGuest, Allowed), Status> {
        let name = call.guest.as_str();
        let found = if name.is_empty() {
            self.directory.only()
        } else {
            self.decide_role(call, name)?;
            self.directory.find(name)
        };
        if let Some(guest) = found {
            let allowed = self.decide_role(call, &guest.name)?;
            return Ok((guest, allowed));
        }
        let visible = guests::visible(self, call);
        let known: Vec<_> = visible.into_iter().map(|guest| guest.name).collect();
        Err(if name.is_empty() && !self.directory.all().is_empty() {
            status::guest_not_named(&known)
        } else {
            status::guest_not_found(name, &known)
        })
    }

    async fn forward(
        self: &Arc<Self>,
        call: Call,
        guest: HostedGuest,
        allowed: Allowed,
        rest: frame::Rest,
        finish: &mut Finish,
    ) -> Result<Response<Body>, Status> {
        let permit = guest.monitor.admit(call.changes()).ok_or_else(|| {
            let message = format!("guest {:?} has too many calls; try again later", guest.name);
            status::exhausted("TOO_MANY_CALLS", &message)
        })?;
        finish.permits.push(permit);
        let allowed = self.authorise(&call, &guest.name, allowed)?;
        if call.changes() || call.reads_records() {
            finish.pending = Some(self.intend(&call, &guest, &allowed).await?);
        }
        if call.method.streams {
            let call = Arc::new(call);
            return self.stream(&call, &guest, &allowed, rest, finish).await;
        }
        let body = Body::new(http_body_util::Full::new(frame::framed(&call.message)));
        let request = call.request(body, &allowed)?;
        let sent = guest.monitor.send(request).await;
        let answer = sent.map_err(|(reached, error)| {
            if reached && call.changes() {
                status::lost(&guest.name, &error)
            } else {
                status::unreachable(&guest.name, &error)
            }
        })?;
        if !call.changes() {
            let sees = self.sees_addresses(&call, &guest.name);
            return self.shown(&call, answer, sees);
        }
        let whole = Whole::read(answer, &guest.name).await?;
        reports::count_flip(self, call.method.effect, &whole.body);
        // The outcome is recorded before the client gets the answer.
        let outcome = whole.status();
        if outcome.code() == Code::PermissionDenied {
            self.metrics.denied(call.method.name);
        }
        finish.end(outcome.code(), outcome.message());
        Ok(whole.into_response())
    }

    /// Opens a stream, which ends when its authorization ends.
    async fn stream(
        self: &Arc<Self>,
        call: &Arc<Call>,
        guest: &HostedGuest,
        allowed: &Allowed,
        rest: frame::Rest,
        finish: &mut Finish,
    ) -> Result<Response<Body>, Status> {
        let sees = self.sees_addresses(call, &guest.name);
        finish.received = call.streams_records().then(Received::default);
        let ended = stream::ended(self, call, &guest.name, allowed, sees);
        let body = match call.method.name {
            "StreamConsole" => {
                let typed = finish.typed.insert(Typed::default()).clone();
                let watched = Watched::new(rest.after(&call.message), typed);
                until(Body::new(watched), ended.clone())
            }
            _ => Body::new(http_body_util::Full::new(frame::framed(&call.message))),
        };
        let request = call.request(body, allowed)?;
        let sent = tokio::select! {
            biased;
            status = ended.clone() => return Err(status),
            sent = guest.monitor.send(request) => sent,
        };
        finish.ended = Some(ended);
        let answer = sent.map_err(|(reached, error)| match reached && call.changes() {
            true => status::lost(&guest.name, &error),
            false => status::unreachable(&guest.name, &error),
        })?;
        self.shown(call, answer, sees)
    }

    /// Returns the answer. If the caller may not see addresses, the answer contains none.
    fn shown(
        &self,
        call: &Call,
        answer: Response<Body>,
        sees: bool,
    ) -> Result<Response<Body>, Status> {
        match sees {
            true => Ok(answer),
            false => addresses::hide(answer, call.method, &self.descriptors),
        }
    }

    /// Writes the intent of a change, or the begin of a call that reads records, to the audit log.
    async fn intend(
        &self,
        call: &Call,
        guest: &HostedGuest,
        allowed: &Allowed,
    ) -> Result<patchbay_access::audit::Pending, Status> {
        let entry = Entry::Intent {
            principal: call.identity.principal.clone(),
            person: call.person.clone().unwrap_or_default(),
            method: call.method.path.to_owned(),
            guest: guest.name.clone(),
            rule: allowed.rule.clone(),
            request: call.text(&self.descriptors),
            trace_id: call.trace_id(),
        };
        if call.reads_records() && !self.audit.admits_reading(&entry) {
            let message = "too many calls that read logs or events were opened on this host, and \
                           each is recorded in the audit log; try again later";
            return Err(status::exhausted("TOO_MANY_CALLS", message));
        }
        let written = self.audit.intend(entry).await;
        written.map_err(|error| status::audit_log_unwritable(&error))
    }
}

/// A service of `patchbay.v1` to which the server routes calls.
#[derive(Clone)]
pub struct Proxy<const SERVICE: usize>(Arc<Node>);

/// The services, by their number in [`Proxy`].
const SERVICES: [&str; 3] = [
    "patchbay.v1.GuestService",
    "patchbay.v1.StaticKeysService",
    "patchbay.v1.TracepointsService",
];

impl<const SERVICE: usize> Proxy<SERVICE> {
    /// Creates the service for the guests of this host.
    pub fn new(node: Arc<Node>) -> Self {
        Self(node)
    }
}

impl<const SERVICE: usize> NamedService for Proxy<SERVICE> {
    const NAME: &'static str = SERVICES[SERVICE];
}

impl<const SERVICE: usize> Service<Request<Body>> for Proxy<SERVICE> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let node = Arc::clone(&self.0);
        Box::pin(async move { Ok(node.handle(request).await) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use patchbay_proto::methods::METHODS;

    #[test]
    fn every_service_is_routed() {
        for method in METHODS {
            let service = format!("patchbay.v1.{}", method.service);
            assert!(SERVICES.contains(&service.as_str()), "{service}");
        }
    }
}
