// SPDX-License-Identifier: Apache-2.0
//! Builds the guest's kernel from Debian's source package or another tree, with our series and
//! configuration.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::kernel_tree::{self, SharedTree};
use crate::step::Steps;
use crate::{cache, host, kernel_config};

const KIND: &str = "kernel";

/// The name of the folder with the part of the built tree that is needed to build further modules.
const DEVELOPMENT: &str = "development";

/// The fragment in `guest-kernel-patches/config` that deselects the series' symbol.
const NOT_SELECTED: &str = "not-selected";

/// The fragment that removes the symbols of data and adds BTF.
const NO_KALLSYMS_ALL: &str = "no-kallsyms-all";

/// The newest version with a series, and the suite of Debian's archive that has its source.
const NEWEST: &str = "7.3";
const NEWEST_SUITE: &str = "trixie-backports";

/// Increment this when the way a kernel is built changes.
const RECIPE: &str = "guest kernel 2";

/// Describes a kernel to build.
#[derive(Debug, Clone)]
pub struct Recipe {
    /// Directory of the series below `guest-kernel-patches`, for example "6.12".
    pub version: String,
    /// A source tree to use instead of Debian's package.
    pub tree: Option<PathBuf>,
    /// Apply the series, and the demo's patches if the series is selected.
    pub patched: bool,
    /// Fragments in `guest-kernel-patches/config` appended to guest.config, for example
    /// "no-jump-label".
    pub config: Vec<String>,
}

impl Recipe {
    /// Returns the kernel of the demo and the tests.
    pub fn standard() -> Self {
        let tree = std::env::var_os("PATCHBAY_KERNEL_TREE").filter(|tree| !tree.is_empty());
        Self {
            version: "6.12".into(),
            tree: tree.map(Into::into),
            patched: true,
            config: Vec::new(),
        }
    }

    /// Returns the oldest kernel with a series.
    pub fn oldest() -> Self {
        Self {
            version: "6.1".into(),
            tree: None,
            patched: true,
            config: Vec::new(),
        }
    }

    /// Returns the newest kernel with a series.
    pub fn newest() -> Self {
        Self {
            version: NEWEST.into(),
            ..Self::oldest()
        }
    }

    /// Returns a kernel without jump labels, whose branches read the key's count.
    pub fn without_jump_labels() -> Self {
        Self {
            config: vec!["no-jump-label".into()],
            ..Self::standard()
        }
    }

    /// Returns a kernel without jump labels that has only what tests of keys need.
    pub fn small_without_jump_labels() -> Self {
        Self {
            config: vec!["no-jump-label".into(), "small".into()],
            ..Self::standard()
        }
    }

    /// Returns the standard kernel without the series.
    pub fn unpatched() -> Self {
        Self {
            patched: false,
            ..Self::standard()
        }
    }

    /// Returns a kernel without the series that has BTF and what tests of keys need, but no symbols
    /// of data in its kallsyms.
    pub fn without_data_symbols() -> Self {
        Self {
            config: vec!["small".into(), NO_KALLSYMS_ALL.into()],
            ..Self::unpatched()
        }
    }

    /// Returns the standard kernel with the series applied and its symbol deselected.
    pub fn not_selected() -> Self {
        Self {
            config: vec![NOT_SELECTED.into()],
            ..Self::standard()
        }
    }

    /// Returns whether the kernel registers its keys.
    fn selected(&self) -> bool {
        self.patched && !self.config.iter().any(|name| name == NOT_SELECTED)
    }

    fn package(&self) -> String {
        format!("linux-source-{}", self.version)
    }

    /// Returns the packages that this build needs from the host's own release.
    pub fn packages(&self) -> Vec<String> {
        let mut packages: Vec<String> = host::KERNEL.iter().map(|p| (*p).to_owned()).collect();
        if self.tree.is_none() && self.version != NEWEST {
            packages.push(self.package());
        }
        if self.config.iter().any(|name| name == NO_KALLSYMS_ALL) {
            // pahole converts the compiler's DWARF to BTF.
            packages.push("dwarves".to_owned());
        }
        packages
    }

    fn ensure_packages(&self) -> Result<()> {
        let packages = self.packages();
        host::ensure_packages(&packages.iter().map(String::as_str).collect::<Vec<_>>())?;
        if self.tree.is_none() && self.version == NEWEST {
            host::ensure_package_of(NEWEST_SUITE, &self.package())?;
        }
        Ok(())
    }

    fn patches(&self) -> Result<Vec<PathBuf>> {
        let repository = host::repository();
        let mut patches = Vec::new();
        if !self.patched {
            return Ok(patches);
        }
        let folder = repository.join("guest-kernel-patches").join(&self.version);
        let series = folder.join("series");
        let list = fs::read_to_string(&series).with_context(|| {
            format!(
                "no series for kernel {}: {}",
                self.version,
                series.display()
            )
        })?;
        for line in list
            .lines()
            .map(str::trim)
            .filter(|l| !l.is_empty() && !l.starts_with('#'))
        {
            patches.push(folder.join(line));
        }
        if !self.selected() {
            // The demo's branch is a separate change that is not part of the series.
            return Ok(patches);
        }
        let demo = cache::files_below(&repository.join("examples/getppid"))?;
        patches.extend(
            demo.into_iter()
                .filter(|path| path.extension() == Some("patch".as_ref())),
        );
        Ok(patches)
    }

    fn fragments(&self) -> Vec<PathBuf> {
        let folder = host::repository().join("guest-kernel-patches/config");
        // Only a kernel that registers its keys has KUnit. A comparison of the other kernels
        // therefore shows only the effect of the series.
        let tests = self.selected().then_some("kunit");
        let names = std::iter::once("guest")
            .chain(tests)
            .chain(self.config.iter().map(String::as_str));
        names
            .map(|name| folder.join(format!("{name}.config")))
            .collect()
    }

    fn source_identity(&self) -> Result<String> {
        match &self.tree {
            None => installed_version(&self.package()),
            Some(tree) => {
                ensure!(
                    tree.join("kernel/jump_label.c").exists(),
                    "{} is not a Linux source tree (it has no kernel/jump_label.c)",
                    tree.display()
                );
                tree_identity(tree)
            }
        }
    }

    /// Returns the identity of the sources and the compiler of a shared tree.
    fn tree_identity(&self) -> Result<String> {
        let mut inputs = cache::Inputs::new(RECIPE);
        inputs.add("source", self.source_identity()?);
        inputs.add("compiler", first_line("gcc")?);
        inputs.add("linker", first_line("ld")?);
        Ok(inputs.key())
    }

    fn key(&self) -> Result<String> {
        let mut inputs = cache::Inputs::new(RECIPE);
        inputs.add("source", self.source_identity()?);
        for patch in self.patches()? {
            inputs.add_file("patch", &patch)?;
        }
        for fragment in self.fragments() {
            inputs.add_file("fragment", &fragment)?;
        }
        inputs.add("compiler", first_line("gcc")?);
        inputs.add("linker", first_line("ld")?);
        Ok(inputs.key())
    }
}

/// A built kernel in the cache.
pub struct Kernel {
    /// The directory of the cache entry.
    pub folder: PathBuf,
    key: String,
    patched: bool,
}

impl Kernel {
    /// Returns the identity of the sources, the configuration and the compiler.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Returns the path of the compressed image.
    pub fn bzimage(&self) -> PathBuf {
        self.folder.join("bzImage")
    }

    /// Returns the path of the ELF file.
    pub fn vmlinux(&self) -> PathBuf {
        self.folder.join("vmlinux")
    }

    /// Returns the path of the list of all symbols' addresses, as text.
    pub fn system_map(&self) -> PathBuf {
        self.folder.join("System.map")
    }

    /// Returns the folder of the kernel's own modules, which has no subfolders.
    pub fn modules(&self) -> PathBuf {
        self.folder.join("modules")
    }

    /// Returns the folder of our modules, which has no subfolders, and builds them if they are not
    /// in the cache; `None` for a kernel without the series. They have their own cache entry,
    /// because building a module takes seconds and building a kernel takes minutes.
    pub fn test_modules(&self) -> Result<Option<PathBuf>> {
        if !self.patched {
            return Ok(None);
        }
        let mut inputs = cache::Inputs::new("test modules 1");
        inputs.add("kernel", &self.key);
        inputs.add_folder("sources", &modules_path())?;
        let folder = cache::entry("modules", &inputs.key(), |folder| {
            build_test_modules(self, folder)
        })?;
        Ok(Some(folder.join("modules")))
    }
}

fn build_test_modules(kernel: &Kernel, folder: &Path) -> Result<()> {
    let steps = Steps::new("building our kernel modules", &folder.join("build.log"))?;
    // Uses a copy, because Kbuild writes next to the sources.
    let sources = folder.join("sources");
    steps.run(
        "copying",
        Command::new("cp")
            .arg("-r")
            .args([modules_path(), sources.clone()]),
    )?;
    steps.run("compiling", make_module(kernel, &sources).arg("modules"))?;
    let modules = folder.join("modules");
    fs::create_dir(&modules)?;
    collect_modules(&sources, &modules)?;
    fs::remove_dir_all(&sources)?;
    Ok(())
}

/// Returns a `make` command for a module outside of the kernel's tree. The kernel must have the
/// series.
pub fn make_module(kernel: &Kernel, sources: &Path) -> Command {
    let mut command = make(&kernel.folder.join(DEVELOPMENT));
    command.arg(variable("M=", sources));
    command
}

/// Returns the kernel and builds it if it is not in the cache. Installs what the build needs.
pub fn get(recipe: &Recipe) -> Result<Kernel> {
    recipe.ensure_packages()?;
    let key = recipe.key()?;
    let folder = cache::entry(KIND, &key, |folder| build(recipe, folder))?;
    Ok(Kernel {
        folder,
        key,
        patched: recipe.patched,
    })
}

/// Returns whether the kernel is in the cache. Fails if the key cannot be computed, for example
/// because the source package is not installed.
pub fn is_cached(recipe: &Recipe) -> Result<bool> {
    cache::has(KIND, &recipe.key()?)
}

fn modules_path() -> PathBuf {
    host::repository().join("guest-kernel-patches/modules")
}

fn build(recipe: &Recipe, folder: &Path) -> Result<()> {
    let series = if recipe.patched {
        "with the series"
    } else {
        "without the series"
    };
    let config: String = recipe
        .config
        .iter()
        .map(|name| format!(", {name}"))
        .collect();
    let heading = format!("building guest kernel {} {series}{config}", recipe.version);
    let steps = Steps::new(&heading, &folder.join("build.log"))?;
    let patches = recipe.patches()?;
    match &recipe.tree {
        None => {
            let shared = SharedTree::open(&recipe.version, &recipe.tree_identity()?, |tree| {
                unpack(&recipe.package(), &steps, tree)
            })?;
            shared.patch(&steps, &patches)?;
            compile(recipe, &steps, &shared.tree(), folder)?;
            shared.finish()
        }
        Some(source) => {
            let tree = folder.join("tree");
            fs::create_dir(&tree)?;
            copy_tree(source, &steps, &tree)?;
            kernel_tree::apply(&steps, &patches, &tree)?;
            compile(recipe, &steps, &tree, folder)?;
            cache::discard(&tree, folder)
        }
    }
}

/// Builds the kernel of a patched tree and copies the results to `folder`.
fn compile(recipe: &Recipe, steps: &Steps, tree: &Path, folder: &Path) -> Result<()> {
    configure(recipe, steps, tree)?;
    steps.run("compiling", make(tree).args(["bzImage", "modules"]))?;

    let modules = folder.join("modules");
    fs::create_dir(&modules)?;
    for module in built_modules(&fs::read_to_string(tree.join("modules.order"))?) {
        let name = module.file_name().unwrap_or_default();
        fs::copy(tree.join(&module), modules.join(name))
            .with_context(|| format!("no {}", module.display()))?;
    }
    for (from, to) in [
        ("arch/x86/boot/bzImage", "bzImage"),
        ("vmlinux", "vmlinux"),
        ("System.map", "System.map"),
        (".config", "config"),
    ] {
        fs::copy(tree.join(from), folder.join(to)).with_context(|| format!("no {from}"))?;
    }
    // These sections are most of a vmlinux that was compiled for BTF, and nothing reads them again.
    let mut command = Command::new("objcopy");
    command.arg("--remove-section=.debug_*");
    steps.run("removing DWARF", command.arg(folder.join("vmlinux")))?;
    if recipe.patched {
        keep_for_modules(steps, tree, &folder.join(DEVELOPMENT))?;
    }
    Ok(())
}

/// Returns the modules listed in modules.order. Up to 6.1 this file names the modules, and since
/// then their objects. The tree may contain other modules, built for an earlier kernel.
fn built_modules(order: &str) -> impl Iterator<Item = PathBuf> {
    order
        .lines()
        .map(|line| Path::new(line).with_extension("ko"))
}

/// Keeps what Debian's linux-headers packages contain: the Makefiles, the configuration, the
/// headers, and the programs that Kbuild runs.
fn keep_for_modules(steps: &Steps, tree: &Path, to: &Path) -> Result<()> {
    fs::create_dir(to)?;
    let mut command = Command::new("cp");
    command
        .args(["-a", "--parents", "--target-directory"])
        .arg(to);
    command.args([
        "Makefile",
        "Kbuild",
        ".config",
        "Module.symvers",
        "include",
        "scripts",
    ]);
    command.args([
        "arch/x86/Makefile",
        "arch/x86/include",
        "tools/objtool/objtool",
    ]);
    steps.run("keeping what modules need", command.current_dir(tree))
}

fn unpack(package: &str, steps: &Steps, tree: &Path) -> Result<()> {
    let tarball = format!("/usr/src/{package}.tar.xz");
    let mut command = Command::new("tar");
    command.args(["--extract", "--strip-components=1", "--file", &tarball]);
    steps.run(
        &format!("unpacking {tarball}"),
        command.arg("--directory").arg(tree),
    )
}

fn copy_tree(source: &Path, steps: &Steps, tree: &Path) -> Result<()> {
    let mut command = Command::new("cp");
    command
        .args(["-a", "--reflink=auto", "--no-target-directory"])
        .arg(source)
        .arg(tree);
    steps.run(&format!("copying {}", source.display()), &mut command)?;
    // Objects of another configuration would interfere.
    steps.run("cleaning the copy", make(tree).arg("mrproper"))
}

fn configure(recipe: &Recipe, steps: &Steps, tree: &Path) -> Result<()> {
    let mut fragments = String::new();
    for path in recipe.fragments() {
        let text = fs::read_to_string(&path).with_context(|| format!("no {}", path.display()))?;
        fragments.push_str(&text);
    }
    let fragment = tree.join("patchbay.config");
    fs::write(&fragment, &fragments)?;
    let mut command = make(tree);
    command
        .arg(variable("KCONFIG_ALLCONFIG=", &fragment))
        .arg("allnoconfig");
    steps.run("configuring", &mut command)?;
    let required: &[&str] = if recipe.selected() {
        &["CONFIG_PATCHBAY"]
    } else {
        &[]
    };
    let config = fs::read_to_string(tree.join(".config"))?;
    kernel_config::verify(&fragments, &config, tree, required)
}

/// Returns a `make` command whose result does not depend on this machine or user.
fn make(tree: &Path) -> Command {
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    // Tests run at the same time as a build, and some of them measure time, so the build has the
    // lowest priority.
    let mut command = Command::new("nice");
    command
        .args(["-n", "19", "make"])
        .arg(format!("-j{jobs}"))
        .arg("ARCH=x86")
        .arg("-C")
        .arg(tree);
    command
        .env("KBUILD_BUILD_USER", "patchbay")
        .env("KBUILD_BUILD_HOST", "patchbay");
    command.env("KBUILD_BUILD_TIMESTAMP", "Thu Jan  1 00:00:00 UTC 1970");
    // Without this, the build number counts how often the tree was linked.
    command.env("KBUILD_BUILD_VERSION", "1");
    // Variables of cargo or of a surrounding make have other meanings in Kbuild.
    command
        .env_remove("MAKEFLAGS")
        .env_remove("TARGET")
        .env_remove("O")
        .env_remove("V");
    command
}

fn variable(name: &str, path: &Path) -> std::ffi::OsString {
    let mut argument = std::ffi::OsString::from(name);
    argument.push(path);
    argument
}

fn collect_modules(from: &Path, to: &Path) -> Result<()> {
    for path in cache::files_below(from)? {
        if let (Some("ko"), Some(name)) =
            (path.extension().and_then(OsStr::to_str), path.file_name())
        {
            fs::copy(&path, to.join(name))?;
        }
    }
    Ok(())
}

fn installed_version(package: &str) -> Result<String> {
    let output = Command::new("dpkg-query")
        .args([
            "--show",
            "--showformat=${db:Status-Status} ${Version}",
            package,
        ])
        .output()
        .context("cannot run dpkg-query")?;
    match String::from_utf8_lossy(&output.stdout).split_once(' ') {
        Some(("installed", version)) => Ok(format!("{package} {version}")),
        _ => bail!("package {package} is not installed"),
    }
}

/// Returns an identity of the tree from names, sizes and times. Hashing the content, over a
/// gigabyte, would take too long.
fn tree_identity(tree: &Path) -> Result<String> {
    let mut inputs = cache::Inputs::new("tree");
    for path in cache::files_below(tree)? {
        if path.starts_with(tree.join(".git")) {
            continue;
        }
        let metadata = fs::symlink_metadata(&path)?;
        let modified = metadata.modified()?.duration_since(std::time::UNIX_EPOCH)?;
        let name = path.strip_prefix(tree)?.to_string_lossy().into_owned();
        inputs.add(&name, format!("{} {}", metadata.len(), modified.as_nanos()));
    }
    Ok(inputs.key())
}

fn first_line(program: &str) -> Result<String> {
    let output = Command::new(program)
        .arg("--version")
        .output()
        .with_context(|| format!("cannot run {program}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(text.lines().next().unwrap_or_default().to_owned())
}

/// Returns the name and version of the compiler, for cache keys of its output.
pub fn compiler() -> Result<String> {
    first_line("gcc")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_those_of_this_build() {
        let expected = [Path::new("fs/ext4/ext4.ko"), Path::new("lib/test.ko")];
        for order in [
            "fs/ext4/ext4.ko\nlib/test.ko\n",
            "fs/ext4/ext4.o\nlib/test.o\n",
        ] {
            assert!(built_modules(order).eq(expected), "{order}");
        }
    }
}
