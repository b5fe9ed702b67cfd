// SPDX-License-Identifier: Apache-2.0
//! Installs Debian's kernels as Debian does: in a root directory where the maintainer scripts let
//! initramfs-tools make the initrds.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use patchbay_lab::shell;

use crate::guest::Variables;
use crate::step::Steps;
use crate::{cache, host, lab_image, root_disk};

/// The packages that initramfs-tools recommends; they are in every initrd of a default
/// installation.
const PACKAGES: &[&str] = &["initramfs-tools", "busybox", "zstd"];

/// Kernels that are installed together, one of each series.
struct Root {
    packages: [&'static str; 2],
    /// The series of each kernel, and the environment variable that names its folder.
    kernels: [(&'static str, &'static str); 2],
}

/// The kernels that every run tests.
const CLOUD: Root = Root {
    packages: ["linux-image-cloud-amd64", "linux-image-6.12-cloud-amd64"],
    kernels: [
        ("6.1", "PATCHBAY_TEST_INSTALLED_6_1"),
        ("6.12", "PATCHBAY_TEST_INSTALLED_6_12"),
    ],
};

const GENERIC: Root = Root {
    packages: ["linux-image-amd64", "linux-image-6.12-amd64"],
    kernels: [
        ("6.1", "PATCHBAY_TEST_INSTALLED_6_1_GENERIC"),
        ("6.12", "PATCHBAY_TEST_INSTALLED_6_12_GENERIC"),
    ],
};

/// Returns environment variables with the kernels' folders, each with `vmlinuz` and `initrd.img`.
/// Kernels that cannot be installed are left out, and their tests report that they are skipped.
pub fn variables(all: bool) -> Variables {
    let generic = all.then_some(GENERIC);
    let mut variables = Variables::new();
    for root in [CLOUD].into_iter().chain(generic) {
        match get(&root) {
            Ok(folder) => {
                let of = |(series, variable)| (variable, folder.join(series));
                variables.extend(root.kernels.map(of));
            }
            Err(error) => eprintln!(
                "There is no initrd of {}: {error:#}",
                root.packages.join(" and ")
            ),
        }
    }
    variables
}

/// Returns a folder with one subfolder for each series, and builds it if it is not in the cache.
/// The cache key does not contain the packages' versions. The same applies to the root disk.
fn get(root: &Root) -> Result<PathBuf> {
    let mut inputs = cache::Inputs::new("installed kernels 1");
    inputs.add("suite", root_disk::SUITE);
    inputs.add("packages", PACKAGES.join(" "));
    inputs.add("kernels", root.packages.join(" "));
    cache::entry("installed", &inputs.key(), |folder| build(root, folder))
}

fn build(root: &Root, folder: &Path) -> Result<()> {
    host::ensure_packages(root_disk::TOOLS)?;
    let steps = Steps::new(
        "installing Debian's kernels in a root of their own",
        &folder.join("build.log"),
    )?;
    let mut copy = b"copy-out /boot ".to_vec();
    copy.extend(shell::quote(folder.as_os_str()));
    let copy = String::from_utf8(copy).context("the cache's path is not UTF-8")?;
    let packages = [PACKAGES, &root.packages].concat().join(",");
    let mut command = Command::new("mmdebstrap");
    command
        .args(["--variant=minbase", "--format=null"])
        .args(["--include", &packages, "--customize-hook", &copy])
        .args([root_disk::SUITE, "/dev/null"]);
    steps.run("installing them, and making their initrds", &mut command)?;
    root.take_from(&folder.join("boot"), folder)
}

impl Root {
    /// Moves each kernel and its initrd from `boot`, which is removed, to the folder of its series.
    fn take_from(&self, boot: &Path, folder: &Path) -> Result<()> {
        for (series, _) in self.kernels {
            let kernel = folder.join(series);
            fs::create_dir(&kernel)?;
            for name in ["vmlinuz", "initrd.img"] {
                let file = lab_image::only_match(boot, &format!("{name}-{series}."))?;
                fs::rename(file, kernel.join(name))?;
            }
        }
        fs::remove_dir_all(boot)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_series_has_its_kernel_and_its_initrd() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let boot = folder.join("boot");
        fs::create_dir(&boot).unwrap();
        let releases = ["6.1.0-56-cloud-amd64", "6.12.117+deb12-cloud-amd64"];
        for release in releases {
            for name in ["config", "initrd.img", "vmlinuz"] {
                let file = boot.join(format!("{name}-{release}"));
                fs::write(file, format!("{name} {release}")).unwrap();
            }
        }
        CLOUD.take_from(&boot, folder).unwrap();
        for (series, release) in ["6.1", "6.12"].into_iter().zip(releases) {
            for name in ["initrd.img", "vmlinuz"] {
                let file = folder.join(series).join(name);
                let content = fs::read_to_string(file).unwrap();
                assert_eq!(content, format!("{name} {release}"));
            }
        }
        assert!(!boot.exists());
    }

    #[test]
    fn an_installation_without_an_initrd_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let boot = folder.join("boot");
        fs::create_dir(&boot).unwrap();
        // The series 6.1 must not match a version 6.12.
        for file in [
            "vmlinuz-6.1.0-56",
            "vmlinuz-6.12.117",
            "initrd.img-6.12.117",
        ] {
            fs::write(boot.join(format!("{file}-cloud-amd64")), "").unwrap();
        }
        let error = CLOUD.take_from(&boot, folder).unwrap_err().to_string();
        assert!(error.contains("no initrd.img-6.1.* in"), "{error}");
    }
}
