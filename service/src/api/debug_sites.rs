// SPDX-License-Identifier: Apache-2.0
//! Lists the lines that dynamic debug can print.

use std::sync::Arc;
use std::time::Instant;

use patchbay_proto::v1;
use static_keys::MAX_PATTERNS;

use super::convert;
use super::requests::{blocking, invalid, page_size};
use crate::keys::DebugListQuery;
use crate::keys::debug::DebugQueries;
use crate::keys::{Keys, KeysError};

pub async fn list(
    keys: &Arc<Keys>,
    request: v1::ListDebugSitesRequest,
    deadline: Instant,
) -> Result<v1::ListDebugSitesResponse, KeysError> {
    let given = request.queries.len();
    if given > MAX_PATTERNS {
        let message = format!("{given} given; give up to {MAX_PATTERNS}");
        return Err(invalid("queries", message));
    }
    let queries = DebugQueries::parse(&request.queries)
        .map_err(|error| invalid("queries", error.to_string()))?;
    let query = DebugListQuery {
        page_size: page_size(request.page_size)?,
        page_token: request.page_token,
        queries,
        enabled: request.enabled,
    };
    let reader = Arc::clone(keys);
    keys.find_kernel(deadline).await;
    // This reads every key's count from the guest.
    let read = move || reader.list_debug_sites(&query);
    let page = blocking("the lines cannot be listed", read).await?;
    Ok(v1::ListDebugSitesResponse {
        sites: page.sites.into_iter().map(convert::debug_site).collect(),
        next_page_token: page.next_page_token,
        revision: page.revision,
        incarnation: keys.incarnation().to_string(),
        total_size: i32::try_from(page.total).unwrap_or(i32::MAX),
    })
}
