// SPDX-License-Identifier: Apache-2.0
//! Counts the instructions of a program with callgrind, a tool of valgrind.
//!
//! The program says what is counted by client requests: instructions that do nothing on a CPU, and
//! that valgrind recognises (`valgrind.h`, `callgrind.h`).

use std::arch::asm;
use std::collections::BTreeMap;
use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::process::Command;

const TOOL: u64 = (b'C' as u64) << 24 | (b'T' as u64) << 16;
const DUMP_STATS_AT: u64 = TOOL + 3;
const START_INSTRUMENTATION: u64 = TOOL + 4;
const STOP_INSTRUMENTATION: u64 = TOOL + 5;

/// Name of the row that a counted process performs.
pub const ROW: &str = "PATCHBAY_INSTRUCTIONS_ROW";
/// If set, the counts are not split into parts.
const WHOLE: &str = "PATCHBAY_INSTRUCTIONS_WHOLE";

/// Counts the instructions of all threads from now on.
pub fn start() {
    request(START_INSTRUMENTATION, 0);
}

/// Counts no longer.
pub fn stop() {
    request(STOP_INSTRUMENTATION, 0);
}

/// Ends a part of the calling thread's count, and names it.
pub fn end_part(name: &CStr) {
    if std::env::var_os(WHOLE).is_none() {
        request(DUMP_STATS_AT, name.as_ptr() as u64);
    }
}

fn request(number: u64, argument: u64) {
    let request = [number, argument, 0, 0, 0, 0];
    // SAFETY: the rotations add up to 128 bits and leave rdi as it was, and the exchange changes
    // nothing. Valgrind reads the array and stores its answer in rdx.
    unsafe {
        asm!(
            "rol rdi, 3",
            "rol rdi, 13",
            "rol rdi, 61",
            "rol rdi, 51",
            "xchg rbx, rbx",
            in("rax") request.as_ptr(),
            inout("rdx") 0_u64 => _,
            options(nostack),
        );
    }
}

/// A program that performs the row that the variable [`ROW`] names.
pub struct Program {
    pub path: PathBuf,
    pub arguments: Vec<&'static str>,
}

/// Instructions of a thread, by the names of the parts. The last part has no name.
pub type Parts = BTreeMap<String, u64>;

impl Program {
    fn run(&self, row: &str, options: &[&str], out: &Path) -> Command {
        let mut command = Command::new("valgrind");
        command
            .args(["--quiet", "--tool=callgrind", "--instr-atstart=no"])
            .arg(format!("--callgrind-out-file={}", out.display()))
            .args(options)
            .arg(&self.path)
            .args(&self.arguments)
            .env(ROW, row);
        command
    }

    /// Performs a row, and returns the instructions of each thread by the thread's number.
    pub fn count(&self, row: &str) -> BTreeMap<u32, Parts> {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut command = self.run(row, &["--separate-threads=yes"], &folder.path().join("out"));
        let output = command.output().expect("valgrind runs");
        assert!(
            output.status.success(),
            "{row}: {}\n{}{}",
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        let mut threads = BTreeMap::<u32, Parts>::new();
        for file in std::fs::read_dir(folder.path()).expect("the folder") {
            let text = std::fs::read_to_string(file.expect("a file").path()).expect("text");
            let field = |name: &str| {
                let mut fields = text.lines().filter_map(|line| line.strip_prefix(name));
                fields.next().map(str::trim)
            };
            let number = |name| field(name).and_then(|text| text.parse::<u64>().ok());
            let (Some(thread), Some(total)) = (number("thread:"), number("totals:")) else {
                continue;
            };
            let part = field("desc: Trigger: Client Request:").unwrap_or_default();
            let thread = threads.entry(u32::try_from(thread).expect("few threads"));
            *thread.or_default().entry(part.to_owned()).or_default() += total;
        }
        threads
    }

    /// Performs a row, and prints the functions that execute most instructions: by themselves, and
    /// with those that they call.
    pub fn profile(&self, row: &str) {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let out = folder.path().join("out");
        let mut command = self.run(row, &[], &out);
        let status = command.env(WHOLE, "1").status().expect("valgrind runs");
        assert!(status.success(), "{row}: {status}");
        for inclusive in ["no", "yes"] {
            let status = Command::new("callgrind_annotate")
                .args([
                    "--auto=no",
                    "--threshold=98",
                    &format!("--inclusive={inclusive}"),
                ])
                .arg(&out)
                .status();
            assert!(status.expect("callgrind_annotate runs").success());
        }
    }
}
