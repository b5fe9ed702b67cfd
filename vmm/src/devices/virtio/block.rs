// SPDX-License-Identifier: Apache-2.0

//! A virtio disk (virtio 1.2, 5.2) on a raw image, read-only or writable.
//!
//! ```text
//! ring ──▶ parse, copy data out ──▶ within the limits? ──▶ host's file ──▶ copy data in, give back
//!          └──────── device lock ────────────────────┘    └─ no lock ─┘  └──── device lock ────┘
//! ```

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use patchbay_guest::limited;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_ID_BYTES,
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
};

use super::Memory;
use super::device::{Device, HostDone, HostWork, NextTurn};
use super::queue::{Broken, CHAIN_MAX, Chain, Ring};
use super::rate::{DiskLimits, Limiter};

const DEVICE_ID: u32 = 2;

/// Size of a sector in bytes, regardless of the image's block size.
const SECTOR: u64 = 512;

/// Size of a request header in bytes: type, reserved, sector.
const HEAD: usize = 16;

/// Limit on the data segments of a request: a chain without header and status.
const SEGMENTS_MAX: u32 = CHAIN_MAX as u32 - 2;

/// Limit on the data of a request in bytes. Linux sends at most 1.25 MiB by default.
const DATA_MAX: usize = 16 << 20;

/// Limit on requests answered in one turn without I/O on the host's file.
const BATCH: usize = 16;

/// The largest buffer that is kept for the next request, in bytes: the largest request that Linux
/// sends by default.
const KEPT_BUFFER: usize = 1280 << 10;

/// A disk image and its options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskConfig {
    /// The raw image: a file or a block device of whole 512-byte sectors.
    pub path: PathBuf,
    /// Refuse writes of the guest.
    pub read_only: bool,
    /// Rate limits of the guest's requests.
    pub limits: DiskLimits,
}

/// A disk image cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names the fields")]
pub enum DiskError {
    #[error("the disk image {path} cannot be opened{}: {error}; check the path and its permissions, or add ,readonly", if *.read_only { "" } else { " for writing" })]
    Open {
        path: PathBuf,
        read_only: bool,
        error: std::io::Error,
    },
    #[error("the disk image {0} is neither a file nor a block device; give a raw image")]
    NotAnImage(PathBuf),
    #[error(
        "the disk image {path} has {bytes} bytes, which is not a positive multiple of 512; give a raw image (qemu-img convert -O raw makes one)"
    )]
    Size { path: PathBuf, bytes: u64 },
    #[error(
        "the disk image {0} is in use by another guest, or twice by this one; stop the other guest, or add ,readonly everywhere"
    )]
    InUse(PathBuf),
}

#[derive(Debug)]
pub(super) struct Block {
    image: Arc<File>,
    sectors: u64,
    read_only: bool,
    id: [u8; VIRTIO_BLK_ID_BYTES as usize],
    /// The driver accepted flush requests, so a write may complete before it is on the disk.
    flushes: bool,
    limiter: Limiter,
    /// A request delayed by the limits.
    held_back: Option<Chain>,
    /// The request that the host is working on.
    under_way: Option<UnderWay>,
    /// Buffer for a request's data.
    buffer: Vec<u8>,
}

/// A request that the host is working on.
#[derive(Debug)]
struct UnderWay {
    chain: Chain,
    /// True if the request's data is copied to the guest.
    reads: bool,
}

/// The next step of a request.
enum RequestOutcome {
    /// The host has to do this work. The flag is true if the data of the work is copied to the
    /// guest.
    Host(HostWork, bool),
    /// The request is complete. Holds the number of data bytes written to the guest.
    Done(usize),
    /// The request failed (VIRTIO_BLK_S_IOERR).
    Failed,
    /// The type of the request is unsupported (VIRTIO_BLK_S_UNSUPP).
    Unknown,
}

impl Block {
    /// Opens and locks the image. `index` numbers the guest's disks.
    pub fn open(config: &DiskConfig, index: usize) -> Result<Self, DiskError> {
        let path = || config.path.clone();
        let open = |error| DiskError::Open {
            path: path(),
            read_only: config.read_only,
            error,
        };
        check_kind(&config.path, open)?;
        let mut image = File::options()
            .read(true)
            .write(!config.read_only)
            .open(&config.path)
            .map_err(open)?;
        let how = match config.read_only {
            true => FlockOperation::NonBlockingLockShared,
            false => FlockOperation::NonBlockingLockExclusive,
        };
        match flock(&image, how) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(DiskError::InUse(path())),
            Err(error) => return Err(open(error.into())),
        }
        // The size of a block device is not in its metadata.
        let bytes = image.seek(SeekFrom::End(0)).map_err(open)?;
        if bytes == 0 || !bytes.is_multiple_of(SECTOR) {
            return Err(DiskError::Size {
                path: path(),
                bytes,
            });
        }
        let mut id = [0; VIRTIO_BLK_ID_BYTES as usize];
        for (byte, value) in id.iter_mut().zip(format!("patchbay-disk{index}").bytes()) {
            *byte = value;
        }
        Ok(Self {
            image: Arc::new(image),
            sectors: bytes / SECTOR,
            read_only: config.read_only,
            id,
            flushes: false,
            limiter: Limiter::new(config.limits, Instant::now()),
            held_back: None,
            under_way: None,
            buffer: vec![],
        })
    }

    /// Starts a request. Returns `None` if it is already answered.
    fn begin(
        &mut self,
        chain: Chain,
        ring: &mut Ring,
        memory: &Memory,
    ) -> Result<Option<HostWork>, Broken> {
        let mut head = [0; HEAD];
        chain.read_at(memory, 0, &mut head)?;
        let [a, b, c, d, _, _, _, _, sector @ ..] = head;
        let kind = u32::from_le_bytes([a, b, c, d]);
        let sector = u64::from_le_bytes(sector);
        let Some(room) = chain.writable_bytes().checked_sub(1) else {
            return Err(Broken("a disk request has no room for its status"));
        };
        let outcome = match kind {
            VIRTIO_BLK_T_IN => self.read(sector, room),
            VIRTIO_BLK_T_OUT => self.write(&chain, memory, sector)?,
            VIRTIO_BLK_T_FLUSH => self.flush(),
            VIRTIO_BLK_T_GET_ID => {
                let length = room.min(self.id.len());
                chain.write_at(memory, 0, &self.id[..length])?;
                RequestOutcome::Done(length)
            }
            _ => RequestOutcome::Unknown,
        };
        let (status, written) = match outcome {
            RequestOutcome::Host(work, reads) => {
                self.under_way = Some(UnderWay { chain, reads });
                return Ok(Some(work));
            }
            RequestOutcome::Done(written) => (VIRTIO_BLK_S_OK, written),
            RequestOutcome::Failed => (VIRTIO_BLK_S_IOERR, 0),
            RequestOutcome::Unknown => (VIRTIO_BLK_S_UNSUPP, 0),
        };
        answer(&chain, ring, memory, status, written)?;
        Ok(None)
    }

    /// Returns the byte offset in the image; `None` unless the request covers whole sectors inside
    /// the image.
    fn position(&self, sector: u64, length: usize) -> Option<u64> {
        let length = u64::try_from(length).ok()?;
        let sound = length.is_multiple_of(SECTOR) && length <= DATA_MAX as u64;
        let end = sector.checked_add(length / SECTOR)?;
        (sound && end <= self.sectors).then(|| sector * SECTOR)
    }

    /// Returns the kept buffer, resized to `length`.
    fn take_buffer(&mut self, length: usize) -> Vec<u8> {
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.resize(length, 0);
        buffer
    }

    fn read(&mut self, sector: u64, length: usize) -> RequestOutcome {
        let Some(position) = self.position(sector, length) else {
            return RequestOutcome::Failed;
        };
        let mut data = self.take_buffer(length);
        let image = Arc::clone(&self.image);
        let work = move || HostDone {
            result: image.read_exact_at(&mut data, position),
            data,
        };
        RequestOutcome::Host(Box::new(work), true)
    }

    fn write(
        &mut self,
        chain: &Chain,
        memory: &Memory,
        sector: u64,
    ) -> Result<RequestOutcome, Broken> {
        let length = chain.readable_bytes().saturating_sub(HEAD);
        let (false, Some(position)) = (self.read_only, self.position(sector, length)) else {
            return Ok(RequestOutcome::Failed);
        };
        let mut data = self.take_buffer(length);
        chain.read_at(memory, HEAD, &mut data)?;
        let image = Arc::clone(&self.image);
        let flushes = self.flushes;
        let work = move || {
            let mut result = image.write_all_at(&data, position);
            if !flushes {
                result = result.and_then(|()| image.sync_data());
            }
            HostDone { result, data }
        };
        Ok(RequestOutcome::Host(Box::new(work), false))
    }

    fn flush(&mut self) -> RequestOutcome {
        if self.read_only {
            return RequestOutcome::Done(0);
        }
        let image = Arc::clone(&self.image);
        let data = self.take_buffer(0);
        let work = move || HostDone {
            result: image.sync_data(),
            data,
        };
        RequestOutcome::Host(Box::new(work), false)
    }
}

/// Completes a request with its status in the last byte.
fn answer(
    chain: &Chain,
    ring: &mut Ring,
    memory: &Memory,
    status: u32,
    written: usize,
) -> Result<(), Broken> {
    let [status, ..] = status.to_le_bytes();
    let place = chain.writable_bytes().saturating_sub(1);
    chain.write_at(memory, place, &[status])?;
    ring.push(chain, written + 1)
}

/// Refuses pipes and other special files before they are opened, because that could block.
fn check_kind(path: &Path, open: impl Fn(std::io::Error) -> DiskError) -> Result<(), DiskError> {
    let kind = std::fs::metadata(path).map_err(open)?.file_type();
    match kind.is_file() || kind.is_block_device() {
        true => Ok(()),
        false => Err(DiskError::NotAnImage(path.to_owned())),
    }
}

impl Device for Block {
    fn id(&self) -> u32 {
        DEVICE_ID
    }

    fn features(&self) -> u64 {
        let read_only = u64::from(self.read_only) << VIRTIO_BLK_F_RO;
        read_only | 1 << VIRTIO_BLK_F_FLUSH | 1 << VIRTIO_BLK_F_SEG_MAX
    }

    fn queues(&self) -> usize {
        1
    }

    /// `struct virtio_blk_config`: capacity in sectors, size_max (not offered), seg_max. The other
    /// fields belong to features that are not offered.
    fn config(&self) -> Vec<u8> {
        let mut config = vec![];
        config.extend_from_slice(&self.sectors.to_le_bytes());
        config.extend_from_slice(&0_u32.to_le_bytes());
        config.extend_from_slice(&SEGMENTS_MAX.to_le_bytes());
        config
    }

    fn activate(&mut self, features: u64) {
        self.flushes = features & 1 << VIRTIO_BLK_F_FLUSH != 0;
    }

    fn reset(&mut self) {
        self.flushes = false;
        self.held_back = None;
        self.under_way = None;
    }

    fn is_busy(&self) -> bool {
        self.under_way.is_some()
    }

    fn unused(&self, _queue: usize) -> u16 {
        self.held_back.is_some().into()
    }

    fn process(&mut self, rings: &mut [Option<Ring>], memory: &Memory) -> Result<NextTurn, Broken> {
        let Some(Some(ring)) = rings.first_mut() else {
            return Ok(NextTurn::Wait);
        };
        for _ in 0..BATCH {
            let chain = match self.held_back.take() {
                Some(chain) => chain,
                None => match ring.pop()? {
                    Some(chain) => chain,
                    None => return Ok(NextTurn::Wait),
                },
            };
            // A request over the size limit is refused without I/O, so it costs no more tokens than
            // a request of the maximum size.
            let bytes = chain
                .readable_bytes()
                .saturating_add(chain.writable_bytes());
            let bytes = bytes.min(DATA_MAX) as u64;
            if let Err(at) = self.limiter.admit(Instant::now(), bytes) {
                self.held_back = Some(chain);
                return Ok(NextTurn::At(at));
            }
            if let Some(work) = self.begin(chain, ring, memory)? {
                return Ok(NextTurn::Host(work));
            }
        }
        Ok(NextTurn::Again)
    }

    fn finish(
        &mut self,
        done: HostDone,
        rings: &mut [Option<Ring>],
        memory: &Memory,
    ) -> Result<(), Broken> {
        let (Some(under_way), Some(Some(ring))) = (self.under_way.take(), rings.first_mut()) else {
            return Ok(());
        };
        let UnderWay { chain, reads } = under_way;
        let (status, written) = match done.result {
            Ok(()) if reads => {
                chain.write_at(memory, 0, &done.data)?;
                (VIRTIO_BLK_S_OK, done.data.len())
            }
            Ok(()) => (VIRTIO_BLK_S_OK, 0),
            Err(error) => {
                limited!(
                    warn,
                    "a disk image fails ({error}); the guest sees I/O errors; check the host's storage"
                );
                (VIRTIO_BLK_S_IOERR, 0)
            }
        };
        if done.data.capacity() <= KEPT_BUFFER {
            self.buffer = done.data;
        }
        answer(&chain, ring, memory, status, written)
    }
}
