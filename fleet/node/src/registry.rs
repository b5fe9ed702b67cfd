// SPDX-License-Identifier: Apache-2.0
//! Registers the host with all its guests in the fleet's registry for as long as it serves.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use patchbay_proto::v1;
use patchbay_proto::v1::guest_service_client::GuestServiceClient;
use patchbay_store::registry::{GuestRecord, HostRecord, RegisterError, Registration};
use patchbay_store::{EtcdStore, Store, StoreError};

use crate::monitors::{Directory, HostedGuest};
use crate::serve::RegistryConfig;

/// The time after which the registry removes a host whose daemon was killed.
const TTL: Duration = Duration::from_secs(10);
/// The interval at which guests are queried for changes of their state. Added and removed guests
/// are noticed without it.
const LOOK_INTERVAL: Duration = Duration::from_secs(10);
const RETRY: Duration = Duration::from_secs(1);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// The maximum number of guests that are queried at the same time.
const FAN_OUT: usize = 64;

/// A host to register.
pub struct Host {
    /// The store that holds the registry.
    pub store: Arc<dyn Store>,
    /// The host's name, which is unique in the fleet.
    pub name: String,
    /// The ways to reach the host.
    pub record: HostRecord,
}

/// Keeps the host registered until `shutdown` is ready, and then removes the host.
pub async fn run(host: Host, directory: Directory, shutdown: impl Future<Output = ()>) {
    let mut shutdown = std::pin::pin!(shutdown);
    // If this process loses the registration of the host, it does not take the name back from a
    // later holder.
    let mut takes_over = true;
    let mut last_error = String::new();
    loop {
        let (store, record) = (Arc::clone(&host.store), host.record.clone());
        let registered = tokio::select! {
            registered = Registration::new(store, &host.name, record, TTL, takes_over) => registered,
            () = &mut shutdown => return,
        };
        match registered {
            Ok(mut registration) => {
                takes_over = false;
                last_error.clear();
                tracing::info!(host = host.name, "registered");
                let error = tokio::select! {
                    error = keep(&mut registration, &host, &directory) => Some(error),
                    () = &mut shutdown => None,
                };
                match error {
                    Some(error) => {
                        tracing::warn!(host = host.name, %error, "not registered any more")
                    }
                    None => return registration.end().await,
                }
            }
            Err(error) => {
                let error = error.to_string();
                if error != last_error {
                    tracing::error!(host = host.name, error, "the host is not registered");
                    last_error = error;
                }
            }
        }
        tokio::select! {
            () = tokio::time::sleep(RETRY) => {}
            () = &mut shutdown => return,
        }
    }
}

/// Updates the registration until it is lost, and returns the reason.
async fn keep(registration: &mut Registration, host: &Host, directory: &Directory) -> StoreError {
    let store = Arc::clone(&host.store);
    let mut renewal = registration.renewal();
    let renew = renewal.keep(store.as_ref());
    let update = async {
        let mut changes = directory.subscribe();
        loop {
            match registration.update(look(directory).await).await {
                Ok(_) => {}
                Err(error @ StoreError::Unavailable(_)) => {
                    tracing::warn!(%error, "the guests are not registered");
                }
                Err(error) => return error,
            }
            tokio::select! {
                _ = changes.changed() => {}
                () = tokio::time::sleep(LOOK_INTERVAL) => {}
            }
        }
    };
    tokio::select! {
        error = renew => error,
        error = update => error,
    }
}

/// Returns the records of all guests that answer.
async fn look(directory: &Directory) -> BTreeMap<String, GuestRecord> {
    let looks = futures_util::stream::iter(directory.all())
        .map(|guest| async move { Some((guest.name.clone(), describe(guest).await?)) })
        .buffer_unordered(FAN_OUT);
    let found: Vec<_> = looks.collect().await;
    found.into_iter().flatten().collect()
}

async fn describe(guest: HostedGuest) -> Option<GuestRecord> {
    let _permit = guest.monitor.admit(false)?;
    let mut client = GuestServiceClient::new(guest.monitor.channel());
    let request = v1::DescribeGuestRequest {
        guest: guest.name,
        ..v1::DescribeGuestRequest::default()
    };
    let answer = tokio::time::timeout(ANSWER_TIMEOUT, client.describe_guest(request)).await;
    let answer = answer.ok()?.ok()?.into_inner();
    let status = answer.guest_status();
    let mut capabilities = Vec::new();
    if status.agent_connected {
        capabilities.push("agent".to_owned());
    }
    let source = status.table_source().as_str_name();
    if let Some(source) = source
        .strip_prefix("TABLE_SOURCE_")
        .filter(|name| *name != "UNSPECIFIED")
    {
        capabilities.push(source.to_lowercase());
    }
    Some(GuestRecord {
        registered: status.registration() == v1::RegistrationState::Registered,
        incarnation: status.incarnation,
        boot: status.boot,
        kernel_release: status.kernel_release,
        kernel_build_id: status.kernel_build_id,
        capabilities,
        revision: answer.revision,
    })
}

/// Checks the host's name, and opens the registry's store.
///
/// # Errors
/// [`RegisterError`] for an invalid name or address, or certificates that cannot be used.
pub fn open(config: &RegistryConfig) -> Result<Arc<dyn Store>, RegisterError> {
    patchbay_store::registry::check_name(&config.name)?;
    let tls = config.etcd_tls.as_ref();
    let store = EtcdStore::new(&config.etcd, &config.root, tls)?;
    Ok(Arc::new(store))
}
