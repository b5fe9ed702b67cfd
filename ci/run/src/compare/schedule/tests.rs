// SPDX-License-Identifier: Apache-2.0

use super::*;
use crate::compare::stats::tests::{HELD, normal};

/// Takes one turn of each key of a round.
fn round(schedule: &mut Schedule, keys: usize) {
    for _ in 0..keys {
        let Some(Step::Run(turn)) = schedule.next(|| true) else {
            panic!("a run is halted by the caller, and not by the schedule");
        };
        let pair = Pair { off: 1.0, on: 2.0 };
        schedule.measured(turn.key, pair);
    }
}

/// Checks that the end of a stage can be halted, and that the keys then keep their measurements.
#[test]
fn a_halted_stage_leaves_its_keys_undecided() {
    for (stages, rounds) in [(comparison(20, 0.05), 20), (ranking(30, 0.05), 10)] {
        let mut schedule = Schedule::new(3, stages, 0.05, 1);
        assert!(matches!(schedule.next(|| true), Some(Step::Begin(..))));
        for _ in 0..rounds {
            round(&mut schedule, 3);
        }
        assert_eq!(schedule.next(|| true), None);
        assert_eq!(schedule.undecided(), [0, 1, 2]);
        assert_eq!(schedule.abandon(1).len(), rounds);
        assert_eq!(schedule.undecided(), [0, 2]);
        assert_eq!(schedule.findings(), [None, None, None]);
    }
}

/// Carries out a schedule with simulated measurements. A measurement has a noise of 2%, and each
/// key that is on multiplies it by the key's effect. Returns the findings and the number of runs.
fn follow(mut schedule: Schedule, effects: &[f64], rng: &mut Rng) -> (Vec<Option<Finding>>, u32) {
    let mut runs = 0;
    while let Some(step) = schedule.next(|| false) {
        if let Step::Run(turn) = step {
            runs += 2;
            let mut measure = || 1.0 + 0.02 * normal(rng);
            let (off, on) = (measure(), effects[turn.key] * measure());
            schedule.measured(turn.key, Pair { off, on });
        }
    }
    (schedule.findings(), runs)
}

fn differences(findings: &[Option<Finding>]) -> Vec<usize> {
    let is_difference = |&at: &usize| {
        findings[at]
            .as_ref()
            .is_some_and(|finding| finding.difference)
    };
    (0..findings.len()).filter(is_difference).collect()
}

#[test]
fn the_stages_share_the_error_rate() {
    let looks = |runs| -> Vec<(usize, f64)> {
        let stages = ranking(runs, 0.05);
        assert_eq!(stages[0], Stage::Screening { runs: 10 });
        let look = |stage: &Stage| match *stage {
            Stage::Look { runs, alpha } => (runs, (alpha * 1e6).round() / 1e6),
            Stage::Screening { .. } => panic!("a second screening"),
        };
        stages[1..].iter().map(look).collect()
    };
    assert_eq!(looks(90), [(30, 0.01), (60, 0.015), (90, 0.025)]);
    assert_eq!(looks(30), [(20, 0.025), (30, 0.025)]);
    assert_eq!(looks(20), [(20, 0.05)]);
    for runs in 20..200 {
        let looks = looks(runs);
        let sum: f64 = looks.iter().map(|look| look.1).sum();
        assert!((sum - 0.05).abs() < 1e-6, "{runs}: {looks:?}");
        assert!(looks.is_sorted_by(|a, b| a.0 < b.0), "{runs}: {looks:?}");
        assert_eq!(looks.last().unwrap().0, runs as usize);
    }
}

#[test]
fn each_round_has_every_key_once_in_random_order() {
    let mut schedule = Schedule::new(5, comparison(20, 0.05), 0.05, 3);
    assert!(matches!(
        schedule.next(|| false),
        Some(Step::Begin(Stage::Look { .. }, 5))
    ));
    let (mut orders, mut firsts) = (vec![], [0; 5]);
    for _ in 0..20 {
        let mut order = vec![];
        for _ in 0..5 {
            let Some(Step::Run(turn)) = schedule.next(|| false) else {
                panic!("the round ends early");
            };
            order.push(turn.key);
            firsts[turn.key] += i32::from(turn.first == Side::On);
            schedule.measured(turn.key, Pair { off: 1.0, on: 1.0 });
        }
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, [0, 1, 2, 3, 4]);
        orders.push(order);
    }
    assert_eq!(schedule.next(|| false), None);
    assert_eq!(schedule.next(|| false), None);
    orders.sort();
    orders.dedup();
    assert!(orders.len() > 10, "{orders:?}");
    assert!(
        firsts.iter().all(|&on| (3..=17).contains(&on)),
        "{firsts:?}"
    );
}

#[test]
fn the_seed_determines_everything() {
    let effects = [1.0, 1.1, 1.0, 0.97];
    let run = |seed| {
        let schedule = Schedule::new(4, ranking(30, 0.05), 0.05, seed);
        follow(schedule, &effects, &mut Rng::with_seed(9))
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
}

#[test]
fn a_key_that_is_given_up_has_no_more_turns() {
    let mut schedule = Schedule::new(3, comparison(20, 0.05), 0.05, 1);
    let mut turns = [0; 3];
    schedule.give_up(2);
    while let Some(step) = schedule.next(|| false) {
        let Step::Run(turn) = step else { continue };
        turns[turn.key] += 1;
        match (turn.key, turns[1]) {
            (1, 7) => schedule.give_up(1),
            (key, _) => schedule.measured(key, Pair { off: 1.0, on: 1.0 }),
        }
    }
    assert_eq!(turns, [20, 7, 0]);
    let findings = schedule.findings();
    assert!(findings[0].is_some() && findings[1].is_none() && findings[2].is_none());

    for stages in [comparison(20, 0.05), ranking(20, 0.05)] {
        assert_eq!(
            Schedule::new(0, stages.clone(), 0.05, 1).next(|| false),
            None
        );
        let mut schedule = Schedule::new(1, stages, 0.05, 1);
        schedule.give_up(0);
        assert_eq!(schedule.next(|| false), None);
        assert_eq!(schedule.findings(), [None]);
    }
}

#[test]
fn a_comparison_has_a_smallest_error_rate_for_each_key() {
    for (alpha, keys) in [(0.05, 500), (1.0 - 0.999, 10), (1.0 - 0.9999, 1)] {
        assert_eq!(check(&comparison(20, alpha), keys), Ok(()));
        let error = check(&comparison(20, alpha), keys + 1).unwrap_err();
        let remedy = "fewer keys or a lower --confidence";
        assert!(error.contains(remedy) && error.contains("1e-4"), "{error}");
        // A key can have a difference at the smallest error rate.
        let at = alpha / keys as f64;
        let pairs = vec![Pair { off: 1.0, on: 2.0 }; 20];
        let mut rng = Rng::with_seed(1);
        assert!(Bootstrap::new(&pairs, resamples(at), &mut rng).p() <= at);
    }
    let error = check(&ranking(30, 1.0 - 0.9999), 1).unwrap_err();
    assert!(error.contains("give a lower --confidence"), "{error}");
}

/// Checks that a look needs the memory of one bootstrap, not of one for each key.
#[test]
fn a_look_holds_one_bootstrap_at_a_time() {
    HELD.set((0, 0));
    let schedule = Schedule::new(6, comparison(20, 0.05), 0.05, 1);
    let (findings, _) = follow(schedule, &[1.0; 6], &mut Rng::with_seed(3));
    assert_eq!(findings.iter().flatten().count(), 6);
    assert_eq!(HELD.get(), (0, 1));
}

/// Checks a ranking in which every key has an effect and passes the screening.
#[test]
fn a_ranking_ends_if_too_many_keys_pass_the_screening() {
    let mut rng = Rng::with_seed(2);
    // The last look has an error rate of 0.0005, so that it can test five keys.
    for (keys, ends) in [(5, false), (6, true)] {
        let mut schedule = Schedule::new(keys, ranking(90, 0.001), 0.001, 1);
        let (mut untestable, mut runs) = (vec![], 0);
        while let Some(step) = schedule.next(|| false) {
            match step {
                Step::Untestable(keys, why) => {
                    assert!(why.contains("fewer keys"), "{why}");
                    untestable = keys;
                }
                Step::Run(turn) => {
                    runs += 1;
                    let off = 1.0 + 0.02 * normal(&mut rng);
                    schedule.measured(turn.key, Pair { off, on: 2.0 * off });
                }
                Step::Begin(..) => {}
            }
        }
        assert_eq!(untestable.len(), if ends { keys } else { 0 });
        let findings = schedule.findings();
        assert_eq!(differences(&findings).len(), if ends { 0 } else { keys });
        // The looks after 30 and 60 runs can test two and three keys, so they decide about none.
        let pairs = if ends { 10 } else { 10 + 90 };
        assert_eq!(runs, keys * pairs);
    }
}

#[test]
fn a_ranking_finds_effects_early_and_does_not_repeat_the_rest() {
    let mut effects = vec![1.0; 40];
    effects[3] = 2.0;
    effects[17] = 0.9;
    effects[30] = 1.04;
    let schedule = Schedule::new(40, ranking(60, 0.05), 0.05, 5);
    let (findings, runs) = follow(schedule, &effects, &mut Rng::with_seed(4));
    assert_eq!(differences(&findings), [3, 17, 30]);
    let findings: Vec<Finding> = findings.into_iter().flatten().collect();
    // The large effects are decided at the first look.
    assert_eq!([3, 17].map(|key| findings[key].pairs.len()), [20, 20]);
    let screened_out = findings.iter().filter(|one| one.screened_out).count();
    assert!((25..=37).contains(&screened_out), "{screened_out}");
    assert!(runs < 40 * 120 / 2, "{runs} runs");
    for finding in &findings {
        assert_eq!(
            finding.difference,
            !finding.interval.contains(1.0),
            "{finding:?}"
        );
        let expected = if finding.screened_out {
            10..=10
        } else {
            20..=60
        };
        assert!(expected.contains(&finding.pairs.len()), "{finding:?}");
    }
    assert!((findings[3].ratio() - 2.0).abs() < 0.05);
}

/// Checks a comparison and a ranking with keys that have no effect. The error rate is set high, so
/// that few repetitions suffice to measure it.
#[test]
fn no_family_of_keys_that_do_nothing_has_a_difference_more_often_than_stated() {
    const FAMILIES: u32 = 200;
    const ALPHA: f64 = 0.2;
    let deviation = (ALPHA * (1.0 - ALPHA) / f64::from(FAMILIES)).sqrt();
    type Stages = fn() -> Vec<Stage>;
    let procedures: [(&str, usize, Stages); 3] = [
        ("a comparison", 6, || comparison(20, ALPHA)),
        ("a ranking", 20, || ranking(30, ALPHA)),
        ("a long ranking", 20, || ranking(60, ALPHA)),
    ];
    for (name, keys, stages) in procedures {
        let mut rng = Rng::with_seed(21);
        let wrong = (0..FAMILIES).filter(|&seed| {
            let schedule = Schedule::new(keys, stages(), ALPHA, seed.into());
            let (findings, _) = follow(schedule, &vec![1.0; keys], &mut rng);
            !differences(&findings).is_empty()
        });
        let rate = wrong.count() as f64 / f64::from(FAMILIES);
        println!("{name}: {rate}");
        assert!(rate <= ALPHA + 2.0 * deviation, "{name}: {rate}");
    }
}

/// Checks that one effect does not raise the error rate of the other keys.
#[test]
fn a_difference_does_not_bring_others_with_it() {
    const FAMILIES: u32 = 150;
    let mut rng = Rng::with_seed(8);
    let mut effects = vec![1.0; 10];
    effects[4] = 1.5;
    let (mut wrong, mut missed) = (0, 0);
    for seed in 0..FAMILIES {
        let schedule = Schedule::new(10, ranking(30, 0.2), 0.2, seed.into());
        let found = differences(&follow(schedule, &effects, &mut rng).0);
        wrong += u32::from(found.iter().any(|&key| key != 4));
        missed += u32::from(!found.contains(&4));
    }
    assert_eq!(missed, 0);
    assert!(f64::from(wrong) <= 0.265 * f64::from(FAMILIES), "{wrong}");
}
