// SPDX-License-Identifier: Apache-2.0
//! Tests `patchbay ci compare` without KVM, with the simulated guest of [`super::ci`].

use serde_json::Value;

use super::ci::Ci;

pub(super) const METRIC: &str = r"took (\S+) ns";

struct Done {
    status: Option<i32>,
    out: String,
    err: String,
}

impl Done {
    fn json(&self) -> Value {
        let parsed = serde_json::from_str(&self.out);
        parsed.unwrap_or_else(|error| panic!("{error}: {}{}", self.out, self.err))
    }
}

fn run(ci: &Ci, words: &[&str]) -> Done {
    let output = ci.verb("compare", words).output().expect("it starts");
    Done {
        status: output.status.code(),
        out: String::from_utf8(output.stdout).expect("text"),
        err: String::from_utf8(output.stderr).expect("text"),
    }
}

/// Runs a comparison that must end with `status` and print `texts` on standard error.
#[track_caller]
fn expect(ci: &Ci, status: i32, texts: &[&str], words: &[&str]) -> Done {
    let done = run(ci, words);
    assert_eq!(done.status, Some(status), "{words:?}: {}", done.err);
    for text in texts {
        assert!(
            done.err.contains(text),
            "{text:?} of {words:?}: {}",
            done.err
        );
    }
    done
}

pub(super) fn key<'a>(json: &'a Value, name: &str) -> &'a Value {
    let keys = json["keys"].as_array().expect("a list");
    let key = keys.iter().find(|key| key["name"] == name);
    key.unwrap_or_else(|| panic!("no {name} in {json}"))
}

#[test]
fn a_key_with_an_effect_is_found_and_one_without_is_not() {
    let Some(ci) = Ci::new() else { return };
    let words = |output| {
        [
            "-o", output, "--key", "a", "--key", "b", "--runs", "20", "--seed", "7", "--metric",
            METRIC, "--plot", "plot.svg", "--", "bench", "a", "2",
        ]
    };
    let done = expect(&ci, 0, &["seed 7", ", 1 boot "], &words("json"));
    let json = done.json();
    assert_eq!(json["seed"], 7);
    assert!(json["ended_early"].is_null(), "{json}");
    // One run without a flipped key, and 20 on each side of each key.
    assert_eq!((&json["runs"], &json["boots"]), (&81.into(), &1.into()));
    assert_eq!(json["measure"], METRIC);
    let a = key(&json, "a");
    assert_eq!(
        (&a["result"], &a["runs"]),
        (&"difference".into(), &20.into())
    );
    let ratio = a["ratio"].as_f64().expect("a number");
    assert!((1.97..2.03).contains(&ratio), "{ratio}");
    let number = |name: &str| a[name].as_f64().expect("a number");
    assert!(number("low") <= ratio && ratio <= number("high"), "{a}");
    assert!(number("low") > 1.9 && number("level") >= 0.95, "{a}");
    let sides = ["off", "on"].map(|side| a[side].as_array().expect("a list").len());
    assert_eq!(sides, [20, 20]);
    let b = key(&json, "b");
    assert_eq!(b["result"], "no_difference");
    assert!(
        b["low"].as_f64() <= Some(1.0) && b["high"].as_f64() >= Some(1.0),
        "{b}"
    );
    let plot = std::fs::read_to_string(ci.path("plot.svg")).expect("a file");
    assert!(plot.starts_with("<svg ") && plot.contains(">a<"), "{plot}");

    // The output is reproducible: the seed determines the order of the runs, and the simulated
    // noise depends only on that order.
    let again = expect(&ci, 0, &[], &words("json"));
    assert_eq!(again.out, done.out);
    let table = expect(&ci, 0, &[], &words("table")).out;
    let lines: Vec<&str> = table.lines().collect();
    assert!(
        lines[1].starts_with("a ") && lines[1].ends_with(" difference"),
        "{table}"
    );
    assert!(
        lines[2].starts_with("b ") && lines[2].ends_with(" no difference found"),
        "{table}"
    );
    assert!(
        lines[3].contains("95% confidence") && lines[3].ends_with("seed 7"),
        "{table}"
    );
    assert_eq!(expect(&ci, 0, &[], &words("name")).out, "a\n");
}

#[test]
fn a_key_that_is_on_is_compared_with_off() {
    let Some(ci) = Ci::new() else { return };
    let words = [
        "-o", "json", "--set", "b=on", "--key", "b", "--runs", "20", "--metric", METRIC, "--",
        "bench", "b", "3",
    ];
    let done = expect(&ci, 0, &[], &words);
    let ratio = key(&done.json(), "b")["ratio"].as_f64().expect("a number");
    assert!((2.9..3.1).contains(&ratio), "{ratio}");
}

#[test]
fn a_ranking_screens_all_keys_and_repeats_some() {
    let Some(ci) = Ci::new() else { return };
    let words = [
        "-o", "json", "--matrix", "*", "--runs", "60", "--seed", "1", "--metric", METRIC, "--",
        "bench", "c", "2",
    ];
    let texts = ["screening 8 keys with 10 runs", "until 20 runs"];
    let json = expect(&ci, 0, &texts, &words).json();
    assert_eq!(json["keys"][0]["name"], "c");
    let c = key(&json, "c");
    assert_eq!(
        (&c["result"], &c["runs"]),
        (&"difference".into(), &20.into())
    );
    let keys = json["keys"].as_array().expect("a list");
    let found = keys
        .iter()
        .filter(|key| key["result"] == "difference")
        .count();
    let screened = keys
        .iter()
        .filter(|key| key["screened_out"] == true)
        .count();
    assert!(found == 1 && screened > 3, "{json}");
    for name in ["guarded", "sealed"] {
        let key = key(&json, name);
        assert_eq!(key["result"], "skipped");
        assert!(key["why"].as_str().expect("text").contains(name), "{key}");
    }
}

#[test]
fn a_wrong_command_line_ends_with_2() {
    let Some(ci) = Ci::new() else { return };
    for (words, why) in [
        (&["--"][..], "--key"),
        (
            &["--key", "a", "--matrix", "b", "--"],
            "cannot be used with",
        ),
        (&["--key", "a*", "--"], "give globs with --matrix"),
        (&["--key", "", "--"], "no name"),
        (&["--matrix", "[", "--"], "["),
        (&["--key", "a", "--runs", "19", "--"], "20..=10000"),
        (&["--key", "a", "--runs", "10001", "--"], "20..=10000"),
        (&["--key", "a", "--confidence", "95", "--"], "0.8 to 0.9999"),
        (
            &["--key", "a", "--confidence", "NaN", "--"],
            "0.8 to 0.9999",
        ),
        (&["--key", "a", "--metric", "took", "--"], "no group"),
        (&["--key", "a", "--metric", "(a)(b)", "--"], "2 groups"),
        (&["--key", "a", "--metric", "(", "--"], "unclosed group"),
        (&["--key", "a", "--seed", "x", "--"], "--seed"),
    ] {
        expect(&ci, 2, &[why], &[words, &["true"]].concat());
    }
}

#[test]
fn what_cannot_be_compared_is_named() {
    let Some(ci) = Ci::new() else { return };
    for (words, why) in [
        (&["--key", "nothing"][..], "no key nothing"),
        (&["--key", "traced"], "the key of a tracepoint"),
        (&["--key", "a", "--key", "guarded"], "--allow-guarded"),
        (&["--key", "sealed"], "sealed: its branches are fixed"),
        (&["--matrix", "no*"], "no key of the guest matches"),
        (
            &["--key", "a", "--plot", "nowhere/plot.svg"],
            "nowhere is not a folder",
        ),
        (
            &["--key", "a", "--key", "b", "--confidence", "0.9999"],
            "give fewer keys or a lower --confidence",
        ),
        (
            &["--matrix", "*", "--confidence", "0.9999"],
            "give a lower --confidence",
        ),
    ] {
        let done = expect(&ci, 125, &[why], &[words, &["--", "true"]].concat());
        assert!(done.out.is_empty(), "{}", done.out);
    }
    let words = ["--matrix", "guarded*", "sealed", "--", "true"];
    let done = expect(&ci, 125, &["sealed: its branches are fixed"], &words);
    assert!(done.out.is_empty(), "{}", done.out);
    let words = ["--matrix", "guarded*", "--", "true"];
    let done = expect(&ci, 0, &["no key was compared"], &words);
    assert!(
        done.out.contains("skipped: guarded: give --allow-guarded"),
        "{}",
        done.out
    );
    let words = [
        "--key",
        "a",
        "--runs",
        "20",
        "--plot",
        "/dev/full",
        "--",
        "true",
    ];
    // The results are printed even if the plot cannot be written.
    let done = expect(&ci, 1, &["cannot write /dev/full"], &words);
    assert!(!done.out.is_empty());
}

#[test]
fn a_command_that_fails_or_measures_nothing_at_once_ends_the_comparison() {
    let Some(ci) = Ci::new() else { return };
    let fails = "the command fails without a flipped key";
    for (status, why, command) in [
        (3, "exit status 3", &["say", "", "", "3"][..]),
        (127, "no program absent", &["absent"]),
        (1, "the kernel reported", &["warn"]),
        (125, "Fatal exception", &["panic"]),
        (1, "does not match --metric", &["say", "took long", "", "0"]),
        (
            1,
            "3 times",
            &["say", "took 1 ns, took 1 ns, took 2 ns", "", "0"],
        ),
        (
            1,
            "\"1,5\", which is no number",
            &["say", "took 1,5 ns", "", "0"],
        ),
        (1, "1e-100 to 1e100", &["say", "took NaN ns", "", "0"]),
        (1, "1e-100 to 1e100", &["say", "took inf ns", "", "0"]),
        (1, "1e-100 to 1e100", &["say", "took 0 ns", "", "0"]),
        (1, "1e-100 to 1e100", &["say", "took -5 ns", "", "0"]),
        (1, "the output exceeds 512 KiB", &["flood"]),
    ] {
        let words = [&["--key", "a", "--metric", METRIC, "--"], command].concat();
        let done = expect(&ci, status, &[fails, why], &words);
        assert!(done.out.is_empty(), "{}", done.out);
    }
    let words = ["--key", "a", "--timeout", "200ms", "--", "hang"];
    expect(&ci, 124, &[fails, "did not end within 0.2 s"], &words);
}

/// Checks that the results are printed if a run cannot take place.
#[test]
fn a_comparison_that_ends_early_prints_its_results() {
    let Some(ci) = Ci::new() else { return };
    let words = [
        "-o",
        "json",
        "--runs",
        "20",
        "--key",
        "c",
        "--key",
        "d",
        "--",
        "break-with",
        "c",
        "0",
    ];
    let why = "the agent in the guest answered out of turn";
    let json = expect(&ci, 125, &[why], &words).json();
    for name in ["c", "d"] {
        let key = key(&json, name);
        assert_eq!(key["result"], "undecided");
        assert!(key["why"].as_str().expect("text").contains(why), "{key}");
    }
    let early = json["ended_early"].as_str().expect("text");
    assert!(
        early.starts_with("the comparison ended early, after "),
        "{early}"
    );
}

/// Checks that a key is excluded and restored if the command fails on one of its sides, and that
/// the runs with other keys do not fail.
#[test]
fn a_side_that_fails_excludes_its_key_and_no_other() {
    let Some(ci) = Ci::new() else { return };
    for (why, boots, command) in [
        (
            "the command fails with c=on: exit status 9",
            1,
            &["fail-with", "c"][..],
        ),
        (
            "the command fails with c=on: Kernel panic",
            2,
            &["panic-with", "c"],
        ),
    ] {
        let words = [
            &[
                "-o", "json", "--runs", "20", "--key", "c", "--key", "d", "--",
            ],
            command,
        ]
        .concat();
        let json = expect(&ci, 1, &["c is not compared", why], &words).json();
        let c = key(&json, "c");
        assert_eq!(c["result"], "failed");
        assert!(c["why"].as_str().expect("text").contains(why), "{c}");
        assert!(c["ratio"].is_null(), "{c}");
        let d = key(&json, "d");
        assert_eq!(d["runs"], 20);
        assert_eq!(json["boots"], boots);
    }
    let words = [
        "--key",
        "c",
        "--key",
        "d",
        "--runs",
        "20",
        "--metric",
        METRIC,
        "--",
        "print-without",
        "d",
        "took 5 ns",
    ];
    let why = "the command fails with d=on: its output does not match --metric";
    let done = expect(&ci, 1, &[why], &words);
    assert!(
        done.out.contains("failed: the command fails with d=on"),
        "{}",
        done.out
    );
    // Each key was restored before the next was flipped.
    let words = [
        "--key",
        "c",
        "--key",
        "d",
        "--runs",
        "20",
        "--",
        "fail-with",
        "c",
        "d",
    ];
    expect(&ci, 0, &[", 1 boot "], &words);
}
