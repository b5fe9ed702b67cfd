// SPDX-License-Identifier: Apache-2.0
//! Runs the example from the kernel's static-keys documentation, with the key flipped by the
//! hypervisor. Each step changes the guest from outside and then checks the effect in the guest.
//! The exit status is 0 if all checks pass.
#![forbid(unsafe_code)]

use anyhow::{Result, ensure};
use clap::Parser;
use patchbay_examples::{Operator, environment, open_shell, step};
use patchbay_proto::v1::StaticKey;
use patchbay_tests::Guest;

const KEY: &str = "getppid_key";
const MESSAGE: &str = "I am the true branch";

/// Boots a Linux guest and flips the branch in its getppid() from outside.
#[derive(Parser)]
struct Arguments {
    /// Keep the guest running afterwards and open a shell to play with it
    #[arg(long)]
    keep: bool,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let environment = environment("getppid")?;

    step("Boot a Linux guest with 2 vCPUs");
    let mut guest = Guest::builder(&environment).vcpus(2).boot().await?;
    let description = guest.assert_registered().await?;
    println!(
        "   Linux {} registered {} keys with {} sites.",
        description.guest_status().kernel_release,
        description.keys,
        description.sites
    );

    step("In the guest, a loop calls getppid(); kernel messages go to the console");
    guest.shell("dmesg -n 8").await?;
    guest.shell("getppid_loop 20 &").await?;
    expect_silence(&mut guest).await?;

    let patchbay = Operator::new(&environment.cli, guest.socket());
    step("List some of the guest's keys");
    patchbay.run(&["keys", "list", "sched_*", KEY]).await?;
    patchbay.run(&["keys", "get", KEY]).await?;

    step("Enable getppid_key from the host");
    let before = guest.key(KEY).await?;
    patchbay.run(&["keys", "inc", KEY]).await?;
    patchbay.run(&["keys", "get", KEY]).await?;
    let after = guest.key(KEY).await?;
    expect_count(&mut guest, 1).await?;
    expect_flipped(&before, &after)?;
    expect_messages(&mut guest).await?;

    step("Take a second reference: nothing to patch, no pause");
    patchbay.run(&["keys", "inc", KEY]).await?;
    expect_count(&mut guest, 2).await?;
    expect_messages(&mut guest).await?;

    step("Drop one reference: still on");
    patchbay.run(&["keys", "dec", KEY]).await?;
    expect_count(&mut guest, 1).await?;
    expect_messages(&mut guest).await?;

    step("Drop the other: off again, and the console falls silent");
    patchbay.run(&["keys", "dec", KEY]).await?;
    patchbay.run(&["keys", "get", KEY]).await?;
    expect_count(&mut guest, 0).await?;
    let last = guest.key(KEY).await?;
    ensure!(
        bytes(&last) == bytes(&before),
        "the sites are not what they were before the first flip"
    );
    expect_silence(&mut guest).await?;
    guest.assert_no_warnings().await?;

    if arguments.keep {
        step("The guest is yours until you leave this shell");
        println!("   patchbay keys list 'sched_*'");
        println!("   patchbay keys inc {KEY}");
        println!("   patchbay guest console");
        open_shell(&environment.cli, guest.socket()).await?;
    }
    step("Reset the guest, which ends the monitor");
    let status = guest.power_off().await?;
    ensure!(status.success(), "the monitor ended with {status}");
    println!("\nThe guest followed every step.");
    Ok(())
}

fn bytes(key: &StaticKey) -> Vec<&[u8]> {
    key.sites
        .iter()
        .map(|site| site.current_bytes.as_slice())
        .collect()
}

/// Fails unless every site has changed from its NOP to its JMP.
fn expect_flipped(before: &StaticKey, after: &StaticKey) -> Result<()> {
    ensure!(!before.sites.is_empty(), "{KEY} has no sites");
    for (before, after) in before.sites.iter().zip(&after.sites) {
        ensure!(
            before.other_bytes == after.current_bytes && after.other_bytes == before.current_bytes,
            "the site at {:#x} did not change from its NOP to its JMP",
            before.address
        );
    }
    Ok(())
}

async fn expect_count(guest: &mut Guest, expected: i32) -> Result<()> {
    let count = guest.key(KEY).await?.count;
    ensure!(
        count == expected,
        "the count is {count}, expected {expected}"
    );
    Ok(())
}

/// Fails unless the guest's loop takes the true branch.
async fn expect_messages(guest: &mut Guest) -> Result<()> {
    // The answer to a command follows all earlier output, so only messages after it are counted.
    guest.shell("true").await?;
    for _ in 0..3 {
        let line = guest.console().wait_for(MESSAGE).await?;
        println!(
            "   guest's console: {}",
            line.lines().last().unwrap_or_default()
        );
    }
    Ok(())
}

/// Fails if the guest's getppid() prints a message.
async fn expect_silence(guest: &mut Guest) -> Result<()> {
    // The first command consumes all earlier output, as in expect_messages(). The second one makes
    // further calls of getppid() and returns the messages that they print.
    guest.shell("true").await?;
    let said = guest.shell("timeout 1 getppid_loop 10; true").await?;
    ensure!(
        !said.contains(MESSAGE),
        "the guest still takes the true branch:\n{said}"
    );
    println!("   guest's console: silent, while getppid() is called again and again");
    Ok(())
}
