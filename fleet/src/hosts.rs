// SPDX-License-Identifier: Apache-2.0
//! The hosts of the fleet, and calls of `patchbay.v1` to their guests.
//!
//! A leader's connections live as long as its term: dropping [`Hosts`] ends every call under way.

use std::collections::BTreeMap;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use patchbay_proto::v1::guest_service_client::GuestServiceClient;
use patchbay_proto::v1::static_keys_service_client::StaticKeysServiceClient;
use patchbay_proto::{TRACEPARENT_METADATA, traceparent, v1};
use serde::Deserialize;
use tokio::net::UnixStream;
use tokio::sync::Semaphore;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};
use tonic_types::StatusExt;

/// An endpoint accepts 128 calls on a connection; other clients of the controller need some.
const CALLS: usize = 64;
/// The service lets a call take 30 s; the answer has to arrive as well.
const CALL_TIMEOUT: Duration = Duration::from_secs(35);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const MAX_ANSWER_BYTES: usize = 8 << 20;

/// A host as the configuration names it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostConfig {
    pub name: String,
    /// The unix socket of its `patchbayd`, or of a monitor.
    pub socket: PathBuf,
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
}

/// A connected host.
pub struct Host {
    pub config: HostConfig,
    guests: GuestServiceClient<Channel>,
    keys: StaticKeysServiceClient<Channel>,
    calls: Semaphore,
}

/// All hosts, by name.
#[derive(Clone)]
pub struct Hosts {
    by_name: Arc<BTreeMap<String, Arc<Host>>>,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("two hosts are named {0:?}; give one of them another name")]
pub struct NameTaken(String);

impl Hosts {
    /// Connects at the first call to each.
    ///
    /// # Errors
    /// [`NameTaken`].
    pub fn new(configs: &[HostConfig]) -> Result<Self, NameTaken> {
        let mut by_name = BTreeMap::new();
        for config in configs {
            let taken = by_name.insert(config.name.clone(), Arc::new(Host::new(config.clone())));
            if taken.is_some() {
                return Err(NameTaken(config.name.clone()));
            }
        }
        let by_name = Arc::new(by_name);
        Ok(Self { by_name })
    }

    pub fn get(&self, name: &str) -> Option<&Arc<Host>> {
        self.by_name.get(name)
    }

    /// In the order of their names.
    pub fn all(&self) -> Vec<Arc<Host>> {
        self.by_name.values().cloned().collect()
    }
}

/// Connects to a unix socket at the first call.
pub fn channel(socket: &Path) -> Channel {
    let path = socket.to_owned();
    Endpoint::from_static("http://patchbay")
        .connect_timeout(CONNECT_TIMEOUT)
        .connect_with_connector_lazy(tower::service_fn(move |_| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        }))
}

impl Host {
    fn new(config: HostConfig) -> Self {
        let channel = channel(&config.socket);
        let keys = StaticKeysServiceClient::new(channel.clone());
        Self {
            config,
            guests: GuestServiceClient::new(channel),
            keys: keys.max_decoding_message_size(MAX_ANSWER_BYTES),
            calls: Semaphore::new(CALLS),
        }
    }

    pub async fn list_guests(&self) -> Result<Vec<v1::GuestStatus>, Status> {
        let _permit = self.permit().await?;
        let (mut found, mut page_token) = (Vec::new(), String::new());
        loop {
            let request = v1::ListGuestsRequest {
                page_size: 10_000,
                page_token,
                patterns: vec![],
            };
            let page = self.guests.clone().list_guests(timed(request)).await?;
            let page = page.into_inner();
            found.extend(page.guests);
            page_token = page.next_page_token;
            if page_token.is_empty() {
                return Ok(found);
            }
        }
    }

    /// The plan and the results of all its pages.
    pub async fn prepare(
        &self,
        request: v1::PrepareUpdateRequest,
    ) -> Result<v1::PrepareUpdateResponse, Status> {
        let _permit = self.permit().await?;
        let guest = request.guest.clone();
        let mut keys = self.keys.clone();
        let mut plan = keys.prepare_update(timed(request)).await?.into_inner();
        while !plan.next_page_token.is_empty() {
            let request = v1::ListUpdateResultsRequest {
                guest: guest.clone(),
                page_token: std::mem::take(&mut plan.next_page_token),
            };
            let page = keys.list_update_results(timed(request)).await?.into_inner();
            plan.results.extend(page.results);
            plan.next_page_token = page.next_page_token;
        }
        Ok(plan)
    }

    pub async fn commit(
        &self,
        request: v1::CommitUpdateRequest,
    ) -> Result<v1::CommitUpdateResponse, Status> {
        let _permit = self.permit().await?;
        let answer = self.keys.clone().commit_update(timed(request)).await?;
        Ok(answer.into_inner())
    }

    pub async fn update(
        &self,
        request: v1::UpdateStaticKeysRequest,
    ) -> Result<v1::UpdateStaticKeysResponse, Status> {
        let _permit = self.permit().await?;
        let answer = self.keys.clone().update_static_keys(timed(request)).await?;
        Ok(answer.into_inner())
    }

    pub async fn discard(&self, request: v1::DiscardUpdateRequest) -> Result<(), Status> {
        let _permit = self.permit().await?;
        self.keys.clone().discard_update(timed(request)).await?;
        Ok(())
    }

    /// The first page of a guest's keys whose names match.
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
        let answer = self.keys.clone().list_static_keys(timed(request)).await?;
        Ok(answer.into_inner().keys)
    }

    /// The first page of the holds on a guest's keys whose names match.
    pub async fn list_holds(
        &self,
        guest: &str,
        patterns: Vec<String>,
    ) -> Result<Vec<v1::Hold>, Status> {
        let _permit = self.permit().await?;
        let request = v1::ListHoldsRequest {
            guest: guest.to_owned(),
            patterns,
            ..v1::ListHoldsRequest::default()
        };
        let answer = self.keys.clone().list_holds(timed(request)).await?;
        Ok(answer.into_inner().holds)
    }

    async fn permit(&self) -> Result<tokio::sync::SemaphorePermit<'_>, Status> {
        let permit = self.calls.acquire().await;
        permit.map_err(|_| Status::unavailable("the controller ends"))
    }
}

tokio::task_local! {
    static TRACE_ID: u128;
}

/// Calls of the future carry this trace id.
pub async fn traced<F: Future>(trace_id: u128, calls: F) -> F::Output {
    TRACE_ID.scope(trace_id, calls).await
}

fn timed<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    if let Ok(trace_id) = TRACE_ID.try_with(|trace_id| *trace_id)
        && let Ok(parent) = traceparent(trace_id, fastrand::u64(1..)).parse()
    {
        request.metadata_mut().insert(TRACEPARENT_METADATA, parent);
    }
    request.set_timeout(CALL_TIMEOUT);
    request
}

/// What an error of a guest's service means for a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallError {
    pub verdict: Verdict,
    pub why: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The service refused, and would again.
    Refused,
    /// The service refused for now.
    Busy,
    /// The caller holds no such reference any more.
    NotHolder,
    /// The kernel would warn about the op at this count.
    WouldWarn,
    /// Nothing is known: no answer, or none of the service.
    Unknown,
}

impl CallError {
    pub fn new(status: &Status) -> Self {
        let info = status.get_details_error_info();
        let info = info.filter(|info| info.domain == patchbay_proto::ERROR_DOMAIN);
        let Some(info) = info else {
            return Self {
                verdict: Verdict::Unknown,
                why: format!("{:?}: {}", status.code(), status.message()),
            };
        };
        let verdict = match info.reason.as_str() {
            "GUEST_BUSY"
            | "QUEUE_FULL"
            | "VCPU_NOT_STOPPED"
            | "TOO_MANY_CALLS"
            | "TOO_MANY_CONNECTIONS" => Verdict::Busy,
            "NOT_HOLDER" => Verdict::NotHolder,
            "WOULD_WARN" => Verdict::WouldWarn,
            "INTERNAL" | "CANCELLED" | "ENDPOINT_ENDING" | "WRITE_FAULT" => Verdict::Unknown,
            _ if status.code() == Code::Unavailable => Verdict::Unknown,
            _ => Verdict::Refused,
        };
        Self {
            verdict,
            why: format!("{}: {}", info.reason, status.message()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn calls_of_a_rollout_carry_its_trace() {
        let parent = |request: &Request<()>| {
            let parent = request.metadata().get(TRACEPARENT_METADATA)?;
            Some(parent.to_str().expect("text").to_owned())
        };
        let inside = traced(0xabc, async { parent(&timed(())) }).await;
        let inside = inside.expect("a trace");
        assert!(
            inside.starts_with("00-00000000000000000000000000000abc-"),
            "{inside}"
        );
        assert_eq!(inside.len(), 55, "{inside}");
        assert_eq!(parent(&timed(())), None);
    }
}
