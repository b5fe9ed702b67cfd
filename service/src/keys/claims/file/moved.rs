// SPDX-License-Identifier: Apache-2.0
//! Carries a ledger to the host that a guest has migrated to.
//!
//! A migration copies the guest's memory, and with it the counts that contain the references of the
//! ledger. [`LedgerFile::export`] returns the ledger of the process that ran the guest, and
//! [`LedgerFile::import`] makes it that of the process that runs the guest now. The ledger is bound
//! to the boot of the guest, which a migration does not change.
//!
//! The caller keeps all attachers of the guest out meanwhile, so no holds and claims change between
//! the export and the next attachment.

use std::fmt;
use std::io::{self, Read};
use std::path::Path;

use patchbay_guest::log_file::LogPath;
use patchbay_proto::text::hex;
use rustix::io::Errno;
use sha2::{Digest, Sha256};

use super::{
    Ledger, LedgerError, LedgerFile, MAX_BYTES, MadeRequests, Mark, Unusable, VERSION, check_room,
    read,
};
use crate::keys::audit::{AuditLog, AuditOutcome, LedgerImport};
use crate::keys::error::KeysError;
use crate::keys::registry::Registry;

/// The reason why a ledger is neither exported nor imported. Nothing has changed, except that an
/// import may have set a torn ledger of the guest aside.
#[derive(Debug, thiserror::Error)]
pub enum MoveError {
    /// No attacher has kept holds and claims of this process in this folder.
    #[error(
        "the guest has no ledger at {0}; if its attacher has its socket in another folder, give that socket with --api-socket"
    )]
    Missing(String),
    /// The content is no ledger, or not all of it.
    #[error("{name} is no whole ledger, because {why}; {advice}")]
    Torn {
        /// Name of the file.
        name: String,
        /// The error in its content.
        why: String,
        /// The next step.
        advice: &'static str,
    },
    /// A later version of this program has written the content.
    #[error(
        "{name} has version {found}, and this program reads up to {VERSION}; use the version of the program that wrote it"
    )]
    Newer {
        /// Name of the file.
        name: String,
        /// Version of its content.
        found: u32,
    },
    /// The content is whole, but no program writes it.
    #[error("{name} is whole, but {why}; report this")]
    Implausible {
        /// Name of the file.
        name: String,
        /// The error in its content.
        why: String,
    },
    /// Only the counts of the guest where it is now tell whether a pending change was made.
    #[error(
        "{0} has a change that was pending, and the guest has changed some of its keys since; attach to the guest here once, which settles it, and export again"
    )]
    Unsettled(String),
    /// The ledger is not of this process.
    #[error("the ledger {0} belongs to another process; an attacher would forget it, too")]
    OtherProcess(String),
    /// The running kernel is not the one whose counts contain the ledger's references.
    #[error(
        "the ledger belongs to the boot {ledger} of a guest, and this guest runs the boot {guest}; nothing of it is in this guest's counts"
    )]
    OtherBoot {
        /// The boot of the ledger.
        ledger: String,
        /// The boot of the guest.
        guest: String,
    },
    /// The guest has a ledger of its own.
    #[error(
        "the guest has a ledger already, {path}, with {content}; to forget these and import the other ones, move this file away"
    )]
    Used {
        /// Path of the ledger.
        path: String,
        /// Its content.
        content: Moved,
    },
    /// The guest has a ledger of its own, in which everything has ended.
    #[error(
        "the guest has used a ledger here already, {0}, and what was in it has ended; an import would bring back what the counts no longer contain. To import nevertheless, move this file away"
    )]
    Over(String),
    /// The guest's kernel is not known, so its boot is not either.
    #[error("the boot of the guest cannot be compared with that of the ledger: {0}")]
    NoKernel(KeysError),
    /// The line about the import cannot be written.
    #[error(transparent)]
    Unaudited(KeysError),
    /// The ledger of the guest cannot be used.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// The exported file cannot be read, or another user may have written it.
    #[error(
        "{name} cannot be read ({error}); name a regular file that is yours and that no other user may write, or - for standard input"
    )]
    Unreadable {
        /// Name of the file.
        name: String,
        /// The I/O error.
        error: io::Error,
    },
    /// Standard input cannot be read, or has more bytes than a ledger.
    #[error("the exported ledger cannot be read from standard input: {0}")]
    Input(io::Error),
    /// The ledger or its mark cannot be read or written.
    #[error(
        "{name}: {error}; run the command as the user of the attacher, and see that the folder has room"
    )]
    Io {
        /// Name of the file.
        name: String,
        /// The I/O error.
        error: io::Error,
    },
}

/// Numbers of what is in a ledger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Number of holds.
    pub holds: usize,
    /// Number of claims.
    pub claims: usize,
    /// Number of owners whose generations are known, with or without claims.
    pub owners: usize,
    /// A change is pending, and the counts tell the next attacher whether it was made.
    pub pending: bool,
}

impl fmt::Display for Moved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            holds,
            claims,
            owners,
            pending,
        } = self;
        write!(f, "{holds} holds, {claims} claims and {owners} owners")?;
        match pending {
            true => f.write_str(" before a change of which only the counts tell if it was made"),
            false => Ok(()),
        }
    }
}

impl Moved {
    pub(super) fn of(ledger: &Ledger) -> Self {
        let claims = &ledger.now.claims;
        Self {
            holds: ledger.now.holds.iter().map(|of| of.holds.len()).sum(),
            claims: claims.keys_from("").map(|(_, of)| of.stack().len()).sum(),
            owners: claims.owners().len(),
            pending: ledger.pending.is_some(),
        }
    }
}

impl LedgerFile {
    /// Returns the ledger at `path` of the guest that `process` runs, in the form that
    /// [`Self::import`] reads. A pending change of which the mark tells whether it was made is
    /// settled in the copy. The file stays as it is.
    ///
    /// # Errors
    /// [`MoveError`].
    pub fn export(path: &Path, process: &str) -> Result<(Vec<u8>, Moved), MoveError> {
        let name = path.display().to_string();
        let place = LogPath::new(path).map_err(io_error(&name))?;
        let bytes = read(&place, MAX_BYTES).map_err(io_error(&name))?;
        let bytes = bytes.ok_or_else(|| MoveError::Missing(name.clone()))?;
        let advice = "the next attacher renames it to NAME.1 and starts without what was in it";
        let ledger = decode(&name, &bytes, advice)?;
        if ledger.process != process {
            return Err(MoveError::OtherProcess(name));
        }
        let mark = Mark::read(path, &bytes);
        let mark = mark.map_err(io_error(&Mark::path(path).display().to_string()))?;
        let ledger =
            told(ledger, mark.as_ref()).ok_or_else(|| MoveError::Unsettled(name.clone()))?;
        let (bytes, _) = ledger.encode().map_err(implausible(&name))?;
        Ok((bytes, Moved::of(&ledger)))
    }

    /// Reads the file of an exported ledger, for [`Self::import`]. The checksum shows damage and
    /// does not show who wrote the file, so no other user may write it.
    ///
    /// # Errors
    /// [`MoveError::Unreadable`].
    pub fn read_exported(path: &Path) -> Result<Vec<u8>, MoveError> {
        let content = LogPath::new(path).and_then(|place| read(&place, MAX_BYTES));
        let content = content.and_then(|found| found.ok_or(Errno::NOENT.into()));
        content.map_err(|error| MoveError::Unreadable {
            name: path.display().to_string(),
            error,
        })
    }

    /// Reads an exported ledger to its end, for [`Self::import`].
    ///
    /// # Errors
    /// [`MoveError::Input`]: an I/O error, or there are more bytes than a ledger has.
    pub fn read_exported_from(input: impl Read) -> Result<Vec<u8>, MoveError> {
        bounded(input, MAX_BYTES).map_err(MoveError::Input)
    }

    /// Writes an exported ledger to `path`, where the next attacher of `process` finds it.
    /// `registry` knows the kernel of the guest that this process runs. `by` is the principal who
    /// imports the ledger, for the audit log.
    ///
    /// # Errors
    /// [`MoveError`].
    pub fn import(
        path: &Path,
        process: &str,
        exported: &[u8],
        registry: &Registry,
        audit: &mut AuditLog,
        by: &str,
    ) -> Result<Moved, MoveError> {
        let what = "the exported ledger";
        let mut ledger = decode(what, exported, "export the ledger again")?;
        let guest = registry.known().map_err(MoveError::NoKernel)?;
        let guest = guest.registration.kept_boot();
        if ledger.boot != guest {
            let ledger = ledger.boot;
            return Err(MoveError::OtherBoot { ledger, guest });
        }
        let Self {
            mut place, found, ..
        } = Self::open(path, process)?;
        let name = place.name();
        // An attacher would forget the ledger of another boot.
        if let Some(own) = found.filter(|own| own.boot == guest) {
            let content = Moved::of(&own);
            if content != Moved::default() {
                let path = name;
                return Err(MoveError::Used { path, content });
            }
            if own.newest_hold() > 0 || own.requests != MadeRequests::default() {
                return Err(MoveError::Over(name));
            }
        }
        process.clone_into(&mut ledger.process);
        let (bytes, _) = ledger.encode().map_err(implausible(what))?;
        check_room(&*place, &bytes, false).map_err(implausible(what))?;
        let moved = Moved::of(&ledger);
        let line = LedgerImport {
            owner: by,
            boot: &guest,
            ledger: &name,
            sha256: &hex(&Sha256::digest(exported)),
            holds: moved.holds,
            claims: moved.claims,
            owners: moved.owners,
            pending: moved.pending,
        };
        let id = audit.ledger_import(&line).map_err(MoveError::Unaudited)?;
        place
            .replace(&bytes)
            .map_err(io_error(&name))
            .inspect_err(|error| {
                let reason = "LEDGER_UNWRITABLE";
                let error = error.to_string();
                audit.outcome(id, &AuditOutcome::Failed { reason, error });
            })?;
        Ok(moved)
    }
}

/// Reads to the end of an input of at most this many bytes.
fn bounded(input: impl Read, at_most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    input.take(at_most + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > at_most {
        let message = format!("it has more than {at_most} bytes");
        return Err(io::Error::other(message));
    }
    Ok(bytes)
}

fn io_error(name: &str) -> impl Fn(io::Error) -> MoveError {
    move |error| MoveError::Io {
        name: name.to_owned(),
        error,
    }
}

fn implausible(name: &str) -> impl Fn(io::Error) -> MoveError {
    move |why| MoveError::Implausible {
        name: name.to_owned(),
        why: why.to_string(),
    }
}

fn decode(name: &str, bytes: &[u8], advice: &'static str) -> Result<Ledger, MoveError> {
    let name = name.to_owned();
    Ledger::decode(bytes).map_err(|unusable| match unusable {
        Unusable::Newer(found) => MoveError::Newer { name, found },
        Unusable::Torn(why) => MoveError::Torn { name, why, advice },
        Unusable::Implausible(why) => MoveError::Implausible { name, why },
    })
}

/// Settles the pending change if the mark tells whether it was made. The mark cannot be exported,
/// because it is bound to the bytes of the file. Returns `None` if the mark leaves some keys to
/// their counts: without the mark, the importing host would misread these counts.
fn told(ledger: Ledger, mark: Option<&Mark>) -> Option<Ledger> {
    let Some(mark) = mark.filter(|_| ledger.pending.is_some()) else {
        return Some(ledger);
    };
    if !mark.moved.is_empty() {
        return None;
    }
    let (now, requests) = ledger.clone().settled(Some(mark), |_| None);
    Some(Ledger {
        now,
        pending: None,
        requests,
        ..ledger
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_input_is_read_up_to_its_bound() {
        let read = |bytes: &'static [u8]| bounded(bytes, 3);
        assert_eq!(read(b"abc").expect("the largest"), b"abc");
        let error = read(b"abcd").expect_err("too large").to_string();
        assert_eq!(error, "it has more than 3 bytes");
        let endless = bounded(io::repeat(0), 3).expect_err("it has no end");
        assert!(endless.to_string().contains("more than"), "{endless}");
    }
}
