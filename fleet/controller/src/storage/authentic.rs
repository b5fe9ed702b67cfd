// SPDX-License-Identifier: Apache-2.0
//! Authenticates records, so that only a controller with the key can write them.
//!
//! An authenticated record has a line before its value:
//!
//! ```text
//! patchbay-hmac-sha256 MAC RUN
//! ```
//!
//! MAC is the HMAC-SHA-256 of the record's key in the store, RUN and the value. RUN is the random
//! text of the rollout, which distinguishes successive rollouts of the same name. The MAC of an
//! older record of the same rollout is also valid.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use patchbay_proto::text::hex;
use ring::hmac;

use crate::store::Write;
use crate::trusted::{self, Forbidden, NotTrusted};

/// The beginning of an authenticated record.
const BEGINNING: &[u8] = b"patchbay-hmac-sha256 ";
/// The first input of each MAC, which separates this use of a key from any other.
const PURPOSE: &[u8] = b"patchbay record";
const MIN_KEY_BYTES: usize = 32;
const MAX_KEY_BYTES: u64 = 4096;
const MAC_BYTES: usize = 32;

/// The record keys of the controllers. If there are none, records are not authenticated.
#[derive(Clone, Default)]
pub struct RecordKeys {
    /// The first one signs, and each of them verifies.
    keys: Arc<[hmac::Key]>,
    adopts: bool,
}

/// The reason why the keys cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum NoKey {
    #[error("the record key {} is not used: {error}", .path.display())]
    NotTrusted { path: PathBuf, error: NotTrusted },
    #[error(
        "the record key {} has {bytes} bytes, but must have at least {MIN_KEY_BYTES}; create one \
         with `openssl rand -out FILE {MIN_KEY_BYTES}`", .path.display()
    )]
    Short { path: PathBuf, bytes: usize },
}

/// The reason why a record does not pass verification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAuthentic {
    #[error("is authenticated, and this controller has no key; give it --record-key")]
    NoKey,
    #[error(
        "is not authenticated; if it was stored without --record-key, run the controller once with \
         --adopt-unsigned-records"
    )]
    Unsigned,
    #[error(
        "has a wrong HMAC: it was changed or moved, or the controller that wrote it has another \
         --record-key"
    )]
    Wrong,
    #[error("belongs to another rollout of the same name")]
    OtherRun,
}

/// A record that was verified.
#[derive(Clone, Copy, Debug)]
pub struct Opened<'e> {
    pub value: &'e [u8],
    /// The rollout's random text; `None` if the record is not authenticated.
    pub run: Option<&'e str>,
    /// True if the record need not be signed again: the first key has signed it, or there are no
    /// keys.
    pub is_current: bool,
}

impl RecordKeys {
    /// Reads the files of the keys. The first key signs, and each of them verifies.
    ///
    /// # Errors
    /// [`NoKey`].
    pub fn read(files: &[PathBuf]) -> Result<Self, NoKey> {
        let keys = files.iter().map(|path| read_key(path));
        Ok(Self {
            keys: keys.collect::<Result<_, _>>()?,
            adopts: false,
        })
    }

    /// Returns whether records that are not authenticated are accepted.
    pub fn adopts(&self) -> bool {
        self.adopts
    }

    /// Makes [`Self::open`] accept records that are not authenticated, so that they can be signed.
    #[must_use]
    pub fn adopting(mut self) -> Self {
        self.adopts = true;
        self
    }

    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Authenticates the values in the writes of a rollout with this random text.
    pub fn signed(&self, run: &str, mut writes: Vec<Write>) -> Vec<Write> {
        let Some(signing) = self.keys.first() else {
            return writes;
        };
        for write in &mut writes {
            if let Write::Put { key, value, .. } = write {
                let mac = hmac::sign(signing, &message(key, run, value));
                let line = [hex(mac.as_ref()).as_bytes(), b" ", run.as_bytes(), b"\n"].concat();
                *value = [BEGINNING, &line, value].concat();
            }
        }
        writes
    }

    /// Verifies a record, whose key in the store is `key`.
    ///
    /// # Errors
    /// [`NotAuthentic`].
    pub fn open<'e>(&self, key: &str, record: &'e [u8]) -> Result<Opened<'e>, NotAuthentic> {
        let Some(rest) = record.strip_prefix(BEGINNING) else {
            return match self.keys.is_empty() || self.adopts {
                true => Ok(Opened {
                    value: record,
                    run: None,
                    is_current: self.keys.is_empty(),
                }),
                false => Err(NotAuthentic::Unsigned),
            };
        };
        if self.keys.is_empty() {
            return Err(NotAuthentic::NoKey);
        }
        let (found, run, value) = parse(rest).ok_or(NotAuthentic::Wrong)?;
        let message = message(key, run, value);
        let is_of = |one: &hmac::Key| hmac::verify(one, &message, &found).is_ok();
        let by = self.keys.iter().position(is_of);
        Ok(Opened {
            value,
            run: Some(run),
            is_current: by.ok_or(NotAuthentic::Wrong)? == 0,
        })
    }
}

fn read_key(path: &Path) -> Result<hmac::Key, NoKey> {
    let path = path.to_owned();
    let key = match trusted::read(&path, Forbidden::All, MAX_KEY_BYTES) {
        Ok(key) => key,
        Err(error) => return Err(NoKey::NotTrusted { path, error }),
    };
    match key.len() {
        bytes if bytes < MIN_KEY_BYTES => Err(NoKey::Short { path, bytes }),
        _ => Ok(hmac::Key::new(hmac::HMAC_SHA256, &key)),
    }
}

/// Returns what the MAC of a record covers. The lengths make the boundaries between the parts
/// unambiguous.
fn message(key: &str, run: &str, value: &[u8]) -> Vec<u8> {
    let mut message = Vec::new();
    for part in [PURPOSE, key.as_bytes(), run.as_bytes(), value] {
        message.extend_from_slice(&(part.len() as u64).to_be_bytes());
        message.extend_from_slice(part);
    }
    message
}

/// Splits a record after [`BEGINNING`] into the MAC, the rollout's random text and the value.
fn parse(rest: &[u8]) -> Option<([u8; MAC_BYTES], &str, &[u8])> {
    let (digits, rest) = rest.split_at_checked(2 * MAC_BYTES)?;
    let mut mac = [0; MAC_BYTES];
    for (byte, pair) in mac.iter_mut().zip(digits.chunks_exact(2)) {
        let pair = std::str::from_utf8(pair).ok()?;
        *byte = u8::from_str_radix(pair, 16).ok()?;
    }
    let rest = rest.strip_prefix(b" ")?;
    let end = rest.iter().position(|&byte| byte == b'\n')?;
    let (run, value) = rest.split_at(end);
    Some((mac, std::str::from_utf8(run).ok()?, &value[1..]))
}
