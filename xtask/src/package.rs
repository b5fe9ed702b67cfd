// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask package` makes Debian packages, a tarball of the same programs, their checksums and
//! their bill of materials.
//!
//! All programs are linked statically, so that one build runs on every distribution. The same
//! sources at the same path give the same bytes: times come from `SOURCE_DATE_EPOCH`, or from the
//! last commit.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};

use crate::bill::{self, Crate};
use crate::{cache, cargo, host};

const TOOLS: &[&str] = &["dpkg", "binutils", "xz-utils"];

/// The packages of the workspace, and their programs.
const PROGRAMS: &[(&str, &str)] = &[
    ("patchbay-cli", "patchbay"),
    ("patchbay-vmm-program", "patchbay-vmm"),
    ("patchbay-node", "patchbayd"),
    ("patchbay-fleet", "patchbay-fleet"),
    ("patchbay-attach", "patchbay-attach"),
];

/// The agent's manual page. It is written by hand, because the agent has no command-line parser
/// that could generate one.
const AGENT_PAGE: &str = "guest-agent/patchbay-agent.8";

const UNITS: &[&str] = &[
    "attach/patchbay-attach.service",
    "fleet/node/patchbayd.service",
    "fleet/controller/patchbay-fleet.service",
    "vmm/patchbay@.service",
];

/// The users and groups that the units name.
const USERS: &str = "xtask/package/patchbay.sysusers";

/// The stripped programs.
pub struct Programs {
    folder: tempfile::TempDir,
    /// The manual pages and completions.
    manual: tempfile::TempDir,
    epoch: String,
}

/// Builds everything into `target/package` and returns the folder.
pub fn run() -> Result<PathBuf> {
    let programs = Programs::build()?;
    let version = env!("CARGO_PKG_VERSION");
    let folder = host::target().join("package");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder)?;
    let packages: Vec<&str> = PROGRAMS.iter().map(|program| program.0).collect();
    let agent_crates = bill::crates(&["patchbay-guest-agent"])?;
    let mut host_crates = bill::crates(&packages)?;
    host_crates.extend(agent_crates.iter().cloned());
    host_crates.sort();
    host_crates.dedup();
    programs.host_package(version, &folder, &host_crates)?;
    programs.agent_package(version, &folder, &agent_crates)?;
    programs.tarball(version, &folder, &host_crates)?;
    // The host's package contains the agent too.
    let bill = bill::materials(version, &host_crates)?;
    fs::write(folder.join("patchbay.cdx.json"), bill)?;
    write_sums(&folder)?;
    Ok(folder)
}

/// Builds the programs, with symbols, and returns their folder.
pub fn static_programs() -> Result<PathBuf> {
    let packages: Vec<&str> = PROGRAMS.iter().map(|program| program.0).collect();
    cargo::build_static_programs(&packages)
}

impl Programs {
    /// Builds and strips the programs.
    pub fn build() -> Result<Self> {
        host::ensure_packages(TOOLS)?;
        let built = static_programs()?;
        let agent = cargo::build_agent()?;
        let folder = tempfile::tempdir()?;
        let names = PROGRAMS.iter().map(|program| built.join(program.1));
        for path in names.chain([agent]) {
            let name = path.file_name().context("a program has a name")?;
            let stripped = folder.path().join(name);
            succeed(Command::new("strip").arg("-o").arg(&stripped).arg(&path))?;
        }
        let manual = tempfile::tempdir()?;
        for (_, name) in PROGRAMS {
            let mut program = Command::new(folder.path().join(name));
            succeed(program.arg("--generate-manual").arg(manual.path()))?;
        }
        check_references(manual.path())?;
        let epoch = match std::env::var("SOURCE_DATE_EPOCH") {
            Ok(epoch) => epoch,
            Err(_) => output(
                Command::new("git")
                    .args(["log", "-1", "--format=%ct"])
                    .current_dir(host::repository()),
            )?,
        };
        Ok(Self {
            folder,
            manual,
            epoch: epoch.trim().to_owned(),
        })
    }

    fn program(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes `patchbay_VERSION_amd64.deb`.
    pub fn host_package(&self, version: &str, out: &Path, crates: &[Crate]) -> Result<PathBuf> {
        let tree = Tree::new("patchbay")?;
        self.put_host_files(&tree, "usr")?;
        // Guests that `patchbay ci run` boots use this agent. The agent's own package is for
        // long-lived guests.
        let agent = fs::read(self.program("patchbay-agent"))?;
        tree.put("usr/lib/patchbay/patchbay-agent", agent, 0o755)?;
        for unit in UNITS {
            tree.copy(unit, "usr/lib/systemd/system", 0o644)?;
        }
        let users = fs::read(host::repository().join(USERS))?;
        tree.put("usr/lib/sysusers.d/patchbay.conf", users, 0o644)?;
        tree.copy("xtask/package/policy.yaml", "etc/patchbay", 0o644)?;
        tree.put("DEBIAN/conffiles", "/etc/patchbay/policy.yaml\n", 0o644)?;
        tree.documents(crates)?;
        tree.control(
            version,
            "Section: admin\nRecommends: systemd\n",
            "change static keys of running Linux guests from their host\n \
             The command patchbay, the monitor patchbay-vmm, the daemon patchbayd of a host, the\n \
             controller patchbay-fleet of many hosts, and patchbay-attach for guests that QEMU runs.\n",
        )?;
        tree.deb(version, &self.epoch, out)
    }

    /// Writes `patchbay-agent_VERSION_amd64.deb`.
    pub fn agent_package(&self, version: &str, out: &Path, crates: &[Crate]) -> Result<PathBuf> {
        let tree = Tree::new("patchbay-agent")?;
        let agent = self.program("patchbay-agent");
        tree.put("usr/sbin/patchbay-agent", fs::read(agent)?, 0o755)?;
        let unit = "guest-agent/patchbay-agent.service";
        tree.copy(unit, "usr/lib/systemd/system", 0o644)?;
        tree.page(&host::repository().join(AGENT_PAGE), "usr")?;
        tree.documents(crates)?;
        tree.control(
            version,
            "Section: admin\nRecommends: systemd\n",
            "trace events of this guest for the monitor that runs it\n \
             Install it in a guest of Patchbay. It reaches nothing but the guest's own monitor.\n",
        )?;
        tree.deb(version, &self.epoch, out)
    }

    /// Puts programs, manual pages and completions below a prefix.
    fn put_host_files(&self, tree: &Tree, prefix: &str) -> Result<()> {
        for (_, name) in PROGRAMS {
            let path = self.program(name);
            tree.put(&format!("{prefix}/bin/{name}"), fs::read(&path)?, 0o755)?;
        }
        for file in cache::files_below(self.manual.path())? {
            let name = file.file_stem().unwrap_or_default().to_string_lossy();
            let ending = file.extension().unwrap_or_default().to_string_lossy();
            let place = match &*ending {
                "bash" => format!("bash-completion/completions/{name}"),
                "zsh" => format!("zsh/vendor-completions/_{name}"),
                "fish" => format!("fish/vendor_completions.d/{name}.fish"),
                _ => {
                    tree.page(&file, prefix)?;
                    continue;
                }
            };
            tree.put(&format!("{prefix}/share/{place}"), fs::read(&file)?, 0o644)?;
        }
        Ok(())
    }

    /// Writes `patchbay-VERSION-x86_64-linux.tar.xz`, for other distributions.
    fn tarball(&self, version: &str, out: &Path, crates: &[Crate]) -> Result<()> {
        let name = format!("patchbay-{version}-x86_64-linux");
        let tree = Tree::new("patchbay")?;
        self.put_host_files(&tree, &name)?;
        let agent = fs::read(self.program("patchbay-agent"))?;
        tree.put(&format!("{name}/bin/patchbay-agent"), agent, 0o755)?;
        tree.page(&host::repository().join(AGENT_PAGE), &name)?;
        let agents = "guest-agent/patchbay-agent.service";
        for unit in UNITS.iter().chain(&[agents, USERS]) {
            tree.copy(unit, &format!("{name}/systemd"), 0o644)?;
        }
        tree.check_manual(&name)?;
        tree.copy("LICENSE", &name, 0o644)?;
        let licences = bill::licences(crates)?;
        tree.put(&format!("{name}/LICENCES"), licences, 0o644)?;
        let mut tar = Command::new("tar");
        tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner"])
            .arg(format!("--mtime=@{}", self.epoch))
            .arg("--directory")
            .arg(tree.root.path())
            .args(["--xz", "--create", "--file"])
            .arg(out.join(format!("{name}.tar.xz")))
            .arg(&name);
        succeed(&mut tar)
    }
}

/// The files of a package.
struct Tree {
    name: &'static str,
    root: tempfile::TempDir,
}

impl Tree {
    fn new(name: &'static str) -> Result<Self> {
        let root = tempfile::tempdir()?;
        fs::set_permissions(root.path(), fs::Permissions::from_mode(0o755))?;
        Ok(Self { name, root })
    }

    fn put(&self, place: &str, content: impl AsRef<[u8]>, mode: u32) -> Result<()> {
        let path = self.root.path().join(place);
        let folder = path.parent().context("a file is in a folder")?;
        fs::create_dir_all(folder)?;
        fs::write(&path, content).with_context(|| format!("cannot write {place}"))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(mode))?;
        Ok(())
    }

    /// Copies a file of the repository into a folder of the package.
    fn copy(&self, source: &str, folder: &str, mode: u32) -> Result<()> {
        let path = host::repository().join(source);
        let content = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let name = source.rsplit('/').next().unwrap_or(source);
        self.put(&format!("{folder}/{name}"), content, mode)
    }

    /// Puts a manual page below a prefix. The file name's ending is its section.
    fn page(&self, file: &Path, prefix: &str) -> Result<()> {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let section = file.extension().unwrap_or_default().to_string_lossy();
        let text =
            fs::read(file).with_context(|| format!("cannot read the page {}", file.display()))?;
        let place = format!("{prefix}/share/man/man{section}/{name}.gz");
        self.put(&place, compressed(&text)?, 0o644)
    }

    /// Fails if a program has no manual page.
    fn check_manual(&self, prefix: &str) -> Result<()> {
        let root = self.root.path().join(prefix);
        for (folder, section) in [("bin", 1), ("sbin", 8)] {
            let Ok(programs) = fs::read_dir(root.join(folder)) else {
                continue;
            };
            for program in programs {
                let name = program?.file_name();
                let name = name.to_string_lossy();
                // In the tarball, the agent is in bin.
                let has_page = |section: u8| {
                    let page = format!("share/man/man{section}/{name}.{section}.gz");
                    root.join(page).is_file()
                };
                ensure!(
                    has_page(section) || has_page(8),
                    "{folder}/{name} has no manual page"
                );
            }
        }
        Ok(())
    }

    fn documents(&self, crates: &[Crate]) -> Result<()> {
        let folder = format!("usr/share/doc/{}", self.name);
        self.put(
            &format!("{folder}/copyright"),
            "Patchbay is licensed under the Apache License, version 2.0:\n\
             /usr/share/common-licenses/Apache-2.0\n\n\
             The crates that it links, and their licences, are in LICENCES.gz.\n",
            0o644,
        )?;
        let licences = compressed(bill::licences(crates)?.as_bytes())?;
        self.put(&format!("{folder}/LICENCES.gz"), licences, 0o644)?;
        let changes = fs::read(host::repository().join("CHANGELOG.md"))?;
        self.put(
            &format!("{folder}/changelog.gz"),
            compressed(&changes)?,
            0o644,
        )
    }

    /// Writes the control file, maintainer scripts and checksums. Must be called last.
    fn control(&self, version: &str, fields: &str, description: &str) -> Result<()> {
        let (mut kib, mut sums) = (0, String::new());
        for path in cache::files_below(self.root.path())? {
            let place = path.strip_prefix(self.root.path())?.display().to_string();
            if place.starts_with("DEBIAN/") {
                continue;
            }
            kib += fs::metadata(&path)?.len().div_ceil(1024);
            let sum = output(Command::new("md5sum").arg(&path))?;
            let sum = sum.split(' ').next().unwrap_or_default();
            sums += &format!("{sum}  {place}\n");
        }
        let control = format!(
            "Package: {}\nVersion: {version}\nArchitecture: amd64\n\
             Maintainer: The Patchbay authors <patchbay@localhost>\nPriority: optional\n\
             {fields}Installed-Size: {kib}\nDescription: {description}",
            self.name
        );
        self.put("DEBIAN/control", control, 0o644)?;
        self.put("DEBIAN/md5sums", sums, 0o644)?;
        for script in ["postinst", "prerm", "postrm"] {
            let source = format!("xtask/package/{}.{script}", self.name);
            if let Ok(content) = fs::read(host::repository().join(source)) {
                self.put(&format!("DEBIAN/{script}"), content, 0o755)?;
            }
        }
        Ok(())
    }

    fn deb(&self, version: &str, epoch: &str, out: &Path) -> Result<PathBuf> {
        self.check_manual("usr")?;
        // The modes of the folders must not depend on the umask.
        let mut folders = Command::new("find");
        folders.arg(self.root.path());
        succeed(folders.args(["-type", "d", "-exec", "chmod", "755", "{}", "+"]))?;
        let path = out.join(format!("{}_{version}_amd64.deb", self.name));
        let mut build = Command::new("dpkg-deb");
        build
            .args(["--root-owner-group", "-Zxz", "--build"])
            .arg(self.root.path())
            .arg(&path)
            .env("SOURCE_DATE_EPOCH", epoch);
        succeed(&mut build)?;
        Ok(path)
    }
}

/// Fails if a page lists a subcommand whose page no program has written.
fn check_references(manual: &Path) -> Result<()> {
    for file in cache::files_below(manual)? {
        if file.extension().is_none_or(|ending| ending != "1") {
            continue;
        }
        let text = fs::read_to_string(&file)?.replace("\\-", "-");
        let words = text.lines().filter_map(|line| line.strip_suffix("(1)"));
        for page in words.map(|name| manual.join(format!("{name}.1"))) {
            ensure!(
                page.is_file(),
                "{} lists the page {}, which does not exist",
                file.display(),
                page.display()
            );
        }
    }
    Ok(())
}

fn write_sums(folder: &Path) -> Result<()> {
    let mut sums = String::new();
    for path in cache::files_below(folder)? {
        let sum = Sha256::digest(fs::read(&path)?);
        let sum: String = sum.iter().map(|byte| format!("{byte:02x}")).collect();
        let name = path.strip_prefix(folder)?.display();
        sums += &format!("{sum}  {name}\n");
    }
    fs::write(folder.join("SHA256SUMS"), sums).context("cannot write SHA256SUMS")
}

/// Writes the signature `SHA256SUMS.asc`.
pub fn sign(folder: &Path, key: &str) -> Result<()> {
    host::ensure_packages(&["gpg"])?;
    sign_with(&mut Command::new("gpg"), folder, key)
}

fn sign_with(gpg: &mut Command, folder: &Path, key: &str) -> Result<()> {
    gpg.args(["--batch", "--yes", "--armor", "--local-user", key])
        .args(["--detach-sign", "SHA256SUMS"])
        .current_dir(folder);
    succeed(gpg).with_context(|| format!("SHA256SUMS cannot be signed with the key {key}"))
}

/// Compresses with gzip, without a name and a time.
fn compressed(content: &[u8]) -> Result<Vec<u8>> {
    let file = tempfile::NamedTempFile::new()?;
    fs::write(file.path(), content)?;
    let mut gzip = Command::new("gzip");
    let gzip = gzip.args(["-9", "--no-name", "--stdout"]).arg(file.path());
    run_to_end(gzip)
}

fn succeed(command: &mut Command) -> Result<()> {
    run_to_end(command).map(drop)
}

fn output(command: &mut Command) -> Result<String> {
    Ok(String::from_utf8(run_to_end(command)?)?)
}

fn run_to_end(command: &mut Command) -> Result<Vec<u8>> {
    let program = command.get_program().display().to_string();
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {program}"))?;
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        bail!("{program} failed ({}): {message}", output.status);
    }
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subcommand_without_a_page_is_refused() {
        let manual = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(manual.path().join(name), text).unwrap();
        write(
            "one.1",
            ".SH SUBCOMMANDS\n.TP\none\\-two(1)\nDoes two things\n",
        );
        let error = check_references(manual.path()).unwrap_err().to_string();
        assert!(error.contains("one-two.1, which does not exist"), "{error}");
        write("one-two.1", ".TH ONE-TWO 1\n");
        check_references(manual.path()).unwrap();
    }

    #[test]
    fn a_signature_holds_until_the_sums_change() {
        fn gpg_of(home: &Path) -> Command {
            let mut gpg = Command::new("gpg");
            gpg.arg("--homedir").arg(home);
            gpg
        }
        if Command::new("gpg").arg("--version").output().is_err() {
            return println!("SKIPPED: gpg is not installed");
        }
        let [home, folder] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        fs::set_permissions(home.path(), fs::Permissions::from_mode(0o700)).unwrap();
        let gpg = |arguments: &[&str]| {
            let mut gpg = gpg_of(home.path());
            gpg.arg("--batch").args(arguments);
            run_to_end(gpg.current_dir(folder.path()))
        };
        let key = ["--passphrase", "", "--quick-gen-key", "release@example.org"];
        gpg(&key).unwrap();
        fs::write(folder.path().join("patchbay.deb"), "content").unwrap();
        write_sums(folder.path()).unwrap();
        let sign = |key| sign_with(&mut gpg_of(home.path()), folder.path(), key);
        sign("nobody@example.org").unwrap_err();
        sign("release@example.org").unwrap();
        let verify = ["--verify", "SHA256SUMS.asc", "SHA256SUMS"];
        gpg(&verify).unwrap();
        fs::write(folder.path().join("SHA256SUMS"), "other").unwrap();
        gpg(&verify).unwrap_err();
        let mut agent = Command::new("gpgconf");
        agent.arg("--homedir").arg(home.path());
        agent.args(["--kill", "all"]).status().unwrap();
    }

    #[test]
    fn a_program_without_a_page_is_refused() {
        let tree = Tree::new("package").unwrap();
        let page = tree.root.path().join("page.8");
        fs::write(&page, ".TH PAGE 8\n").unwrap();
        tree.check_manual("usr").unwrap();
        tree.put("usr/sbin/page", "", 0o755).unwrap();
        let error = tree.check_manual("usr").unwrap_err().to_string();
        assert_eq!(error, "sbin/page has no manual page");
        tree.page(&page, "usr").unwrap();
        tree.check_manual("usr").unwrap();
        tree.put("usr/bin/other", "", 0o755).unwrap();
        assert!(tree.check_manual("usr").is_err());
    }
}
