// SPDX-License-Identifier: Apache-2.0
//! Tests that the service's only thread answers other calls during a discovery, which takes longer
//! than any other part of a call.

use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};

use patchbay_guest::discovery::Discoverable;
use patchbay_memory::{Cpu, OutsideMemory, PhysicalMemory};
use patchbay_proto::v1;
use patchbay_service::keys::KeysError;
use patchbay_service::trace::TracepointKeys;
use tokio::sync::Notify;
use tonic::Code;

use super::support::{PATIENCE, Served, Setup};

/// A guest without a kernel, whose discovery first waits until the test continues it.
#[derive(Debug)]
struct Held {
    began: Notify,
    continued: Mutex<Receiver<()>>,
    /// Records that the test continued the discovery in time. A discovery on the service's thread
    /// would keep the test from continuing it.
    in_time: OnceLock<bool>,
}

impl Held {
    fn new() -> (Arc<Self>, Sender<()>) {
        let (continues, continued) = channel();
        let held = Self {
            began: Notify::new(),
            continued: Mutex::new(continued),
            in_time: OnceLock::new(),
        };
        (Arc::new(held), continues)
    }
}

impl PhysicalMemory for Held {
    fn ram(&self) -> Vec<Range<u64>> {
        Vec::new()
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), OutsideMemory> {
        let length = bytes.len();
        Err(OutsideMemory { address, length })
    }
}

impl Discoverable for Held {
    fn memory(&self) -> &dyn PhysicalMemory {
        self
    }

    fn cpus(&self) -> Result<Option<Vec<Cpu>>, String> {
        // One discovery calls this several times.
        self.in_time.get_or_init(|| {
            self.began.notify_one();
            let continued = self.continued.lock().expect("no panic");
            continued.recv_timeout(PATIENCE / 4).is_ok()
        });
        // The list of vCPUs that run a kernel is empty, so calls fail at once and do not wait until
        // their deadline.
        Ok(Some(Vec::new()))
    }

    fn resets(&self) -> u64 {
        0
    }

    fn is_held(&self) -> bool {
        false
    }
}

/// Makes `call`, which starts a discovery, and other calls during the discovery, which must not
/// wait for its end.
async fn is_not_in_the_way<T: Send + 'static>(
    call: impl AsyncFnOnce(&Served) -> Result<T, tonic::Status>,
) {
    let (held, continues) = Held::new();
    let served = Served::with(Setup {
        discovers: Some(held.clone()),
        ..Setup::default()
    })
    .await;
    let meanwhile = async {
        held.began.notified().await;
        let described = served
            .guest_client()
            .describe_guest(v1::DescribeGuestRequest::default())
            .await;
        described.expect("it needs no keys");
        // The service of tracepoints calls these functions without an await, so they must not
        // block.
        for error in [
            served.keys.holders(&[]).map(drop),
            served.keys.held_by("uid:0").map(drop),
        ] {
            let error = error.expect_err("nothing was discovered");
            assert!(matches!(error, KeysError::NotRegistered { .. }), "{error}");
        }
        // The send fails only if the discovery has ended because the calls above waited for it.
        // `in_time` then reports the fault.
        let _ = continues.send(());
    };
    let (called, ()) = tokio::join!(call(&served), meanwhile);
    let refused = called.map(drop).expect_err("there is no kernel");
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused:?}");
    assert_eq!(
        held.in_time.get(),
        Some(&true),
        "the service's thread waited"
    );
}

#[tokio::test]
async fn other_calls_are_answered_while_a_key_is_read() {
    is_not_in_the_way(async |served| served.get("alpha").await).await;
}

#[tokio::test]
async fn other_calls_are_answered_while_keys_are_listed() {
    is_not_in_the_way(async |served| served.list(v1::ListStaticKeysRequest::default()).await).await;
}

#[tokio::test]
async fn other_calls_are_answered_while_lines_are_listed() {
    is_not_in_the_way(async |served| {
        let request = v1::ListDebugSitesRequest::default();
        served.client().list_debug_sites(request).await
    })
    .await;
}

#[tokio::test]
async fn other_calls_are_answered_while_keys_are_changed() {
    is_not_in_the_way(async |served| served.op("alpha", v1::KeyOp::Inc).await).await;
}
