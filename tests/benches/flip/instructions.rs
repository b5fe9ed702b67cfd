// SPDX-License-Identifier: Apache-2.0
//! Counts the instructions of the same flips, in a lab whose clocks count instructions.
//!
//! One nanosecond of such a clock is one instruction, whoever executes it: the client, the monitor,
//! the kernel of the lab or the guest. The microseconds that the flips report are therefore
//! thousands of instructions, and do not depend on the load of the machine under the lab.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use patchbay_proto::v1::{
    CommitUpdateRequest, KeyOp, KeyUpdate, PrepareUpdateRequest, ResultView,
    UpdateStaticKeysRequest,
};
use patchbay_tests::{Guest, TestGuest};
use tonic::{Code, Status};

use super::figures::Samples;
use super::{
    BETWEEN, CASES, HostTimes, Selector, WARM_UP, all_keys, flip, flip_by_itself, request,
};

/// The number of times that the keys of a case are turned on and off. A few suffice, because equal
/// flips execute nearly equal numbers of instructions.
const ROUNDS: usize = 10;
/// The number of names in a refused request.
const REFUSED_NAMES: usize = 4096;
const KEY: &str = "patchbay_test:bench_key_000";
const HOLD: &str = "/sys/kernel/debug/patchbay_test/hold/text_mutex";
/// The time that a refused call waits for a closed gate, which is the minimum that the service
/// accepts.
const PATIENCE: Duration = Duration::from_millis(1);

pub async fn measure() -> Result<()> {
    let mut guest = Guest::with_test_keys(1).await?.context("no guest")?;
    let keys = all_keys(&mut guest).await?;
    println!(
        "Thousands of instructions with 1 vCPU, p50. The last column has those of each thread per \
         call, between calls too; the rest is idle time and interrupts."
    );
    println!();
    println!(
        "| | whole call | stop | patch | guest stopped | guest itself | call / guest itself | threads |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    let mut row = Row::new(&guest, "a call that does nothing");
    for _ in 0..WARM_UP + 2 * ROUNDS {
        row.start_after_warm_up(WARM_UP);
        let began = Instant::now();
        guest.describe().await?;
        row.host.call.add(began.elapsed());
        tokio::time::sleep(BETWEEN).await;
    }
    row.print();
    for case in &CASES {
        let request = request(&keys, case)?;
        let prepared = case.selector == Selector::Prepared;
        let mut unused = HostTimes::default();
        flip(&mut guest, &request, prepared, WARM_UP, &mut unused).await?;
        let mut row = Row::new(&guest, case.what);
        flip(&mut guest, &request, prepared, ROUNDS, &mut row.host).await?;
        row.stop();
        flip_by_itself(&mut guest, case, ROUNDS, &mut row.itself).await?;
        row.print();
    }
    refuse_names(&mut guest).await?;
    refuse_stale(&mut guest).await?;
    refuse_at_gate(&mut guest).await?;
    guest.assert_no_warnings().await
}

/// A row of the table.
struct Row {
    what: String,
    monitor: Option<u32>,
    host: HostTimes,
    itself: Samples,
    before: Threads,
    after: Option<Threads>,
    /// The calls of the warm-up were discarded.
    is_warm: bool,
}

impl Row {
    fn new(guest: &Guest, what: &str) -> Self {
        let monitor = guest.monitor_pid();
        Self {
            what: what.to_owned(),
            monitor,
            host: HostTimes::default(),
            itself: Samples::default(),
            before: Threads::now(monitor),
            after: None,
            is_warm: false,
        }
    }

    /// Discards the calls so far when there are `count` of them, because they are the warm-up.
    fn start_after_warm_up(&mut self, count: usize) {
        if !self.is_warm && self.host.call.len() == count {
            self.is_warm = true;
            self.host = HostTimes::default();
            self.before = Threads::now(self.monitor);
        }
    }

    /// Ends the measurement of the threads.
    fn stop(&mut self) {
        self.after = Some(Threads::now(self.monitor));
    }

    fn print(mut self) {
        if self.after.is_none() {
            self.stop();
        }
        let after = self.after.unwrap_or_default();
        let calls = self.host.call.len();
        let cell = |samples: &Samples| match samples.len() {
            0 => String::new(),
            _ => format!("{:.0}", samples.percentile(50).as_secs_f64() * 1e6),
        };
        let ratio = match self.itself.len() {
            0 => String::new(),
            _ => format!("{:.2}", self.host.call.times(&self.itself)),
        };
        println!(
            "| {} | {} | {} | {} | {} | {} | {ratio} | {} |",
            self.what,
            cell(&self.host.call),
            cell(&self.host.stop),
            cell(&self.host.patch),
            cell(&self.host.window),
            cell(&self.itself),
            after.since(&self.before, calls),
        );
        if self.host.again > 0 {
            println!("(the guest was busy {} times)", self.host.again);
        }
    }
}

/// The CPU time of each thread of the monitor and of this client. It equals the number of
/// instructions that the thread has executed, including those in the lab's kernel. The time of a
/// vCPU thread includes the guest's instructions.
#[derive(Default)]
struct Threads(BTreeMap<String, u64>);

impl Threads {
    fn now(monitor: Option<u32>) -> Self {
        let mut threads = Self::default();
        threads.add("/proc/self/task", Some("client"));
        if let Some(monitor) = monitor {
            threads.add(&format!("/proc/{monitor}/task"), None);
        }
        threads
    }

    /// Adds the threads of a process, under `name` or under their own names. A thread that ends
    /// meanwhile counts as zero.
    fn add(&mut self, folder: &str, name: Option<&str>) {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        for entry in entries {
            let read = |file| std::fs::read_to_string(entry.path().join(file)).unwrap_or_default();
            let own = read("comm");
            let time = read("schedstat");
            let time = time.split(' ').next().and_then(|word| word.parse().ok());
            let name = name.unwrap_or(own.trim()).to_owned();
            *self.0.entry(name).or_default() += time.unwrap_or(0_u64);
        }
    }

    /// Formats the differences per call, the largest first.
    fn since(&self, before: &Self, calls: usize) -> String {
        let calls = u64::try_from(calls.max(1)).unwrap_or(1);
        let thousands = |(name, time): (&String, &u64)| {
            let before = before.0.get(name).copied().unwrap_or(0);
            (time.saturating_sub(before) / calls / 1000, name.clone())
        };
        let mut threads: Vec<(u64, String)> = self.0.iter().map(thousands).collect();
        threads.retain(|(time, _)| *time > 0);
        threads.sort_unstable_by(|one, other| other.cmp(one));
        let texts: Vec<String> = threads
            .into_iter()
            .map(|(time, name)| format!("{name} {time}"))
            .collect();
        texts.join(", ")
    }
}

fn update(name: &str, op: KeyOp) -> KeyUpdate {
    KeyUpdate {
        name: name.to_owned(),
        op: op.into(),
        ..Default::default()
    }
}

/// Adds a call that must be refused with `code`.
fn add_refused<T>(
    row: &mut Row,
    began: Instant,
    answer: Result<T, Status>,
    code: Code,
) -> Result<()> {
    let time = began.elapsed();
    let refusal = answer.err().context("the call was not refused")?;
    ensure!(refusal.code() == code, "{}: {refusal}", row.what);
    row.host.call.add(time);
    Ok(())
}

/// Measures the refusal of a request with many names, the last of which no key has.
async fn refuse_names(guest: &mut Guest) -> Result<()> {
    let known = (1..REFUSED_NAMES).map(|number| {
        let name = format!("patchbay_test:bench_key_{:03}", number % 1000);
        update(&name, KeyOp::Inc)
    });
    let unknown = update("patchbay_test:no_such_key", KeyOp::Inc);
    let request = UpdateStaticKeysRequest {
        updates: known.chain([unknown]).collect(),
        ..Default::default()
    };
    let mut row = Row::new(guest, "refused: 4,096 names, the last unknown");
    for _ in 0..WARM_UP + ROUNDS {
        row.start_after_warm_up(WARM_UP);
        let mut client = guest.static_keys();
        let request = request.clone();
        let began = Instant::now();
        let answer = client.update_static_keys(request).await;
        add_refused(&mut row, began, answer, Code::NotFound)?;
        tokio::time::sleep(BETWEEN).await;
    }
    row.print();
    Ok(())
}

/// Measures the refusal to commit a plan whose key has changed since it was prepared.
async fn refuse_stale(guest: &mut Guest) -> Result<()> {
    let mut row = Row::new(guest, "refused: a stale plan");
    for _ in 0..WARM_UP + ROUNDS {
        let mut client = guest.static_keys();
        let prepare = PrepareUpdateRequest {
            updates: vec![update(KEY, KeyOp::Enable)],
            result_view: ResultView::Summary.into(),
            ..Default::default()
        };
        let plan = client.prepare_update(prepare).await?.into_inner();
        let change = |op| UpdateStaticKeysRequest {
            updates: vec![update(KEY, op)],
            ..Default::default()
        };
        client.update_static_keys(change(KeyOp::Enable)).await?;
        tokio::time::sleep(BETWEEN).await;
        row.start_after_warm_up(WARM_UP);
        let commit = CommitUpdateRequest {
            plan_id: plan.plan_id,
            digest: plan.digest,
            ..Default::default()
        };
        let began = Instant::now();
        let answer = client.commit_update(commit).await;
        add_refused(&mut row, began, answer, Code::FailedPrecondition)?;
        client.update_static_keys(change(KeyOp::Disable)).await?;
    }
    // The threads are not shown, because their instructions include the other calls of each round.
    row.before = Threads::default();
    row.after = Some(Threads::default());
    row.print();
    Ok(())
}

/// Measures the refusal of a change while the guest holds text_mutex.
async fn refuse_at_gate(guest: &mut Guest) -> Result<()> {
    guest.shell(&format!("echo 600000 > {HOLD}")).await?;
    let request = UpdateStaticKeysRequest {
        updates: vec![update(KEY, KeyOp::Enable)],
        retry_timeout: Some(PATIENCE.try_into()?),
        ..Default::default()
    };
    let mut row = Row::new(guest, "refused: a closed gate, after waiting for 1 ms");
    for _ in 0..WARM_UP + ROUNDS {
        row.start_after_warm_up(WARM_UP);
        let mut client = guest.static_keys();
        let request = request.clone();
        let began = Instant::now();
        let answer = client.update_static_keys(request).await;
        add_refused(&mut row, began, answer, Code::Unavailable)?;
        tokio::time::sleep(BETWEEN).await;
    }
    row.print();
    guest.shell(&format!("echo 0 > {HOLD}")).await?;
    Ok(())
}
