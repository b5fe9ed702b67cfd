// SPDX-License-Identifier: Apache-2.0
//! Counts the instructions of a program with callgrind, a tool of valgrind.
//!
//! The program marks the code to be counted with client requests. These are instruction sequences
//! that have no effect on a CPU and that valgrind recognises (`valgrind.h`, `callgrind.h`).

use std::arch::asm;
use std::collections::BTreeMap;
use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use super::conditions::{self, Conditions};

const TOOL: u64 = (b'C' as u64) << 24 | (b'T' as u64) << 16;
const TOGGLE_COLLECT: u64 = TOOL + 2;
const DUMP_STATS_AT: u64 = TOOL + 3;
const START_INSTRUMENTATION: u64 = TOOL + 4;
const STOP_INSTRUMENTATION: u64 = TOOL + 5;

/// The maximum number of threads at the same time. The host's daemon starts one for each guest.
const MAX_THREADS: u32 = 3000;

/// Environment variable: the name of the row that a counted process performs.
pub const ROW: &str = "PATCHBAY_INSTRUCTIONS_ROW";
/// Environment variable: if it is set, the counts are not split into parts.
const WHOLE: &str = "PATCHBAY_INSTRUCTIONS_WHOLE";
/// False if [`WHOLE`] is set. The environment is read before the first count, because that costs
/// instructions too.
static IS_SPLIT: LazyLock<bool> = LazyLock::new(|| std::env::var_os(WHOLE).is_none());

/// Starts to count the instructions of all threads.
pub fn start() {
    LazyLock::force(&IS_SPLIT);
    request(START_INSTRUMENTATION, 0);
}

/// Stops counting.
pub fn stop() {
    request(STOP_INSTRUMENTATION, 0);
}

/// Calls a function without counting the instructions of this thread. The instructions of other
/// threads are counted.
pub fn ignore_this_thread(call: impl FnOnce()) {
    request(TOGGLE_COLLECT, 0);
    call();
    request(TOGGLE_COLLECT, 0);
}

/// Ends the current part of the calling thread's count, and gives it this name.
pub fn end_part(name: &CStr) {
    if *IS_SPLIT {
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

/// Returns valgrind's version.
///
/// # Errors
/// A sentence that says that valgrind is not installed or does not run.
pub fn find() -> Result<String, String> {
    let output = Command::new("valgrind").arg("--version").output();
    let output = output.map_err(|error| format!("valgrind is needed: {error}"))?;
    if !output.status.success() {
        return Err(format!("valgrind --version failed: {}", output.status));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// This program, with a test that performs the row that the variable [`ROW`] names.
pub struct Program {
    path: PathBuf,
    test: &'static str,
}

/// Number of instructions of each part of a thread's count, by the part's name. The last part has
/// an empty name.
pub type Parts = BTreeMap<String, u64>;

impl Program {
    /// Returns this program with the name of the test.
    pub fn this(test: &'static str) -> Self {
        Self {
            path: Self::executable(),
            test,
        }
    }

    /// Returns the path of this program.
    pub fn executable() -> PathBuf {
        std::env::current_exe().expect("a path")
    }

    /// Returns the command that runs a row in valgrind. The environment is nearly empty, because
    /// the C library searches the environment, which costs instructions.
    fn run(&self, row: &str, options: &[&str]) -> Command {
        let mut command = Command::new("valgrind");
        command
            .arg("--quiet")
            .arg(format!("--max-threads={MAX_THREADS}"))
            .args(options)
            .arg(&self.path)
            .args(["--exact", self.test, "--nocapture"])
            .env_clear()
            .env(ROW, row);
        for kept in ["PATH", "TMPDIR"] {
            if let Some(value) = std::env::var_os(kept) {
                command.env(kept, value);
            }
        }
        command
    }

    fn count_into(&self, out: &Path, row: &str, options: &[&str]) -> Command {
        let out = format!("--callgrind-out-file={}", out.display());
        let callgrind = ["--tool=callgrind", "--instr-atstart=no", &out];
        self.run(row, &[&callgrind, options].concat())
    }

    /// Returns the conditions on which the counts depend.
    pub fn conditions(&self) -> Conditions {
        let output = succeed(self.run(conditions::ROW, &["--tool=none"]));
        let mut conditions = Conditions::read(&output);
        conditions.add("valgrind", find().expect("valgrind was found before"));
        conditions
    }

    /// Performs a row, and returns the instructions of each thread by the thread's number.
    pub fn count(&self, row: &str) -> BTreeMap<u32, Parts> {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let out = folder.path().join("out");
        succeed(self.count_into(&out, row, &["--separate-threads=yes"]));
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
        let mut command = self.count_into(&out, row, &[]);
        command.env(WHOLE, "1");
        succeed(command);
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

/// Runs a command, and returns what it printed.
fn succeed(mut command: Command) -> String {
    let output = command.output().expect("valgrind runs");
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    let status = output.status;
    assert!(status.success(), "{command:?}: {status}\n{printed}{errors}");
    printed
}
