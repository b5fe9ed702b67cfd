// SPDX-License-Identifier: Apache-2.0
//! Claims on the keys of tracepoints. The guest traces "traced" itself. "sched_switch" has a probe
//! and is parked, and "unused" has no probe.

use super::*;
use crate::keys::{ReleaseRequest, TracepointUpdate};
use crate::testing::listed_holds;

impl Rig {
    /// Fires or parks an event as another client.
    async fn switch(&self, name: &str, update: TracepointUpdate) -> Result<(), KeysError> {
        self.switch_for(name, update, None).await
    }

    async fn switch_for(
        &self,
        name: &str,
        update: TracepointUpdate,
        ttl: Option<Duration>,
    ) -> Result<(), KeysError> {
        let op = match update {
            TracepointUpdate::Fire => Op::Enable,
            _ => Op::Disable,
        };
        let update = UpdateRequest {
            tracepoints: Some(update),
            ttl,
            ..super::update("uid:7", name, op)
        };
        self.keys.update(update).await.map(drop)
    }

    /// Disables a key as the client that fires it.
    async fn disable(&self, name: &str) -> Result<(), KeysError> {
        let update = update("uid:7", name, Op::Disable);
        self.keys.update(update).await.map(drop)
    }

    fn holders(&self) -> Vec<String> {
        listed_holds(&self.keys)
            .iter()
            .map(|hold| hold.holder.to_string())
            .collect()
    }

    /// Sets one claim, and returns its verdict and the key's count.
    async fn claim(&self, owner: &str, generation: u64, key: &str, want: Want) -> (Verdict, i32) {
        let verdicts = self.verdicts(owner, generation, &[(key, want)]).await;
        (verdicts[0], self.guest.count(key))
    }

    /// Ends the claims of an owner, and returns the key's count.
    async fn end(&self, owner: &str, generation: u64, key: &str) -> i32 {
        self.set(owner, generation, &[]).await.expect("ended");
        self.guest.count(key)
    }

    /// Ends the claims of "a" and what the client fires, in either order.
    async fn end_both(&self, generation: u64, key: &str, is_claim_first: bool) {
        if is_claim_first {
            assert_eq!(self.end("a", generation, key).await, 1);
        }
        self.switch(key, LEAVE).await.expect("stopped");
        if !is_claim_first {
            self.end("a", generation, key).await;
        }
    }
}

const FIRE: TracepointUpdate = TracepointUpdate::Fire;
const PARK: TracepointUpdate = TracepointUpdate::Park;
const LEAVE: TracepointUpdate = TracepointUpdate::Leave;

#[tokio::test]
async fn an_on_holds_a_tracepoint_that_was_off() {
    let rig = rig();
    let made = rig.claim("a", 1, "sched_switch", Want::On).await;
    assert_eq!(made, (Verdict::Made, 1));
    assert!(rig.guest.jumps("sched_switch"));
    assert_eq!(rig.holders(), ["uid:0 \u{b7} a"]);
    // All claims share one reference.
    let made = rig.claim("b", 1, "sched_switch", Want::On).await;
    assert_eq!(made, (Verdict::Made, 1));
    assert_eq!(rig.end("a", 2, "sched_switch").await, 1);
    assert_eq!(rig.end("b", 2, "sched_switch").await, 0);
    assert!(rig.holders().is_empty() && rig.listed().is_empty());
}

#[tokio::test]
async fn an_on_leaves_a_tracepoint_to_the_guest_that_traces_it() {
    let rig = rig();
    let made = rig.claim("a", 1, "traced", Want::On).await;
    assert_eq!(made, (Verdict::Made, 1));
    assert!(rig.holders().is_empty());
    // The guest attaches another probe.
    rig.guest.set_probes("traced", &[1, 2]);
    assert_eq!(rig.listed(), [("a".to_owned(), Verdict::Made, true)]);
    assert_eq!(rig.end("a", 2, "traced").await, 1);
    assert_eq!(rig.guest.pauses(), 0);
}

#[tokio::test]
async fn a_tracepoint_without_probes_is_refused_alone() {
    let rig = rig();
    let claims = [
        ("alpha", Want::On),
        ("sched_switch", Want::Held),
        ("traced", Want::Off),
        ("unused", Want::On),
    ];
    let outcome = rig.set("a", 1, &claims).await.expect("the others are made");
    let reasons: Vec<_> = outcome.keys.iter().map(|answer| &*answer.reason).collect();
    assert_eq!(
        reasons,
        ["", "TRACEPOINT_REFUSED", "", "TRACEPOINT_REFUSED"]
    );
    let message = &outcome.keys[1].message;
    assert!(message.contains("claim on or off"), "{message}");
    assert_eq!(
        (rig.guest.count("traced"), rig.guest.count("unused")),
        (0, 0)
    );
    assert_eq!(
        rig.claim("a", 2, "unused", Want::Off).await,
        (Verdict::Made, 0)
    );
    assert_eq!(rig.end("a", 3, "unused").await, 0);
}

#[tokio::test]
async fn an_off_parks_without_force_until_it_ends() {
    let rig = rig();
    let mut short = request("a", 1, &[("traced", Want::Off)]);
    short.ttl = Some(Duration::from_secs(60));
    rig.keys.set_claims(short).await.expect("made");
    assert_eq!(
        (rig.guest.count("traced"), rig.guest.jumps("traced")),
        (0, false)
    );
    assert_eq!(
        rig.claim("b", 1, "traced", Want::Off).await,
        (Verdict::Made, 0)
    );
    rig.clock.advance(Duration::from_secs(61));
    rig.keys.tick().await.expect("it runs");
    assert_eq!(rig.guest.count("traced"), 0, "the other claim parks it");
    assert_eq!(rig.end("b", 2, "traced").await, 1);
    assert!(rig.guest.jumps("traced") && rig.listed().is_empty());
    // A further probe that the guest attaches to a parked tracepoint leaves its key off.
    rig.set("b", 3, &[("traced", Want::Off)])
        .await
        .expect("made");
    rig.guest.set_probes("traced", &[1, 2]);
    rig.guest.set_count("traced", 0);
    assert_eq!(rig.listed(), [("b".to_owned(), Verdict::Made, true)]);
    assert_eq!(rig.end("b", 4, "traced").await, 1);
}

#[tokio::test]
async fn a_parked_tracepoint_that_the_guest_has_switched_stays_so() {
    let rig = rig();
    // The guest detaches its only probe, so nothing is left to be switched on.
    rig.set("a", 1, &[("traced", Want::Off)])
        .await
        .expect("made");
    rig.guest.set_probes("traced", &[]);
    assert_eq!(rig.listed(), [("a".to_owned(), Verdict::Made, true)]);
    let outcome = rig.set("a", 2, &[]).await.expect("ended");
    assert_eq!(outcome.keys[0].verdict, Verdict::Made, "{outcome:?}");
    assert_eq!(rig.guest.count("traced"), 0);
    // Nothing is tried again.
    rig.guest.set_probes("traced", &[3]);
    rig.guest.set_count("traced", 0);
    rig.clock.advance(Duration::from_secs(100));
    rig.keys.tick().await.expect("it runs");
    assert_eq!(rig.guest.count("traced"), 0);
    // The guest has detached it and attached another probe.
    rig.guest.set_probes("traced", &[4]);
    rig.set("a", 3, &[("traced", Want::Off)])
        .await
        .expect("made");
    rig.guest.set_probes("traced", &[5]);
    assert_eq!(rig.listed(), [("a".to_owned(), Verdict::Void, false)]);
    assert_eq!(rig.end("a", 4, "traced").await, 1);
}

#[tokio::test]
async fn the_newest_claim_on_a_tracepoint_decides() {
    for (key, before) in [("traced", 1), ("sched_switch", 0)] {
        let rig = rig();
        rig.set("a", 1, &[(key, Want::Off)]).await.expect("made");
        assert_eq!(rig.claim("b", 1, key, Want::On).await, (Verdict::Made, 1));
        assert_eq!(rig.claim("c", 1, key, Want::Off).await, (Verdict::Made, 0));
        let listed = rig.listed();
        let held = ("b".to_owned(), Verdict::HeldByOthers, false);
        assert!(listed.contains(&held), "{listed:?}");
        assert_eq!(rig.end("c", 2, key).await, 1);
        assert_eq!(rig.end("b", 2, key).await, 0);
        assert_eq!(rig.end("a", 2, key).await, before);
        assert!(rig.listed().is_empty() && rig.holders().is_empty());
    }
}

#[tokio::test]
async fn clients_and_claims_keep_a_tracepoint_on_for_each_other() {
    let rig = rig();
    let key = "sched_switch";
    // The claim ends first.
    rig.claim("a", 1, key, Want::On).await;
    rig.switch(key, FIRE).await.expect("fired");
    assert_eq!(rig.end("a", 2, key).await, 1);
    rig.switch(key, PARK).await.expect("parked");
    assert_eq!(rig.guest.count(key), 0);
    // The client stops first.
    for (generation, stop) in [(3, PARK), (5, LEAVE)] {
        rig.switch(key, FIRE).await.expect("fired");
        let made = rig.claim("a", generation, key, Want::On).await;
        assert_eq!((made, rig.holders().len()), ((Verdict::Made, 1), 2));
        rig.switch(key, stop).await.expect("stopped");
        assert_eq!((rig.guest.count(key), rig.holders().len()), (1, 1));
        assert_eq!(rig.end("a", generation + 1, key).await, 0);
    }
    // A client turns the key on by an op. It may undo that, but it cannot end the claim's hold.
    rig.op(key, Op::Enable, false).await.expect("turned on");
    rig.claim("a", 7, key, Want::On).await;
    let error = rig.op(key, Op::Disable, false).await;
    assert_eq!(error.expect_err("claimed").reason(), "NOT_HOLDER");
    assert_eq!(rig.end("a", 8, key).await, 1);
    rig.op(key, Op::Disable, false).await.expect("its own");
    // With force, the client turns the key off, which ends the claim.
    rig.claim("a", 9, key, Want::On).await;
    rig.op(key, Op::Disable, true).await.expect("forced");
    assert_eq!(rig.listed(), [("a".to_owned(), Verdict::Void, false)]);
}

/// The guest traces it, so the claim needs no hold until a client fires and stops.
#[tokio::test]
async fn a_client_that_stops_does_not_turn_off_what_the_guest_traces_and_a_claim_wants() {
    let rig = rig();
    let key = "traced";
    let brief = Some(Duration::from_secs(60));
    rig.claim("a", 1, key, Want::On).await;
    rig.switch(key, PARK).await.expect("left on");
    assert_eq!(rig.guest.count(key), 1);
    for stop in [Some(PARK), Some(LEAVE), None] {
        rig.switch_for(key, FIRE, brief).await.expect("fired");
        assert_eq!(rig.listed(), [("a".to_owned(), Verdict::Made, true)]);
        let disable = rig.disable(key).await;
        let error = disable.expect_err("claimed");
        assert_eq!(error.reason(), "NOT_HOLDER");
        match stop {
            Some(stop) => rig.switch(key, stop).await.expect("stopped"),
            None => rig.clock.advance(Duration::from_secs(61)),
        }
        rig.keys.tick().await.expect("it runs");
        assert!(rig.holders().is_empty(), "{stop:?}");
        assert_eq!(rig.guest.count(key), 1, "{stop:?}");
    }
    // Another owner's claim is made while the client fires, so a claim takes a hold.
    rig.switch(key, FIRE).await.expect("fired");
    rig.claim("b", 1, key, Want::On).await;
    assert_eq!(rig.holders().len(), 2);
    rig.switch(key, LEAVE).await.expect("stopped");
    assert_eq!(rig.end("a", 2, key).await, 1);
    assert_eq!(rig.end("b", 2, key).await, 1, "the guest traces it");
    assert!(rig.holders().is_empty());
    // Without a claim, a client may park it.
    rig.switch(key, PARK).await.expect("parked");
    assert_eq!(rig.guest.count(key), 0);
}

#[tokio::test]
async fn a_client_that_fires_overrides_an_off() {
    let rig = rig();
    for (key, before) in [("traced", 1), ("sched_switch", 0)] {
        // The client fires while it is parked.
        let owner = format!("first {key}");
        assert_eq!(
            rig.claim(&owner, 1, key, Want::Off).await,
            (Verdict::Made, 0)
        );
        rig.switch(key, FIRE).await.expect("fired");
        let overridden = (owner.clone(), Verdict::HeldByOthers, true);
        assert_eq!((rig.guest.count(key), rig.listed()), (1, vec![overridden]));
        rig.switch(key, LEAVE).await.expect("stopped");
        let made = (owner.clone(), Verdict::Made, true);
        assert_eq!((rig.guest.count(key), rig.listed()), (0, vec![made]));
        assert_eq!(rig.end(&owner, 2, key).await, before);
    }
    // The client fires before.
    let key = "sched_switch";
    rig.switch(key, FIRE).await.expect("fired");
    let outcome = rig.set("b", 1, &[(key, Want::Off)]).await.expect("made");
    assert_eq!(outcome.keys[0].verdict, Verdict::HeldByOthers);
    assert!(outcome.keys[0].message.contains("uid:7"), "{outcome:?}");
    rig.switch(key, PARK).await.expect("parked");
    assert_eq!(rig.listed(), [("b".to_owned(), Verdict::Made, true)]);
    assert_eq!(rig.end("b", 2, key).await, 0);
}

/// A client fires an event that the guest traces too. The key is parked when the client stops.
#[tokio::test]
async fn an_off_parks_what_a_client_leaves_to_the_guest() {
    let rig = rig();
    let key = "sched_switch";
    rig.switch(key, FIRE).await.expect("fired");
    rig.guest.set_probes(key, &[1, 2]);
    let made = rig.claim("a", 1, key, Want::Off).await;
    assert_eq!(made, (Verdict::HeldByOthers, 1));
    rig.switch(key, LEAVE).await.expect("stopped");
    assert_eq!((rig.guest.count(key), rig.listed().len()), (0, 1));
    assert_eq!(rig.end("a", 2, key).await, 1, "for the guest");
}

/// A client fires, and the guest traces too. A claim and the client end in either order.
#[tokio::test]
async fn a_claim_that_ends_leaves_to_the_guest_what_a_client_still_fires() {
    for (want, is_claim_first) in [
        (Want::Off, true),
        (Want::Off, false),
        (Want::On, true),
        (Want::On, false),
    ] {
        // The guest attaches a probe while the client fires.
        let (rig, key) = (rig(), "sched_switch");
        rig.switch(key, FIRE).await.expect("fired");
        rig.guest.set_probes(key, &[1, 2]);
        rig.set("a", 1, &[(key, want)]).await.expect("made");
        rig.end_both(2, key, is_claim_first).await;
        assert_eq!(rig.guest.count(key), 1, "{want:?} {is_claim_first}");
        assert!(rig.holders().is_empty() && rig.listed().is_empty());
        // The client fires what the guest traces and a claim wants otherwise.
        let key = "traced";
        rig.set("a", 3, &[(key, want)]).await.expect("made");
        rig.switch(key, FIRE).await.expect("fired");
        rig.end_both(4, key, is_claim_first).await;
        assert_eq!(rig.guest.count(key), 1, "{want:?} {is_claim_first}");
        assert!(rig.holders().is_empty() && rig.listed().is_empty());
    }
}

#[tokio::test]
async fn an_on_is_void_when_an_operator_releases_its_hold_by_force() {
    let rig = rig();
    rig.claim("a", 1, "sched_switch", Want::On).await;
    let release = ReleaseRequest {
        ids: listed_holds(&rig.keys)
            .iter()
            .map(|hold| hold.id.clone())
            .collect(),
        caller: "uid:7".into(),
        force: true,
        request_id: None,
        summary_only: true,
        stop_timeout: Duration::from_secs(1),
        deadline: Instant::now() + Duration::from_secs(10),
    };
    rig.keys.release(release).await.expect("forced");
    assert_eq!(rig.guest.count("sched_switch"), 0);
    assert_eq!(rig.listed(), [("a".to_owned(), Verdict::Void, false)]);
}

#[tokio::test]
async fn an_on_is_void_when_the_probes_have_changed() {
    let rig = rig();
    rig.claim("a", 1, "sched_switch", Want::On).await;
    rig.guest.set_probes("sched_switch", &[1, 2]);
    assert_eq!(rig.listed(), [("a".to_owned(), Verdict::Void, false)]);
    let outcome = rig.set("a", 2, &[]).await.expect("ended");
    assert_eq!(outcome.keys[0].verdict, Verdict::Void);
    assert_eq!(rig.guest.count("sched_switch"), 1, "the guest traces it");
}
