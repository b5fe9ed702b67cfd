// SPDX-License-Identifier: Apache-2.0
//! The command line of `patchbay ci run`.

use std::path::PathBuf;

use clap::Args;

use crate::keys::Setting;
use crate::overlay::parse_copy;

/// Options of `patchbay ci run`.
#[derive(Clone, Debug, Args)]
pub struct RunArgs {
    /// Kernel image: a bzImage, or an ELF file (vmlinux).
    #[arg(long, value_name = "FILE")]
    pub kernel: PathBuf,
    /// An initramfs whose files are added to the guest. Its first program does not run.
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
    /// Puts a key on a side before the command runs.
    #[arg(long, value_name = "KEY=on|off", value_parser = Setting::parse)]
    pub set: Vec<Setting>,
    /// Runs the command once more for each key that the globs select, with that key on its other
    /// side. A leading ! excludes keys.
    #[arg(long, value_name = "GLOB", num_args = 1..)]
    pub matrix: Vec<String>,
    /// Flips all keys of the matrix at once. If the command then fails, finds the smallest set of
    /// keys with which it does.
    #[arg(long, requires = "matrix")]
    pub together: bool,
    /// Change guarded keys too; the monitor must allow it.
    ///
    /// `ci run` starts a monitor that allows it.
    #[arg(long)]
    pub allow_guarded: bool,
    /// Copies a file or folder of the guest to the folder of --collect-into after the command ends.
    #[arg(long, value_name = "PATH")]
    pub collect: Vec<String>,
    /// Folder for collected files.
    #[arg(long, value_name = "FOLDER", default_value = "collected")]
    pub collect_into: PathBuf,
    /// Writes the results as JUnit XML.
    #[arg(long, value_name = "FILE")]
    pub junit: Option<PathBuf>,
    /// Prints the results as KTAP, and the command's output as its comments.
    #[arg(long)]
    pub ktap: bool,
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
}
