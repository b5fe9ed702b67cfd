// SPDX-License-Identifier: Apache-2.0

use patchbay_guest::testing::TestKey;

use super::lab::{Commands, Host, Lab};

#[test]
fn a_dry_run_prints_the_plan_and_commit_makes_it() {
    let host = Host::with(&["only"]);
    let text = host.ok(&[
        "keys",
        "enable",
        "*",
        "!gamma",
        "--dry-run",
        "--plan-ttl",
        "5m",
    ]);
    for part in [
        "alpha  0 -> 1  2\n",
        "2 of 2 keys would change\n",
        "nothing was changed; 4 sites to patch, predicted pause 42.5 us\n",
        "plan plan-1, kept until 2023-11-14T22:13:20Z\n",
        "digest d16e57\n",
        "patchbay keys commit plan-1\n",
    ] {
        assert!(text.contains(part), "{part:?} is missing: {text}");
    }
    assert_eq!(host.fake.guest("only", |guest| guest.count("alpha")), 0);
    assert_eq!(
        host.fake
            .seen("plan_ttl: Some(Duration { seconds: 300")
            .len(),
        1
    );
    let text = host.ok(&["keys", "commit", "plan-1", "--digest", "d16e57"]);
    assert!(
        text.contains("alpha  0 -> 1") && text.contains("beta"),
        "{text}"
    );
    assert_eq!(host.fake.guest("only", |guest| guest.count("beta")), 1);
}

/// Checks that the printed command selects the guest of the plan, however the preparing command
/// selected it.
#[test]
fn the_command_that_is_printed_makes_the_plan() {
    let host = Host::new();
    let socket = host.folder().join("host/all.sock");
    let socket = socket.to_str().expect("text");
    for target in [
        &["--guest", "web-1"][..],
        &["--guest", "web-[1]"],
        &["--socket", socket, "--guest", "web-1"],
    ] {
        let plan = ["keys", "inc", "alpha", "--dry-run"];
        let text = host.ok(&[target, &plan].concat());
        let command = text
            .lines()
            .find_map(|line| line.split_once("make it with: patchbay "));
        let words: Vec<&str> = command.expect(&text).1.split(' ').collect();
        assert!(words.starts_with(&target[..target.len() - 2]), "{words:?}");
        let before = host.fake.guest("web-1", |guest| guest.count("alpha"));
        host.ok(&words);
        let after = host.fake.guest("web-1", |guest| guest.count("alpha"));
        assert_eq!(after, before + 1, "{words:?}");
    }
}

#[test]
fn plans_are_for_programs_too() {
    let host = Host::with(&["only"]);
    let plan = host.json(&["keys", "disable", "alpha", "--dry-run"]);
    assert_eq!(plan["predicted_pause_us"], 42.5);
    assert_eq!(
        (&plan["plan_id"], &plan["digest"]),
        (&"plan-1".into(), &"d16e57".into())
    );
    let dry_run = ["keys", "inc", "alpha", "--dry-run", "-o", "name"];
    assert_eq!(host.ok(&dry_run), "plan-2\n");
    assert_eq!(
        host.ok(&["keys", "discard", "plan-2"]),
        "plan plan-2 is discarded\n"
    );
    let message = host.fails(1, &["keys", "commit", "plan-2"]);
    assert!(message.contains("--dry-run"), "{message}");
    let message = host.fails(1, &["keys", "commit", "plan-1", "--digest", "other"]);
    assert!(message.contains("--dry-run"), "{message}");
    let file = host.folder().join("changes");
    std::fs::write(&file, "- {key: beta, op: inc}\n").expect("writable");
    let path = file.to_str().expect("text");
    let plan = host.json(&["keys", "apply", "--dry-run", "-f", path]);
    assert_eq!(plan["results"][0]["name"], "beta");
}

#[test]
fn the_real_service_keeps_a_plan_and_makes_it_once() {
    let lab = Lab::new();
    let plan = lab.json(&["keys", "enable", "*a", "--dry-run"]);
    assert_eq!((&plan["keys_changed"], lab.guest.pauses()), (&2.into(), 0));
    let id = plan["plan_id"].as_str().expect("text");
    let digest = plan["digest"].as_str().expect("text");
    let message = lab.fails(1, &["keys", "commit", id, "--digest", "00"]);
    assert!(message.contains("--dry-run"), "{message}");
    for _ in 0..2 {
        lab.ok(&["keys", "commit", id, "--digest", digest]);
        assert_eq!((lab.guest.count("alpha"), lab.guest.pauses()), (1, 1));
    }
    let stale = lab.ok(&["keys", "disable", "alpha", "--dry-run", "-o", "name"]);
    lab.ok(&["keys", "inc", "alpha"]);
    lab.fails(1, &["keys", "commit", stale.trim()]);
    lab.ok(&["keys", "discard", stale.trim()]);
    assert_eq!(lab.guest.count("alpha"), 2);
}

#[test]
fn what_is_known_about_guarded_keys_is_shown() {
    let keys = [
        TestKey::guarded("psi_disabled"),
        TestKey::guarded("sched_schedstats"),
        TestKey::guarded("unheard_of"),
    ];
    let lab = Lab::with_guarded(&keys, true);
    let text = lab.ok(&["keys", "list"]);
    assert_eq!(text.matches("flip: ").count(), 2, "{text}");
    assert!(text.contains("flip: guest-state"), "{text}");
    let text = lab.ok(&["keys", "get", "psi_disabled"]);
    assert!(
        text.contains("  guest-state: ") && text.contains("  source: kernel/sched/psi.c "),
        "{text}"
    );
    let key = lab.json(&["keys", "get", "unheard_of"]);
    assert!(key[0].get("advice").is_none(), "{key}");
    let change = ["keys", "enable", "*", "--allow-guarded", "--dry-run"];
    let text = lab.ok(&change);
    assert!(
        text.contains("\nguest-state: psi_disabled: ") && !text.contains("safe: sched_schedstats"),
        "{text}"
    );
    let plan = lab.json(&change);
    let results = plan["results"].as_array().expect("results");
    let of = |name: &str| {
        let found = results.iter().find(|result| result["name"] == name);
        found.expect("planned")["advice"]["safety"].clone()
    };
    assert_eq!(of("psi_disabled"), "guest-state");
    assert_eq!(of("sched_schedstats"), "safe");
    assert!(of("unheard_of").is_null());
}

#[test]
fn torn_keys_are_found_and_repaired() {
    let lab = Lab::with(&[TestKey::new("alpha", 2), TestKey::new("beta", 1)]);
    let text = lab.ok(&["keys", "verify"]);
    assert!(text.contains("2 keys with 3 sites: each site"), "{text}");
    let site = lab.guest.sites("alpha")[1];
    lab.guest.set_count("alpha", 1);
    let jump: [u8; 5] = lab.guest.read(site);
    lab.guest.set_count("alpha", 0);
    lab.guest.write(site, &jump[..1]);
    let found = lab.json(&["keys", "verify", "al*"]);
    assert_eq!(
        (&found["keys"], &found["torn_total"]),
        (&1.into(), &1.into())
    );
    assert_eq!(lab.ok(&["keys", "verify", "-o", "name"]), "alpha\n");
    let text = lab.ok(&["keys", "repair", "alpha"]);
    assert!(text.contains("dry run: nothing was changed"), "{text}");
    assert_eq!(lab.guest.read::<1>(site)[0], jump[0]);
    let text = lab.ok(&["keys", "repair", "alpha", "--yes"]);
    assert!(text.contains("1 site repaired"), "{text}");
    assert!(!lab.guest.jumps("alpha"));
    let text = lab.ok(&["keys", "repair", "alpha", "--yes"]);
    assert!(text.contains("nothing to repair"), "{text}");
    lab.guest.write(site, &[0xcc]);
    let message = lab.fails(1, &["keys", "repair", "alpha", "--yes"]);
    assert!(message.contains("no mixture"), "{message}");
}
