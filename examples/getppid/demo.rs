// SPDX-License-Identifier: Apache-2.0
//! The example from the kernel's static-keys documentation, with the key flipped by the hypervisor.
//! Each step changes something from outside and then checks that the guest noticed. The exit status
//! is 0 if it always did.
#![forbid(unsafe_code)]

use anyhow::{Result, bail, ensure};
use clap::Parser;
use patchbay_examples::{environment, open_shell, step};
use patchbay_proto::v1::{
    FlipReport, KeyClass, KeyOp, KeyResult, ListStaticKeysRequest, StaticKey,
    UpdateStaticKeysResponse,
};
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

    step("List some of the guest's keys");
    list(&mut guest).await?;
    show(&guest.key(KEY).await?);

    step("Enable getppid_key from the host");
    let before = guest.key(KEY).await?;
    report(&guest.update(&[(KEY, KeyOp::Inc)]).await?, 1)?;
    let after = guest.key(KEY).await?;
    show(&after);
    expect_flipped(&before, &after)?;
    expect_messages(&mut guest).await?;

    step("Take a second reference: nothing to patch, no pause");
    report(&guest.update(&[(KEY, KeyOp::Inc)]).await?, 2)?;
    expect_messages(&mut guest).await?;

    step("Drop one reference: still on");
    report(&guest.update(&[(KEY, KeyOp::Dec)]).await?, 1)?;
    expect_messages(&mut guest).await?;

    step("Drop the other: off again, and the console falls silent");
    report(&guest.update(&[(KEY, KeyOp::Dec)]).await?, 0)?;
    let last = guest.key(KEY).await?;
    show(&last);
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

async fn list(guest: &mut Guest) -> Result<()> {
    let request = ListStaticKeysRequest {
        patterns: vec!["sched_*".to_owned(), KEY.to_owned()],
        ..Default::default()
    };
    let response = guest.static_keys().list_static_keys(request).await?;
    for key in response.into_inner().keys {
        println!(
            "   {:<32} {:<10} count {:>2}  {:>2} site{}",
            key.name,
            class(key.key_class()),
            key.count,
            key.site_count,
            plural(key.site_count)
        );
    }
    Ok(())
}

fn class(class: KeyClass) -> &'static str {
    match class {
        KeyClass::Unspecified => "unknown",
        KeyClass::Guarded => "guarded",
        KeyClass::Ref => "ref",
        KeyClass::Tracepoint => "tracepoint",
        KeyClass::DynamicDebug => "dyndbg",
        KeyClass::Never => "never",
    }
}

fn plural(count: u32) -> &'static str {
    if count == 1 { "" } else { "s" }
}

fn show(key: &StaticKey) {
    for site in &key.sites {
        println!(
            "   {:#x} <{}>  {}  {}",
            site.address,
            site.symbol,
            hexadecimal(&site.current_bytes),
            site.disassembly
        );
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    let bytes: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    bytes.join(" ")
}

fn bytes(key: &StaticKey) -> Vec<&[u8]> {
    key.sites
        .iter()
        .map(|site| site.current_bytes.as_slice())
        .collect()
}

/// Every site must have changed from its NOP to its JMP.
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

fn report(response: &UpdateStaticKeysResponse, expected_count: i32) -> Result<()> {
    let Some(KeyResult {
        count_before,
        count_after,
        ..
    }) = response.results.first()
    else {
        bail!("the update has no result");
    };
    let cost = match &response.report {
        Some(FlipReport {
            paused: true,
            sites_patched,
            stop_time,
            patch_time,
            resume_time,
            ..
        }) => format!(
            "{sites_patched} site{} patched; stop {}, patch {}, resume {}",
            plural(*sites_patched),
            microseconds(stop_time.as_ref()),
            microseconds(patch_time.as_ref()),
            microseconds(resume_time.as_ref())
        ),
        _ => "no pause".to_owned(),
    };
    println!("   {KEY}: count {count_before} → {count_after}; {cost}");
    ensure!(
        *count_after == expected_count,
        "the count is {count_after}, expected {expected_count}"
    );
    Ok(())
}

fn microseconds(duration: Option<&prost_types::Duration>) -> String {
    let nanoseconds = duration.map_or(0, |duration| duration.nanos);
    format!("{:.1} µs", f64::from(nanoseconds) / 1000.0)
}

/// The guest's loop must reach the true branch.
async fn expect_messages(guest: &mut Guest) -> Result<()> {
    // The answer to a command comes after everything printed before it, so only later messages
    // count.
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

/// The guest must call getppid() without printing.
async fn expect_silence(guest: &mut Guest) -> Result<()> {
    // Silence means something only if more calls are made, like in expect_messages().
    guest.shell("true").await?;
    let said = guest.shell("timeout 1 getppid_loop 10; true").await?;
    ensure!(
        !said.contains(MESSAGE),
        "the guest still takes the true branch:\n{said}"
    );
    println!("   guest's console: silent, while getppid() is called again and again");
    Ok(())
}
