// SPDX-License-Identifier: Apache-2.0
//! Runs the real service on a real unix socket, with a guest that has memory but no vCPUs.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use patchbay_guest::discovery::Discoverable;
use patchbay_guest::testing::{InMemoryGuest, TestKey};
use patchbay_proto::v1::guest_service_client::GuestServiceClient;
use patchbay_proto::v1::static_keys_service_client::StaticKeysServiceClient;
use patchbay_proto::{client, v1};
use patchbay_service::api::{ApiSocket, Endpoint as ApiEndpoint, Guests, ServedGuest};
use patchbay_service::keys::audit::AuditLog;
use patchbay_service::keys::{Keys, KeysConfig, Limits, Registry};
use patchbay_service::testing::ManualClock;
use patchbay_service::trace::Tracing;
use patchbay_vmm::guest::FilteredThreads;
use patchbay_vmm::seccomp::{self, SeccompLevel};
use tokio::sync::oneshot;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};
use tonic_types::StatusExt;

/// Timeout of the tests' waits. No correct run reaches it.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A served guest. The service ends on drop.
pub struct Served {
    pub guest: Arc<InMemoryGuest>,
    pub clock: Arc<ManualClock>,
    pub keys: Keys,
    channel: Channel,
    folder: PathBuf,
    own_folder: Option<tempfile::TempDir>,
    _end: oneshot::Sender<()>,
}

/// The configuration of the service.
#[derive(Default)]
pub struct Setup {
    /// The keys of the kernel. Without any, the guest does not register.
    pub keys: Option<Vec<TestKey>>,
    /// The limits of the history.
    pub limits: Limits,
    /// The path of the audit log; `None` for the default path in the folder.
    pub audit: Option<PathBuf>,
    /// Guarded keys may be changed.
    pub allow_guarded: bool,
    /// The folder of the socket and the audit log, if it must outlive the service.
    pub folder: Option<PathBuf>,
    /// The source of a discovery.
    pub discovers: Option<Arc<dyn Discoverable>>,
}

/// Returns keys of every kind.
pub fn every_kind() -> Vec<TestKey> {
    vec![
        TestKey::new("alpha", 1),
        TestKey::new("beta", 3),
        TestKey::new("siteless", 0),
        TestKey {
            initially_true: true,
            count: 1,
            ..TestKey::new("likely", 2)
        },
        TestKey {
            sealed: true,
            ..TestKey::new("sealed", 1)
        },
        TestKey::guarded("guarded"),
        TestKey::tracepoint("sched_switch", true),
        TestKey::tracepoint("sched_waking", false),
    ]
}

impl Served {
    /// Serves a guest with the keys of [`every_kind`].
    pub async fn start() -> Self {
        Self::with(Setup {
            keys: Some(every_kind()),
            ..Setup::default()
        })
        .await
    }

    pub async fn with(setup: Setup) -> Self {
        // The executor's thread runs under its seccomp filter, as in the monitor.
        seccomp::enforce(SeccompLevel::On);
        let (folder, own_folder) = match setup.folder {
            Some(folder) => (folder, None),
            None => {
                let folder = tempfile::tempdir().expect("temporary folder");
                (folder.path().to_owned(), Some(folder))
            }
        };
        let registry = Arc::new(Registry::new(setup.limits));
        if let Some(guest) = setup.discovers {
            registry.discover(guest, None);
        }
        let guest = match &setup.keys {
            Some(keys) => InMemoryGuest::boot(Arc::clone(&registry), keys),
            None => InMemoryGuest::new(Arc::clone(&registry)),
        };
        let clock = ManualClock::new();
        let audit = setup.audit.unwrap_or_else(|| folder.join("audit.jsonl"));
        let config = KeysConfig {
            audit: AuditLog::open(&audit).expect("the audit log opens"),
            allow_guarded: setup.allow_guarded,
            clock: Arc::<ManualClock>::clone(&clock),
            threads: Arc::new(FilteredThreads),
            ..KeysConfig::default()
        };
        let (keys, _owner) = Keys::start(Arc::clone(&guest), registry, config).expect("a thread");
        let path = folder.join("guest.sock");
        let socket = ApiSocket::bind(&path).expect("the socket is free");
        let (end, ended) = oneshot::channel::<()>();
        let guests = Guests::default();
        let served = ServedGuest::start(keys.clone(), Tracing::default());
        let added = guests.add(served.expect("no agent's socket"));
        added.expect("the only one");
        tokio::spawn(async move {
            let shutdown = async {
                let _ = ended.await;
            };
            ApiEndpoint::new(socket, guests)
                .serve(shutdown)
                .await
                .expect("the service ends cleanly");
        });
        let channel = connect(&path).await;
        Self {
            guest,
            clock,
            keys,
            channel,
            folder,
            own_folder,
            _end: end,
        }
    }

    /// Ends the service as the end of the monitor does. Dropping the returned value removes the
    /// folder.
    pub fn end(self) -> Option<tempfile::TempDir> {
        self.own_folder
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.join("guest.sock")
    }

    pub fn channel(&self) -> Channel {
        self.channel.clone()
    }

    pub fn client(&self) -> StaticKeysServiceClient<Channel> {
        StaticKeysServiceClient::new(self.channel())
    }

    pub fn guest_client(&self) -> GuestServiceClient<Channel> {
        GuestServiceClient::new(self.channel())
    }

    /// Returns the lines of the audit log.
    pub fn audit(&self) -> Vec<serde_json::Value> {
        audit_lines(&self.folder)
    }

    pub async fn list(
        &self,
        request: v1::ListStaticKeysRequest,
    ) -> Result<v1::ListStaticKeysResponse, Status> {
        Ok(self.client().list_static_keys(request).await?.into_inner())
    }

    pub async fn get(&self, name: &str) -> Result<v1::StaticKey, Status> {
        let request = v1::GetStaticKeyRequest {
            name: name.to_owned(),
            ..Default::default()
        };
        Ok(self
            .client()
            .get_static_key(request)
            .await?
            .into_inner()
            .key
            .expect("a key"))
    }

    pub async fn update(
        &self,
        request: v1::UpdateStaticKeysRequest,
    ) -> Result<v1::UpdateStaticKeysResponse, Status> {
        Ok(self
            .client()
            .update_static_keys(request)
            .await?
            .into_inner())
    }

    /// Applies one op to one key.
    pub async fn op(
        &self,
        name: &str,
        op: v1::KeyOp,
    ) -> Result<v1::UpdateStaticKeysResponse, Status> {
        self.update(request(&[(name, op)])).await
    }

    pub async fn holds(&self) -> Vec<v1::Hold> {
        let request = v1::ListHoldsRequest::default();
        self.client()
            .list_holds(request)
            .await
            .expect("registered")
            .into_inner()
            .holds
    }
}

/// Returns the lines of the audit log in this folder.
pub fn audit_lines(folder: &Path) -> Vec<serde_json::Value> {
    std::fs::read_to_string(folder.join("audit.jsonl"))
        .expect("the audit log")
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect()
}

pub async fn connect(path: &Path) -> Channel {
    open(client::endpoint(), path).await
}

/// Connects with small buffers, which fill quickly when a client does not read.
pub async fn connect_with_small_windows(path: &Path) -> Channel {
    const WINDOW: u32 = 65_535;
    let endpoint = client::endpoint()
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW);
    open(endpoint, path).await
}

async fn open(endpoint: Endpoint, path: &Path) -> Channel {
    endpoint
        .connect_with_connector(client::unix_socket(path))
        .await
        .expect("the service listens")
}

/// Returns an update of these keys.
pub fn request(updates: &[(&str, v1::KeyOp)]) -> v1::UpdateStaticKeysRequest {
    v1::UpdateStaticKeysRequest {
        updates: updates
            .iter()
            .map(|(name, op)| v1::KeyUpdate {
                name: (*name).to_owned(),
                op: (*op).into(),
                ..Default::default()
            })
            .collect(),
        ..Default::default()
    }
}

/// Asserts the code and the reason of an error, and that its message is a sentence. Returns the
/// message and the metadata.
#[track_caller]
pub fn assert_refused<T: std::fmt::Debug>(
    result: Result<T, Status>,
    code: Code,
    reason: &str,
) -> (String, HashMap<String, String>) {
    let status = result.expect_err(reason);
    assert_eq!(status.code(), code, "{status:?}");
    let info = status
        .get_details_error_info()
        .expect("google.rpc.ErrorInfo");
    assert_eq!(
        (info.reason.as_str(), info.domain.as_str()),
        (reason, "patchbay"),
        "{status:?}"
    );
    let known = v1::ErrorReason::from_str_name(&format!("ERROR_REASON_{reason}"));
    assert!(known.is_some(), "{reason} is missing in errors.proto");
    assert!(status.message().len() > 20, "a sentence: {status:?}");
    (status.message().to_owned(), info.metadata)
}
