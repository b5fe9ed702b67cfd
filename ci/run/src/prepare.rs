// SPDX-License-Identifier: Apache-2.0
//! Prepares guests from the command line: the initramfs, the monitor and the configuration.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::args::GuestArgs;
use crate::guest::{self, Config};
use crate::interrupt::Halt;
use crate::overlay::{self, Overlay};
use crate::runner::{Runner, Times};
use crate::{place, programs};

const BOOT_LIMIT: Duration = Duration::from_secs(100);

/// Returns a runner of the command, the time that the preparation took, and the directory with the
/// files of the guests.
///
/// # Errors
/// A file is missing or malformed, or the initramfs cannot be written.
pub async fn runner(
    arguments: &GuestArgs,
    limit: Duration,
    halt: Halt,
) -> Result<(Runner, Duration, TempDir)> {
    let start = Instant::now();
    let files = tempfile::Builder::new()
        .prefix("patchbay-ci-")
        .tempdir()
        .context("cannot create a temporary directory")?;
    // A separate thread reads the files to copy, because that may take long and a signal must be
    // able to end the run meanwhile.
    let (of_thread, folder) = (arguments.clone(), files.path().to_owned());
    let config = tokio::task::spawn_blocking(move || prepare(&of_thread, &folder)).await??;
    let runner = Runner::new(
        config,
        arguments.command.clone(),
        limit,
        arguments.set.clone(),
        halt,
    );
    Ok((runner, start.elapsed(), files))
}

/// Prints how the time was spent.
pub fn print_times(start: Instant, preparation: Duration, runner: &Runner, jobs: usize) {
    tell!(
        "patchbay: {}",
        times(start.elapsed(), preparation, &runner.times, jobs)
    );
}

fn times(whole: Duration, preparation: Duration, times: &Times, jobs: usize) -> String {
    let seconds = |time: Duration| format!("{:.2} s", time.as_secs_f64());
    let counted = |count: u32, one: &str, several: &str, time: Duration| {
        let what = if count == 1 { one } else { several };
        format!("{count} {what} {}", seconds(time))
    };
    let mut parts = vec![
        format!("preparation {}", seconds(preparation)),
        counted(times.boots, "boot", "boots", times.boot),
    ];
    if times.copies > 0 {
        parts.push(format!("snapshot {}", seconds(times.save)));
        parts.push(counted(times.copies, "copy", "copies", times.copy));
    }
    parts.push(format!("commands {}", seconds(times.commands)));
    // The times of copies that ran at once add up to more than the whole.
    parts.push(match jobs {
        0 | 1 => {
            let known = preparation + times.boot + times.save + times.copy + times.commands;
            format!("the rest {}", seconds(whole.saturating_sub(known)))
        }
        jobs => format!("up to {jobs} copies at once"),
    });
    format!("{}: {}", seconds(whole), parts.join(", "))
}

/// The initramfs of a guest, in memory, and the paths of its monitor and of its commands'
/// directory.
pub struct Parts {
    overlay: Overlay,
    monitor: PathBuf,
    directory: PathBuf,
}

impl Parts {
    /// Checks the kernel, makes the initramfs, and finds the monitor.
    ///
    /// # Errors
    /// A file is missing or malformed.
    pub fn gather(arguments: &GuestArgs) -> Result<Self> {
        guest::check_kernel(&arguments.kernel)?;
        let directory = std::env::current_dir().context("the current directory does not exist")?;
        let overlay = overlay::make(&overlay::Contents {
            initrd: arguments.initrd.as_deref(),
            busybox: &programs::busybox()?,
            agent: &programs::agent(arguments.agent.as_deref())?,
            copies: arguments.copy.clone(),
            modules: arguments.modules.as_deref(),
            directory: &directory,
        })?;
        let monitor = programs::monitor(arguments.monitor.as_deref())?;
        ensure!(
            monitor.is_file(),
            "the monitor {} does not exist; name another with --monitor",
            monitor.display()
        );
        Ok(Self {
            overlay,
            monitor,
            directory,
        })
    }
}

/// Fails before the run if its results cannot be written at the end.
pub fn check_folder_of(file: &Path) -> Result<()> {
    let folder = file.parent().filter(|path| !path.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    ensure!(
        folder.is_dir(),
        "cannot write {}: {} is not a folder",
        file.display(),
        folder.display()
    );
    ensure!(
        !file.is_dir(),
        "cannot write {}: it is a folder",
        file.display()
    );
    Ok(())
}

/// Makes the initramfs and the guest's configuration.
fn prepare(arguments: &GuestArgs, files: &Path) -> Result<Config> {
    let Parts {
        overlay,
        monitor,
        directory,
    } = Parts::gather(arguments)?;
    let initramfs = files.join("initramfs");
    std::fs::write(&initramfs, &overlay.bytes)
        .with_context(|| format!("cannot write the initramfs {}", initramfs.display()))?;
    Ok(Config {
        monitor,
        kernel: arguments.kernel.clone(),
        initramfs,
        vcpus: arguments.vcpus,
        memory: arguments.memory.clone(),
        command_line: format!("{}{}", arguments.append, place::kernel_words()),
        allow_guarded: arguments.allow_guarded,
        acpi_devices: overlay.acpi_devices,
        boot_limit: place::patience(BOOT_LIMIT),
        show_console: arguments.show_console,
        environment: overlay.environment()?,
        directory,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_times_say_what_ran_at_once() {
        let second = Duration::from_secs(1);
        let mut spent = Times {
            boots: 2,
            boot: 3 * second,
            commands: 4 * second,
            ..Times::default()
        };
        assert_eq!(
            times(10 * second, second, &spent, 1),
            "10.00 s: preparation 1.00 s, 2 boots 3.00 s, commands 4.00 s, the rest 2.00 s"
        );
        spent.boots = 1;
        spent.save = second;
        spent.copies = 8;
        spent.copy = 9 * second;
        assert_eq!(
            times(10 * second, second, &spent, 2),
            "10.00 s: preparation 1.00 s, 1 boot 3.00 s, snapshot 1.00 s, 8 copies 9.00 s, \
             commands 4.00 s, up to 2 copies at once"
        );
    }

    #[test]
    fn a_folder_is_no_file_for_results() {
        let folder = tempfile::tempdir().unwrap();
        check_folder_of(&folder.path().join("plot.svg")).unwrap();
        check_folder_of(folder.path()).unwrap_err();
        check_folder_of(&folder.path().join("missing/plot.svg")).unwrap_err();
    }
}
