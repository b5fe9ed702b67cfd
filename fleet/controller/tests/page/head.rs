// SPDX-License-Identifier: Apache-2.0
//! Tests the head of a rollout's page, the list, and narrow screens, in Chromium.

use patchbay_fleet::rollout::{End, Phase};
use patchbay_fleet::runner::Command;
use serde_json::json;

use super::browser::{Browser, program};
use super::serve;
use crate::support::{Fleet, spec, tell, wait_for};

/// A gate that nobody answers, and that pauses the rollout soon.
const CLOSES: &str = "gates: [{grpc: {url: \"http://127.0.0.1:1\"}, interval: 10ms, patience: 30ms, \
                      on_failure: pause}]\nwaves: [{name: canary, size: 1}, {size: rest}]";

fn text(id: &str, part: &str) -> String {
    format!(
        "document.getElementById('{id}').textContent.includes({})",
        json!(part)
    )
}

fn level(level: &str) -> String {
    format!("document.getElementById('safety').dataset.level === '{level}'")
}

#[tokio::test(flavor = "multi_thread")]
async fn the_head_says_if_it_is_safe_and_what_to_do() {
    let Some(program) = program() else { return };
    let fleet = Fleet::start(2, 2).await;
    let replica = fleet.replica("one");
    let (url, _serving) = serve(&replica.controller, None).await;
    let mut browser = Browser::start(&program, 390, 844).await;
    browser.open(&url).await;
    // Without a rollout, the page explains how to create one.
    replica.lead().await;
    browser
        .wait("!document.getElementById('no-rollouts').hidden")
        .await;
    let running = replica.start("net", &spec(CLOSES)).await;
    wait_for(&running, |phase| phase == Phase::Paused).await;
    let digest = running.rollout().header().digest.clone();
    browser.wait(&level("danger")).await;
    for (id, part) in [
        (
            "safety",
            "Gate 1 is closed. What is changed stays until you decide.",
        ),
        ("facts-keys", "held: alpha"),
        ("facts-guests", "1 of 4 guests on 2 hosts as wanted"),
        ("gates", "closed grpc http://127.0.0.1:1"),
        ("facts-approvals", "1 of 1: alice"),
        ("facts-digest", digest.as_str()),
        (
            "next",
            "promote begins wave 2 at once, and SKIPS the closed gate 1",
        ),
        ("next", "undo takes the change of 1 guest back"),
        ("rollouts", "needs you: a gate is closed"),
        ("message", " UTC."),
    ] {
        browser.wait(&text(id, part)).await;
    }
    // Only legal commands are offered.
    let shown = "[...document.querySelectorAll('[data-command]')].filter((one) => !one.hidden).map((one) => one.dataset.command).join()";
    assert_eq!(
        browser.evaluate(shown).await,
        json!("resume,promote,abort,undo")
    );
    // On a narrow screen nothing is wider than the screen.
    assert_eq!(
        browser
            .evaluate("document.documentElement.scrollWidth")
            .await,
        json!(390)
    );
    let cut = "[...document.querySelectorAll('#waves *, #facts *, #commands *, #safety, .bar *')]
        .filter((one) => one.getClientRects().length && one.getBoundingClientRect().right > 390).map((one) => one.outerHTML).join()";
    assert_eq!(browser.evaluate(cut).await, json!(""));
    browser.picture("narrow").await;

    browser.tab_to("[data-command=promote]").await;
    browser.press("Enter").await;
    browser
        .wait(&text("confirm-text", "SKIPS the closed gate 1"))
        .await;
    browser.wait(&text("confirm-yes", "Skip the gate")).await;
    browser.press("Escape").await;
    // After an undo the pauses are still there.
    let pauses = "document.querySelectorAll('#guests-rows td.number:not(:empty)').length === 1";
    browser.wait(pauses).await;
    tell(&running, Command::Undo).await;
    wait_for(&running, |phase| phase == Phase::Ended(End::Undone)).await;
    browser.wait(&level("safe")).await;
    browser
        .wait(&text("safety", "No guest has the change."))
        .await;
    browser
        .wait(&text("pauses-text", "1 guest was stopped"))
        .await;
    browser.wait(pauses).await;
    browser.evaluate("document.getElementById('rollout-find').value = 'other'; document.getElementById('rollout-find').dispatchEvent(new Event('input'))").await;
    browser
        .wait("!document.getElementById('no-match').hidden")
        .await;
    assert_eq!(browser.complaints(&url), Vec::<String>::new());
}
