// SPDX-License-Identifier: Apache-2.0
//! Answers ListGuests, the only method that uses the answers of all monitors.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http::Response;
use patchbay_access::policy::{Decision, Question, Want};
use patchbay_proto::v1;
use patchbay_proto::v1::guest_service_client::GuestServiceClient;
use prost::Message;
use static_keys::Patterns;
use tokio::task::JoinSet;
use tonic::Status;
use tonic::body::Body;

use super::allowed::{Allowed, decode};
use super::answer::unary;
use super::call::Call;
use super::node::Node;
use super::{addresses, fields, status};
use crate::monitors::{HostedGuest, Monitor};

const DEFAULT_PAGE_SIZE: usize = 1000;
const MAX_PAGE_SIZE: usize = 10_000;
/// The maximum size of a page in bytes. Stock gRPC clients accept answers of up to 4 MiB.
const MAX_PAGE_BYTES: usize = 3 << 20;
/// Timeout for a monitor's answer, so that an unresponsive monitor does not delay the list.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Returns the guests on which the caller may call the method, in name order.
pub fn visible(node: &Node, call: &Call) -> Vec<HostedGuest> {
    let mut guests = node.directory.all();
    guests.retain(|guest| node.question(call, &guest.name).is_ok());
    guests
}

/// Returns one page of guests. If a guest's monitor does not answer, only the guest's name is
/// listed.
pub async fn list(node: &Node, call: &Call) -> Result<Response<Body>, Status> {
    fields::weigh(&call.message)?;
    let request: v1::ListGuestsRequest = decode(&call.message)?;
    let size = match usize::try_from(request.page_size) {
        Ok(0) => DEFAULT_PAGE_SIZE,
        Ok(size) => size.min(MAX_PAGE_SIZE),
        Err(_) => {
            return Err(status::invalid(
                "page_size",
                "page_size is negative; give 0 for the default or a count",
            ));
        }
    };
    let patterns = Patterns::parse(&request.patterns)
        .map_err(|error| status::invalid("patterns", &error.to_string()))?;
    let mut guests = visible(node, call);
    if guests.is_empty() {
        check_known(node, call)?;
    }
    // The token is the last name of the previous page, because guests may be added and removed
    // between two pages.
    guests.retain(|guest| guest.name > request.page_token && patterns.select_whole(&guest.name));
    let more = guests.len() > size;
    guests.truncate(size);
    let mut statuses = statuses(node, call, &guests).await?;
    let mut answer = v1::ListGuestsResponse::default();
    let mut bytes = 0;
    for guest in &guests {
        let status = statuses.remove(&guest.name);
        let mut status = status.unwrap_or_else(|| v1::GuestStatus {
            guest: guest.name.clone(),
            ..Default::default()
        });
        if !node.sees_addresses(call, &guest.name) {
            addresses::hide_in_status(&mut status);
        }
        bytes += status.encoded_len() + 8;
        if bytes > MAX_PAGE_BYTES && !answer.guests.is_empty() {
            break;
        }
        answer.guests.push(status);
    }
    if more || answer.guests.len() < guests.len() {
        let last = answer.guests.last();
        answer.next_page_token = last.map(|status| status.guest.clone()).unwrap_or_default();
    }
    Ok(unary(&answer))
}

/// Refuses a principal that no rule allows to list any guest, because an empty list would look like
/// a host without guests.
fn check_known(node: &Node, call: &Call) -> Result<(), Status> {
    let decision = node.admission.policy().current().decide(&Question {
        principal: call.principal(),
        role: call.role,
        guests: &[],
        want: Want::Nothing,
    });
    match decision {
        Decision::Allowed { .. } => Ok(()),
        Decision::Denied { why } => Err(node.deny(call, "", &why)),
    }
}

/// Queries all monitors at the same time for the statuses of these guests.
async fn statuses(
    node: &Node,
    call: &Call,
    guests: &[HostedGuest],
) -> Result<BTreeMap<String, v1::GuestStatus>, Status> {
    let mut monitors: BTreeMap<PathBuf, (Arc<Monitor>, Allowed, Vec<String>)> = BTreeMap::new();
    for guest in guests {
        // The policy has allowed the same question before, because the guest is visible.
        let Ok(allowed) = node.question(call, &guest.name) else {
            continue;
        };
        let path = guest.monitor.path().to_owned();
        let entry = monitors
            .entry(path)
            .or_insert_with(|| (Arc::clone(&guest.monitor), allowed, vec![]));
        entry.2.push(guest.name.clone());
    }
    let mut asked = JoinSet::new();
    for (monitor, allowed, names) in monitors.into_values() {
        let request = v1::ListGuestsRequest::default();
        let mut request = call.ask(request, &allowed)?;
        let left = call
            .time_left()
            .unwrap_or(ANSWER_TIMEOUT)
            .min(ANSWER_TIMEOUT);
        request.set_timeout(left);
        asked.spawn(async move {
            let mut client = GuestServiceClient::new(monitor.channel());
            let answer = tokio::time::timeout(left, client.list_guests(request)).await;
            let found = match answer {
                Ok(Ok(answer)) => answer.into_inner().guests,
                Ok(Err(_)) | Err(_) => vec![],
            };
            let ours = found.into_iter().filter(move |s| names.contains(&s.guest));
            ours.collect::<Vec<_>>()
        });
    }
    let mut statuses = BTreeMap::new();
    while let Some(found) = asked.join_next().await {
        let found = found.unwrap_or_default().into_iter();
        statuses.extend(found.map(|status| (status.guest.clone(), status)));
    }
    Ok(statuses)
}
