// SPDX-License-Identifier: Apache-2.0

//! The file `memory`: RAM below the device gap, then RAM above it.
//!
//! The digest is the XXH64, with seed 0, of the number (little-endian, 8 bytes) and the content of
//! each page that is not all zeros, in order. It does not depend on which zeros are holes in the
//! file. It detects damage and does not authenticate, so no cryptographic hash is needed. Where the
//! CPU has no instructions for SHA-256, SHA-256 would take longer than all other work of starting a
//! copy.

use std::fs::File;
use std::hash::Hasher;
use std::os::unix::fs::FileExt;

use patchbay_guest::snapshot::{MemorySink, SaveError};
use rustix::fs::SeekFrom;
use rustix::io::Errno;
use twox_hash::XxHash64;

use super::SnapshotError;
use crate::memory::{DEVICE_GAP_END, GuestRam, PAGE_SIZE};

const PAGE: usize = PAGE_SIZE as usize;

/// Limit on the bytes that the sink gets at once.
const CHUNK: usize = 1 << 20;

static ZEROS: [u8; PAGE] = [0; PAGE];

#[derive(Default)]
struct MemoryDigest(XxHash64);

impl MemoryDigest {
    fn add(&mut self, offset: u64, page: &[u8]) {
        self.0.write(&(offset / PAGE_SIZE).to_le_bytes());
        self.0.write(page);
    }

    fn end(self) -> Vec<u8> {
        self.0.finish().to_le_bytes().to_vec()
    }
}

/// Passes the pages that are not all zeros to the sink, and returns the digest.
pub(crate) fn save(ram: &GuestRam, sink: &mut dyn MemorySink) -> Result<Vec<u8>, SaveError> {
    let mut digest = MemoryDigest::default();
    let mut part = vec![0; CHUNK];
    let low = ram.low_bytes();
    let regions = [(0, low, 0), (DEVICE_GAP_END, ram.high_bytes(), low)];
    for (address, bytes, place) in regions {
        let mut done = 0;
        while done < bytes {
            // A large part of the memory may be zeros, of which the sink gets nothing.
            sink.check()?;
            let length = usize::try_from(bytes - done).map_or(CHUNK, |left| left.min(CHUNK));
            let part = &mut part[..length];
            ram.read(address + done, part)
                .map_err(|error| SaveError::Unable(error.to_string()))?;
            let mut run = None;
            for at in (0..length).step_by(PAGE) {
                let page = &part[at..at + PAGE];
                if page == ZEROS {
                    if let Some(start) = run.take() {
                        sink.take(place + done + start as u64, part[start..at].to_vec())?;
                    }
                } else {
                    digest.add(place + done + at as u64, page);
                    run.get_or_insert(at);
                }
            }
            if let Some(start) = run {
                sink.take(place + done + start as u64, part[start..].to_vec())?;
            }
            done += length as u64;
        }
    }
    Ok(digest.end())
}

/// Compares the file with the digest.
pub(crate) fn verify(file: &File, bytes: u64, expected: &[u8]) -> Result<(), SnapshotError> {
    let read = |error: std::io::Error| SnapshotError::Open {
        path: super::MEMORY_FILE.into(),
        error,
    };
    let mut digest = MemoryDigest::default();
    let mut part = vec![0; CHUNK];
    let mut at = 0;
    while at < bytes {
        // A hole is skipped. A file system without holes reports that all is data.
        let data = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(data) => data.min(bytes) / PAGE_SIZE * PAGE_SIZE,
            Err(Errno::NXIO) => break,
            Err(error) => return Err(read(error.into())),
        };
        let end = match rustix::fs::seek(file, SeekFrom::Hole(data)) {
            Ok(end) => end.next_multiple_of(PAGE_SIZE).min(bytes),
            Err(error) => return Err(read(error.into())),
        };
        at = data;
        while at < end {
            let length = usize::try_from(end - at).map_or(CHUNK, |left| left.min(CHUNK));
            let part = &mut part[..length];
            file.read_exact_at(part, at).map_err(read)?;
            for page in part.chunks_exact(PAGE) {
                if page != ZEROS {
                    digest.add(at, page);
                }
                at += PAGE_SIZE;
            }
        }
        // A hole that was dug since the last call must not stop the loop.
        at = at.max(data + PAGE_SIZE);
    }
    match digest.end() == expected {
        true => Ok(()),
        false => Err(SnapshotError::MemoryChecksum),
    }
}

#[cfg(test)]
mod tests {
    use patchbay_guest::snapshot::SinkClosed;

    use super::*;

    /// A receiver that leaves after a number of checks.
    struct Leaving(u32);

    impl MemorySink for Leaving {
        fn take(&mut self, _: u64, _: Vec<u8>) -> Result<(), SinkClosed> {
            panic!("all pages are zeros");
        }

        fn check(&mut self) -> Result<(), SinkClosed> {
            self.0 = self.0.checked_sub(1).ok_or(SinkClosed)?;
            Ok(())
        }
    }

    #[test]
    fn a_receiver_that_leaves_is_noticed_between_pages_of_zeros() {
        let ram = GuestRam::new(8 << 20).unwrap();
        assert_eq!(save(&ram, &mut Leaving(7)), Err(SaveError::Closed));
        assert!(save(&ram, &mut Leaving(8)).is_ok());
    }
}
