// SPDX-License-Identifier: Apache-2.0
//! Exports Prometheus metrics of a replica. Labels are phases, states and outcomes, and the names
//! of at most [`MAX_ROLLOUTS`] rollouts that are active or wait for guests.

use std::fmt;

use patchbay_proto::fleet::v1::GuestPhase;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::controller::Controller;
use crate::rollout::{Header, Member, State};
use crate::view;

/// The maximum number of rollouts that are named in labels. The newest come first.
const MAX_ROLLOUTS: usize = 20;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct InPhase {
    phase: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Guests {
    rollout: String,
    state: &'static str,
}

/// Returns the metrics in the text format of Prometheus.
///
/// # Errors
/// The error of the encoder.
pub fn text(controller: &Controller) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("patchbay_fleet");
    controller.metrics().register(&mut registry);
    now(controller, &mut registry);
    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(text)
}

/// Adds the values that are computed when Prometheus reads the metrics.
fn now(controller: &Controller, registry: &mut Registry) {
    let leads = controller.leadership();
    let leader = Gauge::<i64>::default();
    leader.set(i64::from(leads.is_some()));
    registry.register("leader", "1 while this replica leads", leader);
    let hosts = Gauge::<i64>::default();
    let phases = Family::<InPhase, Gauge>::default();
    let guests = Family::<Guests, Gauge>::default();
    let unreadable = Gauge::<i64>::default();
    if let Some(leads) = leads {
        hosts.set(i64::try_from(leads.hosts().all().len()).unwrap_or(i64::MAX));
        unreadable.set(i64::try_from(leads.unreadable().len()).unwrap_or(i64::MAX));
        let mut all = leads.rollouts();
        all.sort_by_key(|running| std::cmp::Reverse(running.rollout().header().created));
        let mut named = 0;
        for running in all {
            let rollout = running.rollout();
            let phase = rollout.header().phase;
            let phase_name = phase.name();
            phases.get_or_create(&InPhase { phase: phase_name }).inc();
            let is_waiting = |member: &Member| {
                member.is_unknown()
                    || member.state.is_late()
                    || matches!(member.state, State::Releasing { .. })
            };
            if named == MAX_ROLLOUTS
                || !(phase.is_active() || rollout.members().iter().any(is_waiting))
            {
                continue;
            }
            named += 1;
            let name = &rollout.header().name;
            for state in STATES {
                guests.get_or_create(&labels(name, state)).set(0);
            }
            let members = rollout.members().iter();
            for member in members.filter(|member| member.state != State::Superseded) {
                let state = state(rollout.header(), member);
                guests.get_or_create(&labels(name, state)).inc();
            }
        }
    }
    registry.register("hosts", "Hosts that the leader is told of", hosts);
    registry.register("rollouts", "Rollouts by phase", phases);
    registry.register(
        "unreadable_rollouts",
        "Rollouts that are out of service, because a record of theirs cannot be read or stored",
        unreadable,
    );
    registry.register(
        "rollout_guests",
        "Guests by state, of rollouts that are active or wait for guests",
        guests,
    );
}

fn labels(rollout: &str, state: &'static str) -> Guests {
    let rollout = rollout.to_owned();
    Guests { rollout, state }
}

const STATES: [&str; 12] = [
    "skipped",
    "pending",
    "unchanged",
    "changing",
    "as_wanted",
    "unknown",
    "not_yet",
    "without_effect",
    "releasing",
    "released",
    "adopted",
    "forgotten",
];

fn state(header: &Header, member: &Member) -> &'static str {
    match view::guest_phase(header, member) {
        GuestPhase::Skipped => "skipped",
        GuestPhase::Pending => "pending",
        GuestPhase::Unchanged => "unchanged",
        GuestPhase::Changing => "changing",
        GuestPhase::AsWanted => "as_wanted",
        GuestPhase::NotYet if member.state.is_ineffective() => "without_effect",
        GuestPhase::NotYet => "not_yet",
        GuestPhase::Releasing => "releasing",
        GuestPhase::Released => "released",
        GuestPhase::Adopted => "adopted",
        GuestPhase::Forgotten => "forgotten",
        GuestPhase::Unspecified | GuestPhase::Unknown => "unknown",
    }
}
