// SPDX-License-Identifier: Apache-2.0
//! Measures calls from the request to the answer: a call that does nothing, changes of one key,
//! changes of many keys by pattern or by name, and commits of changes that were prepared before.

use std::time::{Duration, Instant};

use patchbay_service::keys::{
    CommitRequest, KeyUpdate, Keys, PrepareRequest, Selection, Target, UpdateRequest,
};
use static_keys::{Op, Patterns};

use super::kernel::Kernel;
use super::{BETWEEN, BenchGuest, DEADLINE, WARM_UP, percentile};

const ROUNDS: usize = 300;
const PRINCIPAL: &str = "bench";

/// The form in which a change names its keys.
#[derive(Clone, Copy)]
enum Given {
    Pattern,
    Names,
}

/// A row of the table: the kernel, and the call that changes all its keys.
struct Row {
    what: &'static str,
    kernel: Kernel,
    given: Given,
    prepared: bool,
    summary_only: bool,
}

const fn row(what: &'static str, keys: u64, sites: u64, given: Given) -> Row {
    Row {
        what,
        kernel: Kernel::new(keys, sites),
        given,
        prepared: false,
        summary_only: false,
    }
}

const ROWS: [Row; 8] = [
    row("one key", 1, 1, Given::Names),
    row("one key with 56 sites", 1, 56, Given::Names),
    row("1,000 keys by name", 1000, 1, Given::Names),
    row("1,000 keys by pattern", 1000, 1, Given::Pattern),
    Row {
        summary_only: true,
        ..row("1,000 keys by pattern, summary", 1000, 1, Given::Pattern)
    },
    Row {
        prepared: true,
        ..row("one key with 56 sites, prepared", 1, 56, Given::Names)
    },
    Row {
        prepared: true,
        ..row("1,000 keys, prepared", 1000, 1, Given::Pattern)
    },
    Row {
        prepared: true,
        summary_only: true,
        ..row("1,000 keys, prepared, summary", 1000, 1, Given::Pattern)
    },
];

/// Prints the table. Returns false without KVM.
pub async fn measure() -> bool {
    println!();
    println!("| 1 vCPU: a call of | request to answer | of it stop, patch, resume (p50) |");
    println!("|---|---|---|");
    let Some(guest) = BenchGuest::start(ROWS[0].kernel, 1) else {
        return false;
    };
    let mut nothing = Vec::new();
    for _ in 0..2 * ROUNDS {
        std::thread::sleep(BETWEEN);
        let began = Instant::now();
        guest.keys.tick().await.expect("the thread runs");
        nothing.push(began.elapsed().as_secs_f64());
    }
    print("nothing", nothing, None);
    drop(guest);
    for row in &ROWS {
        let Some(guest) = BenchGuest::start(row.kernel, 1) else {
            return false;
        };
        let (mut whole, mut paused) = (Vec::new(), Vec::new());
        for round in 0..WARM_UP + ROUNDS {
            for op in [Op::Enable, Op::Disable] {
                let (time, pause) = row.change(&guest.keys, op).await;
                if round >= WARM_UP {
                    whole.push(time.as_secs_f64());
                    paused.push(pause.as_secs_f64());
                }
            }
        }
        print(row.what, whole, Some(paused));
    }
    true
}

impl Row {
    fn updates(&self, op: Op) -> Vec<KeyUpdate> {
        match self.given {
            Given::Names => (0..self.kernel.keys)
                .map(|key| KeyUpdate::new(Kernel::name(key), op))
                .collect(),
            Given::Pattern => vec![KeyUpdate {
                keys: Target::Selection(Box::new(Selection {
                    patterns: Patterns::parse(&["k*".to_owned()]).expect("a pattern"),
                    classes: vec![],
                })),
                op,
            }],
        }
    }

    /// Changes all keys. Returns the duration of the call and of the pause. The time to prepare a
    /// change is not included.
    async fn change(&self, keys: &Keys, op: Op) -> (Duration, Duration) {
        let updates = self.updates(op);
        let deadline = Instant::now() + DEADLINE;
        let (outcome, time) = if self.prepared {
            let prepare = PrepareRequest {
                update: UpdateRequest {
                    summary_only: true,
                    ..UpdateRequest::new(updates, PRINCIPAL, DEADLINE, deadline)
                },
                plan_ttl: DEADLINE,
            };
            let plan = keys.prepare(prepare).await.expect("a plan");
            let commit = CommitRequest {
                plan_id: plan.plan_id.clone(),
                digest: Some(plan.digest.clone()),
                caller: PRINCIPAL.into(),
                summary_only: self.summary_only,
                stop_timeout: DEADLINE,
                deadline,
            };
            std::thread::sleep(BETWEEN);
            let began = Instant::now();
            let outcome = keys.commit(commit).await;
            (outcome, began.elapsed())
        } else {
            let request = UpdateRequest {
                summary_only: self.summary_only,
                ..UpdateRequest::new(updates, PRINCIPAL.to_owned(), DEADLINE, deadline)
            };
            std::thread::sleep(BETWEEN);
            let began = Instant::now();
            let outcome = keys.update(request).await;
            (outcome, began.elapsed())
        };
        let report = outcome.expect("the change is made").report;
        let report = report.expect("a report");
        assert_eq!(
            u64::from(report.sites_patched),
            self.kernel.keys * self.kernel.sites
        );
        let times = report.pause.unwrap_or_default();
        (time, times.stop + times.patch + times.resume)
    }
}

fn print(what: &str, mut whole: Vec<f64>, paused: Option<Vec<f64>>) {
    let paused = paused.map_or("-".to_owned(), |mut paused| {
        format!("{:.1}", percentile(&mut paused, 50))
    });
    let [p50, p99, max] = [50, 99, 100].map(|percent| percentile(&mut whole, percent));
    println!("| {what} | {p50:.1} / {p99:.1} / {max:.1} | {paused} |");
}
