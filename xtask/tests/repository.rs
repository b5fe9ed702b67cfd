// SPDX-License-Identifier: Apache-2.0
//! Tests that xtask works on the repository in which it is called, wherever it was built, and what
//! it says about wrong arguments.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

/// Runs `xtask fuzz`, which lists the repository's fuzz targets.
fn list_fuzz_targets(folder: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_xtask"))
        .arg("fuzz")
        .current_dir(folder)
        .env_remove("CARGO_MANIFEST_DIR")
        .output()
        .unwrap()
}

#[test]
fn another_clone_is_not_mistaken_for_this_one() {
    let clone = tempfile::tempdir().unwrap();
    for file in [
        "xtask/Cargo.toml",
        "engine/static-keys/fuzz/fuzz_targets/only_here.rs",
        "engine/kernel-image/fuzz/fuzz_targets/here_too.rs",
        "engine/observe/fuzz/fuzz_targets/even_here.rs",
        "service/fuzz/fuzz_targets/also_here.rs",
        "vmm/fuzz/fuzz_targets/and_here.rs",
    ] {
        let path = clone.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "").unwrap();
    }
    let output = list_fuzz_targets(&clone.path().join("vmm/fuzz"));
    let text = String::from_utf8(output.stdout).unwrap();
    let names = text.lines().filter_map(|line| line.split(' ').next());
    assert_eq!(
        names.collect::<Vec<_>>(),
        [
            "also_here",
            "and_here",
            "even_here",
            "here_too",
            "only_here"
        ]
    );
}

#[test]
fn outside_a_repository_it_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let output = list_fuzz_targets(folder.path());
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("no repository of Patchbay"), "{error}");
}

/// Checks the messages about wrong arguments, which are printed before anything is built.
#[test]
fn wrong_arguments_of_the_simulation_are_refused_with_a_reason() {
    for (words, part) in [
        (&["--seed", "first"][..], "'first' for '--seed <S>'"),
        (&["--seed=-1"], "'-1' for '--seed <S>'"),
        (&["--seeds", "0"], "'0' for '--seeds <N>'"),
        (&["--seeds"], "a value is required for '--seeds <N>'"),
        (&["4155"], "unexpected argument '4155'"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
        let output = command.arg("simulate").args(words).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains(part), "{words:?}: {error}");
    }
}
