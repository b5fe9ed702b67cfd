// SPDX-License-Identifier: Apache-2.0
//! Tests each comparison that keeps a changed record from being taken.

use super::*;

const UNFINISHED: Terms = Terms {
    unfinished: true,
    ..ALL
};

/// The record's state is the same before and after, and so is its info after the extension, but its
/// block has become longer.
#[test]
fn a_committed_record_whose_block_grows_is_not_cut() {
    for when in 0..16 {
        let log = Log::new(Version::V6_12, 3, 12);
        let id = log.write(|writer| {
            let id = writer.reserve();
            writer.commit(id, 6 << 5, 7, b"part");
            id
        });
        log.before_read(move |number, writer| {
            if number == when {
                let (at, text) = (writer.descriptor(id) + 16, writer.texts() + 8);
                let begin = 0_u64.wrapping_sub(1 << 12);
                writer.put(at, begin + 8 + 16);
                writer.put_bytes(text, b"PART and more");
                writer.put_bytes(writer.info(id) + 16, &13_u16.to_le_bytes());
            }
        });
        let mut follower = Follower::new(log.source(), Start::Oldest);
        let batch = follower.poll(&log, UNFINISHED);
        let read = texts(&batch);
        let whole = [
            vec![],
            vec!["part".to_owned()],
            vec!["PART and more".to_owned()],
        ];
        assert!(whole.contains(&read), "at read {when}: {read:?}");
        assert_eq!(batch.torn, 0, "the writer has only extended it");
    }
}

/// The record is reclaimed while it is copied, and no writer has its slot yet.
#[test]
fn a_record_that_is_reclaimed_while_it_is_copied_does_not_end_the_poll() {
    let mut torn = 0;
    for when in 0..12 {
        let log = Log::new(Version::V6_12, 3, 12);
        let ids: Vec<u64> = (0..4)
            .map(|number| log.write(|writer| writer.print(6, &number.to_string())))
            .collect();
        let mut follower = Follower::new(log.source(), Start::Seq(0));
        log.before_read(move |number, writer| {
            if number == when {
                writer.put_state(ids[0], 3);
            }
        });
        let batch = follower.poll(&log, ALL);
        let (read, lost) = (seqs(&batch), batch.lost);
        assert!(read.ends_with(&[1, 2, 3]), "at read {when}: {batch:?}");
        assert_eq!(read.len() as u64 + lost, 4, "at read {when}");
        torn += batch.torn;
    }
    assert!(torn > 0, "no copy was mixed");
}

/// Between the copy of the header and the search, all its records are replaced by later ones.
#[test]
fn a_large_ring_that_wraps_before_it_is_searched_is_searched_again_in_the_same_poll() {
    const COUNT: u64 = 1 << 12;
    let log = Log::new(Version::V6_12, 12, 17);
    let print = |writer: &mut crate::testing::Writer| _ = writer.print(6, "text");
    log.write(|writer| (0..COUNT).for_each(|_| print(writer)));
    log.before_read(move |number, writer| {
        // The pointer to the ring and its header are the first two reads.
        if number == 2 {
            (0..COUNT + COUNT / 2).for_each(|_| print(writer));
        }
    });
    let mut follower = Follower::new(log.source(), Start::Oldest);
    let batch = follower.poll(&log, ALL);
    let last = 2 * COUNT + COUNT / 2 - 1;
    assert_eq!(seqs(&batch).last(), Some(&last));
    assert_eq!((batch.lost, batch.torn, batch.restarted), (0, 0, false));
}
