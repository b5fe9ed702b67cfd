// SPDX-License-Identifier: Apache-2.0
//! Runs the demo of `cargo xtask demo fleet` with few guests.

#[path = "../examples/demo/fleet.rs"]
mod fleet;
#[path = "../examples/demo/page.rs"]
mod page;

use std::sync::Mutex;

use fleet::Size;

/// Checks that each step of the demo happens, in its order and in the words of the page.
#[tokio::test(flavor = "multi_thread")]
async fn the_demo_shows_guests_that_wait_and_why_and_undoes_the_rollout() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let size = Size {
        guests: 50,
        hosts: 10,
        bake: "50ms",
    };
    let lines = Mutex::new(Vec::new());
    let print = |line: String| lines.lock().expect("no panic").push(line);
    let ran = fleet::run(folder.path(), size, false, &print).await;
    let lines = lines.into_inner().expect("no panic");
    ran.unwrap_or_else(|error| panic!("{error:#} after {lines:#?}"));
    let mut rest = lines.iter();
    for (start, part) in [
        ("50 guests on 10 hosts run", ""),
        ("The page ends with this demo", ""),
        ("on-call claims net_rx_fast off on guest web-", ""),
        ("started", ""),
        ("wave canary", ""),
        ("completed", ""),
        ("not yet: web-", "it is not yet as wanted since 20"),
        ("on-call ends the claim", ""),
        ("as wanted: web-", "(the first of 40): it is as wanted"),
        ("host-", " is down"),
        ("drift: 5 differences", ""),
        (
            "unknown: web-",
            "(the first of 5): it was as wanted, and does not answer since 20",
        ),
        ("host-", " is up again"),
        ("as wanted: web-", "(the first of 40): it is as wanted"),
        ("undone", ""),
        ("released: web-", "(the first of 40): its claims have ended"),
        ("No guest has the change.", ""),
    ] {
        let is_it = |line: &&String| {
            let text = line
                .split_once(" s  ")
                .map_or(line.as_str(), |(_, text)| text);
            text.starts_with(start) && text.contains(part)
        };
        assert!(rest.any(|line| is_it(&line)), "{start}…{part}: {lines:#?}");
    }
    let not_yet = lines.iter().find(|line| line.contains("not yet: "));
    let not_yet = not_yet.expect("found above");
    for part in ["key net_rx_fast: ", "on-call decides, which is off"] {
        assert!(not_yet.contains(part), "{part}: {not_yet}");
    }
}
