// SPDX-License-Identifier: Apache-2.0
//! Makes the guest's initramfs: busybox, our init and agent, the kernel's modules, and small C
//! programs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::kernel::{self, Kernel};
use crate::step::Steps;
use crate::{cache, cargo, cpio, host};

const KIND: &str = "initramfs";
/// The name of the file in its directory.
pub const FILE: &str = "initramfs";
const BUSYBOX: &str = "/bin/busybox";
pub const INIT: &str = include_str!("../guest/init.sh");

/// Directories whose C files become programs in the guest's /bin.
const PROGRAMS: &[&str] = &["examples/getppid", "examples/sick-guest", "tests/guest"];

/// Returns the initramfs for a kernel, and builds it if it is not in the cache.
pub fn get(kernel: &Kernel) -> Result<PathBuf> {
    host::ensure_packages(host::INITRAMFS)?;
    let programs = programs(PROGRAMS)?;
    let agent = cargo::build_agent()?;
    let mut inputs = cache::Inputs::new("guest initramfs 1");
    inputs.add("init", INIT);
    inputs.add_file("busybox", Path::new(BUSYBOX))?;
    let modules = module_files(kernel)?;
    for module in &modules {
        inputs.add_file(&module.display().to_string(), module)?;
    }
    inputs.add("compiler", kernel::compiler()?);
    inputs.add_file("agent", &agent)?;
    for program in &programs {
        inputs.add_file(&program.display().to_string(), program)?;
    }
    let build = |folder: &Path| {
        let steps = Steps::new("building the guest's initramfs", &folder.join("build.log"))?;
        let modules = modules.iter().map(|path| {
            let name = path.file_name().unwrap_or_default();
            Ok((name.to_string_lossy().into_owned(), fs::read(path)?))
        });
        let contents = Contents {
            modules: modules.collect::<Result<_>>()?,
            programs: &programs,
            agent: Some(&agent),
        };
        contents.write(&steps, folder)
    };
    let folder = cache::entry(KIND, &inputs.key(), build)?;
    Ok(folder.join(FILE))
}

/// The contents of an initramfs in addition to busybox and init.
pub struct Contents<'a> {
    /// File names and contents of the modules in /lib/modules.
    pub modules: Vec<(String, Vec<u8>)>,
    /// C files of programs in /bin.
    pub programs: &'a [PathBuf],
    pub agent: Option<&'a Path>,
}

/// Returns the C files in these directories of the repository.
pub fn programs(folders: &[&str]) -> Result<Vec<PathBuf>> {
    let mut programs = Vec::new();
    for folder in folders.iter().map(|name| host::repository().join(name)) {
        if folder.exists() {
            let files = cache::files_below(&folder)?;
            programs.extend(
                files
                    .into_iter()
                    .filter(|path| path.extension() == Some("c".as_ref())),
            );
        }
    }
    Ok(programs)
}

fn module_files(kernel: &Kernel) -> Result<Vec<PathBuf>> {
    let mut files = cache::files_below(&kernel.modules())?;
    if let Some(folder) = kernel.test_modules()? {
        files.extend(cache::files_below(&folder)?);
    }
    Ok(files)
}

impl Contents<'_> {
    /// Writes the archive to [`FILE`] in `folder`.
    pub fn write(&self, steps: &Steps, folder: &Path) -> Result<()> {
        let mut archive = cpio::Archive::default();
        for path in ["bin", "dev", "proc", "sys", "tmp", "lib", "lib/modules"] {
            archive.directory(path);
        }
        archive.character_device("dev/console", 5, 1);
        archive.file("init", 0o755, INIT.as_bytes());
        archive.file("bin/busybox", 0o755, &fs::read(BUSYBOX)?);
        if let Some(agent) = self.agent {
            archive.file("bin/patchbay-agent", 0o755, &fs::read(agent)?);
        }
        for applet in applets()?.lines().filter(|applet| *applet != "busybox") {
            archive.symlink(&format!("bin/{applet}"), "busybox");
        }
        for (name, content) in &self.modules {
            archive.file(&format!("lib/modules/{name}"), 0o644, content);
        }
        for source in self.programs {
            let name = source.file_stem().unwrap_or_default().to_string_lossy();
            let program = folder.join(&*name);
            let mut compile = Command::new("gcc");
            compile.args([
                "-O2", "-Wall", "-Wextra", "-Werror", "-static", "-pthread", "-o",
            ]);
            steps.run(
                &format!("compiling {name}"),
                compile.arg(&program).arg(source),
            )?;
            archive.file(&format!("bin/{name}"), 0o755, &fs::read(&program)?);
        }
        fs::write(folder.join(FILE), archive.finish())?;
        Ok(())
    }
}

/// Returns the names under which busybox can be called.
fn applets() -> Result<String> {
    let output = Command::new(BUSYBOX)
        .arg("--list")
        .output()
        .with_context(|| format!("cannot run {BUSYBOX}"))?;
    ensure!(output.status.success(), "{BUSYBOX} --list failed");
    Ok(String::from_utf8(output.stdout)?)
}
