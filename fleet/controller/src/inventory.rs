// SPDX-License-Identifier: Apache-2.0
//! Follows the registry. Hosts that register become hosts of the controller, and are removed when
//! their lease ends.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use crate::hosts::{HostConfig, HostEndpoint, Hosts, TlsFiles};
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
/// the list. A watch continues from the next revision. Rollouts are told only of what differs, and
/// of what was written after the revision `seen`: a guest that has left and come back, or has
/// booted again, may have the same record as before.
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
    let changes: Vec<Change> = snapshot.entries.into_iter().map(Change::Put).collect();
    let (mut present, mut guests) = (BTreeSet::new(), BTreeSet::new());
    for change in &changes {
        match registry::read(change) {
            Ok(Some(Registered::Host(name, _))) => {
                present.insert(name);
            }
            Ok(Some(Registered::Guest { host, guest, .. })) => {
                guests.insert((host, guest));
            }
            _ => {}
        }
    }
    hosts.retain_registered(&present, &guests);
    for change in &changes {
        apply(hosts, reach, change);
        if change.revision() <= seen {
            continue;
        }
        match registry::read(change) {
            Ok(Some(Registered::Host(name, _))) => hosts.changed(&name, None),
            Ok(Some(Registered::Guest { host, guest, .. })) => hosts.changed(&host, Some(&guest)),
            _ => {}
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
            let (labels, lease) = (record.labels, record.lease);
            let config = HostConfig {
                name,
                endpoint,
                labels,
            };
            if let Err(error) = hosts.register(config, lease) {
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
    use crate::hosts::Following;
    use crate::store::registry::{GuestRecord, PREFIX};
    use crate::store::{EmbeddedStore, Transaction};

    fn host(machine: &str) -> (String, Vec<u8>) {
        let record = HostRecord {
            machine: machine.to_owned(),
            socket: "/nowhere".to_owned(),
            address: None,
            labels: BTreeMap::new(),
            lease: 1,
        };
        let value = serde_json::to_vec(&record).expect("JSON");
        (format!("{PREFIX}h/host"), value)
    }

    fn guest(name: &str) -> (String, Vec<u8>) {
        let value = serde_json::to_vec(&GuestRecord::default()).expect("JSON");
        (format!("{PREFIX}h/guests/{name}"), value)
    }

    async fn put(store: &EmbeddedStore, records: impl IntoIterator<Item = (String, Vec<u8>)>) {
        let begin = Transaction::new();
        let put = |all: Transaction, (key, value)| all.put(key, value);
        let written = store.commit(records.into_iter().fold(begin, put)).await;
        written.expect("written");
    }

    #[tokio::test]
    async fn what_was_written_while_the_watch_was_lost_is_told() {
        let folder = tempfile::tempdir().expect("room");
        let store = EmbeddedStore::open(&folder.path().join("store")).expect("opens");
        let hosts = Hosts::new(&[]).expect("no names");
        let reach = Reach {
            machine: "m".to_owned(),
            tls: None,
        };
        put(&store, [host("m"), guest("g0"), guest("g1")]).await;
        let seen = list(&store, &hosts, &reach, u64::MAX)
            .await
            .expect("listed");
        let mut following = Following::new(&hosts);
        let again = list(&store, &hosts, &reach, seen).await.expect("listed");
        assert!(again == seen && !following.has_changed());
        // The guest has left and come back, with the same record.
        put(&store, [guest("g1")]).await;
        let seen = list(&store, &hosts, &reach, seen).await.expect("listed");
        let changed = following.take().expect("few");
        assert_eq!(changed.len(), 1, "{changed:?}");
        assert_eq!(changed[0].guest.as_deref(), Some("g1"));
        // Another machine has the name now, and the socket is one of that machine.
        assert!(hosts.get("h").is_some());
        put(&store, [host("other")]).await;
        list(&store, &hosts, &reach, seen).await.expect("listed");
        assert!(hosts.get("h").is_none());
    }
}
