// SPDX-License-Identifier: Apache-2.0
//! Which events are armed and firing, and for whom.
//!
//! Only what clients asked for: whether a key is on is read from the guest, never from here.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::stream::Source;
use super::tracer::Backoff;

/// An armed event.
#[derive(Clone, Debug)]
pub struct Armed {
    /// Full name of its tracepoint's key.
    pub key: String,
    /// For decoding.
    pub source: Arc<Source>,
    /// As set in the guest; empty if none.
    pub filter: String,
    /// As set in the guest; empty if none.
    pub trigger: String,
    /// The agent's connection by which it was armed: what an agent said when it connected is older
    /// than what was armed since.
    pub connection: u64,
    /// A client said that others in the guest may be silenced.
    pub even_if_others: bool,
    /// Clients that keep it armed.
    pub armed_by: BTreeSet<String>,
    /// Clients that keep it firing.
    pub fired_by: BTreeSet<String>,
    /// Of being fired and parked for others in the guest.
    pub backoff: Backoff,
    /// [`Book::armed`] with it.
    pub serial: u64,
}

/// Armed events by "system:name".
#[derive(Debug, Default)]
pub struct Book {
    pub events: BTreeMap<String, Armed>,
    /// Events armed so far.
    pub armed: u64,
    /// Events that are being armed or disarmed: the agent is asked about them.
    pub moving: BTreeSet<String>,
    /// To be disabled when the agent answers again; parked by now.
    pub overdue: BTreeSet<String>,
}

impl Book {
    /// Whether anything fires.
    pub fn is_quiet(&self) -> bool {
        self.events.values().all(|armed| armed.fired_by.is_empty())
    }

    /// Whether the agent's probe may be there, as far as nobody is just asking the agent.
    pub fn may_have_probe(&self, name: &str) -> bool {
        self.events.contains_key(name) || self.overdue.contains(name)
    }

    /// Those that the client keeps armed.
    pub fn armed_by(&self, client: &str) -> Vec<String> {
        let mine = self.events.iter();
        mine.filter(|(_, armed)| armed.armed_by.contains(client))
            .map(|(name, _)| name.clone())
            .collect()
    }

    /// Full names of the keys of events.
    pub fn keys(&self, names: &[String]) -> Vec<String> {
        names
            .iter()
            .filter_map(|name| Some(self.events.get(name)?.key.clone()))
            .collect()
    }

    /// What parking these events for a client takes: those that nobody else keeps firing.
    pub fn to_park(&self, names: &[String], client: &str, force: bool) -> Vec<String> {
        let kept = |armed: &Armed| !force && armed.fired_by.iter().any(|other| other != client);
        names
            .iter()
            .filter(|&name| self.events.get(name).is_some_and(|armed| !kept(armed)))
            .cloned()
            .collect()
    }

    /// As [`Book::to_park`], for disarming.
    pub fn to_disarm(&self, names: &[String], client: &str, force: bool) -> Vec<String> {
        let kept = |armed: &Armed| !force && armed.armed_by.iter().any(|other| other != client);
        names
            .iter()
            .filter(|&name| self.events.get(name).is_some_and(|armed| !kept(armed)))
            .cloned()
            .collect()
    }

    /// The client no longer keeps these events firing; with `force` nobody does.
    pub fn release_fire(&mut self, names: &[String], client: &str, force: bool) {
        for name in names {
            if let Some(armed) = self.events.get_mut(name) {
                armed.fired_by.retain(|other| !force && other != client);
            }
        }
    }

    /// The client no longer keeps these events armed.
    pub fn release_arm(&mut self, names: &[String], client: &str) {
        for name in names {
            if let Some(armed) = self.events.get_mut(name) {
                armed.armed_by.remove(client);
            }
        }
    }

    /// Those that nobody else keeps firing when a client goes.
    pub fn to_park_without(&self, client: &str) -> Vec<String> {
        let mine = self.events.iter();
        let fired: Vec<String> = mine
            .filter(|(_, armed)| armed.fired_by.contains(client))
            .map(|(name, _)| name.clone())
            .collect();
        self.to_park(&fired, client, false)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::super::decode::Format;
    use super::*;

    fn armed(armed_by: &[&str], fired_by: &[&str]) -> Armed {
        let set = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        Armed {
            key: "key".into(),
            source: Arc::new(Source {
                name: "s:e".into(),
                format: Format {
                    id: 1,
                    fields: [].into(),
                },
                settled_at: AtomicU64::new(0),
                events: AtomicU64::new(0),
            }),
            filter: String::new(),
            trigger: String::new(),
            connection: 1,
            even_if_others: false,
            armed_by: set(armed_by),
            fired_by: set(fired_by),
            backoff: Backoff::default(),
            serial: 1,
        }
    }

    fn book() -> Book {
        let mut book = Book::default();
        book.events.insert("s:mine".into(), armed(&["a"], &["a"]));
        book.events
            .insert("s:shared".into(), armed(&["a", "b"], &["a", "b"]));
        book.events.insert("s:theirs".into(), armed(&["b"], &[]));
        book
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn the_last_client_out_parks_and_disarms() {
        let mut book = book();
        let to_disarm = |book: &Book, client| book.to_disarm(&book.armed_by(client), client, false);
        assert_eq!(book.to_park_without("a"), names(&["s:mine"]));
        assert_eq!(to_disarm(&book, "a"), names(&["s:mine"]));
        book.release_fire(&names(&["s:mine", "s:shared"]), "a", false);
        book.release_arm(&names(&["s:shared"]), "a");
        assert_eq!(book.to_park_without("b"), names(&["s:shared"]));
        assert_eq!(to_disarm(&book, "b"), names(&["s:shared", "s:theirs"]));
        assert!(!book.is_quiet());
        book.release_fire(&names(&["s:shared"]), "b", false);
        assert!(book.is_quiet());
    }

    #[test]
    fn force_overrules_others() {
        let mut book = book();
        let shared = names(&["s:shared"]);
        assert!(book.to_park(&shared, "a", false).is_empty());
        assert_eq!(book.to_park(&shared, "a", true), shared);
        assert_eq!(book.to_disarm(&shared, "c", true), shared);
        book.release_fire(&shared, "a", true);
        assert!(book.events["s:shared"].fired_by.is_empty());
    }

    /// Nobody fired it, but the guest may have: a probe that is removed and added again turns it on.
    #[test]
    fn what_nobody_fired_may_be_parked() {
        assert_eq!(
            book().to_park(&names(&["s:theirs"]), "c", false),
            names(&["s:theirs"])
        );
    }
}
