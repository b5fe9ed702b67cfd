// SPDX-License-Identifier: Apache-2.0
//! The messages of an attacher to its watchdog, and the state that they describe.

use std::ffi::OsString;
use std::io::{self, BufReader, Read};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use patchbay_service::keys::claims::Mark;

use crate::rollback::{Change, Settled, array, list};

/// The guest runs, and no partial change is left.
pub const RUNS: u8 = b'r';
/// The guest is about to be stopped.
pub const STOPS: u8 = b's';
/// Another client has ended the stop.
pub const RESUMED: u8 = b'u';
/// The digest of the ledger that has a change as pending follows, if one has, and the change.
pub const WILL_WRITE: u8 = b'w';
/// The writes of the change begin.
pub const WRITES: u8 = b'c';
/// The change was made: the writes are complete and stay.
pub const MADE: u8 = b'm';
/// The writes were undone.
pub const UNDONE: u8 = b'b';
/// The path of the ledger follows.
pub const LEDGER: u8 = b'l';
/// The digest of a ledger with a pending change follows, and that of the one which it replaces, if
/// that one has a pending change too.
pub const PENDING: u8 = b'p';
/// The digest of a ledger follows whose pending change is made while the guest runs, so its fate is
/// not told.
pub const FORGET: u8 = b'f';

/// The state that the attacher's messages describe.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Words {
    pub stopped: bool,
    /// Another client has ended the stop by QMP.
    pub resumed: bool,
    pub threads: Vec<u32>,
    pub anywhere: bool,
    pub writes: Option<Change>,
    /// The writes have begun, and may be incomplete.
    pub writing: bool,
    /// The path of the attacher's ledger.
    pub ledger: Option<PathBuf>,
    /// The pending changes of the ledgers of which one is on the disk.
    pub kept: Vec<Kept>,
    /// Digest of the ledger that has the announced change as pending.
    pub writes_of: Option<[u8; 32]>,
}

/// A change that a ledger has as pending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    pub digest: [u8; 32],
    pub fate: Fate,
}

/// The fate of a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It was not begun, or was undone.
    NotMade,
    /// Its writes have begun.
    Begun,
    Made,
    /// The rollback has decided. The guest has changed the keys with these names since.
    Settled {
        made: bool,
        moved: Vec<String>,
    },
}

impl Words {
    /// Sets the fate of the announced change, if a ledger has it.
    fn set_fate(&mut self, fate: Fate) {
        let of = self.writes_of;
        if let Some(kept) = self.kept.iter_mut().find(|kept| Some(kept.digest) == of) {
            kept.fate = fate;
        }
    }

    /// Returns the pending change whose writes have begun and whose fate is not known.
    fn begun(&mut self) -> Option<&mut Kept> {
        self.kept.iter_mut().find(|kept| kept.fate == Fate::Begun)
    }

    /// Ends a change that the attacher has left. It has not told that the change was made: its last
    /// check before the first write failed, or an earlier state of the guest was loaded since.
    fn leave_begun(&mut self) {
        if let Some(kept) = self.begun() {
            kept.fate = Fate::NotMade;
        }
    }

    /// Keeps what a rollback has found.
    pub fn settle(&mut self, change: &Change, settled: &Settled) {
        if let (Some(kept), Some(made)) = (self.begun(), settled.made) {
            let moved = settled.moved.iter().chain(&settled.inconsistent);
            let moved = moved.filter_map(|key| change.keys.get(*key as usize));
            let moved = moved.cloned().collect();
            kept.fate = Fate::Settled { made, moved };
        }
    }

    /// Writes the fate of the change that is pending in the ledger beside it. Without a fate the
    /// guest's counts tell the next attacher.
    pub fn leave_mark(&mut self) -> io::Result<()> {
        let Some(path) = &self.ledger else {
            return Ok(());
        };
        for kept in self.kept.drain(..) {
            let (made, moved) = match kept.fate {
                Fate::NotMade => (false, Vec::new()),
                Fate::Made => (true, Vec::new()),
                Fate::Settled { made, moved } => (made, moved),
                Fate::Begun => continue,
            };
            // Only that of the ledger which is on the disk is written.
            Mark::new(&kept.digest, made, moved).write(path)?;
        }
        Ok(())
    }

    /// Reads one message with its arguments.
    fn read(&mut self, pipe: &mut impl Read) -> io::Result<()> {
        match array::<1>(pipe)?[0] {
            RUNS => {
                self.leave_begun();
                *self = Self {
                    ledger: self.ledger.take(),
                    kept: std::mem::take(&mut self.kept),
                    ..Self::default()
                };
            }
            STOPS => {
                let [anywhere] = array(pipe)?;
                let threads = list(pipe, |pipe| Ok(u32::from_le_bytes(array(pipe)?)))?;
                self.anywhere = anywhere != 0;
                self.threads = threads;
                self.stopped = true;
                self.resumed = false;
            }
            RESUMED => self.resumed = true,
            WILL_WRITE => {
                let of = read_optional(pipe)?;
                self.writes = Some(Change::parse(pipe)?);
                self.writing = false;
                self.leave_begun();
                self.writes_of = of;
            }
            WRITES => {
                self.writing = true;
                self.set_fate(Fate::Begun);
            }
            MADE => {
                self.writing = false;
                self.set_fate(Fate::Made);
            }
            UNDONE => self.set_fate(Fate::NotMade),
            LEDGER => {
                let path = list(pipe, |pipe| Ok(array::<1>(pipe)?[0]))?;
                self.ledger = Some(OsString::from_vec(path).into());
            }
            PENDING => {
                let (digest, replaced) = (array(pipe)?, read_optional(pipe)?);
                self.kept.retain(|kept| Some(kept.digest) == replaced);
                let fate = Fate::NotMade;
                self.kept.push(Kept { digest, fate });
            }
            FORGET => {
                let digest = array(pipe)?;
                self.kept.retain(|kept| kept.digest != digest);
            }
            other => return Err(io::Error::other(format!("no word: {other}"))),
        }
        Ok(())
    }
}

/// Encodes a digest that may be missing.
pub fn optional(digest: Option<&[u8; 32]>) -> [u8; 33] {
    let mut bytes = [0; 33];
    if let Some(digest) = digest {
        bytes[0] = 1;
        bytes[1..].copy_from_slice(digest);
    }
    bytes
}

fn read_optional(pipe: &mut impl Read) -> io::Result<Option<[u8; 32]>> {
    let ([is_there], digest) = (array(pipe)?, array(pipe)?);
    Ok((is_there != 0).then_some(digest))
}

/// Reads messages until the attacher ends. An incomplete message is ignored.
pub fn last_words(pipe: impl Read) -> Words {
    let mut pipe = BufReader::with_capacity(64 << 10, pipe);
    let mut words = Words::default();
    while words.read(&mut pipe).is_ok() {}
    words
}
