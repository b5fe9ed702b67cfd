// SPDX-License-Identifier: Apache-2.0

use super::*;
use crate::rollout::{AgentLimits, ErrorsOf, WaveGateKind};

const FULL: &str = r#"title: New receive path
selector:
  labels: {tier: web}
  guests: ["web-*"]
  kernel_release: "6.12.*"
claims:
  - want: on
    keys: ["net_*", "!net_debug"]
waves:
  - {name: canary, size: 1, bake: 10m}
  - {size: 10%, bake: 1h}
  - {size: rest}
spread_over: rack
max_concurrent:
  count: 50
  percent: 10
  per_domain: {label: rack, count: 5}
gates:
  - {max_errors: 2, of: rollout, on_failure: abort}
  - {pause_p99: 500us, on_failure: pause}
  - {command: web-probe, timeout: 5s, interval: 30s, patience: 15m, on_failure: pause}
  - {agent_health: {max_new_warnings: 0, max_pressure: {memory: 20}, max_unhealthy: 10}, on_failure: abort}
  - {grpc: {url: "http://[::1]:50051", service: web}, timeout: 3s, on_failure: abort}
  - {prometheus: {url: "http://prom:9090/base", query: 'rate(errors[1m])', below: 1}, on_failure: pause}
freeze:
  - {from: "2026-12-24T00:00:00Z", until: "2026-12-27T00:00:00Z", reason: holidays}
ttl: 7d
approvals: 2
min_success: 3
after_reboot: leave
"#;

#[test]
fn a_full_spec_is_read() {
    let spec = Spec::parse(FULL).expect("right");
    assert_eq!(spec.claims.0[0].want, Want::On);
    let sizes: Vec<Size> = spec.waves.0.iter().map(|wave| wave.size).collect();
    assert_eq!(sizes, [Size::Count(1), Size::Percent(10), Size::Rest]);
    assert!(spec.selector.guests[0].matches("web-17"));
    assert!(!spec.selector.guests[0].matches("db-17"));
    let policy = spec.policy();
    assert_eq!(policy.caps.per_domain, Some(5));
    assert_eq!(
        policy.gates[1].kind,
        WaveGateKind::PauseP99 { budget_us: 500 }
    );
    let command = WaveGateKind::NamedCommand {
        name: "web-probe".to_owned(),
        timeout_ms: 5000,
    };
    assert_eq!(policy.gates[2].kind, command);
    let gates: Vec<&WaveGateKind> = policy.gates[3..].iter().map(|gate| &gate.kind).collect();
    let agents = WaveGateKind::AgentHealth {
        limits: AgentLimits {
            new_warnings: Some(0),
            pressure: [("memory".to_owned(), 20)].into(),
            unhealthy_percent: 10,
        },
        timeout_ms: 60_000,
    };
    let grpc = WaveGateKind::Grpc {
        url: "http://[::1]:50051".to_owned(),
        service: "web".to_owned(),
        timeout_ms: 3000,
    };
    let prometheus = WaveGateKind::Prometheus {
        url: "http://prom:9090/base".to_owned(),
        query: "rate(errors[1m])".to_owned(),
        above: None,
        below: Some(1.0),
        timeout_ms: 60_000,
    };
    assert_eq!(gates, [&agents, &grpc, &prometheus]);
    assert_eq!(policy.freezes[0].from, 1_798_070_400_000);
    assert_eq!((policy.approvals, policy.min_success), (2, 3));
    assert_eq!(policy.after_reboot, AfterReboot::Leave);
    let errors = WaveGateKind::Errors {
        max_percent: 2,
        of: ErrorsOf::Rollout,
    };
    assert_eq!(policy.gates[0].kind, errors);
    let times: Vec<(u64, u64)> = policy.gates[1..4]
        .iter()
        .map(|gate| (gate.interval_ms, gate.patience_ms))
        .collect();
    assert_eq!(times[1..], [(30_000, 900_000), (60_000, 600_000)]);
}

/// Replaces a line of the full spec, and returns the position and the message of the error.
fn refused(line: &str, with: &str) -> (usize, usize, String) {
    assert!(FULL.contains(line), "{line}");
    match Spec::parse(&FULL.replace(line, with)) {
        Err(SpecError::At {
            line,
            column,
            message,
        }) => (line, column, message),
        other => panic!("{with}: {other:?}"),
    }
}

#[test]
fn errors_have_line_and_column() {
    let cases = [
        ("ttl: 7d", "ttl: soon", 27, "is no duration"),
        (
            "ttl: 7d",
            "ttl: 999999999999999999999d",
            27,
            "is no duration",
        ),
        ("ttl: 7d", "tll: 7d", 27, "unknown field `tll`"),
        (
            "ttl: 7d",
            "ttl: 7",
            27,
            "7 has no unit; write for example 7s, 7m",
        ),
        ("bake: 10m", "bake: 10", 10, "10 has no unit"),
        ("timeout: 5s", "timeout: 5", 21, "5 has no unit"),
        ("\"6.12.*\"", "6.12", 5, "expected text; put it in quotes"),
        ("  count: 50", "  cuont: 50", 15, "unknown field `cuont`"),
        ("  percent: 10", "  percent: 101", 16, "is no percentage"),
        ("  count: 50", "  count: 0", 15, "at least 1"),
        ("size: 10%", "size: 0%", 11, "is no size"),
        ("size: 10%", "size: -1", 11, ""),
        (
            "  - want: on",
            "  - want: maybe",
            7,
            "unknown variant `maybe`",
        ),
        ("  - want: on", "  - op: enable", 7, "unknown field `op`"),
        ("\"net_*\", \"!net_debug\"", "", 8, "the list is empty"),
        (
            "    keys: [",
            "    tracepoints: [a]\n    keys: [",
            7,
            "a claim needs either `keys` or `tracepoints`",
        ),
        (
            "  - want: on\n    keys",
            "  - want: held\n    tracepoints",
            7,
            "is not counted",
        ),
        (
            "claims:\n  - want: on\n",
            "ops:\n  - op: enable\n",
            6,
            "replaced by `claims`",
        ),
        ("size: 10%", "size: rest", 9, "only the last wave"),
        ("2026-12-27T", "2026-12-23T", 26, "before it ends"),
        ("2026-12-27T", "2026-13-27T", 26, "is no moment"),
        ("timeout: 5s, ", "max_errors: 1, ", 21, "a gate is one of"),
        ("\"web-*\"", "\"web-[\"", 4, "unclosed"),
        (
            "max_new_warnings: 0, max_pressure: {memory: 20}, ",
            "",
            22,
            "agent_health limits nothing",
        ),
        ("{memory: 20}", "{disk: 20}", 22, "unknown field `disk`"),
        ("{memory: 20}", "{memory: 101}", 22, "is no percentage"),
        ("{max_new_warnings: 0", "{max_new_warnings: -1", 22, ""),
        ("http://[::1]:50051", "https://probe", 23, "is no URL"),
        ("http://[::1]:50051", "probe:50051", 23, "is no URL"),
        ("http://prom:9090/base", "http://prom/?a=b", 24, "is no URL"),
        (", below: 1", "", 24, "give above, below or both"),
        (", below: 1", ", above: 2, below: 1", 24, "no number is"),
        (", below: 1", ", below: .nan", 24, "cannot be compared"),
        ("'rate(errors[1m])'", "''", 24, "the query is empty"),
        (
            "max_errors: 2,",
            "max_errors: 2, timeout: 1s,",
            19,
            "patience belong to",
        ),
        ("of: rollout", "patience: 1s", 19, "patience belong to"),
        ("of: rollout", "of: fleet", 19, "unknown variant `fleet`"),
        (
            "web-probe",
            "[/bin/probe, web]",
            21,
            "folder of its option --gates",
        ),
        ("web-probe", "[]", 21, "folder of its option --gates"),
        ("web-probe", "../probe", 21, "is a name of 1 to 64 letters"),
        ("web-probe", "''", 21, "is a name of 1 to 64 letters"),
        ("web-probe", "7", 21, "a gate's `command` is a name"),
        ("timeout: 5s", "of: wave", 21, "`of` belongs to max_errors"),
    ];
    for (line, with, expected, message) in cases {
        let found = refused(line, with);
        assert_eq!(found.0, expected, "{with}: {found:?}");
        assert!(
            found.1 > 0 && found.2.contains(message),
            "{with}: {found:?}"
        );
    }
}

#[test]
fn tracepoints_are_claimed_on_and_off() {
    let claims = "  - want: on\n    keys: [\"net_*\", \"!net_debug\"]";
    assert!(FULL.contains(claims));
    let set = "  - {want: on, tracepoints: [\"sched:*\", \"!sched_switch\"]}\n  - {want: off, tracepoints: [b]}";
    let spec = Spec::parse(&FULL.replace(claims, set)).expect("right");
    let [first, second] = &spec.claims.0[..] else {
        panic!("{:?}", spec.claims);
    };
    assert_eq!((first.want, first.of), (Want::On, ClaimOf::Tracepoints));
    assert_eq!(first.patterns, ["sched:*", "!sched_switch"]);
    assert_eq!((second.want, second.of), (Want::Off, ClaimOf::Tracepoints));
}

#[test]
fn an_empty_selector_is_refused() {
    let text = "selector: {}\nclaims: [{want: held, keys: [a]}]\nwaves: [{size: rest}]\n";
    let error = Spec::parse(text).expect_err("empty").to_string();
    assert!(error.starts_with("line 1, column 11: "), "{error}");
    assert!(error.contains("selects nothing"), "{error}");
}

#[test]
fn hostile_yaml_is_refused() {
    let large = "a".repeat(10 << 20);
    let bytes = large.len();
    assert_eq!(Spec::parse(&large), Err(SpecError::TooLarge { bytes }));
    let mut bomb = "a: &a [x]\n".to_owned();
    for index in 1..40 {
        bomb += &format!("b{index}: &b{index} [*a, *a]\n");
    }
    assert!(Spec::parse(&bomb).is_err());
    assert!(Spec::parse(&"[".repeat(100_000)).is_err());
    assert!(Spec::parse("").is_err());
}

#[test]
fn a_glob_that_takes_much_memory_is_refused() {
    for (length, is_taken) in [(512, true), (513, false)] {
        assert_eq!(Glob::try_from("*?".repeat(length)).is_ok(), is_taken);
    }
    let longest = Glob::try_from("*?".repeat(512)).expect("taken");
    assert!(longest.matches(&"x".repeat(600)));
}
