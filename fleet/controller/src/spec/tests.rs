// SPDX-License-Identifier: Apache-2.0

use super::*;
use crate::rollout::{AgentLimits, WaveGateKind};

const FULL: &str = r#"title: New receive path
selector:
  labels: {tier: web}
  guests: ["web-*"]
  kernel_release: "6.12.*"
ops:
  - op: enable
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
  - {max_errors: 2, on_failure: abort}
  - {pause_p99: 500us, on_failure: pause}
  - {command: ["/bin/probe", "web"], timeout: 5s, on_failure: pause}
  - {agent_health: {max_new_warnings: 0, max_pressure: {memory: 20}}, on_failure: abort}
  - {grpc: {url: "http://[::1]:50051", service: web}, timeout: 3s, on_failure: abort}
  - {prometheus: {url: "http://prom:9090/base", query: 'rate(errors[1m])', below: 1}, on_failure: pause}
freeze:
  - {from: "2026-12-24T00:00:00Z", until: "2026-12-27T00:00:00Z", reason: holidays}
ttl: 7d
approvals: 2
"#;

#[test]
fn a_full_spec_is_read() {
    let spec = Spec::parse(FULL).expect("right");
    assert_eq!(spec.ops.0[0].op, OpKind::Enable);
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
    let gates: Vec<&WaveGateKind> = policy.gates[3..].iter().map(|gate| &gate.kind).collect();
    let agents = WaveGateKind::AgentHealth {
        limits: AgentLimits {
            new_warnings: Some(0),
            pressure: [("memory".to_owned(), 20)].into(),
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
    assert_eq!(policy.approvals, 2);
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
            "  - op: enable",
            "  - op: toggle",
            7,
            "unknown variant `toggle`",
        ),
        ("\"net_*\", \"!net_debug\"", "", 8, "the list is empty"),
        ("- op: enable", "- op: fire", 7, "fire and park need `tr"),
        (
            "    keys: [",
            "    tracepoints: [a]\n    keys: [",
            7,
            "enable and disable need `keys` and no `tracepoints`",
        ),
        ("    keys: [", "    tracepoints: [", 7, "need `keys`"),
        ("size: 10%", "size: rest", 9, "only the last wave"),
        ("2026-12-27T", "2026-12-23T", 26, "before it ends"),
        ("2026-12-27T", "2026-13-27T", 26, "is no moment"),
        ("timeout: 5s, ", "max_errors: 1, ", 21, "a gate is one of"),
        ("\"web-*\"", "\"web-[\"", 4, "unclosed"),
        (
            "max_new_warnings: 0, max_pressure: {memory: 20}",
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
            "timeout belongs",
        ),
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
fn tracepoints_are_fired_and_parked() {
    let ops = "  - op: enable\n    keys: [\"net_*\", \"!net_debug\"]";
    assert!(FULL.contains(ops));
    let set = "  - {op: fire, tracepoints: [\"sched:*\", \"!sched_switch\"]}\n  - {op: park, tracepoints: [b]}";
    let spec = Spec::parse(&FULL.replace(ops, set)).expect("right");
    assert_eq!(spec.ops.0[0].op, OpKind::Fire);
    assert_eq!(spec.ops.0[0].patterns, ["sched:*", "!sched_switch"]);
    assert_eq!(spec.ops.0[1].op, OpKind::Park);
}

#[test]
fn an_empty_selector_is_refused() {
    let text = "selector: {}\nops: [{op: inc, keys: [a]}]\nwaves: [{size: rest}]\n";
    let error = Spec::parse(text).expect_err("empty").to_string();
    assert!(error.starts_with("line 1, column 11: "), "{error}");
    assert!(error.contains("selects nothing"), "{error}");
}

#[test]
fn counting_ops_do_not_mix_with_switching_ones() {
    let more = "    keys: [\"net_*\", \"!net_debug\"]\n  - {op: inc, keys: [b]}";
    let found = refused("    keys: [\"net_*\", \"!net_debug\"]", more);
    assert_eq!((found.0, found.2.contains("two rollouts")), (6, true));
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
