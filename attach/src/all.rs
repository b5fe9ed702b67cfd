// SPDX-License-Identifier: Apache-2.0
//! Attaches to each guest that KVM runs on this host: `patchbay attach --all`.
//!
//! For a daemon, `patchbay-attach.service` runs it with a run directory. Then the daemon needs none
//! of the rights of an attacher.

use std::io::IsTerminal;
use std::path::Path;

use anyhow::Context;
use patchbay_attach::terminal::say;
use patchbay_service::keys::declared::Declarations;
use patchbay_supervisor::{Attacher, Earlier, Places, Supervisor, Target, Vms, runs, sockets_of};
use tokio::signal::unix::{SignalKind, signal};

use crate::args::All;

/// Keeps one process like this one for each guest, until a signal arrives. SIGHUP ends this process
/// only if it comes from a terminal. Otherwise the attachers open their audit log again, if there
/// is one.
///
/// # Errors
/// A file of the options cannot be used, the host's kernel cannot be read and no daemon uses the
/// sockets, or the folder of the sockets cannot be created.
pub fn run(all: &All) -> anyhow::Result<()> {
    // The attachers read these files themselves. They are read here first, so that an error ends
    // the command and does not repeat in each attacher.
    crate::debug_files(&all.shared)?;
    Declarations::read(all.shared.keys_dir.as_deref())?;
    let run_dir = match &all.run_dir {
        Some(folder) => crate::created(folder.clone())?,
        None => crate::run_folder()?,
    };
    let attacher = Attacher {
        program: std::env::current_exe().context("this program is not found")?,
        arguments: all.shared.words(),
        run_dir: run_dir.clone(),
        names_sockets: all.run_dir.is_none(),
        outlives: false,
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let mut places = Places::new(all.qmp.clone(), all.libvirt.clone(), vms(all)?);
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let mut hangup = signal(SignalKind::hangup())?;
        let has_terminal = std::io::stdin().is_terminal();
        let mut supervisor = Supervisor::new(attacher);
        let found = match all.no_processes {
            true => "the monitors report",
            false => "KVM runs on this host",
        };
        say(format_args!("attaching to each guest that {found}"));
        let is_free = |target: &Target| is_free(&run_dir, &target.name());
        loop {
            tokio::select! {
                () = supervisor.run(&mut places, &is_free, |_| Earlier::None) => {}
                _ = interrupt.recv() => break,
                _ = terminate.recv() => break,
                _ = hangup.recv() => {
                    if has_terminal {
                        break;
                    }
                    // An attacher without a log would detach.
                    if all.shared.audit_log.is_some() {
                        supervisor.hang_up();
                    }
                }
            }
        }
        tokio::select! {
            () = supervisor.end() => {}
            // A second signal ends this process without waiting, and the attachers notice its end.
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        Ok(())
    })
}

/// Returns the finder of the VMs of this host. A daemon's attacher waits until the host's kernel
/// can be read, because KVM may be loaded later.
fn vms(all: &All) -> anyhow::Result<Option<Vms>> {
    let namers = all.names_of.iter().copied().collect();
    if all.no_processes {
        return Ok(None);
    }
    if all.run_dir.is_some() {
        return Ok(Some(Vms::new(namers)));
    }
    let vms = Vms::open(namers).context(
        "the host's kernel cannot be read, so no guest is found; run as root, and see the requirements of `patchbay host list`",
    )?;
    Ok(Some(vms))
}

/// Returns whether no other program serves a guest under this name in the folder of the sockets.
fn is_free(run_dir: &Path, name: &str) -> bool {
    !sockets_of(run_dir, name).iter().any(|socket| runs(socket))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use clap::Parser;

    use super::*;
    use crate::args::{Command, CommandLine};

    #[test]
    fn files_that_cannot_be_used_are_refused_at_the_start() {
        // The folder cannot be created, so a command that does not check the files ends too.
        let line = "a all --run-dir /proc/none --no-processes --qmp q";
        for (option, expected) in [
            ("--keys-dir", "/proc/keys.d"),
            ("--debug-file", "the debug file /proc/keys.d cannot be used"),
        ] {
            let words = line.split(' ').chain([option, "/proc/keys.d"]);
            let Command::All(all) = CommandLine::parse_from(words).command else {
                panic!("{line}")
            };
            let error = format!("{:#}", run(&all).expect_err(option));
            assert!(error.contains(expected), "{error}");
            assert_eq!(error.matches("No such file").count(), 1, "{error}");
        }
    }

    #[test]
    fn a_name_that_another_program_serves_is_not_free() {
        let folder = tempfile::tempdir().expect("a folder");
        let is_free = |name: &str| is_free(folder.path(), name);
        std::fs::create_dir(folder.path().join("web")).expect("room");
        for socket in ["web.sock", "web/api.sock"] {
            let socket = folder.path().join(socket);
            assert!(is_free("web"));
            let listener = UnixListener::bind(&socket).expect("free");
            assert!(!is_free("web"), "{}", socket.display());
            assert!(is_free("web-7"));
            // The program was killed.
            drop(listener);
        }
        assert!(is_free("web"));
    }
}
