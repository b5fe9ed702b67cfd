// SPDX-License-Identifier: Apache-2.0
//! Statistics of paired measurements: the ratio of the medians, its bootstrap interval, and Holm's
//! correction for several keys.
//!
//! A pair is one run on each side of a key, one directly after the other and in random order. If
//! the key has no effect, both runs of a pair have the same distribution, even if the machine's
//! speed changes from pair to pair. The bootstrap therefore draws whole pairs.
//!
//! The interval is the percentile interval. BCa needs the derivative of the statistic, which the
//! jackknife estimates wrongly for a median (Efron and Tibshirani, "An Introduction to the
//! Bootstrap", 1993, section 11.6).

use fastrand::Rng;

/// One measurement on each side of a key. Both are positive and finite.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pair {
    pub off: f64,
    pub on: f64,
}

/// An interval of ratios. It extends to 0 and to infinity if there are too few resamples for its
/// level.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    pub low: f64,
    pub high: f64,
}

impl Interval {
    pub fn contains(&self, ratio: f64) -> bool {
        (self.low..=self.high).contains(&ratio)
    }
}

/// Returns the medians of both sides, off first.
pub fn medians(pairs: &[Pair]) -> (f64, f64) {
    let once = vec![1; pairs.len()];
    let median = |side: fn(&Pair) -> f64| median(&Sorted::new(pairs, side), &once);
    (median(|pair| pair.off), median(|pair| pair.on))
}

/// Measurements of one side in ascending order, each with the number of its pair.
struct Sorted(Vec<(usize, f64)>);

impl Sorted {
    fn new(pairs: &[Pair], side: fn(&Pair) -> f64) -> Self {
        let mut values: Vec<(usize, f64)> = pairs.iter().map(side).enumerate().collect();
        values.sort_by(|a, b| a.1.total_cmp(&b.1));
        Self(values)
    }
}

/// Returns the median of a sample in which each measurement occurs as often as `counts` says for
/// its pair. The counts add up to the number of pairs.
fn median(sorted: &Sorted, counts: &[u32]) -> f64 {
    let size = sorted.0.len();
    let (lower_rank, upper_rank) = (size.saturating_sub(1) / 2, size / 2);
    let (mut seen, mut lower) = (0, None);
    for &(pair, value) in &sorted.0 {
        seen += counts[pair] as usize;
        if lower.is_none() && seen > lower_rank {
            lower = Some(value);
        }
        if let Some(lower) = lower
            && seen > upper_rank
        {
            return f64::midpoint(lower, value);
        }
    }
    f64::NAN
}

/// The bootstrap distribution of the ratio of the medians, on to off.
#[derive(Debug)]
pub struct Bootstrap {
    /// The ratios in ascending order.
    ratios: Vec<f64>,
}

impl Bootstrap {
    /// Draws `resamples` samples with replacement, each of as many pairs as `pairs` has.
    pub fn new(pairs: &[Pair], resamples: usize, rng: &mut Rng) -> Self {
        let on = Sorted::new(pairs, |pair| pair.on);
        let off = Sorted::new(pairs, |pair| pair.off);
        let mut counts = vec![0; pairs.len()];
        let mut ratios = Vec::with_capacity(resamples);
        for _ in 0..resamples {
            counts.fill(0);
            for _ in pairs {
                counts[rng.usize(..pairs.len())] += 1;
            }
            ratios.push(median(&on, &counts) / median(&off, &counts));
        }
        ratios.sort_unstable_by(f64::total_cmp);
        #[cfg(test)]
        tests::HELD.with(|held| held.set((held.get().0 + 1, held.get().1.max(held.get().0 + 1))));
        Self { ratios }
    }

    /// Returns the interval that leaves out `alpha / 2` of the distribution on each side.
    pub fn interval(&self, alpha: f64) -> Interval {
        let rank = self.rank(alpha);
        let from_below = rank.checked_sub(1).and_then(|at| self.ratios.get(at));
        let from_above = self.ratios.len().checked_sub(rank);
        let from_above = from_above.and_then(|at| self.ratios.get(at));
        Interval {
            low: from_below.copied().unwrap_or(0.0),
            high: from_above.copied().unwrap_or(f64::INFINITY),
        }
    }

    /// Returns the rank, from either end, of the interval's limits; 0 if the interval is open.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    fn rank(&self, alpha: f64) -> usize {
        // The tolerance compensates for rounding, so that the interval agrees with `p`.
        (alpha / 2.0 * (self.ratios.len() + 1) as f64 + 1e-9).floor() as usize
    }

    /// Returns the smallest `alpha` whose interval does not contain 1; at most 1.
    pub fn p(&self) -> f64 {
        let below = self.ratios.partition_point(|&ratio| ratio <= 1.0);
        let above = self.ratios.len() - self.ratios.partition_point(|&ratio| ratio < 1.0);
        let rank = below.min(above) + 1;
        (2.0 * rank as f64 / (self.ratios.len() + 1) as f64).min(1.0)
    }
}

#[cfg(test)]
impl Drop for Bootstrap {
    fn drop(&mut self) {
        tests::HELD.with(|held| held.set((held.get().0 - 1, held.get().1)));
    }
}

/// The smallest error rate at which a key is tested. Simulations with 20 pairs show that a key
/// without an effect has a difference at most at the stated rate of 0.001 and more, 1.2 times as
/// often at 0.0001, and twice as often at 0.00002.
pub const SMALLEST_ALPHA: f64 = 1e-4;

/// Returns whether each of `keys` keys can be tested if the error rate of all together is `alpha`.
pub fn is_testable(alpha: f64, keys: usize) -> bool {
    // The tolerance compensates for rounding.
    alpha / keys.max(1) as f64 >= SMALLEST_ALPHA * (1.0 - 1e-9)
}

/// Returns the number of resamples of which 20 lie outside the interval on each side, within a
/// minimum and a maximum.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
pub fn resamples(alpha: f64) -> usize {
    const LEAST: f64 = 10_000.0;
    const MOST: f64 = 1_000_000.0;
    (40.0 / alpha).clamp(LEAST, MOST) as usize
}

/// The decision about one of several hypotheses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decision {
    /// The error rate at which this hypothesis was tested.
    pub alpha: f64,
    pub rejected: bool,
}

/// Tests several hypotheses by Holm's procedure: the probability that any true hypothesis is
/// rejected is at most `alpha`, even if the hypotheses depend on each other (Holm, "A Simple
/// Sequentially Rejective Multiple Test Procedure", 1979).
///
/// A hypothesis is rejected if and only if its p is at most the `alpha` of its decision.
pub fn holm(p: &[f64], alpha: f64) -> Vec<Decision> {
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|&a, &b| p[a].total_cmp(&p[b]));
    let mut decisions = vec![
        Decision {
            alpha,
            rejected: false
        };
        p.len()
    ];
    let (mut at, mut rejecting) = (alpha, true);
    for (rank, &one) in order.iter().enumerate() {
        if rejecting {
            at = alpha / (p.len() - rank) as f64;
            rejecting = p[one] <= at;
        }
        decisions[one] = Decision {
            alpha: at,
            rejected: rejecting,
        };
    }
    decisions
}

#[cfg(test)]
pub(super) mod tests;
