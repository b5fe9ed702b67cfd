// SPDX-License-Identifier: Apache-2.0
//! How long the threads of a process wait for a CPU (`Documentation/scheduler/sched-stats.rst` of the kernel).

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

/// Nanoseconds since a thread's start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Times {
    ran: u64,
    waited: u64,
}

impl Times {
    fn parse(schedstat: &str) -> Option<Self> {
        let mut words = schedstat.split_ascii_whitespace();
        Some(Self {
            ran: words.next()?.parse().ok()?,
            waited: words.next()?.parse().ok()?,
        })
    }
}

/// Reads the run delay of a process's threads again and again.
#[derive(Debug)]
pub struct RunDelay {
    tasks: PathBuf,
    last: HashMap<u32, Times>,
}

impl RunDelay {
    /// Starts with this process.
    ///
    /// # Errors
    /// The process does not exist, or the kernel keeps no schedstat.
    pub fn of(pid: u32) -> Result<Self> {
        let mut delay = Self {
            tasks: PathBuf::from(format!("/proc/{pid}/task")),
            last: HashMap::new(),
        };
        delay.last = delay.read()?;
        Ok(delay)
    }

    fn read(&self) -> Result<HashMap<u32, Times>> {
        let threads = fs::read_dir(&self.tasks).with_context(|| {
            format!(
                "{} cannot be read; give the monitor's process id",
                self.tasks.display()
            )
        })?;
        // A thread may end between the two reads.
        let times = threads.flatten().filter_map(|thread| {
            let id = thread.file_name().to_str()?.parse().ok()?;
            let text = fs::read_to_string(thread.path().join("schedstat")).ok()?;
            Some((id, Times::parse(&text)?))
        });
        let times: HashMap<u32, Times> = times.collect();
        ensure!(
            !times.is_empty(),
            "no thread in {} has a schedstat; the kernel needs CONFIG_SCHED_INFO",
            self.tasks.display()
        );
        Ok(times)
    }

    /// Share of the threads' runnable time since the last call in which they had no CPU: 0 to 1.
    ///
    /// # Errors
    /// The process has ended.
    pub fn share(&mut self) -> Result<f64> {
        let now = self.read()?;
        let share = share(&self.last, &now);
        self.last = now;
        Ok(share)
    }
}

/// Only threads that both have count.
fn share(before: &HashMap<u32, Times>, now: &HashMap<u32, Times>) -> f64 {
    let mut sum = Times::default();
    for (id, now) in now {
        if let Some(before) = before.get(id) {
            sum.ran = sum.ran.saturating_add(now.ran.saturating_sub(before.ran));
            sum.waited = sum
                .waited
                .saturating_add(now.waited.saturating_sub(before.waited));
        }
    }
    let runnable = sum.ran.saturating_add(sum.waited);
    if runnable == 0 {
        0.0
    } else {
        sum.waited as f64 / runnable as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(all: &[(u32, u64, u64)]) -> HashMap<u32, Times> {
        all.iter()
            .map(|&(id, ran, waited)| (id, Times { ran, waited }))
            .collect()
    }

    #[test]
    fn only_threads_that_lived_all_the_time_count() {
        let before = times(&[(1, 100, 50), (2, 10, 10), (3, 7, 7)]);
        let now = times(&[(1, 130, 60), (2, 10, 70), (4, 1_000, 0)]);
        assert!((share(&before, &now) - 0.7).abs() < 1e-9);
        assert!(share(&before, &before).abs() < 1e-9, "threads at rest");
        assert!(
            share(&now, &before).is_finite(),
            "a reused id runs backwards"
        );
    }

    #[test]
    fn schedstat_is_parsed() {
        assert_eq!(Times::parse("5 6 7\n"), Some(Times { ran: 5, waited: 6 }));
        for bad in ["", "5", "5 x 7", "-1 2 3"] {
            assert_eq!(Times::parse(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn a_process_that_is_gone_is_an_error() {
        let mut own = RunDelay::of(std::process::id()).expect("this process");
        let share = own.share().expect("it lives");
        assert!((0.0..=1.0).contains(&share), "{share}");
        assert!(RunDelay::of(u32::MAX).is_err());
    }
}
