// SPDX-License-Identifier: Apache-2.0
//! Discovers guests of other monitors. `patchbay-attach` serves each of them, with its socket in
//! the run directory.
//!
//! An attacher ends when its guest ends. It keeps running when this process ends, because it keeps
//! the holds of its clients, and a new process finds it by its socket. An attacher that is killed
//! leaves its holds and claims in a file beside its socket, and the next attacher continues them.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::PathBuf;

use patchbay_supervisor::{Attacher, Earlier, Places, Supervisor, Target, Vms};

use crate::monitors::Directory;

/// The places that are searched for guests.
#[derive(Clone, Debug, Default)]
pub struct Attach {
    /// Folders whose sockets are QMP sockets.
    pub qmp: Vec<PathBuf>,
    /// The URI of a libvirt daemon on this host.
    pub libvirt: Option<String>,
    /// All VMs of this host.
    pub all: bool,
    /// The users other than root whose monitors name their guests.
    pub names_of: BTreeSet<u32>,
    /// The attacher program; by default the one next to this program.
    pub program: Option<PathBuf>,
    /// A debug file of the guests' kernel, or a folder with the files of many kernels.
    pub debug_file: Option<PathBuf>,
}

impl Attach {
    /// Returns whether any place is searched.
    #[must_use]
    pub fn is_given(&self) -> bool {
        !self.qmp.is_empty() || self.libvirt.is_some() || self.all
    }
}

/// Attaches to every guest that is discovered, until the future is dropped. `directory` contains
/// the names of the guests that are served.
pub async fn run(attach: Attach, run_dir: PathBuf, directory: Directory) {
    if let Err(error) = std::fs::create_dir_all(&run_dir) {
        let folder = run_dir.display();
        return tracing::error!("the folder {folder} cannot be made: {error}; nothing is attached");
    }
    let debug_file = attach.debug_file.map(OsString::from);
    let arguments = debug_file.map(|path| [OsString::from("--debug-file"), path]);
    let attacher = Attacher {
        program: attach
            .program
            .unwrap_or_else(|| program_beside("patchbay-attach")),
        arguments: arguments.into_iter().flatten().collect(),
        run_dir,
        names_sockets: false,
        outlives: true,
    };
    let vms = attach.all.then(|| Vms::new(attach.names_of));
    let mut places = Places::new(attach.qmp, attach.libvirt, vms);
    let mut supervisor = Supervisor::new(attacher.clone());
    let is_free = |target: &Target| {
        let guest = directory.find(&target.name());
        guest.is_none_or(|guest| guest.monitor.path() == attacher.socket(target))
    };
    let earlier = |target: &Target| match attacher.serves(target) {
        true => match directory.name_at(&attacher.socket(target)) {
            Some(name) => Earlier::Named(name),
            None => Earlier::Unnamed,
        },
        false => Earlier::None,
    };
    supervisor.run(&mut places, is_free, earlier).await;
}

/// Returns the program of this name next to this program, or else the one in PATH.
#[must_use]
pub fn program_beside(name: &str) -> PathBuf {
    let own = std::env::current_exe().ok();
    let beside = own.and_then(|own| Some(own.parent()?.join(name)));
    beside
        .filter(|path| path.is_file())
        .unwrap_or_else(|| PathBuf::from(name))
}
