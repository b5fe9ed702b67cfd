// SPDX-License-Identifier: Apache-2.0
//! Answers kept for their request ids (AIP-155).

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::error::KeysError;

/// Digest of a request.
pub type Content = [u8; 32];

#[derive(Debug)]
struct Answer<A> {
    content: Content,
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

    /// Returns the earlier answer, if there is one.
    ///
    /// # Errors
    /// [`KeysError::RequestIdReused`] if it answers another request.
    pub fn find(
        &self,
        principal: &str,
        request_id: &str,
        content: &Content,
    ) -> Result<Option<Arc<A>>, KeysError> {
        if request_id.is_empty() {
            return Ok(None);
        }
        match self
            .answers
            .get(&(principal.to_owned(), request_id.to_owned()))
        {
            None => Ok(None),
            Some(earlier) if earlier.content == *content => Ok(Some(Arc::clone(&earlier.answer))),
            Some(_) => Err(KeysError::RequestIdReused {
                request_id: request_id.to_owned(),
            }),
        }
    }

    /// Keeps an answer with this many results. Without a request id it does nothing.
    pub fn remember(
        &mut self,
        principal: &str,
        request_id: &str,
        content: Content,
        answer: &Arc<A>,
        results: usize,
    ) {
        if request_id.is_empty() {
            return;
        }
        let id = (principal.to_owned(), request_id.to_owned());
        let answer = Answer {
            content,
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

/// Returns the digest of a message that is encoded without its request id.
pub fn content(encoded: &[u8]) -> Content {
    Sha256::digest(encoded).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_belong_to_their_client_and_content() {
        let mut replay = Replay::new(10, 10);
        replay.remember("uid:1", "id", content(b"a"), &Arc::new(()), 1);
        assert!(
            replay
                .find("uid:1", "id", &content(b"a"))
                .expect("same")
                .is_some()
        );
        assert!(
            replay
                .find("uid:2", "id", &content(b"b"))
                .expect("another client")
                .is_none()
        );
        assert!(matches!(
            replay.find("uid:1", "id", &content(b"b")),
            Err(KeysError::RequestIdReused { .. })
        ));
        assert!(
            replay
                .find("uid:1", "", &content(b"a"))
                .expect("no id")
                .is_none()
        );
    }

    #[test]
    fn oldest_answers_go_first() {
        let mut replay = Replay::new(2, 10);
        for id in ["a", "b", "c"] {
            replay.remember("uid:1", id, content(b""), &Arc::new(()), 1);
        }
        assert!(
            replay
                .find("uid:1", "a", &content(b""))
                .expect("forgotten")
                .is_none()
        );
        assert!(
            replay
                .find("uid:1", "b", &content(b""))
                .expect("kept")
                .is_some()
        );
        replay.remember("uid:1", "big", content(b""), &Arc::new(()), 11);
        assert!(
            replay
                .find("uid:1", "c", &content(b""))
                .expect("forgotten")
                .is_none()
        );
        assert!(
            replay
                .find("uid:1", "big", &content(b""))
                .expect("the newest")
                .is_some()
        );
    }
}
