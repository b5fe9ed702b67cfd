// SPDX-License-Identifier: Apache-2.0
//! Runs a fuzz target over its corpus and over mutations of it, without a fuzzer.

use std::path::Path;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

/// A change of one corpus file.
#[derive(Clone, Debug)]
enum Mutation {
    Set(Index, u8),
    Flip(Index, u8),
    Insert(Index, Vec<u8>),
    Remove(Index, u8),
    Append(Index),
}

fn mutation() -> impl Strategy<Value = Mutation> {
    let at = any::<Index>;
    prop_oneof![
        3 => (at(), any::<u8>()).prop_map(|(at, byte)| Mutation::Set(at, byte)),
        3 => (at(), 0..8_u8).prop_map(|(at, bit)| Mutation::Flip(at, 1 << bit)),
        2 => (at(), vec(any::<u8>(), 1..12)).prop_map(|(at, bytes)| Mutation::Insert(at, bytes)),
        1 => (at(), 1..12_u8).prop_map(|(at, bytes)| Mutation::Remove(at, bytes)),
        1 => at().prop_map(Mutation::Append),
    ]
}

fn apply(bytes: &mut Vec<u8>, mutation: &Mutation, corpus: &[Vec<u8>]) {
    match mutation {
        Mutation::Set(at, byte) if !bytes.is_empty() => {
            let at = at.index(bytes.len());
            bytes[at] = *byte;
        }
        Mutation::Flip(at, bit) if !bytes.is_empty() => {
            let at = at.index(bytes.len());
            bytes[at] ^= bit;
        }
        Mutation::Insert(at, new) => {
            let at = at.index(bytes.len() + 1);
            bytes.splice(at..at, new.iter().copied());
        }
        Mutation::Remove(at, length) if !bytes.is_empty() => {
            let at = at.index(bytes.len());
            bytes.drain(at..bytes.len().min(at + usize::from(*length)));
        }
        Mutation::Append(file) if !corpus.is_empty() => {
            bytes.extend_from_slice(&corpus[file.index(corpus.len())]);
        }
        _ => {}
    }
}

/// Name and entry point of a target.
type Named<'a> = (&'a str, fn(&[u8]));

/// Runs the target `name` over every file of its corpus in the package, and over `cases` mutations.
/// The mutations are the same in every run.
pub fn short_run(targets: &[Named<'_>], name: &str, cases: u32) {
    let (_, target) = targets
        .iter()
        .find(|(target, _)| *target == name)
        .expect("a target of this name");
    // The variable is read at run time, because Git clones that share a target folder also share
    // this test binary.
    let package = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it");
    let corpora = Path::new(&package).join("fuzz/corpus");
    let folder = corpora.join(name);
    let mut corpus = vec![];
    for file in std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{folder:?}: {error}")) {
        let path = file.expect("a file").path();
        let bytes = std::fs::read(&path).expect("readable");
        println!("{}", path.display());
        target(&bytes);
        corpus.push(bytes);
    }
    assert!(!corpus.is_empty(), "{folder:?} is empty");
    // The order of a directory listing is not defined.
    corpus.sort();
    let config = Config {
        cases,
        failure_persistence: None,
        ..Config::default()
    };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let inputs = (any::<Index>(), vec(mutation(), 1..8));
    let result = TestRunner::new_with_rng(config, rng).run(&inputs, |(file, mutations)| {
        let mut bytes = corpus[file.index(corpus.len())].clone();
        for mutation in &mutations {
            apply(&mut bytes, mutation, &corpus);
        }
        target(&bytes);
        Ok(())
    });
    if let Err(error) = result {
        panic!("{name}: {error}");
    }
}

/// Defines a test for each named target, which runs the target over its corpus and over `$cases`
/// mutations.
#[allow(unused_macros, reason = "some crates name their targets otherwise")]
macro_rules! short_runs {
    ($targets:expr, $cases:expr; $($name:ident),+) => {
        $(
            #[test]
            fn $name() {
                short_run::short_run($targets, stringify!($name), $cases);
            }
        )+
    };
}
#[allow(unused_imports, reason = "some crates name their targets otherwise")]
pub(crate) use short_runs;
