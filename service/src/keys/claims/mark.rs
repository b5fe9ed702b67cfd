// SPDX-License-Identifier: Apache-2.0
//! The mark beside a ledger: the fate of the change that was pending when its writer was killed.
//!
//! An attacher's watchdog knows whether the change was made as a whole, because it rolls back any
//! other change. The guest's counts do not always show this, because the guest may have changed a
//! key by one since. So the watchdog writes a mark, and the next service reads the mark with the
//! ledger.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use patchbay_guest::log_file::LogPath;
use patchbay_proto::text::hex;
use serde::{Deserialize, Serialize};

use super::file;

/// The largest mark that is read, in bytes.
const MAX_BYTES: u64 = 16 << 20;

/// The fate of the change that a ledger has as pending.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// SHA-256 of the ledger's body, in hexadecimal, as in the ledger's header. It identifies the
    /// content of the ledger.
    ledger: String,
    /// The change was made as a whole. If false, it was not begun or was rolled back.
    pub(super) made: bool,
    /// Full names of keys that the guest has changed since. Their counts decide.
    #[serde(default)]
    pub(super) moved: Vec<String>,
}

impl Mark {
    /// The ending that the path of a mark adds to that of its ledger.
    pub const ENDING: &str = ".mark";

    /// Creates the mark of the change that was announced with this digest
    /// ([`Guest::will_keep`](patchbay_guest::guest::Guest::will_keep)).
    #[must_use]
    pub fn new(ledger: &[u8; 32], made: bool, moved: Vec<String>) -> Self {
        Self {
            ledger: hex(ledger),
            made,
            moved,
        }
    }

    /// Returns the path of the mark of a ledger.
    #[must_use]
    pub fn path(ledger: &Path) -> PathBuf {
        let mut path = OsString::from(ledger);
        path.push(Self::ENDING);
        path.into()
    }

    /// Writes the mark beside the ledger, unless the ledger has changed by now.
    ///
    /// # Errors
    /// The ledger cannot be read, or the mark cannot be written.
    pub fn write(&self, ledger: &Path) -> io::Result<()> {
        let mut header = Vec::new();
        let file = match file::open(&LogPath::new(ledger)?)? {
            Some((file, _)) => file,
            None => return Ok(()),
        };
        let mut start = BufReader::new(File::take(file, 1 << 10));
        start.read_until(b'\n', &mut header)?;
        if file::digest_of(&header).as_ref() != Some(&self.ledger) {
            return Ok(());
        }
        LogPath::new(&Self::path(ledger))?.replace(&serde_json::to_vec(self)?)
    }

    /// Reads the mark of the ledger at `path` that has this content. Returns `None` if the mark is
    /// torn or belongs to another content.
    pub(super) fn read(path: &Path, ledger: &[u8]) -> io::Result<Option<Self>> {
        let place = LogPath::new(&Self::path(path))?;
        let Some(content) = file::read(&place, MAX_BYTES)? else {
            return Ok(None);
        };
        let mark: Option<Self> = serde_json::from_slice(&content).ok();
        Ok(mark.filter(|mark| file::digest_of(ledger).as_ref() == Some(&mark.ledger)))
    }
}
