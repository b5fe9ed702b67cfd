// SPDX-License-Identifier: Apache-2.0

use super::*;

const KEY: KeyInstance = KeyInstance {
    epoch: 1,
    id: KeyId(0x1000),
};

fn taking(holder: &str, expires: Option<Instant>) -> Taking {
    Taking {
        holder: holder.into(),
        reason: "".into(),
        since: SystemTime::UNIX_EPOCH,
        expires: expires.map(|at| (at, SystemTime::UNIX_EPOCH)),
        fired: false,
    }
}

fn hold(holder: &str, expires: Option<Instant>) -> Hold {
    Hold::new(0, 1, taking(holder, expires))
}

fn of<'a>(holder: &'a str) -> impl Fn(&Hold) -> bool + 'a {
    move |hold| *hold.holder == *holder
}

fn counted(count: i32) -> KeyState {
    KeyState {
        count,
        tracepoint: false,
        probes: None,
    }
}

fn with(holds: KeyHolds) -> Holds {
    let mut all = Holds::default();
    all.put(KEY, holds);
    all
}

#[test]
fn equal_holds_are_joined() {
    let mut holds = KeyHolds::default();
    holds.take(&hold("a", None));
    holds.take(&hold("a", None));
    holds.take(&hold("b", None));
    assert_eq!(holds.as_slice().len(), 2);
    assert_eq!(holds.as_slice()[0].references, 2);
    assert_eq!(with(holds).references(KEY), 3);
}

#[test]
fn numbers_stay_and_are_never_used_twice() {
    let mut holds = KeyHolds::default();
    holds.take(&hold("a", None));
    holds.take(&hold("b", None));
    let mut all = with(holds);
    let mut holds = all.copy(KEY);
    assert!(holds.drop_one(of("a")));
    holds.take(&hold("c", None));
    all.put(KEY, holds);
    let numbers: Vec<u64> = all.of(KEY).iter().map(|hold| hold.number).collect();
    assert_eq!(numbers, [2, 3]);
    assert_eq!(all.copy(KEY).number_of(&hold("c", None)), Some(3));
    assert_eq!(all.find(&HashSet::from([1, 3])), HashMap::from([(3, KEY)]));
}

#[test]
fn a_drop_takes_what_expires_first_and_only_the_holders() {
    let now = Instant::now();
    let mut holds = KeyHolds::default();
    holds.take(&hold("a", None));
    holds.take(&hold("a", Some(now + Duration::from_secs(9))));
    holds.take(&hold("b", Some(now)));
    assert!(holds.drop_one(of("a")));
    assert_eq!(with(holds.clone()).next_due(), Some(now));
    let mut left = holds.as_slice().iter();
    assert!(left.any(|hold| *hold.holder == *"a" && hold.expires.is_none()));
    assert!(holds.drop_one(of("a")));
    assert!(!holds.drop_one(of("a")));
    assert!(holds.drop_one(|_| true));
    // A key without holds is not kept.
    assert!(with(holds).by_key.is_empty());
}

#[test]
fn of_holds_that_expire_together_a_drop_takes_the_newest() {
    for expires in [None, Some(Instant::now())] {
        let mut holds = KeyHolds::default();
        for holder in ["a", "b", "c"] {
            holds.take(&hold(holder, expires));
        }
        assert!(holds.drop_one(|_| true));
        let left = holds.as_slice().iter().map(|hold| &*hold.holder);
        assert_eq!(left.collect::<Vec<_>>(), ["a", "b"]);
    }
}

#[test]
fn what_cannot_be_released_is_tried_less_and_less_often() {
    let start = Instant::now();
    let later = start + Duration::from_secs(1000);
    let mut holds = KeyHolds::default();
    holds.take(&hold("a", Some(start)));
    holds.take(&hold("a", Some(later)));
    let mut holds = with(holds);
    assert_eq!(holds.due(start), [KEY]);
    let expired =
        |holds: &mut Holds, now| holds.follow_guest(KEY, &counted(2), |hold| hold.has_expired(now));
    assert_eq!(expired(&mut holds, start), 1);
    assert_eq!(expired(&mut holds, later), 2);

    let mut now = start;
    for (time, wait) in [1, 2, 4, 8, 16, 32, 64, 64, 64].into_iter().enumerate() {
        assert_eq!(holds.put_off(KEY, now), time == 0, "the first is logged");
        assert!(holds.due(now).is_empty());
        now += Duration::from_secs(wait);
        assert_eq!(holds.next_due(), Some(now));
    }
    // A change resets the retry.
    holds.put(KEY, holds.copy(KEY));
    assert_eq!(holds.next_due(), Some(start));
}

#[test]
fn the_guest_voids_what_it_has_dropped() {
    let mut holds = KeyHolds::default();
    holds.take(&hold("a", None));
    holds.take(&hold("b", None));
    holds.follow_guest(&counted(1));
    assert_eq!(holds.references(), 1);
    let mut holds = with(holds);
    assert_eq!(holds.follow_guest(KEY, &counted(-1), |_| true), 0);
    assert!(holds.by_key.is_empty());
}

#[test]
fn a_renewed_hold_joins_the_older_one_that_differs_in_nothing_else() {
    let at = Instant::now();
    let mut holds = KeyHolds::default();
    for expires in [None, Some(at), Some(at + Duration::from_secs(1))] {
        holds.take(&hold("a", expires));
    }
    holds.take(&hold("b", None));
    let mut holds = with(holds).copy(KEY);
    let expires = Some((at + Duration::from_secs(1), SystemTime::UNIX_EPOCH));
    assert_eq!(holds.renew(&HashSet::from([2]), expires), [(3, 2)]);
    assert_eq!(holds.renew(&HashSet::from([2]), None), [(2, 1)]);
    let left: Vec<_> = holds.as_slice().iter().collect();
    assert_eq!((left.len(), left[0].references), (2, 3));
    assert_eq!((left[1].number, left[1].references), (4, 1), "another's");
}

/// Both holders fire the tracepoint, so their holds share its only reference.
#[test]
fn a_tracepoint_is_turned_off_with_the_last_hold() {
    let fired = |holder: &str| {
        let taking = Taking {
            fired: true,
            ..taking(holder, None)
        };
        Hold::new(0, 1, taking)
    };
    let mut holds = KeyHolds::default();
    holds.fire(&fired("a"), None);
    holds.fire(&fired("a"), None);
    holds.fire(&fired("b"), None);
    holds.follow_guest(&KeyState {
        tracepoint: true,
        ..counted(1)
    });
    assert_eq!(holds.as_slice().len(), 2);
    assert!(!holds.end(None, of("c")));
    assert!(!holds.end(None, of("a")));
    assert!(holds.end(None, of("b")));
}

#[test]
fn the_next_expiry_is_found_however_holds_come_and_go() {
    let start = Instant::now();
    let mut random = fastrand::Rng::with_seed(1);
    let mut all = Holds::default();
    let mut found = [0; 2];
    for _ in 0..2000 {
        let key = KeyInstance {
            epoch: random.u64(1..3),
            id: KeyId(random.u64(..4)),
        };
        match random.u8(..8) {
            0 => {
                all.retain(|of| of.epoch != key.epoch);
            }
            1 => all.forget(key),
            2 => {
                all.follow_guest(key, &counted(random.i32(0..3)), |_| true);
            }
            3 => {
                all.put_off(key, start);
            }
            _ => {
                let mut holds = all.copy(key);
                if random.bool() {
                    holds.drop_one(|_| true);
                } else {
                    let expires = start + Duration::from_secs(random.u64(1..9));
                    holds.take(&hold("a", random.bool().then_some(expires)));
                }
                all.put(key, holds);
            }
        }
        let due = all.iter().filter_map(|(_, holds)| holds.due()).min();
        assert_eq!(all.next_due(), due);
        let expiring = all.iter().filter(|(_, holds)| holds.expire());
        assert_eq!(all.expiring, expiring.count());
        found[usize::from(due.is_some())] += 1;
    }
    assert!(found.iter().all(|times| *times > 100), "{found:?}");
}
