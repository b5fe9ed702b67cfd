// SPDX-License-Identifier: Apache-2.0
//! Measures the same change of one stock kernel in our monitor, in QEMU by each way of attaching
//! and pausing, and in libkrun by its process. All take turns in one run.

use anyhow::{Context, Result, ensure};
use patchbay_proto::v1::static_keys_service_client::StaticKeysServiceClient;
use patchbay_proto::v1::{
    KeyClass, KeyOp, KeyUpdate, ListStaticKeysRequest, ResultView, StaticKey,
    UpdateStaticKeysRequest,
};
use patchbay_tests::{Foreign, Guest, StockKernel, TestGuest, connect};
use tonic::transport::Channel;

use super::figures::Samples;
use super::{BETWEEN, HostTimes, TURNS, WARM_UP, change};

/// The number of times that the keys are turned on and off in a turn.
const ROUNDS: usize = 10;
/// The numbers of keys that are changed together.
const COUNTS: [usize; 2] = [1, 100];
/// Queries for pr_debug() lines that an idle guest seldom executes.
const LINES: [&str; 3] = ["drivers/base/*", "drivers/acpi/*", "drivers/pci/*"];

/// A way of attaching to a guest.
#[derive(Clone, Copy)]
enum Way {
    /// QEMU is asked over QMP, and `--pause` has this value.
    Qmp(&'static str),
    /// The host's kernel shows the guest of a process, whose monitor is not asked.
    Process,
}

/// A column of the table: a monitor and a way of pausing the guest.
struct Column {
    what: String,
    times: [HostTimes; COUNTS.len()],
}

impl Column {
    fn new(what: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            times: Default::default(),
        }
    }

    /// Turns the keys on and off for one turn.
    async fn turn(
        &mut self,
        client: &StaticKeysServiceClient<Channel>,
        names: &[String],
    ) -> Result<()> {
        for (count, times) in COUNTS.into_iter().zip(&mut self.times) {
            let names = names.get(..count).context("too few keys")?;
            flip(client, names, WARM_UP, &mut HostTimes::default()).await?;
            flip(client, names, ROUNDS, times).await?;
        }
        Ok(())
    }
}

pub async fn compare() -> Result<()> {
    let Some(kernel) = StockKernel::named("6_12") else {
        return Ok(());
    };
    let mut ours = Guest::stock(&kernel).boot().await?;
    let mut qemu = Foreign::qemu(&kernel, &kernel.initramfs, &[])?;
    qemu.wait_for_shell().await?;
    let names = lines(&mut ours.static_keys()).await?;
    // Messages on the console would slow the guest down.
    ours.shell("dmesg -n 1").await?;
    qemu.shell("dmesg -n 1").await?;

    let mut guests = vec![qemu];
    let mut ways = vec![
        ("QEMU, qmp", 0, Way::Qmp("qmp")),
        ("QEMU, freeze", 0, Way::Qmp("freeze")),
        ("QEMU, process", 0, Way::Process),
    ];
    match std::env::var_os("PATCHBAY_TEST_LIBKRUN") {
        Some(program) => {
            let mut krun = Foreign::libkrun(program.as_ref(), &kernel)?;
            krun.wait_for_shell().await?;
            krun.shell("dmesg -n 1").await?;
            guests.push(krun);
            ways.push(("libkrun, process", 1, Way::Process));
        }
        None => eprintln!("There is no guest of libkrun."),
    }
    let mut columns: Vec<Column> = vec![Column::new("our monitor")];
    columns.extend(ways.iter().map(|(what, ..)| Column::new(*what)));
    for _ in 0..TURNS {
        columns[0].turn(&ours.static_keys(), &names).await?;
        for (column, (what, guest, way)) in columns[1..].iter_mut().zip(&ways) {
            let guest = &mut guests[*guest];
            match way {
                Way::Qmp(pause) => guest.attach(&kernel.cli, &["--pause", pause]).await?,
                Way::Process => guest.attach_to_process(&kernel.cli).await?,
            }
            let mut client = StaticKeysServiceClient::new(connect(&guest.socket()).await?);
            ensure!(
                lines(&mut client).await? == names,
                "the guests do not have the same keys: {what}"
            );
            let turn = column.turn(&client, &names).await;
            turn.with_context(|| guest.attacher_log())?;
            // The other attacher of the same guest takes its lock.
            guest.detach().await?;
        }
    }
    ours.assert_no_warnings().await?;
    let release = ours.describe().await?.guest_status().kernel_release;
    print(&release, &columns);
    Ok(())
}

/// Returns the names of the keys, in order.
async fn lines(client: &mut StaticKeysServiceClient<Channel>) -> Result<Vec<String>> {
    let request = ListStaticKeysRequest {
        patterns: LINES.map(str::to_owned).to_vec(),
        page_size: 10_000,
        ..Default::default()
    };
    let listed = client.list_static_keys(request).await?.into_inner();
    let single = |key: &StaticKey| {
        key.key_class() == KeyClass::DynamicDebug
            && key.count == 0
            && key.site_count == 1
            && key.patchable_sites == 1
    };
    let keys = listed.keys.into_iter().filter(single);
    Ok(keys.map(|key| key.name).collect())
}

async fn flip(
    client: &StaticKeysServiceClient<Channel>,
    names: &[String],
    rounds: usize,
    times: &mut HostTimes,
) -> Result<()> {
    for _ in 0..rounds {
        for op in [KeyOp::Enable, KeyOp::Disable] {
            let updates = names.iter().map(|name| KeyUpdate {
                name: name.clone(),
                op: op.into(),
                ..Default::default()
            });
            let request = UpdateStaticKeysRequest {
                updates: updates.collect(),
                result_view: ResultView::Summary.into(),
                ..Default::default()
            };
            let report = change(client.clone(), request, times).await?;
            ensure!(
                report.paused && report.sites_patched as usize == names.len(),
                "another change than asked for: {report:?}"
            );
            tokio::time::sleep(BETWEEN).await;
        }
    }
    Ok(())
}

fn print(release: &str, columns: &[Column]) {
    println!();
    println!(
        "{release}, 1 vCPU. In parentheses the ratio of the p50 to our monitor's; \"patch\" is verifying and writing."
    );
    for (index, count) in COUNTS.into_iter().enumerate() {
        println!();
        let what = match count {
            1 => "1 key with 1 site".to_owned(),
            _ => format!("{count} keys with 1 site each"),
        };
        println!("| {what} | n | stop | patch | resume | guest stopped |");
        println!("|---|---|---|---|---|---|");
        for column in columns {
            let (times, ours) = (&column.times[index], &columns[0].times[index]);
            let cell =
                |theirs: &Samples, ours: &Samples| format!("{theirs} ({:.2})", theirs.times(ours));
            println!(
                "| {} | {} | {} | {} | {} | {} |",
                column.what,
                times.stop.len(),
                cell(&times.stop, &ours.stop),
                cell(&times.patch, &ours.patch),
                cell(&times.resume, &ours.resume),
                cell(&times.window, &ours.window),
            );
        }
    }
}
