// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask doctor` reports what this machine can and cannot do, and why.

use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::Result;

use crate::kernel::{self, Recipe};
use crate::{cache, host, lab_image};

/// Disk space for the tree of a kernel build.
const DISK_NEEDED_GIB: u64 = 4;

struct Report {
    able: bool,
}

impl Report {
    fn line(&self, subject: &str, text: &str) {
        let mut lines = text.lines();
        println!("{subject:<16}{}", lines.next().unwrap_or_default());
        for line in lines {
            println!("{:<16}{line}", "");
        }
    }

    /// Reports that something is missing that the demo and the tests need.
    fn obstacle(&mut self, subject: &str, text: &str) {
        self.able = false;
        self.line(subject, text);
    }
}

/// Prints the report. Fails if the demo and the tests cannot run even after packages are installed.
pub fn run() -> Result<ExitCode> {
    let mut report = Report { able: true };
    machine(&mut report);
    let kvm = host::Kvm::probe();
    report.line("kvm", kvm.describe());
    report.line("tier 1", "runs here");
    report.line(
        "tier 2",
        if kvm.runs_bare_metal() {
            "runs here"
        } else {
            "runs in the lab"
        },
    );
    let linux = match kvm.runs_linux() {
        true => "runs here",
        false => "runs in the lab (no VMX or SVM here): correct but slow, and times mean little",
    };
    report.line("tier 3, demo", linux);
    packages(&mut report, kvm)?;
    toolchain(&mut report);
    cached(&report)?;
    disk(&mut report)?;
    let verdict = match report.able {
        true => "`cargo xtask demo` and `cargo xtask test` can run",
        false => "`cargo xtask demo` and `cargo xtask test` cannot run yet; see above",
    };
    report.line("verdict", verdict);
    Ok(if report.able {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn machine(report: &mut Report) {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = memory
        .split_whitespace()
        .nth(1)
        .and_then(|kib| kib.parse::<u64>().ok());
    let memory = kib.map_or("?".into(), |kib| (kib >> 20).to_string());
    let architecture = std::env::consts::ARCH;
    let text = format!("{architecture}, {cpus} CPUs, {memory} GiB of memory");
    match architecture {
        "x86_64" => report.line("machine", &text),
        _ => report.obstacle("machine", &format!("{text}; Patchbay needs x86_64")),
    }
}

fn packages(report: &mut Report, kvm: host::Kvm) -> Result<()> {
    let mut wanted = Recipe::standard().packages();
    wanted.extend(host::INITRAMFS.iter().map(|package| (*package).to_owned()));
    if !(kvm.runs_linux() && kvm.runs_bare_metal()) {
        wanted.extend(host::LAB.iter().map(|package| (*package).to_owned()));
    }
    let missing = host::missing_packages(&wanted.iter().map(String::as_str).collect::<Vec<_>>());
    match missing {
        Err(error) => report.obstacle("packages", &format!("{error:#}")),
        Ok(missing) if missing.is_empty() => report.line("packages", "all installed"),
        Ok(missing) => {
            let command = host::install_command(&missing);
            let text = format!("missing: {}", missing.join(" "));
            if host::root_prefix().is_some() {
                report.line(
                    "packages",
                    &format!("{text}\ninstalled when needed, or by\n{command}"),
                );
            } else {
                report.obstacle("packages", &format!("{text}\ninstall them with\n{command}"));
            }
        }
    }
    Ok(())
}

fn toolchain(report: &mut Report) {
    for program in ["rustc", "cc"] {
        let version = Command::new(program).arg("--version").output();
        match version {
            Ok(output) if output.status.success() => {
                let text = String::from_utf8_lossy(&output.stdout).into_owned();
                report.line(program, text.lines().next().unwrap_or_default());
            }
            _ => report.obstacle(program, "missing or not working"),
        }
    }
}

fn cached(report: &Report) -> Result<()> {
    report.line("cache", &cache::root()?.display().to_string());
    let state = |cached: Result<bool>| match cached {
        Ok(true) => "ready".to_owned(),
        Ok(false) => "not built yet".to_owned(),
        Err(error) => format!("not built yet ({error:#})"),
    };
    report.line(
        "  guest kernel",
        &state(kernel::is_cached(&Recipe::standard())),
    );
    for (name, recipe) in [
        ("  unpatched", Recipe::unpatched()),
        ("  no data symbols", Recipe::without_data_symbols()),
        ("  oldest", Recipe::oldest()),
        ("  newest", Recipe::newest()),
        ("  no jump labels", Recipe::without_jump_labels()),
    ] {
        report.line(name, &state(kernel::is_cached(&recipe)));
    }
    report.line("  lab", &state(lab_image::is_cached()));
    for kind in ["kernel", "initramfs", "lab"] {
        let folder = cache::root()?.join(kind);
        if folder.exists() {
            report.line(
                &format!("  {kind}/"),
                &format!("{} MiB", size(&folder) >> 20),
            );
        }
    }
    Ok(())
}

/// Returns the total size of the files below a directory. Files that disappear meanwhile are
/// skipped.
fn size(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => size(&entry.path()),
            Ok(metadata) => metadata.len(),
            Err(_) => 0,
        })
        .sum()
}

fn disk(report: &mut Report) -> Result<()> {
    let cache = cache::root()?;
    let existing = cache
        .ancestors()
        .find(|folder| folder.exists())
        .unwrap_or(Path::new("/"));
    let space = rustix::fs::statvfs(existing)?;
    let gib = (space.f_bavail * space.f_frsize) >> 30;
    let text = format!("{gib} GiB free for the cache");
    if gib < DISK_NEEDED_GIB {
        let more = format!("{text}; a kernel build needs {DISK_NEEDED_GIB} GiB");
        report.obstacle("disk", &more);
    } else {
        report.line("disk", &text);
    }
    Ok(())
}
