// SPDX-License-Identifier: Apache-2.0
//! Stores the keys of prepared plans, for the decision about their commit.
//!
//! The keys of a plan cannot be queried, and a plan with unchecked keys is not committed. So a plan
//! that is not stored, because it is too old or was prepared before a restart, is prepared again.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

const MAX_PLANS: usize = 4096;
/// The maximum size of the names in all plans, in bytes.
const MAX_BYTES: usize = 64 << 20;

/// The guest and the plan's id.
type Id = (String, String);

/// The stored plans of all guests. The oldest are dropped first.
#[derive(Default)]
pub struct Plans(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    plans: HashMap<Id, Kept>,
    order: VecDeque<Id>,
    bytes: usize,
}

struct Kept {
    keys: Arc<[String]>,
    gives_back: bool,
}

fn weight(keys: &[String]) -> usize {
    keys.iter().map(|key| key.len() + size_of::<String>()).sum()
}

impl Plans {
    /// Stores the keys of a plan, and whether it only gives back what the caller holds.
    pub fn keep(&self, guest: &str, plan: &str, keys: Vec<String>, gives_back: bool) {
        let mut inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let id = (guest.to_owned(), plan.to_owned());
        inner.bytes += weight(&keys);
        let kept = Kept {
            keys: keys.into(),
            gives_back,
        };
        match inner.plans.insert(id.clone(), kept) {
            Some(old) => inner.bytes -= weight(&old.keys),
            None => inner.order.push_back(id),
        }
        while inner.bytes > MAX_BYTES || inner.order.len() > MAX_PLANS {
            let Some(oldest) = inner.order.pop_front() else {
                break;
            };
            if let Some(kept) = inner.plans.remove(&oldest) {
                inner.bytes -= weight(&kept.keys);
            }
        }
    }

    /// Returns the keys of a plan, if they are stored.
    pub fn keys(&self, guest: &str, plan: &str) -> Option<Arc<[String]>> {
        let inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let id = (guest.to_owned(), plan.to_owned());
        inner.plans.get(&id).map(|kept| Arc::clone(&kept.keys))
    }

    /// Returns whether a stored plan only gives back what the caller holds.
    pub fn gives_back(&self, guest: &str, plan: &str) -> bool {
        let inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let id = (guest.to_owned(), plan.to_owned());
        inner.plans.get(&id).is_some_and(|kept| kept.gives_back)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_plans_are_forgotten() {
        let plans = Plans::default();
        for number in 0..=MAX_PLANS {
            plans.keep("web-1", &number.to_string(), vec!["a".to_owned()], false);
        }
        assert!(plans.keys("web-1", "0").is_none());
        let last = plans.keys("web-1", &MAX_PLANS.to_string());
        assert_eq!(last.expect("kept").as_ref(), ["a"]);
        assert!(plans.keys("db-1", &MAX_PLANS.to_string()).is_none());
        plans.keep("web-1", "large", vec!["x".repeat(MAX_BYTES)], false);
        assert!(plans.keys("web-1", "large").is_none());
        assert_eq!(plans.0.lock().expect("free").bytes, 0);
    }
}
