// SPDX-License-Identifier: Apache-2.0
//! Measures the keys of all tracepoints of an unpatched kernel. The guest has attached its probes,
//! and the host turns the keys off and on again in one transaction each.

use std::time::Instant;

use anyhow::{Result, ensure};
use patchbay_proto::v1::{KeyOp, ResultView, UpdateStaticKeysRequest};
use patchbay_tests::{
    Guest, StockKernel, TestGuest, enabled_tracepoints, switch_tracepoints, without_functions,
};

use crate::figures::Samples;
use crate::{HostTimes, TURNS, print_beside, switch};

pub async fn all_at_once() -> Result<()> {
    let Some(kernel) = StockKernel::named("6_12") else {
        return Ok(());
    };
    let mut guest = Guest::stock(&kernel).boot().await?;
    let (mut on, mut off) = (HostTimes::default(), HostTimes::default());
    let (mut guest_on, mut guest_off) = (Samples::default(), Samples::default());
    let (mut names, mut sites) = (Vec::new(), 0);
    for _ in 0..TURNS {
        switch(&mut guest, "1", &mut guest_on).await?;
        let enabled = enabled_tracepoints(&mut guest).await?;
        names = without_functions(&mut guest, enabled).await?;
        for _ in 0..5 {
            for (op, times) in [(KeyOp::Disable, &mut off), (KeyOp::Enable, &mut on)] {
                let request = UpdateStaticKeysRequest {
                    result_view: ResultView::Summary.into(),
                    ..switch_tracepoints(&names, op)
                };
                let began = Instant::now();
                let answer = guest.static_keys().update_static_keys(request).await?;
                sites = times.add(began, answer.into_inner().report)?;
            }
        }
        switch(&mut guest, "0", &mut guest_off).await?;
        let left = enabled_tracepoints(&mut guest).await?;
        ensure!(left.is_empty(), "keys stay on: {left:?}");
    }
    guest.assert_no_warnings().await?;
    let release = guest.describe().await?.guest_status().kernel_release;
    let what = format!("{release}: {} tracepoints, {sites} sites", names.len());
    print_beside(&what, [("on", &on, &guest_on), ("off", &off, &guest_off)]);
    Ok(())
}
