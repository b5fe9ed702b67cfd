// SPDX-License-Identifier: Apache-2.0
//! Checks that every metric that the dashboard and the alert rules name is exported.

#[path = "rollouts/support.rs"]
#[allow(dead_code)]
mod support;

use std::collections::BTreeSet;

use patchbay_access::audit::{Audit, AuditLog};
use patchbay_fleet::runner::Command;
use patchbay_fleet::scrape;
use patchbay_node::metrics::Metrics;
use patchbay_node::samples::Sample;
use support::{Fleet, is_over, spec, tell, wait_for};

const DASHBOARD: &str = include_str!("../dashboards/grafana.json");
const ALERTS: &str = include_str!("../dashboards/alerts.yaml");

/// Returns the names of samples, and of families that have no samples at present.
fn exported(text: &str) -> BTreeSet<&str> {
    let names = text
        .lines()
        .filter_map(|line| match line.strip_prefix("# TYPE ") {
            Some(family) => family.split(' ').next(),
            None => line.split(['{', ' ']).next(),
        });
    names.collect()
}

fn named(text: &str) -> BTreeSet<&str> {
    let words = text.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
    let ours = |word: &&str| word.starts_with("patchbayd_") || word.starts_with("patchbay_fleet_");
    words.filter(ours).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn dashboard_and_alerts_name_metrics_that_are_exported() {
    let fleet = Fleet::start(1, 2).await;
    let replica = fleet.replica("one");
    let running = replica.start("net", &spec("waves: [{size: rest}]")).await;
    wait_for(&running, is_over).await;
    tell(&running, Command::Undo).await;
    wait_for(&running, |phase| {
        !phase.is_active() && phase.name() == "undone"
    })
    .await;
    replica
        .start("next", &spec("waves: [{size: 1, bake: 1h}, {size: rest}]"))
        .await;
    let controller = scrape::text(&replica.controller).expect("encoded");
    assert!(
        controller.contains("patchbay_fleet_rollout_guests{rollout=\"next\",state=\"pending\"} 1"),
        "{controller}"
    );
    assert!(
        controller.contains("patchbay_fleet_guest_changes_total{op=\"release\",outcome=\"ok\"} 2"),
        "{controller}"
    );

    let folder = tempfile::tempdir().expect("temporary folder");
    let log = AuditLog::open(&folder.path().join("audit.log")).expect("opens");
    let audit = Audit::start(log).expect("a thread");
    let host = Metrics::default();
    host.call("Method", "OK");
    host.denied("Method");
    host.reload_failed("policy");
    let guests = [("web-1".to_owned(), Some(Sample::default()))];
    let host = host.text(guests.into(), &audit).expect("encoded");

    let mut exported = exported(&controller);
    exported.extend(self::exported(&host));
    for text in [DASHBOARD, ALERTS] {
        let named = named(text);
        assert!(named.len() >= 8, "{named:?}");
        let unknown: Vec<_> = named.difference(&exported).collect();
        assert!(unknown.is_empty(), "{unknown:?} are not among {exported:?}");
    }
    serde_json::from_str::<serde_json::Value>(DASHBOARD).expect("JSON");
    serde_yaml_ng::from_str::<serde_yaml_ng::Value>(ALERTS).expect("YAML");
}
