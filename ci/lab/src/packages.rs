// SPDX-License-Identifier: Apache-2.0
//! Installs Debian packages that this machine lacks.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::cache;
use crate::step::Steps;

/// Packages that the lab needs: an emulator, and the tools for its initramfs.
pub const LAB: &[&str] = &["qemu-system-x86", "busybox-static", "xz-utils"];

/// Returns the packages that are not installed, without duplicates.
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

/// Returns the words that precede a command to run it as root; `None` if this user cannot become
/// root without a password.
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

/// Returns the command with which a user installs the packages.
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
    let log = cache::logs()?.join("apt.log");
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

/// The packages that apt knows: those of the machine's own sources, or of one suite of Debian's
/// archive.
pub struct Archive {
    options: Vec<String>,
}

impl Archive {
    /// Uses the machine's own sources. Updates apt's lists if there are none.
    pub fn own() -> Result<Self> {
        ensure_package_lists()?;
        Ok(Self {
            options: Vec::new(),
        })
    }

    /// Uses a suite with its newest lists. apt's own lists and sources stay unchanged.
    pub fn suite(steps: &Steps, suite: &str) -> Result<Self> {
        let folder = suite_folder(suite)?;
        fs::create_dir_all(folder.join("lists/partial"))?;
        let sources = folder.join("suite.sources");
        let archive = if suite.ends_with("-security") {
            "debian-security"
        } else {
            "debian"
        };
        let text = format!(
            "Types: deb\nURIs: http://deb.debian.org/{archive}\nSuites: {suite}\nComponents: main\n\
             Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
        );
        fs::write(&sources, text).with_context(|| format!("cannot write {}", sources.display()))?;
        let options = vec![
            "Dir::Etc::sourcelist=/dev/null".to_owned(),
            format!("Dir::Etc::sourceparts={}", folder.display()),
            format!("Dir::State::lists={}", folder.join("lists").display()),
            format!("Dir::Cache={}", folder.display()),
            // apt's own user may not be able to enter the folder.
            "APT::Sandbox::User=root".to_owned(),
        ];
        let archive = Self { options };
        let mut update = archive.with_options(apt_get(&[], &["update"]));
        steps.run(&format!("apt-get update of {suite}"), &mut update)?;
        Ok(archive)
    }

    fn with_options(&self, mut command: Command) -> Command {
        for option in &self.options {
            command.args(["-o", option]);
        }
        command
    }

    /// Returns the command that prints the dependencies of a package.
    pub fn depends(&self, package: &str) -> Command {
        let mut command = Command::new("apt-cache");
        command.args(["depends", "--important", package]);
        self.with_options(command)
    }

    /// Downloads a package to a folder.
    pub fn download(&self, steps: &Steps, package: &str, folder: &Path) -> Result<()> {
        let mut command = self.with_options(apt_get(&[], &["download", package]));
        command.current_dir(folder);
        steps.run(&format!("downloading {package}"), &mut command)
    }
}

fn suite_folder(suite: &str) -> Result<PathBuf> {
    Ok(cache::root()?.join("apt").join(suite))
}

/// Installs a package of another suite of Debian's archive, unless it is installed. The
/// dependencies of the package must be installed already, because dpkg does not install them.
pub fn ensure_package_of(suite: &str, package: &str) -> Result<()> {
    if missing_packages(&[package])?.is_empty() {
        return Ok(());
    }
    let folder = suite_folder(suite)?;
    fs::create_dir_all(&folder)?;
    let steps = Steps::new(
        &format!("installing {package} of Debian's {suite}"),
        &folder.join("apt.log"),
    )?;
    Archive::suite(&steps, suite)?.download(&steps, package, &folder)?;
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
fn ensure_package_lists() -> Result<()> {
    if package_lists_present() {
        return Ok(());
    }
    let Some(prefix) = root_prefix() else {
        bail!("apt has no package lists. Run `sudo apt-get update` and try again.");
    };
    let log = cache::logs()?.join("apt.log");
    let mut update = apt_get(prefix, &["update"]);
    Steps::new("updating apt's package lists", &log)?.run("apt-get update", &mut update)
}

fn apt_get(prefix: &[&str], arguments: &[&str]) -> Command {
    // env(1) sets the variable, because sudo drops most of the environment.
    let apt_get = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get"];
    // The timeout is long, because a new machine often installs updates automatically and holds
    // apt's lock meanwhile.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_that_are_absent_or_half_installed_count_as_missing() {
        let listing = "gcc installed\nflex config-files\nlibelf-dev installed\n";
        let missing = not_installed(&["bison", "flex", "gcc", "libelf-dev"], listing);
        assert_eq!(missing, ["bison", "flex"]);
    }
}
