// SPDX-License-Identifier: Apache-2.0
//! Tests the statistics with simulated distributions of benchmark times: noise, a long tail, two
//! modes, outliers, a coarse unit, and a machine that becomes slower.

use fastrand::Rng;
use proptest::prelude::*;

use super::*;

thread_local! {
    /// The number of bootstraps that this thread holds, and the largest number so far.
    pub static HELD: std::cell::Cell<(u32, u32)> = const { std::cell::Cell::new((0, 0)) };
}

const SHAPES: [(&str, fn(&mut Rng, f64) -> f64); 6] = [
    ("noise", |rng, _| 1.0 + 0.02 * normal(rng)),
    ("long tail", |rng, _| (0.5 * normal(rng)).exp()),
    ("two modes", |rng, _| {
        let mode = if rng.bool() { 1.0 } else { 1.5 };
        mode + 0.01 * normal(rng)
    }),
    ("outliers", |rng, _| match rng.u8(..10) {
        0 => 5.0 * (1.0 + rng.f64()),
        _ => 1.0 + 0.02 * normal(rng),
    }),
    ("coarse", |rng, _| {
        ((1.0 + 0.02 * normal(rng)) * 50.0).round()
    }),
    ("drift", |rng, time| {
        (1.0 + 0.3 * time) * (1.0 + 0.02 * normal(rng))
    }),
];

/// Returns a normally distributed number, by the method of Box and Muller.
pub fn normal(rng: &mut Rng) -> f64 {
    let radius = (-2.0 * (1.0 - rng.f64()).ln()).sqrt();
    radius * (std::f64::consts::TAU * rng.f64()).cos()
}

/// Returns pairs in which the key multiplies the measurement by `effect`.
fn pairs(shape: fn(&mut Rng, f64) -> f64, count: u32, effect: f64, rng: &mut Rng) -> Vec<Pair> {
    let pair = |number| {
        let time = f64::from(number) / f64::from(count);
        Pair {
            off: shape(rng, time),
            on: effect * shape(rng, time),
        }
    };
    (0..count).map(pair).collect()
}

/// Returns the p of each of `keys` simulated keys.
fn simulate(shape: fn(&mut Rng, f64) -> f64, runs: u32, effect: f64, keys: u32) -> Vec<f64> {
    let mut rng = Rng::with_seed(11);
    let one = |_| Bootstrap::new(&pairs(shape, runs, effect, &mut rng), 1000, &mut rng).p();
    (0..keys).map(one).collect()
}

/// Returns the fraction of the keys that have a difference at this error rate.
fn found(p: &[f64], alpha: f64) -> f64 {
    p.iter().filter(|p| **p <= alpha).count() as f64 / p.len() as f64
}

#[test]
fn keys_that_do_nothing_are_found_at_most_at_the_stated_rate() {
    const KEYS: u32 = 1500;
    for (name, shape) in SHAPES {
        for runs in [super::super::MIN_RUNS, 30] {
            let p = simulate(shape, runs, 1.0, KEYS);
            for alpha in [0.01, 0.05, 0.2] {
                let rate = found(&p, alpha);
                let deviation = (alpha * (1.0 - alpha) / f64::from(KEYS)).sqrt();
                assert!(
                    rate <= alpha + 2.0 * deviation,
                    "{name}, {runs} runs: {rate} at {alpha}"
                );
            }
        }
    }
}

#[test]
fn an_effect_is_found() {
    let power = |shape: usize, effect| found(&simulate(SHAPES[shape].1, 30, effect, 300), 0.05);
    // The noise has a standard deviation of 2%. The effects are 4% and 2%.
    let (noise, outliers, drift) = (0, 3, 5);
    assert!(power(noise, 1.04) > 0.999);
    assert!(power(noise, 1.02) > 0.8);
    assert!(power(noise, 0.98) > 0.8);
    // Outliers hardly change the median.
    assert!(power(outliers, 1.04) > 0.99);
    // A drift of 30% does not hide an effect of 20%.
    assert!(power(drift, 1.2) > 0.99);
}

#[test]
fn the_interval_covers_the_true_ratio() {
    let mut rng = Rng::with_seed(5);
    let (_, noise) = SHAPES[0];
    let covered = (0..1000).filter(|_| {
        let pairs = pairs(noise, 30, 1.1, &mut rng);
        let bootstrap = Bootstrap::new(&pairs, 1000, &mut rng);
        bootstrap.interval(0.05).contains(1.1)
    });
    let covered = covered.count();
    assert!((940..990).contains(&covered), "{covered} of 1000");
}

/// Compares the bootstrap with the exact distribution, which the test computes by enumerating all
/// resamples of four pairs.
#[test]
fn the_bootstrap_has_the_exact_distribution() {
    let pairs: Vec<Pair> = [(1.0, 1.1), (1.2, 1.0), (0.9, 1.4), (1.3, 1.35)]
        .map(|(off, on)| Pair { off, on })
        .to_vec();
    let middle = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        (values[1] + values[2]) / 2.0
    };
    let mut exact: Vec<f64> = (0..256_usize)
        .map(|number| {
            let drawn: Vec<Pair> = (0..4).map(|at| pairs[number >> (2 * at) & 3]).collect();
            middle(drawn.iter().map(|pair| pair.on).collect())
                / middle(drawn.iter().map(|pair| pair.off).collect())
        })
        .collect();
    exact.sort_by(f64::total_cmp);
    let bootstrap = Bootstrap::new(&pairs, 100_000, &mut Rng::with_seed(3));
    for ratio in [0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.3, 1.5] {
        let part = |ratios: &[f64]| {
            ratios.partition_point(|&one| one <= ratio + 1e-12) as f64 / ratios.len() as f64
        };
        let (exact, drawn) = (part(&exact), part(&bootstrap.ratios));
        assert!((exact - drawn).abs() < 0.006, "{ratio}: {exact}, {drawn}");
    }
}

#[test]
fn the_interval_of_a_seed_is_known() {
    let pairs: Vec<Pair> = (0..30)
        .map(|number| {
            let wave = f64::from(number * 7 % 30);
            Pair {
                off: 100.0 + wave,
                on: 104.0 + f64::from(number * 11 % 30),
            }
        })
        .collect();
    assert_eq!(medians(&pairs), (114.5, 118.5));
    let bootstrap = Bootstrap::new(&pairs, 10_000, &mut Rng::with_seed(1));
    let Interval { low, high } = bootstrap.interval(0.05);
    let found = format!("{low:.6} {high:.6} {:.6}", bootstrap.p());
    assert_eq!(found, "0.971774 1.104072 0.329767");
}

#[test]
fn holm_rejects_step_by_step() {
    let of = |p: &[f64]| -> Vec<(bool, f64)> {
        let decisions = holm(p, 0.05);
        decisions
            .iter()
            .map(|one| (one.rejected, one.alpha))
            .collect()
    };
    // The 4 hypotheses are tested in ascending order of p: the first at 0.05 / 4, the second at
    // 0.05 / 3, and the third at 0.05 / 2. The third is not rejected, so the fourth is not either.
    assert_eq!(
        of(&[0.01, 0.04, 0.03, 0.005]),
        [
            (true, 0.05 / 3.0),
            (false, 0.025),
            (false, 0.025),
            (true, 0.0125)
        ]
    );
    assert_eq!(of(&[0.05]), [(true, 0.05)]);
    assert_eq!(of(&[0.051]), [(false, 0.05)]);
    assert_eq!(of(&[0.01, 0.01]), [(true, 0.025), (true, 0.05)]);
    assert_eq!(of(&[]), []);
}

#[test]
fn too_few_resamples_leave_the_interval_open() {
    let pairs = vec![Pair { off: 1.0, on: 2.0 }; 20];
    let bootstrap = Bootstrap::new(&pairs, 100, &mut Rng::with_seed(1));
    let open = bootstrap.interval(0.01);
    assert_eq!((open.low, open.high), (0.0, f64::INFINITY));
    let closed = bootstrap.interval(0.05);
    assert_eq!((closed.low, closed.high), (2.0, 2.0));
    assert_eq!(resamples(0.05), 10_000);
    assert_eq!(resamples(0.001), 40_000);
    assert_eq!(resamples(1e-12), 1_000_000);
}

#[test]
fn equal_measurements_show_no_difference() {
    let pairs = vec![Pair { off: 3.0, on: 3.0 }; 20];
    let bootstrap = Bootstrap::new(&pairs, 1000, &mut Rng::with_seed(1));
    assert_eq!(bootstrap.p(), 1.0);
    assert!(bootstrap.interval(0.2).contains(1.0));
}

fn any_pairs() -> impl Strategy<Value = Vec<Pair>> {
    let value = || prop_oneof![1e-100..1e100_f64, 0.5..2.0_f64, Just(1.0)];
    let pair = (value(), value()).prop_map(|(off, on)| Pair { off, on });
    proptest::collection::vec(pair, 1..50)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Checks that the interval and p agree, and that a wider interval contains a narrower one.
    #[test]
    fn intervals_agree_with_p_and_are_nested(pairs in any_pairs(), seed: u64, alpha in 0.0..1.0_f64) {
        let bootstrap = Bootstrap::new(&pairs, 500, &mut Rng::with_seed(seed));
        let wide = bootstrap.interval(alpha);
        prop_assert!(wide.low <= wide.high && wide.low >= 0.0, "{wide:?}");
        prop_assert_eq!(!wide.contains(1.0), bootstrap.p() <= alpha);
        let narrow = bootstrap.interval((alpha + 0.1).min(1.0));
        prop_assert!(wide.low <= narrow.low && narrow.high <= wide.high);
        let p = bootstrap.p();
        prop_assert!(!bootstrap.interval(p).contains(1.0) || p == 1.0);
    }

    /// Checks that exchanging the sides gives the reciprocal, and that the unit does not matter.
    #[test]
    fn sides_and_units_are_symmetric(pairs in any_pairs(), seed: u64) {
        let p = |pairs: &[Pair]| Bootstrap::new(pairs, 500, &mut Rng::with_seed(seed)).p();
        let exchanged: Vec<Pair> =
            pairs.iter().map(|pair| Pair { off: pair.on, on: pair.off }).collect();
        let scaled: Vec<Pair> =
            pairs.iter().map(|pair| Pair { off: 2.0 * pair.off, on: 2.0 * pair.on }).collect();
        let (off, on) = medians(&pairs);
        prop_assert_eq!(medians(&exchanged), (on, off));
        prop_assert!((off / on * (on / off) - 1.0).abs() < 1e-9);
        prop_assert_eq!(p(&pairs), p(&exchanged));
        prop_assert_eq!(p(&pairs), p(&scaled));
    }

    #[test]
    fn the_median_is_that_of_a_sorted_copy(pairs in any_pairs()) {
        let mut on: Vec<f64> = pairs.iter().map(|pair| pair.on).collect();
        on.sort_by(f64::total_cmp);
        let expected = f64::midpoint(on[(on.len() - 1) / 2], on[on.len() / 2]);
        prop_assert_eq!(medians(&pairs).1, expected);
    }

    /// Checks that Holm's procedure rejects every hypothesis that Bonferroni's rejects, and none
    /// that is not rejected without a correction.
    #[test]
    fn holm_lies_between_bonferroni_and_no_correction(
        p in proptest::collection::vec(0.0..0.2_f64, 1..20),
    ) {
        for (p, decision) in p.iter().zip(holm(&p, 0.05)) {
            prop_assert!(decision.alpha >= 0.05 / 20.0 && decision.alpha <= 0.05);
            prop_assert_eq!(decision.rejected, *p <= decision.alpha);
        }
        for (one, decision) in p.iter().zip(holm(&p, 0.05)) {
            prop_assert!(!decision.rejected || *one <= 0.05);
            prop_assert!(decision.rejected || *one > 0.05 / p.len() as f64);
        }
    }
}
