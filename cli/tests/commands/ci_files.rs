// SPDX-License-Identifier: Apache-2.0
//! Tests the files for GitHub Actions and GitLab CI in `examples/ci`. Their steps run unchanged in
//! a folder that looks like a kernel tree, with the simulated monitor of [`super::ci`].
//!
//! Steps that need a hosted runner are not run: GitHub's steps with `uses:` and the one named "Set
//! up the runner", and GitLab's `before_script`.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use serde_yaml_ng::Value;

use super::ci::Ci;

const SET_UP: &str = "Set up the runner";

/// A Makefile with the targets of a kernel tree that the steps make.
const MAKEFILE: &str = "\
defconfig kvm_guest.config olddefconfig:
\ttouch .config
bzImage:
\ttest -e .config.enabled
\tmkdir -p arch/x86/boot
\tcp kernel arch/x86/boot/bzImage
";
const CONFIG: &str = "#!/bin/sh\ntest \"$1\" = --enable && touch .config.enabled\n";

/// Reads a file of `examples/ci`.
fn read(name: &str) -> Value {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/ci");
    let text = std::fs::read_to_string(folder.join(name)).expect("the file is there");
    serde_yaml_ng::from_str(&text).expect("YAML")
}

fn variables(of: &Value) -> Vec<(String, String)> {
    let map = of.as_mapping().expect("a map of variables");
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    map.iter()
        .map(|(name, value)| (text(name), text(value)))
        .collect()
}

/// Runs a script as a CI runner does: bash stops at the first command that fails.
fn run_step(ci: &Ci, script: &str, variables: &[(String, String)]) {
    let path = std::env::var("PATH").expect("a PATH");
    let programs = ci.path("bin");
    let output = Command::new("bash")
        .args(["-e", "-o", "pipefail", "-c", script])
        .current_dir(ci.path(""))
        .envs(variables.iter().cloned())
        .env("PATH", format!("{}:{path}", programs.display()))
        .env("PATCHBAY_VMM", ci.path("monitor"))
        .env("PATCHBAY_AGENT", "/bin/busybox")
        // This variable marks the lab, so the run boots its guests here even without KVM.
        .env("PATCHBAY_LAB_OUT", ci.path(""))
        .output()
        .expect("bash runs");
    assert!(
        output.status.success(),
        "{script}\n{}\n{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Makes a folder that looks like a kernel tree with a test in it, and the `patchbay` command in
/// `bin`.
fn tree() -> Option<Ci> {
    let ci = Ci::new()?;
    let write = |name: &str, text: &str| {
        let path = ci.path(name);
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
        std::fs::write(&path, text).expect("written");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).expect("a mode");
    };
    write("Makefile", MAKEFILE);
    write("scripts/config", CONFIG);
    write("selftest", "#!/bin/sh\n");
    std::fs::create_dir(ci.path("bin")).expect("a folder");
    let patchbay = env!("CARGO_BIN_EXE_patchbay");
    symlink(patchbay, ci.path("bin/patchbay")).expect("a link");
    Some(ci)
}

fn assert_results(ci: &Ci) {
    // Kernels do not declare their own keys as safe to flip, so a matrix without guarded keys would
    // skip all of them.
    for (file, tests) in [("boot.xml", 1), ("matrix.xml", 2)] {
        let xml = std::fs::read_to_string(ci.path(file)).expect(file);
        let head = format!("tests=\"{tests}\" failures=\"0\" skipped=\"0\"");
        assert!(xml.contains(&head), "{head} of {xml}");
    }
}

#[test]
fn the_steps_for_github_run_as_they_stand() {
    let Some(ci) = tree() else { return };
    let file = read("github.yml");
    let job = &file["jobs"]["guests"];
    let variables = variables(&job["env"]);
    let mut ran = 0;
    for step in job["steps"].as_sequence().expect("steps") {
        let name = step["name"].as_str().unwrap_or_default();
        match step["run"].as_str() {
            Some(_) if name == SET_UP => {}
            Some(script) => {
                run_step(&ci, script, &variables);
                ran += 1;
            }
            None => assert!(step["uses"].is_string(), "{step:?} neither runs nor uses"),
        }
    }
    assert_eq!(ran, 3);
    assert_results(&ci);
}

#[test]
fn the_script_for_gitlab_runs_as_it_stands() {
    let Some(ci) = tree() else { return };
    let file = read("gitlab.yml");
    let job = &file["guests"];
    let lines = job["script"].as_sequence().expect("a script");
    let lines: Vec<&str> = lines
        .iter()
        .map(|line| line.as_str().expect("text"))
        .collect();
    run_step(&ci, &lines.join("\n"), &variables(&job["variables"]));
    assert_results(&ci);
}
