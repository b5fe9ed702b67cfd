// SPDX-License-Identifier: Apache-2.0
//! Tests without KVM that `patchbay ci` reports its results at a signal. The signal is sent when
//! the simulated guests of [`super::ci_guest`] run commands that do not end.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use rustix::fs::{OFlags, fcntl_setfl};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use super::ci::Ci;
use super::ci_bad_input::{make_pipe, verb_with_own_tmp, with_own_tmp};
use super::ci_compare::{METRIC, key};
use super::ci_fresh::{assert_nothing_is_left, fresh};
use super::ci_guest::{staying, until};

struct Done {
    status: Option<i32>,
    out: String,
    err: String,
}

fn send(run: &Child, signal: Signal) {
    kill_process(Pid::from_child(run), signal).expect("it runs");
}

/// Sends a signal as a terminal does: to the command and to its monitors, which it also ends.
fn send_to_all(run: &Child, signal: Signal) {
    kill_process_group(Pid::from_child(run), signal).expect("it runs");
}

fn start(mut command: Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command.process_group(0).spawn().expect("it starts")
}

/// Sends the signal when that many commands do not end. Then nothing but results may be left.
#[track_caller]
fn interrupt(ci: &Ci, command: Command, stay: usize, signal: Signal) -> Done {
    let run = start(command);
    until(|| staying(&ci.path("")).len() == stay);
    // A terminal sends its signal to the monitors too, and a CI system may send it to the command
    // alone. Both are tested, each with some of the runs.
    match stay {
        1 => send_to_all(&run, signal),
        _ => send(&run, signal),
    }
    let output = run.wait_with_output().expect("it ends");
    assert_nothing_is_left(ci);
    Done {
        status: output.status.code(),
        out: String::from_utf8(output.stdout).expect("text"),
        err: String::from_utf8(output.stderr).expect("text"),
    }
}

#[track_caller]
fn assert_says(done: &Done, texts: &[&str]) {
    for text in texts {
        assert!(done.err.contains(text), "{text:?} of {}", done.err);
    }
}

fn read(ci: &Ci, name: &str) -> String {
    std::fs::read_to_string(ci.path(name)).expect("a file")
}

/// Asserts that the report ends with this error, after so many test cases and without a failure.
#[track_caller]
fn assert_junit(ci: &Ci, cases: usize, why: &str) {
    let junit = read(ci, "j.xml");
    let tests = cases + 1;
    let counts = format!("tests=\"{tests}\" failures=\"0\" skipped=\"0\" errors=\"1\"");
    let error = format!("<error message=\"{why}\"/>");
    assert!(junit.contains(&counts) && junit.contains(&error), "{junit}");
    assert!(junit.ends_with("</testsuites>\n"), "{junit}");
    let files = std::fs::read_dir(ci.path("")).expect("a folder");
    let mut names = files.map(|file| file.expect("a name").file_name());
    let hidden = names.find(|name| name.to_string_lossy().starts_with('.'));
    assert_eq!(hidden, None);
}

#[test]
fn a_signal_ends_a_matrix_with_the_reports_of_its_cases() {
    let Some(ci) = Ci::new() else { return };
    for (signal, name, status) in [
        (Signal::INT, "SIGINT", 130),
        (Signal::TERM, "SIGTERM", 143),
        (Signal::HUP, "SIGHUP", 129),
    ] {
        std::fs::write(ci.path("j.xml"), "the report of an earlier run").expect("written");
        let words = ["--matrix", "[a-d]", "--ktap", "--junit", "j.xml"];
        let command = [
            "--collect",
            "/results",
            "--timeout",
            "1000s",
            "--",
            "stay-with",
            "c",
        ];
        let words = [&words[..], &command].concat();
        let done = interrupt(&ci, with_own_tmp(&ci, &words), 1, signal);
        let why = format!("the run ended early, after 3 of 5 cases: c=on: interrupted by {name}");
        let summary = "3 passed, 0 failed, 0 skipped, ended early\n";
        // The guest's command still runs, so its files are not complete.
        let collected = "nothing is collected: the guest has ended\n";
        assert_says(&done, &[&why, summary, collected]);
        let expected = format!(
            "KTAP version 1\n1..5\nok 1 no key flipped\nok 2 a=on\nok 3 b=on\nBail out! {why}\n"
        );
        assert_eq!((done.out, done.status), (expected, Some(status)));
        assert_junit(&ci, 3, &why);
    }
}

#[test]
fn a_signal_ends_all_jobs_and_the_completed_cases_are_reported() {
    let Some(ci) = Ci::new() else { return };
    let words = [
        "--jobs",
        "3",
        "--timeout",
        "1000s",
        "--ktap",
        "--junit",
        "j.xml",
    ];
    let collect = ["--collect", "/results", "--", "stay-with", "a", "c", "h"];
    let words = fresh(&[&words[..], &collect].concat());
    let done = interrupt(&ci, with_own_tmp(&ci, &words), 3, Signal::TERM);
    assert_eq!(done.status, Some(143), "{}", done.err);
    let why = "the run ended early, after 6 of 9 cases: a=on: interrupted by SIGTERM";
    assert_says(
        &done,
        &[why, "6 passed, 0 failed, 0 skipped, ended early\n"],
    );
    let expected = "KTAP version 1\n1..9\nok 1 no key flipped\nok 2 b=on\nok 3 d=on\nok 4 e=on\n\
                    ok 5 f=on\nok 6 g=on\n";
    assert_eq!(done.out, format!("{expected}Bail out! {why}\n"));
    assert_junit(&ci, 6, why);
    assert_eq!(read(&ci, "collected/g=on/results/one"), "text");
    assert!(!ci.path("collected/h=on/results/one").exists());
}

/// A report that cannot be written yet keeps the run from ending after the first signal.
#[test]
fn a_second_signal_ends_the_run_without_a_report() {
    let Some(ci) = Ci::new() else { return };
    make_pipe(&ci, "j.xml");
    for (second, status) in [(Signal::TERM, 143), (Signal::INT, 130)] {
        let words = ["--matrix", "[a-d]", "--ktap", "--junit", "j.xml"];
        let words = [&words[..], &["--timeout", "1000s", "--", "stay-with", "c"]].concat();
        let mut run = start(with_own_tmp(&ci, &words));
        until(|| staying(&ci.path("")).len() == 1);
        send(&run, Signal::INT);
        let mut lines = BufReader::new(run.stderr.take().expect("piped")).lines();
        let summary = |line: &std::io::Result<String>| {
            line.as_ref()
                .is_ok_and(|line| line.ends_with(", ended early"))
        };
        assert!(lines.any(|line| summary(&line)));
        // A signal that follows the first one closely does not count.
        until(|| {
            let ended = run.try_wait().expect("its status").is_some();
            if !ended {
                send(&run, second);
            }
            ended
        });
        let output = run.wait_with_output().expect("it ends");
        assert_eq!(output.status.code(), Some(status));
        assert!(output.stdout.is_empty(), "{:?}", output.stdout);
        assert_nothing_is_left(&ci);
    }
}

#[test]
fn a_run_without_a_matrix_is_reported_as_missing() {
    let Some(ci) = Ci::new() else { return };
    let words = [
        "--ktap",
        "--junit",
        "j.xml",
        "--timeout",
        "1000s",
        "--",
        "stay-at",
        "1",
    ];
    let done = interrupt(&ci, with_own_tmp(&ci, &words), 1, Signal::TERM);
    let why = "the run ended early, after 0 of 1 cases: stay-at 1: interrupted by SIGTERM";
    let expected = format!("KTAP version 1\n1..1\nBail out! {why}\n");
    assert_eq!((done.out, done.status), (expected, Some(143)));
    assert_junit(&ci, 0, why);
}

/// Checks that a signal after the last run ends only the copying of files.
#[test]
fn a_signal_while_files_are_collected_keeps_the_report() {
    let Some(ci) = Ci::new() else { return };
    let words = ["--matrix", "a", "--ktap", "--junit", "j.xml"];
    let collect = ["--collect", "/results", "--collect", "/endless"];
    let words = [&words[..], &collect, &["--", "true"]].concat();
    let done = interrupt(&ci, with_own_tmp(&ci, &words), 1, Signal::TERM);
    assert_eq!(done.status, Some(143), "{}", done.err);
    let why = "patchbay: not all files were collected: interrupted by SIGTERM\n";
    assert_says(&done, &["2 passed, 0 failed, 0 skipped\n", why]);
    assert!(done.out.ends_with("\nok 2 a=on\n"), "{}", done.out);
    assert!(read(&ci, "j.xml").contains("tests=\"2\" failures=\"0\" skipped=\"0\" errors=\"0\""));
    assert_eq!(read(&ci, "collected/results/one"), "text");
}

#[test]
fn a_signal_during_a_search_keeps_the_failure() {
    let Some(ci) = Ci::new() else { return };
    // The halves of the keys are tested third and fourth.
    let words = [
        "--matrix",
        "[a-d]",
        "--together",
        "--timeout",
        "1000s",
        "--",
    ];
    let words = [&words[..], &["stay-at", "4", "fail-with", "b", "c"]].concat();
    let done = interrupt(&ci, with_own_tmp(&ci, &words), 1, Signal::INT);
    assert_eq!(done.status, Some(130), "{}", done.err);
    let texts = [
        "fails with a=on b=on c=on d=on: exit status 9; the search for a smaller set ended early\n",
        "after 1 of 2 cases: some keys flipped 2: interrupted by SIGINT\n",
        "1 passed, 1 failed, 0 skipped, ended early\n",
    ];
    assert_says(&done, &texts);
}

/// Checks that each job reports the failed run that it repeats.
#[test]
fn the_searches_of_all_jobs_are_reported() {
    let words = [
        "--pairs=covering",
        "--jobs",
        "2",
        "--timeout",
        "1000s",
        "--",
    ];
    let cases = [
        "FAIL  covering run 1 (",
        "FAIL  covering run 2 (",
        "; it could not be repeated; with ",
        "9 passed, 2 failed, 0 skipped, ended early\n",
        "the run ended early, after 9 of 14 cases: covering run ",
    ];
    let Some(ci) = Ci::new() else { return };
    let command = fresh(&[&words[..], &["fail-once", "no key"]].concat());
    let done = interrupt(&ci, with_own_tmp(&ci, &command), 2, Signal::INT);
    assert_eq!(done.status, Some(130), "{}", done.err);
    let why = "covering run 1.repeated: interrupted by SIGINT\n";
    assert_says(&done, &[&cases[..], &[why]].concat());

    // The first run flips `c` and not `d`, and the second one `d` and not `c`.
    for (key, number) in [("c", 1), ("d", 2)] {
        let Some(ci) = Ci::new() else { return };
        let command = fresh(&[&words[..], &["fail-once", key]].concat());
        let why = format!(
            "covering run {number}.repeated: the agent in the guest answered out of turn\n"
        );
        ci.expect(125, &[&cases[..], &[&why]].concat(), &command);
    }
}

/// The command that does not end is the first one of the second pair of the eighth round.
#[test]
fn an_interrupted_comparison_has_its_measurements_and_decides_nothing() {
    let Some(ci) = Ci::new() else { return };
    let words = |format| {
        let guest = [
            "--key", "c", "--key", "d", "--runs", "20", "--metric", METRIC,
        ];
        let result = [
            "-o",
            format,
            "--plot",
            "plot.svg",
            "--seed",
            "1",
            "--timeout",
            "1000s",
        ];
        let command = ["--", "stay-at", "32", "bench", "c", "2"];
        verb_with_own_tmp(&ci, "compare", &[&guest[..], &result, &command].concat())
    };
    let done = interrupt(&ci, words("json"), 1, Signal::INT);
    assert_eq!(done.status, Some(130), "{}", done.err);
    let early = "the comparison ended early, after 31 runs: ";
    assert_says(&done, &[early, ": interrupted by SIGINT\n"]);
    let json: serde_json::Value = serde_json::from_str(&done.out).expect("JSON");
    let why = json["ended_early"].as_str().expect("text");
    assert!(
        why.starts_with(early) && why.ends_with(": interrupted by SIGINT"),
        "{why}"
    );
    let pairs: Vec<usize> = ["c", "d"]
        .iter()
        .map(|name| {
            let key = key(&json, name);
            assert_eq!(
                (&key["result"], &key["why"]),
                (&"undecided".into(), &why.into())
            );
            assert!(key["ratio"].is_null() && key["low"].is_null(), "{key}");
            let [off, on] = ["off", "on"].map(|side| key[side].as_array().expect("a list").len());
            assert_eq!((off, &key["runs"]), (on, &off.into()));
            off
        })
        .collect();
    // The first run measures nothing, and each pair takes two.
    assert_eq!(pairs.iter().sum::<usize>(), 15, "{json}");
    assert!(
        key(&json, "c")["median_on"].as_f64() > Some(1900.0),
        "{json}"
    );
    let plot = read(&ci, "plot.svg");
    assert!(
        plot.contains("; incomplete, ") && plot.ends_with("</svg>\n"),
        "{plot}"
    );

    let done = interrupt(&ci, words("table"), 1, Signal::TERM);
    assert_eq!(done.status, Some(143), "{}", done.err);
    let lines: Vec<&str> = done.out.lines().collect();
    for line in &lines[1..3] {
        let cells: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(
            (&cells[1..4], cells[7]),
            (&["-"; 3][..], "undecided"),
            "{}",
            done.out
        );
    }
    assert!(
        lines[3].starts_with("incomplete: ") && lines[3].ends_with("SIGTERM"),
        "{}",
        done.out
    );
    assert_eq!(interrupt(&ci, words("name"), 1, Signal::INT).out, "");
}

/// Checks that a standard output that is not read does not keep a comparison from ending, and that
/// a closed one, such as that of tee(1) after Ctrl-C, does not hide the signal.
#[test]
fn a_comparison_that_cannot_be_printed_ends_with_the_status_of_the_signal() {
    let Some(ci) = Ci::new() else { return };
    let compare = |command: &[&str]| {
        let words = ["--key", "a", "--runs", "20", "--timeout", "1000s"];
        let words = [&words[..], &["--metric", METRIC, "--"], command].concat();
        verb_with_own_tmp(&ci, "compare", &words)
    };
    let (unread, full) = std::io::pipe().expect("a pipe");
    fcntl_setfl(&full, OFlags::NONBLOCK).expect("set");
    while (&full).write(&[0]).is_ok() {}
    fcntl_setfl(&full, OFlags::empty()).expect("set");
    let mut command = compare(&["bench", "a", "2"]);
    let run = command.stdout(full).stderr(Stdio::piped()).spawn();
    let mut run = run.expect("it starts");
    let mut lines = BufReader::new(run.stderr.take().expect("piped")).lines();
    // The times are the last line on standard error.
    assert!(lines.any(|line| line.is_ok_and(|line| line.contains(", 1 boot "))));
    until(|| {
        let ended = run.try_wait().expect("its status").is_some();
        if !ended {
            send(&run, Signal::INT);
        }
        ended
    });
    assert_eq!(run.wait().expect("it ends").code(), Some(130));
    assert_nothing_is_left(&ci);
    drop(unread);

    let mut run = start(compare(&["stay-at", "8", "bench", "a", "2"]));
    drop(run.stdout.take());
    until(|| staying(&ci.path("")).len() == 1);
    send_to_all(&run, Signal::INT);
    let output = run.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(130));
    assert_nothing_is_left(&ci);

    // Errors other than a closed pipe are reported.
    let full = std::fs::File::options().write(true).open("/dev/full");
    let run = compare(&["bench", "a", "2"])
        .stdout(full.expect("a device"))
        .output();
    let run = run.expect("it starts");
    let text = "cannot write to standard output: No space left";
    assert!(String::from_utf8_lossy(&run.stderr).contains(text));
    assert_eq!(run.status.code(), Some(1));
}
