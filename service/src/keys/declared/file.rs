// SPDX-License-Identifier: Apache-2.0
//! Reads the files of `keys.d`.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::Declaration;

const MAX_FILES: usize = 256;
const MAX_FILE_BYTES: u64 = 1 << 20;
/// Limit on the entries of all files.
const MAX_ENTRIES: usize = 4096;
/// Limit on a single text, for example a name or a reason, in bytes.
const MAX_TEXT_BYTES: usize = 256;

/// The reason why a folder of declarations cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DeclarationError {
    /// A folder or a file cannot be read.
    #[error("{path} cannot be read: {error}; correct its permissions, or name another folder")]
    Read {
        /// The folder or the file.
        path: PathBuf,
        /// The I/O error.
        error: std::io::Error,
    },
    /// The file is not YAML, or a field is unknown, missing or malformed. The message names line
    /// and column.
    #[error("{path}: {error}; write {EXAMPLE}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The fault and its position.
        error: serde_yaml_ng::Error,
    },
    /// A limit is exceeded.
    #[error("{path}: {what}; remove some")]
    TooMany {
        /// The folder or the file.
        path: PathBuf,
        /// The limit.
        what: String,
    },
}

const EXAMPLE: &str =
    "for example kernel: {from: 6.1, to: 6.12} and keys: [{key: NAME, reason: WHY, source: URL}]";

/// The kernels to which a file applies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelRange {
    /// First release.
    from: Option<Version>,
    /// Last release; "6.12" includes "6.12.57".
    to: Option<Version>,
    build_id: Option<Text>,
}

/// The numbers of a release: "6.12.57+deb13-amd64" is 6, 12, 57.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Version(Vec<u32>);

/// A text that is not empty, printable and not too long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Text(pub String);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Contents {
    kernel: KernelRange,
    keys: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    key: Text,
    reason: Text,
    source: Text,
}

impl KernelRange {
    /// Returns whether the range includes a kernel of this release and build id.
    pub fn includes(&self, release: &str, build_id: &str) -> bool {
        if let Some(Text(wanted)) = &self.build_id
            && wanted != build_id
        {
            return false;
        }
        if self.from.is_none() && self.to.is_none() {
            return true;
        }
        let Some(found) = Version::of_release(release) else {
            return false;
        };
        let after = self.from.as_ref().is_none_or(|from| *from <= found);
        let before = self.to.as_ref().is_none_or(|Version(to)| {
            let length = to.len().min(found.0.len());
            found.0[..length] <= to[..]
        });
        after && before
    }
}

impl Version {
    fn of_release(release: &str) -> Option<Self> {
        let end = release.find(|c: char| !c.is_ascii_digit() && c != '.');
        Self::parse(release[..end.unwrap_or(release.len())].trim_end_matches('.'))
    }

    fn parse(text: &str) -> Option<Self> {
        let numbers = text.split('.').map(|number| number.parse().ok());
        numbers.collect::<Option<Vec<u32>>>().map(Self)
    }
}

/// Reads a string. Errors are raised within the visitor, so that they contain the value's line and
/// column.
fn string<'de, D: Deserializer<'de>, T>(
    deserializer: D,
    expected: &'static str,
    parse: fn(&str) -> Option<T>,
) -> Result<T, D::Error> {
    struct StringVisitor<T>(&'static str, fn(&str) -> Option<T>);

    impl<T> Visitor<'_> for StringVisitor<T> {
        type Value = T;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }

        fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
            let shown: String = text.chars().take(80).collect();
            (self.1)(text).ok_or_else(|| E::custom(format_args!("{shown:?} is not {}", self.0)))
        }
    }

    deserializer.deserialize_str(StringVisitor(expected, parse))
}

impl<'de> Deserialize<'de> for Version {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        string(deserializer, "a release, such as 6.12", Self::parse)
    }
}

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        string(deserializer, "a text of 1 to 256 printable bytes", |text| {
            let fits = !text.is_empty() && text.len() <= MAX_TEXT_BYTES;
            (fits && !text.chars().any(char::is_control)).then(|| Self(text.to_owned()))
        })
    }
}

impl<'de> Deserialize<'de> for KernelRange {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Fields {
            from: Option<Version>,
            to: Option<Version>,
            build_id: Option<Text>,
        }

        impl Fields {
            fn range(self) -> Result<KernelRange, &'static str> {
                let Self { from, to, build_id } = self;
                if from.is_none() && to.is_none() && build_id.is_none() {
                    return Err(
                        "kernel names no release and no build id; give from, to or build_id",
                    );
                }
                if let (Some(from), Some(to)) = (&from, &to)
                    && from.0[..from.0.len().min(to.0.len())] > to.0[..]
                {
                    return Err("from is a later release than to");
                }
                Ok(KernelRange { from, to, build_id })
            }
        }

        /// Raises errors within the visitor, so that they contain the value's line.
        struct RangeVisitor;

        impl<'de> Visitor<'de> for RangeVisitor {
            type Value = KernelRange;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a mapping with from, to or build_id")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<KernelRange, A::Error> {
                let fields = Fields::deserialize(MapAccessDeserializer::new(map))?;
                fields.range().map_err(Error::custom)
            }
        }

        deserializer.deserialize_map(RangeVisitor)
    }
}

/// Reads a folder.
pub fn read(folder: &Path) -> Result<Vec<Arc<Declaration>>, DeclarationError> {
    let unreadable = |path: &Path| {
        let path = path.to_owned();
        move |error| DeclarationError::Read { path, error }
    };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(unreadable(folder))? {
        let path = entry.map_err(unreadable(folder))?.path();
        if path
            .extension()
            .is_some_and(|extension| extension == "yaml")
        {
            files.push(path);
        }
        if files.len() > MAX_FILES {
            return Err(DeclarationError::TooMany {
                path: folder.to_owned(),
                what: format!("the folder has more than {MAX_FILES} files"),
            });
        }
    }
    files.sort();
    let mut declarations = Vec::new();
    for path in files {
        let mut text = String::new();
        File::open(&path)
            .and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text))
            .map_err(unreadable(&path))?;
        if text.len() as u64 > MAX_FILE_BYTES {
            let what = format!("the file has more than {} KiB", MAX_FILE_BYTES >> 10);
            return Err(DeclarationError::TooMany { path, what });
        }
        let Contents { kernel, keys } =
            serde_yaml_ng::from_str(&text).map_err(|error| DeclarationError::Malformed {
                path: path.clone(),
                error,
            })?;
        if declarations.len() + keys.len() > MAX_ENTRIES {
            let what = format!("the files have more than {MAX_ENTRIES} keys");
            return Err(DeclarationError::TooMany { path, what });
        }
        let file = path.display().to_string();
        declarations.extend(keys.into_iter().map(|entry| {
            Arc::new(Declaration {
                key: entry.key.0,
                file: file.clone(),
                reason: entry.reason.0,
                source: entry.source.0,
                kernel: kernel.clone(),
            })
        }));
    }
    Ok(declarations)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str) -> Result<Vec<Arc<Declaration>>, DeclarationError> {
        let folder = tempfile::tempdir().expect("temporary folder");
        std::fs::write(folder.path().join("k.yaml"), text).expect("writable");
        std::fs::write(folder.path().join("README"), "not read").expect("writable");
        read(folder.path())
    }

    const GOOD: &str =
        "kernel:\n  from: '6.1'\n  to: '6.12'\nkeys:\n- key: a\n  reason: b\n  source: c\n";

    #[test]
    fn a_mistake_is_refused_at_its_line_and_column() {
        assert_eq!(read_text(GOOD).expect("well-formed").len(), 1);
        // An unquoted 6.10 is read as the release 6.10, not as the number 6.1.
        let plain = read_text(&GOOD.replace("'6.12'", "6.10")).expect("well-formed");
        assert!(plain[0].kernel.includes("6.9.1", "") && !plain[0].kernel.includes("6.11", ""));
        for (old, new, place, words) in [
            (
                "'6.1'",
                "six",
                "line 2 column 9",
                "\"six\" is not a release",
            ),
            (
                "'6.12'",
                "'6.12-rc1'",
                "line 3 column 7",
                "is not a release",
            ),
            ("'6.12'", "'5.10'", "line 2", "later release"),
            ("key: a", "key: ''", "line 5 column 8", "1 to 256"),
            (
                "reason: b",
                "reason: \"\\u001b\"",
                "line 6 column 11",
                "printable",
            ),
            ("  reason: b\n", "", "line 5", "reason"),
            ("source: c", "sources: c", "line 7", "sources"),
            ("keys:\n", "key:\n", "line 4", "key"),
            ("- key: a", "- key: [", "line", ""),
        ] {
            let text = GOOD.replace(old, new);
            let error = read_text(&text).expect_err(&text).to_string();
            assert!(error.contains("k.yaml") && error.contains(place), "{error}");
            assert!(error.contains(words), "{error}");
        }
        let error = read_text("kernel: {}\nkeys: []\n").expect_err("any kernel");
        assert!(error.to_string().contains("no build id"), "{error}");
    }

    #[test]
    fn files_are_bounded() {
        let many = "- {key: a, reason: b, source: c}\n".repeat(MAX_ENTRIES + 1);
        let many = format!("kernel: {{from: '6.1'}}\nkeys:\n{many}");
        let long = format!("{GOOD}#{}", "x".repeat(1 << 20));
        for text in [many, long] {
            let error = read_text(&text).expect_err("too much").to_string();
            assert!(error.contains("more than"), "{error}");
        }
        let missing = read(Path::new("/nonexistent/keys.d")).expect_err("named");
        assert!(missing.to_string().contains("/nonexistent/keys.d"));
    }

    #[test]
    fn a_range_includes_both_ends() {
        let range = |from: &str, to: &str| KernelRange {
            from: Version::parse(from),
            to: Version::parse(to),
            build_id: None,
        };
        for (from, to, release, includes) in [
            ("6.1", "6.12", "6.12.57+deb13-cloud-amd64", true),
            ("6.1", "6.12", "6.1.0-38-amd64", true),
            ("6.1", "6.12", "6.13.0", false),
            ("6.1", "6.12", "6.0.9", false),
            ("6.12.10", "6.12.20", "6.12.9", false),
            ("6.12.10", "6.12.20", "6.12.20", true),
            ("6.12.10", "6.12.20", "6.12.21", false),
            ("6.9", "6.10", "6.10-rc1", true),
            ("6.1", "6.12", "unknown", false),
            ("6", "6", "6.99", true),
        ] {
            assert_eq!(range(from, to).includes(release, ""), includes, "{release}");
        }
    }
}
