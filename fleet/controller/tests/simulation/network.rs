// SPDX-License-Identifier: Apache-2.0
//! The calls of drivers. A call is sent when its future is first polled, and the world delivers it
//! and its answer, or loses them.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;

use patchbay_fleet::hosts::Hosts;
use patchbay_fleet::runner::guests::Calls;
use patchbay_proto::v1;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

/// A request on its way to a host.
#[derive(Clone, Debug)]
pub enum Call {
    SetClaims(v1::SetClaimsRequest),
    NotMade { guest: String, owner: String },
}

#[derive(Clone, Debug)]
pub enum Answer {
    SetClaims(Box<v1::SetClaimsResponse>),
    NotMade(v1::ListClaimsResponse),
}

#[derive(Clone, Debug)]
pub struct Sent {
    pub id: u64,
    pub host: String,
    pub call: Call,
}

#[derive(Default)]
struct Content {
    next: u64,
    sent: Vec<Sent>,
    answers: BTreeMap<u64, Result<Answer, Status>>,
}

/// One end of the network.
#[derive(Clone)]
pub struct Network {
    content: Arc<Mutex<Content>>,
    /// The hosts of which the term at this end knows from the registry.
    pub hosts: Hosts,
}

impl Network {
    fn content(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates a network, and the end of a term that knows no hosts.
    pub fn new() -> Self {
        Self {
            content: Arc::default(),
            hosts: Hosts::new(&[]).expect("no names"),
        }
    }

    /// Returns the end of another term, which knows no hosts yet.
    pub fn of_another_term(&self) -> Self {
        Self {
            content: Arc::clone(&self.content),
            ..Self::new()
        }
    }

    /// Returns the calls that were sent since the last time.
    pub fn take_sent(&self) -> Vec<Sent> {
        std::mem::take(&mut self.content().sent)
    }

    pub fn answer(&self, id: u64, answer: Result<Answer, Status>) {
        self.content().answers.insert(id, answer);
    }

    fn call(&self, host: &str, call: Call) -> impl Future<Output = Result<Answer, Status>> + Send {
        let (network, host) = (self.clone(), host.to_owned());
        async move {
            let id = {
                let mut content = network.content();
                content.next += 1;
                let id = content.next;
                content.sent.push(Sent { id, host, call });
                id
            };
            poll_fn(|_| match network.content().answers.remove(&id) {
                Some(answer) => Poll::Ready(answer),
                None => Poll::Pending,
            })
            .await
        }
    }
}

impl Calls for Network {
    async fn set_claims(
        &self,
        host: &str,
        request: impl FnOnce() -> v1::SetClaimsRequest + Send,
    ) -> Result<v1::SetClaimsResponse, Status> {
        match self.call(host, Call::SetClaims(request())).await? {
            Answer::SetClaims(answer) => Ok(*answer),
            Answer::NotMade(_) => unreachable!("answers have the kind of their calls"),
        }
    }

    async fn not_made(
        &self,
        host: &str,
        guest: &str,
        owner: &str,
    ) -> Result<v1::ListClaimsResponse, Status> {
        let (guest, owner) = (guest.to_owned(), owner.to_owned());
        match self.call(host, Call::NotMade { guest, owner }).await? {
            Answer::NotMade(answer) => Ok(answer),
            Answer::SetClaims(_) => unreachable!("answers have the kind of their calls"),
        }
    }

    fn others(&self, host: &str, guest: &str) -> Vec<String> {
        self.hosts.others(host, guest)
    }

    fn elsewhere(&self, host: &str, guest: &str) -> Vec<String> {
        self.hosts.elsewhere(host, guest)
    }
}

/// Returns the answer of a host that does not have the guest.
pub fn not_found(guest: &str) -> Status {
    let metadata = std::collections::HashMap::new();
    let domain = patchbay_proto::ERROR_DOMAIN;
    let details = ErrorDetails::with_error_info("GUEST_NOT_FOUND", domain, metadata);
    Status::with_error_details(Code::NotFound, format!("no guest {guest}"), details)
}

/// Returns the status of a call that had no answer in time.
pub fn timed_out() -> Status {
    Status::deadline_exceeded("no answer")
}

/// Returns the status of a call that could not be sent.
pub fn refused() -> Status {
    Status::unavailable("connection refused")
}
