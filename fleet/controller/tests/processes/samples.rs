// SPDX-License-Identifier: Apache-2.0
//! Makes rollouts for tests and measurements of their records.

use std::sync::Arc;

use patchbay_fleet::rollout::{Claim, Header, KeySet, Member, Plan, Rollout, Want, Wave};

/// Returns a planned rollout with one wave. `kernels` is the number of different sets of keys.
pub fn rollout(name: &str, guests: usize, kernels: usize, keys: usize) -> Rollout {
    let claim = |key| Claim {
        key: format!("a_static_key_with_a_name_of_usual_length_{key:05}"),
        want: Want::On,
    };
    let of = |kernel| kernel * keys..(kernel + 1) * keys;
    let set = |kernel| KeySet::new(of(kernel).map(claim).collect(), vec![]);
    let sets: Vec<Arc<KeySet>> = (0..kernels).map(|kernel| Arc::new(set(kernel))).collect();
    let member = |index: usize| Member {
        plan: Plan {
            set: Arc::clone(&sets[index % kernels]),
            ..Plan::default()
        },
        ..Member::new(&format!("host-{}", index / 100), &format!("guest-{index}"))
    };
    let header = Header {
        name: name.to_owned(),
        digest: "digest".to_owned(),
        waves: vec![Wave {
            name: "1".to_owned(),
            count: guests,
            bake_ms: 0,
            ..Wave::default()
        }],
        members: guests,
        ..Header::default()
    };
    Rollout::new(header, (0..guests).map(member).collect())
}
