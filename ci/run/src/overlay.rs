// SPDX-License-Identifier: Apache-2.0
//! Makes the initramfs of a guest: the user's initramfs, followed by an archive with our init,
//! busybox, the agent, and the copied files with their libraries.
//!
//! Our files are below /patchbay, so that they do not collide with the user's. Copied files keep
//! their paths unless the user gives others.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use patchbay_lab::cpio;
use patchbay_lab::modules::{self, Module};

use crate::libraries::{self, Search};

const INIT: &str = include_str!("../guest/init.sh");

/// The path of our init in the guest.
pub const INIT_PATH: &str = "/patchbay/init";

/// A word on the kernel's command line that makes our init start a shell on the console.
pub const SHELL_WORD: &str = "patchbay.shell";

/// The limit on the initramfs. The format's limit on a file is 4 GiB, but the guest's memory is the
/// practical limit.
const MAX_BYTES: u64 = 2 << 30;

/// The modules that provide vsock on a kernel that does not have them built in.
const MODULES: &[&str] = &[TRANSPORT, "vmw_vsock_virtio_transport"];
const TRANSPORT: &str = "virtio_mmio";

/// The contents of a guest's initramfs.
#[derive(Debug)]
pub struct Contents<'a> {
    /// The user's initramfs.
    pub initrd: Option<&'a Path>,
    pub busybox: &'a Path,
    pub agent: &'a Path,
    /// Files and folders of this machine, and their paths in the guest.
    pub copies: Vec<(PathBuf, PathBuf)>,
    /// A `lib/modules/<version>` of the kernel.
    pub modules: Option<&'a Path>,
    /// Directory in which commands run; it exists in the guest.
    pub directory: &'a Path,
}

/// An entry of the archive: a directory, a symbolic link or a file.
#[derive(Debug)]
enum Entry {
    Folder,
    Symlink(PathBuf),
    File(PathBuf),
}

/// An initramfs.
#[derive(Debug)]
pub struct Overlay {
    pub bytes: Vec<u8>,
    /// Directories of libraries that a loader without a cache does not search by default.
    pub library_folders: Vec<PathBuf>,
    /// The kernel finds virtio-mmio devices only by ACPI, not by its command line.
    pub acpi_devices: bool,
}

impl Overlay {
    /// Returns the environment variables of the commands, NAME=value.
    ///
    /// # Errors
    /// A directory has a colon in its name.
    pub fn environment(&self) -> Result<Vec<String>> {
        if self.library_folders.is_empty() {
            return Ok(vec![]);
        }
        let folders = std::env::join_paths(&self.library_folders)?;
        Ok(vec![format!("LD_LIBRARY_PATH={}", folders.display())])
    }
}

/// Makes the initramfs.
///
/// # Errors
/// A file cannot be read, is too large, or needs a library that this machine does not have.
pub fn make(contents: &Contents) -> Result<Overlay> {
    let mut entries = BTreeMap::new();
    let mut libraries = BTreeSet::new();
    let search = Search::of_this_machine();
    folders_to(Path::new("/dev"), &mut entries);
    entries.insert("/dev".into(), Entry::Folder);
    folders_to(&contents.directory.join("."), &mut entries);
    for (from, to) in &contents.copies {
        copy(from, to, &search, &mut entries, &mut libraries)?;
    }
    for library in &libraries {
        add_file(library, library, &mut entries)?;
    }
    let folders: BTreeSet<&Path> = libraries
        .iter()
        .filter_map(|library| library.parent())
        .collect();
    let library_folders = folders
        .into_iter()
        .filter(|folder| !libraries::is_default_folder(folder))
        .map(Path::to_owned)
        .collect();

    let mut bytes = match contents.initrd {
        Some(path) => fs::read(path).with_context(|| format!("cannot read {}", path.display()))?,
        None => vec![],
    };
    // Linux finds the next archive only at a multiple of four bytes.
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    let modules = match contents.modules {
        Some(folder) => modules::read_with_dependencies(folder, MODULES)
            .with_context(|| format!("{} is no lib/modules/VERSION", folder.display()))?,
        None => vec![],
    };
    bytes.extend(archive(&entries, &modules, contents)?);
    Ok(Overlay {
        bytes,
        library_folders,
        acpi_devices: modules.iter().any(finds_by_acpi_alone),
    })
}

/// Returns whether this is a virtio-mmio driver that was built without
/// `CONFIG_VIRTIO_MMIO_CMDLINE_DEVICES`. That option adds a module parameter, for whose name this
/// function searches the module.
fn finds_by_acpi_alone(module: &Module) -> bool {
    let has = |text: &[u8]| module.content.windows(text.len()).any(|part| part == text);
    module.name == TRANSPORT && !has(b"vm_cmdline_")
}

fn archive(
    entries: &BTreeMap<PathBuf, Entry>,
    modules: &[Module],
    contents: &Contents,
) -> Result<Vec<u8>> {
    let mut archive = cpio::Archive::default();
    let mut total = 0;
    // The entries are sorted by path, so a parent comes before its children.
    for (path, entry) in entries {
        let name = utf8(path)?;
        match entry {
            Entry::Folder => archive.directory(name),
            Entry::Symlink(target) => archive.symlink(name, utf8(target)?),
            Entry::File(from) => {
                let content = read(from, &mut total)?;
                let mode = fs::metadata(from)?.permissions().mode() & 0o777;
                archive.file(name, mode, &content);
            }
        }
    }
    archive.character_device("dev/console", 5, 1);
    archive.directory("patchbay");
    archive.directory("patchbay/bin");
    archive.directory("patchbay/modules");
    archive.file("patchbay/init", 0o755, INIT.as_bytes());
    for (name, from) in [
        ("busybox", contents.busybox),
        ("patchbay-agent", contents.agent),
    ] {
        let content = read(from, &mut total)?;
        let dynamic = libraries::dynamic(&content)?;
        ensure!(
            dynamic.is_some_and(|dynamic| dynamic.interpreter.is_none()),
            "{} is not a static program for x86-64; give a static one",
            from.display()
        );
        archive.file(&format!("patchbay/bin/{name}"), 0o755, &content);
    }
    for applet in applets(contents.busybox)?
        .lines()
        .filter(|name| *name != "busybox")
    {
        archive.symlink(&format!("patchbay/bin/{applet}"), "busybox");
    }
    // Scripts need a shell. The user's initramfs has its own.
    if contents.initrd.is_none() && !entries.contains_key(Path::new("/bin/sh")) {
        if !entries.contains_key(Path::new("/bin")) {
            archive.directory("bin");
        }
        archive.symlink("bin/sh", "/patchbay/bin/busybox");
    }
    for (number, module) in modules.iter().enumerate() {
        // Our init loads the modules in the order of their file names.
        let path = format!("patchbay/modules/{number:02}-{}.ko", module.name);
        archive.file(&path, 0o644, &module.content);
    }
    Ok(archive.finish())
}

fn read(path: &Path, total: &mut u64) -> Result<Vec<u8>> {
    let describe = || format!("cannot read {}", path.display());
    *total += fs::metadata(path).with_context(describe)?.len();
    ensure!(
        *total <= MAX_BYTES,
        "the files to copy exceed {} MiB with {}; copy fewer",
        MAX_BYTES >> 20,
        path.display()
    );
    fs::read(path).with_context(describe)
}

/// Returns the names under which busybox can be called.
fn applets(busybox: &Path) -> Result<String> {
    let output = Command::new(busybox)
        .arg("--list")
        .output()
        .with_context(|| format!("cannot run {}", busybox.display()))?;
    ensure!(
        output.status.success(),
        "{} --list failed",
        busybox.display()
    );
    Ok(String::from_utf8(output.stdout)?)
}

fn copy(
    from: &Path,
    to: &Path,
    search: &Search,
    entries: &mut BTreeMap<PathBuf, Entry>,
    libraries: &mut BTreeSet<PathBuf>,
) -> Result<()> {
    let describe = || format!("cannot copy {}", from.display());
    let metadata = fs::metadata(from).with_context(describe)?;
    // Reading a pipe could block, and /dev/zero has no end.
    ensure!(
        metadata.is_dir() || metadata.is_file(),
        "cannot copy {}: it is neither a file nor a folder",
        from.display()
    );
    if metadata.is_dir() {
        folders_to(&to.join("."), entries);
        for entry in fs::read_dir(from).with_context(describe)? {
            let entry = entry.with_context(describe)?;
            let (from, to) = (entry.path(), to.join(entry.file_name()));
            let kind = entry.file_type().with_context(describe)?;
            if kind.is_symlink() {
                let target = fs::read_link(&from).with_context(describe)?;
                entries.insert(to, Entry::Symlink(target));
            } else if kind.is_dir() || kind.is_file() {
                copy(&from, &to, search, entries, libraries)?;
            }
        }
        return Ok(());
    }
    libraries.extend(search.all(from)?);
    if let Some(interpreter) = interpreter(from) {
        // If the interpreter is missing, the agent reports it when the script runs.
        if interpreter.is_file() && interpreter != Path::new("/bin/sh") {
            libraries.extend(search.all(&interpreter)?);
            add_file(&interpreter, &interpreter, entries)?;
        }
    }
    add_file(from, to, entries)
}

/// Returns the program that the first line of a script names.
fn interpreter(path: &Path) -> Option<PathBuf> {
    use std::io::Read;
    let mut head = vec![];
    fs::File::open(path)
        .ok()?
        .take(256)
        .read_to_end(&mut head)
        .ok()?;
    let line = head
        .strip_prefix(b"#!")?
        .split(|&byte| byte == b'\n')
        .next()?;
    let text = std::str::from_utf8(line).ok()?;
    text.split_whitespace().next().map(PathBuf::from)
}

fn add_file(from: &Path, to: &Path, entries: &mut BTreeMap<PathBuf, Entry>) -> Result<()> {
    let parent = folders_to(to, entries);
    let name = to
        .file_name()
        .with_context(|| format!("{} names no file", to.display()))?;
    entries.insert(parent.join(name), Entry::File(from.to_owned()));
    Ok(())
}

/// Adds the directories above a path. A directory that is a symbolic link in the root, such as
/// /lib64, becomes the same link in the archive, so that libraries are found by either path.
/// Returns the parent with the links resolved.
fn folders_to(path: &Path, entries: &mut BTreeMap<PathBuf, Entry>) -> PathBuf {
    let mut at = PathBuf::from("/");
    let trailing_dot = path.as_os_str().as_encoded_bytes().ends_with(b"/.");
    let parent = if trailing_dot {
        Some(path)
    } else {
        path.parent()
    };
    for component in parent.into_iter().flat_map(Path::components) {
        let Component::Normal(name) = component else {
            continue;
        };
        let folder = at.join(name);
        match top_level_link(&at, name) {
            Some(target) => {
                entries.insert(folder, Entry::Symlink(target.clone()));
                at = folders_to(&Path::new("/").join(&target).join("."), entries);
            }
            None => {
                entries.insert(folder.clone(), Entry::Folder);
                at = folder;
            }
        }
    }
    at
}

/// Returns the target of a link such as /lib64, which points to usr/lib64.
fn top_level_link(folder: &Path, name: &OsStr) -> Option<PathBuf> {
    let is_root = folder == Path::new("/");
    let target = is_root.then(|| fs::read_link(folder.join(name)).ok())??;
    let plain = target
        .components()
        .all(|part| matches!(part, Component::Normal(_)));
    plain.then_some(target)
}

fn utf8(path: &Path) -> Result<&str> {
    match path.to_str() {
        Some(text) => Ok(text),
        None => bail!("the path {} is not UTF-8", path.display()),
    }
}

/// Parses HOST or HOST:GUEST. Both become absolute.
pub fn parse_copy(text: &str) -> Result<(PathBuf, PathBuf), String> {
    let absolute = |path: &str| {
        std::path::absolute(path).map_err(|error| format!("{path:?} is not a path: {error}"))
    };
    match text.rsplit_once(':') {
        Some((host, guest)) if guest.starts_with('/') => Ok((absolute(host)?, absolute(guest)?)),
        Some((_, guest)) if !Path::new(text).exists() => Err(format!(
            "{guest:?} is not an absolute path in the guest; use HOST or HOST:/GUEST"
        )),
        _ => Ok((absolute(text)?, absolute(text)?)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_of_the_root_are_kept() {
        let mut entries = BTreeMap::new();
        // The test needs a /lib64 that is a symbolic link, as on Debian.
        if fs::read_link("/lib64").is_err() {
            return;
        }
        add_file(
            Path::new("/etc/passwd"),
            Path::new("/lib64/x"),
            &mut entries,
        )
        .unwrap();
        let paths: Vec<_> = entries.keys().map(|path| path.to_str().unwrap()).collect();
        assert_eq!(paths, ["/lib64", "/usr", "/usr/lib64", "/usr/lib64/x"]);
        assert!(
            matches!(&entries[Path::new("/lib64")], Entry::Symlink(to) if to == Path::new("usr/lib64"))
        );
    }

    #[test]
    fn a_missing_file_is_named() {
        let mut entries = BTreeMap::new();
        let path = Path::new("/no/such/file");
        let search = Search::of_this_machine();
        let error = copy(path, path, &search, &mut entries, &mut BTreeSet::new()).unwrap_err();
        assert!(error.to_string().contains("/no/such/file"), "{error}");
    }

    #[test]
    fn copies_are_parsed_or_refused() {
        let here = std::env::current_dir().unwrap();
        let copy = |text: &str| parse_copy(text);
        assert_eq!(copy("a"), Ok((here.join("a"), here.join("a"))));
        assert_eq!(copy("a:/b"), Ok((here.join("a"), "/b".into())));
        assert_eq!(copy("/x/y"), Ok(("/x/y".into(), "/x/y".into())));
        assert!(copy("a:b").is_err());
        assert!(copy("").is_err());
    }

    #[test]
    fn only_a_driver_without_its_parameter_needs_acpi() {
        let module = |name: &str, content: &[u8]| Module {
            name: name.to_owned(),
            content: content.to_vec(),
        };
        assert!(finds_by_acpi_alone(&module(
            "virtio_mmio",
            b"\0vm_find_vqs\0"
        )));
        assert!(!finds_by_acpi_alone(&module(
            "virtio_mmio",
            b"\0vm_cmdline_set\0"
        )));
        assert!(!finds_by_acpi_alone(&module("vsock", b"\0")));
    }

    #[test]
    fn a_dynamic_agent_is_refused() {
        let busybox = Path::new("/bin/busybox");
        let agent = std::env::current_exe().unwrap();
        if !busybox.exists() {
            return;
        }
        let contents = Contents {
            busybox,
            agent: &agent,
            directory: Path::new("/"),
            initrd: None,
            copies: vec![],
            modules: None,
        };
        let error = make(&contents).unwrap_err().to_string();
        assert!(error.contains("is not a static program"), "{error}");
    }
}
