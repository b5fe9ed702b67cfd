// SPDX-License-Identifier: Apache-2.0
//! Extracts the ELF image from a file: unpacks bzImages and compressed files.
//!
//! The layout of a bzImage is the Linux/x86 boot protocol (Documentation/arch/x86/boot.rst); the
//! compressed payload's last four bytes are its unpacked size (scripts/Makefile.lib,
//! `size_append`), except for gzip, whose own trailer already holds that size.

use std::borrow::Cow;
use std::io::Read;

use serde::Serialize;

/// The maximum size to which a compressed image may unpack, in bytes.
pub const MAX_UNPACKED: u64 = 1 << 30;

/// The memory limit for the LZMA dictionaries, in KiB: `scripts/xz_wrap.sh` asks for up to 128 MiB.
const MAX_LZMA_KIB: u32 = 256 * 1024;

/// The maximum unpacked size of one block of the legacy LZ4 frame (`lz4 -l`), in bytes.
const LZ4_LEGACY_BLOCK: usize = 8 << 20;

const ELF_MAGIC: &[u8] = b"\x7fELF";

/// The compression format of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Compression {
    /// Not packed.
    None,
    /// RFC 1952.
    Gzip,
    /// The .xz container, with or without the x86 branch filter.
    Xz,
    /// The .lzma ("alone") container.
    Lzma,
    /// RFC 8878.
    Zstd,
    /// The legacy frame, which is what `lz4 -l` writes for the kernel.
    Lz4,
    /// bzip2.
    Bzip2,
}

/// The reason why a file yields no ELF image.
#[derive(Debug, thiserror::Error)]
pub enum ContainerError {
    /// The file is neither ELF nor bzImage, and is not compressed in a known format.
    #[error(
        "not a kernel image: it starts with {0}; give a vmlinux, a bzImage (vmlinuz) or a module (.ko)"
    )]
    Unknown(String),
    /// A PE file without the Linux boot header.
    #[error(
        "a PE file without the Linux boot header: if it is a unified kernel image, take the kernel out first with \
         `objcopy -O binary --only-section=.linux FILE vmlinuz`"
    )]
    Pe,
    /// The boot protocol is too old to give the location of the payload.
    #[error(
        "boot protocol {}.{:02} is older than 2.08 (Linux 2.6.26) and does not say where the kernel is; give its vmlinux",
        .0 >> 8,
        .0 & 0xff
    )]
    OldProtocol(u16),
    /// The header points past the end of the file.
    #[error(
        "truncated bzImage: its header places the kernel at {start:#x}..{end:#x}, the file has {size:#x} bytes; copy it again"
    )]
    Truncated {
        /// Offset of the packed kernel.
        start: u64,
        /// End of the packed kernel.
        end: u64,
        /// Size of the file.
        size: u64,
    },
    /// The kernel uses a compression format that this crate does not support.
    #[error(
        "the kernel is packed with {0}, which is not supported; unpack it first (scripts/extract-vmlinux in the kernel tree)"
    )]
    Unsupported(&'static str),
    /// The payload's first bytes are unknown.
    #[error(
        "the kernel in this bzImage is packed in an unknown way (it starts with {0}); unpack it first (scripts/extract-vmlinux in the kernel tree)"
    )]
    UnknownCompression(String),
    /// The decompressor failed.
    #[error(
        "cannot unpack the {compression:?} data: {reason}; the file is damaged or truncated, copy it again"
    )]
    Damaged {
        /// The compression format of the data.
        compression: Compression,
        /// The message of the decompressor.
        reason: String,
    },
    /// The unpacked image is larger than [`MAX_UNPACKED`].
    #[error("the image unpacks to more than {} MiB: refused", MAX_UNPACKED >> 20)]
    TooLarge,
    /// The unpacked data is not an ELF file.
    #[error(
        "the unpacked image is not an ELF file: it starts with {0}; only kernels for x86 with an ELF payload (2.6.30 and later) can be read"
    )]
    NotElf(String),
}

/// An ELF image and the packaging of its file.
#[derive(Debug)]
pub struct Unpacked<'data> {
    /// The image was in a bzImage.
    pub bzimage: bool,
    /// The compression format of the file.
    pub compression: Compression,
    /// The ELF file, perhaps followed by other data (the relocations of a bzImage).
    pub elf: Cow<'data, [u8]>,
}

/// Finds the ELF image in a file.
///
/// # Errors
/// [`ContainerError`].
pub fn unpack(file: &[u8]) -> Result<Unpacked<'_>, ContainerError> {
    if file.starts_with(ELF_MAGIC) {
        return Ok(Unpacked {
            bzimage: false,
            compression: Compression::None,
            elf: Cow::Borrowed(file),
        });
    }
    if file.get(0x202..0x206) == Some(b"HdrS") {
        let (compression, elf) = unpack_payload(payload(file)?)?;
        return Ok(Unpacked {
            bzimage: true,
            compression,
            elf,
        });
    }
    if file.starts_with(b"MZ") {
        return Err(ContainerError::Pe);
    }
    match sniff(file)? {
        None => Err(ContainerError::Unknown(first_bytes(file))),
        Some(compression) => {
            let data = decompress(compression, file)?;
            require_elf(&data)?;
            Ok(Unpacked {
                bzimage: false,
                compression,
                elf: Cow::Owned(data),
            })
        }
    }
}

/// Returns the compressed kernel of a bzImage: `payload_offset` and `payload_length` count from the
/// end of the setup sectors.
fn payload(file: &[u8]) -> Result<&[u8], ContainerError> {
    let truncated = |start, end| ContainerError::Truncated {
        start,
        end,
        size: file.len() as u64,
    };
    let header: &[u8; 0x250] = file.first_chunk().ok_or_else(|| truncated(0, 0x250))?;
    let protocol = u16::from_le_bytes([header[0x206], header[0x207]]);
    if protocol < 0x208 {
        return Err(ContainerError::OldProtocol(protocol));
    }
    // The boot protocol defines that 0 setup sectors means 4.
    let setup_sectors = match header[0x1f1] {
        0 => 4,
        sectors => u64::from(sectors),
    };
    let word = |at: usize| {
        u64::from(u32::from_le_bytes([
            header[at],
            header[at + 1],
            header[at + 2],
            header[at + 3],
        ]))
    };
    let start = (setup_sectors + 1) * 512 + word(0x248);
    let end = start + word(0x24c);
    usize::try_from(start)
        .ok()
        .zip(usize::try_from(end).ok())
        .and_then(|(start, end)| file.get(start..end))
        .ok_or_else(|| truncated(start, end))
}

fn unpack_payload(payload: &[u8]) -> Result<(Compression, Cow<'_, [u8]>), ContainerError> {
    if payload.starts_with(ELF_MAGIC) {
        return Ok((Compression::None, Cow::Borrowed(payload)));
    }
    let compression =
        sniff(payload)?.ok_or_else(|| ContainerError::UnknownCompression(first_bytes(payload)))?;
    let stream = match compression {
        Compression::Gzip => payload,
        _ => &payload[..payload.len().saturating_sub(4)],
    };
    let data = decompress(compression, stream)?;
    require_elf(&data)?;
    Ok((compression, Cow::Owned(data)))
}

fn require_elf(data: &[u8]) -> Result<(), ContainerError> {
    if data.starts_with(ELF_MAGIC) {
        Ok(())
    } else {
        Err(ContainerError::NotElf(first_bytes(data)))
    }
}

/// Returns the compression format of the data, recognised by its first bytes. The magic numbers are
/// those of lib/decompress.c.
fn sniff(data: &[u8]) -> Result<Option<Compression>, ContainerError> {
    Ok(match data {
        [0x1f, 0x8b, ..] => Some(Compression::Gzip),
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Some(Compression::Xz),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Some(Compression::Zstd),
        [0x02, 0x21, 0x4c, 0x18, ..] => Some(Compression::Lz4),
        [b'B', b'Z', b'h', ..] => Some(Compression::Bzip2),
        [0x5d, 0x00, 0x00, ..] => Some(Compression::Lzma),
        [0x89, b'L', b'Z', b'O', ..] => return Err(ContainerError::Unsupported("LZO")),
        _ => None,
    })
}

fn decompress(compression: Compression, data: &[u8]) -> Result<Vec<u8>, ContainerError> {
    let damaged = |reason: String| ContainerError::Damaged {
        compression,
        reason,
    };
    match compression {
        Compression::None => read_bounded(compression, data),
        Compression::Gzip => read_bounded(compression, flate2::read::GzDecoder::new(data)),
        Compression::Bzip2 => read_bounded(compression, bzip2::read::BzDecoder::new(data)),
        Compression::Xz => read_bounded(
            compression,
            lzma_rust2::XzReader::new_mem_limit(data, false, MAX_LZMA_KIB),
        ),
        Compression::Lzma => read_bounded(
            compression,
            lzma_rust2::LzmaReader::new_mem_limit(data, MAX_LZMA_KIB, None)
                .map_err(|error| damaged(error.to_string()))?,
        ),
        Compression::Zstd => read_bounded(
            compression,
            ruzstd::decoding::StreamingDecoder::new(data)
                .map_err(|error| damaged(error.to_string()))?,
        ),
        Compression::Lz4 => decompress_lz4_legacy(data),
    }
}

fn read_bounded(compression: Compression, reader: impl Read) -> Result<Vec<u8>, ContainerError> {
    let mut unpacked = Vec::new();
    reader
        .take(MAX_UNPACKED + 1)
        .read_to_end(&mut unpacked)
        .map_err(|error| ContainerError::Damaged {
            compression,
            reason: error.to_string(),
        })?;
    if unpacked.len() as u64 > MAX_UNPACKED {
        return Err(ContainerError::TooLarge);
    }
    Ok(unpacked)
}

/// Unpacks the legacy LZ4 frame: a magic number, then blocks of {u32 packed size, data}, none of
/// which unpacks to more than 8 MiB.
fn decompress_lz4_legacy(data: &[u8]) -> Result<Vec<u8>, ContainerError> {
    let damaged = |reason: String| ContainerError::Damaged {
        compression: Compression::Lz4,
        reason,
    };
    let mut rest = data.get(4..).unwrap_or_default();
    let mut unpacked = Vec::new();
    let mut block = vec![0; LZ4_LEGACY_BLOCK];
    while let Some((size, after)) = rest.split_first_chunk() {
        let size = u32::from_le_bytes(*size) as usize;
        let packed = after.get(..size).ok_or_else(|| {
            damaged(format!(
                "a block of {size} bytes where {} are left",
                after.len()
            ))
        })?;
        let length = lz4_flex::block::decompress_into(packed, &mut block)
            .map_err(|error| damaged(error.to_string()))?;
        if (unpacked.len() + length) as u64 > MAX_UNPACKED {
            return Err(ContainerError::TooLarge);
        }
        unpacked.extend_from_slice(&block[..length]);
        rest = &after[size..];
    }
    if rest.is_empty() {
        Ok(unpacked)
    } else {
        Err(damaged(format!(
            "{} bytes left after the last block",
            rest.len()
        )))
    }
}

/// Formats the first bytes of a file for an error message.
fn first_bytes(data: &[u8]) -> String {
    if data.is_empty() {
        return "nothing (it is empty)".to_owned();
    }
    let bytes: Vec<String> = data
        .iter()
        .take(8)
        .map(|byte| format!("{byte:02x}"))
        .collect();
    bytes.join(" ")
}
