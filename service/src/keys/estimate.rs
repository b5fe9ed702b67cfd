// SPDX-License-Identifier: Apache-2.0
//! Predicts how long a change stops the guest, from earlier changes.

use std::time::Duration;

use super::outcome::PauseTimes;

/// Factor by which each new pause reduces the weight of the earlier ones. About the last ten pauses
/// determine the prediction.
const DECAY: f64 = 0.9;

/// A line fitted to pause time over number of sites, weighted towards recent pauses.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PauseEstimate {
    weight: f64,
    /// Weighted means.
    sites: f64,
    seconds: f64,
    /// Weighted sums of squares and products, around the means.
    sites_squared: f64,
    product: f64,
}

impl PauseEstimate {
    /// Adds the pause of a change of `sites` sites.
    pub fn observe(&mut self, times: PauseTimes, sites: u32) {
        let seconds = (times.stop + times.patch + times.resume).as_secs_f64();
        let earlier = self.weight * DECAY;
        self.weight = earlier + 1.0;
        let (x, y) = (f64::from(sites) - self.sites, seconds - self.seconds);
        self.sites += x / self.weight;
        self.seconds += y / self.weight;
        let share = earlier / self.weight;
        self.sites_squared = self.sites_squared * DECAY + share * x * x;
        self.product = self.product * DECAY + share * x * y;
    }

    /// Returns the predicted pause of a change of `sites` sites; `None` before the first pause.
    pub fn predict(&self, sites: usize) -> Option<Duration> {
        if self.weight == 0.0 {
            return None;
        }
        let sites = f64::from(u32::try_from(sites).unwrap_or(u32::MAX));
        // When all changes had the same number of sites, the cost of one site is unknown. The mean
        // pause scaled by the sites is an upper bound.
        let per_site = if self.sites_squared > 0.0 {
            (self.product / self.sites_squared).max(0.0)
        } else if sites > self.sites {
            self.seconds / self.sites.max(1.0)
        } else {
            0.0
        };
        let seconds = self.seconds + per_site * (sites - self.sites);
        // A line fitted to long pauses may go below zero for few sites.
        Duration::try_from_secs_f64(seconds.max(0.0)).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(micros: u64) -> PauseTimes {
        PauseTimes {
            stop: Duration::from_micros(micros / 2),
            patch: Duration::from_micros(micros / 4),
            resume: Duration::from_micros(micros / 4),
        }
    }

    #[track_caller]
    fn assert_near(estimate: &PauseEstimate, sites: usize, micros: f64) {
        let predicted = estimate.predict(sites).expect("observed");
        let predicted = predicted.as_secs_f64() * 1e6;
        assert!((predicted - micros).abs() < 1.0, "{sites}: {predicted}");
    }

    #[test]
    fn nothing_is_predicted_before_the_first_pause() {
        assert_eq!(PauseEstimate::default().predict(1), None);
    }

    #[test]
    fn base_and_cost_of_a_site_are_told_apart() {
        let mut estimate = PauseEstimate::default();
        for sites in [1, 1000, 56, 1, 500] {
            estimate.observe(times(40 + 4 * u64::from(sites)), sites);
        }
        assert_near(&estimate, 0, 40.0);
        assert_near(&estimate, 10_000, 40_040.0);
    }

    #[test]
    fn one_pause_is_an_upper_bound() {
        let mut estimate = PauseEstimate::default();
        estimate.observe(times(80), 4);
        assert_near(&estimate, 1, 80.0);
        assert_near(&estimate, 8, 160.0);
    }

    /// The guest moves to another host, or its vCPUs change their load.
    #[test]
    fn what_was_long_ago_is_forgotten() {
        let mut estimate = PauseEstimate::default();
        for micros in [800, 80] {
            for _ in 0..100 {
                estimate.observe(times(micros), 1);
            }
        }
        assert_near(&estimate, 1, 80.0);
    }

    /// Long pauses with few sites are outliers.
    #[test]
    fn no_prediction_is_negative() {
        let mut estimate = PauseEstimate::default();
        estimate.observe(times(800), 1);
        estimate.observe(times(80), 1000);
        assert!(estimate.predict(1_000_000).is_some());
        let mut estimate = PauseEstimate::default();
        estimate.observe(times(8), 1000);
        estimate.observe(times(8_000), 2000);
        assert_eq!(estimate.predict(0), Some(Duration::ZERO));
    }
}
