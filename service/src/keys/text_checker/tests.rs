// SPDX-License-Identifier: Apache-2.0

use std::sync::Arc;
use std::time::{Duration, Instant};

use patchbay_kernel_image::live::{LeftOut, Way};
use static_keys::{FoundImage, Op, Range};

use super::*;
use crate::keys::registry::{Contents, DiscoveredKernel};
use crate::keys::{KeyUpdate, Keys, KeysConfig, Registry, UpdateRequest};
use crate::testing::found;
use patchbay_guest::testing::{InMemoryGuest, TestKey};

struct Served {
    guest: Arc<InMemoryGuest>,
    registry: Arc<Registry>,
    keys: Keys,
}

impl Served {
    fn start(allow_text_checker: bool) -> Self {
        let registry = Arc::new(Registry::default());
        let guest = InMemoryGuest::boot(Arc::clone(&registry), &[TestKey::new("alpha", 2)]);
        let config = KeysConfig {
            allow_text_checker,
            ..KeysConfig::default()
        };
        let keys = Keys::start(Arc::clone(&guest), Arc::clone(&registry), config);
        let (keys, _) = keys.expect("a thread");
        Self {
            guest,
            registry,
            keys,
        }
    }

    async fn change(&self, op: Op) -> Result<(), KeysError> {
        let second = Duration::from_secs(1);
        let updates = vec![KeyUpdate::new("alpha", op)];
        let request =
            UpdateRequest::new(updates, "test".to_owned(), second, Instant::now() + second);
        self.keys.update(request).await.map(|_| ())
    }

    async fn refused(&self, module: &str) {
        let error = self.change(Op::Enable).await.expect_err("it is checked");
        let text = error.to_string();
        assert_eq!(error.reason(), "TEXT_CHECKED", "{text}");
        assert!(text.contains(&format!("module {module} ")), "{text}");
        assert!(text.contains("--allow-text-checker"), "{text}");
        assert_eq!(
            (self.guest.count("alpha"), self.guest.jumps("alpha")),
            (0, false)
        );
        assert!(error.is_of_every_key());
        assert!(
            matches!(&error, KeysError::KeyRefused { key, .. } if *key == "alpha".into()),
            "{error:?}"
        );
    }
}

#[tokio::test]
async fn no_site_changes_while_a_checker_is_registered() {
    let served = Served::start(false);
    served.change(Op::Inc).await.expect("nobody looks");
    assert_eq!(
        served.guest.add_module("lkrg", &[TestKey::new("own", 1)]),
        0
    );
    // A change of counts alone writes data and no text.
    served.change(Op::Inc).await.expect("no site changes");
    served.change(Op::Dec).await.expect("no site changes");
    let error = served.change(Op::Dec).await.expect_err("it is checked");
    assert_eq!(error.reason(), "TEXT_CHECKED");
    assert_eq!(served.guest.delete_module("lkrg"), 0);
    served.change(Op::Dec).await.expect("nobody looks");
    assert!(!served.guest.jumps("alpha"));
}

/// A checker whose tables were refused is still loaded.
#[tokio::test]
async fn a_refused_checker_counts() {
    let served = Served::start(false);
    let unknown_class = TestKey {
        class: 99,
        ..TestKey::new("own", 1)
    };
    assert_ne!(served.guest.add_module("p_lkrg", &[unknown_class]), 0);
    served.refused("p_lkrg").await;
}

#[tokio::test]
async fn a_discovered_checker_counts() {
    for (name, refused) in [("p_lkrg", true), ("lkrg", true), ("lkrg_friend", false)] {
        let served = Served::start(false);
        let mut tables = found(&served.guest);
        tables.generation += 1;
        let Contents::Found(kernel) = &mut tables.contents else {
            panic!("just made")
        };
        let nothing = Range { start: 0, end: 0 };
        kernel.images.push(FoundImage {
            id: 0xffff_ffff_c001_0000,
            name: name.to_owned(),
            text: nothing,
            ro_after_init: nothing,
            jump_table: nothing,
            entries: Vec::new(),
            keys: Vec::new(),
        });
        served.registry.register_kernel(tables).expect("taken");
        if refused {
            served.refused(name).await;
        } else {
            let error = served.change(Op::Enable).await;
            // The module has no state in the memory of the test.
            assert!(!format!("{error:?}").contains("TextChecked"), "{error:?}");
        }
    }
}

/// The checker's init function still runs, or has ended in an oops.
#[tokio::test]
async fn a_checker_that_is_not_live_counts() {
    for (name, refused) in [("lkrg", true), ("stuck", false)] {
        let served = Served::start(false);
        let mut tables = found(&served.guest);
        // The kernel no longer registers itself.
        assert_eq!(served.guest.unregister(), 0);
        (tables.boot, tables.generation) = (tables.boot ^ 1, tables.generation + 1);
        tables.release += "-other";
        tables.discovery = Some(DiscoveredKernel {
            resets: 0,
            way: Way::Image,
            time: Duration::ZERO,
            file: None,
            gates: Vec::new(),
            missing_gates: Vec::new(),
            torn: std::collections::HashSet::new(),
            left_out: vec![LeftOut {
                address: 0xffff_ffff_c001_0000,
                name: name.to_owned(),
                state: "COMING",
                word: 1,
            }],
            functions: Arc::default(),
        });
        served.registry.register_kernel(tables).expect("taken");
        if refused {
            served.refused(name).await;
        } else {
            served.change(Op::Enable).await.expect("nobody looks");
        }
    }
}

#[tokio::test]
async fn an_option_permits_it() {
    let served = Served::start(true);
    assert_eq!(
        served.guest.add_module("lkrg", &[TestKey::new("own", 1)]),
        0
    );
    served.change(Op::Enable).await.expect("permitted");
    assert!(served.guest.jumps("alpha"));
}
