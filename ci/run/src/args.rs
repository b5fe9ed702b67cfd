// SPDX-License-Identifier: Apache-2.0
//! The command lines of `patchbay ci run` and `patchbay ci compare`.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};

use crate::compare::{MIN_RUNS, Metric};
use crate::keys::{Setting, is_name};
use crate::overlay::parse_copy;
use crate::place::{COLLECTED, JUNIT, PLOT};

/// A command line that boots guests.
pub(crate) trait Arguments {
    /// Returns the options of the guest.
    fn guest(&self) -> &GuestArgs;

    /// Returns the file that the run writes at its end, if the command line names one.
    fn file(&self) -> Option<&Path>;

    /// Returns the files and folders that the run writes. Each has a name under which a run in the
    /// lab writes it; the host then copies it to its path.
    fn results(&mut self) -> Vec<(&'static str, &mut PathBuf)>;
}

/// The options of a guest, and the command.
#[derive(Clone, Debug, Args)]
pub struct GuestArgs {
    /// Kernel image: a bzImage, or an ELF file (vmlinux).
    #[arg(long, value_name = "FILE")]
    pub kernel: PathBuf,
    /// An initramfs whose files are added to the guest. Its own /init does not run.
    #[arg(long, value_name = "FILE")]
    pub initrd: Option<PathBuf>,
    /// Copies a file or folder into the guest, with the libraries that its programs need. The path
    /// in the guest is the same unless another is given.
    #[arg(long, value_name = "PATH[:PATH]", value_parser = parse_copy)]
    pub copy: Vec<(PathBuf, PathBuf)>,
    /// The kernel's lib/modules/VERSION, if its virtio-mmio and vsock drivers are modules.
    #[arg(long, value_name = "FOLDER")]
    pub modules: Option<PathBuf>,
    /// Number of vCPUs, 1 to 16.
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub vcpus: u8,
    /// Guest memory: 2M to 1T, with a suffix K, M, G or T.
    #[arg(long, value_name = "SIZE", default_value = "512M", value_parser = parse_memory)]
    pub memory: String,
    /// Words added to the kernel's command line.
    #[arg(
        long,
        value_name = "WORDS",
        default_value = "",
        allow_hyphen_values = true
    )]
    pub append: String,
    /// Turns a key on or off before the command runs.
    #[arg(long, value_name = "KEY=on|off", value_parser = Setting::parse)]
    pub set: Vec<Setting>,
    /// Change guarded keys too; the monitor must allow it.
    ///
    /// This command starts a monitor that allows it.
    #[arg(long)]
    pub allow_guarded: bool,
    /// Copies the guest's console to standard error.
    #[arg(long)]
    pub show_console: bool,
    /// The monitor [default: what PATCHBAY_VMM names, or patchbay-vmm beside this program or in
    /// PATH].
    #[arg(long, value_name = "FILE")]
    pub monitor: Option<PathBuf>,
    /// The agent, a static program [default: what PATCHBAY_AGENT names, or patchbay-agent beside
    /// this program, in /usr/lib/patchbay or in PATH].
    #[arg(long, value_name = "FILE")]
    pub agent: Option<PathBuf>,
    /// The command, searched in the guest's PATH, and its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// The runs of a matrix in which several keys are flipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Pairs {
    /// One run for each pair of keys: n(n-1)/2 runs for n keys.
    All,
    /// The runs of a covering array, each with about half of the keys: 5 runs for 10 keys, 9 for
    /// 100, 13 for 1,000. If one fails, more runs find the keys that fail together.
    Covering,
}

/// Options of `patchbay ci run`.
#[derive(Clone, Debug, Args)]
pub struct RunArgs {
    #[command(flatten)]
    pub guest: GuestArgs,
    /// Runs the command once more for each key that the globs select, with that key flipped. A
    /// leading ! excludes keys.
    #[arg(long, value_name = "GLOB", num_args = 1..)]
    pub matrix: Vec<String>,
    /// Flips all keys of the matrix at once. If the command then fails, finds a smallest set of
    /// keys with which it fails.
    #[arg(long, requires = "matrix")]
    pub together: bool,
    /// After the runs with each key of the matrix by itself, runs the command with each pair of the
    /// keys that pass by themselves. With --pairs=covering (the = is required), a few runs with
    /// many keys each cover all pairs. At most 10,000 runs.
    #[arg(
        long,
        value_name = "RUNS",
        value_enum,
        requires = "matrix",
        conflicts_with = "together",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "all"
    )]
    pub pairs: Option<Pairs>,
    /// Boots one guest, saves it, and starts each run of the matrix in a fresh copy of it.
    #[arg(long, requires = "matrix")]
    pub fresh: bool,
    /// Number of copies that run at once, 1 to 64. Each has the memory and the vCPUs of a guest.
    #[arg(long, value_name = "COUNT", default_value_t = 1, requires = "fresh", conflicts_with = "together", value_parser = clap::value_parser!(u8).range(1..=64))]
    pub jobs: u8,
    /// Copies a file or folder of the guest to the folder of --collect-into after the command ends.
    #[arg(long, value_name = "PATH")]
    pub collect: Vec<String>,
    /// Folder for collected files. With --fresh, each run has a folder of its own in it.
    #[arg(long, value_name = "FOLDER", default_value = "collected")]
    pub collect_into: PathBuf,
    /// Writes the results as JUnit XML.
    #[arg(long, value_name = "FILE")]
    pub junit: Option<PathBuf>,
    /// Prints the results as KTAP, and the command's output as KTAP comments.
    #[arg(long)]
    pub ktap: bool,
}

impl Arguments for RunArgs {
    fn guest(&self) -> &GuestArgs {
        &self.guest
    }

    fn file(&self) -> Option<&Path> {
        self.junit.as_deref()
    }

    fn results(&mut self) -> Vec<(&'static str, &mut PathBuf)> {
        let collected = (COLLECTED, &mut self.collect_into);
        let junit = self.junit.as_mut().map(|junit| (JUNIT, junit));
        junit.into_iter().chain([collected]).collect()
    }
}

/// Options of `patchbay ci compare`.
#[derive(Clone, Debug, Args)]
pub struct CompareArgs {
    #[command(flatten)]
    pub guest: GuestArgs,
    /// Compares the runs of the command with this key off and on.
    #[arg(
        long,
        value_name = "KEY",
        required_unless_present = "matrix",
        conflicts_with = "matrix",
        value_parser = parse_key
    )]
    pub key: Vec<String>,
    /// Ranks all keys that the globs select: screens them with few runs, and compares those that
    /// may have an effect. A leading ! excludes keys.
    #[arg(long, value_name = "GLOB", num_args = 1..)]
    pub matrix: Vec<String>,
    /// Number of runs with a key off, and of runs with it on, 20 to 10000. In a ranking, this
    /// applies to keys that pass the screening.
    #[arg(long, value_name = "COUNT", default_value_t = 30, value_parser = clap::value_parser!(u32).range(i64::from(MIN_RUNS)..=10_000))]
    pub runs: u32,
    /// The minimum probability, 0.8 to 0.9999, that no difference is reported for any key without
    /// an effect.
    #[arg(long, value_name = "PROBABILITY", default_value_t = 0.95, value_parser = parse_confidence)]
    pub confidence: f64,
    /// A regular expression whose only group matches the measurement, a number in the command's
    /// output [default: measure the wall time].
    #[arg(long, value_name = "REGEX", value_parser = Metric::parse)]
    pub metric: Option<Metric>,
    /// Seed of the order of the runs and of the bootstrap, 0 to 18446744073709551615 [default: a
    /// random number, which is printed].
    #[arg(long, value_name = "NUMBER")]
    pub seed: Option<u64>,
    /// Draws a forest plot of the keys as SVG.
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
}

impl Arguments for CompareArgs {
    fn guest(&self) -> &GuestArgs {
        &self.guest
    }

    fn file(&self) -> Option<&Path> {
        self.plot.as_deref()
    }

    fn results(&mut self) -> Vec<(&'static str, &mut PathBuf)> {
        self.plot
            .as_mut()
            .map(|plot| (PLOT, plot))
            .into_iter()
            .collect()
    }
}

/// Checks that the text is the name of a key, not a glob, and returns it.
fn parse_key(text: &str) -> Result<String, String> {
    match is_name(text) && !text.is_empty() {
        true => Ok(text.to_owned()),
        false => Err(format!(
            "{text:?} is no name of a key; give globs with --matrix"
        )),
    }
}

fn parse_confidence(text: &str) -> Result<f64, String> {
    let number: Option<f64> = text.parse().ok();
    number
        .filter(|number| (0.8..=0.9999).contains(number))
        .ok_or_else(|| format!("{text:?} is not a number from 0.8 to 0.9999, for example 0.95"))
}

/// Checks a size by the monitor's rules and returns it unchanged.
fn parse_memory(text: &str) -> Result<String, String> {
    const MIB: u64 = 1 << 20;
    let (digits, shift) = match text.char_indices().last() {
        Some((at, 'k' | 'K')) => (&text[..at], 10),
        Some((at, 'm' | 'M')) => (&text[..at], 20),
        Some((at, 'g' | 'G')) => (&text[..at], 30),
        Some((at, 't' | 'T')) => (&text[..at], 40),
        _ => (text, 0),
    };
    let number: Option<u64> = digits.parse().ok();
    let bytes = number.and_then(|number| number.checked_mul(1 << shift));
    match bytes {
        Some(bytes) if (2 * MIB..=MIB << 20).contains(&bytes) => Ok(text.to_owned()),
        _ => Err(format!(
            "{text:?} is not a size from 2M to 1T; write for example 512M or 2G"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_of_memory_has_a_suffix_and_a_range() {
        for good in ["2M", "2048K", "512m", "3G", "1T", "2097152"] {
            assert_eq!(parse_memory(good).as_deref(), Ok(good));
        }
        for bad in [
            "",
            "M",
            "512",
            "1M",
            "2T",
            "-1G",
            "1.5G",
            "99999999999999999999G",
            "5\u{e9}",
        ] {
            parse_memory(bad).expect_err(bad);
        }
    }

    /// Parses the options of a run of `true`.
    fn parse(words: &str) -> Result<RunArgs, clap::Error> {
        #[derive(Debug, clap::Parser)]
        struct Parsed {
            #[command(flatten)]
            run: RunArgs,
        }
        let line = format!("run --kernel k {words} -- true");
        let parsed = <Parsed as clap::Parser>::try_parse_from(line.split_whitespace());
        parsed.map(|parsed| parsed.run)
    }

    #[test]
    fn pairs_need_a_matrix_and_exclude_together() {
        for (good, expected) in [
            ("--matrix a", None),
            ("--matrix a b --pairs", Some(Pairs::All)),
            ("--pairs --matrix a b", Some(Pairs::All)),
            ("--matrix a --pairs=all", Some(Pairs::All)),
            ("--matrix a --pairs=covering", Some(Pairs::Covering)),
            ("--matrix a --pairs --fresh --jobs 4", Some(Pairs::All)),
        ] {
            assert_eq!(parse(good).unwrap().pairs, expected, "{good}");
        }
        for (bad, named) in [
            ("--pairs", "--matrix"),
            ("--pairs=covering", "--matrix"),
            ("--matrix a --pairs --together", "--together"),
            ("--matrix a --pairs=some", "covering"),
            ("--matrix a --pairs=", "covering"),
            ("--matrix a --pairs --pairs", "--pairs"),
            ("--pairs covering --matrix a", "covering"),
        ] {
            let error = parse(bad).expect_err(bad).to_string();
            assert!(error.contains(named), "{bad}: {error}");
        }
    }

    #[test]
    fn jobs_need_fresh_copies_and_keys_to_share() {
        let jobs = |words| parse(words).map(|run| (run.fresh, run.jobs));
        for (good, expected) in [
            ("", (false, 1)),
            ("--matrix a", (false, 1)),
            ("--matrix a --fresh", (true, 1)),
            ("--matrix a --fresh --together", (true, 1)),
            ("--matrix a --fresh --jobs 64", (true, 64)),
        ] {
            assert_eq!(jobs(good).unwrap(), expected, "{good}");
        }
        for bad in [
            "--fresh",
            "--jobs 2",
            "--jobs 1",
            "--matrix a --jobs 2",
            "--matrix a --fresh --jobs 0",
            "--matrix a --fresh --jobs 65",
            "--matrix a --fresh --jobs 2 --together",
        ] {
            parse(bad).expect_err(bad);
        }
    }

    #[test]
    fn a_confidence_is_a_probability_near_1() {
        for good in ["0.8", "0.95", "0.9999", "9.5e-1"] {
            parse_confidence(good).unwrap();
        }
        for bad in [
            "", "95", "95%", "0.79", "1", "0.99999", "-0.95", "NaN", "inf",
        ] {
            parse_confidence(bad).expect_err(bad);
        }
    }

    #[test]
    fn a_key_is_named_and_not_matched() {
        parse_key("module:key").unwrap();
        for bad in ["", "a*", "!a", "[ab]", "a?"] {
            let error = parse_key(bad).expect_err(bad);
            assert!(error.contains("--matrix"), "{error}");
        }
    }
}
