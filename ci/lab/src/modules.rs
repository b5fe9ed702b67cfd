// SPDX-License-Identifier: Apache-2.0
//! Reads kernel modules from a Debian package: compressed, without depmod's tables.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::cache;

/// A module ready to be loaded.
#[derive(Debug, PartialEq, Eq)]
pub struct Module {
    /// Name of the module, with underscores.
    pub name: String,
    /// The uncompressed file.
    pub content: Vec<u8>,
}

/// Reads the wanted modules and their dependencies, in an order in which they can be loaded.
/// `folder` is a `lib/modules/<version>` directory. Modules built into the kernel are skipped.
pub fn read_with_dependencies(folder: &Path, wanted: &[&str]) -> Result<Vec<Module>> {
    let mut paths = HashMap::new();
    for path in cache::files_below(&folder.join("kernel"))? {
        if let Some(name) = module_name(&path) {
            paths.insert(name, path);
        }
    }
    let list = folder.join("modules.builtin");
    let builtin = fs::read_to_string(&list).with_context(|| format!("no {}", list.display()))?;
    let builtin: Vec<String> = builtin
        .lines()
        .filter_map(|l| module_name(Path::new(l)))
        .collect();
    in_load_order(wanted, &mut |name| {
        if let Some(path) = paths.get(name) {
            return Ok(Some(uncompressed(path)?));
        }
        if builtin.iter().any(|module| module == name) {
            return Ok(None);
        }
        bail!("{} has no module {name}", folder.display())
    })
}

/// Searches depth first along the `depends=` entries. `read` returns `None` for built-in modules.
fn in_load_order(
    wanted: &[&str],
    read: &mut dyn FnMut(&str) -> Result<Option<Vec<u8>>>,
) -> Result<Vec<Module>> {
    enum Visit {
        Enter(String),
        Leave(Module),
    }
    let mut order: Vec<Module> = Vec::new();
    let mut seen: Vec<String> = Vec::new();
    let mut stack: Vec<Visit> = wanted
        .iter()
        .rev()
        .map(|n| Visit::Enter((*n).into()))
        .collect();
    while let Some(visit) = stack.pop() {
        match visit {
            Visit::Leave(module) => order.push(module),
            Visit::Enter(name) if seen.contains(&name) => {}
            Visit::Enter(name) => {
                seen.push(name.clone());
                if let Some(content) = read(&name)? {
                    let dependencies = dependencies(&content);
                    stack.push(Visit::Leave(Module { name, content }));
                    stack.extend(dependencies.into_iter().map(Visit::Enter));
                }
            }
        }
    }
    Ok(order)
}

/// Returns the names in the `depends=` entry of the module's `.modinfo` section.
fn dependencies(module: &[u8]) -> Vec<String> {
    // The section is a list of NUL-terminated "key=value" texts.
    let entry = module
        .split(|&byte| byte == 0)
        .find_map(|text| text.strip_prefix(b"depends="));
    let names = String::from_utf8_lossy(entry.unwrap_or_default()).into_owned();
    names
        .split(',')
        .filter(|name| !name.is_empty())
        .map(canonical)
        .collect()
}

fn module_name(path: &Path) -> Option<String> {
    let file = path.file_name()?.to_str()?;
    let stem = [".ko", ".ko.xz", ".ko.zst", ".ko.gz"]
        .iter()
        .find_map(|e| file.strip_suffix(e))?;
    Some(canonical(stem))
}

/// Replaces dashes by underscores: file names may have dashes where the kernel uses underscores.
fn canonical(name: &str) -> String {
    name.replace('-', "_")
}

fn uncompressed(path: &PathBuf) -> Result<Vec<u8>> {
    let tool = match path.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        Some("gz") => "gzip",
        _ => return Ok(fs::read(path)?),
    };
    let output = Command::new(tool)
        .args(["--decompress", "--stdout"])
        .arg(path)
        .output()
        .with_context(|| format!("cannot run {tool}"))?;
    if !output.status.success() {
        bail!("{tool} cannot unpack {}", path.display());
    }
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(graph: &[(&str, &str)], wanted: &[&str]) -> Result<Vec<String>> {
        let modules = in_load_order(wanted, &mut |name| match name {
            "builtin" => Ok(None),
            _ => match graph.iter().find(|(module, _)| *module == name) {
                Some((_, depends)) => Ok(Some(
                    format!("\x7fELF\0license=GPL\0depends={depends}\0vermagic=6\0").into_bytes(),
                )),
                None => bail!("no module {name}"),
            },
        })?;
        Ok(modules.into_iter().map(|module| module.name).collect())
    }

    #[test]
    fn dependencies_come_first_and_once() {
        let graph = [
            ("kvm_amd", "kvm,ccp"),
            ("kvm", "irqbypass"),
            ("irqbypass", ""),
            ("ccp", "kvm,builtin"),
            ("overlay", ""),
        ];
        let loaded = order(&graph, &["overlay", "kvm_amd", "kvm"]).unwrap();
        assert_eq!(loaded.len(), 5);
        let at = |name: &str| loaded.iter().position(|module| module == name).unwrap();
        assert!(at("irqbypass") < at("kvm"));
        assert!(at("kvm") < at("ccp"));
        assert!(at("ccp") < at("kvm_amd"));
    }

    #[test]
    fn a_missing_dependency_is_named() {
        let error = order(&[("a", "b-c")], &["a"]).unwrap_err().to_string();
        assert_eq!(error, "no module b_c");
    }

    #[test]
    fn a_cycle_ends() {
        assert_eq!(order(&[("a", "b"), ("b", "a")], &["a"]).unwrap().len(), 2);
    }

    #[test]
    fn names_of_files() {
        assert_eq!(
            module_name(Path::new("kernel/kvm-amd.ko.xz")).as_deref(),
            Some("kvm_amd")
        );
        assert_eq!(module_name(Path::new("a.ko")).as_deref(), Some("a"));
        assert_eq!(module_name(Path::new("modules.order")), None);
    }
}
