// SPDX-License-Identifier: Apache-2.0
//! The durable form of the claims and holds of a guest that outlives its service.
//!
//! ```text
//!  {"format":"patchbay-ledger","version":1,"sha256":"..."}      header, one line
//!  {"boot":"...","holds_of":"...","now":{...},"pending":{...}}  body, one line
//! ```
//!
//! The file is replaced as a whole and synced: before the first byte of a change, with the state as
//! it is and as it will be, and after its outcome. A service that starts reads the guest's counts
//! to learn which of the two came true, because a change is made for all its keys or for none.
//!
//! Probes of tracepoints are not kept. Holds on a tracepoint are bound to the probes that it has
//! when the file is read.

use std::fmt::Debug;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::time::{Instant, SystemTime};

use patchbay_guest::log_file::{LogPath, length};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::digest::hex;
use super::{Claims, expiry};
use crate::keys::holds::{Hold, KeyHolds};

const FORMAT: &str = "patchbay-ledger";
/// The version that this program writes, and the latest that it reads.
const VERSION: u32 = 1;
/// The largest file that is read and written, in bytes.
const MAX_BYTES: u64 = 256 << 20;

/// A place that keeps a ledger.
pub trait LedgerPlace: Debug + Send {
    /// Replaces the content. It is on the disk when this returns; if it fails, the earlier content
    /// is intact.
    ///
    /// # Errors
    /// An I/O error.
    fn replace(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Returns the name for messages.
    fn name(&self) -> String;
}

/// The ledger that a service starts with.
#[derive(Debug)]
pub struct LedgerFile {
    pub(in crate::keys) place: Box<dyn LedgerPlace>,
    pub(in crate::keys) found: Option<Ledger>,
}

/// The reason why a service does not start with a ledger.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// The file cannot be read, or one beside it cannot be made.
    #[error("the ledger {path} cannot be opened ({error}); repair its folder, or name another")]
    Io {
        /// Path of the file.
        path: String,
        /// The I/O error.
        error: io::Error,
    },
    /// A later version of this program has written the file.
    #[error(
        "the ledger {path} has version {found}, and this program reads up to {VERSION}; start the program that wrote it, or move the file away, which forgets the holds and claims on the guest's keys"
    )]
    Newer {
        /// Path of the file.
        path: String,
        /// Its version.
        found: u32,
    },
}

/// The reason why the content of a ledger cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(in crate::keys) enum Unusable {
    #[error("its version is {0}")]
    Newer(u32),
    #[error("{0}")]
    Torn(String),
}

#[derive(Serialize, Deserialize)]
struct Header {
    format: String,
    version: u32,
    #[serde(default)]
    sha256: String,
}

/// The content of a ledger.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::keys) struct Ledger {
    /// The boot that it belongs to.
    pub boot: String,
    /// The first part of the ids of its holds.
    pub holds_of: String,
    /// The state before a pending change.
    pub now: State,
    /// The change that is about to be made.
    pub pending: Option<Pending>,
}

/// Claims and holds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::keys) struct State {
    /// Number of the newest hold.
    pub newest_hold: u64,
    pub holds: Vec<SavedHolds>,
    pub claims: Claims,
}

/// A change that may or may not have been made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::keys) struct Pending {
    /// Counts before and after.
    pub counts: Vec<(SavedKey, i32, i32)>,
    /// The state after the change.
    pub after: State,
}

/// A key, as another process finds it again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::keys) struct SavedKey {
    /// "name" or "module:name".
    pub name: String,
    /// Guest-virtual address. A module that is loaded again usually has another.
    pub address: u64,
}

/// The holds on one key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::keys) struct SavedHolds {
    pub key: SavedKey,
    holds: Vec<SavedHold>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedHold {
    number: u64,
    holder: String,
    reason: String,
    references: u32,
    since: SystemTime,
    #[serde(with = "expiry")]
    expires: Option<(Instant, SystemTime)>,
    #[serde(default)]
    fired: bool,
}

impl SavedHolds {
    /// Copies the holds on a key.
    pub fn of(key: SavedKey, holds: &KeyHolds) -> Self {
        let saved = |hold: &Hold| SavedHold {
            number: hold.number,
            holder: hold.holder.to_string(),
            reason: hold.reason.to_string(),
            references: hold.references,
            since: hold.since,
            expires: hold.expires,
            fired: hold.fired,
        };
        Self {
            key,
            holds: holds.as_slice().iter().map(saved).collect(),
        }
    }

    /// Returns the holds.
    pub fn restored(&self) -> KeyHolds {
        let mut holds = KeyHolds::default();
        holds.set_name(&self.key.name.as_str().into());
        for hold in self.holds.iter().filter(|hold| hold.references > 0) {
            holds.take(&Hold {
                number: hold.number,
                holder: hold.holder.as_str().into(),
                reason: hold.reason.as_str().into(),
                references: hold.references,
                since: hold.since,
                expires: hold.expires,
                fired: hold.fired,
            });
        }
        holds
    }
}

impl Ledger {
    /// Returns the state that the guest is in. `count` reads the count of a key, or returns `None`
    /// if it is gone. The guest may have changed some of the keys itself, so most keys decide.
    pub fn settled(self, mut count: impl FnMut(&SavedKey) -> Option<i32>) -> State {
        let Some(pending) = self.pending else {
            return self.now;
        };
        let (mut made, mut not_made) = (0_usize, 0_usize);
        for (key, before, after) in pending.counts.iter().filter(|(_, one, other)| one != other) {
            let count = count(key);
            made += usize::from(count == Some(*after));
            not_made += usize::from(count == Some(*before));
        }
        match made > not_made {
            true => pending.after,
            false => self.now,
        }
    }

    /// Returns the bytes of the file.
    ///
    /// # Errors
    /// The content cannot be encoded, or is longer than what is read again.
    pub fn encode(&self) -> io::Result<Vec<u8>> {
        let body = serde_json::to_vec(self)?;
        let header = Header {
            format: FORMAT.to_owned(),
            version: VERSION,
            sha256: hex(&Sha256::digest(&body)),
        };
        let mut bytes = serde_json::to_vec(&header)?;
        bytes.push(b'\n');
        bytes.extend(body);
        bytes.push(b'\n');
        check_size(bytes.len() as u64)?;
        Ok(bytes)
    }

    /// Parses the bytes of a file.
    ///
    /// # Errors
    /// [`Unusable`].
    pub fn decode(bytes: &[u8]) -> Result<Self, Unusable> {
        let torn = |what: &str| Unusable::Torn(what.to_owned());
        let mut lines = bytes.splitn(2, |byte| *byte == b'\n');
        let (header, body) = (lines.next().unwrap_or_default(), lines.next());
        let header: Header =
            serde_json::from_slice(header).map_err(|_| torn("its first line is no header"))?;
        if header.format != FORMAT || header.version == 0 {
            return Err(torn("it is no ledger"));
        }
        if header.version > VERSION {
            return Err(Unusable::Newer(header.version));
        }
        let body = body.and_then(|body| body.strip_suffix(b"\n"));
        let body = body.ok_or_else(|| torn("it ends early"))?;
        if hex(&Sha256::digest(body)) != header.sha256 {
            return Err(torn("its checksum is wrong"));
        }
        serde_json::from_slice(body).map_err(|error| Unusable::Torn(error.to_string()))
    }
}

impl LedgerFile {
    /// Opens the ledger at `path`, which need not exist. A torn one is renamed to `NAME.1`.
    ///
    /// # Errors
    /// [`LedgerError`].
    pub fn open(path: &Path) -> Result<Self, LedgerError> {
        let shown = path.display().to_string();
        let io = |error| LedgerError::Io {
            path: shown.clone(),
            error,
        };
        let place = LogPath::new(path).map_err(io)?;
        let found = match read(&place).map_err(io)? {
            None => None,
            Some(bytes) => match Ledger::decode(&bytes) {
                Ok(ledger) => Some(ledger),
                Err(Unusable::Newer(found)) => {
                    return Err(LedgerError::Newer { path: shown, found });
                }
                Err(Unusable::Torn(why)) => {
                    place.set_aside().map_err(io)?;
                    tracing::error!(
                        path = shown,
                        why,
                        "the ledger is torn and was renamed to NAME.1; the holds and claims in it are forgotten, and their keys stay as they are"
                    );
                    None
                }
            },
        };
        Ok(Self {
            place: Box::new(place),
            found,
        })
    }
}

fn read(place: &LogPath) -> io::Result<Option<Vec<u8>>> {
    let file = match place.open(OFlags::RDONLY) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let bytes = length(&file)?.ok_or_else(|| io::Error::other("it is no regular file"))?;
    check_size(bytes)?;
    let mut content = Vec::new();
    File::take(file, MAX_BYTES).read_to_end(&mut content)?;
    Ok(Some(content))
}

fn check_size(bytes: u64) -> io::Result<()> {
    if bytes > MAX_BYTES {
        let message = format!("it has {bytes} bytes, expected at most {MAX_BYTES}");
        return Err(io::Error::other(message));
    }
    Ok(())
}

impl LedgerPlace for LogPath {
    fn replace(&mut self, bytes: &[u8]) -> io::Result<()> {
        Self::replace(self, bytes)
    }

    fn name(&self) -> String {
        self.path().display().to_string()
    }
}

#[cfg(test)]
mod tests;
