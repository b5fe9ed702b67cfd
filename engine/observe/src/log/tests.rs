// SPDX-License-Identifier: Apache-2.0

use super::*;
use crate::testing::{BASE, Log, Version};
use crate::{Member, Types};

mod hostile;
mod summary;
mod torn;

const ALL: Terms = Terms {
    records: usize::MAX,
    bytes: usize::MAX,
    unfinished: false,
};
const VERSIONS: [Version; 3] = [Version::V5_10, Version::V6_12, Version::V7_3];

fn texts(batch: &Batch) -> Vec<String> {
    let text = |record: &Record| {
        let text = record.text.clone().unwrap_or_else(|| b"(lost)".to_vec());
        String::from_utf8(text).unwrap()
    };
    batch.records.iter().map(text).collect()
}

fn seqs(batch: &Batch) -> Vec<u64> {
    batch.records.iter().map(|record| record.seq).collect()
}

fn dump(log: &Log) -> Batch {
    Follower::new(log.source(), Start::Oldest).poll(log, ALL)
}

#[test]
fn every_field_is_read_in_every_version() {
    for version in VERSIONS {
        let log = Log::new(version, 4, 12);
        log.write(|writer| {
            writer.time = 12_345_678_901;
            let id = writer.print(6, "eth0: link up\n two lines");
            writer.name_device(id, "pci", "+pci:0000:00:03.0");
            let id = writer.reserve();
            writer.commit(id, 4 << 5 | 8, 1 << 31 | 3, b"more");
            writer.finalize(id);
        });
        let batch = dump(&log);
        let first = Record {
            seq: 0,
            time: 12_345_678_901,
            level: 6,
            facility: 0,
            continues: false,
            caller: Caller::Task(7),
            subsystem: b"pci".to_vec(),
            device: b"+pci:0000:00:03.0".to_vec(),
            text: Some(b"eth0: link up\n two lines".to_vec()),
            finished: true,
        };
        assert_eq!(batch.records[0], first, "{version:?}");
        let second = &batch.records[1];
        assert_eq!(second.caller, Caller::Cpu(3));
        assert!(second.continues && second.subsystem.is_empty());
        assert_eq!((second.level, second.seq), (4, 1));
        assert_eq!((batch.lost, batch.restarted), (0, false));
    }
}

#[test]
fn blocks_at_the_end_of_the_ring_are_found() {
    for fills_the_end in [false, true] {
        let log = Log::new(Version::V7_3, 6, 7);
        log.write(|writer| writer.fills_the_end = fills_the_end);
        let mut follower = Follower::new(log.source(), Start::Oldest);
        // Blocks of 32 bytes fill the ring exactly, blocks of 48 bytes straddle its end.
        for length in [24, 24, 24, 24, 24, 40, 40, 40, 40, 40, 40] {
            let text = "t".repeat(length);
            log.write(|writer| writer.print(6, &text));
            assert_eq!(texts(&follower.poll(&log, ALL)), [text]);
        }
    }
}

/// The ids wrap at 2^62 after one round, the positions of texts at 2^64.
#[test]
fn a_follower_reads_each_record_once_while_ids_positions_and_slots_wrap() {
    for version in VERSIONS {
        let log = Log::new(version, 3, 9);
        let mut follower = Follower::new(log.source(), Start::Oldest);
        assert_eq!(follower.poll(&log, ALL), Batch::default());
        let mut random = fastrand::Rng::with_seed(3);
        for round in 0..500_u64 {
            // The second poll crosses the end of the ids, after the third of its records.
            let number = match round {
                0 => 5,
                1 => 7,
                _ => random.u64(0..4),
            };
            let expected: Vec<String> = (0..number)
                .map(|index| "x".repeat(random.usize(0..50)) + &format!("{round}.{index}"))
                .collect();
            for text in &expected {
                log.write(|writer| writer.print(6, text));
            }
            let batch = follower.poll(&log, ALL);
            assert_eq!(texts(&batch), expected, "{version:?} round {round}");
            assert_eq!((batch.lost, batch.restarted, batch.more), (0, false, false));
        }
    }
}

#[test]
fn records_that_were_overwritten_are_counted_exactly() {
    // With few descriptors the ring of descriptors wraps first, with many the ring of texts.
    for count_bits in [3, 9] {
        let log = Log::new(Version::V6_12, count_bits, 9);
        let mut follower = Follower::new(log.source(), Start::Seq(0));
        let mut random = fastrand::Rng::with_seed(u64::from(count_bits));
        let mut next = 0;
        for _ in 0..300 {
            for _ in 0..random.u64(0..40) {
                let text = "y".repeat(random.usize(1..60));
                log.write(|writer| writer.print(6, &text));
            }
            let batch = follower.poll(&log, ALL);
            let written = log.write(|writer| writer.seq);
            let read = batch.records.len() as u64;
            assert_eq!(next + batch.lost + read, written, "seen and lost is all");
            let expected: Vec<u64> = (written - read..written).collect();
            assert_eq!(seqs(&batch), expected);
            assert!(!batch.restarted && !batch.unreadable);
            next = written;
        }
    }
}

#[test]
fn the_first_reusable_record_and_reclaimed_ones_are_passed_over() {
    let log = Log::new(Version::V6_12, 4, 12);
    assert_eq!(dump(&log), Batch::default(), "an empty log");
    log.write(|writer| writer.print(6, "first"));
    assert_eq!(texts(&dump(&log)), ["first"]);
    // There are many descriptors but room for few texts, so most of the oldest records are
    // reusable.
    let log = Log::new(Version::V6_12, 14, 9);
    log.write(|writer| (0..16_000).for_each(|_| _ = writer.print(6, &"z".repeat(40))));
    let batch = dump(&log);
    assert_eq!(batch.records.len(), 10, "512 bytes of texts");
    assert_eq!(batch.records[0].seq, 15_990);
    assert_eq!(batch.lost, 0, "nothing is lost to a reader that begins");
    assert!(log.reads() < 6_000, "{}", log.reads());
}

#[test]
fn empty_and_lost_texts_are_told_apart() {
    let log = Log::new(Version::V6_12, 4, 12);
    log.write(|writer| {
        writer.print(6, "");
        let id = writer.print(6, "a");
        let at = writer.descriptor(id);
        writer.put(at + 8, 1);
        writer.put(at + 16, 1);
        writer.print(6, "b");
    });
    let batch = dump(&log);
    assert_eq!(batch.records[0].text, Some(vec![]));
    assert_eq!(batch.records[1].text, None);
    assert_eq!(texts(&batch)[2], "b");
}

#[test]
fn a_committed_record_waits_until_it_is_finalized() {
    let log = Log::new(Version::V6_12, 4, 12);
    let mut follower = Follower::new(log.source(), Start::Oldest);
    let id = log.write(|writer| {
        let id = writer.reserve();
        writer.commit(id, 6 << 5, 7, b"loading ...");
        id
    });
    let batch = follower.poll(&log, ALL);
    assert!(batch.records.is_empty() && !batch.waits, "it is the newest");
    let unfinished = Terms {
        unfinished: true,
        ..ALL
    };
    let dumped = Follower::new(log.source(), Start::Oldest).poll(&log, unfinished);
    assert_eq!(texts(&dumped), ["loading ..."]);
    assert!(!dumped.records[0].finished);
    log.write(|writer| writer.finalize(id));
    assert_eq!(texts(&follower.poll(&log, ALL)), ["loading ..."]);
}

#[test]
fn a_reserved_record_holds_later_ones_until_it_is_given_up() {
    let log = Log::new(Version::V6_12, 4, 12);
    let mut follower = Follower::new(log.source(), Start::Oldest);
    log.write(|writer| {
        writer.print(6, "before");
        writer.reserve();
        // The reserved record has a sequence number, although its writer has not stored it yet.
        writer.seq += 1;
        writer.print(6, "after");
    });
    let batch = follower.poll(&log, ALL);
    assert_eq!(texts(&batch), ["before"]);
    assert!(batch.waits);
    let unfinished = Terms {
        unfinished: true,
        ..ALL
    };
    let batch = follower.poll(&log, unfinished);
    assert_eq!((texts(&batch), batch.lost), (vec!["after".to_owned()], 1));
}

/// The head is advanced before the descriptor is written.
#[test]
fn a_slot_that_is_about_to_be_reserved_is_awaited() {
    let log = Log::new(Version::V6_12, 2, 12);
    let mut follower = Follower::new(log.source(), Start::Oldest);
    log.write(|writer| (0..8).for_each(|_| _ = writer.print(6, "old")));
    follower.poll(&log, ALL);
    let id = log.write(|writer| writer.advance());
    let batch = follower.poll(&log, ALL);
    assert_eq!(batch, Batch::default());
    log.write(|writer| {
        writer.put_state(id, 0);
        writer.commit(id, 6 << 5, 7, b"new");
        writer.finalize(id);
    });
    assert_eq!(texts(&follower.poll(&log, ALL)), ["new"]);
}

#[test]
fn a_follower_begins_where_it_is_told() {
    let log = Log::new(Version::V6_12, 3, 12);
    let mut end = Follower::new(log.source(), Start::End);
    assert!(end.poll(&log, ALL).records.is_empty());
    log.write(|writer| (0..4).for_each(|number| _ = writer.print(6, &number.to_string())));
    assert_eq!(
        texts(&end.poll(&log, ALL)).len(),
        4,
        "it began before the first"
    );
    let mut end = Follower::new(log.source(), Start::End);
    assert!(end.poll(&log, ALL).records.is_empty());
    assert_eq!(end.next_seq(), Some(4));
    let open = log.write(|writer| {
        let id = writer.reserve();
        writer.commit(id, 6 << 5, 7, b"open");
        id
    });
    let mut late = Follower::new(log.source(), Start::End);
    assert!(late.poll(&log, ALL).records.is_empty());
    log.write(|writer| {
        writer.finalize(open);
        writer.print(6, "5");
    });
    assert_eq!(texts(&end.poll(&log, ALL)), ["open", "5"]);
    assert_eq!(texts(&late.poll(&log, ALL)), ["open", "5"]);
    let from = |seq| Follower::new(log.source(), Start::Seq(seq)).poll(&log, ALL);
    assert_eq!(seqs(&from(4)), [4, 5]);
    assert_eq!((seqs(&from(6)), from(6).restarted), (vec![], false));
    assert!(from(7).restarted, "this log has no such record yet");
    log.write(|writer| (6..20).for_each(|number| _ = writer.print(6, &number.to_string())));
    let late = from(4);
    assert_eq!((late.lost, seqs(&late)[0]), (8, 12));
    assert_eq!(late.records.len(), 8);
}

#[test]
fn a_poll_ends_at_its_limits_and_goes_on_there() {
    let log = Log::new(Version::V6_12, 6, 12);
    log.write(|writer| (0..20).for_each(|number| _ = writer.print(6, &format!("{number:4}"))));
    let mut follower = Follower::new(log.source(), Start::Oldest);
    let few = Terms { records: 3, ..ALL };
    let batch = follower.poll(&log, few);
    assert_eq!((seqs(&batch), batch.more), (vec![0, 1, 2], true));
    let short = Terms { bytes: 7, ..ALL };
    let batch = follower.poll(&log, short);
    assert_eq!((seqs(&batch), batch.more), (vec![3, 4], true));
    let batch = follower.poll(&log, ALL);
    assert_eq!((batch.records.len(), batch.more), (15, false));
    let newest = newest(&log, &log.source()).expect("a record");
    assert_eq!(newest.seq, 19);
}

/// A log that moves to a larger ring keeps its sequence numbers, but its ids differ.
#[test]
fn a_log_that_moves_is_followed() {
    let log = Log::new(Version::V6_12, 3, 12);
    let mut follower = Follower::new(log.source(), Start::Oldest);
    log.write(|writer| (0..5).for_each(|number| _ = writer.print(6, &number.to_string())));
    assert_eq!(follower.poll(&log, ALL).records.len(), 5);
    let mut moved = Log::new(Version::V6_12, 6, 12).into_writer();
    log.write(|writer| {
        // The new ring also holds the id that was next in the old ring, but for another record.
        (0..62).for_each(|number| _ = moved.print(6, &number.to_string()));
        writer.move_to(moved);
    });
    let batch = follower.poll(&log, ALL);
    assert_eq!(seqs(&batch), (5..62).collect::<Vec<_>>());
    assert_eq!((batch.lost, batch.restarted), (0, false));
}

#[test]
fn another_boot_begins_anew() {
    let log = Log::new(Version::V6_12, 3, 12);
    let mut follower = Follower::new(log.source(), Start::Oldest);
    log.write(|writer| (0..50).for_each(|number| _ = writer.print(6, &number.to_string())));
    follower.poll(&log, ALL);
    // With 45 records, the slot of record 50, which the follower reads next, holds the id of record
    // 42, as it would in the earlier boot.
    for number in [1_usize, 45] {
        let mut again = Log::new(Version::V6_12, 3, 12).into_writer();
        (0..number).for_each(|_| _ = again.print(6, "Linux version"));
        log.write(|writer| *writer = again);
        let batch = follower.clone().poll(&log, ALL);
        assert!(batch.restarted);
        assert_eq!((batch.records.len(), batch.lost), (number.min(8), 0));
    }
}

#[test]
fn numbers_that_contradict_the_ids_begin_anew_or_count_as_lost() {
    let log = Log::new(Version::V6_12, 4, 12);
    let mut follower = Follower::new(log.source(), Start::Oldest);
    log.write(|writer| (0..5).for_each(|_| _ = writer.print(6, "a")));
    follower.poll(&log, ALL);
    log.write(|writer| {
        writer.print(6, "b");
        writer.seq = 2;
        writer.print(6, "c");
        writer.seq = 10;
        writer.print(6, "d");
    });
    let batch = follower.poll(&log, ALL);
    assert_eq!(
        (seqs(&batch), batch.restarted, batch.more),
        (vec![5], false, true)
    );
    let batch = follower.poll(&log, ALL);
    assert_eq!((seqs(&batch), batch.restarted), (vec![2, 10], true));
    assert_eq!(batch.lost, 7);
}

#[test]
fn a_large_ring_without_a_whole_record_ends_a_search() {
    let log = Log::new(Version::V6_12, 14, 9);
    log.write(|writer| (0..20_000).for_each(|_| _ = writer.reserve()));
    let mut follower = Follower::new(log.source(), Start::Oldest);
    let batch = follower.poll(&log, ALL);
    assert!(batch.more && batch.records.is_empty());
    assert!(log.reads() < 10_000, "{}", log.reads());
}

/// Replaces a record between any two reads of its copy. The copy is never taken.
#[test]
fn a_record_that_is_replaced_while_it_is_copied_is_lost_and_never_mixed() {
    let mut torn = 0;
    for when in 0..12 {
        let log = Log::new(Version::V6_12, 2, 9);
        log.write(|writer| (0..4).for_each(|_| _ = writer.print(6, &"a".repeat(60))));
        let mut follower = Follower::new(log.source(), Start::Seq(0));
        log.before_read(move |number, writer| {
            if number == when {
                (0..8).for_each(|_| _ = writer.print(3, &"b".repeat(60)));
            }
        });
        let mut read = vec![];
        let mut lost = 0;
        loop {
            let batch = follower.poll(&log, ALL);
            torn += batch.torn;
            lost += batch.lost;
            let more = batch.more;
            read.extend(batch.records);
            if !more && read.last().is_some_and(|record| record.seq == 11) {
                break;
            }
        }
        for record in &read {
            let (byte, level) = if record.seq < 4 { (b'a', 6) } else { (b'b', 3) };
            assert_eq!(record.text, Some(vec![byte; 60]), "at read {when}");
            assert_eq!(record.level, level, "at read {when}");
        }
        assert_eq!(read.len() as u64 + lost, 12, "at read {when}");
    }
    assert!(torn >= 3, "descriptor, info and text were replaced: {torn}");
}

/// A committed record is extended while it is copied: its state is the same before and after.
#[test]
fn a_committed_record_that_grows_is_not_mixed() {
    let log = Log::new(Version::V6_12, 3, 12);
    let id = log.write(|writer| {
        let id = writer.reserve();
        writer.commit(id, 6 << 5, 7, b"part");
        id
    });
    let unfinished = Terms {
        unfinished: true,
        ..ALL
    };
    let reads = {
        let mut follower = Follower::new(log.source(), Start::Oldest);
        log.before_read(|_, _| {});
        follower.poll(&log, unfinished);
        log.reads()
    };
    let mut refused = 0;
    for when in 0..reads {
        log.before_read(move |number, writer| {
            if number == when {
                // The block has room for four more bytes, so the positions stay.
                let info = writer.info(id);
                let texts = writer.texts();
                writer.put_bytes(texts + 8, b"PARTmore");
                writer.put_bytes(info + 16, &8_u16.to_le_bytes());
                writer.put_state(id, 1);
            }
        });
        let batch = Follower::new(log.source(), Start::Oldest).poll(&log, unfinished);
        match batch.records.first().map(|record| record.text.clone()) {
            None => refused += 1,
            Some(text) => assert!(
                text == Some(b"part".to_vec()) || text == Some(b"PARTmore".to_vec()),
                "{text:?}"
            ),
        }
        log.write(|writer| {
            let (info, texts) = (writer.info(id), writer.texts());
            writer.put_bytes(texts + 8, b"part");
            writer.put_bytes(info + 16, &4_u16.to_le_bytes());
        });
    }
    assert!(refused > 0);
}

#[test]
fn a_block_of_another_record_is_not_taken() {
    let log = Log::new(Version::V6_12, 4, 12);
    log.write(|writer| {
        let id = writer.print(6, "one");
        // The length exceeds the block, which has room for 8 bytes.
        let at = writer.info(id);
        writer.put_bytes(at + 16, &60_000_u16.to_le_bytes());
        let id = writer.print(6, "two");
        writer.print(6, "three");
        // The second record gets the positions of the first block.
        let at = writer.descriptor(id);
        writer.put(at + 8, 0_u64.wrapping_sub(1 << 12));
        writer.put(at + 16, 0_u64.wrapping_sub(1 << 12) + 16);
    });
    let batch = dump(&log);
    assert_eq!(texts(&batch), ["one\0\0\0\0\0", "three"]);
    assert_eq!(batch.lost, 1);
}

/// The positions of a text are two rounds of the ring apart, and the block at the start of the ring
/// has the record's id.
#[test]
fn a_block_that_spans_more_than_a_round_is_not_taken() {
    let log = Log::new(Version::V6_12, 4, 12);
    log.write(|writer| {
        // The dump begins with the first whole record, so nothing is lost before it.
        let id = writer.print(6, "one");
        writer.print(6, "two");
        let at = writer.descriptor(id);
        writer.put(at + 8, 0_u64.wrapping_sub(3 << 12));
    });
    let batch = dump(&log);
    assert_eq!((texts(&batch), batch.lost), (vec!["two".to_owned()], 0));
}

#[test]
fn a_block_without_room_for_its_id_is_not_taken() {
    let log = Log::new(Version::V6_12, 4, 12);
    log.write(|writer| {
        writer.print(6, "zero");
        let id = writer.print(6, "one");
        writer.print(6, "two");
        let at = writer.descriptor(id);
        let begin = writer.memory()[(at + 8 - BASE) as usize..][..8].try_into();
        let begin = u64::from_le_bytes(begin.expect("8 bytes"));
        writer.put(at + 16, begin + 4);
    });
    let batch = dump(&log);
    assert_eq!(
        (texts(&batch), batch.lost),
        (vec!["zero".to_owned(), "two".to_owned()], 1)
    );
}

/// The ring wraps after its header was copied and before the first record is.
#[test]
fn a_follower_that_is_overtaken_reads_what_the_ring_holds_in_the_same_poll() {
    let log = Log::new(Version::V6_12, 2, 9);
    log.write(|writer| (0..2).for_each(|_| _ = writer.print(6, "a")));
    let mut follower = Follower::new(log.source(), Start::Oldest);
    assert_eq!(seqs(&follower.poll(&log, ALL)), [0, 1]);
    log.write(|writer| _ = writer.print(6, "a"));
    // The pointer to the ring and its header are the first two reads.
    log.before_read(|number, writer| {
        if number == 2 {
            (0..8).for_each(|_| _ = writer.print(6, "b"));
        }
    });
    let batch = follower.poll(&log, ALL);
    assert_eq!((seqs(&batch), batch.lost), (vec![7, 8, 9, 10], 5));
    assert_eq!(batch.torn, 0, "no copy was mixed");
}

/// A writer finishes its record while the record is copied: it is neither torn nor lost.
#[test]
fn a_record_that_is_finished_while_it_is_copied_is_read_later() {
    let unfinished = Terms {
        unfinished: true,
        ..ALL
    };
    let mut later = 0;
    for when in 0..16 {
        let log = Log::new(Version::V6_12, 3, 12);
        let id = log.write(|writer| {
            writer.print(6, "before");
            let id = writer.reserve();
            writer.commit(id, 6 << 5, 7, b"part");
            id
        });
        let mut follower = Follower::new(log.source(), Start::Seq(1));
        log.before_read(move |number, writer| {
            if number == when {
                writer.finalize(id);
            }
        });
        let first = follower.poll(&log, unfinished);
        later += usize::from(first.records.is_empty());
        let second = follower.poll(&log, unfinished);
        assert_eq!(
            [texts(&first), texts(&second)].concat(),
            ["part"],
            "at read {when}"
        );
        assert_eq!((first.torn, first.lost), (0, 0), "at read {when}");
    }
    assert!(later > 0, "never finished during a copy");
}
