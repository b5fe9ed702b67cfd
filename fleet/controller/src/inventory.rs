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
/// the list. A watch continues from the next revision. Rollouts are told only of what differs,
/// because the loss of a watch changes no host.
///
/// # Errors
/// [`StoreError`].
pub async fn list(store: &dyn Store, hosts: &Hosts, reach: &Reach) -> Result<u64, StoreError> {
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
    }
    Ok(snapshot.revision)
}

/// Follows the registry from a revision on, until the future is dropped.
pub async fn follow(store: &dyn Store, hosts: &Hosts, reach: &Reach, mut revision: u64) {
    loop {
        let error = watch(store, hosts, reach, revision).await;
        tracing::warn!("the registry is listed again: {error}");
        revision = loop {
            tokio::time::sleep(RETRY).await;
            match list(store, hosts, reach).await {
                Ok(revision) => break revision,
                Err(error) => tracing::warn!("the registry cannot be listed: {error}"),
            }
        };
    }
}

async fn watch(store: &dyn Store, hosts: &Hosts, reach: &Reach, revision: u64) -> StoreError {
    let mut changes = match store.watch(registry::PREFIX, revision + 1).await {
        Ok(changes) => changes,
        Err(error) => return error,
    };
    loop {
        match changes.next().await {
            Ok(some) => some.iter().for_each(|change| apply(hosts, reach, change)),
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
