// SPDX-License-Identifier: Apache-2.0

//! A disk for the guest (virtio 1.2, 5.2): a raw image, read-only or not.
//!
//! ```text
//!  ring ──▶ parsed, data copied out ──▶ within the limits? ──▶ host's file ──▶ data copied in, given back
//!           └──────── the device's lock ───────────────────┘  └─ no lock ─┘  └──── the lock again ─────┘
//! ```

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_ID_BYTES,
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
};

use super::Memory;
use super::device::{Device, HostDone, HostWork, Next};
use super::queue::{Broken, CHAIN_MAX, Chain, Ring};
use super::rate::{DiskLimits, Limiter};
use patchbay_service::limited;

const DEVICE_ID: u32 = 2;

/// Bytes in a sector, whatever the image's real block size.
const SECTOR: u64 = 512;

/// Bytes in a request's head: type, reserved, sector.
const HEAD: usize = 16;

/// Data segments that a request may have: a chain without head and status.
const SEGMENTS_MAX: u32 = CHAIN_MAX as u32 - 2;

/// Bytes of data in one request. Linux asks for 1.25 MiB at most unless told otherwise.
const DATA_MAX: usize = 16 << 20;

/// Requests answered in one turn without the host's file.
const BATCH: usize = 16;

/// Bytes of a buffer that is kept for the next request: what Linux asks for at most.
const KEPT_BUFFER: usize = 1280 << 10;

/// A disk image and how to use it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskConfig {
    /// The raw image: a file or a block device of whole 512-byte sectors.
    pub path: PathBuf,
    /// Whether the guest may only read it.
    pub read_only: bool,
    /// How much of the host's disk the guest gets.
    pub limits: DiskLimits,
}

/// Why a disk image cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// It cannot be opened.
    #[error("the disk image {path} cannot be opened{}: {source}; check the path and its permissions, or add ,readonly", if *.read_only { "" } else { " for writing" })]
    Open {
        /// The image.
        path: PathBuf,
        /// As configured.
        read_only: bool,
        /// What the host said.
        source: std::io::Error,
    },
    /// It is neither a file nor a block device.
    #[error("the disk image {0} is neither a file nor a block device; give a raw image")]
    NotAnImage(PathBuf),
    /// Its size is no multiple of 512.
    #[error(
        "the disk image {path} has {bytes} bytes, which is not a positive multiple of 512; give a raw image (qemu-img convert -O raw makes one)"
    )]
    Size {
        /// The image.
        path: PathBuf,
        /// Its size in bytes.
        bytes: u64,
    },
    /// Somebody else uses it.
    #[error(
        "the disk image {0} is in use, by another guest or twice by this one; end the other one, or give ,readonly everywhere"
    )]
    InUse(PathBuf),
}

/// The device.
#[derive(Debug)]
pub(super) struct Block {
    image: Arc<File>,
    sectors: u64,
    read_only: bool,
    id: [u8; VIRTIO_BLK_ID_BYTES as usize],
    /// The driver can flush, so writes need not be on the disk when they are done.
    flushes: bool,
    limiter: Limiter,
    /// A request that the limits hold back.
    held_back: Option<Chain>,
    /// The request that the host works on.
    under_way: Option<UnderWay>,
    /// Room for a request's data.
    buffer: Vec<u8>,
}

/// A request that the host works on.
#[derive(Debug)]
struct UnderWay {
    chain: Chain,
    /// Whether the data goes to the guest.
    reads: bool,
}

/// What becomes of a request.
enum Outcome {
    /// The host is to work on it; `true` if what it reads goes to the guest.
    Host(HostWork, bool),
    /// It succeeded and wrote so many bytes of data to the guest.
    Done(usize),
    /// It cannot be done as asked.
    Failed,
    /// The device does not know it.
    Unknown,
}

impl Block {
    /// Opens and locks the image; `index` is the disk's place among the guest's disks.
    pub fn open(config: &DiskConfig, index: usize) -> Result<Self, DiskError> {
        let path = || config.path.clone();
        let open = |source| DiskError::Open {
            path: path(),
            read_only: config.read_only,
            source,
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
        // A block device tells its size this way only.
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

    /// Begins a request. `None`: it is answered.
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
                Outcome::Done(length)
            }
            _ => Outcome::Unknown,
        };
        let (status, written) = match outcome {
            Outcome::Host(work, reads) => {
                self.under_way = Some(UnderWay { chain, reads });
                return Ok(Some(work));
            }
            Outcome::Done(written) => (VIRTIO_BLK_S_OK, written),
            Outcome::Failed => (VIRTIO_BLK_S_IOERR, 0),
            Outcome::Unknown => (VIRTIO_BLK_S_UNSUPP, 0),
        };
        answer(&chain, ring, memory, status, written)?;
        Ok(None)
    }

    /// Byte offset in the image of whole sectors that are all there.
    fn position(&self, sector: u64, length: usize) -> Option<u64> {
        let length = u64::try_from(length).ok()?;
        let sound = length.is_multiple_of(SECTOR) && length <= DATA_MAX as u64;
        let end = sector.checked_add(length / SECTOR)?;
        (sound && end <= self.sectors).then(|| sector * SECTOR)
    }

    /// The kept buffer, so long.
    fn take_buffer(&mut self, length: usize) -> Vec<u8> {
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.resize(length, 0);
        buffer
    }

    fn read(&mut self, sector: u64, length: usize) -> Outcome {
        let Some(position) = self.position(sector, length) else {
            return Outcome::Failed;
        };
        let mut data = self.take_buffer(length);
        let image = Arc::clone(&self.image);
        let work = move || HostDone {
            result: image.read_exact_at(&mut data, position),
            data,
        };
        Outcome::Host(Box::new(work), true)
    }

    fn write(&mut self, chain: &Chain, memory: &Memory, sector: u64) -> Result<Outcome, Broken> {
        let length = chain.readable_bytes().saturating_sub(HEAD);
        let (false, Some(position)) = (self.read_only, self.position(sector, length)) else {
            return Ok(Outcome::Failed);
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
        Ok(Outcome::Host(Box::new(work), false))
    }

    fn flush(&mut self) -> Outcome {
        if self.read_only {
            return Outcome::Done(0);
        }
        let image = Arc::clone(&self.image);
        let data = self.take_buffer(0);
        let work = move || HostDone {
            result: image.sync_data(),
            data,
        };
        Outcome::Host(Box::new(work), false)
    }
}

/// Gives a request back with its status in its last byte.
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

/// Refuses pipes and the like before they are opened, which could block.
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

    /// `struct virtio_blk_config`: capacity in sectors, size_max (not offered),
    /// seg_max; the rest belongs to features that are not offered.
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

    fn process(&mut self, rings: &mut [Option<Ring>], memory: &Memory) -> Result<Next, Broken> {
        let Some(Some(ring)) = rings.first_mut() else {
            return Ok(Next::Wait);
        };
        for _ in 0..BATCH {
            let chain = match self.held_back.take() {
                Some(chain) => chain,
                None => match ring.pop()? {
                    Some(chain) => chain,
                    None => return Ok(Next::Wait),
                },
            };
            // More than a request may have is refused, and so costs nothing.
            let bytes = chain
                .readable_bytes()
                .saturating_add(chain.writable_bytes());
            let bytes = bytes.min(DATA_MAX) as u64;
            if let Err(at) = self.limiter.admit(Instant::now(), bytes) {
                self.held_back = Some(chain);
                return Ok(Next::At(at));
            }
            if let Some(work) = self.begin(chain, ring, memory)? {
                return Ok(Next::Host(work));
            }
        }
        Ok(Next::Again)
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
                    "a disk image fails ({error}); the guest sees I/O errors"
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
