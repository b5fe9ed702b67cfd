// SPDX-License-Identifier: Apache-2.0
//! A ring that a process in the guest has mapped. The kernel writes to the pages that it gives to
//! the process: it flags a page before which events were lost, and replaces the padding at its end
//! by their number. Otherwise pages and links are as in other rings.

use super::*;

/// Events of this length leave room for padding in a page of four.
const LENGTH: usize = 900;

#[test]
fn a_ring_that_is_mapped_is_read_while_the_guest_takes_its_events() {
    for version in [Version::V6_12, Version::V7_3] {
        let memory = Memory::new(version, 1, 5);
        let mut follower = rings(&memory, Start::Oldest);
        follower.poll(&memory, ALL);
        let (mut read, mut lost, mut number) = (0, 0, 0);
        let mut random = fastrand::Rng::with_seed(13);
        for _ in 0..400 {
            let next = number + random.u64(0..30);
            write(&memory, number..next, LENGTH);
            number = next;
            for _ in 0..random.u32(0..5) {
                memory.write(|writer| writer.consume_mapped(0));
            }
            let batch = follower.poll(&memory, ALL);
            let numbers = numbers(&batch);
            assert!(numbers.is_sorted_by(|one, next| one < next));
            assert!(numbers.iter().all(|&seen| seen >= read + lost));
            read += numbers.len() as u64;
            lost += batch.lost;
            assert_eq!(read + lost, number, "{version:?}");
            assert!(!batch.restarted && batch.damaged == 0);
        }
        assert!(read > lost / 2, "{read} read, {lost} lost");
    }
}

/// The page has the same generation, time, memory and first events before and after.
#[test]
fn a_page_that_is_cut_while_it_is_copied_is_copied_again() {
    let mut torn = 0;
    for before in [0, 3] {
        for when in 0..40 {
            for stores in [1, 2, 3, 4, usize::MAX] {
                let memory = Memory::new(Version::V6_12, 1, 4);
                write(&memory, 0..30, LENGTH);
                // The oldest page becomes the reader page. Events were lost before it.
                memory.write(|writer| writer.consume(0));
                let mut follower = rings(&memory, Start::Oldest);
                let first = numbers(&follower.clone().poll(&memory, ALL))[0];
                assert!(first > 0);
                memory.before_read(move |read, writer| match read {
                    _ if read == when => {
                        writer.consume_mapped(0);
                        writer.run(before);
                        writer.run(stores);
                    }
                    _ if read > when => writer.run(usize::MAX),
                    _ => {}
                });
                let (mut read, mut lost) = (vec![], 0);
                for _ in 0..4 {
                    let batch = follower.poll(&memory, ALL);
                    read.extend(numbers(&batch));
                    lost += batch.lost;
                    torn += batch.torn;
                    assert_eq!(batch.damaged, 0, "{when} {stores}");
                }
                // Nothing was overwritten. If the first position is found after the reader in the
                // guest has taken the page, its events are not wanted.
                let from = read[0];
                assert!(from == first || from == first + 4, "{from} {when} {stores}");
                assert_eq!(read, (from..30).collect::<Vec<_>>(), "{when} {stores}");
                assert_eq!(lost, 0, "{when} {stores}");
            }
        }
    }
    assert!(torn > 0, "no copy was cut");
}
