// SPDX-License-Identifier: Apache-2.0
//! Debian's own kernels, as a guest that knows nothing of Patchbay: downloaded, not built.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::guest::Variables;
use crate::step::Steps;
use crate::{cache, cpio, host, lab_image, modules};

/// The variable that names the folder of a kernel, and the package that depends on the newest kernel of a series.
const KERNELS: &[(&str, &str)] = &[
    ("PATCHBAY_TEST_STOCK_6_1", "linux-image-cloud-amd64"),
    ("PATCHBAY_TEST_STOCK_6_12", "linux-image-6.12-cloud-amd64"),
];

/// Loaded with all they depend on: modules with tracepoints, with keys, and with neither.
const MODULES: &[&str] = &["xfs", "virtio_net", "virtio_blk"];

const INIT: &str = include_str!("../guest/stock-init.sh");
const KIND: &str = "stock";

/// A folder with `vmlinuz` and `initramfs`, made if it is not in the cache. The key lacks the package's version, as the lab's does.
fn get(package: &str) -> Result<PathBuf> {
    host::ensure_packages(host::LAB)?;
    let mut inputs = cache::Inputs::new("stock kernel 1");
    inputs.add("package", package);
    inputs.add("modules", MODULES.join(" "));
    inputs.add("init", INIT);
    cache::entry(KIND, &inputs.key(), |folder| build(package, folder))
}

/// Variables for the tests. A kernel that cannot be had leaves its variable out, and the test says that it is skipped.
pub fn variables() -> Variables {
    let folder = |(variable, package): &(&'static str, &str)| match get(package) {
        Ok(folder) => Some((*variable, folder)),
        Err(error) => {
            eprintln!("There is no stock kernel of {package}: {error:#}");
            None
        }
    };
    KERNELS.iter().filter_map(folder).collect()
}

fn build(package: &str, folder: &Path) -> Result<()> {
    let steps = Steps::new("preparing a stock kernel", &folder.join("build.log"))?;
    let unpacked = folder.join("package");
    lab_image::download_kernel(&steps, package, &unpacked)?;
    let boot = lab_image::only_match(&unpacked.join("boot"), "vmlinuz-")?;
    fs::rename(boot, folder.join("vmlinuz"))?;
    let library = lab_image::only_match(&unpacked.join("lib/modules"), "")?;
    fs::write(folder.join("initramfs"), initramfs(&library)?)?;
    fs::remove_dir_all(&unpacked)?;
    Ok(())
}

fn initramfs(library: &Path) -> Result<Vec<u8>> {
    let mut archive = cpio::Archive::default();
    for folder in ["bin", "dev", "proc", "sys", "modules"] {
        archive.directory(folder);
    }
    archive.character_device("dev/console", 5, 1);
    archive.file("init", 0o755, INIT.as_bytes());
    let busybox = fs::read("/bin/busybox").context("no /bin/busybox")?;
    archive.file("bin/busybox", 0o755, &busybox);
    let modules = modules::read_with_dependencies(library, MODULES)?;
    for (number, module) in modules.iter().enumerate() {
        // insmod loads them in the order of their names.
        let path = format!("modules/{number:02}-{}.ko", module.name);
        archive.file(&path, 0o644, &module.content);
    }
    Ok(archive.finish())
}
