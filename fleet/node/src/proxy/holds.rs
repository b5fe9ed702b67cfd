// SPDX-License-Identifier: Apache-2.0
//! Finds the keys of holds. A hold's key never changes, so the keys that are read before the call
//! are those that it changes.

use std::collections::HashSet;

use patchbay_proto::pages::Pages;
use patchbay_proto::v1;
use patchbay_proto::v1::static_keys_service_client::StaticKeysServiceClient;
use tonic::{Code, Status};

use super::allowed::{Allowed, decode};
use super::call::Call;
use super::frame::MAX_ANSWER_BYTES;
use super::status;
use crate::monitors::HostedGuest;

/// Returns the keys of the holds that the request names.
pub async fn keys(
    call: &Call,
    guest: &HostedGuest,
    allowed: &Allowed,
) -> Result<Vec<String>, Status> {
    let ids = match call.method.name {
        "RenewHolds" => decode::<v1::RenewHoldsRequest>(&call.message)?.ids,
        _ => decode::<v1::ReleaseHoldsRequest>(&call.message)?.ids,
    };
    let mut wanted: HashSet<String> = ids.into_iter().collect();
    let client = StaticKeysServiceClient::new(guest.monitor.channel());
    let mut client = client.max_decoding_message_size(MAX_ANSWER_BYTES + 1024);
    let mut keys = vec![];
    let mut page_token = String::new();
    let mut pages = Pages::of("holds");
    loop {
        let request = v1::ListHoldsRequest {
            guest: guest.name.clone(),
            page_token,
            ..Default::default()
        };
        let page = client.list_holds(call.ask(request, allowed)?).await?;
        let page = page.into_inner();
        let next = pages.next(&page, &page.next_page_token);
        let next = next.map_err(|error| status::endless(&error))?;
        let found = page.holds.into_iter();
        keys.extend(
            found
                .filter(|hold| wanted.remove(&hold.id))
                .map(|hold| hold.key),
        );
        match next {
            Some(token) if !wanted.is_empty() => page_token = token,
            _ => break,
        }
    }
    match wanted.into_iter().next() {
        None => Ok(keys),
        Some(id) => {
            let id: String = id.chars().take(128).collect();
            let message = format!(
                "no hold has the id {id:?}: it is released, expired or void; list the holds again"
            );
            Err(status::status(Code::NotFound, "HOLD_NOT_FOUND", message))
        }
    }
}
