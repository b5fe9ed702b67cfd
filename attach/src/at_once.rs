// SPDX-License-Identifier: Apache-2.0
//! Accesses many words of a monitor's memory by one system call, while a thread of the monitor is
//! stopped.
//!
//! Through /proc/PID/mem each word takes a system call of its own. process_vm_readv(2) and
//! process_vm_writev(2) take lists of words, but they name the process by a number, which another
//! process may get after the end of this one. So they are given the number of a thread that is
//! stopped by ptrace. The number of such a thread is not used again before its tracer has waited
//! for its end or has ended itself, and a thread that has ended has no memory, so the calls fail
//! (`process_vm_rw_core()`, `mm/process_vm_access.c`). This does not apply to the first thread of a
//! process: if another thread calls `execve()`, that thread gets the first one's number
//! (`de_thread()`, `fs/exec.c`).
//!
//! A call that writes handles its ranges in order. If this process is killed, the call ends before
//! the next range (`__get_user_pages()`, `mm/gup.c`), so at most one write takes effect after the
//! vCPUs run again.
//!
//! Unlike an access through /proc/PID/mem, these calls wait for a page that the holder of a
//! userfaultfd must provide (`handle_userfault()`, `fs/userfaultfd.c`). Until it does, only a kill
//! ends that wait. So they are not used for a process that has a userfaultfd
//! ([`crate::memory::AttachedRam`]).

use std::io::{IoSlice, IoSliceMut};

use nix::Result;
use nix::sys::uio::{RemoteIoVec, process_vm_readv, process_vm_writev};
use nix::unistd::Pid;
use static_keys::instruction::{Size, replace};

/// The maximum number of ranges in a call.
const RANGES: usize = 64;
/// The maximum number of words that one call reads.
const WORDS: usize = 128;
/// The maximum length of a range that is read. Adjacent words share a range, so the bytes between
/// them are read too.
const RANGE_BYTES: usize = 512;
/// The maximum number of bytes that one call reads.
const READ_BYTES: usize = 2048;
/// The maximum length of a word.
const WORD_BYTES: usize = 8;

/// A word in the monitor's process.
#[derive(Clone, Copy, Debug)]
pub struct ProcessWord {
    pub address: usize,
    /// The number of bytes, from 1 to 8.
    pub length: usize,
}

/// Ranges of the process's memory.
struct Ranges {
    ranges: [RemoteIoVec; RANGES],
    count: usize,
}

impl Ranges {
    const fn new() -> Self {
        let ranges = [RemoteIoVec { base: 0, len: 0 }; RANGES];
        Self { ranges, count: 0 }
    }

    fn last_mut(&mut self) -> Option<&mut RemoteIoVec> {
        self.ranges[..self.count].last_mut()
    }

    /// Adds a range. Returns false if there is no room for it.
    fn push(&mut self, base: usize, len: usize) -> bool {
        let Some(room) = self.ranges.get_mut(self.count) else {
            return false;
        };
        *room = RemoteIoVec { base, len };
        self.count += 1;
        true
    }

    fn as_slice(&self) -> &[RemoteIoVec] {
        &self.ranges[..self.count]
    }
}

/// Copies of words.
pub struct Copies {
    buffer: [u8; READ_BYTES],
    /// The number of bytes that were read.
    read: usize,
    /// The place of each word in the buffer.
    offsets: [usize; WORDS],
    words: usize,
}

impl Copies {
    /// Reads as many of the first words as one call can read, at least one. They must not change
    /// meanwhile.
    ///
    /// # Errors
    /// The call failed, so no word was read.
    pub fn read(thread: Pid, words: impl Iterator<Item = ProcessWord>) -> Result<Self> {
        let mut copies = Self {
            buffer: [0; READ_BYTES],
            read: 0,
            offsets: [0; WORDS],
            words: 0,
        };
        let mut ranges = Ranges::new();
        let mut used = 0;
        for (word, offset) in words.zip(&mut copies.offsets) {
            let address = word.address;
            match ranges.last_mut() {
                Some(range)
                    if let Some(at) = address.checked_sub(range.base)
                        && at.saturating_add(word.length) <= RANGE_BYTES =>
                {
                    let begin = used - range.len;
                    let longer = range.len.max(at + word.length);
                    if begin + longer > READ_BYTES {
                        break;
                    }
                    range.len = longer;
                    used = begin + longer;
                    *offset = begin + at;
                }
                _ => {
                    let end = used + word.length;
                    if end > READ_BYTES || !ranges.push(address, word.length) {
                        break;
                    }
                    *offset = used;
                    used = end;
                }
            }
            copies.words += 1;
        }
        let local = &mut [IoSliceMut::new(&mut copies.buffer[..used])];
        copies.read = process_vm_readv(thread, local, ranges.as_slice())?;
        Ok(copies)
    }

    /// Returns the number of words that the call was asked to read.
    pub fn words(&self) -> usize {
        self.words
    }

    /// Returns the word at `index` as a little-endian number; `None` if it was not read.
    pub fn value(&self, index: usize, length: usize) -> Option<u64> {
        let offset = *self.offsets[..self.words].get(index)?;
        let read = self.buffer.get(..self.read)?;
        let bytes = read.get(offset..offset + length)?;
        let mut value = [0; WORD_BYTES];
        value.get_mut(..length)?.copy_from_slice(bytes);
        Some(u64::from_le_bytes(value))
    }
}

/// The result of [`write`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Written {
    /// The number of words at the start that were written.
    pub words: usize,
    /// The number of words at the start that may have been written, at least in part.
    pub touched: usize,
}

/// Writes as many of the first words as one call can write, in their order. An instruction is
/// written in steps ([`replace`]). A call writes either instructions or counts, so that all
/// instructions have been read back before the first count is written. Otherwise a rollback could
/// take a count for a change by the guest ([`crate::rollback`]).
///
/// # Errors
/// The call failed, so nothing was written.
pub fn write(thread: Pid, words: impl Iterator<Item = (ProcessWord, u64)>) -> Result<Written> {
    let mut buffer = [0; RANGES * WORD_BYTES];
    let mut ranges = Ranges::new();
    let mut used = 0;
    // The number of bytes up to the end of each word.
    let mut ends = [0; RANGES];
    let mut words_in_call = 0;
    let mut kind = None;
    for ((word, value), end) in words.zip(&mut ends) {
        let is_instruction = Size::of(word.length).is_some();
        if *kind.get_or_insert(is_instruction) != is_instruction {
            break;
        }
        let (before, count) = (used, ranges.count);
        let value = value.to_le_bytes();
        let mut add = |bytes: &[u8]| {
            let room = buffer.get_mut(used..used + bytes.len()).ok_or(())?;
            room.copy_from_slice(bytes);
            used += bytes.len();
            let added = ranges.push(word.address, bytes.len());
            added.then_some(()).ok_or(())
        };
        let added = match value.get(..word.length) {
            Some(bytes) => replace(bytes, &mut add),
            None => Err(()),
        };
        if added.is_err() {
            (used, ranges.count) = (before, count);
            break;
        }
        *end = used;
        words_in_call += 1;
    }
    let local = [IoSlice::new(&buffer[..used])];
    let bytes = process_vm_writev(thread, &local, ranges.as_slice())?;
    let words = ends[..words_in_call].partition_point(|end| *end <= bytes);
    // The kernel returns the exact number of bytes, so at most one word was written in part.
    let begins = if words == 0 { 0 } else { ends[words - 1] };
    Ok(Written {
        words,
        touched: words + usize::from(begins < bytes),
    })
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};
    use std::sync::atomic::{AtomicU8, Ordering};

    use nix::errno::Errno;
    use static_keys::instruction::is_half_replaced;

    use super::*;

    /// Returns words of this process's memory, which stand for those of a monitor.
    fn words(memory: &[u8], places: &[(usize, usize)]) -> Vec<ProcessWord> {
        let word = |&(offset, length): &(usize, usize)| ProcessWord {
            address: memory[offset..offset + length].as_ptr() as usize,
            length,
        };
        places.iter().map(word).collect()
    }

    #[test]
    fn words_are_read_in_any_order_and_as_far_as_there_is_room() {
        let memory: Vec<u8> = (0..1 << 20)
            .map(|at: u32| (at * 7 + (at >> 8)) as u8)
            .collect();
        let value = |(offset, length): (usize, usize)| {
            let mut bytes = [0; 8];
            bytes[..length].copy_from_slice(&memory[offset..offset + length]);
            u64::from_le_bytes(bytes)
        };
        let near: Vec<_> = (0..300).map(|index| (5000 + 3 * index, 5)).collect();
        let far: Vec<_> = (0..100).map(|index| (8192 * index + 4090, 8)).collect();
        // Two words make a range of 504 bytes, and the last one has no room for a second word.
        let long: Vec<_> = (0..100).map(|index| (500 * index, 4)).collect();
        let back = [(4096, 4), (4000, 8), (4004, 1), (8100, 2), (4098, 2)];
        for (places, expected) in [
            (&near[..], WORDS),
            (&far, RANGES),
            (&long, 9),
            (&back, back.len()),
        ] {
            let words = words(&memory, places);
            let copies = Copies::read(Pid::this(), words.iter().copied()).expect("read");
            assert_eq!(copies.words(), expected, "{places:?}");
            for (index, place) in places.iter().enumerate() {
                let found = copies.value(index, place.1);
                assert_eq!(
                    found,
                    (index < expected).then(|| value(*place)),
                    "{place:?}"
                );
            }
        }
    }

    #[test]
    fn what_is_not_mapped_ends_the_words() {
        let mut memory = [0x11; 64];
        let mut words = words(&memory, &[(0, 4), (8, 4), (16, 4)]);
        words[1].address = 1 << 46;
        let copies = Copies::read(Pid::this(), words.iter().copied()).expect("in part");
        assert_eq!(copies.value(0, 4), Some(0x1111_1111));
        assert_eq!(copies.value(1, 4), None);
        assert_eq!(copies.value(2, 4), None);
        let missing = &words[1..];
        Copies::read(Pid::this(), missing.iter().copied())
            .err()
            .expect("not mapped");
        write(Pid::this(), missing.iter().copied().zip([2, 3])).expect_err("not mapped");
        let values = words.into_iter().zip([1, 2, 3]);
        let Written { words, touched } = write(Pid::this(), values).expect("in part");
        assert_eq!((words, touched), (1, 1));
        let first = std::hint::black_box(&mut memory)[..5].to_vec();
        assert_eq!(first, [1, 0, 0, 0, 0x11]);
    }

    #[test]
    fn instructions_take_three_ranges() {
        let memory = vec![0_u8; 4096];
        let places: Vec<_> = (0..40).map(|index| (index * 16, 5)).collect();
        let values = words(&memory, &places).into_iter().zip(1_u64..);
        let Written {
            words: count,
            touched,
        } = write(Pid::this(), values).expect("written");
        assert_eq!((count, touched), (RANGES / 3, RANGES / 3));
        for (index, chunk) in std::hint::black_box(&memory).chunks(16).enumerate() {
            let expected = if index < count { index as u8 + 1 } else { 0 };
            assert_eq!((chunk[0], &chunk[1..]), (expected, &[0; 15][..]));
        }
    }

    /// The variable with the process and the address to which the test's program writes.
    const WRITES: &str = "PATCHBAY_TEST_WRITES";
    /// The exit status of a writer that may not write.
    const NOT_ALLOWED: i32 = 77;
    const PAGE: usize = 4096;
    const INSTRUCTIONS: [[u8; 5]; 2] = [[0x0f, 0x1f, 0x44, 0, 0], [0xe9, 1, 2, 3, 4]];

    /// Writes one instruction and then the other to each of 21 pages from an address on, until it
    /// is killed.
    fn write_until_killed(process: Pid, start: usize) -> ! {
        let word = |page| ProcessWord {
            address: start + PAGE * page,
            length: 5,
        };
        let values =
            INSTRUCTIONS.map(|[a, b, c, d, e]| u64::from_le_bytes([a, b, c, d, e, 0, 0, 0]));
        loop {
            for value in values.into_iter().rev() {
                let words = (0..RANGES / 3).map(|page| (word(page), value));
                match write(process, words) {
                    Ok(written) => assert_eq!(written.words, RANGES / 3),
                    Err(Errno::EPERM) => std::process::exit(NOT_ALLOWED),
                    Err(error) => panic!("{error}"),
                }
            }
        }
    }

    #[test]
    fn a_call_that_is_killed_has_written_its_first_ranges() {
        let test = "a_call_that_is_killed_has_written_its_first_ranges";
        if let Ok(word) = std::env::var(WRITES) {
            let (process, start) = word.split_once(':').expect("two numbers");
            let process = Pid::from_raw(process.parse().expect("a process"));
            write_until_killed(process, start.parse().expect("an address"));
        }
        let bytes = PAGE * (RANGES / 3);
        let memory: Vec<AtomicU8> = (0..bytes).map(|_| AtomicU8::new(0)).collect();
        let mut partial = 0;
        for kills in 0..60 {
            for page in memory.chunks(PAGE) {
                for (to, byte) in page.iter().zip(INSTRUCTIONS[0]) {
                    to.store(byte, Ordering::SeqCst);
                }
            }
            let mut child = Command::new(std::env::current_exe().expect("a program"))
                .args([test, "--test-threads=1"])
                .env(
                    WRITES,
                    format!("{}:{}", Pid::this(), memory.as_ptr() as usize),
                )
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("this program");
            let last = memory.len() - PAGE;
            while memory[last].load(Ordering::SeqCst) == INSTRUCTIONS[0][0] {
                let ended = child.try_wait().expect("a child");
                if ended.is_some_and(|status| status.code() == Some(NOT_ALLOWED)) {
                    eprintln!("SKIPPED: kernel.yama.ptrace_scope forbids writing to the parent");
                    return;
                }
                assert_eq!(ended, None, "the writer has ended");
            }
            for _ in 0..97 * kills {
                std::hint::spin_loop();
            }
            child.kill().expect("a child");
            child.wait().expect("a child");
            let found = memory.chunks(PAGE).map(|page| {
                let mut bytes = [0; 5];
                for (byte, from) in bytes.iter_mut().zip(page) {
                    *byte = from.load(Ordering::SeqCst);
                }
                bytes
            });
            let mut runs: Vec<[u8; 5]> = found.collect();
            runs.dedup();
            let [off, on] = INSTRUCTIONS;
            let whole = runs
                .iter()
                .filter(|found| [off, on].contains(found))
                .count();
            let is_half = |found: &[u8; 5]| {
                is_half_replaced(found, &off, &on) && found[0] != off[0] && found[0] != on[0]
            };
            let half = runs.iter().filter(|found| is_half(found)).count();
            assert_eq!(whole + half, runs.len(), "{runs:02x?}");
            assert!(whole <= 2 && half <= 1, "{runs:02x?}");
            let is_inside = half == 0 || whole < 2 || is_half(&runs[1]);
            assert!(is_inside, "{runs:02x?}");
            partial += usize::from(runs.len() > 1);
        }
        println!("{partial} of 60 kills interrupted a call");
        assert!(partial > 0);
    }
}
