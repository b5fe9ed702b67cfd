// SPDX-License-Identifier: Apache-2.0
//! Tests what an operator sees and does, in Chromium.

use patchbay_access::policy::LivePolicy;
use patchbay_fleet::rollout::State;
use patchbay_fleet::runner::Command;
use serde_json::json;

use super::browser::{Browser, program};
use super::serve;
use crate::support::{Fleet, spec, tell};

const WAVES: &str = "title: New receive path\nspread_over: rack\ngates: [{pause_p99: 1s, on_failure: pause}]\n\
    waves: [{name: canary, size: 1, bake: 1h}, {name: tenth, size: 10%, bake: 1h}, {name: half, size: 50%, bake: 1h}, {name: rest, size: rest}]";

fn button(name: &str) -> String {
    format!("document.querySelector('[data-command={name}]')")
}

fn is_enabled(name: &str, enabled: bool) -> String {
    format!(
        "{}.getAttribute('aria-disabled') === '{}'",
        button(name),
        !enabled
    )
}

fn phase(name: &str) -> String {
    format!("document.getElementById('phase').textContent === '{name}'")
}

#[tokio::test(flavor = "multi_thread")]
async fn waves_fill_without_a_reload_and_the_keyboard_aborts() {
    let Some(program) = program() else { return };
    let fleet = Fleet::start(70, 2).await;
    let replica = fleet.replica("one");
    let leads = replica.lead().await;
    leads
        .plan("net", &spec(WAVES), "alice")
        .await
        .expect("planned");
    let (url, _serving) = serve(&replica.controller, None).await;
    let mut browser = Browser::start(&program, 1440, 900).await;
    browser.open(&url).await;
    browser.wait(&phase("planned")).await;
    browser.evaluate("window.notReloaded = true").await;
    for (name, enabled) in [
        ("start", true),
        ("pause", false),
        ("resume", false),
        ("promote", false),
        ("abort", true),
    ] {
        browser.wait(&is_enabled(name, enabled)).await;
    }

    browser.tab_to("[data-command=start]").await;
    browser.press("Enter").await;
    browser
        .wait("document.getElementById('confirm').open")
        .await;
    browser.tab_to("#confirm-yes").await;
    browser.press("Enter").await;
    browser.wait(&phase("baking")).await;
    browser
        .wait("document.querySelector('#waves .track').getAttribute('aria-valuenow') === '1'")
        .await;
    for (name, enabled) in [
        ("start", false),
        ("pause", true),
        ("resume", false),
        ("promote", true),
    ] {
        browser.wait(&is_enabled(name, enabled)).await;
    }
    let running = leads.rollout("net").expect("planned");
    for (wave, count) in [(1, 14), (2, 70)] {
        tell(&running, Command::Promote).await;
        let track = format!("document.querySelectorAll('#waves .track')[{wave}]");
        browser
            .wait(&format!(
                "{track}.getAttribute('aria-valuenow') === '{count}'"
            ))
            .await;
    }
    browser
        .wait("document.querySelectorAll('#heat-table td[data-heat=\"4\"]').length > 10")
        .await;
    browser
        .wait("document.querySelectorAll('#heat-table tbody td').length === 64")
        .await;
    browser
        .wait("document.querySelectorAll('#guests-rows tr').length === 100")
        .await;
    assert_eq!(browser.evaluate("window.notReloaded").await, json!(true));
    for scheme in ["light", "dark"] {
        browser.prefer(scheme).await;
        browser.picture(&format!("rollout-{scheme}")).await;
    }
    browser.prefer("light").await;

    browser.tab_to("[data-command=abort]").await;
    browser.press("Enter").await;
    browser
        .wait("document.activeElement.id === 'confirm-no'")
        .await;
    browser.picture("confirm").await;
    browser.press("Escape").await;
    browser
        .wait("!document.getElementById('confirm').open")
        .await;
    browser.wait(&phase("baking")).await;
    browser
        .wait(&format!("document.activeElement === {}", button("abort")))
        .await;
    browser.press("Enter").await;
    browser.tab_to("#confirm-yes").await;
    browser.press("Enter").await;
    browser.wait(&phase("aborted")).await;
    browser.wait(&is_enabled("abort", false)).await;
    browser
        .wait("document.getElementById('trail-rows').innerText.includes('aborted')")
        .await;
    assert!(fleet.counts("alpha").iter().all(|&count| count == 0));
    browser.picture("aborted").await;
    assert_eq!(browser.evaluate("window.notReloaded").await, json!(true));
    assert_eq!(browser.complaints(&url), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plan_that_needs_two_people_is_approved_and_not_started() {
    let Some(program) = program() else { return };
    let fleet = Fleet::start(1, 1).await;
    let replica = fleet.replica("one");
    let leads = replica.lead().await;
    let text = spec("approvals: 2\nwaves: [{name: rest, size: rest}]");
    let running = leads.plan("net", &text, "alice").await.expect("planned");
    let folder = tempfile::tempdir().expect("temporary folder");
    let file = folder.path().join("policy.yaml");
    let by = format!("uid:{}", rustix::process::geteuid().as_raw());
    let rules = format!("rules: [{{name: two, principals: ['{by}', bob], role: operator}}]");
    std::fs::write(&file, rules).expect("written");
    let policy = LivePolicy::read(file).expect("good");
    let (url, _serving) = serve(&replica.controller, Some(policy)).await;
    let mut browser = Browser::start(&program, 1280, 900).await;
    browser.open(&url).await;
    browser.wait(&phase("planned")).await;
    browser.wait(&is_enabled("start", false)).await;
    browser.wait(&is_enabled("approve", true)).await;
    browser.tab_to("[data-command=approve]").await;
    browser.press("Enter").await;
    browser.tab_to("#confirm-yes").await;
    browser.press("Enter").await;
    browser.wait(&is_enabled("approve", false)).await;
    browser.wait(&is_enabled("start", false)).await;
    assert_eq!(running.rollout().header().approvals, [by]);

    let digest = running.rollout().header().digest.clone();
    let approve = Command::Approve { digest };
    let answer = running.command(approve, "bob").await.expect("it runs");
    answer.expect("planned");
    browser.wait(&is_enabled("start", true)).await;
    assert_eq!(browser.complaints(&url), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_is_changed_again_has_one_row() {
    let Some(program) = program() else { return };
    let fleet = Fleet::start(1, 2).await;
    let replica = fleet.replica("one");
    let running = replica.start("net", &spec("waves: [{size: rest}]")).await;
    let (url, _serving) = serve(&replica.controller, None).await;
    let mut browser = Browser::start(&program, 1280, 900).await;
    browser.open(&url).await;
    browser.wait(&phase("completed")).await;
    let mut again = running.rollout().members()[0].clone();
    again.state = State::Pending;
    let added = vec![again];
    let extend = Command::Extend {
        name: "drift-1".to_owned(),
        added,
        by_waves: false,
    };
    tell(&running, extend).await;
    let states = |wanted: &str| {
        format!(
            "[...document.querySelectorAll('#guests-rows .state')].map((one) => one.textContent).join() === '{wanted}'"
        )
    };
    browser.wait(&states("as wanted,as wanted")).await;
    let (drifted, joined) = (vec![1], vec![]);
    tell(&running, Command::Adopt { drifted, joined }).await;
    browser.wait(&states("adopted,as wanted")).await;
    assert_eq!(browser.complaints(&url), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_says_why_it_waits_and_a_key_who_holds_it() {
    let Some(program) = program() else { return };
    let fleet = Fleet::start(4, 3).await;
    let replica = fleet.replica("one");
    let running = replica
        .start("net", &spec("waves: [{size: 1, bake: 1h}, {size: rest}]"))
        .await;
    let (url, _serving) = serve(&replica.controller, None).await;
    let mut browser = Browser::start(&program, 1280, 900).await;
    browser.open(&url).await;
    browser
        .wait("document.querySelectorAll('#guests-rows tr').length === 12")
        .await;
    browser.evaluate("document.getElementById('guests-state').value = 'pending'; document.getElementById('guests-state').dispatchEvent(new Event('change'))").await;
    browser
        .wait("document.querySelectorAll('#guests-rows tr').length === 11")
        .await;
    browser.tab_to("#guests-rows button").await;
    browser.press("Enter").await;
    browser.wait("document.querySelector('#guests-rows .reasons').textContent.includes('it is in wave 2')").await;

    browser.wait("document.querySelectorAll('#heat-table td[data-heat=\"1\"], #heat-table td[data-heat=\"2\"]').length === 1").await;
    browser.evaluate("document.querySelector('#heat-table td[data-heat=\"1\"], #heat-table td[data-heat=\"2\"]').click()").await;
    browser
        .wait("document.getElementById('holders-table').innerText.includes('rollout/net')")
        .await;
    browser.picture("holders").await;

    // The guest drops the key's reference by itself.
    let changed = fleet
        .counts("alpha")
        .iter()
        .position(|&count| count == 1)
        .expect("one");
    fleet.guests[changed].set_count("alpha", 0);
    browser
        .wait("document.querySelectorAll('#heat-table td[data-differs=yes]').length === 1")
        .await;
    tell(&running, Command::Undo).await;
    browser
        .wait("document.getElementById('phase').textContent === 'undone'")
        .await;
    assert_eq!(browser.complaints(&url), Vec::<String>::new());

    let blocked = "new Promise((resolve) => {
        document.addEventListener('securitypolicyviolation', (event) => resolve(event.violatedDirective), { once: true });
        const script = document.createElement('script');
        script.textContent = 'window.injected = true';
        document.body.append(script);
    })";
    assert_eq!(browser.evaluate(blocked).await, json!("script-src-elem"));
    assert!(browser.evaluate("window.injected").await.is_null());
}
