// SPDX-License-Identifier: Apache-2.0
//! The methods of `patchbay.v1.StaticKeysService` on holds.

use std::time::{Duration, Instant};

use patchbay_proto::v1;
use prost::Message;

use super::static_keys::{
    DEFAULT_STOP_TIMEOUT, MAX_DEADLINE, MAX_REQUEST_ID_BYTES, MAX_STOP_TIMEOUT, MAX_TTL,
};
use super::{convert, invalid};
use crate::keys::{
    HoldQuery, Keys, KeysError, MAX_UPDATES, Patterns, ReleaseRequest, RenewRequest, replay,
};

pub async fn list(
    keys: &Keys,
    request: v1::ListHoldsRequest,
) -> Result<v1::ListHoldsResponse, KeysError> {
    let query = HoldQuery {
        page_size: super::page_size(request.page_size)
            .ok_or_else(|| invalid("page_size", super::NEGATIVE_PAGE_SIZE))?,
        page_token: request.page_token,
        patterns: Patterns::parse(&request.patterns)?,
        holder: request.holder,
    };
    let keys = keys.clone();
    // Reads the count of every key that is held.
    let page = tokio::task::spawn_blocking(move || keys.holds(&query))
        .await
        .map_err(|error| KeysError::Internal {
            message: format!("the holds cannot be listed: {error}; report it, it is a bug"),
        })??;
    Ok(v1::ListHoldsResponse {
        holds: page.holds.into_iter().map(convert::hold).collect(),
        next_page_token: page.next_page_token,
    })
}

/// `received` is when the call came, and `deadline` when the client wants its answer.
pub async fn release(
    keys: &Keys,
    mut request: v1::ReleaseHoldsRequest,
    principal: String,
    received: Instant,
    deadline: Instant,
) -> Result<v1::ReleaseHoldsResponse, KeysError> {
    check_ids(&request.ids)?;
    if request.request_id.len() > MAX_REQUEST_ID_BYTES {
        let message = format!("is longer than {MAX_REQUEST_ID_BYTES} bytes");
        return Err(invalid("request_id", message));
    }
    let request_id = std::mem::take(&mut request.request_id);
    let mut content = b"release".to_vec();
    content.extend(request.encode_to_vec());
    let stop_timeout = super::from_proto(
        "stop_timeout",
        request.stop_timeout,
        Duration::from_micros(1)..=MAX_STOP_TIMEOUT,
    )?;
    let retry_timeout = super::from_proto(
        "retry_timeout",
        request.retry_timeout,
        Duration::from_millis(1)..=MAX_DEADLINE,
    )?;
    let request = ReleaseRequest {
        principal,
        force: request.force,
        request_id,
        content: replay::content(&content),
        summary_only: super::summary_only(request.result_view)?,
        stop_timeout: stop_timeout.unwrap_or(DEFAULT_STOP_TIMEOUT),
        deadline: retry_timeout.map_or(deadline, |timeout| deadline.min(received + timeout)),
        ids: request.ids,
    };
    let outcome = std::sync::Arc::unwrap_or_clone(keys.release(request).await?);
    Ok(v1::ReleaseHoldsResponse {
        results: convert::results(outcome.results),
        next_page_token: String::new(),
        summary: Some(convert::summary(outcome.summary)),
        report: outcome.report.map(convert::report),
        revision: outcome.revision,
        incarnation: keys.incarnation().to_string(),
    })
}

pub async fn renew(
    keys: &Keys,
    request: v1::RenewHoldsRequest,
    principal: String,
) -> Result<v1::RenewHoldsResponse, KeysError> {
    check_ids(&request.ids)?;
    let request = RenewRequest {
        ttl: super::from_proto("ttl", request.ttl, Duration::from_millis(1)..=MAX_TTL)?,
        ids: request.ids,
        principal,
    };
    let holds = keys.renew(request).await?;
    Ok(v1::RenewHoldsResponse {
        holds: holds.into_iter().map(convert::hold).collect(),
    })
}

fn check_ids(ids: &[String]) -> Result<(), KeysError> {
    if ids.is_empty() || ids.len() > MAX_UPDATES {
        let message = format!("{} given; give 1 to {MAX_UPDATES}", ids.len());
        return Err(invalid("ids", message));
    }
    Ok(())
}
