// SPDX-License-Identifier: Apache-2.0
//! Counts the bytes that a discovery keeps, by the function that allocated them. DHAT, a tool of
//! valgrind, reports the allocations that a program has not freed when it ends.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::COPY;

/// The environment variable that makes this program end without freeing its results.
pub const KEEP: &str = "PATCHBAY_DISCOVERY_KEEP";
/// The beginning of the functions whose allocations are counted.
const ENGINE: &str = "patchbay_kernel_image::";
/// Functions that allocate less are added up.
const LEAST: u64 = 10_000;
const OTHERS: &str = "other functions";

/// Runs this program in DHAT, and prints the bytes.
pub fn count(folder: &Path) -> Result<()> {
    let out = folder.join("kept");
    let output = Command::new("valgrind")
        .args(["--quiet", "--tool=dhat", "--num-callers=40"])
        .arg(format!("--dhat-out-file={}", out.display()))
        .arg(std::env::current_exe()?)
        .env(COPY, folder)
        .env(KEEP, "1")
        .output()
        .context("valgrind cannot be run")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {errors}", output.status);
    let report: Value = serde_json::from_slice(&std::fs::read(&out)?)?;
    let mut kept = BTreeMap::<String, u64>::new();
    for point in list(&report, "pps")? {
        let bytes = point["eb"].as_u64().context("bytes at the end")?;
        if let Some(function) = function(&report, point)? {
            *kept.entry(function).or_default() += bytes;
        }
    }
    let all: u64 = kept.values().sum();
    let mut rows = BTreeMap::<&str, u64>::new();
    for (function, bytes) in &kept {
        let name = if *bytes < LEAST { OTHERS } else { function };
        *rows.entry(name).or_default() += bytes;
    }
    println!("\n| kept by the finder and the kernel that it found | bytes |\n|---|---|");
    for (function, bytes) in rows {
        println!("| {function} | {bytes} |");
    }
    println!("| all | {all} |");
    Ok(())
}

fn list<'a>(value: &'a Value, field: &str) -> Result<&'a Vec<Value>> {
    value[field].as_array().context("a report of DHAT")
}

/// Returns the innermost function of the engine that called the allocator; `None` if the engine did
/// not call it.
fn function(report: &Value, point: &Value) -> Result<Option<String>> {
    let frames = list(report, "ftbl")?;
    for frame in list(point, "fs")? {
        let frame = frame.as_u64().and_then(|frame| usize::try_from(frame).ok());
        let frame = frame.and_then(|frame| frames.get(frame)?.as_str());
        let frame = frame.context("a frame")?;
        // "0x1234: function (file:line)"
        let name = frame.split_once(": ").map_or(frame, |(_, name)| name);
        let name = name.rsplit_once(" (").map_or(name, |(name, _)| name);
        if name.contains(ENGINE) {
            return Ok(Some(name.replace(ENGINE, "")));
        }
    }
    Ok(None)
}
