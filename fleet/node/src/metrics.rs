// SPDX-License-Identifier: Apache-2.0
//! Exports Prometheus metrics. Labels are methods, status codes, other fixed words, and guests,
//! whose number [`MAX_GUESTS`](crate::monitors::MAX_GUESTS) bounds. No label has a value that a
//! client may choose.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use patchbay_access::audit::Audit;
use patchbay_proto::v1;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::samples::Sample;

/// The buckets of pauses, from 10 us to 1 s. A flip takes some tens of microseconds.
const PAUSE_BUCKETS: [f64; 16] = [
    10e-6, 20e-6, 40e-6, 60e-6, 80e-6, 100e-6, 150e-6, 200e-6, 400e-6, 1e-3, 2e-3, 5e-3, 10e-3,
    50e-3, 200e-3, 1.0,
];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Call {
    method: &'static str,
    code: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Method {
    method: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct What {
    what: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AutopsyResult {
    result: &'static str,
}

/// The host's metrics.
#[derive(Clone, Debug, Default)]
pub struct Metrics(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    calls: Family<Call, Counter>,
    denied: Family<Method, Counter>,
    pauses: Histogram,
    sites: Counter,
    reload_failures: Family<What, Counter>,
    autopsies: Family<AutopsyResult, Counter>,
}

impl Default for Inner {
    fn default() -> Self {
        Self {
            calls: Family::default(),
            denied: Family::default(),
            pauses: Histogram::new(PAUSE_BUCKETS),
            sites: Counter::default(),
            reload_failures: Family::default(),
            autopsies: Family::default(),
        }
    }
}

impl Metrics {
    /// Counts a call that has ended.
    pub fn call(&self, method: &'static str, code: &'static str) {
        self.0.calls.get_or_create(&Call { method, code }).inc();
    }

    /// Counts a call that the policy has denied.
    pub fn denied(&self, method: &'static str) {
        self.0.denied.get_or_create(&Method { method }).inc();
    }

    /// Records the time in seconds for which a change of keys stopped a guest.
    pub fn pause(&self, seconds: f64) {
        self.0.pauses.observe(seconds);
    }

    /// Counts the sites that a change of keys has patched.
    pub fn sites(&self, sites: u32) {
        self.0.sites.inc_by(sites.into());
    }

    /// Counts a failed reload of "policy" or "certificates".
    pub fn reload_failed(&self, what: &'static str) {
        self.0.reload_failures.get_or_create(&What { what }).inc();
    }

    /// Counts an attempt to write the autopsy of a panicked guest.
    pub fn autopsy(&self, is_written: bool) {
        let result = match is_written {
            true => "written",
            false => "failed",
        };
        let autopsies = &self.0.autopsies;
        autopsies.get_or_create(&AutopsyResult { result }).inc();
    }

    /// Returns the metrics in the text format of Prometheus.
    ///
    /// # Errors
    /// The error of the encoder.
    pub fn text(
        &self,
        guests: BTreeMap<String, Option<Sample>>,
        audit: &Audit,
    ) -> Result<String, fmt::Error> {
        let mut registry = Registry::with_prefix("patchbayd");
        let inner = &self.0;
        registry.register(
            "calls",
            "gRPC calls by method and status code",
            inner.calls.clone(),
        );
        registry.register(
            "denied_calls",
            "Calls that the policy denied",
            inner.denied.clone(),
        );
        registry.register(
            "patched_sites",
            "Sites that changes of keys patched",
            inner.sites.clone(),
        );
        registry.register(
            "reload_failures",
            "Files that could not be read again on SIGHUP; the old content stays in force",
            inner.reload_failures.clone(),
        );
        registry.register(
            "autopsies",
            "Autopsies of panicked guests, and failed attempts to write one",
            inner.autopsies.clone(),
        );
        registry.register_with_unit(
            "flip_pause",
            "Time that changes of keys stopped their guests, from the request to stop to the resume",
            Unit::Seconds,
            inner.pauses.clone(),
        );
        registry.register_collector(Box::new(Now {
            guests,
            audit: audit.clone(),
        }));
        let mut text = String::new();
        encode(&mut text, &registry)?;
        Ok(text)
    }
}

/// The values that are read when Prometheus requests the metrics.
struct Now {
    guests: BTreeMap<String, Option<Sample>>,
    audit: Audit,
}

impl fmt::Debug for Now {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Now")
    }
}

impl Collector for Now {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let count = ConstGauge::new(i64::try_from(self.guests.len()).unwrap_or(i64::MAX));
        let help = "Guests that the host serves";
        let descriptor = encoder.encode_descriptor("guests", help, None, count.metric_type())?;
        count.encode(descriptor)?;
        let up = ConstGauge::new(0_i64);
        let help = "1 if the guest's monitor answers";
        let mut family = encoder.encode_descriptor("guest_up", help, None, up.metric_type())?;
        for (guest, sample) in &self.guests {
            let up = ConstGauge::new(i64::from(sample.is_some()));
            up.encode(family.encode_family(&[("guest", guest.as_str())])?)?;
        }
        for (name, help, value) in GAUGES {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (guest, sample) in self.answered() {
                let gauge = ConstGauge::new(value(sample));
                gauge.encode(family.encode_family(&[("guest", guest)])?)?;
            }
        }
        self.encode_events(&mut encoder)?;
        for (name, help, value) in [
            (
                "audit_records",
                "Lines of the audit log",
                self.audit.records(),
            ),
            (
                "audit_failures",
                "Lines that could not be written",
                self.audit.failures(),
            ),
        ] {
            let value = ConstCounter::new(value);
            let descriptor = encoder.encode_descriptor(name, help, None, value.metric_type())?;
            value.encode(descriptor)?;
        }
        if let Some(room) = self.audit.room() {
            let room = ConstGauge::new(i64::try_from(room).unwrap_or(i64::MAX));
            let help = "Free bytes on the disk of the audit log; a full disk blocks every change";
            let kind = room.metric_type();
            let descriptor = encoder.encode_descriptor("audit_free_bytes", help, None, kind)?;
            room.encode(descriptor)?;
        }
        Ok(())
    }
}

impl Now {
    fn answered(&self) -> impl Iterator<Item = (&str, &Sample)> {
        let guests = self.guests.iter();
        guests.filter_map(|(guest, sample)| Some((guest.as_str(), sample.as_ref()?)))
    }

    fn encode_events(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let counter = MetricType::Counter;
        let help = "Events of tracepoints that were sent to clients";
        let mut family = encoder.encode_descriptor("guest_trace_events", help, None, counter)?;
        for (guest, sample) in self.answered() {
            let events = ConstCounter::new(sample.events.events);
            events.encode(family.encode_family(&[("guest", guest)])?)?;
        }
        let help = "Events of tracepoints that were lost, by cause";
        let mut family =
            encoder.encode_descriptor("guest_trace_lost_events", help, None, counter)?;
        for (guest, sample) in self.answered() {
            let lost = sample.events.losses.unwrap_or_default();
            for (cause, count) in [
                ("overwritten", lost.overwritten),
                ("slow_client", lost.slow_client),
                ("flood", lost.flood),
                ("malformed", lost.malformed),
            ] {
                let labels = [("guest", guest), ("cause", cause)];
                ConstCounter::new(count).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}

/// A gauge for each guest that answers, as its name, its help text and its value.
type GuestGauge = (&'static str, &'static str, fn(&Sample) -> i64);

const GAUGES: [GuestGauge; 6] = [
    (
        "guest_registered",
        "1 if the guest's tables of static keys are known",
        |sample| {
            let state = sample.guest.guest_status().registration();
            i64::from(state == v1::RegistrationState::Registered)
        },
    ),
    (
        "guest_paused",
        "1 while an operator, or an undo that is incomplete, holds the guest paused",
        |sample| i64::from(sample.guest.guest_status().state() == v1::GuestState::Paused),
    ),
    (
        "guest_agent_connected",
        "1 if the guest's agent is connected",
        |sample| i64::from(sample.guest.guest_status().agent_connected),
    ),
    ("guest_keys", "Static keys of the guest", |sample| {
        sample.guest.keys.into()
    }),
    (
        "guest_revision",
        "Changes of keys that the guest's service has made or seen since it started",
        |sample| i64::try_from(sample.guest.revision).unwrap_or(i64::MAX),
    ),
    (
        "guest_trace_streams",
        "Clients that read events of the guest's tracepoints",
        |sample| sample.events.streams.into(),
    ),
];
