// SPDX-License-Identifier: Apache-2.0
//! `patchbay.v1.StaticKeysService`: checks requests and hands them to the guest's keys.

use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use patchbay_proto::v1;
use patchbay_proto::v1::static_keys_service_server::StaticKeysService;
use prost::Message;
use static_keys::{MAX_PATTERNS, Patterns, split_name};
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status};

use super::access::Access;
use super::{convert, debug_sites, holds, invalid, plans, repair};
use crate::keys::debug::DebugQueries;
use crate::keys::{
    Event, KeyUpdate, KeysError, ListQuery, MAX_UPDATES, PAGE_BYTES, Revision, Selection, Target,
    UpdateRequest, Watcher, replay,
};

pub(super) const MAX_REQUEST_ID_BYTES: usize = 128;
const MAX_REASON_BYTES: usize = 256;
/// Maximum time for one update, and the deadline of calls that give none.
const MAX_DEADLINE: Duration = Duration::from_secs(30);
pub(super) const MAX_TTL: Duration = Duration::from_secs(365 * 24 * 3600);
const MAX_STOP_TIMEOUT: Duration = Duration::from_secs(30);
const DEFAULT_STOP_TIMEOUT: Duration = Duration::from_secs(1);
/// Upper bound of an event's tag and length in its response.
const EVENT_FRAME_BYTES: usize = 8;
/// Maximum time reserved for sending the answer to the client.
const MAX_ANSWER_TIME: Duration = Duration::from_millis(250);

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
        let deadline = Instant::now() + time_allowed(request.metadata());
        let (guest, _, request) = self.access.admit(request)?;
        let request = request.into_inner();
        let query = ListQuery {
            page_size: super::page_size(request.page_size)
                .ok_or_else(|| invalid("page_size", super::NEGATIVE_PAGE_SIZE))?,
            page_token: request.page_token,
            keys: selection(&request.patterns, &request.classes)?,
            enabled: request.enabled,
        };
        let keys = Arc::clone(&guest.keys);
        keys.find_kernel(deadline).await;
        // This reads every key's count from the guest, which takes milliseconds.
        let page = tokio::task::spawn_blocking(move || keys.list(&query))
            .await
            .map_err(|error| KeysError::Internal {
                message: format!("the keys cannot be listed: {error}; report it, it is a bug"),
            })??;
        let key = |key| convert::key(key, vec![]);
        Ok(Response::new(v1::ListStaticKeysResponse {
            keys: page.keys.into_iter().map(key).collect(),
            next_page_token: page.next_page_token,
            revision: page.revision,
            incarnation: guest.keys.incarnation().to_string(),
            total_size: i32::try_from(page.total).unwrap_or(i32::MAX),
        }))
    }

    async fn get_static_key(
        &self,
        request: Request<v1::GetStaticKeyRequest>,
    ) -> Result<Response<v1::GetStaticKeyResponse>, Status> {
        let deadline = Instant::now() + time_allowed(request.metadata());
        let (guest, _, request) = self.access.admit(request)?;
        let request = request.into_inner();
        let size = super::page_size(request.page_size)
            .ok_or_else(|| invalid("page_size", super::NEGATIVE_PAGE_SIZE))?;
        let keys = Arc::clone(&guest.keys);
        keys.find_kernel(deadline).await;
        // This reads the key's sites from the guest.
        let details =
            tokio::task::spawn_blocking(move || keys.get(&request.name, size, &request.page_token))
                .await
                .map_err(|error| KeysError::Internal {
                    message: format!("the key cannot be read: {error}; report it, it is a bug"),
                })??;
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
        let deadline = Instant::now() + time_allowed(request.metadata());
        let (guest, _, request) = self.access.admit(request)?;
        let answer = debug_sites::list(&guest.keys, request.into_inner(), deadline).await?;
        Ok(Response::new(answer))
    }

    async fn update_static_keys(
        &self,
        request: Request<v1::UpdateStaticKeysRequest>,
    ) -> Result<Response<v1::UpdateStaticKeysResponse>, Status> {
        let received = Instant::now();
        let (guest, principal, request) = self.access.admit(request)?;
        let deadline = received + time_allowed(request.metadata());
        let principal = String::from(principal);
        let request = update_request(request.into_inner(), principal.clone(), received, deadline)?;
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
        // The journal is the buffer; a longer queue would only hide a slow client.
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
            super::until_end(&sender, ending, tell).await;
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
        let (guest, principal, request) = self.access.admit(request)?;
        plans::list_results(&guest.keys, principal.into(), &request)
    }

    async fn prepare_update(
        &self,
        request: Request<v1::PrepareUpdateRequest>,
    ) -> Result<Response<v1::PrepareUpdateResponse>, Status> {
        let (guest, principal, request) = self.access.admit(request)?;
        plans::prepare(&guest.keys, principal.into(), request).await
    }

    async fn commit_update(
        &self,
        request: Request<v1::CommitUpdateRequest>,
    ) -> Result<Response<v1::CommitUpdateResponse>, Status> {
        let (guest, principal, request) = self.access.admit(request)?;
        plans::commit(&guest.keys, principal.into(), request).await
    }

    async fn discard_update(
        &self,
        request: Request<v1::DiscardUpdateRequest>,
    ) -> Result<Response<v1::DiscardUpdateResponse>, Status> {
        let (guest, principal, request) = self.access.admit(request)?;
        plans::discard(&guest.keys, principal.into(), request).await
    }

    async fn release_holds(
        &self,
        request: Request<v1::ReleaseHoldsRequest>,
    ) -> Result<Response<v1::ReleaseHoldsResponse>, Status> {
        let (guest, principal, request) = self.access.admit(request)?;
        let answer = holds::release(&guest.keys, request, principal.into()).await?;
        Ok(Response::new(answer))
    }

    async fn renew_holds(
        &self,
        request: Request<v1::RenewHoldsRequest>,
    ) -> Result<Response<v1::RenewHoldsResponse>, Status> {
        let (guest, principal, request) = self.access.admit(request)?;
        let answer = holds::renew(&guest.keys, request.into_inner(), principal.into()).await?;
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
        let (guest, principal, request) = self.access.admit(request)?;
        let answer = repair::repair(&guest.keys, principal.into(), request).await?;
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
            for (index, event) in revision.events.iter().enumerate().skip(first) {
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

fn wants(patterns: &Patterns, event: &Event) -> bool {
    event.key().is_none_or(|key| {
        let (module, name) = split_name(key);
        patterns.select(module, name)
    })
}

fn update_request(
    mut request: v1::UpdateStaticKeysRequest,
    principal: String,
    received: Instant,
    deadline: Instant,
) -> Result<UpdateRequest, KeysError> {
    let request_id = std::mem::take(&mut request.request_id);
    let content = content(&request_id, &request)?;
    check_reason(&request.reason)?;
    let attempts = attempts(
        request.stop_timeout,
        request.retry_timeout,
        received,
        deadline,
    )?;
    Ok(UpdateRequest {
        principal,
        request_id,
        content,
        validate_only: request.validate_only,
        allow_guarded: request.allow_guarded,
        force: request.force,
        summary_only: super::summary_only(request.result_view)?,
        tracepoints: None,
        ttl: hold_ttl("ttl", request.ttl)?,
        updates: key_updates(request.updates)?,
        reason: request.reason,
        stop_timeout: attempts.stop_timeout,
        deadline: attempts.deadline,
    })
}

/// Returns the digest of a request, by which a repeat is recognised. `request` has no request id.
///
/// # Errors
/// INVALID_ARGUMENT if the id is too long.
pub(super) fn content(
    request_id: &str,
    request: &impl Message,
) -> Result<replay::Content, KeysError> {
    if request_id.len() > MAX_REQUEST_ID_BYTES {
        return Err(invalid(
            "request_id",
            format!("is longer than {MAX_REQUEST_ID_BYTES} bytes"),
        ));
    }
    // Without a request id nothing is replayed.
    Ok(match request_id {
        "" => replay::Content::default(),
        _ => replay::content(&request.encode_to_vec()),
    })
}

/// # Errors
/// INVALID_ARGUMENT if the reason is too long.
pub(super) fn check_reason(reason: &str) -> Result<(), KeysError> {
    if reason.len() > MAX_REASON_BYTES {
        let message = format!("is longer than {MAX_REASON_BYTES} bytes");
        return Err(invalid("reason", message));
    }
    Ok(())
}

/// # Errors
/// INVALID_ARGUMENT for a duration out of range.
pub(super) fn hold_ttl(
    field: &'static str,
    ttl: Option<prost_types::Duration>,
) -> Result<Option<Duration>, KeysError> {
    super::from_proto(field, ttl, Duration::from_millis(1)..=MAX_TTL)
}

/// Time limits of a change.
pub(super) struct Attempts {
    pub stop_timeout: Duration,
    pub deadline: Instant,
}

/// # Errors
/// INVALID_ARGUMENT for a duration out of range.
pub(super) fn attempts(
    stop_timeout: Option<prost_types::Duration>,
    retry_timeout: Option<prost_types::Duration>,
    received: Instant,
    deadline: Instant,
) -> Result<Attempts, KeysError> {
    let stop_timeout = super::from_proto(
        "stop_timeout",
        stop_timeout,
        Duration::from_micros(1)..=MAX_STOP_TIMEOUT,
    )?;
    let retry_timeout = super::from_proto(
        "retry_timeout",
        retry_timeout,
        Duration::from_millis(1)..=MAX_DEADLINE,
    )?;
    Ok(Attempts {
        stop_timeout: stop_timeout.unwrap_or(DEFAULT_STOP_TIMEOUT),
        deadline: retry_timeout.map_or(deadline, |timeout| deadline.min(received + timeout)),
    })
}

/// # Errors
/// INVALID_ARGUMENT for too many or malformed updates.
pub(super) fn key_updates(updates: Vec<v1::KeyUpdate>) -> Result<Vec<KeyUpdate>, KeysError> {
    if updates.is_empty() || updates.len() > MAX_UPDATES {
        let message = format!("{} given; give 1 to {MAX_UPDATES}", updates.len());
        return Err(invalid("updates", message));
    }
    // Each pattern is matched against each key, so their number is limited.
    let patterns: usize = updates
        .iter()
        .map(|one| one.patterns.len() + one.debug_queries.len())
        .sum();
    if patterns > MAX_PATTERNS {
        let message = format!("have {patterns} patterns and queries; give up to {MAX_PATTERNS}");
        return Err(invalid("updates", message));
    }
    updates.into_iter().map(key_update).collect()
}

fn key_update(update: v1::KeyUpdate) -> Result<KeyUpdate, KeysError> {
    let Some(op) = convert::op_from_proto(update.op) else {
        let message = format!(
            "unknown op {} on key {:?}; give inc, dec, enable or disable",
            update.op, update.name
        );
        return Err(invalid("updates", message));
    };
    let keys = target(
        update.name,
        &update.patterns,
        &update.classes,
        &update.debug_queries,
    )?;
    // In the message an empty etag means none.
    let etag = Some(update.etag).filter(|etag| !etag.is_empty());
    if etag.is_some() && !matches!(keys, Target::Name(_)) {
        let message =
            "an etag comes with patterns or debug_queries; it belongs to one key, give its name";
        return Err(invalid("updates", message));
    }
    Ok(KeyUpdate { keys, op, etag })
}

fn target(
    name: String,
    patterns: &[String],
    classes: &[i32],
    queries: &[String],
) -> Result<Target, KeysError> {
    match (name.is_empty(), patterns.is_empty(), queries.is_empty()) {
        (true, true, true) => Err(invalid("updates", "one of them has no key name")),
        (_, true, _) if !classes.is_empty() => {
            let message = format!("key {name:?} comes with classes; give patterns with them");
            Err(invalid("updates", message))
        }
        (false, true, true) => Ok(Target::Name(name)),
        (true, false, true) => Ok(Target::Selection(selection(patterns, classes)?)),
        (true, true, false) => Ok(Target::Debug(DebugQueries::parse(queries)?)),
        _ => {
            let message =
                format!("key {name:?}: give one of name, patterns and debug_queries, not several");
            Err(invalid("updates", message))
        }
    }
}

fn selection(patterns: &[String], classes: &[i32]) -> Result<Selection, KeysError> {
    Ok(Selection {
        patterns: Patterns::parse(patterns)?,
        classes: classes
            .iter()
            .map(|&class| convert::class_from_proto(class))
            .collect::<Result<_, _>>()?,
    })
}

/// Returns the deadline of the call (`grpc-timeout`) minus the time needed to send the answer. The
/// client then learns which gate was closed instead of getting DEADLINE_EXCEEDED.
pub(crate) fn time_allowed(metadata: &MetadataMap) -> Duration {
    let given = metadata
        .get("grpc-timeout")
        .and_then(|value| value.to_str().ok())
        .and_then(parse_timeout);
    match given {
        Some(given) => (given - (given / 4).min(MAX_ANSWER_TIME)).min(MAX_DEADLINE),
        None => MAX_DEADLINE,
    }
}

fn parse_timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.len() > 8 {
        return None;
    }
    let value: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(value * 3600),
        "M" => Duration::from_secs(value * 60),
        "S" => Duration::from_secs(value),
        "m" => Duration::from_millis(value),
        "u" => Duration::from_micros(value),
        "n" => Duration::from_nanos(value),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_read_as_grpc_writes_them() {
        assert_eq!(parse_timeout("30S"), Some(Duration::from_secs(30)));
        assert_eq!(parse_timeout("250m"), Some(Duration::from_millis(250)));
        assert_eq!(
            parse_timeout("99999999H"),
            Some(Duration::from_secs(99_999_999 * 3600))
        );
        for bad in ["", "S", "1", "1x", "-1S", "999999999S", "é"] {
            assert_eq!(parse_timeout(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn the_answer_comes_before_the_deadline_and_the_maximum_holds() {
        let mut metadata = MetadataMap::new();
        assert_eq!(time_allowed(&metadata), MAX_DEADLINE);
        metadata.insert("grpc-timeout", "1S".parse().expect("a value"));
        assert_eq!(time_allowed(&metadata), Duration::from_millis(750));
        metadata.insert("grpc-timeout", "1H".parse().expect("a value"));
        assert_eq!(time_allowed(&metadata), MAX_DEADLINE);
    }
}
