// SPDX-License-Identifier: Apache-2.0
//! Tests `patchbay ci run --pairs` without KVM: two keys at a time, and the runs of a covering
//! array.

use super::ci::Ci;

/// Returns the results of a run with --ktap, without their numbers.
fn results(ktap: &str) -> Vec<String> {
    let result = |line: &str| {
        let (verdict, rest) = match line.strip_prefix("not ok ") {
            Some(rest) => ("FAIL", rest),
            None => ("ok", line.strip_prefix("ok ")?),
        };
        let (_, name) = rest.split_once(' ')?;
        Some(format!("{verdict} {name}"))
    };
    ktap.lines().filter_map(result).collect()
}

#[test]
fn each_pair_is_flipped_and_the_failing_one_is_named() {
    let Some(ci) = Ci::new() else { return };
    let texts = [
        "patchbay: 4 keys: 11 runs, 1 with no key flipped, 4 with one, 6 with two\n",
        "FAIL  b=on d=on (",
        "exit status 9",
        "10 passed, 1 failed, 0 skipped",
        ", 1 boot ",
    ];
    let words = ["--matrix", "[a-d]", "--pairs", "--ktap", "--junit", "j.xml"];
    let words = [&words[..], &["--", "fail-with", "b", "d"]].concat();
    let done = ci.expect(1, &texts, &words);
    let expected = [
        "ok no key flipped",
        "ok a=on",
        "ok b=on",
        "ok c=on",
        "ok d=on",
        "ok a=on b=on",
        "ok a=on c=on",
        "ok a=on d=on",
        "ok b=on c=on",
        "FAIL b=on d=on",
        "ok c=on d=on",
    ];
    assert_eq!(results(&done.out), expected, "{}", done.out);
    let junit = std::fs::read_to_string(ci.path("j.xml")).expect("a file");
    assert!(junit.contains("tests=\"11\" failures=\"1\" skipped=\"0\""));
    assert!(junit.contains("name=\"b=on d=on\""), "{junit}");
    // Both keys are flipped together and restored together: exactly two keys are ever on.
    let done = ci.expect(
        0,
        &["7 passed"],
        &["--matrix", "[a-c]", "--pairs", "--ktap", "--", "count"],
    );
    let counts: Vec<&str> = done
        .out
        .lines()
        .filter_map(|line| line.strip_prefix("# "))
        .collect();
    let expected = [
        "0 0 0", "1 0 0", "0 1 0", "0 0 1", "1 1 0", "1 0 1", "0 1 1",
    ];
    let expected = expected.map(|counts| format!("{counts} 0 0 0 0 0"));
    assert_eq!(counts, expected);
}

#[test]
fn a_key_that_fails_by_itself_is_in_no_pair() {
    let Some(ci) = Ci::new() else { return };
    let words = ["--matrix", "[a-c]", "--pairs", "--", "panic-with", "b"];
    let texts = [
        "FAIL  b=on",
        "skip  a=on b=on: b=on fails by itself",
        "ok    a=on c=on",
        "skip  b=on c=on: b=on fails by itself",
        "4 passed, 1 failed, 2 skipped",
        ", 2 boots ",
    ];
    ci.expect(1, &texts, &words);
    let words = ["--matrix", "[a-h]", "--pairs=covering", "--"];
    let texts = [
        "FAIL  b=on",
        "not in the covering array: b=on fails by itself",
        "ok    covering run 5 (",
        ", 2 boots ",
    ];
    let words = [&words[..], &["panic-with", "b"]].concat();
    let done = ci.expect(1, &texts, &words);
    assert!(!done.err.contains("FAIL  covering"), "{}", done.err);
    let words = ["--matrix", "[ab]", "--pairs=covering", "--"];
    let texts = [
        "not in the covering array: b=on fails by itself",
        "no pair was flipped: fewer than two keys pass by themselves",
    ];
    ci.expect(1, &texts, &[&words[..], &["fail-with", "b"]].concat());
    // A key that cannot be flipped is in no pair, and one key has none.
    let texts = [
        "patchbay: 1 key: 2 runs",
        "skip  guarded=on",
        "patchbay: no pair was flipped",
    ];
    let words = ["--matrix", "a", "guarde?", "--pairs", "--", "true"];
    ci.expect(0, &texts, &words);
    let texts = ["FAIL  no key flipped", "no key was flipped"];
    let words = ["--matrix", "[ab]", "--pairs", "--", "say", "", "", "3"];
    ci.expect(1, &texts, &words);
}

#[test]
fn a_covering_run_that_fails_names_the_keys_that_fail_together() {
    let Some(ci) = Ci::new() else { return };
    let words = ["--matrix", "[a-h]", "--pairs=covering", "--ktap", "--"];
    let with = |command: &[&'static str]| [&words[..], command].concat();
    let texts = [
        "patchbay: 8 keys: 14 runs, 1 with no key flipped, 8 with one, 5 of the covering array; \
         more if one of these fails\n",
        "14 passed, 0 failed",
        ", 1 boot ",
    ];
    let done = ci.expect(0, &texts, &with(&["true"]));
    assert_eq!(results(&done.out)[9], "ok covering run 1");
    for command in ["fail-with", "panic-with"] {
        let done = ci.expect(1, &["fails with c=on f=on: "], &with(&[command, "c", "f"]));
        let failed: Vec<&str> = done
            .err
            .lines()
            .filter(|line| line.contains("FAIL"))
            .collect();
        let named = |line: &&str| line.contains("covering run") && line.contains("c=on f=on");
        assert!(!failed.is_empty() && failed.iter().all(named), "{failed:?}");
        assert!(!done.err.contains("not tested"), "{}", done.err);
    }
}

#[test]
fn pairs_are_flipped_in_fresh_copies_at_once() {
    let Some(ci) = Ci::new() else { return };
    let words = ["--append", "savable", "--matrix", "[a-d]", "--fresh"];
    let words = [&words[..], &["--jobs", "3", "--collect", "/results"]].concat();
    let with = |more: &[&'static str]| [&words[..], more].concat();
    let texts = [
        "FAIL  b=on d=on (",
        "10 passed, 1 failed",
        ", 1 boot ",
        ", 11 copies ",
    ];
    let done = ci.expect(1, &texts, &with(&["--pairs", "--", "panic-with", "b", "d"]));
    let order: Vec<&str> = done
        .err
        .lines()
        .filter_map(|line| line.strip_prefix("  ")?.get(6..)?.split(" (").next())
        .filter(|name| name.contains("=on "))
        .collect();
    let expected = ["a=on b", "a=on c", "a=on d", "b=on c", "b=on d", "c=on d"];
    assert_eq!(order, expected.map(|pair| format!("{pair}=on")));
    let collected = |run: &str| ci.path("collected").join(run).join("results/one");
    assert!(collected("a=on_c=on").exists() && !collected("b=on_d=on").exists());
    let words = with(&["--pairs=covering", "--", "fail-with", "b", "d"]);
    ci.expect(1, &["fails with b=on d=on: exit status 9"], &words);
    assert!(collected("covering_run_1").exists());
}

#[test]
fn conflicts_are_refused() {
    let Some(ci) = Ci::new() else { return };
    ci.expect(2, &["--matrix"], &["--pairs", "--", "true"]);
    let words = ["--matrix", "a", "--pairs", "--together", "--", "true"];
    ci.expect(2, &["--together"], &words);
    let words = ["--matrix", "a", "--pairs=most", "--", "true"];
    ci.expect(2, &["covering"], &words);
}
