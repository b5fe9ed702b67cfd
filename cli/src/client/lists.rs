// SPDX-License-Identifier: Apache-2.0
//! Lists of a guest, read page by page.

use patchbay_proto::pages::Pages;
use patchbay_proto::v1;

use super::Client;
use crate::failure::Failure;

/// The keys of all pages, and the revision of the first page. A watch that starts after this
/// revision misses no change.
#[derive(Default)]
pub struct Listing {
    pub keys: Vec<v1::StaticKey>,
    pub revision: u64,
    pub incarnation: String,
    /// The guest's kernel has panicked.
    pub panicked: bool,
}

/// Lists the selected keys.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
pub async fn keys(
    client: &Client,
    mut request: v1::ListStaticKeysRequest,
) -> Result<Listing, Failure> {
    let mut listing: Option<Listing> = None;
    let mut pages = Pages::of("keys");
    loop {
        let page = client
            .keys()
            .list_static_keys(client.request(request.clone()))
            .await?
            .into_inner();
        let next = pages.next(&page, &page.next_page_token)?;
        let listing = listing.get_or_insert(Listing {
            keys: vec![],
            revision: page.revision,
            incarnation: page.incarnation,
            panicked: page.panicked,
        });
        listing.keys.extend(page.keys);
        let Some(token) = next else {
            return Ok(std::mem::take(listing));
        };
        request.page_token = token;
    }
}

/// Lists the selected holds.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
pub async fn holds(
    client: &Client,
    mut request: v1::ListHoldsRequest,
) -> Result<Vec<v1::Hold>, Failure> {
    let (mut holds, mut pages) = (vec![], Pages::of("holds"));
    loop {
        let page = client
            .keys()
            .list_holds(client.request(request.clone()))
            .await?
            .into_inner();
        let next = pages.next(&page, &page.next_page_token)?;
        holds.extend(page.holds);
        match next {
            Some(token) => request.page_token = token,
            None => return Ok(holds),
        }
    }
}

/// Lists the selected claims.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
pub async fn claims(
    client: &Client,
    mut request: v1::ListClaimsRequest,
) -> Result<Vec<v1::Claim>, Failure> {
    let (mut claims, mut pages) = (vec![], Pages::of("claims"));
    loop {
        let page = client
            .keys()
            .list_claims(client.request(request.clone()))
            .await?
            .into_inner();
        let next = pages.next(&page, &page.next_page_token)?;
        claims.extend(page.claims);
        match next {
            Some(token) => request.page_token = token,
            None => return Ok(claims),
        }
    }
}

/// Lists the selected tracepoints. Also returns the reason why the list is stale; the reason is
/// empty if the list is current.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
pub async fn tracepoints(
    client: &Client,
    mut request: v1::ListTracepointsRequest,
) -> Result<(Vec<v1::Tracepoint>, String), Failure> {
    let (mut tracepoints, mut pages) = (vec![], Pages::of("tracepoints"));
    loop {
        let page = client
            .tracepoints()
            .list_tracepoints(client.request(request.clone()))
            .await?
            .into_inner();
        let next = pages.next(&page, &page.next_page_token)?;
        tracepoints.extend(page.tracepoints);
        match next {
            Some(token) => request.page_token = token,
            None => return Ok((tracepoints, page.stale)),
        }
    }
}
