// SPDX-License-Identifier: Apache-2.0
//! The requests that were made, by their ids. So a later process does not act again when it gets a
//! repeat.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::keys::error::KeysError;
use crate::keys::outcome::UpdateSummary;
use crate::keys::replay::RequestId;

/// The maximum number of requests that are kept.
const MAX_MADE: usize = 256;

/// A request that was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MadeRequest {
    /// The client.
    pub principal: String,
    /// The id of the request.
    pub request: RequestId,
    /// The answer.
    pub summary: UpdateSummary,
    /// Number of keys whose change was not made, because the service and its watchdog were killed
    /// during the change.
    #[serde(default)]
    pub unmade: u32,
}

/// The newest requests that were made in this boot of the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MadeRequests(VecDeque<MadeRequest>);

impl MadeRequests {
    /// Adds a request. The oldest requests are dropped.
    pub fn push(&mut self, made: MadeRequest) {
        self.0.push_back(made);
        let excess = self.0.len().saturating_sub(MAX_MADE);
        self.0.drain(..excess);
    }

    /// Returns the answer to an earlier request with this id.
    ///
    /// # Errors
    /// [`KeysError::RequestIdReused`] if the request with this id has other content;
    /// [`KeysError::RequestMadeInPart`].
    pub fn find(
        &self,
        principal: &str,
        request: &RequestId,
    ) -> Result<Option<UpdateSummary>, KeysError> {
        let is_it = |made: &&MadeRequest| {
            made.principal == principal && made.request.as_str() == request.as_str()
        };
        let Some(made) = self.0.iter().rev().find(is_it) else {
            return Ok(None);
        };
        request.check_repeat(&made.request)?;
        if made.unmade > 0 {
            return Err(KeysError::RequestMadeInPart {
                request_id: request.as_str().to_owned(),
                made: made.summary.keys_changed,
                unmade: made.unmade,
            });
        }
        Ok(Some(made.summary))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_requests_are_found_by_client_id_and_content() {
        let request = |id: usize, content: &str| {
            RequestId::new(id.to_string(), || content.into()).expect("an id")
        };
        let mut made = MadeRequests::default();
        for id in 0..=MAX_MADE {
            let keys = u32::try_from(id).expect("few");
            made.push(MadeRequest {
                principal: "uid:7".to_owned(),
                request: request(id, "a"),
                summary: UpdateSummary {
                    keys,
                    ..UpdateSummary::default()
                },
                unmade: 0,
            });
        }
        let find = |principal, id, content| {
            let found = made.find(principal, &request(id, content));
            found.map(|found| found.map(|summary| summary.keys))
        };
        assert_eq!(find("uid:7", 0, "a").expect("none"), None, "the oldest");
        assert_eq!(find("uid:7", MAX_MADE, "a").expect("one"), Some(256));
        assert_eq!(find("uid:8", 1, "b").expect("another client"), None);
        find("uid:7", 1, "b").expect_err("another request");
    }
}
