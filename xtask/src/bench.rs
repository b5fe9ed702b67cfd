// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask bench`: benchmarks by name, each where it can run.

use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};

use crate::{cargo, host, lab};

/// A benchmark with bare-metal guests.
struct Bench {
    name: &'static str,
    about: &'static str,
    package: &'static str,
    /// The `[[bench]]` target.
    target: &'static str,
}

const BENCHES: &[Bench] = &[Bench {
    name: "pause",
    about: "stop, patch and resume of spinning vCPUs",
    package: "patchbay-vmm",
    target: "pause",
}];

/// Runs one benchmark, or lists them.
pub fn run(name: Option<&str>, arguments: &[String]) -> Result<ExitCode> {
    let Some(name) = name else {
        for bench in BENCHES {
            println!("{:10} {}", bench.name, bench.about);
        }
        return Ok(ExitCode::SUCCESS);
    };
    let Some(bench) = BENCHES.iter().find(|bench| bench.name == name) else {
        let names: Vec<&str> = BENCHES.iter().map(|bench| bench.name).collect();
        bail!(
            "there is no benchmark {name}; there are {}",
            names.join(", ")
        );
    };
    let found =
        cargo::build_tests(&["bench", "--package", bench.package, "--bench", bench.target])?;
    let binary = found
        .first()
        .with_context(|| format!("{name} built no program"))?;
    let kvm = host::Kvm::probe();
    if kvm.runs_bare_metal() {
        let mut command = Command::new(&binary.path);
        command
            .arg("--bench")
            .args(arguments)
            .current_dir(&binary.folder);
        let status = command.status()?;
        return Ok(if status.success() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        });
    }
    eprintln!(
        "In the lab, where only ratios mean anything: {}.",
        kvm.describe()
    );
    let mut command = vec![binary.path.clone().into_os_string(), "--bench".into()];
    command.extend(arguments.iter().map(Into::into));
    let mut job = lab::Job::new(command)?;
    job.folder.clone_from(&binary.folder);
    Ok(ExitCode::from(lab::run(&job)?))
}
