// SPDX-License-Identifier: Apache-2.0
//! Provides the lab's boot files: a stock kernel of Debian, of the 6.12 series unless [`VARIABLE`]
//! names another, and a small initramfs.
//!
//! The initramfs consists of two archives in sequence: the one that this module makes and caches,
//! and one that [`crate::machine`] makes for each job.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::step::Steps;
use crate::{cache, cpio, modules, packages};

/// The meta package that depends on the newest kernel of the series. The "cloud" flavour has no 9p.
const KERNEL_PACKAGE: &str = "linux-image-6.12-amd64";

/// The environment variable that names another package of Debian with a kernel for the lab, for
/// example `linux-image-amd64`, or with a suite, `trixie-backports/linux-image-amd64`.
pub const VARIABLE: &str = "PATCHBAY_LAB_KERNEL";

/// Modules to load in this order, with their dependencies.
const MODULES: &[&str] = &[
    "9pnet_virtio",
    "9p",
    "overlay",
    "kvm_amd",
    "vhost_vsock",
    "virtio_net",
];

/// The kernel's command line. An oops or panic ends the lab: the kernel reboots, and QEMU's
/// `-no-reboot` turns the reboot into an exit.
pub const COMMAND_LINE: &str = "console=ttyS0 loglevel=6 panic=-1 oops=panic nokaslr \
     mitigations=off tsc=reliable no_timer_check rcupdate.rcu_expedited=1 audit=0";

const KIND: &str = "lab";

/// The image's files in the cache.
pub struct Image {
    /// The kernel, in the form that QEMU's `-kernel` takes.
    pub kernel: PathBuf,
    /// An archive with busybox and the kernel's modules.
    pub modules: PathBuf,
}

/// Modules to load before [`MODULES`] if another kernel is named. They are parts of Debian's
/// kernels since 6.12.
const OF_OTHERS: &[&str] = &["virtio_pci", "virtio_console"];

/// Returns the modules of the lab's kernel.
fn wanted() -> Vec<&'static str> {
    let others = if kernel() == KERNEL_PACKAGE {
        &[]
    } else {
        OF_OTHERS
    };
    [others, MODULES].concat()
}

/// Returns the lab's kernel as `PACKAGE`, or as `SUITE/PACKAGE` if apt's sources on this machine
/// do not have the package.
fn kernel() -> String {
    let name = std::env::var(VARIABLE).ok();
    let name = name.filter(|name| !name.is_empty());
    name.unwrap_or_else(|| KERNEL_PACKAGE.to_owned())
}

/// Returns the cache key. It does not contain the package's version, so that an existing lab works
/// without the network and does not change unexpectedly.
fn key() -> String {
    let mut inputs = cache::Inputs::new("lab image 2");
    inputs.add("kernel", kernel());
    inputs.add("modules", wanted().join(" "));
    inputs.key()
}

/// Returns whether the image is in the cache.
pub fn is_cached() -> Result<bool> {
    cache::has(KIND, &key())
}

/// Returns the image, and makes it if it is not in the cache.
pub fn get() -> Result<Image> {
    let folder = cache::entry(KIND, &key(), build)?;
    Ok(Image {
        kernel: folder.join("vmlinuz"),
        modules: folder.join("modules.cpio"),
    })
}

fn build(folder: &Path) -> Result<()> {
    let steps = Steps::new("preparing the lab's kernel", &folder.join("build.log"))?;
    let unpacked = folder.join("package");
    let name = kernel();
    let (suite, package) = match name.split_once('/') {
        Some((suite, package)) => (Some(suite), package),
        None => (None, &*name),
    };
    download_kernel(&steps, suite, package, &unpacked)?;
    let (kernel, library) = kernel_and_modules(&unpacked)?;
    fs::rename(kernel, folder.join("vmlinuz"))?;
    fs::write(folder.join("modules.cpio"), modules_archive(&library)?)?;
    fs::remove_dir_all(&unpacked)?;
    Ok(())
}

/// Downloads the kernel packages that the meta package `meta` depends on, from `suite` or else from
/// the machine's own sources. The packages are unpacked and not installed, so that the host's boot
/// loader does not offer the kernel.
pub fn download_kernel(
    steps: &Steps,
    suite: Option<&str>,
    meta: &str,
    unpacked: &Path,
) -> Result<()> {
    let archive = match suite {
        None => packages::Archive::own()?,
        Some(suite) => packages::Archive::suite(steps, suite)
            .with_context(|| format!("the archive does not serve Debian's {suite}"))?,
    };
    fs::create_dir(unpacked)?;
    for package in packages_of(meta, |name| depends(&archive, name))? {
        archive.download(steps, &package, unpacked)?;
        let file = only_match(unpacked, &format!("{package}_"))?;
        let mut extract = Command::new("dpkg-deb");
        steps.run("unpacking it", extract.arg("-x").arg(&file).arg(unpacked))?;
        fs::remove_file(file)?;
    }
    Ok(())
}

/// Returns the packages that a package depends on.
fn depends(archive: &packages::Archive, package: &str) -> Result<Vec<String>> {
    let output = archive
        .depends(package)
        .output()
        .context("cannot run apt-cache")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let names = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: "));
    let names: Vec<String> = names.map(str::to_owned).collect();
    if names.is_empty() {
        bail!(
            "apt knows no package {package}; if it is one of this machine's own sources, add Debian's \
             security archive (bookworm-security) or backports to them and run `apt-get update`"
        );
    }
    Ok(names)
}

/// Returns the packages that contain a kernel's files. `name` is the kernel's image package, or a
/// meta package that depends on it. Since 6.19 the image package has no files; the packages that it
/// depends on have them.
fn packages_of(name: &str, depends: impl Fn(&str) -> Result<Vec<String>>) -> Result<Vec<String>> {
    let mut image = name.to_owned();
    let mut parts = depends(name)?;
    if let Some(kernel) = parts.iter().find(|name| name.starts_with("linux-image-")) {
        image.clone_from(kernel);
        parts = depends(&image)?;
    }
    let is_part = |name: &String| {
        ["linux-base-", "linux-binary-", "linux-modules-"]
            .iter()
            .any(|prefix| name.starts_with(prefix))
    };
    parts.retain(is_part);
    parts.push(image);
    Ok(parts)
}

/// Returns the kernel's file and the folder of its modules in unpacked packages.
pub fn kernel_and_modules(unpacked: &Path) -> Result<(PathBuf, PathBuf)> {
    let folders = ["lib/modules", "usr/lib/modules"].map(|folder| unpacked.join(folder));
    // Since Debian 13 packages have no files in /lib.
    let versions = folders.iter().find(|folder| folder.is_dir());
    let versions = versions.context("the package has no modules")?;
    let library = only_match(versions, "")?;
    // Since 7.2 the kernel is next to its modules.
    let kernel = only_match(&unpacked.join("boot"), "vmlinuz-")
        .or_else(|_| only_match(&library, "vmlinuz"))?;
    Ok((kernel, library))
}

/// Returns the first file in a folder whose name begins with `prefix`.
pub fn only_match(folder: &Path, prefix: &str) -> Result<PathBuf> {
    let mut found = fs::read_dir(folder)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            path.file_name()
                .is_some_and(|n| n.to_string_lossy().starts_with(prefix))
        });
    found
        .next()
        .with_context(|| format!("no {prefix}* in {}", folder.display()))
}

fn modules_archive(library: &Path) -> Result<Vec<u8>> {
    let mut archive = cpio::Archive::default();
    for folder in [
        "bin", "dev", "proc", "sys", "modules", "lower", "upper", "root",
    ] {
        archive.directory(folder);
    }
    archive.character_device("dev/console", 5, 1);
    archive.file(
        "bin/busybox",
        0o755,
        &fs::read("/bin/busybox").context("no /bin/busybox")?,
    );
    for (number, module) in modules::read_with_dependencies(library, &wanted())?
        .iter()
        .enumerate()
    {
        // The lab's init loads the modules in the order of their file names.
        archive.file(
            &format!("modules/{number:02}-{}.ko", module.name),
            0o644,
            &module.content,
        );
    }
    Ok(archive.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packages(name: &str) -> Result<Vec<String>> {
        packages_of(name, |name| {
            let names: &[&str] = match name {
                "linux-image-amd64" => &["linux-base-amd64", "linux-image-7-amd64"],
                "linux-image-7-amd64" => &[
                    "kmod",
                    "linux-base-7-amd64",
                    "linux-binary-7-amd64",
                    "linux-modules-7-amd64",
                ],
                "linux-image-6-amd64" => &["kmod", "linux-base", "linux-initramfs-tool"],
                "linux-image-6.12-amd64" => &["linux-image-6-amd64"],
                _ => bail!("no {name}"),
            };
            Ok(names.iter().map(|name| (*name).to_owned()).collect())
        })
    }

    #[test]
    fn a_kernel_is_in_one_package_or_in_several() {
        for name in ["linux-image-6.12-amd64", "linux-image-6-amd64"] {
            assert_eq!(packages(name).unwrap(), ["linux-image-6-amd64"]);
        }
        let parts = ["linux-base", "linux-binary", "linux-modules", "linux-image"];
        let parts = parts.map(|part| format!("{part}-7-amd64"));
        for name in ["linux-image-amd64", "linux-image-7-amd64"] {
            assert_eq!(packages(name).unwrap(), parts);
        }
        let error = packages("linux-image-5-amd64").unwrap_err();
        assert_eq!(error.to_string(), "no linux-image-5-amd64");
    }
}
