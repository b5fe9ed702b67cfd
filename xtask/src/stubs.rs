// SPDX-License-Identifier: Apache-2.0
//! Generates the clients' code. `cargo xtask stubs` writes it, and the tests compare it with a new
//! generation from the interface.
//!
//! One protobuf compiler serves both languages: the one in Python's grpcio-tools. The plugins for
//! Go come from the Go module proxy. All versions are fixed, because they are part of the output.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::step::Steps;
use crate::{cache, host};

/// The files of the interface below `proto`, each with the Go package of its messages.
const FILES: &[(&str, &str)] = &[
    ("patchbay/options/v1/options.proto", "options/v1;optionsv1"),
    ("patchbay/v1/errors.proto", "v1;patchbayv1"),
    ("patchbay/v1/guest.proto", "v1;patchbayv1"),
    ("patchbay/v1/static_keys.proto", "v1;patchbayv1"),
    ("patchbay/v1/tracepoints.proto", "v1;patchbayv1"),
];
const REQUIREMENTS: &str = "clients/python/requirements-dev.txt";
const GO_PLUGINS: &[&str] = &[
    "google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.11",
    "google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.2",
];
/// The module's name in clients/go/go.mod.
const GO_MODULE: &str = "patchbay.example/go";

/// The generated files of each language: their folder in the repository and their endings.
const PLACES: &[(&str, &[&str])] = &[
    ("clients/python/src/patchbay/options/v1", PYTHON),
    ("clients/python/src/patchbay/v1", PYTHON),
    ("clients/go/options/v1", GO),
    ("clients/go/v1", GO),
];
const PYTHON: &[&str] = &["_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi"];
const GO: &[&str] = &[".pb.go"];

/// A Python interpreter with the packages of the client's requirements.
pub struct Python {
    site: PathBuf,
}

impl Python {
    /// Installs the packages into the cache unless they are there.
    pub fn get() -> Result<Self> {
        let version = Command::new("python3").arg("--version").output();
        let version = version.context("python3 cannot be run; install the package python3")?;
        let requirements = host::repository().join(REQUIREMENTS);
        let mut inputs = cache::Inputs::new("python 1");
        // Some packages have parts that are compiled for one version of Python.
        inputs.add("version", version.stdout);
        inputs.add_file("requirements", &requirements)?;
        let site = cache::entry("python", &inputs.key(), |folder| {
            let pip = Command::new("python3")
                .args(["-m", "pip", "--version"])
                .output();
            if !pip.is_ok_and(|output| output.status.success()) {
                host::ensure_packages(&["python3-pip"])?;
            }
            let steps = Steps::new("fetching Python packages", &folder.join("build.log"))?;
            let mut install = Command::new("python3");
            install
                .args(["-m", "pip", "install", "--target"])
                .arg(folder.join("site"))
                .arg("--requirement")
                .arg(&requirements);
            steps.run("pip install", &mut install)?;
            // The script that pip writes would name the folder of the unfinished cache entry.
            let plugin = folder.join("protoc-gen-mypy");
            fs::write(&plugin, "#!/bin/sh\nexec python3 -m mypy_protobuf.main\n")?;
            let mut plugin_grpc = plugin.clone().into_os_string();
            plugin_grpc.push("_grpc");
            let text = "#!/bin/sh\nexec python3 -c \
                        'from mypy_protobuf.main import grpc; grpc()'\n";
            fs::write(&plugin_grpc, text)?;
            let mut executable = Command::new("chmod");
            executable
                .arg("+x")
                .args([plugin.as_os_str(), &plugin_grpc]);
            steps.run("chmod", &mut executable)
        })?;
        Ok(Self { site })
    }

    /// Returns a command for Python with the packages, run in the repository.
    pub fn command(&self) -> Command {
        let mut command = Command::new("python3");
        command
            .env("PYTHONPATH", self.site.join("site"))
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .current_dir(host::repository());
        command
    }

    /// Returns the folder with the packages.
    pub fn packages(&self) -> PathBuf {
        self.site.join("site")
    }
}

/// Installs the Go plugins into the cache unless they are there, and returns their folder.
fn go_plugins() -> Result<PathBuf> {
    let mut inputs = cache::Inputs::new("go plugins 1");
    for plugin in GO_PLUGINS {
        inputs.add("plugin", plugin);
    }
    cache::entry("go", &inputs.key(), |folder| {
        let steps = Steps::new("fetching Go's protobuf plugins", &folder.join("build.log"))?;
        for plugin in GO_PLUGINS {
            let mut install = Command::new("go");
            install
                .args(["install", plugin])
                .env("GOBIN", folder)
                .env("GOFLAGS", "");
            steps.run(&format!("go install {plugin}"), &mut install)?;
        }
        Ok(())
    })
}

/// Writes the stubs into the clients.
pub fn write() -> Result<()> {
    let fresh = generate()?;
    for (place, endings) in PLACES {
        let folder = host::repository().join(place);
        fs::create_dir_all(&folder)?;
        for name in generated(&folder, endings)? {
            fs::remove_file(folder.join(name))?;
        }
        for name in generated(&fresh.path().join(place), endings)? {
            fs::copy(fresh.path().join(place).join(&name), folder.join(&name))
                .with_context(|| format!("cannot write {name}"))?;
        }
    }
    Ok(())
}

/// Returns the names of the files that differ from a new generation.
pub fn drift() -> Result<Vec<String>> {
    let fresh = generate()?;
    let mut differ = Vec::new();
    for (place, endings) in PLACES {
        let (new, old) = (fresh.path().join(place), host::repository().join(place));
        let mut names = generated(&new, endings)?;
        names.extend(generated(&old, endings)?);
        names.sort();
        names.dedup();
        for name in names {
            let same = fs::read(new.join(&name)).ok() == fs::read(old.join(&name)).ok();
            if !same {
                differ.push(format!("{place}/{name}"));
            }
        }
    }
    Ok(differ)
}

/// Generates everything into a temporary folder with the same layout as the repository.
fn generate() -> Result<tempfile::TempDir> {
    let (python, go) = (Python::get()?, go_plugins()?);
    let folder = tempfile::tempdir()?;
    let python_out = folder.path().join("clients/python/src");
    let go_out = folder.path().join("clients/go");
    fs::create_dir_all(&python_out)?;
    fs::create_dir_all(&go_out)?;
    let protoc = || {
        let mut command = python.command();
        command
            .args(["-m", "grpc_tools.protoc", "--proto_path"])
            .arg(host::repository().join("proto"));
        command
    };
    let files = || FILES.iter().map(|(file, _)| file);

    let mut command = protoc();
    for plugin in ["mypy", "mypy_grpc"] {
        let path = python.site.join(format!("protoc-gen-{plugin}"));
        command.arg(option(&format!("--plugin=protoc-gen-{plugin}="), &path));
    }
    for output in ["python", "grpc_python", "mypy", "mypy_grpc"] {
        command.arg(option(&format!("--{output}_out="), &python_out));
    }
    succeed(command.args(files()))?;

    let mut command = protoc();
    for plugin in ["go", "go-grpc"] {
        let path = go.join(format!("protoc-gen-{plugin}"));
        command.arg(option(&format!("--plugin=protoc-gen-{plugin}="), &path));
        command.arg(option(&format!("--{plugin}_out="), &go_out));
        command.arg(format!("--{plugin}_opt=module={GO_MODULE}"));
        for (file, package) in FILES {
            command.arg(format!("--{plugin}_opt=M{file}={GO_MODULE}/{package}"));
        }
    }
    succeed(command.args(files()))?;
    Ok(folder)
}

fn option(name: &str, path: &Path) -> std::ffi::OsString {
    let mut option = std::ffi::OsString::from(name);
    option.push(path);
    option
}

fn succeed(command: &mut Command) -> Result<()> {
    let output = command.output().context("python3 cannot be run")?;
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        bail!("{command:?} failed ({}): {message}", output.status);
    }
    Ok(())
}

fn generated(folder: &Path, endings: &[&str]) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("no {}", folder.display()))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if endings.iter().any(|ending| name.ends_with(ending)) {
            names.push(name);
        }
    }
    Ok(names)
}
