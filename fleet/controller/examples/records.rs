// SPDX-License-Identifier: Apache-2.0
//! Measures how long a new leader takes to read the rollouts in an etcd.
//!
//! The program writes rollouts under a root of its own, reads them as a leader does, and deletes
//! them. Run it as `records ADDRESS [ROLLOUTS [GUESTS [KERNELS [KEYS]]]]`. Guests with the same
//! kernel have the same keys.

#[path = "../tests/processes/samples.rs"]
mod samples;

use std::time::Instant;

use anyhow::Context;
use patchbay_fleet::storage;
use patchbay_fleet::store::{EtcdStore, Fence, Store, Transaction, Write, commit_all};

const SPEC: &str =
    "selector: {guests: [\"*\"]}\nclaims: [{want: held, keys: [alpha]}]\nwaves: [{size: rest}]\n";

fn resident_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let number = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    number.unwrap_or(0) / 1024
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().context("give the address of an etcd")?;
    let mut number = |default| match arguments.next() {
        Some(text) => text.parse::<usize>(),
        None => Ok(default),
    };
    let (rollouts, guests) = (number(62)?, number(10_000)?);
    let (kernels, keys) = (number(1)?, number(1)?);
    println!("{rollouts} rollouts, {guests} guests, {kernels} kernels, {keys} keys");
    let root = format!("/patchbay/records-{}/", std::process::id());
    let store = EtcdStore::new(&[address], &root, None)?;
    let key = "leader".to_owned();
    let created = store.commit(Transaction::new().put(&key, "one")).await?;
    let fence = Fence { key, created };

    let (start, mut records, mut bytes) = (Instant::now(), 0, 0);
    for index in 0..rollouts {
        let mut one = samples::rollout(&format!("r-{index}"), guests, kernels, keys);
        let writes = storage::planned(&mut one, SPEC)?;
        records += writes.len();
        bytes += writes.iter().map(length).sum::<usize>();
        commit_all(&store, &fence, &writes).await?;
    }
    let mib = bytes >> 20;
    println!(
        "written in {:.1?}: {records} records, {mib} MiB",
        start.elapsed()
    );

    let (start, before) = (Instant::now(), resident_mib());
    let loaded = storage::load(&store, &storage::RecordKeys::default()).await?;
    let (took, memory) = (start.elapsed(), resident_mib().saturating_sub(before));
    anyhow::ensure!(loaded.rollouts.len() == rollouts, "some cannot be read");
    println!("read in {took:.1?}: {memory} MiB more resident");

    let start = Instant::now();
    for index in 0..rollouts {
        let entries = storage::entries(&store, &format!("r-{index}"), storage::Keys::Own).await?;
        commit_all(&store, &fence, &storage::deletions(&entries)).await?;
    }
    println!("deleted in {:.1?}", start.elapsed());
    Ok(())
}

fn length(write: &Write) -> usize {
    match write {
        Write::Put { key, value, .. } => key.len() + value.len(),
        Write::Delete { key } => key.len(),
    }
}
