// SPDX-License-Identifier: Apache-2.0
//! Gives a guest the spinlock that fits its vCPUs: a fair lock while they run without waiting, an
//! unfair lock while they wait for CPUs. KVM_HINTS_REALTIME tells the guest once, at boot. This
//! program reacts whenever the share of CPU time changes, without the guest's cooperation.
#![forbid(unsafe_code)]

mod delay;
mod governor;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use patchbay_proto::v1::guest_service_client::GuestServiceClient;
use patchbay_proto::v1::static_keys_service_client::StaticKeysServiceClient;
use patchbay_proto::v1::{
    DescribeGuestRequest, GetStaticKeyRequest, KeyOp, KeyUpdate, ReleaseHoldsRequest,
    RenewHoldsRequest, UpdateStaticKeysRequest,
};
use tokio::signal::unix::{SignalKind, signal};
use tonic::transport::Channel;

use crate::delay::RunDelay;
use crate::governor::{Governor, Lock, Thresholds};

/// While the key is on, `queued_spin_lock_slowpath()` takes the lock by test-and-set
/// (`virt_spin_lock()`, arch/x86/include/asm/qspinlock.h).
const KEY: &str = "virt_spin_lock_key";
/// The number of periods after which the service releases the reference if this program is gone.
const TTL_PERIODS: u32 = 20;

/// Switches a guest's spinlocks according to its vCPUs' run delay.
///
/// The guest's kernel must use native spinlocks with the key off: boot it with nopvspin.
#[derive(Parser)]
#[command(name = "overcommit")]
struct Arguments {
    /// API socket of the guest; its service must allow changes of guarded keys
    #[arg(long)]
    socket: PathBuf,
    /// Process id of the guest's monitor
    #[arg(long)]
    pid: u32,
    /// Interval of readings of the run delay, in milliseconds
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(10..=3_600_000))]
    period: u32,
    /// Share of time that a vCPU waits for a CPU, on average, above which the lock is unfair
    #[arg(long, default_value_t = 0.2)]
    high: f64,
    /// Share below which the lock is fair again
    #[arg(long, default_value_t = 0.05)]
    low: f64,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let thresholds = Thresholds {
        high: arguments.high,
        low: arguments.low,
    };
    ensure!(
        0.0 <= thresholds.low && thresholds.low <= thresholds.high && thresholds.high <= 1.0,
        "--low {} and --high {} are no thresholds; give 0 <= LOW <= HIGH <= 1",
        thresholds.low,
        thresholds.high
    );
    let channel = patchbay_tests::connect(&arguments.socket)
        .await
        .with_context(|| {
            format!(
                "no process serves {}; give the guest's API socket",
                arguments.socket.display()
            )
        })?;
    let guest = GuestServiceClient::new(channel.clone())
        .describe_guest(DescribeGuestRequest::default())
        .await
        .context("the guest cannot be described")?;
    let mut keys = StaticKeysServiceClient::new(channel);
    let key = keys.get_static_key(GetStaticKeyRequest {
        name: KEY.to_owned(),
        ..Default::default()
    });
    let key = key.await.with_context(|| format!("{KEY} cannot be read"))?;
    must_be_off(key.into_inner().key.context("the answer has no key")?.count)?;
    let mut delay = RunDelay::of(arguments.pid, guest.into_inner().vcpus.max(1))?;
    let period = Duration::from_millis(arguments.period.into());
    let mut switch = Switch {
        keys,
        ttl: period * TTL_PERIODS,
        hold: None,
        renewed: Instant::now(),
    };
    let followed = follow(&mut delay, Governor::new(thresholds), &mut switch, period).await;
    let released = switch.set(Lock::Fair).await;
    followed?;
    released.map(drop)
}

/// Fails if the guest's kernel has turned the key on. The kernel's reference would keep the unfair
/// lock on regardless of this program.
fn must_be_off(count: i32) -> Result<()> {
    ensure!(
        count == 0,
        "{KEY} has count {count}, expected 0: the guest's kernel, or a client that has died, holds it on; \
         boot the guest with nopvspin, or turn the key off with `patchbay keys disable --force \
         --allow-guarded {KEY}`"
    );
    Ok(())
}

/// Runs until a signal arrives or the monitor ends.
async fn follow(
    delay: &mut RunDelay,
    mut governor: Governor,
    switch: &mut Switch,
    period: Duration,
) -> Result<()> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut ticks = tokio::time::interval(period);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    ticks.tick().await;
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            _ = interrupt.recv() => return Ok(()),
            _ = terminate.recv() => return Ok(()),
        }
        let share = delay.share()?;
        if switch.set(governor.follow(share)).await? {
            println!(
                "vCPUs wait for CPUs {:.0} % of the time: {} lock",
                100.0 * share,
                switch.name()
            );
        }
    }
}

/// Switches the guest's lock. The key's reference has a time to live, so a guest does not keep the
/// unfair lock if this program is killed.
struct Switch {
    keys: StaticKeysServiceClient<Channel>,
    ttl: Duration,
    /// Id of the hold on the key.
    hold: Option<String>,
    renewed: Instant,
}

impl Switch {
    fn name(&self) -> &'static str {
        if self.hold.is_some() {
            "unfair"
        } else {
            "fair"
        }
    }

    /// Returns whether the lock has changed.
    async fn set(&mut self, lock: Lock) -> Result<bool> {
        let ttl = Some(prost_types::Duration::try_from(self.ttl)?);
        match (lock, self.hold.take()) {
            (Lock::Fair, None) => Ok(false),
            (Lock::Unfair, Some(id)) if self.renewed.elapsed() < self.ttl / 2 => {
                self.hold = Some(id);
                Ok(false)
            }
            (Lock::Unfair, Some(id)) => {
                self.renewed = Instant::now();
                let request = RenewHoldsRequest {
                    ids: vec![id],
                    ttl,
                    ..Default::default()
                };
                let renewed = self.keys.renew_holds(request).await;
                let holds = renewed
                    .context("the hold cannot be renewed")?
                    .into_inner()
                    .holds;
                self.hold = holds.into_iter().next().map(|hold| hold.id);
                Ok(false)
            }
            (Lock::Unfair, None) => {
                let request = UpdateStaticKeysRequest {
                    updates: vec![KeyUpdate {
                        name: KEY.to_owned(),
                        op: KeyOp::Inc.into(),
                        ..Default::default()
                    }],
                    allow_guarded: true,
                    reason: "vCPUs wait for CPUs".to_owned(),
                    ttl,
                    ..Default::default()
                };
                self.renewed = Instant::now();
                let updated = self.keys.update_static_keys(request).await;
                let updated = updated
                    .with_context(|| format!("{KEY} cannot be enabled"))?
                    .into_inner();
                let result = updated.results.into_iter().next();
                self.hold = Some(result.context("the update has no result")?.hold_id);
                Ok(true)
            }
            (Lock::Fair, Some(id)) => {
                let request = ReleaseHoldsRequest {
                    ids: vec![id],
                    ..Default::default()
                };
                let released = self.keys.release_holds(request).await;
                released.with_context(|| format!("{KEY} cannot be disabled"))?;
                Ok(true)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_is_on_already_is_left_alone() {
        must_be_off(0).unwrap();
        for count in [1, 2, -1] {
            let error = must_be_off(count).unwrap_err().to_string();
            assert!(error.contains("nopvspin"), "{error}");
        }
    }
}
