// SPDX-License-Identifier: Apache-2.0
//! The armed events and the clients that armed them.
//!
//! The ledger of holds records which clients fire an event. Guest memory shows whether its key is
//! on.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tokio::time::Instant;

use super::backoff::Backoff;
use super::stream::Source;

/// An armed event.
#[derive(Clone, Debug, Default)]
pub struct Armed {
    /// Full name of the key of the event's tracepoint.
    pub key: String,
    /// Format of the events that the agent sends; `None` if the agent has no probe, because the
    /// guest's own kernel has armed the event.
    pub source: Option<Arc<Source>>,
    /// Filter that is set in the guest; empty if none.
    pub filter: String,
    /// Trigger that is set in the guest; empty if none.
    pub trigger: String,
    /// Number of the agent's connection on which the event was armed. The report of an agent that
    /// connects is older than the events that are armed on this connection.
    pub connection: u64,
    /// True if a client armed the event with `even_if_others`.
    pub even_if_others: bool,
    /// Clients that armed the event, each with the time at which its arming expires; `None` if the
    /// arming lasts until the client disarms the event.
    pub armed_by: BTreeMap<String, Option<Instant>>,
    /// Limits how often the event is fired and parked because of other probes in the guest.
    pub backoff: Backoff,
    /// Value of [`Book::armed`] when the event was armed.
    pub serial: u64,
}

impl Armed {
    /// Returns whether the guest's own kernel has armed the event, and the agent has not.
    pub fn is_guests(&self) -> bool {
        self.source.is_none()
    }
}

/// Armed events by "system:name".
#[derive(Debug, Default)]
pub struct Book {
    pub events: BTreeMap<String, Armed>,
    /// Number of armings so far.
    pub armed: u64,
    /// Events that the agent is being asked to arm or disarm.
    pub moving: BTreeSet<String>,
    /// Parked events that are detached when the agent answers again.
    pub overdue: BTreeSet<String>,
}

impl Book {
    /// Returns whether the event may have the agent's probe. Not valid during a request to the
    /// agent to arm or disarm the event.
    pub fn may_have_probe(&self, name: &str) -> bool {
        self.is_agents(name) || self.overdue.contains(name)
    }

    /// Returns whether the agent has armed the event.
    pub fn is_agents(&self, name: &str) -> bool {
        self.of_agent(name).is_some()
    }

    /// Returns an event that the agent has armed.
    pub fn of_agent(&self, name: &str) -> Option<&Armed> {
        self.events.get(name).filter(|armed| !armed.is_guests())
    }

    /// Returns the events that the client armed.
    pub fn armed_by(&self, client: &str) -> Vec<String> {
        let mine = self.events.iter();
        mine.filter(|(_, armed)| armed.armed_by.contains_key(client))
            .map(|(name, _)| name.clone())
            .collect()
    }

    /// Returns the full names of the keys of events.
    pub fn keys(&self, names: &[String]) -> Vec<String> {
        names
            .iter()
            .filter_map(|name| Some(self.events.get(name)?.key.clone()))
            .collect()
    }

    /// Returns the events that only this client armed, or all events with `force`. When the client
    /// disarms these events, the agent must detach its probes.
    pub fn to_disarm(&self, names: &[String], client: &str, force: bool) -> Vec<String> {
        let kept = |armed: &Armed| !force && armed.armed_by.keys().any(|other| other != client);
        names
            .iter()
            .filter(|&name| self.events.get(name).is_some_and(|armed| !kept(armed)))
            .cloned()
            .collect()
    }

    /// Removes the client from these events.
    pub fn release_arm(&mut self, names: &[String], client: &str) {
        for name in names {
            if let Some(armed) = self.events.get_mut(name) {
                armed.armed_by.remove(client);
            }
        }
    }

    /// Returns the events whose arming has expired, by client.
    pub fn expired(&self, now: Instant) -> BTreeMap<String, Vec<String>> {
        let mut expired: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (name, armed) in &self.events {
            let over = armed.armed_by.iter();
            for (client, _) in over.filter(|(_, until)| until.is_some_and(|until| until <= now)) {
                expired
                    .entry(client.clone())
                    .or_default()
                    .push(name.clone());
            }
        }
        expired
    }

    /// Returns the time at which the first arming expires.
    pub fn next_expiry(&self) -> Option<Instant> {
        let clients = self
            .events
            .values()
            .flat_map(|armed| armed.armed_by.values());
        clients.flatten().min().copied()
    }

    /// Sets a new expiry for the client's arming of these events, if it still exists.
    pub fn set_expiry(&mut self, names: &[String], client: &str, until: Instant) {
        for name in names {
            let armed = self.events.get_mut(name);
            if let Some(expiry) = armed.and_then(|armed| armed.armed_by.get_mut(client)) {
                *expiry = Some(until);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::super::decode::Format;
    use super::*;

    fn armed(armed_by: &[&str]) -> Armed {
        let client = |&name: &&str| (name.to_owned(), None);
        Armed {
            key: "key".into(),
            source: Some(Arc::new(Source {
                name: "s:e".into(),
                format: Format {
                    id: 1,
                    fields: [].into(),
                },
                text: Box::default(),
                settled_at: AtomicU64::new(0),
                events: AtomicU64::new(0),
            })),
            filter: String::new(),
            trigger: String::new(),
            connection: 1,
            even_if_others: false,
            armed_by: armed_by.iter().map(client).collect(),
            backoff: Backoff::default(),
            serial: 1,
        }
    }

    fn book() -> Book {
        let mut book = Book::default();
        book.events.insert("s:mine".into(), armed(&["a"]));
        book.events.insert("s:shared".into(), armed(&["a", "b"]));
        book.events.insert("s:theirs".into(), armed(&["b"]));
        book
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn the_last_client_out_disarms() {
        let mut book = book();
        let to_disarm = |book: &Book, client| book.to_disarm(&book.armed_by(client), client, false);
        assert_eq!(to_disarm(&book, "a"), names(&["s:mine"]));
        book.release_arm(&names(&["s:shared"]), "a");
        assert_eq!(to_disarm(&book, "b"), names(&["s:shared", "s:theirs"]));
    }

    #[test]
    fn force_overrules_others() {
        let shared = names(&["s:shared"]);
        assert!(book().to_disarm(&shared, "a", false).is_empty());
        assert_eq!(book().to_disarm(&shared, "c", true), shared);
    }

    #[test]
    fn what_a_client_armed_expires_for_that_client() {
        let mut book = book();
        let now = Instant::now();
        let later = now + std::time::Duration::from_secs(1);
        assert_eq!(book.next_expiry(), None);
        book.set_expiry(&names(&["s:mine", "s:shared", "s:theirs"]), "a", later);
        assert_eq!(book.next_expiry(), Some(later));
        assert!(book.expired(now).is_empty());
        let expired = [("a".to_owned(), names(&["s:mine", "s:shared"]))];
        assert_eq!(book.expired(later), expired.into());
    }
}
