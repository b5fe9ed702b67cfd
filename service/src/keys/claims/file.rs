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
//! to learn which of the two came true.
//!
//! Probes of tracepoints are not kept. Holds on a tracepoint are bound to the probes that it has
//! when the file is read.

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

use super::{Claims, MadeRequest, MadeRequests, expiry};
use crate::keys::holds::{Hold, KeyHolds};

const FORMAT: &str = "patchbay-ledger";
/// The version that this program writes, and the latest that it reads.
const VERSION: u32 = 1;
/// The largest file that is read and written, in bytes.
const MAX_BYTES: u64 = 256 << 20;

/// The largest number of a hold that is read, which leaves room for later ones.
const MAX_NUMBER: u64 = u64::MAX / 2;
/// The largest number of references on one key that is read.
const MAX_REFERENCES: u64 = 1 << 24;

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
    /// The process that runs the guest.
    pub(in crate::keys) process: String,
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
    /// The process that runs the guest.
    #[serde(default)]
    pub process: String,
    /// The boot that it belongs to.
    pub boot: String,
    /// The first part of the ids of its holds.
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
    /// The state after the change.
    pub after: State,
    /// The request that asks for the change, if it has an id.
    #[serde(default)]
    pub request: Option<MadeRequest>,
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
    /// Returns the number of the newest hold.
    pub fn newest_hold(&self) -> u64 {
        let pending = self.pending.as_ref();
        let pending = pending.map_or(0, |pending| pending.after.newest_hold);
        pending.max(self.now.newest_hold)
    }

    /// Returns the state that the guest is in, and the requests that were made. `count` reads the
    /// count of a key, or returns `None` if it is gone.
    ///
    /// A change is made for all its keys or for none, unless the watchdog was killed too. The guest
    /// may have changed some of the keys itself. So each key decides for itself, and most keys
    /// decide for those whose count is neither. Owners have the new answer only if no key
    /// contradicts it; the repeat of a request without an answer makes the rest.
    pub fn settled(self, mut count: impl FnMut(&SavedKey) -> Option<i32>) -> (State, MadeRequests) {
        let (now, mut requests) = (self.now, self.requests);
        let Some(pending) = self.pending else {
            return (now, requests);
        };
        let changed = pending.counts.iter().filter(|(_, one, other)| one != other);
        let decided = changed.filter_map(|(key, before, after)| {
            let count = count(key)?;
            let is_made = count == *after;
            (is_made || count == *before).then_some((&*key.name, is_made))
        });
        let decided: Vec<(&str, bool)> = decided.collect();
        let made = decided.iter().filter(|(_, is_made)| *is_made).count();
        let not_made = decided.len() - made;
        let is_made = made > not_made;
        let (mut state, other) = match is_made {
            true => (pending.after, now),
            false => (now, pending.after),
        };
        for (name, _) in decided.iter().filter(|(_, of_key)| *of_key != is_made) {
            state.take_key(name, &other);
        }
        if is_made {
            if not_made > 0 {
                state.claims.take_owners(other.claims);
            }
            pending
                .request
                .into_iter()
                .for_each(|made| requests.push(made));
        }
        (state, requests)
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
        let ledger: Self =
            serde_json::from_slice(body).map_err(|error| Unusable::Torn(error.to_string()))?;
        let after = ledger.pending.as_ref().map(|pending| &pending.after);
        let is_plausible = ledger.now.is_plausible() && after.is_none_or(State::is_plausible);
        match is_plausible {
            true => Ok(ledger),
            false => Err(torn("its numbers are too large")),
        }
    }
}

impl State {
    /// Replaces the holds and claims on a key by those of another state.
    fn take_key(&mut self, name: &str, other: &Self) {
        self.holds.retain(|holds| holds.key.name != name);
        let holds = other.holds.iter().filter(|holds| holds.key.name == name);
        self.holds.extend(holds.cloned());
        let claims = other.claims.key(name).cloned().unwrap_or_default();
        self.claims.put(name, claims);
    }

    /// Returns whether the numbers are within the limits that this program keeps, so that sums of
    /// them do not overflow.
    fn is_plausible(&self) -> bool {
        let references = |holds: &SavedHolds| {
            let references = holds.holds.iter().map(|hold| u64::from(hold.references));
            references.fold(0_u64, u64::saturating_add)
        };
        self.newest_hold <= MAX_NUMBER
            && self
                .holds
                .iter()
                .all(|holds| references(holds) <= MAX_REFERENCES)
            && self.claims.is_plausible()
    }
}

impl LedgerFile {
    /// Opens the ledger at `path`, which need not exist. A torn one is renamed to `NAME.1`.
    /// `process` names the process that runs the guest, on this host since its boot. The ledger of
    /// another process is forgotten: that process had another guest, or this one before a
    /// migration or a restore from an image.
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
        let found = match read(&place).map_err(io)? {
            None => None,
            Some(bytes) => match Ledger::decode(&bytes) {
                Ok(ledger) if ledger.process == process => Some(ledger),
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
            process: process.to_owned(),
        })
    }
}

fn read(place: &LogPath) -> io::Result<Option<Vec<u8>>> {
    // A pipe must not make this wait for a writer.
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
