// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask demo` prepares everything and runs one of the examples.

use std::ffi::OsString;
use std::process::{Command, ExitCode};
use std::thread;

use anyhow::{Context, Result, anyhow, bail};

use crate::{cargo, guest, host, lab, stock};

/// The demos and their programs. The first one is the default.
const DEMOS: [(&str, &str); 5] = [
    (STOCK, "stock-demo"),
    ("getppid", "getppid-demo"),
    ("trace", "trace-demo"),
    ("sick-guest", "sick-guest-demo"),
    (ROLLOUT, "rollout-demo"),
];

/// The demo that builds no kernel.
const STOCK: &str = "stock";

/// The demo with a controller.
const ROLLOUT: &str = "rollout";

/// The demo without a virtual machine.
const FLEET: &str = "fleet";

/// Runs the demo with the arguments and returns its exit status.
pub fn run(mut arguments: Vec<OsString>) -> Result<ExitCode> {
    if arguments.first().is_some_and(|name| name == FLEET) {
        return fleet(&arguments[1..]);
    }
    let named = arguments
        .first()
        .and_then(|argument| DEMOS.iter().find(|(name, _)| argument == name));
    if named.is_some() {
        arguments.remove(0);
    } else if let Some(other) = arguments.first()
        && !other.as_encoded_bytes().starts_with(b"-")
    {
        let names = DEMOS.map(|(name, _)| name).join(", ");
        bail!(
            "there is no demo {}; use one of {names} and {FLEET}",
            other.display()
        );
    }
    let (name, program) = named.unwrap_or(&DEMOS[0]);
    let variables = match *name {
        STOCK => {
            host::ensure_packages(host::LAB)?;
            // Both builds at once take less time, because each has phases that use one CPU.
            let libkrun = thread::spawn(guest::libkrun);
            let prepared = guest::programs(&[program]).and_then(|mut variables| {
                variables.push(stock::cloud_6_12()?);
                Ok(variables)
            });
            // Otherwise cargo would continue after this process has ended.
            let libkrun = libkrun.join();
            let mut variables = prepared?;
            variables.push(libkrun.map_err(|_| anyhow!("the build of libkrun panicked"))?);
            variables
        }
        ROLLOUT => guest::prepare(&[program, guest::CONTROLLER])?,
        _ => guest::prepare(&[program])?,
    };
    guest::announce_place();
    let program = cargo::program(program);
    let page = match *name {
        ROLLOUT => Some(free_port()?),
        _ => None,
    };
    if let Some(port) = page {
        arguments.push(format!("--page=127.0.0.1:{port}").into());
    }
    if host::Kvm::probe().runs_linux() {
        let mut command = Command::new(&program);
        command.args(arguments).envs(variables);
        let status = command
            .status()
            .with_context(|| format!("no {}", program.display()))?;
        return Ok(if status.success() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        });
    }
    if let Some(port) = page {
        arguments.push(format!("--forwarded={}:{port}", lab::ADDRESS).into());
    }
    let mut command = vec![program.into_os_string()];
    command.extend(arguments);
    let mut job = lab::Job::new(command, &host::lab_output())?;
    job.set(variables);
    job.tcp_port = page;
    job.interrupts = Some(lab::Interrupts::catch()?);
    Ok(ExitCode::from(lab::run(&job)?))
}

/// Returns a free port of the loopback interface for a controller's page.
fn free_port() -> Result<u16> {
    let socket = std::net::TcpListener::bind("127.0.0.1:0").context("no port is free")?;
    Ok(socket.local_addr()?.port())
}

/// Runs guests in memory and the controller's page in one process.
fn fleet(arguments: &[OsString]) -> Result<ExitCode> {
    const EXAMPLE: [&str; 4] = ["--package", "patchbay-fleet", "--example", "demo"];
    // The build is a separate command without `--quiet`, because the first build takes minutes and
    // should show its progress.
    cargo::run(cargo::cargo("build").args(EXAMPLE))?;
    let mut command = cargo::cargo("run");
    command.arg("--quiet").args(EXAMPLE).arg("--");
    let status = command.args(arguments).status();
    let status = status.context("cargo cannot be run")?;
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
