// SPDX-License-Identifier: Apache-2.0
//! Tests the status, the history and the differences of a running rollout.

use serde_json::Value;

use super::lab::Commands;
use super::rollouts::{FakeFleet, SPEC, until};

/// A gate that nobody answers, and that pauses the rollout soon.
const SILENT: &str = "gates: [{max_errors: 0, on_failure: abort}, {grpc: {url: \"http://127.0.0.1:1\"}, \
                      interval: 10ms, patience: 2s, on_failure: pause}]\n";

#[test]
fn a_status_says_which_gate_is_closed_and_what_a_promotion_skips() {
    let fleet = FakeFleet::new();
    let spec = fleet.spec("net.yaml", &(SPEC.to_owned() + SILENT));
    fleet.start("net", &spec);
    let shown = until(|| {
        let shown = fleet.ok(&fleet.words(&["status", "net"]));
        shown.contains("net is paused").then_some(shown)
    });
    for line in [
        "  keys wanted on: alpha\n",
        "  gate 1, max_errors 0% of the wave's guests: passes so far\n",
        "  gate 2, grpc http://127.0.0.1:1: CLOSED: ",
        "> └─ wave 1: 1 of 1 guest on 1 host as wanted, 0 not yet\n",
        "  next: `rollout undo net` takes the change of 1 guest back\n",
        "  next: `rollout promote net` completes the rollout at once, and SKIPS the closed gate 2\n",
    ] {
        assert!(shown.contains(line), "{line} in {shown}");
    }
    let json = fleet.json(&fleet.words(&["status", "net"]));
    assert_eq!(json["gates"][1]["state"], "closed", "{json}");
    assert!(is_rfc3339(&json["timeline"][0]["time"]), "{json}");
    assert_eq!(json["keys"][0]["names"][0], "alpha", "{json}");
    assert_eq!(json["next_steps"][1]["command"], "undo", "{json}");
    let wide = fleet.ok(&fleet.words(&["status", "net", "-o", "wide"]));
    assert!(wide.contains("test   here  1     as wanted  1"), "{wide}");
    let list = fleet.ok(&fleet.words(&["list", "-o", "wide"]));
    assert!(
        list.contains("APPROVALS") && list.contains("1/1") && list.contains("gate 2 of wave 1"),
        "{list}"
    );
    let short = fleet.ok(&fleet.words(&["list"]));
    assert!(!short.contains("APPROVALS"), "{short}");
    assert_eq!(fleet.ok(&fleet.words(&["list", "-o", "name"])), "net\n");
    let (_, said, code) = fleet.all(&["guest", "list", "-o", "wide"]);
    assert_eq!(code, Some(2), "{said}");
    fleet.ok(&fleet.words(&["promote", "net"]));
    let history = fleet.ok(&fleet.words(&["history", "net"]));
    let who = format!("uid:{}", rustix::process::geteuid().as_raw());
    let events: Vec<(&str, &str, String)> = history
        .lines()
        .skip(1)
        .map(|line| {
            let mut words = line.split_whitespace();
            let time = words.nth(1).expect("a time");
            assert!(time.ends_with('Z'), "{line}");
            let (by, phase) = (words.next().expect("who"), words.next().expect("a phase"));
            let by = if by == who { "me" } else { by };
            (by, phase, words.take(6).collect::<Vec<_>>().join(" "))
        })
        .collect();
    let expected = [
        ("me", "planned", "planned"),
        ("me", "running", "started"),
        ("controller", "running", "gate 2 of wave 1 is"),
        ("controller", "paused", "gate 2 of wave 1 is"),
        ("me", "running", "promoted"),
        ("controller", "running", "wave 1 is done"),
        ("controller", "completed", "completed"),
    ];
    let expected = expected.map(|(by, phase, text)| (by, phase, text.to_owned()));
    assert_eq!(events, expected, "{history}");
    let json = fleet.json(&fleet.words(&["history", "net"]));
    assert_eq!(json[3]["subject"], "gate closed", "{json}");
    assert_eq!(json[3]["number"], 4, "{json}");
    let names = fleet.ok(&fleet.words(&["history", "net", "-o", "name"]));
    let numbers: Vec<String> = (1..=expected.len())
        .map(|number| number.to_string())
        .collect();
    assert_eq!(names.lines().collect::<Vec<_>>(), numbers);
    // The table has the same times.
    let times = history.lines().skip(1);
    let times: Vec<&str> = times
        .filter_map(|line| line.split_whitespace().nth(1))
        .collect();
    let of = |entry: &Value| entry["time"].as_str().map(str::to_owned);
    let in_json: Option<Vec<String>> = json.as_array().expect("a list").iter().map(of).collect();
    assert_eq!(in_json.expect("texts"), times, "{json}");
}

/// Returns whether the value is a time as all other commands print it.
fn is_rfc3339(value: &Value) -> bool {
    let time = value.as_str().map(str::parse::<prost_types::Timestamp>);
    time.is_some_and(|time| time.is_ok())
}

#[test]
fn a_status_counts_the_bake_time_down() {
    let fleet = FakeFleet::new();
    let spec = SPEC.replace("size: rest", "size: rest, bake: 1h");
    let spec = fleet.spec("net.yaml", &spec);
    let planned = fleet.ok(&fleet.words(&["plan", &spec]));
    assert!(planned.contains("net is planned"), "{planned}");
    let shown = fleet.ok(&fleet.words(&["status", "net"]));
    assert!(
        shown.contains("0 not yet; then it bakes for 1h 0m\n"),
        "{shown}"
    );
    assert!(
        shown.contains("0 of 1 people have approved digest "),
        "{shown}"
    );
    assert!(
        shown.contains("next: `rollout start net` changes the 1 guests of wave 1"),
        "{shown}"
    );
    fleet.start("net", &spec);
    let shown = until(|| {
        let shown = fleet.ok(&fleet.words(&["status", "net"]));
        shown.contains("  it bakes wave 1").then_some(shown)
    });
    let line = shown.lines().nth(1).expect("a line");
    assert!(
        line.starts_with("  it bakes wave 1: ") && line.contains(" of 1h 0m have passed, "),
        "{shown}"
    );
    let wave = shown.lines().find(|line| line.starts_with("> └─ wave 1"));
    let wave = wave.expect("its line");
    assert!(
        wave.contains("; it bakes until 20") && wave.ends_with(" left"),
        "{shown}"
    );
    let json = fleet.json(&fleet.words(&["status", "net"]));
    assert_eq!(json["stage"], "baking", "{json}");
    assert_eq!(json["waves"][0]["bake_seconds"], 3600, "{json}");
    assert!(is_rfc3339(&json["waves"][0]["bakes_until"]), "{json}");
}

#[test]
fn a_spec_is_compared_before_it_is_planned() {
    let fleet = FakeFleet::new();
    let spec = fleet.spec("net.yaml", SPEC);
    let said = fleet.fails(1, &fleet.words(&["diff", &spec]));
    assert!(said.contains("there is no rollout"), "{said}");
    fleet.ok(&fleet.words(&["plan", &spec]));
    let same = fleet.ok(&fleet.words(&["diff", &spec]));
    assert_eq!(same, "net is planned; the spec would change nothing\n");
    let other = SPEC.replace("want: on", "want: held") + "min_success: 2\n";
    let output = fleet.fed(&fleet.words(&["diff", "-", "--name", "net"]), &other);
    assert_eq!(output.status.code(), Some(4));
    let text = String::from_utf8(output.stdout).expect("text");
    assert_eq!(
        text,
        "net is planned; the spec would change:\n  key alpha: on -> held on 1 guest\n  \
         - min_success: 1\n  + min_success: 2\n"
    );
    let none = fleet.spec("net.yaml", &SPEC.replace("\"*\"", "\"db-*\""));
    let (out, said, code) = fleet.all(&fleet.words(&["diff", &none]));
    assert_eq!(code, Some(4), "{said}");
    assert!(out.contains("wave 1 -> no wave: test on here"), "{out}");
    let wrong = fleet.spec("wrong.yaml", "title: 7\n");
    let said = fleet.fails(2, &fleet.words(&["diff", &wrong, "--name", "net"]));
    assert!(said.contains("wrong.yaml: line 1"), "{said}");
    fleet.fails(2, &fleet.words(&["diff", "-"]));
    fleet.ok(&fleet.words(&["abort", "net"]));
    let said = fleet.fails(1, &fleet.words(&["diff", &none]));
    assert!(
        said.contains("net is aborted; diff is legal while"),
        "{said}"
    );
    let said = fleet.fails(1, &fleet.words(&["plan", &none]));
    assert!(said.contains("net has ended and is aborted"), "{said}");
}

/// Checks that a watch continues after the controller is restarted.
#[test]
fn a_watch_outlives_its_controller_and_prints_only_changes() {
    let mut fleet = FakeFleet::new();
    let spec = SPEC.replace("size: rest", "size: rest, bake: 1h");
    let spec = fleet.spec("net.yaml", &spec);
    fleet.start("net", &spec);
    let mut watch = fleet.follow(&fleet.words(&["status", "net", "--watch"]));
    let mut seen = Vec::new();
    while !seen
        .last()
        .is_some_and(|line: &String| line.contains("next: `rollout promote"))
    {
        let line = watch.line();
        assert!(!line.is_empty(), "it ended after {seen:?}");
        seen.push(line);
    }
    fleet.restart();
    fleet.ok(&fleet.words(&["undo", "net"]));
    let (rest, said, code) = watch.output();
    assert_eq!(code, Some(0), "{said}");
    assert!(rest.contains("net is undone"), "{rest}");
    assert!(
        !rest.contains("keys wanted"),
        "a line that has not changed: {rest}"
    );
    let outages = said
        .matches("the controller does not answer; trying again")
        .count();
    assert_eq!(outages, 1, "{said}");
}

#[test]
fn a_watch_of_a_rollout_that_is_gone_ends() {
    let fleet = FakeFleet::new();
    let said = fleet.fails(1, &fleet.words(&["status", "none", "--watch"]));
    assert!(said.contains("there is no rollout"), "{said}");
}
