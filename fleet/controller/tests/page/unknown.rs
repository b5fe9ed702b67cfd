// SPDX-License-Identifier: Apache-2.0
//! Tests that the page and the metrics agree on guests that do not answer any more.

use patchbay_fleet::hosts::News;
use patchbay_fleet::rollout::{Member, Phase, Stage};
use patchbay_fleet::runner::{Command, Running};
use patchbay_fleet::scrape;
use serde_json::json;

use super::browser::{Browser, program};
use super::serve;
use crate::support::{Fleet, is_over, spec, tell, wait_for};

/// Makes the rollout ask its guests now, and not at the next interval.
async fn look_again(running: &Running) {
    running.rollout().look_again(&News::default());
    let text = "a look".to_owned();
    tell(running, Command::Drifted { text }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_does_not_answer_is_unknown_everywhere() {
    let fleet = Fleet::start(2, 2).await;
    let replica = fleet.replica("one");
    let running = replica.start("net", &spec("waves: [{size: rest}]")).await;
    assert_eq!(wait_for(&running, is_over).await, Phase::Completed);
    fleet.take_away(3);
    look_again(&running).await;
    wait_for(&running, |_| {
        running.rollout().members().iter().any(Member::is_unknown)
    })
    .await;
    let metrics = scrape::text(&replica.controller).expect("encoded");
    for (state, count) in [("as_wanted", 3), ("unknown", 1), ("not_yet", 0)] {
        let line =
            format!("patchbay_fleet_rollout_guests{{rollout=\"net\",state=\"{state}\"}} {count}");
        assert!(metrics.contains(&line), "{line} in {metrics}");
    }

    let Some(program) = program() else { return };
    let (url, _serving) = serve(&replica.controller, None).await;
    let mut browser = Browser::start(&program, 1280, 900).await;
    browser.open(&url).await;
    for (id, part) in [
        (
            "safety",
            "1 guest does not answer, so its state is unknown. The first since 20",
        ),
        ("facts-guests", "3 of 4 guests on 2 hosts as wanted"),
        ("waves", "1 unknown"),
        ("rollouts", "needs you: guests do not answer"),
        ("rollouts", "1 unknown"),
        (
            "heat-summary",
            "2 hosts, 0 with differences, 1 guest unknown",
        ),
        ("guests-rows", "it was as wanted, and does not answer"),
    ] {
        browser.wait(&text(id, part)).await;
    }
    let marked = "document.querySelectorAll('#heat-table td[data-unknown=yes]').length === 1";
    browser.wait(marked).await;
    // It is named below its wave.
    let below = "document.querySelector('#waves .troubled li').textContent";
    let named = browser.evaluate(below).await;
    let named = named.as_str().expect("a text");
    assert!(
        named.starts_with("unknown web-3 on host-1 since 20")
            && named.ends_with(": it was as wanted, and does not answer"),
        "{named}"
    );
    browser
        .wait("document.getElementById('safety').dataset.level === 'attention'")
        .await;
    browser.picture("unknown").await;
    assert_eq!(browser.complaints(&url), Vec::<String>::new());
}

/// Checks that the page does not show a guest as wanted above that its own queries do not find
/// below.
#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_the_page_misses_is_unknown_to_the_rollout() {
    let Some(program) = program() else { return };
    let fleet = Fleet::start(1, 2).await;
    let replica = fleet.replica("one");
    let running = replica.start("net", &spec("waves: [{size: rest}]")).await;
    assert_eq!(wait_for(&running, is_over).await, Phase::Completed);
    let (url, _serving) = serve(&replica.controller, None).await;
    let mut browser = Browser::start(&program, 1280, 900).await;
    browser.open(&url).await;
    let seen = "document.querySelector('#heat-table td')?.textContent === '2/2'";
    browser.wait(seen).await;
    fleet.take_away(0);
    browser.wait(&text("heat-summary", "1 guest unknown")).await;
    browser
        .wait(&text("safety", "1 guest does not answer"))
        .await;
    assert!(running.rollout().members()[0].is_unknown());
}

#[tokio::test(flavor = "multi_thread")]
async fn waves_are_as_wide_as_their_guests_and_name_those_that_wait() {
    let Some(program) = program() else { return };
    let fleet = Fleet::start(1, 4).await;
    let replica = fleet.replica("one");
    let waves = "waves: [{name: canary, size: 1, bake: 1h}, {name: all, size: rest}]";
    let waits = "gates: [{agent_health: {max_new_warnings: 0}, on_failure: abort}]";
    let running = replica
        .start("net", &spec(&format!("{waves}\n{waits}")))
        .await;
    // The canary has no agent to observe, so it is not changed.
    wait_for(&running, |phase| phase == Phase::Running(Stage::Baking)).await;
    let (url, _serving) = serve(&replica.controller, None).await;
    let mut browser = Browser::start(&program, 1280, 900).await;
    browser.open(&url).await;
    browser.wait(&text("waves", "1 not yet")).await;
    for width in [1280, 390] {
        browser.resize(width, 900).await;
        let widths = "[...document.querySelectorAll('#waves .track')].map((one) => one.getBoundingClientRect().width)";
        let widths = browser.evaluate(widths).await;
        let width = |index: usize| widths[index].as_f64().expect("a number");
        let ratio = width(1) / width(0);
        assert!((ratio - 3.0).abs() < 0.1, "{widths}");
    }
    let below = "[...document.querySelectorAll('#waves > li')].map((one) => one.querySelector('.troubled').textContent)";
    let below = browser.evaluate(below).await;
    let named = below[0].as_str().expect("a text");
    assert!(
        named.starts_with("not yet web-0 on host-0 since 20") && named.contains("agent"),
        "{named}"
    );
    assert_eq!(below[1], "");
    let since = "document.querySelector('#guests-rows .text').textContent.startsWith('since 20')";
    browser.wait(since).await;
    browser.picture("waves").await;
    assert_eq!(browser.complaints(&url), Vec::<String>::new());
}

fn text(id: &str, part: &str) -> String {
    format!(
        "document.getElementById('{id}').textContent.includes({})",
        json!(part)
    )
}
