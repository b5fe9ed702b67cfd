// SPDX-License-Identifier: Apache-2.0

use super::lab::{Commands, Lab};

#[test]
fn claims_of_two_owners_are_listed_and_undone_in_the_order_of_their_start() {
    let lab = Lab::new();
    let text = lab.ok(&["keys", "claim", "set", "canary", "alpha=on", "beta=held"]);
    assert!(text.starts_with("KEY"), "{text}");
    assert!(
        text.contains("canary, generation 1: 2 keys, done; intent "),
        "{text}"
    );
    assert_eq!((lab.guest.count("alpha"), lab.guest.count("beta")), (1, 1));
    let other = [
        "keys",
        "claim",
        "set",
        "incident",
        "alpha=off",
        "--reason",
        "hot",
    ];
    let answer = lab.json(&other);
    assert_eq!(answer["keys"][0]["state"], "made");
    assert_eq!(
        (&answer["keys"][0]["count_before"], lab.guest.count("alpha")),
        (&1.into(), 0)
    );
    let claims = lab.json(&["keys", "claims", "alpha"]);
    let row = |at: usize| {
        let claim = &claims[at];
        ["owner", "want", "state", "decides"].map(|field| claim[field].to_string())
    };
    assert_eq!(
        row(0),
        ["\"canary\"", "\"on\"", "\"held-by-others\"", "false"]
    );
    assert_eq!(row(1), ["\"incident\"", "\"off\"", "\"made\"", "true"]);
    assert_eq!(claims[0]["decided_by"]["owner"], "incident");
    assert_eq!(claims[1].get("decided_by"), None);
    let text = lab.ok(&["keys", "claims", "--not-made"]);
    assert!(text.contains("held-by-others (incident decides)"), "{text}");
    let of = ["keys", "claims", "--owner", "canary", "-o", "name"];
    assert_eq!(lab.ok(&of), "alpha\nbeta\n");
    let not_made = ["keys", "claims", "--not-made", "-o", "name"];
    assert_eq!(lab.ok(&not_made), "alpha\n");
    let uid = rustix::process::getuid().as_raw();
    let nobody = ["keys", "claims", "--principal", "uid:12345", "-o", "name"];
    assert_eq!(lab.ok(&nobody), "");
    // The references are holds.
    let holds = lab.json(&["holds", "list"]);
    assert_eq!(holds[0]["holder"], format!("uid:{uid} · canary"));
    lab.ok(&["keys", "claim", "clear", "canary"]);
    assert_eq!((lab.guest.count("alpha"), lab.guest.count("beta")), (0, 0));
    lab.ok(&["keys", "claim", "clear", "incident"]);
    assert_eq!(lab.guest.count("alpha"), 0);
    let (out, said, code) = lab.all(&["keys", "claims"]);
    assert_eq!((out.as_str(), code), ("", Some(0)));
    assert_eq!(said, "patchbay: no claims found\n");
    let audit = lab.audit();
    let intents = audit.iter().filter(|line| line["event"] == "intent");
    let reasons = intents.filter_map(|line| line["reason"].as_str());
    assert_eq!(
        reasons.collect::<Vec<_>>(),
        [
            "claims of canary in generation 1",
            "claims of incident in generation 1: hot",
            "claims of canary in generation 2",
        ]
    );
}

#[test]
fn a_claim_that_a_hold_keeps_from_its_effect_names_no_owner() {
    let lab = Lab::new();
    lab.ok(&["keys", "inc", "beta"]);
    let set = lab.all(&["keys", "claim", "set", "quiet", "beta=off"]);
    assert_eq!(set.2, Some(3), "{set:?}");
    // A later claim wants the same, so it is not the cause either.
    let set = lab.all(&["keys", "claim", "set", "later", "beta=off"]);
    assert_eq!(set.2, Some(3), "{set:?}");
    let claims = lab.json(&["keys", "claims", "beta"]);
    for claim in [&claims[0], &claims[1]] {
        assert_eq!(claim["state"], "held-by-others");
        assert_eq!(claim.get("decided_by"), None, "{claims}");
    }
}

#[test]
fn generations_are_found_and_late_ones_are_refused() {
    let lab = Lab::new();
    let set = |generation: &str, claim: &str| {
        lab.all(&[
            "keys",
            "claim",
            "set",
            "canary",
            claim,
            "--generation",
            generation,
        ])
    };
    assert_eq!(set("5", "alpha=on").2, Some(0));
    let (out, _, code) = set("5", "alpha=on");
    assert!(out.contains("made before") && code == Some(0), "{out}");
    for (generation, claim) in [("4", "beta=on"), ("5", "beta=on")] {
        let (_, said, code) = set(generation, claim);
        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains("generation"), "{said}");
    }
    let next = lab.json(&["keys", "claim", "set", "canary", "alpha=held"]);
    assert_eq!(next["generation"], 6);
    // Setting the same claims again applies them again, because the guest may have changed the key.
    lab.guest.set_count("alpha", 0);
    let next = lab.json(&["keys", "claim", "set", "canary", "alpha=held"]);
    assert_eq!(
        (&next["generation"], lab.guest.count("alpha")),
        (&7.into(), 1)
    );
}

#[test]
fn keys_that_are_not_as_wanted_are_shown_and_end_with_status_3() {
    let lab = Lab::new();
    let set = [
        "keys",
        "claim",
        "set",
        "canary",
        "alpha=on",
        "guarded=on",
        "nothing=on",
    ];
    let (out, said, code) = lab.all(&set);
    assert_eq!(code, Some(3), "{said}");
    assert!(out.contains("refused") && out.contains("missing"), "{out}");
    assert!(said.contains("guarded and 1 others"), "{said}");
    assert_eq!(lab.guest.count("alpha"), 1);
    let dry = ["keys", "claim", "set", "dry", "beta=on", "--dry-run"];
    let answer = lab.json(&dry);
    assert_eq!(
        (&answer["dry_run"], lab.guest.count("beta")),
        (&true.into(), 0)
    );
    let digest = answer["intent_digest"].as_str().expect("text");
    let other = [
        "keys",
        "claim",
        "set",
        "x",
        "beta=off",
        "--intent-digest",
        digest,
    ];
    let message = lab.fails(1, &other);
    assert!(message.contains("approve"), "{message}");
    lab.ok(&[
        "keys",
        "claim",
        "set",
        "x",
        "beta=on",
        "--intent-digest",
        digest,
    ]);
    assert_eq!(lab.guest.count("beta"), 1);
    for usage in [
        &["keys", "claim"][..],
        &["keys", "claim", "set", "canary"],
        &["keys", "claim", "set", "canary", "alpha"],
        &["keys", "claim", "set", "canary", "alpha=maybe"],
        &[
            "keys",
            "claim",
            "set",
            "canary",
            "alpha=on",
            "--generation",
            "0",
        ],
        &["keys", "claim", "set", "", "alpha=on"],
        &["keys", "claim", "clear"],
        &["keys", "claim", "set", "caf\u{e9}", "alpha=on"],
        &["keys", "claim", "set", "a", "alpha=on", "alpha=off"],
    ] {
        assert_eq!(lab.run(usage).status.code(), Some(2), "{usage:?}");
    }
}
