// SPDX-License-Identifier: Apache-2.0

use std::sync::Arc;
use std::time::Duration;

use static_keys::{KeyId, Patterns};

use super::*;
use crate::keys::audit::AuditLog;
use crate::keys::registry::{Contents, DiscoveredKernel};
use crate::keys::{Keys, KeysConfig, ListQuery, Registry, TornKey, UpdateRequest};
use crate::testing::found;
use patchbay_guest::testing::{Gate, InMemoryGuest, TestKey};

struct Served {
    guest: Arc<InMemoryGuest>,
    keys: Keys,
    folder: tempfile::TempDir,
}

impl Served {
    /// Starts a guest that registers, or whose kernel is discovered with these keys torn.
    fn start(torn: &[&str], tear: impl FnOnce(&InMemoryGuest)) -> Self {
        let registry = Arc::new(Registry::default());
        let listed = [TestKey::new("alpha", 3), TestKey::guarded("beta")];
        let guest = InMemoryGuest::boot(Arc::clone(&registry), &listed);
        tear(&guest);
        if !torn.is_empty() {
            let mut tables = found(&guest);
            tables.generation += 1;
            let Contents::Found(kernel) = &tables.contents else {
                panic!("just made")
            };
            let keys = kernel.images.iter().flat_map(|image| &image.keys);
            let keys = keys.filter(|key| torn.contains(&&*key.name));
            tables.discovery = Some(DiscoveredKernel {
                resets: 0,
                way: patchbay_kernel_image::live::Way::Image,
                time: Duration::ZERO,
                file: None,
                gates: Vec::new(),
                missing_gates: Vec::new(),
                left_out: Vec::new(),
                torn: keys.map(|key| KeyId(key.address)).collect(),
                functions: Arc::default(),
            });
            assert_eq!(guest.unregister(), 0);
            tables.boot ^= 1;
            tables.release += "-other";
            registry.register_kernel(tables).expect("taken");
        }
        let folder = tempfile::tempdir().expect("temporary folder");
        let config = KeysConfig {
            audit: AuditLog::open(&folder.path().join("audit")).expect("writable"),
            ..KeysConfig::default()
        };
        let (keys, _) = Keys::start(Arc::clone(&guest), registry, config).expect("a thread");
        Self {
            guest,
            keys,
            folder,
        }
    }

    async fn repair(&self, name: &str, validate_only: bool) -> Result<RepairOutcome, KeysError> {
        let request = RepairRequest {
            name: name.to_owned(),
            caller: "uid:0".into(),
            reason: "killed twice".to_owned(),
            validate_only,
            stop_timeout: Duration::from_secs(1),
            deadline: Instant::now() + Duration::from_millis(200),
        };
        self.keys.repair(request).await
    }

    async fn enable(&self, name: &str) -> Result<(), KeysError> {
        let second = Duration::from_secs(1);
        let updates = vec![KeyUpdate::new(name, Op::Enable)];
        let request =
            UpdateRequest::new(updates, "test".to_owned(), second, Instant::now() + second);
        self.keys.update(request).await.map(|_| ())
    }

    fn torn(&self) -> Vec<TornKey> {
        let all = Patterns::parse(&[]).expect("all keys");
        let found = self.keys.verify(&all).expect("registered");
        assert_eq!(found.torn_total, found.torn.len());
        assert_eq!((found.keys, found.sites), (2, 4));
        found.torn
    }

    fn quarantined(&self) -> Vec<String> {
        let query = ListQuery {
            page_size: 10,
            ..ListQuery::default()
        };
        let keys = self.keys.list(&query).expect("registered").keys;
        let keys = keys.into_iter().filter(|key| key.quarantine.is_some());
        keys.map(|key| key.name.to_string()).collect()
    }
}

/// Tears two sites: the first jumps although the key is off, and the second is half a JMP.
fn tear(guest: &InMemoryGuest) {
    let sites = guest.sites("alpha");
    guest.set_count("alpha", 1);
    let jump: [u8; 5] = guest.read(sites[0]);
    guest.set_count("alpha", 0);
    guest.write(sites[0], &jump);
    guest.write(sites[1], &jump[..2]);
}

#[tokio::test]
async fn a_torn_key_of_a_discovered_kernel_is_named_blocked_and_repaired() {
    let served = Served::start(&["alpha"], tear);
    let expected = TornKey {
        name: "alpha".into(),
        count: 0,
        contrary: 1,
        foreign: 1,
    };
    assert_eq!(served.torn(), [expected]);
    assert_eq!(served.quarantined(), ["alpha"]);
    let error = served.enable("alpha").await.expect_err("it is torn");
    assert_eq!(error.reason(), "KEY_QUARANTINED");
    assert!(error.to_string().contains("keys repair"), "{error}");
    // The guest may be changing the key.
    served.guest.set_gate(Gate::TextMutex, 0x1000);
    let error = served.enable("alpha").await.expect_err("it is busy");
    assert_eq!(error.reason(), "GUEST_BUSY", "{error}");
    served.guest.set_gate(Gate::TextMutex, 0);

    let dry = served.repair("alpha", true).await.expect("possible");
    assert_eq!((dry.count, dry.sites.len(), dry.report), (0, 2, None));
    assert_eq!(served.torn().len(), 1, "nothing was written");
    let made = served.repair("alpha", false).await.expect("gates are open");
    assert_eq!(made.sites, dry.sites);
    assert_eq!(made.report.expect("a pause").sites_patched, 2);
    assert!(!served.guest.jumps("alpha"));
    assert!(served.torn().is_empty() && served.quarantined().is_empty());
    let again = served.repair("alpha", false).await.expect("whole");
    assert!(again.sites.is_empty() && again.report.is_none());
    served.enable("alpha").await.expect("as good as before");
    assert!(served.guest.jumps("alpha"));

    let audit = std::fs::read_to_string(served.folder.path().join("audit")).expect("written");
    let repairs = audit.lines().filter(|line| line.contains("\"repair\""));
    assert_eq!(repairs.count(), 1, "{audit}");
    assert!(audit.contains("killed twice"), "{audit}");
}

/// A key that was torn only while the guest changed it is not blocked after the discovery.
#[tokio::test]
async fn a_key_that_is_whole_again_is_not_blocked() {
    let served = Served::start(&["alpha"], |_| {});
    assert!(served.torn().is_empty() && served.quarantined().is_empty());
    served.enable("alpha").await.expect("whole");
}

#[tokio::test]
async fn a_quarantine_after_foreign_bytes_ends_with_the_repair() {
    let served = Served::start(&[], tear);
    let error = served.enable("alpha").await.expect_err("it is torn");
    assert_eq!(error.reason(), "FOREIGN_BYTES", "{error}");
    assert_eq!(served.quarantined(), ["alpha"]);
    served.repair("alpha", false).await.expect("a mixture");
    assert!(served.quarantined().is_empty());
    served.enable("alpha").await.expect("whole");
}

#[tokio::test]
async fn nothing_is_written_through_a_closed_gate_beside_a_vcpu_or_over_foreign_bytes() {
    let served = Served::start(&[], tear);
    let sites = served.guest.sites("alpha");
    let before: Vec<[u8; 5]> = sites.iter().map(|site| served.guest.read(*site)).collect();
    served.guest.set_gate(Gate::TextMutex, 0x1000);
    let error = served.repair("alpha", false).await.expect_err("at work");
    assert_eq!(error.reason(), "GUEST_BUSY", "{error}");
    served.guest.set_gate(Gate::TextMutex, 0);
    served.guest.set_rips(vec![sites[1] + 1]);
    let error = served.repair("alpha", false).await.expect_err("inside");
    assert!(error.to_string().contains("inside the site"), "{error}");
    served.guest.set_rips(Vec::new());
    let after: Vec<[u8; 5]> = sites.iter().map(|site| served.guest.read(*site)).collect();
    assert_eq!(before, after);
    // The gates cannot tell whether a vCPU is in the middle of half a JMP.
    served.guest.hide_vcpus(true);
    let error = served.repair("alpha", false).await.expect_err("unseen");
    assert_eq!(error.reason(), "VCPUS_UNKNOWN", "{error}");
    served.guest.hide_vcpus(false);
    served.guest.write(sites[2], &[0xcc]);
    for validate_only in [true, false] {
        let error = served.repair("alpha", validate_only).await;
        let error = error.expect_err("somebody else's breakpoint");
        assert_eq!(error.reason(), "FOREIGN_BYTES", "{error}");
    }
    let error = served.repair("gamma", true).await.expect_err("unknown");
    assert_eq!(error.reason(), "KEY_NOT_FOUND", "{error}");
}
