// SPDX-License-Identifier: Apache-2.0
//! Capabilities of the host, and the Debian packages it lacks.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::step::Steps;

/// Packages that the lab needs: an emulator, and the tools for its initramfs.
pub const LAB: &[&str] = &["qemu-system-x86", "busybox-static", "xz-utils"];

/// Packages that the tests of the controller need.
pub const ETCD: &[&str] = &["etcd-server"];

/// Packages that the tests of the controller's page need.
pub const BROWSER: &[&str] = &["chromium"];

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

/// Root directory of the repository in which xtask was called. It may differ from the one where the
/// program was built, because clones that share a target directory share the program.
///
/// # Panics
/// Outside a repository; `main` calls [`find_repository`] first.
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

/// Directory for logs and other output that is not cached.
pub fn target() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => std::path::absolute(&dir).unwrap_or_else(|_| dir.into()),
        None => repository().join("target"),
    }
}

/// The packages that are not installed, without duplicates.
pub fn missing_packages(wanted: &[&str]) -> Result<Vec<String>> {
    let mut wanted: Vec<&str> = wanted.to_vec();
    wanted.sort_unstable();
    wanted.dedup();
    let output = Command::new("dpkg-query")
        .args(["--show", "--showformat=${Package} ${db:Status-Status}\n"])
        .args(&wanted)
        .stderr(Stdio::null())
        .output()
        .context("cannot run dpkg-query; Patchbay's developer commands need a Debian system")?;
    let listing = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(not_installed(&wanted, &listing))
}

fn not_installed(wanted: &[&str], listing: &str) -> Vec<String> {
    let installed = |package: &str| {
        listing
            .lines()
            .any(|line| line.split_once(' ') == Some((package, "installed")))
    };
    wanted
        .iter()
        .filter(|package| !installed(package))
        .map(|p| (*p).to_owned())
        .collect()
}

/// Command prefix with which this process becomes root.
pub fn root_prefix() -> Option<&'static [&'static str]> {
    if rustix::process::geteuid().is_root() {
        return Some(&[]);
    }
    let sudo = Command::new("sudo")
        .args(["-n", "true"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    sudo.is_ok_and(|status| status.success())
        .then_some(&["sudo", "-n"])
}

/// The command with which a user installs the packages.
pub fn install_command(packages: &[String]) -> String {
    format!(
        "sudo apt-get update && sudo apt-get install --no-install-recommends -y {}",
        packages.join(" ")
    )
}

/// Installs the missing packages.
pub fn ensure_packages(wanted: &[&str]) -> Result<()> {
    let missing = missing_packages(wanted)?;
    if missing.is_empty() {
        return Ok(());
    }
    let Some(prefix) = root_prefix() else {
        bail!(
            "these Debian packages are missing, and this user cannot install them:\n  {}\n\
             Install them with\n  {}\nand run this command again.",
            missing.join(" "),
            install_command(&missing)
        );
    };
    let log = target().join("xtask/apt.log");
    let steps = Steps::new(
        &format!("installing Debian packages: {}", missing.join(" ")),
        &log,
    )?;
    let apt = |arguments: &[&str]| apt_get(prefix, arguments);
    let install = || {
        let mut command = apt(&["install", "--no-install-recommends", "-y"]);
        command.args(&missing);
        command
    };
    if !package_lists_present() || steps.run("apt-get install", &mut install()).is_err() {
        // Missing or outdated lists are the usual reason for a failed install.
        steps.run("apt-get update", &mut apt(&["update"]))?;
        steps.run("apt-get install", &mut install())?;
    }
    Ok(())
}

/// Installs a package of another suite of Debian's archive, unless it is installed. apt's own lists and
/// sources stay as they are. For packages without dependencies of their own, such as kernel sources.
pub fn ensure_package_of(suite: &str, package: &str) -> Result<()> {
    if missing_packages(&[package])?.is_empty() {
        return Ok(());
    }
    let folder = target().join("xtask/apt").join(suite);
    fs::create_dir_all(folder.join("lists/partial"))?;
    let sources = folder.join("suite.sources");
    let text = format!(
        "Types: deb\nURIs: http://deb.debian.org/debian\nSuites: {suite}\nComponents: main\n\
         Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
    );
    fs::write(&sources, text).with_context(|| format!("cannot write {}", sources.display()))?;
    let options = [
        "Dir::Etc::sourcelist=/dev/null".to_owned(),
        format!("Dir::Etc::sourceparts={}", folder.display()),
        format!("Dir::State::lists={}", folder.join("lists").display()),
        format!("Dir::Cache={}", folder.display()),
        // The folder may be one that apt's own user cannot enter.
        "APT::Sandbox::User=root".to_owned(),
    ];
    let apt = |arguments: &[&str]| {
        let mut command = apt_get(&[], &[]);
        for option in &options {
            command.args(["-o", option]);
        }
        command.args(arguments).current_dir(&folder);
        command
    };
    let steps = Steps::new(
        &format!("installing {package} of Debian's {suite}"),
        &folder.join("apt.log"),
    )?;
    steps.run("apt-get update", &mut apt(&["update"]))?;
    steps.run("apt-get download", &mut apt(&["download", package]))?;
    let prefix = format!("{package}_");
    let file = fs::read_dir(&folder)?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with(&prefix) && name.ends_with(".deb")
        })
        .with_context(|| format!("apt-get downloaded no {package} to {}", folder.display()))?;
    let Some(root) = root_prefix() else {
        bail!(
            "this user cannot install packages: run `sudo dpkg --install {}` and then this command again",
            file.display()
        );
    };
    let mut words = root.iter().chain(&["dpkg", "--install"]);
    let mut install = Command::new(words.next().expect("dpkg at least"));
    install.args(words).arg(&file);
    steps.run("dpkg --install", &mut install)?;
    fs::remove_file(&file).with_context(|| format!("cannot remove {}", file.display()))
}

fn package_lists_present() -> bool {
    let lists = fs::read_dir("/var/lib/apt/lists")
        .into_iter()
        .flatten()
        .flatten();
    lists
        .into_iter()
        .any(|entry| entry.file_name().to_string_lossy().contains("_Packages"))
}

/// Updates apt's package lists if there are none.
pub fn ensure_package_lists() -> Result<()> {
    if package_lists_present() {
        return Ok(());
    }
    let Some(prefix) = root_prefix() else {
        bail!("apt has no package lists. Run `sudo apt-get update` and try again.");
    };
    let log = target().join("xtask/apt.log");
    let mut update = apt_get(prefix, &["update"]);
    Steps::new("updating apt's package lists", &log)?.run("apt-get update", &mut update)
}

fn apt_get(prefix: &[&str], arguments: &[&str]) -> Command {
    // env(1), because sudo drops most of the environment.
    let apt_get = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get"];
    // A new machine often installs updates by itself and holds apt's lock meanwhile.
    let patience = ["-o", "DPkg::Lock::Timeout=600"];
    let mut words = prefix
        .iter()
        .chain(&apt_get)
        .chain(&patience)
        .chain(arguments);
    let mut command = Command::new(words.next().expect("the list starts with env"));
    command.args(words);
    command
}

/// State of /dev/kvm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kvm {
    Missing,
    /// The device exists, but this user may not open it.
    Forbidden,
    /// The device exists, but opening it fails for another reason.
    Broken,
    /// KVM works, but the CPU has neither VMX nor SVM. Kernel code of guests is emulated in
    /// software, which suffices for bare-metal guests but not for Linux.
    Software,
    /// KVM works on a CPU with VMX or SVM.
    Hardware,
}

impl Kvm {
    /// Probes this machine.
    pub fn probe() -> Self {
        match OpenOptions::new().read(true).write(true).open("/dev/kvm") {
            Err(error) => match error.kind() {
                io::ErrorKind::NotFound => Self::Missing,
                io::ErrorKind::PermissionDenied => Self::Forbidden,
                _ => Self::Broken,
            },
            Ok(_) => {
                let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
                if has_virtualization(&cpuinfo) {
                    Self::Hardware
                } else {
                    Self::Software
                }
            }
        }
    }

    /// Returns whether a Linux guest runs on this machine without the lab.
    pub fn runs_linux(self) -> bool {
        self == Self::Hardware
    }

    /// Returns whether a bare-metal guest runs on this machine without the lab.
    pub fn runs_bare_metal(self) -> bool {
        matches!(self, Self::Hardware | Self::Software)
    }

    /// A sentence about the state.
    pub fn describe(self) -> &'static str {
        match self {
            Self::Missing => "/dev/kvm does not exist (no KVM module, or a container without it)",
            Self::Forbidden => "this user may not open /dev/kvm (join the group kvm)",
            Self::Broken => "/dev/kvm exists but cannot be opened",
            Self::Software => "/dev/kvm works, but the CPU offers neither vmx nor svm",
            Self::Hardware => "/dev/kvm works on a CPU with hardware virtualization",
        }
    }
}

fn has_virtualization(cpuinfo: &str) -> bool {
    cpuinfo
        .lines()
        .filter(|line| line.starts_with("flags"))
        .flat_map(str::split_whitespace)
        .any(|flag| flag == "vmx" || flag == "svm")
}

#[cfg(test)]
mod tests {
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
        // For `cargo run --manifest-path` and tests of another package.
        assert_eq!(of(Some(&one.join("xtask")), &two), one);
        assert_eq!(of(Some(&one.join("vmm")), root.path()), one);
        // Another tool's cargo left the variable in the environment.
        assert_eq!(of(Some(root.path()), &two), two);
        let error = repository_of(None, root.path()).unwrap_err().to_string();
        assert!(error.contains("no repository of Patchbay"), "{error}");
    }

    #[test]
    fn packages_that_are_absent_or_half_installed_count_as_missing() {
        let listing = "gcc installed\nflex config-files\nlibelf-dev installed\n";
        let missing = not_installed(&["bison", "flex", "gcc", "libelf-dev"], listing);
        assert_eq!(missing, ["bison", "flex"]);
    }

    #[test]
    fn virtualization_is_a_whole_word_among_the_flags() {
        assert!(has_virtualization(
            "model name : x\nflags\t\t: fpu svm sse\n"
        ));
        assert!(has_virtualization("flags : vmx\n"));
        assert!(!has_virtualization(
            "model name : svm\nflags : fpu svm_lock vmxx\n"
        ));
        assert!(!has_virtualization(""));
    }
}
