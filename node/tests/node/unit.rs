// SPDX-License-Identifier: Apache-2.0
//! The systemd unit.

use std::process::Command;

const UNIT: &str = include_str!("../../patchbayd.service");
const PROGRAM: &str = "/usr/bin/patchbayd";

#[test]
fn systemd_accepts_the_unit() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("patchbayd.service");
    // The program is not installed here.
    let unit = UNIT.replace(PROGRAM, env!("CARGO_BIN_EXE_patchbayd"));
    std::fs::write(&path, unit).expect("written");
    let verify = Command::new("systemd-analyze")
        .arg("verify")
        .arg(&path)
        .output();
    let output = match verify {
        Ok(output) => output,
        Err(error) => {
            eprintln!("SKIPPED: systemd-analyze cannot be run: {error}");
            return;
        }
    };
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    let about_it = text
        .lines()
        .filter(|line| line.contains("patchbayd.service"));
    assert_eq!(about_it.collect::<Vec<_>>(), Vec::<&str>::new());
}

#[test]
fn the_program_has_the_options_of_the_unit() {
    let help = Command::new(env!("CARGO_BIN_EXE_patchbayd"))
        .arg("--help")
        .output();
    let help = help.expect("it runs").stdout;
    let help = String::from_utf8_lossy(&help);
    let options = UNIT
        .split_whitespace()
        .filter(|word| word.starts_with("--"));
    let missing: Vec<_> = options.filter(|option| !help.contains(option)).collect();
    assert_eq!(missing, Vec::<&str>::new());
}
