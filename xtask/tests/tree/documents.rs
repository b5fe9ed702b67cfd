// SPDX-License-Identifier: Apache-2.0
//! Checks that everything the documents name exists: files, link targets, functions, types and
//! tests.
//!
//! A code span that is a path must be a file, a folder or a glob that matches one. A span of the
//! form `Type::function` must be defined in some source file. A span in the list that follows a
//! source file's span must be defined in that file.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The repository's files, relative to its root.
struct Tree {
    root: PathBuf,
    files: BTreeSet<String>,
    folders: BTreeSet<String>,
    /// The names that the Rust sources define.
    defined: BTreeSet<String>,
}

impl Tree {
    fn read() -> Self {
        Self::of(&super::root(), super::files().into_iter())
    }

    fn of(root: &Path, files: impl Iterator<Item = String>) -> Self {
        let files: BTreeSet<String> = files.collect();
        let folders = files.iter().flat_map(|file| Path::new(file).ancestors());
        let folders = folders.skip(1).map(|folder| folder.display().to_string());
        let is_folder = |folder: &String| !folder.is_empty() && !files.contains(folder);
        let folders = folders.filter(is_folder).collect();
        let sources = files.iter().filter(|file| file.ends_with(".rs"));
        let sources = sources.map(|file| fs::read_to_string(root.join(file)).unwrap());
        let defined = sources.flat_map(|source| definitions(&source)).collect();
        Self {
            root: root.to_owned(),
            files,
            folders,
            defined,
        }
    }

    fn text(&self, file: &str) -> String {
        fs::read_to_string(self.root.join(file)).unwrap()
    }

    fn exists(&self, path: &str) -> bool {
        let path = path.trim_end_matches('/');
        match path.contains('*') {
            true => self.files.iter().any(|file| matches(path, file)),
            false => self.files.contains(path) || self.folders.contains(path),
        }
    }

    /// Returns whether the span is a path of this tree: it begins with a folder of the top level.
    fn is_path(&self, span: &str) -> bool {
        let plain = |c: char| c.is_ascii_alphanumeric() || "/._-*@".contains(c);
        let first = span.split_once('/').map(|(first, _)| first);
        span.chars().all(plain) && first.is_some_and(|first| self.folders.contains(first))
    }
}

/// Matches `name` against `pattern`, in which `*` stands for any characters.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else {
        return pattern == name;
    };
    let Some(name) = name.strip_prefix(start) else {
        return false;
    };
    (0..=name.len()).any(|at| name.is_char_boundary(at) && matches(rest, &name[at..]))
}

fn is_identifier(text: &str) -> bool {
    let mut chars = text.chars();
    chars
        .next()
        .is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
        && chars.all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// Returns the names of the items, variants and public fields that a source defines.
fn definitions(source: &str) -> BTreeSet<String> {
    const ITEMS: &[&str] = &[
        "fn", "struct", "enum", "trait", "type", "const", "static", "mod", "message", "rpc", "pub",
    ];
    let mut names = BTreeSet::new();
    for line in source.lines() {
        let words = line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
        let items = words.windows(2).filter(|pair| ITEMS.contains(&pair[0]));
        names.extend(items.map(|pair| pair[1].to_owned()));
        let variant = words
            .first()
            .filter(|word| word.starts_with(char::is_uppercase));
        names.extend(variant.map(|&word| word.to_owned()));
    }
    names
}

/// Returns the faults of a document.
fn faults(tree: &Tree, document: &str) -> Vec<String> {
    let text = tree.text(document);
    let folder = Path::new(document).parent().unwrap();
    let mut faults = Vec::new();
    let mut fault = |line: usize, what: String| {
        faults.push(format!("{document}:{}: {what}", line + 1));
    };
    let mut in_fence = false;
    for (number, line) in text.lines().enumerate() {
        in_fence ^= line.trim_start().starts_with("```");
        if in_fence || line.starts_with("    ") {
            continue;
        }
        for target in links(line) {
            if !link_leads_somewhere(tree, document, folder, target) {
                fault(number, format!("the link {target} leads nowhere"));
            }
        }
        // The source file in which the names that follow it must be defined.
        let mut file: Option<&str> = None;
        for (at, span) in line.split('`').enumerate() {
            if at % 2 == 0 {
                if ![":", ",", "and"].contains(&span.trim()) {
                    file = None;
                }
                continue;
            }
            let beside = folder.join(span).display().to_string();
            if tree.is_path(span) {
                if !tree.exists(span) && !tree.exists(&beside) {
                    fault(number, format!("`{span}` does not exist"));
                }
                file = Some(span).filter(|span| tree.files.contains(*span));
                continue;
            }
            let names: Vec<&str> = span.trim_end_matches("()").split("::").collect();
            let name = names.last().copied().unwrap_or_default();
            if !names.iter().all(|name| is_identifier(name)) {
                continue;
            }
            if let Some(file) = file {
                if !definitions(&tree.text(file)).contains(name) {
                    fault(number, format!("`{file}` does not define `{span}`"));
                }
            } else if names.len() > 1 && !tree.defined.contains(name) {
                fault(number, format!("nothing defines `{span}`"));
            }
        }
    }
    faults
}

/// Returns the targets of the links in a line of Markdown.
fn links(line: &str) -> impl Iterator<Item = &str> {
    let rest = line.split("](").skip(1);
    rest.filter_map(|rest| rest.split_once(')').map(|(target, _)| target))
}

fn link_leads_somewhere(tree: &Tree, document: &str, folder: &Path, target: &str) -> bool {
    if target.contains("://") {
        return true;
    }
    let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
    let file = match path {
        "" => document.to_owned(),
        path => normal(&folder.join(path)),
    };
    if anchor.is_empty() {
        return tree.exists(&file);
    }
    let text = tree.files.contains(&file).then(|| tree.text(&file));
    let headings = text.iter().flat_map(|text| text.lines());
    let mut headings = headings.filter_map(|line| line.trim_start_matches('#').strip_prefix(' '));
    headings.any(|heading| slug(heading) == anchor)
}

/// Returns the path without `.` and `..`.
fn normal(path: &Path) -> String {
    let mut parts = Vec::new();
    for part in path.iter().filter_map(|part| part.to_str()) {
        match part {
            "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// Returns the anchor of a heading.
fn slug(heading: &str) -> String {
    let lower = heading.to_lowercase().replace(' ', "-");
    let kept = |c: &char| c.is_alphanumeric() || "-_".contains(*c);
    lower.chars().filter(kept).collect()
}

#[test]
fn whatever_a_document_names_exists() {
    let tree = Tree::read();
    let documents = tree.files.iter().filter(|file| file.ends_with(".md"));
    let faults: Vec<String> = documents.flat_map(|name| faults(&tree, name)).collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn a_wrong_name_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let put = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        name.to_owned()
    };
    let right = "# Right\n\
        `src/one.rs`: `Thing::act`, `Kind`. See [two](page.md#two-words), `src/*.rs`, `Thing::act` and `/etc/passwd`.\n\
        ```\n`src/none.rs`\n```\n";
    let wrong = "`src/none.rs`\n`src/one.rs`: `Thing::sleep`\n`Thing::sleep`\n\
        [a](gone.md)\n[b](page.md#three)\n`src/*.c`\n";
    let names = [
        put(
            "src/one.rs",
            "impl Thing {\n    pub fn act() {}\n}\nenum Kind {}\n",
        ),
        put("docs/page.md", "## Two words\n"),
        put("docs/right.md", &right.replace("](page", "](./page")),
        put("docs/wrong.md", wrong),
    ];
    let tree = Tree::of(folder.path(), names.into_iter());
    assert_eq!(faults(&tree, "docs/right.md"), Vec::<String>::new());
    let expected = [
        "docs/wrong.md:1: `src/none.rs` does not exist",
        "docs/wrong.md:2: `src/one.rs` does not define `Thing::sleep`",
        "docs/wrong.md:3: nothing defines `Thing::sleep`",
        "docs/wrong.md:4: the link gone.md leads nowhere",
        "docs/wrong.md:5: the link page.md#three leads nowhere",
        "docs/wrong.md:6: `src/*.c` does not exist",
    ];
    assert_eq!(faults(&tree, "docs/wrong.md"), expected);
}
