// SPDX-License-Identifier: Apache-2.0
//! `patchbay.v1.StaticKeysService`: checks requests and hands them to the guest's keys.

use std::pin::Pin;
use std::sync::Arc;

use patchbay_proto::v1;
use patchbay_proto::v1::static_keys_service_server::StaticKeysService;
use prost::Message;
use static_keys::Patterns;
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::access::Access;
use super::ending::until_end;
use super::requests::{
    CallTimes, blocking, check_reason, hold_ttl, key_updates, page_size, request_id, selection,
    summary_only,
};
use super::{claims, convert, debug_sites, holds, plans, repair};
use crate::keys::{
    Caller, Event, KeysError, ListQuery, PAGE_BYTES, Revision, UpdateRequest, Watcher,
};

/// Upper bound of the size in bytes of the tag and the length that precede an event in a response.
const EVENT_FRAME_BYTES: usize = 8;

/// Serves [`StaticKeysService`].
pub struct StaticKeysApi {
    access: Access,
}

impl StaticKeysApi {
    pub fn new(access: Access) -> Self {
        Self { access }
    }
}

#[tonic::async_trait]
impl StaticKeysService for StaticKeysApi {
    async fn list_static_keys(
        &self,
        request: Request<v1::ListStaticKeysRequest>,
    ) -> Result<Response<v1::ListStaticKeysResponse>, Status> {
        let CallTimes { deadline, .. } = CallTimes::of(request.metadata());
        let (guest, _, request) = self.access.admit(request)?;
        let request = request.into_inner();
        let query = ListQuery {
            page_size: page_size(request.page_size)?,
            page_token: request.page_token,
            keys: selection(&request.patterns, &request.classes)?,
            enabled: request.enabled,
        };
        let keys = Arc::clone(&guest.keys);
        keys.find_kernel(deadline).await;
        // This reads every key's count from the guest.
        let page = blocking("the keys cannot be listed", move || keys.list(&query)).await?;
        let key = |key| convert::key(key, vec![]);
        Ok(Response::new(v1::ListStaticKeysResponse {
            keys: page.keys.into_iter().map(key).collect(),
            next_page_token: page.next_page_token,
            revision: page.revision,
            incarnation: guest.keys.incarnation().to_string(),
            total_size: i32::try_from(page.total).unwrap_or(i32::MAX),
            panicked: page.panicked,
        }))
    }

    async fn get_static_key(
        &self,
        request: Request<v1::GetStaticKeyRequest>,
    ) -> Result<Response<v1::GetStaticKeyResponse>, Status> {
        let CallTimes { deadline, .. } = CallTimes::of(request.metadata());
        let (guest, _, request) = self.access.admit(request)?;
        let request = request.into_inner();
        let size = page_size(request.page_size)?;
        let keys = Arc::clone(&guest.keys);
        keys.find_kernel(deadline).await;
        // This reads the key's sites from the guest.
        let details = blocking("the key cannot be read", move || {
            keys.get(&request.name, size, &request.page_token)
        })
        .await?;
        Ok(Response::new(v1::GetStaticKeyResponse {
            key: Some(convert::key(details.key, details.sites)),
            next_page_token: details.next_page_token,
            revision: details.revision,
            incarnation: guest.keys.incarnation().to_string(),
        }))
    }

    async fn list_debug_sites(
        &self,
        request: Request<v1::ListDebugSitesRequest>,
    ) -> Result<Response<v1::ListDebugSitesResponse>, Status> {
        let CallTimes { deadline, .. } = CallTimes::of(request.metadata());
        let (guest, _, request) = self.access.admit(request)?;
        let answer = debug_sites::list(&guest.keys, request.into_inner(), deadline).await?;
        Ok(Response::new(answer))
    }

    async fn update_static_keys(
        &self,
        request: Request<v1::UpdateStaticKeysRequest>,
    ) -> Result<Response<v1::UpdateStaticKeysResponse>, Status> {
        let times = CallTimes::of(request.metadata());
        let (guest, caller, request) = self.access.admit(request)?;
        let principal = caller.name.clone();
        let request = update_request(request.into_inner(), caller, times)?;
        let outcome = guest.keys.update(request).await?;
        let page = guest.keys.first_results(outcome, &principal);
        let outcome = page.outcome();
        Ok(Response::new(v1::UpdateStaticKeysResponse {
            results: convert::results(page.results()),
            next_page_token: page.next_page_token.clone(),
            summary: Some(convert::summary(outcome.summary)),
            report: outcome.report.map(convert::report),
            revision: outcome.revision,
            incarnation: guest.keys.incarnation().to_string(),
        }))
    }

    type WatchStaticKeysStream =
        Pin<Box<dyn Stream<Item = Result<v1::WatchStaticKeysResponse, Status>> + Send>>;

    async fn watch_static_keys(
        &self,
        request: Request<v1::WatchStaticKeysRequest>,
    ) -> Result<Response<Self::WatchStaticKeysStream>, Status> {
        let (guest, _, request) = self.access.admit(request)?;
        let request = request.into_inner();
        let patterns = Patterns::parse(&request.patterns).map_err(KeysError::from)?;
        let watcher = guest
            .keys
            .watch(request.start_revision, &request.incarnation)?;
        let ending = guest.ending();
        // The journal buffers the changes; a longer queue would only hide a slow client.
        let (sender, receiver) = mpsc::channel(1);
        let incarnation = guest.keys.incarnation().to_string();
        let begin = v1::WatchStaticKeysResponse {
            revision: watcher.position() - 1,
            incarnation: incarnation.clone(),
            ..Default::default()
        };
        let mut changes = Changes {
            watcher,
            patterns,
            incarnation,
            rest: None,
        };
        tokio::spawn(async move {
            let tell = async {
                let mut message = Ok(begin);
                loop {
                    let last = message.is_err();
                    if sender.send(message).await.is_err() || last {
                        return;
                    }
                    message = changes.next().await.map_err(Status::from);
                }
            };
            until_end(&sender, ending, tell).await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn list_holds(
        &self,
        request: Request<v1::ListHoldsRequest>,
    ) -> Result<Response<v1::ListHoldsResponse>, Status> {
        let (guest, _, request) = self.access.admit(request)?;
        let answer = holds::list(&guest.keys, request.into_inner()).await?;
        Ok(Response::new(answer))
    }

    async fn list_update_results(
        &self,
        request: Request<v1::ListUpdateResultsRequest>,
    ) -> Result<Response<v1::ListUpdateResultsResponse>, Status> {
        let (guest, caller, request) = self.access.admit(request)?;
        plans::list_results(&guest.keys, &caller.name, &request)
    }

    async fn prepare_update(
        &self,
        request: Request<v1::PrepareUpdateRequest>,
    ) -> Result<Response<v1::PrepareUpdateResponse>, Status> {
        let (guest, caller, request) = self.access.admit(request)?;
        plans::prepare(&guest.keys, caller, request).await
    }

    async fn commit_update(
        &self,
        request: Request<v1::CommitUpdateRequest>,
    ) -> Result<Response<v1::CommitUpdateResponse>, Status> {
        let (guest, caller, request) = self.access.admit(request)?;
        plans::commit(&guest.keys, caller, request).await
    }

    async fn discard_update(
        &self,
        request: Request<v1::DiscardUpdateRequest>,
    ) -> Result<Response<v1::DiscardUpdateResponse>, Status> {
        let (guest, caller, request) = self.access.admit(request)?;
        plans::discard(&guest.keys, caller, request).await
    }

    async fn release_holds(
        &self,
        request: Request<v1::ReleaseHoldsRequest>,
    ) -> Result<Response<v1::ReleaseHoldsResponse>, Status> {
        let (guest, caller, request) = self.access.admit(request)?;
        let answer = holds::release(&guest.keys, request, caller).await?;
        Ok(Response::new(answer))
    }

    async fn renew_holds(
        &self,
        request: Request<v1::RenewHoldsRequest>,
    ) -> Result<Response<v1::RenewHoldsResponse>, Status> {
        let (guest, caller, request) = self.access.admit(request)?;
        let answer = holds::renew(&guest.keys, request.into_inner(), caller).await?;
        Ok(Response::new(answer))
    }

    async fn set_claims(
        &self,
        request: Request<v1::SetClaimsRequest>,
    ) -> Result<Response<v1::SetClaimsResponse>, Status> {
        let (guest, caller, request) = self.access.admit(request)?;
        let answer = claims::set(&guest.keys, request, caller).await?;
        Ok(Response::new(answer))
    }

    async fn list_claims(
        &self,
        request: Request<v1::ListClaimsRequest>,
    ) -> Result<Response<v1::ListClaimsResponse>, Status> {
        let CallTimes { deadline, .. } = CallTimes::of(request.metadata());
        let (guest, _, request) = self.access.admit(request)?;
        let answer = claims::list(&guest.keys, request.into_inner(), deadline).await?;
        Ok(Response::new(answer))
    }

    async fn verify_static_keys(
        &self,
        request: Request<v1::VerifyStaticKeysRequest>,
    ) -> Result<Response<v1::VerifyStaticKeysResponse>, Status> {
        let (guest, _, request) = self.access.admit(request)?;
        let answer = repair::verify(&guest.keys, &request.into_inner()).await?;
        Ok(Response::new(answer))
    }

    async fn repair_static_key(
        &self,
        request: Request<v1::RepairStaticKeyRequest>,
    ) -> Result<Response<v1::RepairStaticKeyResponse>, Status> {
        let (guest, caller, request) = self.access.admit(request)?;
        let answer = repair::repair(&guest.keys, caller, request).await?;
        Ok(Response::new(answer))
    }
}

/// The position and the filter of one watch.
struct Changes {
    watcher: Watcher,
    patterns: Patterns,
    incarnation: String,
    /// A revision that is partly sent, and the index of its next event.
    rest: Option<(Arc<Revision>, usize)>,
}

impl Changes {
    /// Returns the next response with a matching event. A large revision is split into several.
    async fn next(&mut self) -> Result<v1::WatchStaticKeysResponse, KeysError> {
        loop {
            let (revision, first) = match self.rest.take() {
                Some(rest) => rest,
                None => (self.watcher.next().await?, 0),
            };
            let mut bytes = 0;
            let mut events = Vec::new();
            let mut rest = None;
            for (index, event) in revision.events.from(first) {
                if !wants(&self.patterns, event) {
                    continue;
                }
                let event = convert::event(event);
                bytes += event.encoded_len() + EVENT_FRAME_BYTES;
                if bytes > PAGE_BYTES && !events.is_empty() {
                    rest = Some(index);
                    break;
                }
                events.push(event);
            }
            if events.is_empty() {
                continue;
            }
            self.rest = rest.map(|index| (Arc::clone(&revision), index));
            return Ok(v1::WatchStaticKeysResponse {
                revision: revision.number,
                incarnation: self.incarnation.clone(),
                time: Some(revision.time.into()),
                events,
                more: rest.is_some(),
            });
        }
    }
}

fn wants(patterns: &Patterns, event: Event<'_>) -> bool {
    event.key().is_none_or(|key| patterns.select_full(key))
}

fn update_request(
    mut request: v1::UpdateStaticKeysRequest,
    caller: Caller,
    times: CallTimes,
) -> Result<UpdateRequest, KeysError> {
    let id = std::mem::take(&mut request.request_id);
    let request_id = request_id(id, &request)?;
    check_reason(&request.reason)?;
    let attempts = times.attempts(request.stop_timeout, request.retry_timeout)?;
    Ok(UpdateRequest {
        caller,
        request_id,
        validate_only: request.validate_only,
        allow_guarded: request.allow_guarded,
        force: request.force,
        summary_only: summary_only(request.result_view)?,
        tracepoints: None,
        ttl: hold_ttl("ttl", request.ttl)?,
        updates: key_updates(request.updates)?,
        reason: request.reason,
        stop_timeout: attempts.stop_timeout,
        deadline: attempts.deadline,
    })
}
