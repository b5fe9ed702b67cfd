// SPDX-License-Identifier: Apache-2.0
//! Tests that the page and the metrics agree on guests that do not answer any more.

use patchbay_fleet::rollout::{Member, Phase};
use patchbay_fleet::runner::{Command, Running};
use patchbay_fleet::scrape;
use serde_json::json;

use super::browser::{Browser, program};
use super::serve;
use crate::support::{Fleet, is_over, spec, tell, wait_for};

/// Makes the rollout ask its guests now, and not at the next interval.
async fn look_again(running: &Running) {
    running.rollout().look_again(None);
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
    browser
        .wait("document.getElementById('safety').dataset.level === 'attention'")
        .await;
    browser.picture("unknown").await;
    assert_eq!(browser.complaints(&url), Vec::<String>::new());
}

fn text(id: &str, part: &str) -> String {
    format!(
        "document.getElementById('{id}').textContent.includes({})",
        json!(part)
    )
}
