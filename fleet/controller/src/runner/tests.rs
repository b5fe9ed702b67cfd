// SPDX-License-Identifier: Apache-2.0
//! Tests the times that a runner reports and waits.

use super::*;
use crate::rollout::{Header, Wave};

const HOUR: Millis = 3_600_000;

#[test]
fn the_time_of_claims_begins_with_the_answer() {
    let header = Header {
        waves: vec![Wave {
            count: 1,
            ..Wave::default()
        }],
        digest: "digest".to_owned(),
        members: 1,
        ..Header::default()
    };
    let mut rollout = Rollout::new(header, vec![Member::new("host-0", "web-0")]);
    rollout.start("alice", "digest", now()).expect("planned");
    rollout.step(now());
    let text =
        "selector: {guests: [\"*\"]}\nclaims: [{want: on, keys: [alpha]}]\nwaves: [{size: rest}]";
    let spec = Spec::parse(text).expect("a spec");
    let running = Running {
        asks: Arc::new(Asks::new(rollout.header(), &spec)),
        spec,
        rollout: Mutex::new(rollout),
        commands: mpsc::channel(1).0,
        version: watch::Sender::new(0),
        saved_entries: AtomicU64::new(0),
        task: OnceLock::new(),
    };
    let outcome = Outcome::Claim(Answered {
        member: 0,
        generation: 1,
        outcome: ClaimOutcome::Made {
            boot: "boot-1".to_owned(),
            ledger: String::new(),
            pause_us: 1,
            ttl: Some(2 * HOUR),
        },
        moved: None,
    });
    // The store was not reached for an hour.
    let answered = Instant::now() - Duration::from_millis(HOUR);
    running.report(Ok((answered, outcome)));
    let expires = running.rollout().members()[0].expires;
    let latest = now() + HOUR;
    assert!(
        expires.is_some_and(|at| at <= latest),
        "{expires:?}, and not after {latest}"
    );
}

#[test]
fn no_wait_is_longer_than_a_minute() {
    for (at, expected) in [(0, 0), (1000, 0), (1500, 500), (u64::MAX, 60_000)] {
        assert_eq!(wait(at, 1000), expected, "{at}");
    }
}
