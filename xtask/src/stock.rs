// SPDX-License-Identifier: Apache-2.0
//! Provides Debian's own kernels, downloaded and not built, for guests without our patches.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::guest::Variables;
use crate::initramfs::{self, Contents, INIT};
use crate::step::Steps;
use crate::{cache, host, kernel, lab_image, modules};

/// The environment variable that names the folder of a kernel, and the kernel's package.
type Kernel = (&'static str, Package);

/// The kernels that every run tests.
const KERNELS: [Kernel; 2] = [
    (
        "PATCHBAY_TEST_STOCK_6_1",
        Package::own("linux-image-cloud-amd64"),
    ),
    (
        "PATCHBAY_TEST_STOCK_6_12",
        Package::own("linux-image-6.12-cloud-amd64"),
    ),
];

/// The other kernels of `docs/kernels.md`. An archive may lack some.
const OTHERS: [Kernel; 10] = [
    (
        "PATCHBAY_TEST_STOCK_5_10",
        Package::of("bullseye-security", "linux-image-cloud-amd64"),
    ),
    (
        "PATCHBAY_TEST_STOCK_6_1_GENERIC",
        Package::own("linux-image-amd64"),
    ),
    (
        "PATCHBAY_TEST_STOCK_6_1_RT",
        Package::own("linux-image-rt-amd64"),
    ),
    (
        "PATCHBAY_TEST_STOCK_6_12_GENERIC",
        Package::own("linux-image-6.12-amd64"),
    ),
    (
        "PATCHBAY_TEST_STOCK_6_12_RT",
        Package::own("linux-image-6.12-rt-amd64"),
    ),
    (
        "PATCHBAY_TEST_STOCK_TRIXIE",
        Package::of("trixie", "linux-image-cloud-amd64"),
    ),
    // No metapackage depends on the newest kernels of these series, so the kernels' own packages
    // are named.
    (
        "PATCHBAY_TEST_STOCK_6_16",
        Package::of(BACKPORTS, "linux-image-6.16.12+deb13-cloud-amd64"),
    ),
    (
        "PATCHBAY_TEST_STOCK_6_18",
        Package::of(BACKPORTS, "linux-image-6.18.15+deb13-cloud-amd64"),
    ),
    (
        "PATCHBAY_TEST_STOCK_BACKPORTS",
        Package::of(BACKPORTS, "linux-image-cloud-amd64"),
    ),
    (
        "PATCHBAY_TEST_STOCK_FORKY",
        Package::of("forky", "linux-image-cloud-amd64"),
    ),
];

/// Debian's kernels of other releases, built for trixie.
const BACKPORTS: &str = "trixie-backports";

/// A package that depends on a kernel.
#[derive(Clone, Copy)]
struct Package {
    /// The suite; `None` for the machine's own sources.
    suite: Option<&'static str>,
    name: &'static str,
}

impl Package {
    const fn own(name: &'static str) -> Self {
        Self { suite: None, name }
    }

    const fn of(suite: &'static str, name: &'static str) -> Self {
        Self {
            suite: Some(suite),
            name,
        }
    }
}

/// Modules in the initramfs, with all they depend on. One has tracepoints, one has keys, one has
/// lines of dynamic debug, and one has none of these. No module is loaded automatically.
const MODULES: &[&str] = &["xfs", "virtio_net", "virtio_blk", "binfmt_misc"];

/// Modules in a module tree, with all they depend on, which `patchbay ci run --modules` loads.
const TREE: &[&str] = &["virtio_mmio", "vmw_vsock_virtio_transport"];

/// Directories whose C files become programs in the guest.
const PROGRAMS: &[&str] = &["examples/sick-guest", "tests/guest"];

const KIND: &str = "stock";

/// Returns a folder with `vmlinuz`, `initramfs` and the tree `modules`, and builds it if it is not
/// in the cache. The cache key does not contain the package's version. The same applies to the lab.
fn get(package: Package) -> Result<PathBuf> {
    host::ensure_packages(host::LAB)?;
    host::ensure_packages(host::INITRAMFS)?;
    let programs = initramfs::programs(PROGRAMS)?;
    let mut inputs = cache::Inputs::new("stock kernel 3");
    if let Some(suite) = package.suite {
        inputs.add("suite", suite);
    }
    inputs.add("package", package.name);
    inputs.add("modules", MODULES.join(" "));
    inputs.add("init", INIT);
    inputs.add("compiler", kernel::compiler()?);
    for program in &programs {
        inputs.add_file(&program.display().to_string(), program)?;
    }
    cache::entry(KIND, &inputs.key(), |folder| {
        build(package, &programs, folder)
    })
}

/// Returns environment variables with the kernels' directories. A kernel that is not available is
/// left out, and its test reports that it is skipped.
pub fn variables(all: bool) -> Variables {
    let others: &[Kernel] = if all { &OTHERS } else { &[] };
    let kernels = KERNELS.iter().chain(others);
    kernels
        .filter_map(|(variable, package)| Some((*variable, available(*package)?)))
        .collect()
}

fn available(package: Package) -> Option<PathBuf> {
    let suite = package.suite.unwrap_or("this machine's sources");
    get(package)
        .inspect_err(|error| {
            eprintln!(
                "There is no stock kernel of {} of {suite}: {error:#}",
                package.name
            );
        })
        .ok()
}

/// Returns the kernel of the demo.
pub fn cloud_6_12() -> Result<(&'static str, PathBuf)> {
    let [_, (variable, package)] = KERNELS;
    Ok((variable, get(package)?))
}

fn build(package: Package, programs: &[PathBuf], folder: &Path) -> Result<()> {
    let steps = Steps::new("preparing a stock kernel", &folder.join("build.log"))?;
    let unpacked = folder.join("package");
    lab_image::download_kernel(&steps, package.suite, package.name, &unpacked)?;
    let (kernel, library) = lab_image::kernel_and_modules(&unpacked)?;
    fs::rename(kernel, folder.join("vmlinuz"))?;
    let modules = modules::read_with_dependencies(&library, MODULES)?;
    // The numbers make insmod load them in name order.
    let named = |(number, module): (usize, modules::Module)| {
        (format!("{number:02}-{}.ko", module.name), module.content)
    };
    let contents = Contents {
        modules: modules.into_iter().enumerate().map(named).collect(),
        programs,
        agent: None,
    };
    contents.write(&steps, folder)?;
    let tree = folder.join("modules");
    fs::create_dir_all(tree.join("kernel"))?;
    for module in modules::read_with_dependencies(&library, TREE)? {
        let file = tree.join("kernel").join(format!("{}.ko", module.name));
        fs::write(file, module.content)?;
    }
    fs::copy(
        library.join("modules.builtin"),
        tree.join("modules.builtin"),
    )?;
    fs::remove_dir_all(&unpacked)?;
    Ok(())
}
