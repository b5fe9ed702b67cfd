// SPDX-License-Identifier: Apache-2.0
//! The conditions, besides the source code, on which counts of instructions depend.
//!
//! | condition      | decides                                                              |
//! |----------------|----------------------------------------------------------------------|
//! | build          | features of the dependencies, which cargo unifies among all packages |
//! | settings       | the code that the compiler generates, if they override the profile   |
//! | rustc          | the code that the compiler generates                                 |
//! | C library      | `memcpy`, `malloc`                                                   |
//! | CPU            | variants that are selected at run time, such as those of `memcpy`    |
//! | valgrind       | the CPU that the program sees                                        |

use std::fmt;

/// Value of the variable `callgrind::ROW` that makes a process print its conditions instead of
/// performing a row.
pub const ROW: &str = "conditions";

/// Prefix of each line that contains a condition.
const MARK: &str = "condition ";

/// Variables that override the release profile.
const SETTINGS: [(&str, Option<&str>); 12] = [
    ("RUSTFLAGS", option_env!("RUSTFLAGS")),
    (
        "CARGO_ENCODED_RUSTFLAGS",
        option_env!("CARGO_ENCODED_RUSTFLAGS"),
    ),
    (
        "CARGO_BUILD_RUSTFLAGS",
        option_env!("CARGO_BUILD_RUSTFLAGS"),
    ),
    (
        "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUSTFLAGS",
        option_env!("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUSTFLAGS"),
    ),
    ("CARGO_INCREMENTAL", option_env!("CARGO_INCREMENTAL")),
    (
        "CARGO_BUILD_INCREMENTAL",
        option_env!("CARGO_BUILD_INCREMENTAL"),
    ),
    (
        "CARGO_PROFILE_RELEASE_OPT_LEVEL",
        option_env!("CARGO_PROFILE_RELEASE_OPT_LEVEL"),
    ),
    (
        "CARGO_PROFILE_RELEASE_LTO",
        option_env!("CARGO_PROFILE_RELEASE_LTO"),
    ),
    (
        "CARGO_PROFILE_RELEASE_CODEGEN_UNITS",
        option_env!("CARGO_PROFILE_RELEASE_CODEGEN_UNITS"),
    ),
    (
        "CARGO_PROFILE_RELEASE_INCREMENTAL",
        option_env!("CARGO_PROFILE_RELEASE_INCREMENTAL"),
    ),
    (
        "CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS",
        option_env!("CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS"),
    ),
    (
        "CARGO_PROFILE_RELEASE_PANIC",
        option_env!("CARGO_PROFILE_RELEASE_PANIC"),
    ),
];

/// Conditions that the repository determines. If one differs from the baseline's, the baseline is
/// outdated.
const OF_THE_REPOSITORY: [&str; 2] = ["build", "rustc"];

/// Conditions that differ from machine to machine. If one differs from the baseline's, the counts
/// cannot be compared.
const OF_THE_MACHINE: [&str; 4] = ["settings", "C library", "CPU", "valgrind"];

/// Result of comparing conditions with those of the baseline.
#[derive(Debug, PartialEq, Eq)]
pub enum Comparable {
    /// All conditions are equal.
    Yes,
    /// The baseline was counted on another kind of machine. The sentence names the first condition
    /// that differs.
    Elsewhere(String),
    /// A condition that the repository determines has changed since the baseline was counted, or
    /// the baseline is damaged.
    Outdated(String),
}

/// Names of conditions and their values.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Conditions(Vec<(String, String)>);

impl Conditions {
    /// Returns the conditions of this process. Under valgrind, the CPU is the one that valgrind
    /// emulates.
    pub fn here() -> Self {
        let mut conditions = Self::default();
        conditions.add("build", build());
        conditions.add("settings", settings());
        conditions.add("rustc", compiler());
        conditions.add("C library", c_library());
        conditions.add("CPU", cpu());
        conditions
    }

    /// Adds a condition.
    pub fn add(&mut self, name: &str, value: String) {
        self.0.push((name.to_owned(), value));
    }

    /// Prints the conditions in the form that [`Conditions::read`] parses.
    pub fn print(&self) {
        for (name, value) in &self.0 {
            println!("{MARK}{name} = {value}");
        }
    }

    /// Reads the conditions from a text. Lines without a condition are ignored.
    pub fn read(text: &str) -> Self {
        let lines = text.lines().filter_map(|line| line.split_once(MARK));
        let conditions = lines.filter_map(|(_, condition)| condition.split_once(" = "));
        let owned = conditions.map(|(name, value)| (name.to_owned(), value.to_owned()));
        Self(owned.collect())
    }

    /// Compares the conditions with those of the baseline.
    pub fn compare(&self, baseline: &Self) -> Comparable {
        let value = |of: &Self, name: &str| {
            let found = of.0.iter().find(|(known, _)| known == name);
            found.map(|(_, value)| value.clone())
        };
        let differs = |name: &&&str| value(self, name) != value(baseline, name);
        let difference = |name: &str| {
            let here = value(self, name).unwrap_or_else(|| "unknown".to_owned());
            match value(baseline, name) {
                Some(there) => format!("{name}: {here}; the baseline has {there}"),
                None => format!("{name}: {here}; the baseline does not say"),
            }
        };
        if let Some(name) = OF_THE_REPOSITORY.iter().find(differs) {
            return Comparable::Outdated(difference(name));
        }
        match OF_THE_MACHINE.iter().find(differs) {
            Some(name) if value(baseline, name).is_none() => Comparable::Outdated(difference(name)),
            Some(name) => Comparable::Elsewhere(difference(name)),
            None => Comparable::Yes,
        }
    }
}

impl fmt::Display for Conditions {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, value) in &self.0 {
            writeln!(formatter, "{MARK}{name} = {value}")?;
        }
        Ok(())
    }
}

fn build() -> String {
    let profile = if cfg!(debug_assertions) {
        "dev"
    } else {
        "release"
    };
    let by = option_env!("PATCHBAY_BUILT_BY").unwrap_or("cargo");
    format!("{profile}, by {by}")
}

fn settings() -> String {
    let set = SETTINGS
        .iter()
        .filter_map(|(name, value)| Some((name, (*value)?)));
    // Incremental compilation is off in the release profile anyway.
    let set = set.filter(|(name, value)| !(name.ends_with("_INCREMENTAL") && *value == "0"));
    let set: Vec<String> = set.map(|(name, value)| format!("{name}={value}")).collect();
    if set.is_empty() {
        return "none".to_owned();
    }
    set.join(" ")
}

/// Returns the version of rustc that the compiler has written into this program.
fn compiler() -> String {
    const MARK: &[u8] = b"rustc version ";
    let program = std::env::current_exe().and_then(std::fs::read);
    let program = program.unwrap_or_default();
    let mut versions: Vec<String> = program
        .windows(MARK.len())
        .enumerate()
        .filter(|(_, window)| *window == MARK)
        .filter_map(|(at, _)| {
            let version = &program[at + MARK.len()..];
            // "1.95.0 (59807616e 2026-04-14)". Debug information has more text after it, and the
            // mark in this function is followed by no version.
            let end = version.iter().position(|byte| *byte == b')')?;
            let version = std::str::from_utf8(&version[..=end]).ok()?;
            version
                .starts_with(|first: char| first.is_ascii_digit())
                .then(|| version.to_owned())
        })
        .collect();
    versions.sort_unstable();
    versions.dedup();
    versions.join(" and ")
}

fn c_library() -> String {
    let version = std::process::Command::new("getconf")
        .arg("GNU_LIBC_VERSION")
        .output();
    let version = version.map(|output| output.stdout).unwrap_or_default();
    String::from_utf8_lossy(&version).trim().to_owned()
}

/// Returns the instruction sets for which the C library and other libraries have variants.
fn cpu() -> String {
    macro_rules! detected {
        ($($name:tt)*) => {
            [$(($name, std::arch::is_x86_feature_detected!($name))),*]
        };
    }
    let sets = detected!(
        "sse3" "ssse3" "sse4.1" "sse4.2" "popcnt" "avx" "avx2" "bmi1" "bmi2" "lzcnt" "fma" "f16c"
        "movbe" "aes" "pclmulqdq" "sha" "rdrand" "rdseed" "adx" "avx512f"
    );
    let detected = sets.iter().filter(|(_, detected)| *detected);
    let names: Vec<&str> = detected.map(|(name, _)| *name).collect();
    names.join(" ")
}
