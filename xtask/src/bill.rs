// SPDX-License-Identifier: Apache-2.0
//! Lists the licences of all dependencies and writes a bill of materials for the programs.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::{cargo, host};

/// A crate that is linked into one of the programs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Crate {
    name: String,
    version: String,
    /// SPDX expression; empty if the crate names none.
    license: String,
    /// The checksum of the registry's archive; `None` for our own crates.
    sha256: Option<String>,
    folder: PathBuf,
}

/// Returns the crates that these packages of the workspace link, including the packages themselves,
/// in order.
pub fn crates(packages: &[&str]) -> Result<Vec<Crate>> {
    let output = cargo::cargo("metadata")
        .args(["--format-version", "1", "--locked"])
        .args(["--filter-platform", "x86_64-unknown-linux-gnu"])
        .output()
        .context("cannot run cargo")?;
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        bail!("cargo metadata failed: {message}");
    }
    let lock = fs::read_to_string(host::repository().join("Cargo.lock"))?;
    linked(
        &serde_json::from_slice(&output.stdout)?,
        packages,
        &checksums(&lock),
    )
}

fn linked(
    metadata: &Value,
    packages: &[&str],
    checksums: &BTreeMap<(String, String), String>,
) -> Result<Vec<Crate>> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let described: BTreeMap<String, Value> = list(&metadata["packages"])
        .into_iter()
        .map(|package| (text(&package["id"]), package))
        .collect();
    let nodes: BTreeMap<String, Value> = list(&metadata["resolve"]["nodes"])
        .into_iter()
        .map(|node| (text(&node["id"]), node))
        .collect();
    let is_wanted = |id: &&String| packages.contains(&text(&described[*id]["name"]).as_str());
    let mut waiting: Vec<String> = described.keys().filter(is_wanted).cloned().collect();
    let mut seen = BTreeSet::new();
    while let Some(id) = waiting.pop() {
        if !seen.insert(id.clone()) {
            continue;
        }
        for dependency in list(&nodes[&id]["deps"]) {
            // Dependencies of tests and of build scripts are not part of the programs.
            let kinds = list(&dependency["dep_kinds"]);
            if kinds.iter().any(|kind| kind["kind"].is_null()) {
                waiting.push(text(&dependency["pkg"]));
            }
        }
    }
    let mut crates = Vec::new();
    for id in seen {
        let package = described
            .get(&id)
            .with_context(|| format!("no package {id}"))?;
        let (name, version) = (text(&package["name"]), text(&package["version"]));
        let manifest = PathBuf::from(text(&package["manifest_path"]));
        crates.push(Crate {
            sha256: checksums.get(&(name.clone(), version.clone())).cloned(),
            license: text(&package["license"]),
            folder: manifest.parent().unwrap_or(Path::new("/")).to_owned(),
            name,
            version,
        });
    }
    crates.sort();
    Ok(crates)
}

/// Returns the checksums of Cargo.lock by name and version.
fn checksums(lock: &str) -> BTreeMap<(String, String), String> {
    let mut found = BTreeMap::new();
    for package in lock.split("[[package]]") {
        let value = |key: &str| {
            let line = package.lines().find_map(|line| line.strip_prefix(key))?;
            Some(line.strip_prefix(" = \"")?.strip_suffix('"')?.to_owned())
        };
        if let (Some(name), Some(version), Some(sum)) =
            (value("name"), value("version"), value("checksum"))
        {
            found.insert((name, version), sum);
        }
    }
    found
}

/// Returns the licence of every crate, with the licence texts in its package. A text that several
/// crates share is printed once.
pub fn licences(crates: &[Crate]) -> Result<String> {
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut all = String::from("Crates that are linked into the programs, and their licences.\n\n");
    for one in crates {
        if one.license.is_empty() {
            bail!("{} {} names no licence", one.name, one.version);
        }
        writeln!(all, "{} {}: {}", one.name, one.version, one.license)?;
        for path in licence_files(&one.folder) {
            let text = fs::read_to_string(&path).unwrap_or_default();
            let users = texts.entry(text).or_default();
            users.push(format!("{} {}", one.name, one.version));
        }
    }
    for (text, mut users) in texts {
        users.dedup();
        write!(all, "\n--- {}\n\n{}\n", users.join(", "), text.trim_end())?;
    }
    Ok(all)
}

fn licence_files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut files: Vec<_> = entries
        .map(|entry| entry.path())
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let name = name.to_uppercase();
            let starts = ["LICENSE", "LICENCE", "COPYING", "NOTICE", "COPYRIGHT"];
            path.is_file() && starts.iter().any(|start| name.starts_with(start))
        })
        .collect();
    files.sort();
    files
}

/// Returns a bill of materials in CycloneDX's JSON. It has no serial number and no time, so that
/// the same programs give the same bill.
pub fn materials(version: &str, crates: &[Crate]) -> Result<String> {
    let purl = |one: &Crate| format!("pkg:cargo/{}@{}", one.name, one.version);
    let components: Vec<Value> = crates
        .iter()
        .map(|one| {
            let mut component = json!({
                "type": "library",
                "name": one.name,
                "version": one.version,
                "purl": purl(one),
                "bom-ref": purl(one),
                // Some old crates write "/" for OR.
                "licenses": [{"expression": one.license.replace('/', " OR ")}],
            });
            if let Some(sum) = &one.sha256 {
                component["hashes"] = json!([{"alg": "SHA-256", "content": sum}]);
            }
            component
        })
        .collect();
    let bill = json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "name": "patchbay",
                "version": version,
                "bom-ref": "patchbay",
                "licenses": [{"expression": "Apache-2.0"}],
            },
        },
        "components": components,
    });
    Ok(serde_json::to_string_pretty(&bill)? + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_linked_counts() {
        let package = |name: &str| {
            json!({"id": name, "name": name, "version": "1.0.0", "license": "MIT/Apache-2.0",
                   "manifest_path": format!("/r/{name}/Cargo.toml")})
        };
        let on = |name: &str, kind: Value| json!({"pkg": name, "dep_kinds": [{"kind": kind}]});
        let packages = ["app", "other", "a", "b", "tests", "build"].map(package);
        let metadata = json!({
            "packages": packages,
            "resolve": {"nodes": [
                {"id": "app", "deps": [on("a", Value::Null), on("tests", json!("dev")),
                                       on("build", json!("build"))]},
                {"id": "a", "deps": [on("b", Value::Null)]},
                {"id": "b", "deps": []},
                {"id": "other", "deps": [on("tests", Value::Null)]},
                {"id": "tests", "deps": []},
                {"id": "build", "deps": []},
            ]},
        });
        let lock = "[[package]]\nname = \"a\"\nversion = \"1.0.0\"\nchecksum = \"77\"\n\
                    [[package]]\nname = \"app\"\nversion = \"1.0.0\"\n";
        let crates = linked(&metadata, &["app"], &checksums(lock)).unwrap();
        let names: Vec<_> = crates.iter().map(|one| one.name.as_str()).collect();
        assert_eq!(names, ["a", "app", "b"]);
        assert_eq!(crates[0].sha256.as_deref(), Some("77"));
        let bill: Value = serde_json::from_str(&materials("1", &crates).unwrap()).unwrap();
        let first = &bill["components"][0];
        assert_eq!(first["licenses"][0]["expression"], "MIT OR Apache-2.0");
        assert_eq!(first["hashes"][0]["content"], "77");
    }

    #[test]
    fn a_text_of_several_crates_is_printed_once() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("LICENSE-MIT"), "be nice").unwrap();
        let named = |name: &str, license: &str| Crate {
            name: name.to_owned(),
            version: "1.0.0".to_owned(),
            license: license.to_owned(),
            sha256: None,
            folder: folder.path().to_owned(),
        };
        let text = licences(&[named("a", "MIT"), named("b", "MIT")]).unwrap();
        assert_eq!(text.matches("be nice").count(), 1, "{text}");
        assert!(text.contains("--- a 1.0.0, b 1.0.0"), "{text}");
        let error = licences(&[named("c", "")]).unwrap_err().to_string();
        assert_eq!(error, "c 1.0.0 names no licence");
    }
}
