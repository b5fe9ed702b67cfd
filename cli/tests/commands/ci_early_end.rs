// SPDX-License-Identifier: Apache-2.0
//! Tests without KVM that `patchbay ci run --matrix` keeps its results if it ends early.

use super::ci::{Ci, Done};
use super::ci_fresh::fresh;

const BROKEN: &str = "the agent in the guest answered out of turn";
const NO_MONITOR: &str = "the monitor cannot be started: ";

/// Runs a matrix that must end early in the run `name` after `completed` cases with this reason,
/// and must also print `cases`.
#[track_caller]
fn expect(ci: &Ci, completed: &str, why: [&str; 2], cases: &[&str], words: &[&str]) -> Done {
    let why = why.join(": ");
    let early = format!("patchbay: the run ended early, after {completed} cases: {why}");
    let texts = [&[&*early, ", ended early\n"], cases].concat();
    ci.expect(125, &texts, words)
}

fn read(ci: &Ci, name: &str) -> String {
    std::fs::read_to_string(ci.path(name)).expect("a file")
}

#[test]
fn the_cases_before_an_early_end_are_reported() {
    let Some(ci) = Ci::new() else { return };
    let words = ["--matrix", "[a-d]", "--ktap", "--junit", "j.xml"];
    let command = ["--collect", "/results", "--", "break-with", "c", "0"];
    let words = [&words[..], &command].concat();
    let summary = "3 passed, 0 failed, 0 skipped, ended early\n";
    let done = expect(
        &ci,
        "3 of 5",
        ["c=on", BROKEN],
        &["ok    b=on", summary],
        &words,
    );
    let expected = format!(
        "KTAP version 1\n1..5\nok 1 no key flipped\nok 2 a=on\nok 3 b=on\n\
         Bail out! the run ended early, after 3 of 5 cases: c=on: {BROKEN}\n"
    );
    assert_eq!(done.out, expected);
    let junit = read(&ci, "j.xml");
    let counts = "tests=\"4\" failures=\"0\" skipped=\"0\" errors=\"1\"";
    let error =
        format!("<error message=\"the run ended early, after 3 of 5 cases: c=on: {BROKEN}\"/>");
    assert!(junit.contains(counts) && junit.contains(&error), "{junit}");
    assert_eq!(read(&ci, "collected/results/one"), "text");

    let words = ["--append", "savable", "--matrix", "[a-d]", "--fresh"];
    let words = [&words[..], &command].concat();
    expect(&ci, "3 of 5", ["c=on", BROKEN], &[summary], &words);
    assert_eq!(read(&ci, "collected/c=on/results/one"), "text");
}

#[test]
fn a_guest_that_cannot_be_replaced_ends_the_run() {
    let Some(ci) = Ci::new() else { return };
    let lost = "FAIL  c=on (";
    let command = ["--", "lose-monitor-with", "c"];
    let words = [&["--matrix", "[a-h]"][..], &command].concat();
    expect(
        &ci,
        "4 of 9",
        ["d=on", NO_MONITOR],
        &["ok    b=on", lost],
        &words,
    );
    let Some(ci) = Ci::new() else { return };
    let words = fresh(&command);
    let texts = ["ok    b=on", lost, ", 4 copies "];
    expect(&ci, "4 of 9", ["d=on", NO_MONITOR], &texts, &words);
}

/// Checks that a matrix without any result names the error only.
#[test]
fn an_error_before_the_keys_are_selected_writes_no_report() {
    let Some(ci) = Ci::new() else { return };
    let words = ["--matrix", "nothing", "--ktap", "--junit", "j.xml"];
    let words = [&words[..], &["--", "true"]].concat();
    let done = ci.expect(125, &["no key nothing"], &words);
    assert!(!done.err.contains("ended early"), "{}", done.err);
    assert!(done.out.is_empty() && !ci.path("j.xml").exists());
}

/// The run of the first key never ends, so the other copy runs the others until it breaks the
/// protocol.
#[test]
fn the_cases_of_other_jobs_are_kept() {
    let Some(ci) = Ci::new() else { return };
    let jobs = ["--jobs", "2", "--timeout", "1000s", "--ktap", "--"];
    let words = fresh(&[&jobs[..], &["break-with", "h", "1", "a"]].concat());
    let texts = ["7 passed, 0 failed", ", 9 copies "];
    let done = expect(&ci, "7 of 9", ["h=on", BROKEN], &texts, &words);
    let expected = (2..).zip('b'..='g');
    let expected: String = expected
        .map(|(number, key)| format!("ok {number} {key}=on\n"))
        .collect();
    assert!(done.out.contains(&expected), "{}", done.out);
    assert!(done.out.contains("\n1..9\n"), "{}", done.out);
}

#[test]
fn pairs_before_an_early_end_are_reported() {
    let Some(ci) = Ci::new() else { return };
    let words = [
        "--matrix", "[a-d]", "--pairs", "--", "break-at", "8", "a", "c",
    ];
    let texts = ["ok    a=on b=on", "FAIL  a=on c=on", "6 passed, 1 failed"];
    expect(&ci, "7 of 11", ["a=on d=on", BROKEN], &texts, &words);
}

#[test]
fn a_search_that_ends_early_keeps_the_failure() {
    let Some(ci) = Ci::new() else { return };
    let together = ["--matrix", "[a-d]", "--together", "--", "break-at"];
    // The halves of the keys are tested third and fourth.
    let early = "on: exit status 9; the search for a smaller set ended early\n";
    for (number, keys, fails) in [
        ("4", ["b", "c"], "fails with a=on b=on c=on d="),
        ("4", ["a", "b"], "fails with a=on b="),
    ] {
        let words = [&together[..], &[number], &keys].concat();
        let why = format!("{fails}{early}");
        expect(
            &ci,
            "1 of 2",
            ["some keys flipped 2", BROKEN],
            &["FAIL  all keys flipped (", &why],
            &words,
        );
    }
}

/// Checks that a run of the covering array that fails is reported, also if it cannot be repeated.
#[test]
fn a_covering_run_whose_search_ends_early_keeps_the_failure() {
    let Some(ci) = Ci::new() else { return };
    let covering = ["--matrix", "[a-h]", "--pairs=covering", "--", "break-at"];
    // The first run of the array is the tenth command. It flips both keys.
    for (number, run, why) in [
        ("11", "covering run 1.repeated", "it could not be repeated"),
        (
            "12",
            "covering run 1.1",
            "the search for the keys that fail together ended early",
        ),
    ] {
        let words = [&covering[..], &[number, "a", "g"]].concat();
        let why = format!("exit status 9; {why}; with a=on b=on c=on e=on g=on\n");
        let texts = ["FAIL  covering run 1 (", &why];
        expect(&ci, "9 of 14", [run, BROKEN], &texts, &words);
    }
}

#[test]
fn a_result_that_cannot_be_written_discards_no_other() {
    let Some(ci) = Ci::new() else { return };
    std::fs::create_dir(ci.path("collected")).expect("a folder");
    std::fs::write(ci.path("collected/b=on"), "").expect("written");
    let words = ["--append", "savable", "--matrix", "[a-d]", "--fresh"];
    let words = [&words[..], &["--collect", "/results", "--", "true"]].concat();
    let texts = ["cannot create collected/b=on", "5 passed, 0 failed"];
    let done = ci.expect(125, &texts, &words);
    assert!(!done.err.contains("ended early"), "{}", done.err);

    let words = ["--matrix", "a", "--ktap", "--junit", "/dev/full"];
    let collect = ["--collect", "/results", "--collect-into", "kernel", "--"];
    let words = [&words[..], &collect, &["true"]].concat();
    let texts = ["cannot create kernel", "cannot write /dev/full", "1 boot "];
    let done = ci.expect(125, &texts, &words);
    assert!(done.out.ends_with("\nok 2 a=on\n"), "{}", done.out);
}
