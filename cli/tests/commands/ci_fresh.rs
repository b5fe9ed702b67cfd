// SPDX-License-Identifier: Apache-2.0
//! Tests `patchbay ci run --fresh` without KVM: each run of a matrix in a copy of one guest, and
//! several of them at once.

use std::process::{Child, Stdio};

use super::ci::Ci;
use super::ci_bad_input::with_own_tmp;
use super::ci_guest::{staying, until};
use super::lab::end;

/// The beginning of a matrix of 8 keys whose guest can be saved.
const FRESH: [&str; 5] = ["--append", "savable", "--matrix", "[a-h]", "--fresh"];

pub(super) fn fresh<'a>(words: &[&'a str]) -> Vec<&'a str> {
    [&FRESH[..], words].concat()
}

/// Checks that a monitor that cannot be reached fails its run and no other.
#[test]
fn an_unreachable_monitor_fails_one_run() {
    let Some(ci) = Ci::new() else { return };
    std::fs::write(ci.path("first-reachable"), "").expect("written");
    let texts = [
        "ok    no key flipped",
        "FAIL  a=on",
        "the monitor did not flip the keys: no monitor answers on",
        "FAIL  h=on",
        "1 passed, 8 failed",
    ];
    ci.expect(1, &texts, &[&FRESH[..], &["--", "true"]].concat());
}

#[test]
fn each_run_has_a_copy_of_its_own() {
    let Some(ci) = Ci::new() else { return };
    let number = ["--ktap", "--junit", "j.xml", "--", "number"];
    let texts = ["9 passed, 0 failed", ", 1 boot ", ", 9 copies "];
    let done = ci.expect(0, &texts, &fresh(&number));
    let first = done.out.matches("# command 1 of its guest\n").count();
    assert_eq!(first, 9, "{}", done.out);
    let junit = std::fs::read_to_string(ci.path("j.xml")).expect("a file");
    assert!(junit.contains("tests=\"9\" failures=\"0\""), "{junit}");
    // Otherwise all runs share the guest.
    let words = [&["--matrix", "[a-h]"][..], &number].concat();
    let done = ci.expect(0, &[", 1 boot "], &words);
    assert!(done.out.contains("command 9 of its guest"), "{}", done.out);
    assert!(!done.err.contains("copies"), "{}", done.err);

    let texts = [
        "FAIL  c=on",
        "8 passed, 1 failed",
        ", 1 boot ",
        ", 9 copies ",
    ];
    let panics = ["--", "panic-with", "c"];
    ci.expect(1, &texts, &fresh(&panics));
    ci.expect(1, &texts, &fresh(&[&["--jobs", "3"][..], &panics].concat()));
    let words = fresh(&["--together", "--", "fail-with", "b", "g"]);
    ci.expect(
        1,
        &["fails with b=on g=on: exit status 9", ", 1 boot "],
        &words,
    );
}

/// The run of the first key waits for the run of the last one. So the others follow each other in
/// the other copy, and the results have the order of the keys nevertheless.
#[test]
fn runs_at_once_are_reported_in_the_order_of_the_keys() {
    let Some(ci) = Ci::new() else { return };
    let words = ["--jobs", "2", "--ktap", "--timeout", "60s"];
    let words = fresh(&[&words[..], &["--", "wait-for", "a", "h"]].concat());
    let texts = ["9 passed", ", 9 copies ", "up to 2 copies at once"];
    let done = ci.expect(0, &texts, &words);
    let expected = (2..).zip('a'..='h');
    let expected: String = expected
        .map(|(number, key)| format!("ok {number} {key}=on\n"))
        .collect();
    assert!(done.out.ends_with(&expected), "{}", done.out);
    let printed: Vec<&str> = done
        .err
        .lines()
        .filter_map(|line| line.strip_prefix("  ok    ")?.get(..1))
        .collect();
    assert_eq!(printed.concat(), "nabcdefgh", "{}", done.err);
}

#[test]
fn the_files_of_each_run_are_collected() {
    let Some(ci) = Ci::new() else { return };
    let words = [
        "--jobs",
        "2",
        "--collect",
        "/results",
        "--collect",
        "/absent",
    ];
    let words = fresh(&[&words[..], &["--", "panic-with", "c"]].concat());
    let texts = [
        "patchbay: a=on: /absent cannot be read",
        "patchbay: c=on: nothing is collected: the guest has ended",
    ];
    ci.expect(1, &texts, &words);
    let file = |run: &str| ci.path("collected").join(run).join("results/one");
    for run in ["no_key_flipped", "a=on", "h=on"] {
        assert_eq!(std::fs::read_to_string(file(run)).expect(run), "text");
    }
    assert!(!file("c=on").exists());
}

#[test]
fn a_guest_that_cannot_be_saved_is_an_error_before_the_first_run() {
    let Some(ci) = Ci::new() else { return };
    let texts = ["--fresh", "the guest's monitor saves no snapshots"];
    let done = ci.expect(125, &texts, &["--matrix", "a", "--fresh", "--", "true"]);
    assert!(!done.err.contains("no key flipped"), "{}", done.err);
    ci.expect(2, &["--matrix"], &["--fresh", "--", "true"]);
    let jobs = ["--matrix", "a", "--jobs", "2", "--", "true"];
    ci.expect(2, &["--fresh"], &jobs);
}

/// The consoles of the copies do not show what the kernel printed while the saved guest booted.
#[test]
fn a_report_during_the_boot_fails_the_first_run() {
    let Some(ci) = Ci::new() else { return };
    let words = ["--append", "savable warns", "--matrix", "a", "--fresh"];
    let words = [&words[..], &["--", "true"]].concat();
    let texts = [
        "FAIL  no key flipped",
        "init/main.c:1",
        "no key was flipped",
    ];
    ci.expect(1, &texts, &words);
}

/// Asserts that the run's files are gone, and waits for the end of the monitors whose guests stay.
/// The folders of these monitors, which are killed, have other names.
#[track_caller]
pub(super) fn assert_nothing_is_left(ci: &Ci) {
    for monitor in staying(&ci.path("")) {
        let state = || std::fs::read_to_string(format!("/proc/{monitor}/stat"));
        // Its parent has ended, and not every init process collects the exit status of others.
        until(|| state().is_err() || state().is_ok_and(|state| state.contains(") Z ")));
        std::fs::remove_file(ci.path(&format!("stays.{monitor}"))).expect("it was there");
    }
    let files = std::fs::read_dir(ci.path("tmp")).expect("a folder");
    let left: Vec<_> = files
        .map(|file| file.expect("a name").file_name())
        .filter(|name| name.to_string_lossy().starts_with("patchbay-"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

fn start(ci: &Ci, words: &[&str]) -> Child {
    let mut run = with_own_tmp(ci, &fresh(words));
    run.stderr(Stdio::null()).spawn().expect("it starts")
}

#[test]
fn a_signal_ends_all_copies() {
    let Some(ci) = Ci::new() else { return };
    for (signal, status) in [("INT", 130), ("TERM", 143)] {
        let words = ["--jobs", "3", "--timeout", "1000s", "--"];
        let run = start(&ci, &[&words[..], &["stay-with", "a", "c", "h"]].concat());
        until(|| staying(&ci.path("")).len() == 3);
        assert_eq!(end(run, signal), Some(status), "{signal}");
        assert_nothing_is_left(&ci);
    }
}

#[test]
fn an_error_in_one_copy_ends_all() {
    let Some(ci) = Ci::new() else { return };
    let words = ["--jobs", "3", "--timeout", "1000s", "--"];
    let command = ["break-with", "h", "2", "a", "c"];
    let mut run = start(&ci, &[&words[..], &command].concat());
    assert_eq!(run.wait().expect("it ends").code(), Some(125));
    assert_eq!(staying(&ci.path("")).len(), 2);
    assert_nothing_is_left(&ci);
}
