// SPDX-License-Identifier: Apache-2.0
//! Tests for which person the rollout changes a guest.

use super::*;

fn persons(rollout: &Rollout) -> Vec<&str> {
    (0..rollout.members().len())
        .map(|member| rollout.person(member))
        .collect()
}

#[test]
fn a_call_is_made_for_whoever_decided_what_is_wanted_of_the_guest() {
    let mut rollout = planned(&[1, 1, 1], Policy::default());
    assert_eq!(persons(&rollout), [""; 3]);
    rollout.approve("zoe", "digest", 0).expect("planned");
    rollout.start("alice", "digest", 0).expect("planned");
    assert_eq!(persons(&rollout), ["alice"; 3]);
    claimed_wave(&mut rollout, 0);
    rollout.promote("bob", 0).expect("settled");
    assert_eq!(persons(&rollout), ["alice", "bob", "alice"]);
    claimed_wave(&mut rollout, 1);
    // A pause does not change what is wanted. The person who resumes decides about later waves.
    rollout.pause("zoe", 0).expect("it runs");
    assert_eq!(persons(&rollout), ["alice", "bob", "alice"]);
    rollout.resume("carol", 0).expect("it is paused");
    assert_eq!(persons(&rollout), ["alice", "carol", "carol"]);
    let added = |index| vec![member(index)];
    rollout
        .extend(one_wave, added(3), "dave", 0)
        .expect("it runs");
    rollout.extend(one_wave, added(4), "", 0).expect("it runs");
    assert_eq!(
        persons(&rollout),
        ["alice", "carol", "carol", "dave", "alice"]
    );
    let mut by_itself = rollout.clone();
    by_itself.revert(End::Aborted, "", 0, "a gate is closed");
    assert_eq!(persons(&by_itself), persons(&rollout));
    rollout.abort("eve", 0);
    assert_eq!(persons(&rollout), ["eve"; 5]);
    // A later undo has no effect on the person.
    rollout.undo("zoe", 0);
    assert_eq!(persons(&rollout), ["eve"; 5]);
}

/// Claims the only guest of this wave.
fn claimed_wave(rollout: &mut Rollout, member: usize) {
    assert_eq!(claims(&rollout.step(0)), [member]);
    claimed(rollout, member, made(1), 0);
    rollout.step(0);
}

#[test]
fn records_of_earlier_builds_name_the_starter_in_the_timeline() {
    let started = started(&[2], Policy::default());
    let header = Header {
        started_by: String::new(),
        ..started.header().clone()
    };
    let members = started.members().to_vec();
    let rollout = Rollout::stored(header, members, std::collections::BTreeSet::new());
    assert_eq!(persons(&rollout.expect("it runs")), ["alice"; 2]);
}
