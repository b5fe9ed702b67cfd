// SPDX-License-Identifier: Apache-2.0
//! Follows the registry. Hosts that register become hosts of the controller, and are removed when
//! their lease ends.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use crate::hosts::{Changed, HostConfig, HostEndpoint, Hosts, TlsFiles};
use crate::store::registry::{self, HostRecord, Registered};
use crate::store::{Change, Store, StoreError};

/// The delay before the registry is listed again after an error.
const RETRY: Duration = Duration::from_millis(500);

/// The settings that decide how a registered host is reached.
#[derive(Clone, Debug, Default)]
pub struct Reach {
    /// The id of this machine. Only a host on this machine can be reached by its socket.
    pub machine: String,
    /// The certificates for TLS. Without them, only sockets of this machine are used. With them,
    /// registered sockets are not used, because a socket does not prove a host's name.
    pub tls: Option<TlsFiles>,
}

impl Reach {
    fn endpoint(&self, record: &HostRecord) -> Option<HostEndpoint> {
        match (&record.address, &self.tls) {
            (Some(address), Some(tls)) => Some(HostEndpoint::Address(address.clone(), tls.clone())),
            (_, None) if record.machine == self.machine => {
                Some(HostEndpoint::Socket(PathBuf::from(&record.socket)))
            }
            _ => None,
        }
    }
}

/// Replaces the registered hosts in `hosts` by those of the registry, and returns the revision of
/// the list. A watch continues from the next revision. What was written up to the revision `seen`
/// is known, so rollouts are told only of what is later and of what is gone. A guest that has left
/// and come back, or has booted again, may have the same record as before.
///
/// # Errors
/// [`StoreError`].
pub async fn list(
    store: &dyn Store,
    hosts: &Hosts,
    reach: &Reach,
    seen: u64,
) -> Result<u64, StoreError> {
    let snapshot = store.range(registry::PREFIX).await?;
    let (mut present, mut later) = (BTreeSet::new(), Vec::new());
    for change in snapshot.entries.into_iter().map(Change::Put) {
        let of = match registry::read(&change) {
            Ok(Some(Registered::Host(host, _))) => Some(Changed { host, guest: None }),
            Ok(Some(Registered::Guest { host, guest, .. })) => {
                let guest = Some(guest);
                Some(Changed { host, guest })
            }
            _ => None,
        };
        if change.revision() > seen {
            later.push((change, of.clone()));
        }
        present.extend(of);
    }
    hosts.retain_registered(&present);
    let changes = hosts.changes();
    for (change, of) in later {
        let told = *changes.borrow();
        apply(hosts, reach, &change);
        if let Some(Changed { host, guest }) = of
            && *changes.borrow() == told
        {
            hosts.changed(&host, guest.as_deref());
        }
    }
    Ok(snapshot.revision)
}

/// Follows the registry from a revision on, until the future is dropped.
pub async fn follow(store: &dyn Store, hosts: &Hosts, reach: &Reach, mut revision: u64) {
    loop {
        let error = watch(store, hosts, reach, &mut revision).await;
        tracing::warn!("the registry is listed again: {error}");
        revision = loop {
            tokio::time::sleep(RETRY).await;
            match list(store, hosts, reach, revision).await {
                Ok(revision) => break revision,
                Err(error) => tracing::warn!("the registry cannot be listed: {error}"),
            }
        };
    }
}

/// Applies the changes after `revision`, and advances it, until the watch ends.
async fn watch(store: &dyn Store, hosts: &Hosts, reach: &Reach, revision: &mut u64) -> StoreError {
    let mut changes = match store.watch(registry::PREFIX, *revision + 1).await {
        Ok(changes) => changes,
        Err(error) => return error,
    };
    loop {
        match changes.next().await {
            Ok(some) => {
                for change in &some {
                    apply(hosts, reach, change);
                    *revision = change.revision().max(*revision);
                }
            }
            Err(error) => return error,
        }
    }
}

/// Applies a change. An unreadable value is logged and skipped, because it affects only one host
/// and the others must be served.
pub fn apply(hosts: &Hosts, reach: &Reach, change: &Change) {
    match registry::read(change) {
        Ok(Some(Registered::Host(name, record))) => {
            let Some(endpoint) = reach.endpoint(&record) else {
                tracing::error!(
                    host = name,
                    "a registered host cannot be reached: it needs --listen with a certificate for its name, and \
                     this controller --host-cert, --host-key and --host-ca; a host on this machine can be named \
                     with --host NAME=SOCKET instead"
                );
                // Another machine may have the name now, and this one its former socket.
                hosts.unregister(&name);
                return;
            };
            let labels = record.labels;
            let config = HostConfig {
                name,
                endpoint,
                labels,
            };
            if let Err(error) = hosts.register(config) {
                tracing::error!("a registered host is left out: {error}");
            }
        }
        Ok(Some(Registered::HostGone(name))) => hosts.unregister(&name),
        Ok(Some(Registered::Guest {
            host,
            guest,
            record,
        })) => hosts.set_guest(&host, &guest, Some(record)),
        Ok(Some(Registered::GuestGone { host, guest })) => hosts.set_guest(&host, &guest, None),
        Ok(None) => tracing::error!(
            key = change.key(),
            "the registry contains a key of another program; if it comes from an older patchbayd, \
             update that host so that it is found"
        ),
        Err(error) => tracing::error!("a host is left out: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::hosts::{Following, KeysChanged};
    use crate::store::registry::{GuestRecord, PREFIX};
    use crate::store::{EmbeddedStore, Transaction};

    fn host(name: &str, machine: &str, lease: i64) -> (String, Vec<u8>) {
        let record = HostRecord {
            machine: machine.to_owned(),
            socket: "/nowhere".to_owned(),
            address: None,
            labels: BTreeMap::new(),
            lease,
        };
        let value = serde_json::to_vec(&record).expect("JSON");
        (format!("{PREFIX}{name}/host"), value)
    }

    fn guest(host: &str, name: &str, incarnation: &str) -> (String, Vec<u8>) {
        let record = GuestRecord {
            incarnation: incarnation.to_owned(),
            ..GuestRecord::default()
        };
        let value = serde_json::to_vec(&record).expect("JSON");
        (format!("{PREFIX}{host}/guests/{name}"), value)
    }

    /// A controller on machine m, and the registry.
    struct Listing {
        _folder: tempfile::TempDir,
        store: EmbeddedStore,
        hosts: Hosts,
        seen: u64,
    }

    impl Listing {
        /// Lists a registry with these records for the first time.
        async fn new(records: &[(String, Vec<u8>)]) -> Self {
            let folder = tempfile::tempdir().expect("room");
            let store = EmbeddedStore::open(&folder.path().join("store")).expect("opens");
            let mut listing = Self {
                _folder: folder,
                store,
                hosts: Hosts::new(&[]).expect("no names"),
                seen: 0,
            };
            listing.write(records, &[]).await;
            listing.list().await;
            listing
        }

        async fn write(&self, put: &[(String, Vec<u8>)], deleted: &[&str]) {
            let begin = Transaction::new();
            let all = put.iter().fold(begin, |all, (key, value)| {
                all.put(key.clone(), value.clone())
            });
            let all = deleted
                .iter()
                .fold(all, |all, key| all.delete(format!("{PREFIX}{key}")));
            self.store.commit(all).await.expect("written");
        }

        async fn list(&mut self) {
            let reach = Reach {
                machine: "m".to_owned(),
                tls: None,
            };
            let listed = list(&self.store, &self.hosts, &reach, self.seen).await;
            self.seen = listed.expect("listed");
        }
    }

    #[tokio::test]
    async fn a_list_tells_only_what_differs() {
        let mut listing = Listing::new(&[
            host("a", "m", 1),
            host("b", "m", 1),
            guest("a", "g0", "1"),
            guest("a", "g1", "1"),
            guest("b", "g2", "1"),
        ])
        .await;
        let mut following = Following::new(&listing.hosts);
        listing.list().await;
        assert!(!following.has_changed());

        // Host a was restarted and has lost a guest. Host b is gone. Host c is new.
        let put = [
            host("a", "m", 2),
            guest("a", "g0", "2"),
            host("c", "m", 1),
            guest("c", "g3", "1"),
        ];
        let deleted = ["a/guests/g1", "b/host", "b/guests/g2"];
        listing.write(&put, &deleted).await;
        listing.list().await;
        let changed = following.take().records.expect("few");
        let changed: BTreeSet<(String, Option<String>)> = changed
            .into_iter()
            .map(|changed| (changed.host, changed.guest))
            .collect();
        let expected = [
            ("a", None),
            ("a", Some("g0")),
            ("a", Some("g1")),
            ("b", Some("g2")),
            ("c", None),
            ("c", Some("g3")),
        ];
        let expected = expected.map(|(host, guest)| (host.to_owned(), guest.map(str::to_owned)));
        assert_eq!(changed, BTreeSet::from(expected));
        assert!(listing.hosts.get("b").is_none());
        assert!(listing.hosts.elsewhere("b", "g2").is_empty());
    }

    #[tokio::test]
    async fn what_was_written_while_the_watch_was_lost_is_told() {
        let records = [
            host("h", "m", 1),
            guest("h", "g0", ""),
            guest("h", "g1", ""),
        ];
        let mut listing = Listing::new(&records).await;
        let mut following = Following::new(&listing.hosts);
        let seen = listing.seen;
        listing.list().await;
        assert!(listing.seen == seen && !following.has_changed());
        // The guest has left and come back, with the same record.
        listing.write(&[guest("h", "g1", "")], &[]).await;
        listing.list().await;
        let changed = following.take().records.expect("few");
        assert_eq!(changed.len(), 1, "{changed:?}");
        assert_eq!(changed[0].guest.as_deref(), Some("g1"));
        // Another machine has the name now, and the socket is one of that machine.
        assert!(listing.hosts.get("h").is_some());
        listing.write(&[host("h", "other", 1)], &[]).await;
        listing.list().await;
        assert!(listing.hosts.get("h").is_none());
    }

    #[tokio::test]
    async fn changed_keys_are_told_apart_from_changed_records() {
        let listing = Listing::new(&[host("h", "m", 1), guest("h", "g0", "1")]).await;
        let mut following = Following::new(&listing.hosts);
        let records = listing.hosts.changes();
        let record = |incarnation: &str, revision| GuestRecord {
            incarnation: incarnation.to_owned(),
            revision,
            ..GuestRecord::default()
        };
        let put = |record| listing.hosts.set_guest("h", "g0", Some(record));
        put(record("1", 7));
        following.changed().await;
        let news = following.take();
        assert_eq!(news.records, Some(vec![]));
        let keys = KeysChanged {
            host: "h".to_owned(),
            guest: "g0".to_owned(),
        };
        assert_eq!(news.keys, [keys]);
        assert!(!records.has_changed().expect("open"));
        put(record("1", 7));
        assert!(!following.has_changed());
        put(record("2", 8));
        let news = following.take();
        assert_eq!(news.records.map(|records| records.len()), Some(1));
        assert_eq!(news.keys, []);

        // Too many changes of keys do not displace the others.
        put(record("3", 0));
        for revision in 1..10_000 {
            put(record("3", revision));
        }
        let news = following.take();
        assert_eq!(news.records.map(|records| records.len()), Some(1));
        assert_eq!(news.keys.len(), 4096);
    }
}
