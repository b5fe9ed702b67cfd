// SPDX-License-Identifier: Apache-2.0
//! Tests the follower with guests that change or damage their log.

use super::*;

/// Damages the log in many ways. Each poll must stay within its bounds.
#[test]
fn a_hostile_guest_bounds_nothing_but_itself() {
    type Damage = fn(&mut crate::testing::Writer);
    let damages: [(&str, Damage); 16] = [
        ("prb is NULL", |writer| writer.put(BASE, 0)),
        ("prb is wild", |writer| {
            writer.put(BASE, 0x1234_5678_9abc_def0)
        }),
        ("prb is the last address", |writer| {
            writer.put(BASE, u64::MAX)
        }),
        ("2^63 descriptors", |writer| writer.put(writer.ring(), 63)),
        ("2^26 descriptors", |writer| writer.put(writer.ring(), 26)),
        ("no descriptor", |writer| writer.put(writer.ring(), 0)),
        ("2^64 bytes of text", |writer| {
            writer.put(writer.ring() + 48, 64)
        }),
        ("wild descriptors", |writer| {
            writer.put(writer.ring() + 8, 0xdead_0000)
        }),
        ("wild infos", |writer| {
            writer.put(writer.ring() + 16, u64::MAX - 3)
        }),
        ("wild texts", |writer| {
            writer.put(writer.ring() + 56, 0xffff_ffff_ffff_fff0)
        }),
        ("the head runs backwards", |writer| {
            let head = writer.head();
            writer.put(writer.ring() + 24, head - 3);
        }),
        ("the head is far ahead", |writer| {
            let head = writer.head();
            writer.put(writer.ring() + 24, head + (1 << 40));
        }),
        ("the tail is ahead of the head", |writer| {
            let head = writer.head();
            writer.put(writer.ring() + 32, head + 5);
        }),
        ("each text has 2^63 bytes", |writer| {
            for back in 0..16 {
                let at = writer.descriptor(writer.head() - back);
                writer.put(at + 16, 1 << 63);
            }
        }),
        ("numbers run backwards", |writer| {
            for back in 0..16 {
                let at = writer.info(writer.head() - back);
                writer.put(at, back);
            }
        }),
        ("numbers jump", |writer| {
            for back in 0..16 {
                let at = writer.info(writer.head() - back);
                writer.put(at, u64::MAX - back);
            }
        }),
    ];
    for (name, damage) in damages {
        for begin in [
            Start::Oldest,
            Start::End,
            Start::Seq(u64::MAX),
            Start::Seq(3),
        ] {
            let log = Log::new(Version::V6_12, 4, 12);
            log.write(|writer| (0..40).for_each(|_| _ = writer.print(6, "text")));
            let mut follower = Follower::new(log.source(), begin);
            follower.poll(&log, ALL);
            log.write(damage);
            log.before_read(|_, _| {});
            for _ in 0..4 {
                let batch = follower.poll(&log, ALL);
                assert!(batch.records.len() <= 16, "{name}");
            }
            let _ = newest(&log, &log.source());
            assert!(log.reads() < 40_000, "{name}: {} reads", log.reads());
        }
    }
}

/// The log changes before every read, for ever.
#[test]
fn a_ring_that_never_rests_ends_a_poll() {
    let log = Log::new(Version::V6_12, 2, 9);
    log.write(|writer| (0..4).for_each(|_| _ = writer.print(6, "a")));
    log.before_read(|_, writer| (0..5).for_each(|_| _ = writer.print(6, "b")));
    let mut follower = Follower::new(log.source(), Start::Oldest);
    for _ in 0..50 {
        let batch = follower.poll(&log, ALL);
        assert!(batch.records.is_empty() && batch.more);
    }
    assert!(log.reads() < 50 * 400, "{}", log.reads());
}

#[test]
fn an_unreadable_ring_is_reported_and_read_again_later() {
    let log = Log::new(Version::V6_12, 4, 12);
    let mut follower = Follower::new(log.source(), Start::Oldest);
    log.write(|writer| {
        writer.print(6, "a");
    });
    follower.poll(&log, ALL);
    let ring = log.write(|writer| {
        let ring = writer.ring();
        writer.put(BASE, 0);
        ring
    });
    assert!(follower.poll(&log, ALL).unreadable);
    log.write(|writer| {
        writer.put(BASE, ring);
        writer.print(6, "b");
    });
    let batch = follower.poll(&log, ALL);
    assert_eq!((texts(&batch), batch.lost), (vec!["b".to_owned()], 0));
}

/// A version in which one member or size is wrong.
struct Broken(
    fn(&str, &[&str], Member) -> Option<Member>,
    fn(&str, u32) -> Option<u32>,
);

impl Types for Broken {
    fn member(&self, structure: &str, path: &[&str]) -> Option<Member> {
        let member = Version::V6_12.member(structure, path)?;
        (self.0)(structure, path, member)
    }

    fn size(&self, structure: &str) -> Option<u32> {
        (self.1)(structure, Version::V6_12.size(structure)?)
    }
}

#[test]
fn a_layout_that_cannot_be_is_refused_with_the_name() {
    let whole = Broken(|_, _, member| Some(member), |_, size| Some(size));
    assert_eq!(Layout::read(&whole), Layout::read(&Version::V6_12));
    let cases = [
        (
            Broken(
                |name, _, member| (name != "prb_desc").then_some(member),
                |_, size| Some(size),
            ),
            "struct prb_desc has no member state_var",
        ),
        (
            Broken(
                |_, _, member| Some(member),
                |name, size| (name != "printk_info").then_some(size),
            ),
            "struct printk_info is None",
        ),
        (
            Broken(|_, _, member| Some(member), |_, _| Some(1 << 20)),
            "printk_ringbuffer is Some(1048576)",
        ),
        (
            Broken(
                |_, path, member| {
                    let offset = if path == ["caller_id"] {
                        86
                    } else {
                        member.offset
                    };
                    Some(Member { offset, ..member })
                },
                |_, size| Some(size),
            ),
            "no member caller_id within it",
        ),
        (
            Broken(
                |_, path, member| {
                    let width = if path == ["level"] { 7 } else { member.width };
                    Some(Member { width, ..member })
                },
                |_, size| Some(size),
            ),
            "level of struct printk_info is 7 bits from bit 5 on",
        ),
    ];
    for (types, expected) in cases {
        let error = Layout::read(&types).expect_err(expected);
        assert!(error.contains(expected), "{error}");
    }
}
