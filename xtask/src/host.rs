// SPDX-License-Identifier: Apache-2.0
//! Finds the repository, and names the Debian packages that its commands need.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

pub use patchbay_lab::kvm::Kvm;
pub use patchbay_lab::packages::{
    LAB, ensure_package_of, ensure_packages, install_command, missing_packages, root_prefix,
};

/// Packages that the tests of the controller need.
pub const ETCD: &[&str] = &["etcd-server", "etcd-client"];

/// Packages that the tests in which the network of etcd is cut need.
pub const NETWORK: &[&str] = &["iproute2"];

/// Packages that the tests of a controller whose wall clock jumps need.
pub const CLOCK: &[&str] = &["faketime"];

/// Packages that the tests of the controller's page need.
pub const BROWSER: &[&str] = &["chromium"];

/// Packages that count instructions.
pub const VALGRIND: &[&str] = &["valgrind"];

/// Packages that read the recordings of `patchbay trace record --format trace-dat`.
pub const TRACE_CMD: &[&str] = &["trace-cmd"];

/// Packages that read the journals of `patchbay guest log -o export`.
pub const JOURNAL: &[&str] = &["systemd-journal-remote"];

/// Packages that the tests with QEMU snapshots need.
pub const SNAPSHOTS: &[&str] = &["qemu-utils"];

/// Packages that the tests with domains of libvirt need.
pub const LIBVIRT: &[&str] = &[
    "libvirt-clients",
    "libvirt-daemon",
    "libvirt-daemon-driver-qemu",
];

/// Packages that a guest kernel build needs.
pub const KERNEL: &[&str] = &[
    "gcc",
    "make",
    "patch",
    "flex",
    "bison",
    "bc",
    "libc6-dev",
    "libelf-dev",
    "libssl-dev",
    "lz4",
    "xz-utils",
];

/// Packages that the guest's initramfs needs.
pub const INITRAMFS: &[&str] = &["busybox-static", "gcc", "libc6-dev"];

/// Returns the root directory of the repository in which xtask was called. It may differ from the
/// repository where the program was built, because clones that share a target directory share the
/// program.
///
/// # Panics
/// Panics outside a repository; `main` calls [`find_repository`] first.
pub fn repository() -> PathBuf {
    find_repository().expect("main has found the repository")
}

/// Finds the repository by the variable that `cargo run` and `cargo test` set, or by the current
/// directory.
pub fn find_repository() -> Result<PathBuf> {
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR");
    let current = std::env::current_dir().context("the current directory does not exist")?;
    repository_of(manifest.as_deref().map(Path::new), &current)
}

fn repository_of(manifest: Option<&Path>, current: &Path) -> Result<PathBuf> {
    let is_repository = |folder: &&Path| folder.join("xtask/Cargo.toml").is_file();
    let found = manifest
        .into_iter()
        .chain([current])
        .find_map(|folder| folder.ancestors().find(is_repository));
    match found {
        Some(folder) => Ok(folder.to_path_buf()),
        None => bail!(
            "{} is in no repository of Patchbay (no folder above it has xtask/Cargo.toml): call \
             `cargo xtask` in one",
            current.display()
        ),
    }
}

/// Returns the directory for logs and other output that is not cached.
pub fn target() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => std::path::absolute(&dir).unwrap_or_else(|_| dir.into()),
        None => repository().join("target"),
    }
}

/// Returns the directory that a job in the lab may write to.
pub fn lab_output() -> PathBuf {
    target().join("lab")
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_repository_is_that_of_the_call() {
        let root = tempfile::tempdir().unwrap();
        let folder = |name: &str| {
            let folder = root.path().join(name);
            fs::create_dir_all(&folder).unwrap();
            folder
        };
        for clone in ["one", "two"] {
            fs::write(folder(clone).join("Cargo.toml"), "[workspace]\n").unwrap();
            fs::write(folder(&format!("{clone}/xtask")).join("Cargo.toml"), "").unwrap();
        }
        let (one, two) = (folder("one"), folder("two"));
        let of =
            |manifest: Option<&Path>, current: &Path| repository_of(manifest, current).unwrap();
        assert_eq!(of(None, &one), one);
        assert_eq!(of(None, &folder("two/vmm/src")), two);
        // `cargo run --manifest-path` and tests of another package set this variable.
        assert_eq!(of(Some(&one.join("xtask")), &two), one);
        assert_eq!(of(Some(&one.join("vmm")), root.path()), one);
        // Another tool's cargo left the variable in the environment.
        assert_eq!(of(Some(root.path()), &two), two);
        let error = repository_of(None, root.path()).unwrap_err().to_string();
        assert!(error.contains("no repository of Patchbay"), "{error}");
    }
}
