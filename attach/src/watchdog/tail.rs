// SPDX-License-Identifier: Apache-2.0
//! The messages of a stop, which the watchdog reads only after the attacher's end.
//!
//! A message in the pipe wakes the watchdog, which takes longer than the writes of a small change.
//! So the messages of a stop are written to a file in memory, and go into the pipe with the first
//! message after the stop. The file begins with the number of bytes that were in the pipe before
//! it, and the number of bytes that follow.

use std::fs::File;
use std::io::{self, Cursor, Read, Write};
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;

use crate::rollback::array;

/// The size of the two numbers.
const HEADER: usize = 16;
/// The maximum number of bytes in the file. The longest message names 4096 threads.
const MAX: usize = 64 << 10;

/// The attacher's end of the messages.
#[derive(Debug)]
pub struct Tail {
    file: File,
    /// The messages in the file.
    unsent: Vec<u8>,
    /// The number of bytes in the pipe before them.
    sent: u64,
}

impl Tail {
    /// Creates an empty file.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn new() -> io::Result<Self> {
        let create = |more| memfd_create("watchdog", MemfdFlags::CLOEXEC | more);
        // A host may refuse files without this flag (`vm.memfd_noexec`). Linux has it since 6.3.
        let file = match create(MemfdFlags::NOEXEC_SEAL) {
            Err(Errno::INVAL) => create(MemfdFlags::empty()),
            created => created,
        }?;
        Ok(Self {
            file: file.into(),
            unsent: Vec::with_capacity(4096),
            sent: 0,
        })
    }

    /// Returns the file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Returns whether a message fits into the file.
    pub fn has_room(&self, message: &[u8]) -> bool {
        self.unsent.len() + message.len() <= MAX
    }

    /// Adds a message, for which there is room, to the file.
    ///
    /// # Errors
    /// The file cannot be written, and the message may be missing.
    pub fn add(&mut self, message: &[u8]) -> io::Result<()> {
        let end = HEADER + self.unsent.len();
        self.file.write_all_at(message, end as u64)?;
        self.unsent.extend_from_slice(message);
        let length = self.unsent.len() as u64;
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(&self.sent.to_le_bytes());
        header[8..].copy_from_slice(&length.to_le_bytes());
        // The message counts from here on. A signal does not interrupt a write within a page.
        self.file.write_all_at(&header, 0)
    }

    /// Writes the messages in the file and another one to the pipe.
    ///
    /// # Errors
    /// The pipe cannot be written.
    pub fn send(&mut self, pipe: &mut impl Write, message: &[u8]) -> io::Result<()> {
        self.unsent.extend_from_slice(message);
        let written = pipe.write_all(&self.unsent);
        self.sent += self.unsent.len() as u64;
        self.unsent.clear();
        written
    }
}

/// The watchdog's end of the messages: those in the pipe, and after the attacher's end those in the
/// file that are not in the pipe.
pub struct Messages<P> {
    pipe: P,
    /// The number of bytes that were read from the pipe.
    read: u64,
    /// `None` after the attacher's end.
    tail: Option<File>,
    rest: Cursor<Vec<u8>>,
}

impl<P: Read> Messages<P> {
    pub fn new(pipe: P, tail: File) -> Self {
        Self {
            pipe,
            read: 0,
            tail: Some(tail),
            rest: Cursor::default(),
        }
    }
}

impl<P: Read> Read for Messages<P> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if let Some(tail) = &self.tail {
            let count = self.pipe.read(buffer)?;
            if count > 0 || buffer.is_empty() {
                self.read += count as u64;
                return Ok(count);
            }
            self.rest = Cursor::new(rest(tail, self.read)?);
            self.tail = None;
        }
        self.rest.read(buffer)
    }
}

/// Returns the bytes of the file that follow the first `read` bytes of all messages. An attacher
/// that was killed while it wrote to the pipe leaves a part of the file's messages there.
fn rest(tail: &File, read: u64) -> io::Result<Vec<u8>> {
    if tail.metadata()?.len() < HEADER as u64 {
        return Ok(Vec::new());
    }
    let mut header = [0; HEADER];
    tail.read_exact_at(&mut header, 0)?;
    let mut numbers = &header[..];
    let [sent, length] = [array(&mut numbers)?, array(&mut numbers)?].map(u64::from_le_bytes);
    let Some(from) = read.checked_sub(sent).filter(|from| *from < length) else {
        return Ok(Vec::new());
    };
    let left = usize::try_from(length - from)
        .ok()
        .filter(|left| *left <= MAX);
    let mut rest = vec![0; left.ok_or(io::ErrorKind::InvalidData)?];
    tail.read_exact_at(&mut rest, HEADER as u64 + from)?;
    Ok(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the messages if this is in the pipe when the attacher ends.
    fn after(pipe: &[u8], tail: &Tail) -> Vec<u8> {
        let file = tail.file().try_clone().expect("a descriptor");
        let mut messages = Vec::new();
        let read = Messages::new(pipe, file).read_to_end(&mut messages);
        read.expect("readable");
        messages
    }

    #[test]
    fn messages_in_the_file_follow_those_in_the_pipe() {
        let mut tail = Tail::new().expect("memory");
        let mut pipe = Vec::new();
        assert_eq!(after(&pipe, &tail), b"");
        for _ in 0..3 {
            tail.send(&mut pipe, b"first ").expect("sent");
            let before = [&pipe[..], b"stop "].concat();
            tail.add(b"stop ").expect("room");
            assert_eq!(after(&pipe, &tail), before);
            tail.add(b"write ").expect("room");
            let all = [&before[..], b"write "].concat();
            assert_eq!(after(&pipe, &tail), all);
            let sent = pipe.len();
            tail.send(&mut pipe, b"run ").expect("sent");
            assert_eq!(pipe, [&all[..], b"run "].concat());
            assert_eq!(after(&pipe, &tail), pipe, "nothing is read twice");
            // The attacher was killed while it wrote to the pipe.
            for end in sent..pipe.len() {
                let expected = &pipe[..end.max(all.len())];
                assert_eq!(after(&pipe[..end], &tail), expected);
            }
        }
    }

    #[test]
    fn a_message_counts_only_when_the_numbers_say_so() {
        let mut tail = Tail::new().expect("memory");
        let mut pipe = Vec::new();
        tail.add(b"old").expect("room");
        tail.send(&mut pipe, b"sent").expect("sent");
        // The attacher was killed between the two writes of a message.
        tail.file()
            .write_all_at(b"new", HEADER as u64)
            .expect("room");
        assert_eq!(after(&pipe, &tail), b"oldsent");
        tail.add(&[0; MAX]).expect("room");
        assert!(tail.has_room(b"") && !tail.has_room(b"x"));
        assert_eq!(after(&pipe, &tail).len(), pipe.len() + MAX);
    }

    #[test]
    fn numbers_that_cannot_be_are_refused() {
        let tail = Tail::new().expect("memory");
        for (numbers, is_wrong) in [
            ([0, u64::MAX], true),
            ([0, 1], true),
            ([1, u64::MAX], false),
            ([0, 0], false),
        ] {
            let header = numbers.map(u64::to_le_bytes).concat();
            tail.file().write_all_at(&header, 0).expect("room");
            assert_eq!(rest(tail.file(), 0).is_err(), is_wrong, "{numbers:?}");
        }
    }
}
