// SPDX-License-Identifier: Apache-2.0
//! Carries the ledger of a guest to another host, for `patchbay-attach ledger`.
//!
//! Both commands attach to the guest, so no attacher serves it meanwhile.

use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use patchbay_attach::guest::QemuGuest;
use patchbay_attach::ledger::LedgerName;
use patchbay_guest::guest::Guest as _;
use patchbay_service::keys::claims::LedgerFile;
use patchbay_service::keys::registry::Registry;
use patchbay_service::keys::registry::discovery::DebugFiles;

use crate::args::GuestOf;

/// Time in which the guest's kernel must be found.
const PATIENCE: Duration = Duration::from_secs(30);
/// Time between two looks for the kernel of a guest that has just arrived.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// Writes the ledger of a guest to standard output.
pub fn export(of: &GuestOf) -> anyhow::Result<()> {
    let guest = crate::attach_to(of)?;
    let socket = match &of.options().api_socket {
        Some(path) => path.clone(),
        // Only the folder counts.
        None => crate::run_folder()?.join("socket"),
    };
    let name = LedgerName::beside(&socket, guest.process())?;
    let (bytes, moved) = LedgerFile::export(name.path(), name.process())?;
    // An attachment keeps others out, so it does not last while a pipe is full.
    drop(guest);
    let mut output = io::stdout().lock();
    let written = output.write_all(&bytes).and_then(|()| output.flush());
    written.context("the ledger cannot be written to standard output")?;
    eprintln!(
        "exported {moved}; let no attacher serve the guest here from now on, and import them where the guest runs next"
    );
    Ok(())
}

/// Makes an exported ledger that of a guest.
pub fn import(file: &Path, of: &GuestOf) -> anyhow::Result<()> {
    let options = of.options();
    // The default folder may be that of a login, where no attacher looks for a ledger.
    let socket = options.api_socket.as_deref().context(
        "give --api-socket: the ledger belongs in the folder of the attacher's socket, /run/patchbay for the packaged unit",
    )?;
    // An attachment keeps others out, so it does not last while the input is awaited.
    let exported = match file == Path::new("-") {
        true => LedgerFile::read_exported_from(io::stdin().lock())?,
        false => LedgerFile::read_exported(file)?,
    };
    let debug_files = crate::debug_files(&options.shared)?;
    let mut audit = crate::audit_log(&options.shared)?;
    let guest = crate::attach_to(of)?;
    let name = LedgerName::beside(socket, guest.process())?;
    // The error of a kernel that is not found in this time follows from the import.
    let registry = kernel_of(guest, debug_files);
    let by = format!("uid:{}", rustix::process::getuid().as_raw());
    let (path, process) = (name.path(), name.process());
    let moved = LedgerFile::import(path, process, &exported, &registry, &mut audit, &by)?;
    eprintln!(
        "imported {moved} into {}; attach to the guest, and they continue",
        path.display()
    );
    Ok(())
}

/// Looks for the kernel of a guest until it is found or the time is over. While all vCPUs run user
/// space or firmware, no kernel is found. Returns the registry, which knows the kernel or why it
/// was not found.
fn kernel_of(guest: Arc<QemuGuest>, files: Option<DebugFiles>) -> Registry {
    let registry = Registry::default();
    registry.attach(guest.ram().clone());
    registry.discover(guest, files);
    let end = Instant::now() + PATIENCE;
    loop {
        let rest = registry.look_for_kernel().unwrap_or(LOOK_INTERVAL);
        if registry.known().is_ok() || Instant::now() + rest >= end {
            return registry;
        }
        std::thread::sleep(rest);
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Command, CommandLine, LedgerCommand};

    /// Runs an import into a process that does not exist.
    fn import_of(line: &str) -> String {
        let line = format!("a ledger import {line}");
        let line = CommandLine::try_parse_from(line.split(' ')).expect("sound");
        let Command::Ledger(LedgerCommand::Import { file, guest }) = line.command else {
            panic!("another command");
        };
        let error = import(&file, &guest).expect_err("there is no such process");
        format!("{error:#}")
    }

    /// No process has this number, so an import that attached first would report the process and
    /// not the file.
    #[test]
    fn an_import_reads_its_input_before_it_attaches() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let [file, socket] = ["f", "g.sock"].map(|name| folder.path().join(name));
        let (name, socket) = (file.display().to_string(), socket.display());
        let line = format!("{name} process 4194304 --api-socket {socket}");
        let error = import_of(&line);
        assert!(error.contains("cannot be read"), "{error}");
        assert!(error.contains(&name), "{error}");
        std::fs::write(&file, "{").expect("room");
        let error = import_of(&line);
        assert!(!error.contains("cannot be read"), "{error}");
        assert!(error.contains("4194304"), "{error}");
    }

    #[test]
    fn an_import_without_a_socket_is_refused() {
        let error = import_of("f process 4194304");
        assert!(error.contains("give --api-socket"), "{error}");
    }
}
