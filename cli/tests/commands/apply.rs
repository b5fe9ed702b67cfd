// SPDX-License-Identifier: Apache-2.0

use super::lab::{Commands, Lab};

#[test]
fn apply_takes_json_and_yaml_and_is_all_or_nothing() {
    let lab = Lab::new();
    let file = lab.folder().join("changes");
    let path = file.to_str().expect("text");
    std::fs::write(
        &file,
        r#"[{"key": "alpha", "op": "inc"}, {"key": "beta", "op": "enable"}]"#,
    )
    .expect("writable");
    lab.ok(&["keys", "apply", "-f", path]);
    assert_eq!((lab.guest.count("alpha"), lab.guest.count("beta")), (1, 1));
    std::fs::write(
        &file,
        "- key: alpha\n  op: dec\n- key: sched_switch\n  op: dec\n",
    )
    .expect("writable");
    let message = lab.fails(1, &["keys", "apply", "-f", path]);
    assert!(message.contains("sched_switch"), "{message}");
    assert_eq!(lab.guest.count("alpha"), 1);
    for bad in [
        "",
        "[]",
        "{}",
        "- key: alpha",
        "- {key: alpha, op: toggle}",
        "- {key: a, op: inc, extra: 1}",
        "\u{1}",
    ] {
        std::fs::write(&file, bad).expect("writable");
        let message = lab.fails(2, &["keys", "apply", "-f", path]);
        assert!(message.contains(path), "{message}");
    }
    lab.fails(2, &["keys", "apply", "-f", "/nonexistent"]);
}

#[test]
fn a_listing_brings_keys_back() {
    let lab = Lab::new();
    lab.ok(&["keys", "enable", "alpha"]);
    let file = lab.folder().join("listing");
    let path = file.to_str().expect("text");
    for format in ["yaml", "json"] {
        std::fs::write(&file, lab.ok(&["keys", "list", "-o", format])).expect("writable");
        let output = lab.run(&["keys", "apply", "-f", path]);
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            said.contains("nothing to change: 4 keys are as the file says"),
            "{said}"
        );
        let pauses = lab.guest.pauses();
        lab.ok(&["keys", "disable", "alpha"]);
        lab.ok(&["keys", "enable", "beta"]);
        lab.ok(&["keys", "apply", "-f", path]);
        assert_eq!((lab.guest.count("alpha"), lab.guest.count("beta")), (1, 0));
        assert_eq!(lab.guest.pauses(), pauses + 3, "one transaction");
    }
    std::fs::write(&file, "- {name: alhpa, enabled: true}\n").expect("writable");
    let message = lab.fails(1, &["keys", "apply", "-f", path]);
    assert!(message.contains("did you mean \"alpha\""), "{message}");
}

#[test]
fn entries_may_have_patterns() {
    let lab = Lab::new();
    let file = lab.folder().join("changes");
    let path = file.to_str().expect("text");
    let text = "- {patterns: ['*', '!beta'], classes: [ref], op: inc}\n- {key: beta, op: enable}\n";
    std::fs::write(&file, text).expect("writable");
    lab.ok(&["keys", "apply", "-f", path]);
    assert_eq!((lab.guest.count("alpha"), lab.guest.count("beta")), (1, 1));
    std::fs::write(
        &file,
        "- {key: alpha, op: inc}\n- {key: alpha, enabled: true}\n",
    )
    .expect("writable");
    let message = lab.fails(2, &["keys", "apply", "-f", path]);
    assert!(message.contains("line 2"), "{message}");
}
