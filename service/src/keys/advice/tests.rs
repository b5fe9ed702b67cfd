// SPDX-License-Identifier: Apache-2.0

use std::collections::BTreeSet;

use super::*;

fn catalogue() -> Catalogue {
    Catalogue::read(GUARDED).expect("well-formed")
}

#[test]
fn the_catalogue_is_well_formed_and_cites_its_sources() {
    let catalogue = catalogue();
    assert!(catalogue.advice.len() > 60, "{}", catalogue.advice.len());
    for advice in &catalogue.advice {
        let Advice { text, source, .. } = advice;
        assert!(text.ends_with('.'), "{text}");
        let mut files = 0;
        for word in source.split([',', ' ']).filter(|word| !word.is_empty()) {
            let file = word.contains('/') && (word.ends_with(".c") || word.ends_with(".h"));
            files += usize::from(file);
            assert!(file || word.ends_with("()"), "{word} in {source}");
        }
        assert!(files > 0, "{source} names no file");
        assert!(advice.kernel.includes("6.1.0-56-cloud-amd64", ""));
        assert!(advice.kernel.includes("6.12.117+deb12-amd64", ""));
        assert!(!advice.kernel.includes("5.10.0-46-amd64", ""));
        assert!(!advice.kernel.includes("6.13.1", ""));
    }
}

/// No name is in two entries, so the order of the entries has no effect.
#[test]
fn each_key_has_one_entry() {
    let catalogue = catalogue();
    for (name, entries) in &catalogue.names {
        assert_eq!(entries.len(), 1, "{name}");
    }
    let beginnings: BTreeSet<&str> = catalogue
        .beginnings
        .iter()
        .map(|(beginning, _)| &**beginning)
        .collect();
    assert_eq!(beginnings.len(), catalogue.beginnings.len());
    for one in &beginnings {
        let others = beginnings.iter().filter(|other| other.starts_with(one));
        assert_eq!(others.count(), 1, "{one} begins others");
    }
}

/// The trials agree with the safety: a key that is called safe harmed no guest.
#[test]
fn trials_agree_with_the_entries() {
    let contents: Contents = serde_yaml_ng::from_str(GUARDED).expect("well-formed");
    let catalogue = catalogue();
    for trial in &contents.trials {
        let release = trial.kernel.0.split(' ').next().expect("a release");
        let harmed = matches!(trial.outcome, Outcome::Died | Outcome::Complained);
        for Text(key) in &trial.keys {
            let advice = catalogue.find(key, release);
            let advice = advice.unwrap_or_else(|| panic!("{key} was tried and has no entry"));
            assert!(!(harmed && advice.safety == Safety::Safe), "{key}");
        }
    }
}

#[test]
fn a_whole_name_precedes_a_beginning_and_ranges_bound() {
    let text = "kernel: {from: '6.1', to: '6.12'}\n\
        entries:\n\
        - {keys: ['a*'], safety: safe, text: T., source: s}\n\
        - {keys: ['ab'], safety: crashes, text: T., source: s}\n\
        - {keys: ['c'], kernel: {from: '6.6', to: '6.6'}, safety: guest-state, text: T., source: s}\n\
        trials:\n\
        - {kernel: '6.1', seconds: 10, outcome: died, keys: [ab]}\n\
        - {kernel: '6.2', seconds: 10, outcome: fine, keys: [ab]}\n";
    let catalogue = Catalogue::read(text).expect("well-formed");
    let safety = |name: &str, release: &str| {
        let advice = catalogue.find(name, release);
        advice.map(|advice| advice.safety)
    };
    assert_eq!(safety("abc", "6.1.9"), Some(Safety::Safe));
    assert_eq!(safety("ab", "6.12.1-amd64"), Some(Safety::Crashes));
    assert_eq!(safety("ab", "6.13.0"), None);
    assert_eq!(safety("ab", "nonsense"), None);
    assert_eq!(safety("c", "6.1.0"), None);
    assert_eq!(safety("c", "6.6.3"), Some(Safety::GuestState));
    assert_eq!(safety("", "6.6.3"), None);
    let tried = catalogue.trials.get("ab").expect("tried twice");
    assert!(tried.contains("6.1: the guest died; flipped"), "{tried}");
}

#[test]
fn a_malformed_catalogue_is_refused() {
    let good = "kernel: {from: '6.1', to: '6.12'}\n\
        entries:\n- {keys: [a], safety: safe, text: T., source: s}\ntrials: []\n";
    Catalogue::read(good).expect("well-formed");
    for (old, new) in [
        ("safety: safe", "safety: harmless"),
        ("source: s", "sauce: s"),
        (", source: s", ""),
        ("keys: [a]", "keys: ['']"),
        ("text: T.", "text: \"\\u001b\""),
        ("{from: '6.1', to: '6.12'}", "{from: '6.12', to: '6.1'}"),
        ("trials: []", ""),
    ] {
        let text = good.replace(old, new);
        Catalogue::read(&text).expect_err(&text);
    }
}
