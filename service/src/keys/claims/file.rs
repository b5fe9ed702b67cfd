// SPDX-License-Identifier: Apache-2.0
//! The durable form of the claims and holds of a guest that outlives its service.
//!
//! ```text
//!  {"format":"patchbay-ledger","version":2,"sha256":"..."}      header, one line
//!  {"boot":"...","holds_of":"...","now":{...},"pending":{...}}  body, one line
//! ```
//!
//! The file is replaced as a whole and synced: once before the first byte of a change, with the
//! state before and after the change, and once after the outcome. A service that starts reads the
//! [mark](super::Mark) beside the file and the guest's counts to learn whether the change was made.
//!
//! Probes of tracepoints are not kept. When the file is read, holds on a tracepoint are bound to
//! the probes that the tracepoint has then.

mod copied;
mod moved;
mod settle;
mod v1;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::time::{Instant, SystemTime};

use patchbay_guest::log_file::{LogPath, is_own, length};
use patchbay_proto::text::hex;
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

pub use self::copied::CopiedHolds;
pub use self::moved::{MoveError, Moved};
use super::mark::Mark;
use super::{Claims, KeyClaims, MadeRequest, MadeRequests, OwnerState, expiry};
use crate::keys::holds::{Hold, KeyHolds, Taking};

const FORMAT: &str = "patchbay-ledger";
/// The version that this program writes, and the latest one that it reads.
const VERSION: u32 = 2;
/// The largest file that is read and written, in bytes.
const MAX_BYTES: u64 = 256 << 20;

/// The largest number of a hold, which leaves room for later ones.
const MAX_NUMBER: u64 = u64::MAX / 2;
/// The largest number of references on one key. The key's count contains all of them.
const MAX_REFERENCES: u64 = i32::MAX as u64;

/// A place that keeps a ledger.
pub trait LedgerPlace: Debug + Send {
    /// Replaces the content. The new content is on the disk when this returns. If this fails, the
    /// earlier content is intact.
    ///
    /// # Errors
    /// An I/O error.
    fn replace(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Returns the name for messages.
    fn name(&self) -> String;

    /// Returns the largest content, in bytes.
    fn at_most(&self) -> u64 {
        MAX_BYTES
    }
}

/// Returns the largest content with a pending change that adds holds or claims, in bytes, in a
/// place of `at_most` bytes. A change that only ends some writes at most the state before it twice
/// and its answers, so it always fits into the place.
fn at_most_added(at_most: u64) -> u64 {
    at_most / 16 * 7
}

/// The ledger that a service starts with.
#[derive(Debug)]
pub struct LedgerFile {
    pub(in crate::keys) place: Box<dyn LedgerPlace>,
    pub(in crate::keys) found: Option<Ledger>,
    /// The fate of the change that the ledger has as pending.
    pub(in crate::keys) mark: Option<Mark>,
    /// The process that runs the guest.
    pub(in crate::keys) process: String,
}

/// The reason why a service does not start with a ledger.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// The file cannot be read, or a file beside it cannot be created.
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
        /// Version of the file.
        found: u32,
    },
    /// The file is whole, but no program writes such a content.
    #[error(
        "the ledger {path} is whole, but {why}; report this, and move the file away, which forgets the holds and claims on the guest's keys"
    )]
    Implausible {
        /// Path of the file.
        path: String,
        /// The error in its content.
        why: String,
    },
}

/// The reason why the content of a ledger cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(in crate::keys) enum Unusable {
    #[error("its version is {0}")]
    Newer(u32),
    #[error("{0}")]
    Torn(String),
    #[error("{0}")]
    Implausible(String),
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
    /// The process that runs the guest.
    #[serde(default)]
    pub process: String,
    /// Number of outcomes and processes. A change that is pending again has another digest.
    pub serial: u64,
    /// The boot that it belongs to.
    pub boot: String,
    /// The first part of the ids of the ledger's holds.
    pub holds_of: String,
    /// The state before a pending change.
    pub now: State,
    /// The change that is about to be made.
    pub pending: Option<Pending>,
    /// Requests that were made.
    #[serde(default)]
    pub requests: MadeRequests,
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
    /// Number of the newest hold after the change.
    pub newest_hold: u64,
    /// The holds after the change, on the keys that the change touches.
    pub holds: Vec<SavedHolds>,
    /// The claims after the change, on the keys that the change touches.
    pub claims: BTreeMap<String, KeyClaims>,
    /// The states, after the change, of the owners that the change touches.
    pub owners: Vec<OwnerState>,
    /// The request that asks for the change, if it has an id.
    #[serde(default)]
    pub request: Option<MadeRequest>,
}

/// A key in a form by which another process finds the key again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::keys) struct SavedKey {
    /// "name" or "module:name".
    pub name: String,
    /// Guest-virtual address. A module that is loaded again usually has another address.
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

    /// Returns the same key without holds.
    fn ended(&self) -> Self {
        Self {
            key: self.key.clone(),
            holds: Vec::new(),
        }
    }

    /// Returns the largest number of these holds, 0 if there are none.
    fn newest(&self) -> u64 {
        let numbers = self.holds.iter().map(|hold| hold.number);
        numbers.max().unwrap_or(0)
    }

    /// Returns whether a count can contain the references.
    fn is_plausible(&self) -> bool {
        let references = self.holds.iter().map(|hold| u64::from(hold.references));
        references.fold(0, u64::saturating_add) <= MAX_REFERENCES
    }

    /// Returns the holds.
    pub fn restored(&self) -> KeyHolds {
        let mut holds = KeyHolds::default();
        holds.set_name(&self.key.name.as_str().into());
        for hold in self.holds.iter().filter(|hold| hold.references > 0) {
            let taking = Taking {
                holder: hold.holder.as_str().into(),
                reason: hold.reason.as_str().into(),
                since: hold.since,
                expires: hold.expires,
                fired: hold.fired,
            };
            holds.take(&Hold::new(hold.number, hold.references, taking));
        }
        holds
    }
}

impl Ledger {
    /// Returns the number of the newest hold.
    pub fn newest_hold(&self) -> u64 {
        let pending = self.pending.as_ref();
        let pending = pending.map_or(0, |pending| pending.newest_hold);
        pending.max(self.now.newest_hold)
    }

    /// Returns the bytes of the file, and the SHA-256 of its body.
    ///
    /// # Errors
    /// The content cannot be encoded, or would not be read again.
    pub fn encode(&self) -> io::Result<(Vec<u8>, [u8; 32])> {
        self.check().map_err(io::Error::other)?;
        with_header(serde_json::to_vec(self)?)
    }

    /// Checks that the numbers are within the limits that this program keeps, so that sums of them
    /// do not overflow.
    fn check(&self) -> Result<(), &'static str> {
        let pending = self.pending.as_ref();
        let pending_holds = pending.into_iter().flat_map(|pending| &pending.holds);
        let mut pending_claims = pending.into_iter().flat_map(|of| of.claims.values());
        let mut holds = self.now.holds.iter().chain(pending_holds);
        if self.newest_hold() > MAX_NUMBER {
            return Err("the number of its newest hold is too large");
        }
        if holds.clone().any(|of| of.newest() > self.newest_hold()) {
            return Err("one of its holds has a larger number than its newest hold");
        }
        if !holds.all(SavedHolds::is_plausible) {
            return Err("the holds on one of its keys have more references than a count");
        }
        if !self.now.claims.is_plausible() || !pending_claims.all(KeyClaims::is_plausible) {
            return Err("it has too many owners, or its claims have taken too many references");
        }
        Ok(())
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
        let ledger = match header.version {
            1 => v1::parse(body),
            _ => serde_json::from_slice(body),
        };
        let ledger: Self = ledger.map_err(|error| Unusable::Implausible(error.to_string()))?;
        let check = ledger.check();
        check.map_err(|why| Unusable::Implausible(why.to_owned()))?;
        Ok(ledger)
    }
}

/// Returns the bytes of a file with this body, and the SHA-256 of the body.
fn with_header(body: Vec<u8>) -> io::Result<(Vec<u8>, [u8; 32])> {
    let digest: [u8; 32] = Sha256::digest(&body).into();
    let header = Header {
        format: FORMAT.to_owned(),
        version: VERSION,
        sha256: hex(&digest),
    };
    let mut bytes = serde_json::to_vec(&header)?;
    bytes.push(b'\n');
    bytes.extend(body);
    bytes.push(b'\n');
    Ok((bytes, digest))
}

/// Checks that a content fits into its place. `adds` tells whether its pending change adds holds or
/// claims.
///
/// # Errors
/// The content is too large.
pub(in crate::keys) fn check_room(
    place: &dyn LedgerPlace,
    bytes: &[u8],
    adds: bool,
) -> io::Result<()> {
    let at_most = match adds {
        true => at_most_added(place.at_most()),
        false => place.at_most(),
    };
    check_size(bytes.len() as u64, at_most)
}

/// Returns the digest in the header of a file.
pub(super) fn digest_of(bytes: &[u8]) -> Option<String> {
    let header = bytes.split(|byte| *byte == b'\n').next()?;
    let header: Header = serde_json::from_slice(header).ok()?;
    Some(header.sha256)
}

impl LedgerFile {
    /// Opens the ledger at `path`, which need not exist. A torn ledger is renamed to `NAME.1`.
    /// `process` names the process that runs the guest; the name is unique on this host since its
    /// boot. The ledger of another process is forgotten: that process had another guest, or this
    /// guest before a migration or a restore from an image.
    ///
    /// # Errors
    /// [`LedgerError`].
    pub fn open(path: &Path, process: &str) -> Result<Self, LedgerError> {
        let shown = path.display().to_string();
        let io = |error| LedgerError::Io {
            path: shown.clone(),
            error,
        };
        let place = LogPath::new(path).map_err(io)?;
        let mut mark = None;
        let found = match read(&place, MAX_BYTES).map_err(io)? {
            None => None,
            Some(bytes) => match Ledger::decode(&bytes) {
                Ok(ledger) if ledger.process == process => {
                    mark = Mark::read(path, &bytes).unwrap_or_else(|error| {
                        tracing::warn!(path = shown, %error, "the mark beside the ledger is ignored");
                        None
                    });
                    Some(ledger)
                }
                Ok(ledger) => {
                    let of = ledger.process;
                    tracing::warn!(
                        path = shown,
                        of,
                        "the ledger belongs to another process, and is forgotten"
                    );
                    None
                }
                Err(Unusable::Newer(found)) => {
                    return Err(LedgerError::Newer { path: shown, found });
                }
                Err(Unusable::Implausible(why)) => {
                    return Err(LedgerError::Implausible { path: shown, why });
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
            mark,
            process: process.to_owned(),
        })
    }
}

/// Reads a file of this user, unless the file is larger than `at_most` bytes.
pub(super) fn read(place: &LogPath, at_most: u64) -> io::Result<Option<Vec<u8>>> {
    let Some((file, bytes)) = open(place)? else {
        return Ok(None);
    };
    check_size(bytes, at_most)?;
    let mut content = Vec::new();
    File::take(file, at_most).read_to_end(&mut content)?;
    Ok(Some(content))
}

/// Opens a file of this user. Returns the file with its size; `None` if the file does not exist.
pub(super) fn open(place: &LogPath) -> io::Result<Option<(File, u64)>> {
    // Opening a pipe must not wait for a writer.
    let file = match place.open(OFlags::RDONLY | OFlags::NONBLOCK) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let bytes = length(&file)?.ok_or_else(|| io::Error::other("it is no regular file"))?;
    // The checksum shows damage. It does not show who wrote the file.
    if !is_own(&file)? {
        let message = "it belongs to another user, or another user may write it";
        return Err(io::Error::other(message));
    }
    Ok(Some((file, bytes)))
}

fn check_size(bytes: u64, at_most: u64) -> io::Result<()> {
    if bytes > at_most {
        let message = format!("it has {bytes} bytes, expected at most {at_most}");
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
