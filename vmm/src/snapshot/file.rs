// SPDX-License-Identifier: Apache-2.0

//! The file `state`: a header and a body.
//!
//! | offset | bytes | content |
//! |---|---|---|
//! | 0 | 8 | `PBSNAPSH` |
//! | 8 | 4 | version of the format, little-endian |
//! | 12 | 4 | 0 |
//! | 16 | 8 | length of the body, little-endian |
//! | 24 | 32 | SHA-256 of the bytes before it and of the body |
//! | 56 | | body: [`MachineState`](super::MachineState) as a protobuf message |
//!
//! A field that is added to the message needs a new version, unless a monitor that does not know
//! the field restores the same guest.

use sha2::{Digest, Sha256};

use super::SnapshotError;

const MAGIC: &[u8; 8] = b"PBSNAPSH";
pub const VERSION: u32 = 2;
/// Bytes of the header that the checksum covers.
const CHECKED: usize = 24;
pub const HEADER: usize = CHECKED + 32;

fn checksum(head: &[u8], body: &[u8]) -> [u8; 32] {
    Sha256::new()
        .chain_update(head)
        .chain_update(body)
        .finalize()
        .into()
}

/// Puts the header before a body.
pub fn seal(body: &[u8]) -> Vec<u8> {
    let mut file = Vec::with_capacity(HEADER + body.len());
    file.extend_from_slice(MAGIC);
    file.extend_from_slice(&VERSION.to_le_bytes());
    file.extend_from_slice(&[0; 4]);
    file.extend_from_slice(&(body.len() as u64).to_le_bytes());
    let sum = checksum(&file, body);
    file.extend_from_slice(&sum);
    file.extend_from_slice(body);
    file
}

/// Checks the header. Returns the checksum and the body.
pub fn unseal(file: &[u8]) -> Result<([u8; 32], &[u8]), SnapshotError> {
    let found = file.len() as u64;
    let short = SnapshotError::Length {
        expected: HEADER as u64,
        found,
    };
    let (magic, rest) = file
        .split_first_chunk::<8>()
        .ok_or(SnapshotError::NotAState)?;
    if magic != MAGIC {
        return Err(SnapshotError::NotAState);
    }
    let Some((version, rest)) = rest.split_first_chunk() else {
        return Err(short);
    };
    let version = u32::from_le_bytes(*version);
    if version != VERSION {
        return Err(SnapshotError::Version(version));
    }
    let Some((_, rest)) = rest.split_first_chunk::<4>() else {
        return Err(short);
    };
    let Some((length, rest)) = rest.split_first_chunk() else {
        return Err(short);
    };
    let Some((sum, body)) = rest.split_first_chunk::<32>() else {
        return Err(short);
    };
    let expected = u64::from_le_bytes(*length).saturating_add(HEADER as u64);
    if expected != found {
        return Err(SnapshotError::Length { expected, found });
    }
    if checksum(&file[..CHECKED], body) != *sum {
        return Err(SnapshotError::Checksum);
    }
    Ok((*sum, body))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sealed_body_is_returned() {
        for body in [&b""[..], b"body"] {
            let file = seal(body);
            assert_eq!(unseal(&file).unwrap().1, body);
        }
    }

    #[test]
    fn every_changed_bit_is_found() {
        let file = seal(&[0x5a; 100]);
        for bit in 0..8 * file.len() {
            let mut changed = file.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            let error = unseal(&changed).expect_err("changed");
            match bit / 8 {
                0..8 => assert!(matches!(error, SnapshotError::NotAState), "{bit}: {error}"),
                8..12 => assert!(matches!(error, SnapshotError::Version(_)), "{bit}: {error}"),
                16..24 => assert!(matches!(error, SnapshotError::Length { .. }), "{bit}"),
                _ => assert!(matches!(error, SnapshotError::Checksum), "{bit}: {error}"),
            }
        }
    }

    #[test]
    fn every_truncation_and_an_extension_are_found() {
        let mut file = seal(b"body");
        for length in 0..file.len() {
            let error = unseal(&file[..length]).expect_err("truncated");
            let expected = match length {
                0..8 => matches!(error, SnapshotError::NotAState),
                _ => matches!(error, SnapshotError::Length { .. }),
            };
            assert!(expected, "{length}: {error}");
        }
        file.push(0);
        assert!(matches!(unseal(&file), Err(SnapshotError::Length { .. })));
    }
}
