// SPDX-License-Identifier: Apache-2.0
//! Tests that every implementation of the seams must pass. Each function panics at the first broken
//! promise. The documentation of a function describes the state in which the function leaves the
//! guest.
//!
//! [`exits`] and [`late`] need a guest whose vCPUs leave it for a request, a port or device memory,
//! and a monitor whose handlers the test supplies. They do not apply to the in-memory guest, which
//! has no vCPUs, or to a guest whose devices belong to another program.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use crate::guest::{Guest, PausedGuest};
use crate::kernel_memory::Place;
use crate::memory::{GuestRam, Leading, Piece, Word};
use crate::pause::{Activity, PauseError};
use patchbay_memory::PAGE_SIZE;

/// Deadline of a pause that must succeed.
const DEADLINE: Duration = Duration::from_secs(30);

/// Tests guest memory. `scratch` is the guest-physical address of four whole pages that are unused
/// and not dirty. `end` is the end of the region that contains them, with no memory after it.
///
/// # Panics
/// If a promise of [`crate::memory::Ram`] is broken.
pub fn memory(ram: &GuestRam, scratch: u64, end: u64) {
    assert!(scratch.is_multiple_of(PAGE_SIZE) && end.is_multiple_of(PAGE_SIZE));
    bounds(ram, end);
    exchange(ram, scratch);
    dirty(ram, scratch + PAGE_SIZE);
    copies(ram, scratch);
    words(ram, scratch);
    words_are_marked(ram, scratch + 3 * PAGE_SIZE);
}

fn bounds(ram: &GuestRam, end: u64) {
    for (address, length) in [
        (end, 1),
        (end - 3, 4),
        (end - PAGE_SIZE, PAGE_SIZE as usize + 1),
        (u64::MAX, 1),
        (u64::MAX - 3, 4),
        (u64::MAX - 3, 8),
        (0, usize::MAX),
    ] {
        let outside = ram.piece(address, length).expect_err("outside");
        assert_eq!((outside.address, outside.length), (address, length));
    }
    assert!(ram.piece(end - 4, 4).is_ok());
    assert!(ram.read_u64(end - 8).is_some());
    for address in [end, u64::MAX - 7] {
        assert_eq!(ram.read_u64(address), None, "{address:#x}");
        assert!(!ram.is_dirty(address));
    }
    // Accesses to a forged piece outside memory fail.
    let piece = ram.piece(end - 8, 8).expect("inside");
    for (region, offset) in [(u32::MAX, 0), (piece.region(), u64::MAX - 2)] {
        let forged = crate::memory::Piece::new(region, offset, 4);
        assert!(!ram.read_piece(forged, &mut [0; 4]));
        assert!(!ram.write_piece(forged, &[1; 4]));
        assert_eq!(ram.compare_exchange_u32(forged, 0, 1), None);
    }
}

fn exchange(ram: &GuestRam, page: u64) {
    let word = ram.piece(page + 8, 4).expect("inside");
    assert!(!ram.is_dirty(page), "the scratch page is not dirty yet");
    let mut old = [0; 4];
    assert!(ram.read_piece(word, &mut old));
    let old = u32::from_le_bytes(old);
    if !ram.can_exchange() {
        for current in [old, !old] {
            assert_eq!(ram.compare_exchange_u32(word, current, 7), None);
        }
        assert!(!ram.is_dirty(page), "nothing was written");
        return;
    }
    assert_eq!(ram.compare_exchange_u32(word, !old, 7), Some(Err(old)));
    assert!(!ram.is_dirty(page), "nothing was written");
    assert_eq!(ram.compare_exchange_u32(word, old, 7), Some(Ok(old)));
    assert!(ram.is_dirty(page));
    for (offset, length) in [(8, 8), (8, 2), (9, 4), (10, 4)] {
        let piece = ram.piece(page + offset, length).expect("inside");
        assert_eq!(ram.compare_exchange_u32(piece, 7, 8), None);
    }
    let word = ram.piece(page + 8, 4).expect("inside");
    assert!(ram.write_piece(word, &0_u32.to_le_bytes()));
    // No exchange is lost when several threads make exchanges at the same time.
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..1000 {
                    let mut seen = 0;
                    while let Some(Err(now)) = ram.compare_exchange_u32(word, seen, seen + 1) {
                        seen = now;
                    }
                }
            });
        }
    });
    assert_eq!(
        ram.read_u64(page + 8).map(|word| word & 0xffff_ffff),
        Some(2000)
    );
}

fn dirty(ram: &GuestRam, page: u64) {
    assert!(!ram.is_dirty(page), "the scratch page is not dirty yet");
    ram.read(page, &mut [0; 64]).expect("inside");
    let piece = ram.piece(page, 4).expect("inside");
    assert!(!ram.write_piece(piece, &[1; 5]), "of another length");
    assert!(!ram.write_piece(piece, &[1; 3]), "of another length");
    assert!(!ram.is_dirty(page), "nothing was written");
    // A write across the boundary marks both pages.
    ram.write(page - 2, &[1; 4]).expect("inside");
    assert!(ram.is_dirty(page) && ram.is_dirty(page - 1));
}

/// Tests every length and alignment that a site, a count or a gate word may have, and a long piece.
fn copies(ram: &GuestRam, page: u64) {
    for length in (1..=16).chain([64, PAGE_SIZE as usize + 1]) {
        for offset in 0..9 {
            let around = page + 16 + offset;
            ram.write(around - 1, &vec![0xee; length + 2])
                .expect("inside");
            let bytes: Vec<u8> = (1..=length).map(|byte| byte.to_le_bytes()[0]).collect();
            let piece = ram.piece(around, length).expect("inside");
            assert_eq!(piece.length(), length);
            assert!(ram.write_piece(piece, &bytes));
            let mut found = vec![0; length + 2];
            ram.read(around - 1, &mut found).expect("inside");
            assert_eq!(
                (found[0], found[length + 1]),
                (0xee, 0xee),
                "nothing beside it"
            );
            assert_eq!(found[1..=length], bytes);
            assert!(
                !ram.read_piece(piece, &mut vec![0; length + 1]),
                "of another length"
            );
            let mut number = [0; 8];
            if let Some(number) = number.get_mut(..length) {
                number.copy_from_slice(&bytes);
            }
            match ram.load(piece) {
                Some(found) => assert_eq!(found, u64::from_le_bytes(number)),
                None => assert!(![1, 2, 4, 5, 8].contains(&length), "a word of {length}"),
            }
            let (half, rest) = (length / 2, length - length / 2);
            let mut part = vec![0; rest];
            assert!(ram.read_piece(piece.part(half, rest), &mut part));
            assert_eq!(part, bytes[half..]);
        }
    }
    let word = u64::to_le_bytes(0x1122_3344_5566_7788);
    ram.write(page + 24, &word).expect("inside");
    assert_eq!(ram.read_u64(page + 24), Some(u64::from_le_bytes(word)));
}

/// The number of words in one call.
const WORDS: usize = 4;
/// The distance between the starts of two words, in bytes.
const APART: u64 = 16;

/// Tests several words in one call. The implementation decides how many of them it handles.
fn words(ram: &GuestRam, page: u64) {
    for length in [1, 2, 3, 4, 5, 8] {
        for offset in 0..9 {
            some_words(ram, page + 16 + offset, length);
        }
    }
    let piece = ram.piece(page, 8).expect("inside");
    let other = ram.piece(page + 64, 8).expect("inside");
    let straddling = Place::new(piece.prefix(2), other.prefix(3));
    let outside = Piece::new(u32::MAX, 0, 5);
    let at_the_end = Piece::new(piece.region(), u64::MAX - 2, 5);
    let short = Place::new(piece.prefix(4), Piece::NONE);
    for place in [
        straddling,
        short,
        Place::new(outside, Piece::NONE),
        Place::new(at_the_end, Piece::NONE),
    ] {
        let word = Word {
            place,
            length: 5,
            mask: 0,
            before: 0,
            after: 0,
        };
        assert_eq!(ram.leading_unchanged(&[word]), 0, "{place:?}");
        assert_eq!(ram.write_leading(&[word]), Leading::default(), "{place:?}");
    }
}

fn some_words(ram: &GuestRam, start: u64, length: usize) {
    let all = u64::MAX >> (64 - 8 * length);
    let before = |index: usize| 0x0102_0304_0506_0707_u64.wrapping_mul(index as u64 + 1) & all;
    let address = |index: usize| start + APART * index as u64;
    // Each place is longer than its word, as the place of a short site is.
    let mut words: Vec<Word<Place>> = (0..WORDS)
        .map(|index| Word {
            place: Place::new(ram.piece(address(index), 8).expect("inside"), Piece::NONE),
            length,
            mask: all,
            before: before(index),
            after: !before(index) & all,
        })
        .collect();
    let fill = vec![0xee; APART as usize * WORDS + 2];
    ram.write(start - 1, &fill).expect("inside");
    for (index, word) in words.iter().enumerate() {
        let bytes = &word.before.to_le_bytes()[..length];
        ram.write(address(index), bytes).expect("inside");
    }
    let unchanged = ram.leading_unchanged(&words);
    assert!(unchanged <= WORDS);
    words[2].before ^= 1;
    assert_eq!(ram.leading_unchanged(&words), unchanged.min(2));
    words[2].mask ^= 1;
    words[2].before &= words[2].mask;
    assert_eq!(ram.leading_unchanged(&words), unchanged);
    let Leading {
        written, differs, ..
    } = ram.write_leading(&words);
    assert!(written <= WORDS && differs.is_none());
    for (index, word) in words.iter().enumerate() {
        let mut found = [0; APART as usize];
        ram.read(address(index), &mut found).expect("inside");
        let mut value = [0; 8];
        value[..length].copy_from_slice(&found[..length]);
        match index {
            _ if index < written => assert_eq!(u64::from_le_bytes(value), word.after),
            // The word at which the call stopped may have been written.
            _ if index == written => {}
            _ => assert_eq!(u64::from_le_bytes(value), before(index)),
        }
        assert_eq!(found[length..], fill[length..APART as usize], "behind it");
    }
}

/// Tests that writing words marks their pages dirty. Uses `page` and the page before it.
fn words_are_marked(ram: &GuestRam, page: u64) {
    let words: Vec<Word<Place>> = [page - PAGE_SIZE + 8, page - 2]
        .into_iter()
        .map(|address| Word {
            place: Place::new(ram.piece(address, 5).expect("inside"), Piece::NONE),
            length: 5,
            mask: 0,
            before: 0,
            after: 0x05_0403_0201,
        })
        .collect();
    for end in [page - 1, page] {
        assert!(!ram.is_dirty(end), "the scratch page is not dirty yet");
    }
    let _ = ram.leading_unchanged(&words);
    for end in [page - 1, page] {
        assert!(!ram.is_dirty(end), "nothing was written");
    }
    let written = ram.write_leading(&words).written;
    assert!(written == 0 || ram.is_dirty(page - 1));
    assert!(written < 2 || ram.is_dirty(page));
}

/// Tests the pause of a running guest. `progress` does not block, and returns a number for each
/// vCPU that grows while the vCPU runs and is constant while the vCPU is stopped. For a guest
/// without vCPUs, `progress` returns no numbers. The guest runs afterwards.
///
/// # Panics
/// If a promise of [`Guest::pause`] is broken.
pub fn pause<G: Guest>(guest: &G, progress: impl Fn() -> Vec<u64>) {
    let moves_on = |from: &[u64]| {
        for (vcpu, from) in from.iter().enumerate() {
            while progress()[vcpu] == *from {
                std::thread::yield_now();
            }
        }
    };
    for _ in 0..20 {
        moves_on(&progress());
        let paused = guest.pause(DEADLINE).expect("every vCPU stops");
        let stopped = progress();
        assert!(paused.stop_time() <= DEADLINE);
        let rips = paused.rips().map(<[u64]>::to_vec);
        if let Some(rips) = &rips {
            assert!(rips.len() <= guest.description().vcpus as usize);
        }
        let breakpoint = paused.breakpoint_pending();
        // A second pause is refused and does not end the first one, whose results do not change.
        assert!(matches!(
            guest.pause(DEADLINE).map(|_| ()),
            Err(PauseError::AlreadyPaused)
        ));
        // A vCPU that still ran would make progress meanwhile.
        for _ in 0..200 {
            std::thread::yield_now();
        }
        assert_eq!(progress(), stopped, "somebody runs");
        assert_eq!(paused.rips(), rips.as_deref());
        assert_eq!(paused.breakpoint_pending(), breakpoint);
        drop(paused);
        moves_on(&stopped);
    }
    // A pause with a deadline of zero may succeed or fail. In either case the guest runs afterwards
    // and can be stopped again.
    for _ in 0..20 {
        match guest.pause(Duration::ZERO).map(|_| ()) {
            Ok(()) => {}
            Err(PauseError::Late { late, .. }) => assert!(!late.is_empty(), "they are named"),
            Err(error) => panic!("{error}"),
        }
        moves_on(&progress());
    }
    // Each pause starts right after the previous one ended, before the vCPUs can wake up.
    for _ in 0..20 {
        drop(guest.pause(DEADLINE).expect("every vCPU stops"));
    }
    moves_on(&progress());
}

/// The loop of a guest with one vCPU: the vCPU leaves the guest for a request or for an access to a
/// port or device memory, and the next instruction increments a counter.
pub struct Exits<B, E, C> {
    /// Returns how many times the monitor's handler began.
    pub begun: B,
    /// Returns how many times the handler ended.
    pub ended: E,
    /// Returns how many times the guest counted.
    pub counted: C,
    /// Guest-virtual address of the instruction that counts.
    pub counting: u64,
}

/// Tests exits while the guest is stopped: no exit is interrupted halfway, and each handled exit
/// has completed its instruction. The guest runs afterwards.
///
/// # Panics
/// If a promise of [`Guest::pause`] is broken, or if no pause met an exit.
pub fn exits<G: Guest>(
    guest: &G,
    exits: &Exits<impl Fn() -> u64, impl Fn() -> u64, impl Fn() -> u64>,
) {
    let mut met = 0;
    for _ in 0..1000 {
        let before = (exits.counted)();
        while (exits.counted)() == before {
            std::thread::yield_now();
        }
        let paused = guest.pause(DEADLINE).expect("the vCPU stops");
        let (begun, ended) = ((exits.begun)(), (exits.ended)());
        assert_eq!(begun, ended, "cut in half");
        let pending = ended - (exits.counted)();
        match paused.rips() {
            Some(rips) => assert_eq!(
                pending,
                u64::from(rips == [exits.counting]),
                "the vCPU stopped at {rips:x?} and has not counted {pending} handled exits"
            ),
            None => assert!(pending <= 1, "{pending} exits are not completed"),
        }
        met += pending;
    }
    assert!(met > 0, "no pause met an exit: the test saw nothing");
}

/// Tests a vCPU whose handler does not return, in a guest whose other vCPUs run. `progress` returns
/// a growing number for each vCPU. The handler returns when `release` is called.
///
/// # Panics
/// If a promise of [`Guest::pause`] is broken.
pub fn late<G: Guest>(
    guest: &G,
    (vcpu, activity): (usize, Activity),
    progress: impl Fn() -> Vec<u64>,
    release: impl FnOnce(),
) {
    let moves_on = |vcpu: usize| {
        let from = progress()[vcpu];
        while progress()[vcpu] == from {
            std::thread::yield_now();
        }
    };
    // The timeout is long enough for the other vCPUs to stop on a busy host.
    let timeout = Duration::from_secs(2);
    for _ in 0..3 {
        let error = guest.pause(timeout).map(|_| ()).expect_err("it is late");
        let PauseError::Late { deadline, late } = error else {
            panic!("{error}");
        };
        assert_eq!(deadline, timeout);
        let late: Vec<_> = late.iter().map(|late| (late.vcpu, late.activity)).collect();
        assert_eq!(late, [(vcpu, activity)]);
        for other in (0..progress().len()).filter(|other| *other != vcpu) {
            moves_on(other);
        }
    }
    release();
    moves_on(vcpu);
    drop(guest.pause(DEADLINE).expect("every vCPU stops"));
}

/// Tests the lifecycle and the console of a running guest, and ends the guest.
///
/// # Panics
/// If a promise of [`crate::guest::Machine`] or [`crate::console::Console`] is
/// broken.
pub fn lifecycle<G: Guest>(guest: &Arc<G>) {
    let description = guest.description();
    assert!(!description.name.is_empty());
    assert!(description.memory_bytes >= PAGE_SIZE);
    assert!(!guest.has_ended());
    let console = guest.console();
    assert!(!console.is_closed());
    let far = console.read(u64::MAX);
    assert!(far.bytes.is_empty());
    assert!(console.input(b"typed") <= 5);
    let (printed, seen) = channel();
    console.on_output(Box::new(move || {
        // The send fails only if the receiver was dropped, which happens after the end of the guest
        // was seen.
        let _ = printed.send(());
    }));
    guest.shut_down();
    guest.shut_down();
    while !console.is_closed() {
        seen.recv().expect("the listener is called at the end");
    }
    assert!(
        guest.has_ended(),
        "a closed console belongs to a guest that has ended"
    );
    assert!(matches!(
        guest.pause(DEADLINE).map(|_| ()),
        Err(PauseError::Ended)
    ));
    // Output that was read before the end can still be read after it.
    let _ = console.read(0);
    guest.shut_down();
}
