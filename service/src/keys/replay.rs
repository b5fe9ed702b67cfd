// SPDX-License-Identifier: Apache-2.0
//! Answers kept for their request ids (AIP-155).

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::error::KeysError;

/// Identifies a request of a client. A repeat of the request has the same id and content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestId {
    /// The id that the client chose.
    id: String,
    /// Digest of the request without its id.
    content: [u8; 32],
}

impl RequestId {
    /// Creates the identity of a request from its id and its encoding without the id. Returns
    /// `None` for an empty id, which means that the client does not repeat the request.
    pub fn new(id: String, encoded: impl FnOnce() -> Vec<u8>) -> Option<Self> {
        let content = |id: String| Self {
            id,
            content: Sha256::digest(encoded()).into(),
        };
        Some(id).filter(|id| !id.is_empty()).map(content)
    }

    /// Returns the id that the client chose.
    pub fn as_str(&self) -> &str {
        &self.id
    }

    /// Checks that an earlier request with the same id is the same request.
    ///
    /// # Errors
    /// [`KeysError::RequestIdReused`] if the earlier request has other content.
    pub fn check_repeat(&self, earlier: &Self) -> Result<(), KeysError> {
        if self.content == earlier.content {
            return Ok(());
        }
        Err(KeysError::RequestIdReused {
            request_id: self.id.clone(),
        })
    }
}

#[derive(Debug)]
struct Answer<A> {
    request: RequestId,
    answer: Arc<A>,
    results: usize,
}

/// The newest answers, by principal and request id.
#[derive(Debug)]
pub struct Replay<A> {
    answers: HashMap<(String, String), Answer<A>>,
    order: VecDeque<(String, String)>,
    results: usize,
    max_answers: usize,
    max_results: usize,
}

impl<A> Replay<A> {
    /// Keeps at most `max_answers` answers with `max_results` results together; the newest
    /// answer is always kept.
    pub fn new(max_answers: usize, max_results: usize) -> Self {
        Self {
            answers: HashMap::new(),
            order: VecDeque::new(),
            results: 0,
            max_answers,
            max_results,
        }
    }

    /// Drops all answers.
    pub fn clear(&mut self) {
        self.answers.clear();
        self.order.clear();
        self.results = 0;
    }

    /// Returns the earlier answer; `None` if there is none.
    ///
    /// # Errors
    /// [`KeysError::RequestIdReused`] if the id belongs to another request.
    pub fn find(
        &self,
        principal: &str,
        request: Option<&RequestId>,
    ) -> Result<Option<Arc<A>>, KeysError> {
        let Some(request) = request else {
            return Ok(None);
        };
        let id = (principal.to_owned(), request.id.clone());
        let Some(earlier) = self.answers.get(&id) else {
            return Ok(None);
        };
        request.check_repeat(&earlier.request)?;
        Ok(Some(Arc::clone(&earlier.answer)))
    }

    /// Keeps an answer with this many results. Does nothing without a request id.
    pub fn remember(
        &mut self,
        principal: &str,
        request: Option<&RequestId>,
        answer: &Arc<A>,
        results: usize,
    ) {
        let Some(request) = request else { return };
        let id = (principal.to_owned(), request.id.clone());
        let answer = Answer {
            request: request.clone(),
            answer: Arc::clone(answer),
            results,
        };
        match self.answers.insert(id.clone(), answer) {
            None => self.order.push_back(id),
            Some(replaced) => self.results -= replaced.results,
        }
        self.results += results;
        while self.order.len() > 1
            && (self.order.len() > self.max_answers || self.results > self.max_results)
        {
            let Some(oldest) = self.order.pop_front() else {
                break;
            };
            if let Some(answer) = self.answers.remove(&oldest) {
                self.results -= answer.results;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(id: &str, content: &str) -> Option<RequestId> {
        RequestId::new(id.to_owned(), || content.into())
    }

    fn find(
        replay: &Replay<()>,
        principal: &str,
        id: &str,
        content: &str,
    ) -> Result<bool, KeysError> {
        let found = replay.find(principal, request(id, content).as_ref())?;
        Ok(found.is_some())
    }

    #[test]
    fn ids_belong_to_their_client_and_content() {
        let mut replay = Replay::new(10, 10);
        replay.remember("uid:1", request("id", "a").as_ref(), &Arc::new(()), 1);
        assert!(find(&replay, "uid:1", "id", "a").expect("same"));
        assert!(!find(&replay, "uid:2", "id", "b").expect("another client"));
        assert!(matches!(
            find(&replay, "uid:1", "id", "b"),
            Err(KeysError::RequestIdReused { .. })
        ));
        assert!(!find(&replay, "uid:1", "", "a").expect("no id"));
    }

    #[test]
    fn oldest_answers_go_first() {
        let mut replay = Replay::new(2, 10);
        for id in ["a", "b", "c"] {
            replay.remember("uid:1", request(id, "").as_ref(), &Arc::new(()), 1);
        }
        assert!(!find(&replay, "uid:1", "a", "").expect("forgotten"));
        assert!(find(&replay, "uid:1", "b", "").expect("kept"));
        replay.remember("uid:1", request("big", "").as_ref(), &Arc::new(()), 11);
        assert!(!find(&replay, "uid:1", "c", "").expect("forgotten"));
        assert!(find(&replay, "uid:1", "big", "").expect("the newest"));
    }
}
