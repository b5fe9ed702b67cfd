// SPDX-License-Identifier: Apache-2.0
//! Counts what a replica does.

use std::sync::Arc;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

/// The buckets of pauses, from 10 us to 1 s, as in `patchbayd`.
const PAUSE_BUCKETS: [f64; 16] = [
    10e-6, 20e-6, 40e-6, 60e-6, 80e-6, 100e-6, 150e-6, 200e-6, 400e-6, 1e-3, 2e-3, 5e-3, 10e-3,
    50e-3, 200e-3, 1.0,
];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Change {
    op: &'static str,
    outcome: &'static str,
}

/// The counters that are maintained while the replica runs.
#[derive(Clone, Debug, Default)]
pub struct Metrics(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    changes: Family<Change, Counter>,
    pauses: Histogram,
    gates_closed: Counter,
    store_waits: Counter,
    archive_failures: Counter,
    terms: Counter,
    broken_glass: Counter,
    webhook_failures: Counter,
    webhook_lost: Counter,
}

impl Default for Inner {
    fn default() -> Self {
        Self {
            changes: Family::default(),
            pauses: Histogram::new(PAUSE_BUCKETS),
            gates_closed: Counter::default(),
            store_waits: Counter::default(),
            archive_failures: Counter::default(),
            terms: Counter::default(),
            broken_glass: Counter::default(),
            webhook_failures: Counter::default(),
            webhook_lost: Counter::default(),
        }
    }
}

impl Metrics {
    /// Counts a call that sends claims. `pause_us` is the pause in microseconds if they are made.
    pub fn claimed(&self, pause_us: Option<u64>) {
        self.change("claim", pause_us.is_some());
        if let Some(pause_us) = pause_us {
            #[allow(clippy::cast_precision_loss)]
            self.0.pauses.observe(pause_us as f64 / 1e6);
        }
    }

    /// Counts a call that ends claims.
    pub fn released(&self, is_ok: bool) {
        self.change("release", is_ok);
    }

    fn change(&self, op: &'static str, is_ok: bool) {
        let outcome = if is_ok { "ok" } else { "failed" };
        self.0.changes.get_or_create(&Change { op, outcome }).inc();
    }

    /// Counts an external gate that is closed.
    pub fn gate_closed(&self) {
        self.0.gates_closed.inc();
    }

    /// Counts a rollout that is blocked because the store cannot be reached.
    pub fn waits_for_store(&self) {
        self.0.store_waits.inc();
    }

    /// Counts a rollout that is not deleted, because it cannot be written to a file.
    pub fn archive_failed(&self) {
        self.0.archive_failures.inc();
    }

    /// Counts a start or a promotion without the required approvals.
    pub fn glass_broken(&self) {
        self.0.broken_glass.inc();
    }

    /// Counts the beginning of a term of this replica as leader.
    pub fn term(&self) {
        self.0.terms.inc();
    }

    /// Counts a failed attempt to deliver an event to a webhook.
    pub fn webhook_failed(&self) {
        self.0.webhook_failures.inc();
    }

    /// Counts events that were given up or dropped before a webhook accepted them.
    pub fn webhook_lost(&self, events: u64) {
        self.0.webhook_lost.inc_by(events);
    }

    /// Adds the counters to a registry.
    pub fn register(&self, registry: &mut Registry) {
        let inner = &self.0;
        registry.register(
            "guest_changes",
            "Calls to guests that make or end claims",
            inner.changes.clone(),
        );
        registry.register_with_unit(
            "claim_pause",
            "Time that changes stopped their guests, as the guests report it",
            Unit::Seconds,
            inner.pauses.clone(),
        );
        registry.register(
            "gate_failures",
            "External gates that failed",
            inner.gates_closed.clone(),
        );
        registry.register(
            "store_retries",
            "Writes that were tried again because the store did not answer",
            inner.store_waits.clone(),
        );
        registry.register(
            "archive_failures",
            "Rollouts that were not deleted, because they could not be written to --archive",
            inner.archive_failures.clone(),
        );
        registry.register(
            "terms",
            "Times that this replica began to lead",
            inner.terms.clone(),
        );
        registry.register(
            "broken_glass",
            "Starts and promotions without the required approvals",
            inner.broken_glass.clone(),
        );
        registry.register(
            "webhook_failures",
            "Failed attempts to deliver an event to a webhook",
            inner.webhook_failures.clone(),
        );
        registry.register(
            "webhook_lost_events",
            "Events that were given up or dropped before a webhook accepted them",
            inner.webhook_lost.clone(),
        );
    }
}
