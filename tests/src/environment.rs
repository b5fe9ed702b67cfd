// SPDX-License-Identifier: Apache-2.0
//! Finds the guest kernel and the programs under test.

use std::io;
use std::path::{Path, PathBuf};

use patchbay_lab::cpio::Archive;

/// The files that a test with a Linux guest needs. `cargo xtask test` builds them and passes their
/// paths in environment variables.
#[derive(Debug, Clone)]
pub struct Environment {
    /// The bzImage with the series (`PATCHBAY_TEST_KERNEL`).
    pub kernel: PathBuf,
    /// The same kernel as an ELF file (`PATCHBAY_TEST_VMLINUX`).
    pub vmlinux: PathBuf,
    /// The bzImage without the series, whose kallsyms have no symbols of data
    /// (`PATCHBAY_TEST_UNPATCHED_KERNEL`).
    pub unpatched_kernel: Option<PathBuf>,
    /// The initramfs with a shell, the modules and the guest programs (`PATCHBAY_TEST_INITRAMFS`).
    pub initramfs: PathBuf,
    pub monitor: PathBuf,
    pub cli: PathBuf,
}

impl Environment {
    /// Returns the environment of a test with a Linux guest. If the test is skipped, prints the
    /// reason and returns `None`.
    pub fn linux_guest() -> Option<Self> {
        match Self::from_variables() {
            Ok(environment) => Some(environment),
            Err(reason) => {
                crate::skip(&reason);
                None
            }
        }
    }

    /// Returns the environment with a kernel without jump labels, whose branches read the key's
    /// count (`PATCHBAY_TEST_NO_JUMP_LABEL_KERNEL` and so on).
    pub fn without_jump_labels() -> Option<Self> {
        let environment = Self::linux_guest()?;
        let files = || {
            let KernelFiles { kernel, vmlinux } = KernelFiles::named("NO_JUMP_LABEL")?;
            Ok::<_, String>(Self {
                kernel,
                vmlinux,
                initramfs: file("PATCHBAY_TEST_NO_JUMP_LABEL_INITRAMFS")?,
                ..environment
            })
        };
        files().map_err(|reason| crate::skip(&reason)).ok()
    }

    /// Returns a raw image with Debian's essential packages, systemd and udev
    /// (`PATCHBAY_TEST_ROOT_DISK`), and the agent (`PATCHBAY_AGENT`). If the test is skipped,
    /// prints the reason and returns `None`.
    pub fn root_disk_and_agent() -> Option<(PathBuf, PathBuf)> {
        let files = || Ok((file("PATCHBAY_TEST_ROOT_DISK")?, file("PATCHBAY_AGENT")?));
        files().map_err(|reason: String| crate::skip(&reason)).ok()
    }

    /// Returns the agent (`PATCHBAY_AGENT`). If the test is skipped, prints the reason and returns
    /// `None`.
    pub fn agent() -> Option<PathBuf> {
        file("PATCHBAY_AGENT")
            .map_err(|reason| crate::skip(&reason))
            .ok()
    }

    /// Returns the vmlinux of the kernel under test with debug information
    /// (`PATCHBAY_TEST_DEBUG_FILE`). If the test is skipped, prints the reason and returns `None`.
    pub fn debug_file() -> Option<PathBuf> {
        file("PATCHBAY_TEST_DEBUG_FILE")
            .map_err(|reason| crate::skip(&reason))
            .ok()
    }

    /// Returns the System.map of the kernel without the series
    /// (`PATCHBAY_TEST_UNPATCHED_SYSTEM_MAP`). If the test is skipped, prints the reason and
    /// returns `None`.
    pub fn system_map() -> Option<PathBuf> {
        file("PATCHBAY_TEST_UNPATCHED_SYSTEM_MAP")
            .map_err(|reason| crate::skip(&reason))
            .ok()
    }

    fn from_variables() -> Result<Self, String> {
        check_kvm()?;
        Ok(Self {
            kernel: file("PATCHBAY_TEST_KERNEL")?,
            vmlinux: file("PATCHBAY_TEST_VMLINUX")?,
            unpatched_kernel: file("PATCHBAY_TEST_UNPATCHED_KERNEL").ok(),
            initramfs: file("PATCHBAY_TEST_INITRAMFS")?,
            monitor: file("PATCHBAY_VMM")?,
            cli: file("PATCHBAY_CLI")?,
        })
    }
}

/// A kernel other than the one under test.
#[derive(Debug, Clone)]
pub struct KernelFiles {
    pub kernel: PathBuf,
    pub vmlinux: PathBuf,
}

impl KernelFiles {
    /// Returns the files that `PATCHBAY_TEST_<name>_KERNEL` and `PATCHBAY_TEST_<name>_VMLINUX`
    /// name.
    pub fn named(name: &str) -> Result<Self, String> {
        Ok(Self {
            kernel: file(&format!("PATCHBAY_TEST_{name}_KERNEL"))?,
            vmlinux: file(&format!("PATCHBAY_TEST_{name}_VMLINUX"))?,
        })
    }
}

/// An unpatched kernel of a distribution, and the programs under test.
#[derive(Debug, Clone)]
pub struct StockKernel {
    /// The kernel's bzImage.
    pub kernel: PathBuf,
    /// An initramfs with a shell and the kernel's modules.
    pub initramfs: PathBuf,
    /// A `lib/modules/VERSION` directory with the drivers for virtio-mmio and vsock.
    pub modules: PathBuf,
    pub monitor: PathBuf,
    pub cli: PathBuf,
}

impl StockKernel {
    /// Returns the kernel in the directory that `PATCHBAY_TEST_STOCK_<version>` names. If the test
    /// is skipped, prints the reason and returns `None`.
    pub fn named(version: &str) -> Option<Self> {
        Self::from_variables(version)
            .map_err(|reason| crate::skip(&reason))
            .ok()
    }

    /// Writes the initramfs with additional files to `path`. The files are in a second archive, and
    /// the kernel unpacks both.
    ///
    /// # Errors
    /// A file cannot be read or written.
    pub fn initramfs_with(&self, files: &[(&str, u32, &Path)], path: &Path) -> io::Result<()> {
        let mut more = Archive::default();
        for (name, permissions, source) in files {
            more.file(name, *permissions, &std::fs::read(source)?);
        }
        let mut archive = std::fs::read(&self.initramfs)?;
        archive.resize(archive.len().next_multiple_of(4), 0);
        archive.extend(more.finish());
        std::fs::write(path, archive)
    }

    fn from_variables(version: &str) -> Result<Self, String> {
        check_kvm()?;
        let folder = folder(&format!("PATCHBAY_TEST_STOCK_{version}"))?;
        Ok(Self {
            kernel: folder.join("vmlinuz"),
            initramfs: folder.join("initramfs"),
            modules: folder.join("modules"),
            monitor: file("PATCHBAY_VMM")?,
            cli: file("PATCHBAY_CLI")?,
        })
    }
}

/// A kernel as a distribution installs it, a disk with the distribution's userland, and the
/// monitor.
#[derive(Debug, Clone)]
pub struct InstalledKernel {
    /// The kernel's bzImage.
    pub kernel: PathBuf,
    /// The initrd that the distribution's own tool made for the kernel.
    pub initrd: PathBuf,
    /// A raw image with Debian's essential packages, systemd and udev. It has no modules.
    pub disk: PathBuf,
    pub monitor: PathBuf,
}

impl InstalledKernel {
    /// Returns the kernel in the directory that `PATCHBAY_TEST_INSTALLED_<version>` names. If the
    /// test is skipped, prints the reason and returns `None`.
    pub fn named(version: &str) -> Option<Self> {
        Self::from_variables(version)
            .map_err(|reason| crate::skip(&reason))
            .ok()
    }

    fn from_variables(version: &str) -> Result<Self, String> {
        check_kvm()?;
        let folder = folder(&format!("PATCHBAY_TEST_INSTALLED_{version}"))?;
        Ok(Self {
            kernel: folder.join("vmlinuz"),
            initrd: folder.join("initrd.img"),
            disk: file("PATCHBAY_TEST_ROOT_DISK")?,
            monitor: file("PATCHBAY_VMM")?,
        })
    }
}

fn check_kvm() -> Result<(), String> {
    let mut options = std::fs::File::options();
    let opened = options.read(true).write(true).open("/dev/kvm");
    opened
        .map(drop)
        .map_err(|error| format!("/dev/kvm cannot be opened ({error})"))
}

fn folder(variable: &str) -> Result<PathBuf, String> {
    std::env::var_os(variable)
        .map(PathBuf::from)
        .ok_or_else(|| format!("{variable} is not set; `cargo xtask test` sets it"))
}

fn file(variable: &str) -> Result<PathBuf, String> {
    let path = folder(variable)?;
    if !path.is_file() {
        return Err(format!(
            "{variable} names {}, which is not a file",
            path.display()
        ));
    }
    Ok(path)
}
