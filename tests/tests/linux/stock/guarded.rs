// SPDX-License-Identifier: Apache-2.0
//! Flips the guarded keys of a busy guest for a while, and back.
//!
//! This takes about an hour, and runs only if `PATCHBAY_GUARDED_SECONDS` gives the time for which
//! each key stays flipped. A key that crashes the guest, or makes its kernel complain, costs a
//! boot. `PATCHBAY_GUARDED_KEYS` contains patterns of the keys to flip, separated by spaces. The
//! outcomes are printed as rows of a table.

use std::collections::VecDeque;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use patchbay_proto::v1::{
    KeyClass, KeyOp, KeyUpdate, StaticKey, UpdateStaticKeysRequest, UpdateStaticKeysResponse,
};
use patchbay_tests::{Guest, StockKernel, TestGuest};
use tokio::time::{sleep, timeout};

use super::list;

/// The work in the guest: processes, files, TCP, memory, timers and groups.
const LOAD: [&str; 6] = [
    "(while :; do busybox true; done) &",
    "(while :; do dd if=/dev/zero of=/tmp/file bs=64k count=64; sync; rm /tmp/file; done >/dev/null 2>&1) &",
    "(while :; do nc -l -p 9000 >/dev/null; done 2>/dev/null) & \
     (while :; do dd if=/dev/zero bs=4k count=64 2>/dev/null | nc -w 1 127.0.0.1 9000; done >/dev/null 2>&1) &",
    "(while :; do ping -c 20 -A 127.0.0.1; usleep 50000; done >/dev/null 2>&1) &",
    "(while :; do usleep 1000; cat /proc/meminfo /proc/vmstat /proc/*/stat /proc/schedstat; done >/dev/null 2>&1) &",
    "(while :; do mkdir /tmp/group/a && (sh -c 'echo $$ >/tmp/group/a/cgroup.procs; busybox true'); rmdir /tmp/group/a; done >/dev/null 2>&1) &",
];
/// The time for the guest to answer while a key is flipped.
const ANSWER_LIMIT: Duration = Duration::from_secs(90);
/// The number of keys that are flipped together. If the guest complains, each of them is flipped
/// again alone.
const TOGETHER: usize = 8;

#[tokio::test]
async fn guarded_keys_of_debian_6_1() -> Result<()> {
    flip_guarded_keys("6_1").await
}

#[tokio::test]
async fn guarded_keys_of_debian_6_12() -> Result<()> {
    flip_guarded_keys("6_12").await
}

/// The effect on the guest.
enum Outcome {
    /// The guest continued without a complaint.
    Fine,
    /// The service refused the change.
    Refused(String),
    /// The guest's kernel complained.
    Complained(String),
    /// The guest no longer answered.
    Died(String),
}

struct Campaign {
    kernel: StockKernel,
    hold: Duration,
    release: String,
    boots: u32,
}

async fn flip_guarded_keys(version: &str) -> Result<()> {
    let Ok(hold) = std::env::var("PATCHBAY_GUARDED_SECONDS") else {
        println!("SKIPPED: it takes an hour; PATCHBAY_GUARDED_SECONDS=10 runs it");
        return Ok(());
    };
    let Some(kernel) = StockKernel::named(version) else {
        return Ok(());
    };
    let mut campaign = Campaign {
        kernel,
        hold: Duration::from_secs(hold.parse()?),
        release: String::new(),
        boots: 0,
    };
    let mut guest = campaign.boot().await?;
    let patterns = std::env::var("PATCHBAY_GUARDED_KEYS").unwrap_or_default();
    let patterns: Vec<&str> = patterns.split_whitespace().collect();
    let keys = list(&mut guest, &patterns).await?;
    let status = guest.describe().await?;
    campaign.release = status.guest_status().kernel_release.clone();
    // libtest has printed the start of a line, and each row needs a line of its own.
    println!();
    let names = keys.iter().filter(|key| is_wanted(key)).map(name);
    let names: Vec<String> = names.collect();
    ensure!(!names.is_empty(), "no guarded key is to be flipped");
    let mut groups: VecDeque<Vec<String>> = names.chunks(TOGETHER).map(<[_]>::to_vec).collect();
    while let Some(group) = groups.pop_front() {
        let outcome = campaign.flip(&mut guest, &group).await?;
        let dirty = matches!(outcome, Outcome::Complained(_) | Outcome::Died(_));
        if group.len() > 1 && !matches!(outcome, Outcome::Fine) {
            for key in group.into_iter().rev() {
                groups.push_front(vec![key]);
            }
        } else {
            campaign.report(&group, &outcome);
        }
        if dirty && !groups.is_empty() {
            drop(guest);
            guest = campaign.boot().await?;
        }
    }
    println!(
        "{}: {} keys in {} boots",
        campaign.release,
        names.len(),
        campaign.boots
    );
    Ok(())
}

fn name(key: &StaticKey) -> String {
    key.name.clone()
}

fn is_wanted(key: &StaticKey) -> bool {
    key.key_class() == KeyClass::Guarded && !key.sealed && key.patchable_sites > 0
}

impl Campaign {
    async fn boot(&mut self) -> Result<Guest> {
        self.boots += 1;
        let mut guest = Guest::stock(&self.kernel)
            .vcpus(2)
            .argument("--allow-guarded")
            .boot()
            .await?;
        guest
            .shell("mkdir /tmp/group; mount -t cgroup2 none /tmp/group; ip link set lo up; echo 1 >/proc/sys/kernel/sysrq")
            .await?;
        for load in LOAD {
            guest.shell(load).await?;
        }
        guest.shell("dmesg -c >/dev/null").await?;
        Ok(guest)
    }

    /// Flips keys for a while, and back.
    async fn flip(&self, guest: &mut Guest, names: &[String]) -> Result<Outcome> {
        let mut ops = Vec::new();
        for name in names {
            ops.push(match guest.key(name).await?.count {
                0 => (KeyOp::Enable, KeyOp::Disable),
                _ => (KeyOp::Disable, KeyOp::Enable),
            });
        }
        let there = names.iter().zip(ops.iter().map(|(there, _)| *there));
        let back = names.iter().zip(ops.iter().map(|(_, back)| *back));
        if let Err(refusal) = change(guest, there).await {
            return Ok(Outcome::Refused(refusal.message().to_owned()));
        }
        sleep(self.hold).await;
        // The guest is checked now and after the keys are flipped back, because some code later
        // uses state from the time when a key was flipped.
        if let Err(died) = answers(guest).await {
            return Ok(Outcome::Died(died));
        }
        if let Err(refusal) = change(guest, back).await {
            return Ok(Outcome::Complained(format!(
                "not back: {}",
                refusal.message()
            )));
        }
        sleep(self.hold / 5).await;
        match answers(guest).await {
            Err(died) => Ok(Outcome::Died(died)),
            Ok(()) => match guest.assert_no_warnings().await {
                Ok(()) => Ok(Outcome::Fine),
                Err(complaint) => Ok(Outcome::Complained(first_report(&complaint.to_string()))),
            },
        }
    }

    fn report(&self, group: &[String], outcome: &Outcome) {
        let (word, why) = match outcome {
            Outcome::Fine => ("fine", ""),
            Outcome::Refused(why) => ("refused", &**why),
            Outcome::Complained(why) => ("complained", &**why),
            Outcome::Died(why) => ("died", &**why),
        };
        for name in group {
            println!("| {name} | {} | {word} | {why} |", self.release);
        }
    }
}

async fn change(
    guest: &mut Guest,
    ops: impl Iterator<Item = (&String, KeyOp)>,
) -> Result<UpdateStaticKeysResponse, tonic::Status> {
    let updates = ops.map(|(name, op)| KeyUpdate {
        name: name.clone(),
        op: op.into(),
        ..Default::default()
    });
    let request = UpdateStaticKeysRequest {
        updates: updates.collect(),
        allow_guarded: true,
        // `force` is set, because the guest itself may hold the reference.
        force: true,
        stop_timeout: Some(prost_types::Duration {
            seconds: 20,
            nanos: 0,
        }),
        ..Default::default()
    };
    let mut client = guest.static_keys();
    match timeout(ANSWER_LIMIT, client.update_static_keys(request)).await {
        Ok(answer) => answer.map(tonic::Response::into_inner),
        Err(_) => Err(tonic::Status::deadline_exceeded("the monitor is silent")),
    }
}

/// Runs commands in the guest that start a program and use the network, the disk and a timer.
async fn answers(guest: &mut Guest) -> Result<(), String> {
    let command = "busybox true && ping -c 1 -W 30 127.0.0.1 >/dev/null && sync && usleep 10000";
    match timeout(ANSWER_LIMIT, guest.shell(command)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(first_report(&format!("{error:#}"))),
        Err(_) => Err(first_report(&guest.console().transcript())),
    }
}

/// Returns the first line with which a kernel reports a fault, or else the last line.
fn first_report(text: &str) -> String {
    let report = patchbay_proto::KERNEL_REPORTS
        .iter()
        .filter_map(|words| text.find(words))
        .min();
    let line = match report {
        Some(at) => text[at..].lines().next(),
        None => text.lines().rev().find(|line| !line.trim().is_empty()),
    };
    let line = line.context("silent").unwrap_or("silent");
    line.chars()
        .filter(|c| *c != '|' && !c.is_control())
        .take(160)
        .collect()
}
