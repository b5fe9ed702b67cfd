// SPDX-License-Identifier: Apache-2.0
//! Measures the time that the threads of a process wait for a CPU
//! (`Documentation/scheduler/sched-stats.rst` of the kernel).

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

/// Returns the second number of a schedstat: the nanoseconds for which the thread was runnable but
/// had no CPU.
fn waited(schedstat: &str) -> Option<u64> {
    let mut words = schedstat.split_ascii_whitespace();
    let _ran: u64 = words.next()?.parse().ok()?;
    words.next()?.parse().ok()
}

/// Samples the run delay of a process's threads.
#[derive(Debug)]
pub struct RunDelay {
    tasks: PathBuf,
    vcpus: u32,
    last: HashMap<u32, u64>,
    read_at: Instant,
}

impl RunDelay {
    /// Starts to measure process `pid`, which runs `vcpus` vCPUs.
    ///
    /// # Errors
    /// The process does not exist, or the kernel keeps no schedstat.
    pub fn of(pid: u32, vcpus: u32) -> Result<Self> {
        let mut delay = Self {
            tasks: PathBuf::from(format!("/proc/{pid}/task")),
            vcpus,
            last: HashMap::new(),
            read_at: Instant::now(),
        };
        delay.last = delay.read()?;
        Ok(delay)
    }

    fn read(&self) -> Result<HashMap<u32, u64>> {
        let threads = fs::read_dir(&self.tasks).with_context(|| {
            format!(
                "{} cannot be read; give the monitor's process id",
                self.tasks.display()
            )
        })?;
        // A thread may end between the two reads.
        let waits = threads.flatten().filter_map(|thread| {
            let id = thread.file_name().to_str()?.parse().ok()?;
            let text = fs::read_to_string(thread.path().join("schedstat")).ok()?;
            Some((id, waited(&text)?))
        });
        let waits: HashMap<u32, u64> = waits.collect();
        ensure!(
            !waits.is_empty(),
            "no thread in {} has a schedstat; the kernel needs CONFIG_SCHED_INFO",
            self.tasks.display()
        );
        Ok(waits)
    }

    /// Returns the share of the time since the last call, 0 to 1, in which a vCPU waited for a CPU,
    /// averaged over the vCPUs. The waits of the monitor's other threads are included, but they are
    /// short, because these threads are seldom runnable.
    ///
    /// # Errors
    /// The process has ended.
    pub fn share(&mut self) -> Result<f64> {
        let now = self.read()?;
        let elapsed = self.read_at.elapsed();
        self.read_at = Instant::now();
        let share = waits_between(&self.last, &now).as_secs_f64()
            / (elapsed.as_secs_f64() * f64::from(self.vcpus));
        self.last = now;
        Ok(share.min(1.0))
    }
}

/// Returns the time waited between two readings, summed over the threads that are in both.
fn waits_between(before: &HashMap<u32, u64>, now: &HashMap<u32, u64>) -> Duration {
    let waits = now
        .iter()
        .filter_map(|(id, now)| Some(now.saturating_sub(*before.get(id)?)));
    Duration::from_nanos(waits.fold(0, u64::saturating_add))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_threads_that_lived_all_the_time_count() {
        let before = HashMap::from([(1, 50), (2, 10), (3, 7)]);
        let now = HashMap::from([(1, 60), (2, 70), (4, 1_000)]);
        assert_eq!(waits_between(&before, &now), Duration::from_nanos(70));
        assert_eq!(waits_between(&before, &before), Duration::ZERO);
        let reused = waits_between(&now, &before);
        assert_eq!(reused, Duration::ZERO, "a reused id runs backwards");
    }

    #[test]
    fn schedstat_is_parsed() {
        assert_eq!(waited("5 6 7\n"), Some(6));
        for bad in ["", "5", "5 x 7", "-1 2 3", "x 2 3"] {
            assert_eq!(waited(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn a_process_that_is_gone_is_an_error() {
        let mut own = RunDelay::of(std::process::id(), 1).expect("this process");
        let share = own.share().expect("it lives");
        assert!((0.0..=1.0).contains(&share), "{share}");
        assert!(RunDelay::of(u32::MAX, 1).is_err());
    }
}
