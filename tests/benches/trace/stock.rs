// SPDX-License-Identifier: Apache-2.0
//! The keys of all tracepoints of a kernel that knows nothing of Patchbay. The guest has attached its probes, and the
//! host turns the keys off and on again in one transaction each.

use std::time::Instant;

use anyhow::{Result, ensure};
use patchbay_proto::v1::{
    KeyClass, KeyOp, KeyUpdate, ListStaticKeysRequest, ResultView, UpdateStaticKeysRequest,
};
use patchbay_tests::{Guest, StockKernel, TestGuest};

use crate::figures::Samples;
use crate::{HostTimes, TURNS, nanoseconds};

pub async fn all_at_once() -> Result<()> {
    let Some(kernel) = StockKernel::named("6_12") else {
        return Ok(());
    };
    let mut guest = Guest::stock(&kernel).boot().await?;
    let release = guest.describe().await?.guest_status().kernel_release;
    let (mut on, mut off) = (HostTimes::default(), HostTimes::default());
    let (mut guest_on, mut guest_off) = (Samples::default(), Samples::default());
    let (mut names, mut sites) = (Vec::new(), 0);
    for _ in 0..TURNS {
        switch(&mut guest, "1", &mut guest_on).await?;
        names = tracepoints(&mut guest).await?;
        for _ in 0..5 {
            for (op, times) in [(KeyOp::Disable, &mut off), (KeyOp::Enable, &mut on)] {
                let update = |name: &String| KeyUpdate {
                    name: name.clone(),
                    op: op.into(),
                    ..Default::default()
                };
                let request = UpdateStaticKeysRequest {
                    updates: names.iter().map(update).collect(),
                    // The references are the guest's own.
                    force: true,
                    result_view: ResultView::Summary.into(),
                    ..Default::default()
                };
                let began = Instant::now();
                let answer = guest.static_keys().update_static_keys(request).await?;
                sites = times.add(began, answer.into_inner().report)?;
            }
        }
        switch(&mut guest, "0", &mut guest_off).await?;
        ensure!(tracepoints(&mut guest).await?.is_empty(), "keys stay on");
    }
    guest.assert_no_warnings().await?;
    println!(
        "\n| {release}: {} tracepoints, {sites} sites | n | host: whole call | guest stopped | guest itself | times faster | guest itself / stopped |",
        names.len()
    );
    println!("|---|---|---|---|---|---|---|");
    for (what, host, itself) in [("on", &on, &guest_on), ("off", &off, &guest_off)] {
        println!(
            "| {what} | {} and {} | {} | {} | {itself} | {:.1} | {:.0} |",
            host.call.len(),
            itself.len(),
            host.call,
            host.window,
            itself.times(&host.call),
            itself.times(&host.window),
        );
    }
    Ok(())
}

async fn switch(guest: &mut Guest, text: &str, samples: &mut Samples) -> Result<()> {
    let command = format!("trace_tool write /sys/kernel/tracing/events/enable {text}");
    nanoseconds(&guest.shell(&command).await?, samples)
}

/// The names of the tracepoints' keys that are on.
async fn tracepoints(guest: &mut Guest) -> Result<Vec<String>> {
    let request = ListStaticKeysRequest {
        page_size: 10_000,
        classes: vec![KeyClass::Tracepoint.into()],
        enabled: Some(true),
        ..Default::default()
    };
    let listed = guest.static_keys().list_static_keys(request).await?;
    Ok(listed
        .into_inner()
        .keys
        .into_iter()
        .map(|key| key.name)
        .collect())
}
