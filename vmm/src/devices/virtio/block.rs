// SPDX-License-Identifier: Apache-2.0

//! A disk for the guest (virtio 1.2, 5.2): a raw image, read-only or not.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_ID_BYTES,
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
};
use vm_memory::Bytes;

use super::Memory;
use super::device::Device;
use super::queue::{Broken, CHAIN_MAX, Chain, Ring};

const DEVICE_ID: u32 = 2;

/// Bytes in a sector, whatever the image's real block size.
const SECTOR: u64 = 512;

/// Bytes in a request's head: type, reserved, sector.
const HEAD: usize = 16;

/// Data segments that a request may have: a chain without head and status.
const SEGMENTS_MAX: u32 = CHAIN_MAX as u32 - 2;

/// Bytes of data in one request. Linux asks for 1.25 MiB at most unless told otherwise.
const DATA_MAX: usize = 16 << 20;

/// Requests carried out in one batch.
const BATCH: usize = 16;

/// A disk image and how to use it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskConfig {
    /// The raw image: a file or a block device of whole 512-byte sectors.
    pub path: PathBuf,
    /// Whether the guest may only read it.
    pub read_only: bool,
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
    image: File,
    sectors: u64,
    read_only: bool,
    id: [u8; VIRTIO_BLK_ID_BYTES as usize],
    /// The driver can flush, so writes need not be on the disk when they are done.
    flushes: bool,
    /// A host error was logged: a broken disk does not fill the host's log.
    logged: bool,
}

/// What a request came to.
enum Outcome {
    /// It succeeded and wrote so many bytes of data to the guest.
    Done(usize),
    /// It cannot be done as asked, or the host's disk failed.
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
            image,
            sectors: bytes / SECTOR,
            read_only: config.read_only,
            id,
            flushes: false,
            logged: false,
        })
    }

    fn carry_out(&mut self, chain: &Chain, memory: &Memory) -> Result<usize, Broken> {
        let mut head = [0; HEAD];
        chain.read_at(memory, 0, &mut head)?;
        let [a, b, c, d, _, _, _, _, sector @ ..] = head;
        let kind = u32::from_le_bytes([a, b, c, d]);
        let sector = u64::from_le_bytes(sector);
        let Some(room) = chain.writable_bytes().checked_sub(1) else {
            return Err(Broken("a disk request has no room for its status"));
        };
        let outcome = match kind {
            VIRTIO_BLK_T_IN => self.read(chain, memory, sector, room),
            VIRTIO_BLK_T_OUT => self.write(chain, memory, sector),
            VIRTIO_BLK_T_FLUSH => self.flush(),
            VIRTIO_BLK_T_GET_ID => {
                let length = room.min(self.id.len());
                chain.write_at(memory, 0, &self.id[..length])?;
                Outcome::Done(length)
            }
            _ => Outcome::Unknown,
        };
        let (status, written) = match outcome {
            Outcome::Done(written) => (VIRTIO_BLK_S_OK, written),
            Outcome::Failed => (VIRTIO_BLK_S_IOERR, 0),
            Outcome::Unknown => (VIRTIO_BLK_S_UNSUPP, 0),
        };
        let [status, ..] = status.to_le_bytes();
        chain.write_at(memory, room, &[status])?;
        Ok(written + 1)
    }

    /// Byte offset in the image of whole sectors that are all there.
    fn position(&self, sector: u64, length: usize) -> Option<u64> {
        let length = u64::try_from(length).ok()?;
        let sound = length.is_multiple_of(SECTOR) && length <= DATA_MAX as u64;
        let end = sector.checked_add(length / SECTOR)?;
        (sound && end <= self.sectors).then(|| sector * SECTOR)
    }

    fn read(&mut self, chain: &Chain, memory: &Memory, sector: u64, length: usize) -> Outcome {
        let (Some(position), Ok(pieces)) = (
            self.position(sector, length),
            chain.writable_pieces(0, length),
        ) else {
            return Outcome::Failed;
        };
        if let Err(error) = self.image.seek(SeekFrom::Start(position)) {
            return self.failed(&error);
        }
        for piece in pieces {
            let image = &mut self.image;
            if let Err(error) = memory.read_exact_volatile_from(piece.address, image, piece.length)
            {
                return self.failed(&error);
            }
        }
        Outcome::Done(length)
    }

    fn write(&mut self, chain: &Chain, memory: &Memory, sector: u64) -> Outcome {
        let length = chain.readable_bytes().saturating_sub(HEAD);
        let (false, Some(position), Ok(pieces)) = (
            self.read_only,
            self.position(sector, length),
            chain.readable_pieces(HEAD, length),
        ) else {
            return Outcome::Failed;
        };
        if let Err(error) = self.image.seek(SeekFrom::Start(position)) {
            return self.failed(&error);
        }
        for piece in pieces {
            let image = &mut self.image;
            if let Err(error) = memory.write_all_volatile_to(piece.address, image, piece.length) {
                return self.failed(&error);
            }
        }
        if self.flushes {
            Outcome::Done(0)
        } else {
            self.flush()
        }
    }

    fn flush(&mut self) -> Outcome {
        if self.read_only {
            return Outcome::Done(0);
        }
        match self.image.sync_data() {
            Ok(()) => Outcome::Done(0),
            Err(error) => self.failed(&error),
        }
    }

    fn failed(&mut self, error: &dyn std::error::Error) -> Outcome {
        if !std::mem::replace(&mut self.logged, true) {
            tracing::warn!("a disk image fails ({error}); the guest sees I/O errors");
        }
        Outcome::Failed
    }
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
    }

    fn process(&mut self, rings: &mut [Option<Ring>], memory: &Memory) -> Result<bool, Broken> {
        let Some(Some(ring)) = rings.first_mut() else {
            return Ok(false);
        };
        for _ in 0..BATCH {
            let Some(chain) = ring.pop()? else {
                return Ok(false);
            };
            let written = self.carry_out(&chain, memory)?;
            ring.push(&chain, written)?;
        }
        Ok(true)
    }
}
