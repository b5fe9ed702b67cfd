// SPDX-License-Identifier: Apache-2.0
//! Measures the time until the first line of a stock guest's log is at a client.

use std::time::Instant;

use anyhow::{Context, Result};
use patchbay_proto::v1::stream_kernel_log_request::Start;
use patchbay_proto::v1::tracepoints_service_client::TracepointsServiceClient;
use patchbay_proto::v1::{KernelLogSource, StreamKernelLogRequest};
use patchbay_tests::{Foreign, Guest, StockKernel, TestGuest, connect};
use tonic::transport::Channel;

use crate::figures::Samples;
use crate::log;

const TIMES: usize = 10;

/// Measures a guest of our monitor and one of QEMU, and the rates of both logs.
pub async fn run() -> Result<()> {
    let Some(kernel) = StockKernel::named("6_12") else {
        return Ok(());
    };
    in_our_monitor(&kernel).await?;
    in_qemu(&kernel).await
}

async fn in_our_monitor(kernel: &StockKernel) -> Result<()> {
    let mut guest = Guest::stock(kernel).boot().await?;
    let mut client = guest.tracepoints();
    let (mut first, mut again) = (Samples::default(), Samples::default());
    let began = Instant::now();
    first_line(&mut client).await?;
    first.add(began.elapsed());
    for _ in 0..TIMES {
        let began = Instant::now();
        first_line(&mut client).await?;
        again.add(began.elapsed());
    }
    println!("\n| to the first line at the client, in our monitor | n | µs, p50 / p99 / max |");
    println!("|---|---|---|");
    println!(
        "| first call after the boot, which finds the kernel | {} | {first} |",
        first.len()
    );
    println!("| later calls | {} | {again} |", again.len());
    // The records that are written next displace all others.
    guest.assert_no_warnings().await?;
    log::compare(&mut guest, client).await
}

async fn in_qemu(kernel: &StockKernel) -> Result<()> {
    let mut guest = Foreign::qemu(kernel, &kernel.initramfs, &[])?;
    guest.wait_for_shell().await?;
    let (mut served, mut first, mut again) = <(Samples, Samples, Samples)>::default();
    for _ in 0..TIMES {
        guest.detach().await?;
        let began = Instant::now();
        guest.attach(&kernel.cli, &[]).await?;
        served.add(began.elapsed());
        let mut client = TracepointsServiceClient::new(connect(&guest.socket()).await?);
        first_line(&mut client).await?;
        first.add(began.elapsed());
        let began = Instant::now();
        first_line(&mut client).await?;
        again.add(began.elapsed());
    }
    println!("\n| to the first line at the client, in QEMU, {TIMES} times | µs, p50 / p99 / max |");
    println!("|---|---|");
    println!("| start of the attacher until it serves | {served} |");
    println!("| start of the attacher until the first line | {first} |");
    println!("| a later call | {again} |");
    guest.shell("dmesg -n 1").await?;
    let client = TracepointsServiceClient::new(connect(&guest.socket()).await?);
    log::compare(&mut guest, client).await
}

async fn first_line(client: &mut TracepointsServiceClient<Channel>) -> Result<()> {
    let request = StreamKernelLogRequest {
        source: KernelLogSource::Memory.into(),
        start: Some(Start::FirstSeq(0)),
        ..Default::default()
    };
    let mut stream = client.stream_kernel_log(request).await?.into_inner();
    loop {
        let message = stream.message().await?.context("the stream ended")?;
        if !message.records.is_empty() {
            return Ok(());
        }
    }
}
