// SPDX-License-Identifier: Apache-2.0
//! Computes the contrast of the page's colours from its stylesheet, as WCAG 2.2 defines it.

use std::collections::BTreeMap;

const STYLE: &str = include_str!("../../src/page/assets/style.css");

type Colours = BTreeMap<String, [f64; 3]>;

/// Returns the custom properties of a block that are colours.
fn colours(block: &str) -> Colours {
    let lines = block.split(';').filter_map(|line| {
        let (name, value) = line.rsplit_once("--")?.1.split_once(": #")?;
        let value = u32::from_str_radix(value.trim(), 16).ok()?;
        let part = |shift: u32| f64::from(value >> shift & 0xff) / 255.0;
        Some((name.to_owned(), [part(16), part(8), part(0)]))
    });
    lines.collect()
}

/// Returns the colours of the light and the dark scheme.
fn schemes() -> [(&'static str, Colours); 2] {
    let (light, rest) = STYLE
        .split_once("@media (prefers-color-scheme: dark)")
        .expect("a dark scheme");
    let (dark, _) = rest.split_once("* {").expect("rules");
    let light = colours(light);
    let mut both = light.clone();
    both.extend(colours(dark));
    [("light", light), ("dark", both)]
}

fn luminance(colour: [f64; 3]) -> f64 {
    let linear = |part: f64| match part <= 0.04045 {
        true => part / 12.92,
        false => ((part + 0.055) / 1.055).powf(2.4),
    };
    let [red, green, blue] = colour.map(linear);
    0.2126 * red + 0.7152 * green + 0.0722 * blue
}

fn contrast(one: [f64; 3], other: [f64; 3]) -> f64 {
    let (one, other) = (luminance(one), luminance(other));
    (one.max(other) + 0.05) / (one.min(other) + 0.05)
}

#[track_caller]
fn check(scheme: &str, colours: &Colours, front: &str, back: &str, least: f64) {
    let found = contrast(colours[front], colours[back]);
    assert!(
        found >= least,
        "{scheme}: {front} on {back} has a contrast of {found:.2}"
    );
}

#[test]
fn text_has_a_contrast_of_at_least_4_5() {
    for (scheme, colours) in &schemes() {
        for front in [
            "text",
            "dim",
            "accent",
            "as-wanted",
            "changing",
            "not-yet",
            "released",
            "warn",
            "danger",
        ] {
            for back in ["page", "panel"] {
                check(scheme, colours, front, back, 4.5);
            }
        }
        check(scheme, colours, "danger", "accent-soft", 4.5);
        // Buttons that carry out a command, and numbers in the cells of keys on hosts.
        for (front, back) in [
            ("panel", "accent"),
            ("panel", "danger"),
            ("panel", "heat-4"),
        ] {
            check(scheme, colours, front, back, 4.5);
        }
        for heat in 0..4 {
            check(scheme, colours, "text", &format!("heat-{heat}"), 4.5);
        }
    }
}

#[test]
fn bars_and_the_borders_of_cells_have_a_contrast_of_at_least_3() {
    for (scheme, colours) in &schemes() {
        for front in [
            "as-wanted",
            "changing",
            "not-yet",
            "released",
            "forgotten",
            "warn",
            "dim",
            "edge",
            "differs",
        ] {
            check(scheme, colours, front, "panel", 3.0);
        }
    }
    // The lighter cells, and the part of a bar that waits, are visible by their border.
    for rule in [
        "[data-heat] { box-shadow: inset 0 0 0 1px var(--edge); }",
        ".track { display: flex; height: 16px; border: 1px solid var(--edge);",
    ] {
        assert!(STYLE.contains(rule), "{rule}");
    }
}

#[test]
fn the_contrast_is_that_of_the_definition() {
    let [black, white, grey] = [0.0, 1.0, f64::from(0x76) / 255.0].map(|part| [part; 3]);
    assert!((contrast(black, white) - 21.0).abs() < 1e-9);
    assert!((contrast(grey, white) - 4.54).abs() < 0.01);
}
