// SPDX-License-Identifier: Apache-2.0
//! Attaches to each guest that KVM runs on this host: `patchbay attach --all`.

use std::ffi::OsString;

use anyhow::Context;
use patchbay_supervisor::{Attacher, SETTLE, Supervisor, Target, Vms, runs};
use tokio::signal::unix::{SignalKind, signal};

/// Keeps one process like this one for each guest, until a signal arrives. `arguments` are passed
/// on to all of them.
///
/// # Errors
/// The host's kernel cannot be read, or the folder of the sockets cannot be created.
pub fn run(arguments: Vec<OsString>) -> anyhow::Result<()> {
    let attacher = Attacher {
        program: std::env::current_exe().context("this program is not found")?,
        arguments,
        run_dir: crate::run_folder()?,
        outlives: false,
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let mut vms = Vms::open().context(
            "the host's kernel cannot be read, so no guest is found; run as root, and see the requirements of `patchbay host list`",
        )?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let mut supervisor = Supervisor::new(attacher.clone());
        eprintln!("attaching to each guest that KVM runs on this host");
        loop {
            // A guest that another process serves under this name is another guest.
            let is_free = |target: &Target| !runs(&attacher.socket(target));
            vms.scan_if_due(is_free, |target| attacher.serves(target)).await;
            supervisor.set(vms.targets(|_| false));
            tokio::select! {
                () = vms.changed() => {}
                () = supervisor.attacher_ended() => {
                    vms.hurry();
                    tokio::time::sleep(SETTLE).await;
                }
                _ = interrupt.recv() => break,
                _ = terminate.recv() => break,
            }
        }
        supervisor.end().await;
        Ok(())
    })
}
