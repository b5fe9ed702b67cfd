// SPDX-License-Identifier: Apache-2.0
//! Traces a guest whose user space hangs: its agent is stopped, and a real-time loop keeps all
//! other processes off its only CPU. Firing and parking still work, because they only flip a key.
//! The ring buffer keeps the events until the agent can read them.
#![forbid(unsafe_code)]

use anyhow::{Result, ensure};
use clap::Parser;
use patchbay_examples::{counted, environment, step};
use patchbay_tests::{Guest, TestGuest};

/// Timer interrupts continue even if user space hangs.
const EVENT: &str = "irq:softirq_entry";
const SECONDS: u32 = 3;

/// Boots a Linux guest, makes it sick, and traces it.
#[derive(Parser)]
struct Arguments {}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    Arguments::parse();
    let environment = environment("sick-guest")?;
    step("Boot a Linux guest with the agent and 1 vCPU, and arm an event while it is healthy");
    let mut guest = Guest::builder(&environment).agent().boot().await?;
    guest.assert_registered().await?;
    guest.wait_for_agent().await?;
    let mut events = guest.events().await?;
    guest.arm(&[EVENT]).await?;
    let before = guest.recorded().await?;

    step("Stop the agent, and occupy the CPU for some seconds");
    guest.shell("kill -STOP $(pidof patchbay-agent)").await?;
    guest.console().type_line(&format!("hog {SECONDS}")).await?;

    step("Fire from outside, and park again: nothing in the guest has to run");
    let report = guest.fire(&[EVENT]).await?.report.unwrap_or_default();
    println!(
        "   Fired: {} patched, key count {}.",
        counted(report.sites_patched, "site"),
        guest.key("softirq_entry").await?.count
    );
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    let report = guest.park(&[EVENT]).await?.report.unwrap_or_default();
    println!(
        "   Parked: {} patched, key count {}.",
        counted(report.sites_patched, "site"),
        guest.key("softirq_entry").await?.count
    );
    ensure!(report.paused, "the key was not on");

    step("When the loop has ended, the ring buffer still has the events");
    let recorded = guest.recorded().await? - before;
    println!("   The guest's kernel recorded {recorded} events while nothing else could run.");
    ensure!(recorded > 0, "no event was recorded");

    step("Continue the agent: the events arrive");
    guest.shell("kill -CONT $(pidof patchbay-agent)").await?;
    let first = events.until(|event| event.name == EVENT).await?;
    println!(
        "   The first of them is from {} ms after the guest's boot.",
        first[0].guest_time_ns / 1_000_000
    );
    guest.disarm(&[EVENT]).await?;
    guest.assert_no_warnings().await?;
    step("Power the guest off");
    ensure!(guest.power_off().await?.success(), "the monitor failed");
    println!("\nThe sick guest followed every step.");
    Ok(())
}
