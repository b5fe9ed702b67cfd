// SPDX-License-Identifier: Apache-2.0
//! Finds the shared libraries of a program by the rules of ld.so(8).

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use object::elf::{self, FileHeader64};
use object::read::elf::{Dyn, FileHeader, ProgramHeader};
use object::{Endianness, ReadRef};

/// The directories that ld.so searches without a cache or a configuration (Debian's multiarch
/// first).
const DEFAULT_FOLDERS: [&str; 6] = [
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/lib",
    "/usr/lib",
];
const CONFIGURATION: &str = "/etc/ld.so.conf";

/// The requirements that an ELF file passes to the dynamic loader.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Dynamic {
    /// The dynamic loader; `None` for static programs and for libraries.
    pub interpreter: Option<String>,
    /// Names of the libraries.
    pub needed: Vec<String>,
    /// Directories of DT_RPATH and DT_RUNPATH, as written.
    pub paths: Vec<String>,
}

/// Reads the dynamic section. `None` if the file is not an ELF file for x86-64.
pub fn dynamic(data: &[u8]) -> Result<Option<Dynamic>> {
    if !data.starts_with(&elf::ELFMAG) || data.get(4) != Some(&elf::ELFCLASS64) {
        return Ok(None);
    }
    let header = FileHeader64::<Endianness>::parse(data)?;
    let endian = header.endian()?;
    if header.e_machine(endian) != elf::EM_X86_64 {
        return Ok(None);
    }
    let segments = header.program_headers(endian, data)?;
    let mut found = Dynamic::default();
    let mut entries = None;
    for segment in segments {
        if let Some(interpreter) = segment.interpreter(endian, data)? {
            found.interpreter = Some(String::from_utf8_lossy(interpreter).into_owned());
        }
        entries = segment.dynamic(endian, data)?.or(entries);
    }
    let Some(entries) = entries else {
        return Ok(Some(found));
    };
    let value = |tag: u32| {
        let entry = entries
            .iter()
            .find(|entry| entry.tag32(endian) == Some(tag))?;
        Some(entry.d_val(endian))
    };
    let strings = value(elf::DT_STRTAB)
        .and_then(|address| {
            segments.iter().find_map(|segment| {
                let offset = address.checked_sub(segment.p_vaddr(endian))?;
                let inside =
                    segment.p_type(endian) == elf::PT_LOAD && offset < segment.p_filesz(endian);
                inside.then(|| segment.p_offset(endian).checked_add(offset))?
            })
        })
        .context("its dynamic section has no string table")?;
    let text = |offset: u64| -> Result<String> {
        let start = strings
            .checked_add(offset)
            .context("a string lies outside the file")?;
        let bytes = data
            .read_bytes_at_until(start..data.len() as u64, 0)
            .map_err(|()| anyhow::anyhow!("a string lies outside the file"))?;
        Ok(String::from_utf8_lossy(bytes).into_owned())
    };
    for entry in entries {
        match entry.tag32(endian) {
            Some(elf::DT_NEEDED) => found.needed.push(text(entry.d_val(endian))?),
            Some(elf::DT_RPATH | elf::DT_RUNPATH) => {
                let paths = text(entry.d_val(endian))?;
                found.paths.extend(paths.split(':').map(str::to_owned));
            }
            _ => {}
        }
    }
    Ok(Some(found))
}

/// The folders that are searched for libraries after a file's own paths.
#[derive(Debug)]
pub struct Search {
    folders: Vec<PathBuf>,
}

impl Search {
    /// Searches LD_LIBRARY_PATH, the configuration of ld.so, and its default directories.
    pub fn of_this_machine() -> Self {
        let variable = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let mut folders: Vec<PathBuf> = std::env::split_paths(&variable)
            .filter(|folder| folder.is_absolute())
            .collect();
        configured(Path::new(CONFIGURATION), &mut folders, 0);
        folders.extend(DEFAULT_FOLDERS.map(PathBuf::from));
        Self { folders }
    }

    /// Returns the libraries of `program`, their own libraries, and its dynamic loader. The set is
    /// empty for files that are not ELF files for x86-64.
    ///
    /// # Errors
    /// A library is missing; the message names it, the file that needs it and the directories.
    pub fn all(&self, program: &Path) -> Result<BTreeSet<PathBuf>> {
        let mut found = BTreeSet::new();
        let mut waiting = vec![program.to_owned()];
        while let Some(path) = waiting.pop() {
            let data =
                fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            let dynamic = dynamic(&data)
                .with_context(|| format!("{} is a broken ELF file", path.display()))?
                .unwrap_or_default();
            let interpreter = dynamic.interpreter.iter().map(PathBuf::from);
            for interpreter in interpreter {
                if !interpreter.exists() {
                    bail!(
                        "{} needs the dynamic loader {}, which this machine does not have",
                        path.display(),
                        interpreter.display()
                    );
                }
                found.insert(interpreter);
            }
            for name in &dynamic.needed {
                let library = self.find(name, &path, &dynamic.paths)?;
                if found.insert(library.clone()) {
                    waiting.push(library);
                }
            }
        }
        Ok(found)
    }

    fn find(&self, name: &str, user: &Path, own: &[String]) -> Result<PathBuf> {
        if name.contains('/') {
            return Ok(PathBuf::from(name));
        }
        let origin = user.canonicalize().unwrap_or_else(|_| user.to_owned());
        let origin = origin
            .parent()
            .unwrap_or(Path::new("/"))
            .display()
            .to_string();
        let own = own.iter().map(|path| {
            PathBuf::from(
                path.replace("${ORIGIN}", &origin)
                    .replace("$ORIGIN", &origin),
            )
        });
        let folders: Vec<PathBuf> = own.chain(self.folders.iter().cloned()).collect();
        let fits = |path: &PathBuf| {
            let head = fs::read(path).ok();
            head.is_some_and(|data| matches!(dynamic(&data), Ok(Some(_))))
        };
        let found = folders.iter().map(|folder| folder.join(name)).find(fits);
        match found {
            // A path with ".." must be resolved, because an archive has no such path.
            Some(path) => match (path.parent(), path.to_string_lossy().contains("/../")) {
                (Some(folder), true) => Ok(folder.canonicalize()?.join(name)),
                _ => Ok(path),
            },
            None => {
                let mut searched: Vec<String> = vec![];
                for folder in folders.iter().filter(|folder| folder.is_dir()) {
                    let folder = folder.display().to_string();
                    if !searched.contains(&folder) {
                        searched.push(folder);
                    }
                }
                bail!(
                    "{} needs the library {name}, which is not in {}; install it, or name its \
                     folder in LD_LIBRARY_PATH",
                    user.display(),
                    searched.join(", ")
                )
            }
        }
    }
}

/// Returns whether a loader without a cache and a configuration finds libraries in this directory.
pub fn is_default_folder(folder: &Path) -> bool {
    DEFAULT_FOLDERS
        .iter()
        .any(|default| folder == Path::new(default))
}

/// Collects the directories in a file like ld.so.conf(5). Ignores files that cannot be read.
fn configured(file: &Path, folders: &mut Vec<PathBuf>, depth: usize) {
    const MAX_DEPTH: usize = 4;
    for line in fs::read_to_string(file).unwrap_or_default().lines() {
        let line = line.split('#').next().unwrap_or_default().trim();
        if let Some(pattern) = line.strip_prefix("include ") {
            // The only pattern in use matches a whole directory, "/etc/ld.so.conf.d/*.conf".
            let pattern = Path::new(pattern.trim());
            let (Some(folder), true) = (pattern.parent(), depth < MAX_DEPTH) else {
                continue;
            };
            let suffix = pattern.extension();
            let entries = fs::read_dir(folder).into_iter().flatten().flatten();
            let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
            files.sort();
            for file in files.iter().filter(|file| file.extension() == suffix) {
                configured(file, folders, depth + 1);
            }
        } else if line.starts_with('/') {
            folders.push(line.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Builds a shared object with these entries in its dynamic section.
    fn library(needed: &[&str], runpath: &str, interpreter: &str) -> Vec<u8> {
        let mut strings = vec![0];
        let mut add = |text: &str| {
            let at = strings.len() as u64;
            strings.extend(text.bytes().chain([0]));
            at
        };
        let mut tags: Vec<(u64, u64)> = needed.iter().map(|name| (1, add(name))).collect();
        if !runpath.is_empty() {
            tags.push((29, add(runpath)));
        }
        let base = 0x1000;
        let dynamic_at = 64 + 3 * 56;
        let strings_at = dynamic_at + 16 * (tags.len() as u64 + 2);
        tags.extend([(5, base + strings_at), (0, 0)]);
        let interpreter_at = strings_at + strings.len() as u64;
        let end = interpreter_at + interpreter.len() as u64 + 1;
        let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
        file.extend([3, 0, 62, 0, 1, 0, 0, 0]);
        for word in [0, 64, 0u64] {
            file.extend(word.to_le_bytes());
        }
        for half in [0u16, 0, 64, 56, 3, 0, 0, 0] {
            file.extend(half.to_le_bytes());
        }
        let interpreter_type = if interpreter.is_empty() { 4 } else { 3 };
        for (kind, at, size) in [
            (1u32, 0, end),
            (2, dynamic_at, strings_at - dynamic_at),
            (interpreter_type, interpreter_at, end - interpreter_at),
        ] {
            file.extend(kind.to_le_bytes());
            file.extend(4u32.to_le_bytes());
            for word in [at, base + at, 0, size, size, 1u64] {
                file.extend(word.to_le_bytes());
            }
        }
        for (tag, value) in tags {
            file.extend(tag.to_le_bytes());
            file.extend(value.to_le_bytes());
        }
        file.extend(strings);
        file.extend(interpreter.bytes().chain([0]));
        file
    }

    #[test]
    fn libraries_of_libraries_are_found_beside_their_origin() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().canonicalize().unwrap();
        let write = |name: &str, data: Vec<u8>| {
            let path = folder.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, data).unwrap();
            path
        };
        let loader = write("ld.so", library(&[], "", ""));
        let loader_name = loader.display().to_string();
        let program = write(
            "bin/program",
            library(&["libone.so"], "$ORIGIN/../lib", &loader_name),
        );
        let one = write(
            "lib/libone.so",
            library(&["libtwo.so"], "${ORIGIN}/deep", ""),
        );
        let two = write(
            "lib/deep/libtwo.so",
            library(&["libone.so"], "$ORIGIN/..", ""),
        );
        let search = Search { folders: vec![] };
        assert_eq!(
            search.all(&program).unwrap(),
            [loader, one, two.clone()].into()
        );
        // A file that is named like the library but is not one does not count.
        fs::write(&two, "text").unwrap();
        let error = search.all(&program).unwrap_err().to_string();
        assert!(
            error.contains("lib/libone.so needs the library libtwo.so"),
            "{error}"
        );
    }

    #[test]
    fn a_missing_loader_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("program");
        fs::write(&program, library(&[], "", "/no/such/ld.so")).unwrap();
        let error = Search { folders: vec![] }
            .all(&program)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("the dynamic loader /no/such/ld.so"),
            "{error}"
        );
    }

    #[test]
    fn other_files_need_nothing_and_broken_ones_are_errors() {
        assert_eq!(dynamic(b"#!/bin/sh\n").unwrap(), None);
        assert_eq!(dynamic(b"").unwrap(), None);
        let whole = library(&["liba.so"], "", "");
        for cut in 0..whole.len() {
            // Parsing must not panic. The tail of the file is padding.
            let _ = dynamic(&whole[..cut]);
        }
        let mut other = whole.clone();
        other[18] = 183; // The machine EM_AARCH64.
        assert_eq!(dynamic(&other).unwrap(), None);
        assert_eq!(dynamic(&whole).unwrap().unwrap().needed, ["liba.so"]);
    }

    #[test]
    fn programs_of_this_machine_have_their_libraries() {
        let search = Search::of_this_machine();
        let found = search.all(&std::env::current_exe().unwrap()).unwrap();
        let names: Vec<_> = found
            .iter()
            .map(|path| path.display().to_string())
            .collect();
        assert!(
            names.iter().any(|name| name.ends_with("/libc.so.6")),
            "{names:?}"
        );
        assert!(
            names.iter().any(|name| name.contains("/ld-linux")),
            "{names:?}"
        );
    }
}
