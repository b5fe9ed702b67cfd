// SPDX-License-Identifier: Apache-2.0
//! Attaches to each guest that KVM runs on this host: `patchbay attach --all`.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};

use anyhow::Context;
use patchbay_supervisor::{Attacher, Earlier, Owner, SETTLE, Supervisor, Target, Vms, runs};
use tokio::signal::unix::{SignalKind, signal};

use crate::args::NAMES_OF;

/// Keeps one process like this one for each guest, until a signal arrives. `arguments` are those of
/// this process; each attacher gets them without --names-of. The guests of the host's root and of
/// `namers` have the names that their monitors give them.
///
/// # Errors
/// The host's kernel cannot be read, or the folder of the sockets cannot be created.
pub fn run(arguments: impl Iterator<Item = OsString>, namers: BTreeSet<u32>) -> anyhow::Result<()> {
    let attacher = Attacher {
        program: std::env::current_exe().context("this program is not found")?,
        arguments: without_names_of(arguments),
        run_dir: crate::run_folder()?,
        outlives: false,
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let mut vms = Vms::open(namers).context(
            "the host's kernel cannot be read, so no guest is found; run as root, and see the requirements of `patchbay host list`",
        )?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let mut supervisor = Supervisor::new(attacher.clone());
        eprintln!("attaching to each guest that KVM runs on this host");
        loop {
            tokio::select! {
                () = vms.changed() => {}
                _ = supervisor.attacher_ended() => {
                    vms.hurry();
                    tokio::time::sleep(SETTLE).await;
                }
                _ = interrupt.recv() => break,
                _ = terminate.recv() => break,
            }
            // If another process serves a guest under this name, that is a different guest.
            let is_free = |target: &Target| !runs(&attacher.socket(target));
            vms.take(is_free, |_| Earlier::None);
            supervisor.set(vms.targets(|_, _| Owner::Process));
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

/// Removes the option --names-of and its values, because an attacher does not have the option.
fn without_names_of(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let option = format!("--{NAMES_OF}");
    let (mut kept, mut is_value) = (Vec::new(), false);
    for word in arguments {
        let is_option = word == OsStr::new(&option);
        let has_value = word
            .as_encoded_bytes()
            .strip_prefix(option.as_bytes())
            .is_some_and(|rest| rest.starts_with(b"="));
        if !std::mem::replace(&mut is_value, is_option) && !is_option && !has_value {
            kept.push(word);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attachers_get_all_other_options() {
        let kept = |line: &str| {
            let words = line.split(' ').map(OsString::from);
            let words = without_names_of(words).join(OsStr::new(" "));
            words.into_string().expect("text")
        };
        for (line, expected) in [
            ("--memory process", "--memory process"),
            ("--names-of 107 --memory process", "--memory process"),
            ("--memory process --names-of=107", "--memory process"),
            (
                "--names-of 1 --names-of 2 --allow-guarded",
                "--allow-guarded",
            ),
        ] {
            assert_eq!(kept(line), expected);
        }
    }
}
