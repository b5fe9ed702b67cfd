// SPDX-License-Identifier: Apache-2.0
//! Calls `patchbay.v1` on the guests of the fleet's hosts.
//!
//! A leader's connections live only as long as its term. Dropping [`Hosts`] ends every call in
//! progress.

mod error;
mod link;
mod log;
mod registered;

use std::collections::BTreeMap;
use std::future::Future;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use patchbay_proto::pages::Pages;
use patchbay_proto::v1::guest_service_client::GuestServiceClient;
use patchbay_proto::v1::static_keys_service_client::StaticKeysServiceClient;
use patchbay_proto::v1::tracepoints_service_client::TracepointsServiceClient;
use patchbay_proto::{ASSERTION_METADATA, TraceParent, v1};
use tokio::sync::{Semaphore, SemaphorePermit};
use tonic::metadata::MetadataValue;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

pub use patchbay_access::connect::TlsFiles;

pub use self::error::CallError;
use self::link::Link;
use self::log::Log;
pub use self::registered::{Changed, Following, KeysChanged, News};
use crate::store::registry::GuestRecord;

/// The maximum number of concurrent calls to a host. A host serves 128 calls of one connection. Its
/// monitors serve 128 calls of the host, some of which are left for other clients of the host.
const CALLS: usize = 64;
/// The maximum number of concurrent changes on a host.
const CHANGES: usize = 32;
/// The timeout of a call. The service limits a call to 30 s, and the answer needs time to arrive.
const CALL_TIMEOUT: Duration = Duration::from_secs(35);
const MAX_ANSWER_BYTES: usize = 8 << 20;
/// The maximum number of claims that are not made in an answer. One of them is shown.
const NOT_MADE: i32 = 100;

/// The address of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostEndpoint {
    /// The unix socket of the host's `patchbayd`, or of a monitor.
    Socket(PathBuf),
    /// ADDRESS:PORT of the host's `patchbayd`, with mutual TLS. The host's certificate must be for
    /// the host's name, because any writer of the registry can choose the address.
    Address(String, TlsFiles),
}

impl std::fmt::Display for HostEndpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Socket(path) => path.display().fmt(f),
            Self::Address(address, _) => address.fmt(f),
        }
    }
}

/// A host as it is described by the configuration or the registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostConfig {
    pub name: String,
    pub endpoint: HostEndpoint,
    pub labels: BTreeMap<String, String>,
}

/// The hosts and the person for whom calls to them are made.
pub struct Acting {
    pub hosts: Hosts,
    /// The person's principal; empty if no person has caused the calls.
    pub person: String,
}

/// A connected host.
pub struct Host {
    pub config: HostConfig,
    /// True if the host comes from the registry and not from the configuration.
    pub registered: bool,
    link: RwLock<Arc<Link>>,
    calls: Semaphore,
    /// Permits for changes, which must not wait for calls that only read.
    changes: Semaphore,
}

/// All hosts, by name. The registry adds and removes hosts.
#[derive(Clone)]
pub struct Hosts {
    by_name: Arc<RwLock<BTreeMap<String, Arc<Host>>>>,
    /// The records of the registry, by the names of the guest and of its host.
    guests: Arc<RwLock<BTreeMap<String, BTreeMap<String, GuestRecord>>>>,
    /// The changes of hosts and guests in the registry.
    records: Log<Changed>,
    /// The changes of keys alone. Rollouts cause many of them, which must not displace the others.
    keys: Log<KeysChanged>,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("two hosts are named {0:?}; give one of them another name")]
pub struct NameTaken(String);

impl Hosts {
    /// Creates the hosts. The connection to a host is made at the first call.
    ///
    /// # Errors
    /// [`NameTaken`].
    pub fn new(configs: &[HostConfig]) -> Result<Self, NameTaken> {
        let mut by_name = BTreeMap::new();
        for config in configs {
            let host = Arc::new(Host::new(config.clone(), false));
            if by_name.insert(config.name.clone(), host).is_some() {
                return Err(NameTaken(config.name.clone()));
            }
        }
        Ok(Self {
            by_name: Arc::new(RwLock::new(by_name)),
            guests: Arc::default(),
            records: Log::new(),
            keys: Log::new(),
        })
    }

    /// Returns the hosts for calls that are made for this person.
    pub fn acting_for(&self, person: &str) -> Acting {
        Acting {
            hosts: self.clone(),
            person: person.to_owned(),
        }
    }

    pub fn get(&self, name: &str) -> Option<Arc<Host>> {
        let by_name = self.by_name.read().unwrap_or_else(PoisonError::into_inner);
        by_name.get(name).cloned()
    }

    /// Returns all hosts in name order.
    pub fn all(&self) -> Vec<Arc<Host>> {
        let by_name = self.by_name.read().unwrap_or_else(PoisonError::into_inner);
        by_name.values().cloned().collect()
    }
}

/// Limits the time of a whole call, because the limit of tonic ends with the beginning of the
/// answer.
async fn within<T>(call: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
    let answered = tokio::time::timeout(CALL_TIMEOUT, call).await;
    answered.unwrap_or_else(|_| {
        Err(Status::deadline_exceeded(
            "the host does not answer in time",
        ))
    })
}

fn keys_of(channel: Channel) -> StaticKeysServiceClient<Channel> {
    let keys = StaticKeysServiceClient::new(channel);
    keys.max_decoding_message_size(MAX_ANSWER_BYTES)
}

impl Host {
    fn new(config: HostConfig, registered: bool) -> Self {
        Self {
            link: RwLock::new(Link::new(&config)),
            config,
            registered,
            calls: Semaphore::new(CALLS),
            changes: Semaphore::new(CHANGES),
        }
    }

    fn channel(&self) -> Channel {
        self.link().channel.clone()
    }

    fn link(&self) -> Arc<Link> {
        let link = self.link.read().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&link)
    }

    fn guests(&self) -> GuestServiceClient<Channel> {
        GuestServiceClient::new(self.channel())
    }

    fn keys(&self) -> StaticKeysServiceClient<Channel> {
        keys_of(self.channel())
    }

    /// Replaces the channel if the host refuses the controller's certificate or a signature by its
    /// key. The files may have been renewed, so the next call reads them and connects again.
    fn look_at(&self, status: Status) -> Status {
        if CallError::new(&status).is_identity_refused {
            let fresh = Link::new(&self.config);
            *self.link.write().unwrap_or_else(PoisonError::into_inner) = fresh;
        }
        status
    }

    /// Makes a call with a limit on its whole time.
    async fn answer<T>(
        &self,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, Status> {
        let answer = within(call).await;
        Ok(answer.map_err(|status| self.look_at(status))?.into_inner())
    }

    pub async fn list_guests(&self) -> Result<Vec<v1::GuestStatus>, Status> {
        let _permit = self.permit().await?;
        let (mut found, mut page_token) = (Vec::new(), String::new());
        let mut pages = Pages::of("guests");
        loop {
            let request = v1::ListGuestsRequest {
                page_size: 10_000,
                page_token,
                patterns: vec![],
            };
            let mut guests = self.guests();
            let page = self.answer(guests.list_guests(timed(request))).await?;
            let next = pages.next(&page, &page.next_page_token)?;
            found.extend(page.guests);
            match next {
                Some(token) => page_token = token,
                None => return Ok(found),
            }
        }
    }

    /// Replaces the claims of an owner for this person. If `person` is empty, nobody is asserted.
    ///
    /// `request` is called when the call begins. Thousands of members wait for their turns, and
    /// each may have thousands of claims.
    pub async fn set_claims(
        &self,
        request: impl FnOnce() -> v1::SetClaimsRequest,
        person: &str,
    ) -> Result<v1::SetClaimsResponse, Status> {
        let _permit = permit(&self.changes).await?;
        // A call's future has tens of kilobytes, which one that waits for its turn does not need.
        Box::pin(self.send_claims(request(), person)).await
    }

    /// Checks claims for this person without making them.
    pub async fn validate_claims(
        &self,
        request: v1::SetClaimsRequest,
        person: &str,
    ) -> Result<v1::SetClaimsResponse, Status> {
        let _permit = self.permit().await?;
        let request = v1::SetClaimsRequest {
            validate_only: true,
            ..request
        };
        self.send_claims(request, person).await
    }

    async fn send_claims(
        &self,
        request: v1::SetClaimsRequest,
        person: &str,
    ) -> Result<v1::SetClaimsResponse, Status> {
        let link = self.link();
        let assertion = match person {
            "" => None,
            person => Some(link.assertion(&self.config, &request, person)?),
        };
        let mut request = timed(request);
        if let Some(assertion) = assertion {
            let assertion = MetadataValue::from_bytes(&assertion);
            request
                .metadata_mut()
                .insert_bin(ASSERTION_METADATA, assertion);
        }
        let mut keys = keys_of(link.channel.clone());
        self.answer(keys.set_claims(request)).await
    }

    /// Returns the claims of the owner with this name, and the guest's boot.
    pub async fn claims(
        &self,
        guest: &str,
        owner: &str,
    ) -> Result<(Vec<v1::Claim>, String), Status> {
        let (mut claims, mut pages) = (Vec::new(), Pages::of("claims"));
        let mut request = claims_of(guest, owner, 10_000);
        let _permit = self.permit().await?;
        loop {
            let mut keys = self.keys();
            let page = self
                .answer(keys.list_claims(timed(request.clone())))
                .await?;
            let next = pages.next(&page, &page.next_page_token)?;
            claims.extend(page.claims);
            match next {
                Some(token) => request.page_token = token,
                None => return Ok((claims, page.boot)),
            }
        }
    }

    /// Returns the guest's boot, the number of claims of the owner with this name, and the first
    /// ones that are not made.
    pub async fn not_made(
        &self,
        guest: &str,
        owner: &str,
    ) -> Result<v1::ListClaimsResponse, Status> {
        let _permit = self.permit().await?;
        let mut keys = self.keys();
        let request = v1::ListClaimsRequest {
            not_made: true,
            ..claims_of(guest, owner, NOT_MADE)
        };
        // All members of a rollout are asked at once.
        Box::pin(self.answer(keys.list_claims(timed(request)))).await
    }

    /// Returns the guest's boot; empty if it is not known.
    pub async fn boot(&self, guest: &str) -> Result<String, Status> {
        let _permit = self.permit().await?;
        let mut keys = self.keys();
        // The answer names the boot also if there are no claims.
        let request = timed(claims_of(guest, "", 1));
        Ok(self.answer(keys.list_claims(request)).await?.boot)
    }

    /// Returns the first page of a guest's keys whose names match.
    pub async fn list_keys(
        &self,
        guest: &str,
        patterns: Vec<String>,
    ) -> Result<Vec<v1::StaticKey>, Status> {
        let _permit = self.permit().await?;
        let request = v1::ListStaticKeysRequest {
            guest: guest.to_owned(),
            patterns,
            ..v1::ListStaticKeysRequest::default()
        };
        let mut keys = self.keys();
        let answer = self.answer(keys.list_static_keys(timed(request))).await?;
        check_runs(&answer)?;
        Ok(answer.keys)
    }

    /// Returns the guest's status after a call for its keys, which discovers the kernel.
    pub async fn discover(&self, guest: &str) -> Result<v1::GuestStatus, Status> {
        let _permit = self.permit().await?;
        let request = v1::ListStaticKeysRequest {
            guest: guest.to_owned(),
            page_size: 1,
            ..v1::ListStaticKeysRequest::default()
        };
        let (mut keys, mut guests) = (self.keys(), self.guests());
        let listed = self.answer(keys.list_static_keys(timed(request))).await?;
        check_runs(&listed)?;
        let request = v1::DescribeGuestRequest {
            guest: guest.to_owned(),
            find_kernel_state: false,
        };
        let answer = self.answer(guests.describe_guest(timed(request))).await?;
        Ok(answer.guest_status())
    }

    /// Returns the state of the guest's kernel, as it is in the guest's memory.
    pub async fn kernel_state(&self, guest: &str) -> Result<v1::KernelState, String> {
        let why = |status: &Status| CallError::new(status).why;
        let _permit = self.permit().await.map_err(|status| why(&status))?;
        let request = v1::DescribeGuestRequest {
            guest: guest.to_owned(),
            find_kernel_state: true,
        };
        let mut guests = self.guests();
        let answer = self.answer(guests.describe_guest(timed(request))).await;
        let answer = answer.map_err(|status| why(&status))?;
        answer
            .kernel_state
            .ok_or_else(|| "the kernel's state is not found in the guest's memory".to_owned())
    }

    /// Returns the key with all its sites.
    pub async fn key(&self, guest: &str, name: &str) -> Result<v1::StaticKey, Status> {
        let _permit = self.permit().await?;
        let mut keys = self.keys();
        let mut request = v1::GetStaticKeyRequest {
            guest: guest.to_owned(),
            name: name.to_owned(),
            page_size: 10_000,
            page_token: String::new(),
        };
        let (mut sites, mut pages) = (Vec::new(), Pages::of("sites"));
        loop {
            let call = keys.get_static_key(timed(request.clone()));
            let page = self.answer(call).await?;
            let next = pages.next(&page, &page.next_page_token)?;
            let mut key = page.key.unwrap_or_default();
            sites.append(&mut key.sites);
            let Some(token) = next else {
                key.sites = sites;
                return Ok(key);
            };
            request.page_token = token;
        }
    }

    pub async fn holds(&self, guest: &str) -> Result<Vec<v1::Hold>, Status> {
        let _permit = self.permit().await?;
        let mut request = v1::ListHoldsRequest {
            guest: guest.to_owned(),
            page_size: 10_000,
            ..v1::ListHoldsRequest::default()
        };
        let (mut holds, mut pages) = (Vec::new(), Pages::of("holds"));
        loop {
            let mut keys = self.keys();
            let page = self.answer(keys.list_holds(timed(request.clone()))).await?;
            let next = pages.next(&page, &page.next_page_token)?;
            holds.extend(page.holds);
            match next {
                Some(token) => request.page_token = token,
                None => return Ok(holds),
            }
        }
    }

    /// Returns the guest's tracepoints that the patterns select, and the reason why names of
    /// tracepoints may be missing; empty if none is missing.
    pub async fn tracepoints(
        &self,
        guest: &str,
        patterns: &[String],
    ) -> Result<(Vec<v1::Tracepoint>, String), Status> {
        let _permit = self.permit().await?;
        let mut request = v1::ListTracepointsRequest {
            guest: guest.to_owned(),
            patterns: patterns.to_vec(),
            page_size: 10_000,
            ..v1::ListTracepointsRequest::default()
        };
        let client = TracepointsServiceClient::new(self.channel());
        let mut client = client.max_decoding_message_size(MAX_ANSWER_BYTES);
        let (mut found, mut pages) = (Vec::new(), Pages::of("tracepoints"));
        loop {
            let call = client.list_tracepoints(timed(request.clone()));
            let page = self.answer(call).await?;
            let next = pages.next(&page, &page.next_page_token)?;
            found.extend(page.tracepoints);
            match next {
                Some(token) => request.page_token = token,
                None => return Ok((found, page.stale)),
            }
        }
    }

    /// Returns the report of the guest's agent. Its field `absent` says why there is none.
    pub async fn agent(&self, guest: &str) -> Result<v1::DescribeAgentResponse, String> {
        let why = |status: &Status| CallError::new(status).why;
        let _permit = self.permit().await.map_err(|status| why(&status))?;
        let request = v1::DescribeAgentRequest {
            guest: guest.to_owned(),
        };
        let mut tracepoints = TracepointsServiceClient::new(self.channel());
        let answer = self.answer(tracepoints.describe_agent(timed(request)));
        answer.await.map_err(|status| why(&status))
    }

    async fn permit(&self) -> Result<SemaphorePermit<'_>, Status> {
        permit(&self.calls).await
    }
}

async fn permit(permits: &Semaphore) -> Result<SemaphorePermit<'_>, Status> {
    let permit = permits.acquire().await;
    permit.map_err(|_| Status::unavailable("the controller is shutting down"))
}

tokio::task_local! {
    static TRACE_ID: u128;
}

/// Runs a future whose calls carry this trace id.
pub async fn traced<F: Future>(trace_id: u128, calls: F) -> F::Output {
    TRACE_ID.scope(trace_id, calls).await
}

/// Returns the trace of the calls that this task makes.
pub fn current_trace() -> Option<u128> {
    TRACE_ID.try_with(|trace_id| *trace_id).ok()
}

/// Refuses the keys of a kernel that has panicked, which tell nothing about a guest that runs.
fn check_runs(listed: &v1::ListStaticKeysResponse) -> Result<(), Status> {
    match listed.panicked {
        true => Err(Status::failed_precondition("its kernel has panicked")),
        false => Ok(()),
    }
}

fn claims_of(guest: &str, owner: &str, page_size: i32) -> v1::ListClaimsRequest {
    v1::ListClaimsRequest {
        guest: guest.to_owned(),
        owner: owner.to_owned(),
        page_size,
        ..v1::ListClaimsRequest::default()
    }
}

fn timed<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    if let Some(trace_id) = current_trace() {
        let span_id = fastrand::u64(1..);
        TraceParent { trace_id, span_id }.insert(request.metadata_mut());
    }
    request.set_timeout(CALL_TIMEOUT);
    request
}

#[cfg(test)]
mod tests {
    use patchbay_proto::TRACEPARENT_METADATA;

    use super::*;

    #[tokio::test]
    async fn calls_of_a_rollout_carry_its_trace() {
        let parent = |request: &Request<()>| {
            let value = request.metadata().get(TRACEPARENT_METADATA);
            value.map(|value| value.to_str().expect("ASCII").to_owned())
        };
        let inside = traced(0xabc, async { parent(&timed(())) }).await;
        let inside = inside.expect("a trace");
        assert!(
            inside.starts_with("00-00000000000000000000000000000abc-"),
            "{inside}"
        );
        assert_eq!(inside.len(), 55);
        assert_eq!(parent(&timed(())), None);
    }
}
