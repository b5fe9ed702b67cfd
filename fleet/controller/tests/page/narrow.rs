// SPDX-License-Identifier: Apache-2.0
//! Tests in Chromium that every text can be read on a screen that is 390 px wide.

use patchbay_access::policy::LivePolicy;
use patchbay_fleet::drift::{Action, drift};
use patchbay_fleet::rollout::{Member, Phase, Stage};
use patchbay_proto::v1;
use serde_json::json;

use super::browser::{Browser, program};
use super::serve;
use crate::support::{Fleet, Names, is_over, wait_for};

const WIDTH: u32 = 390;

const GUEST: &str = "virtual-machine-of-the-payment-service-in-production";
const KEY: &str = "a_static_key_with_a_name_of_more_than_the_usual_length_in_a_kernel";
/// An owner of claims without a place at which the name may be broken.
const OWNER: &str =
    "anotherownerwithanameofmorethantheusuallengthwithoutaplaceatwhichitmaybebroken";
const ROLLOUT: &str = "a-rollout-with-a-name-of-more-than-the-usual-length-in-a-fleet";

/// Returns the texts that cannot be read, with the reason. A text can be read if it is within its
/// cell and within the screen, or within a box that scrolls and that the keyboard reaches.
const UNREADABLE: &str = "(() => {
    const found = [];
    const say = (text, why) => found.push(`${why}: ${text.textContent.trim().slice(0, 60)}`);
    const within = (inner, outer, horizontal, vertical) =>
        (!horizontal || (inner.left >= outer.left - 1 && inner.right <= outer.right + 1)) &&
        (!vertical || (inner.top >= outer.top - 1 && inner.bottom <= outer.bottom + 1));
    const screen = { left: 0, right: document.documentElement.clientWidth };
    const scope = document.querySelector('dialog[open]') ?? document.body;
    const walker = document.createTreeWalker(scope, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const text = walker.currentNode;
        const parent = text.parentElement;
        if (!text.textContent.trim() || !parent.checkVisibility() || parent.closest('.skip, option, script, noscript')) continue;
        const range = document.createRange();
        range.selectNodeContents(text);
        for (let rect of range.getClientRects()) {
            const cell = parent.closest('td, th, button, li');
            if (cell && !within(rect, cell.getBoundingClientRect(), true, true)) say(text, `leaves its ${cell.localName}`);
            let [horizontal, vertical] = [true, true];
            for (let box = parent; box !== document.body && (horizontal || vertical); box = box.parentElement) {
                const style = getComputedStyle(box);
                const cuts = (overflow) => overflow === 'hidden' || overflow === 'clip';
                const scrolls = (overflow) => overflow === 'auto' || overflow === 'scroll';
                const border = box.getBoundingClientRect();
                if (!within(rect, border, horizontal && cuts(style.overflowX), vertical && cuts(style.overflowY))) say(text, 'is cut');
                const moves = [horizontal && scrolls(style.overflowX), vertical && scrolls(style.overflowY)];
                if (!within(rect, border, moves[0], moves[1])) {
                    if (box.tabIndex < 0 && !box.querySelector('a')) say(text, 'scrolls, but not by the keyboard');
                }
                // What scrolls is brought into its box, which must itself be on the screen.
                if (moves[0] || moves[1]) rect = border;
            }
            if (!within(rect, screen, true, false)) say(text, 'leaves the screen');
        }
    }
    for (const box of document.querySelectorAll('input, select, button')) {
        if (box.checkVisibility() && box.scrollWidth > box.clientWidth + 1) found.push(`is cut: ${box.id}`);
    }
    return [...new Set(found)];
})()";

/// Checks that everything in the view can be read and that the page does not scroll sideways.
async fn check(browser: &mut Browser, view: &str) {
    browser.picture(&format!("narrow-{view}")).await;
    let found = browser.evaluate(UNREADABLE).await;
    assert_eq!(found, json!([]), "{view}");
    let wide = "document.documentElement.scrollWidth";
    assert_eq!(browser.evaluate(wide).await, json!(WIDTH), "{view}");
}

fn text(id: &str, part: &str) -> String {
    format!(
        "document.getElementById('{id}').textContent.includes({})",
        json!(part)
    )
}

/// Returns a fleet with long names.
fn fleet() -> Fleet {
    let names = Names {
        guest: GUEST,
        keys: &[KEY],
    };
    let mut fleet = Fleet::start_named(8, 2, false, names);
    for (index, host) in fleet.hosts.iter_mut().enumerate() {
        host.name = format!("host-{index}.row-4.hall-north.datacentre.example.org");
    }
    fleet
}

fn spec(more: &str) -> String {
    format!(
        "title: A new path for received packets in the kernels of the payment service\n\
         selector: {{guests: [\"{GUEST}-*\"]}}\nclaims: [{{want: on, keys: [alpha, {KEY}]}}]\n\
         gates: [{{prometheus: {{url: \"http://127.0.0.1:1/a/path/of/a/service/that/does/not/answer\", \
         query: \"sum(rate(errors_of_the_payment_service_total[5m]))\", below: 0.5}}, \
         interval: 10ms, on_failure: pause, patience: 1h}}]\n{more}\n"
    )
}

/// Gives another owner the decision about the key of a guest.
async fn claim(fleet: &Fleet, replica: &crate::support::Replica, guest: usize) {
    let leads = replica.lead().await;
    let host = leads
        .hosts()
        .get(&fleet.hosts[guest / 2].name)
        .expect("known");
    let claim = v1::KeyClaim {
        key: KEY.to_owned(),
        want: v1::ClaimWant::Off.into(),
        patterns: vec![],
    };
    let request = v1::SetClaimsRequest {
        guest: format!("{GUEST}-{guest}"),
        owner: OWNER.to_owned(),
        generation: 1,
        claims: vec![claim],
        ..v1::SetClaimsRequest::default()
    };
    host.set_claims(|| request, "").await.expect("claimed");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_text_of_a_rollout_can_be_read_on_a_narrow_screen() {
    let Some(program) = program() else { return };
    let fleet = fleet();
    let replica = fleet.replica("one");
    let leads = replica.lead().await;
    let waves = "waves: [{name: the-first-wave-with-a-long-name-of-its-own, size: rest, bake: 1h}]";
    let running = leads.plan(ROLLOUT, &spec(waves), "alice").await;
    running.expect("planned");
    claim(&fleet, &replica, 3).await;
    let running = replica.start(ROLLOUT, &spec(waves)).await;
    wait_for(&running, |phase| phase == Phase::Running(Stage::Baking)).await;
    fleet.take_away(5);
    let authority = replica.controller.authority();
    let report = drift(leads.hosts(), authority, &running, Action::Report, "alice").await;
    report.expect("it runs");
    wait_for(&running, |_| {
        running.rollout().members().iter().any(Member::is_unknown)
    })
    .await;

    let (url, _serving) = serve(&replica.controller, None).await;
    let mut browser = Browser::start(&program, WIDTH, 844).await;
    browser.open(&url).await;
    for (id, part) in [
        ("rollouts", ROLLOUT),
        ("gates", "inconclusive"),
        ("waves", OWNER),
        ("guests-rows", OWNER),
        ("trail-rows", "drift: "),
        ("heat-table", KEY),
        ("heat-summary", "1 guest unknown"),
    ] {
        browser.wait(&text(id, part)).await;
    }
    check(&mut browser, "rollout").await;

    // The reasons for the state of each guest, which fill the table.
    browser
        .evaluate(
            "document.querySelectorAll('#guests-rows button.why').forEach((one) => one.click())",
        )
        .await;
    browser
        .wait("[...document.querySelectorAll('#guests-rows .reasons')].every((one) => one.textContent)")
        .await;
    check(&mut browser, "reasons").await;

    // Who holds the key of a host's guests.
    let cell = format!(
        "document.querySelector('#heat-table td[data-host^=\"host-1.\"][data-name=\"{KEY}\"]')"
    );
    browser.evaluate(&format!("{cell}.click()")).await;
    browser.wait(&text("holders-table", "rollout/")).await;
    check(&mut browser, "holders").await;

    // The keyboard reaches each box that scrolls, and shows that it has.
    for title in ["heat", "holders", "guests", "trail"] {
        let scroll = format!(".scroll[aria-labelledby={title}-title]");
        browser.tab_to(&scroll).await;
        let outline = "getComputedStyle(document.activeElement).outlineStyle";
        assert_eq!(browser.evaluate(outline).await, json!("solid"), "{title}");
    }

    // A notice of the controller.
    let notice = format!(
        "(() => {{ const notice = document.getElementById('notice'); notice.hidden = false; notice.textContent = '{OWNER}{OWNER}'; }})()"
    );
    browser.evaluate(&notice).await;
    check(&mut browser, "notice").await;
    assert_eq!(browser.complaints(&url), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn approvals_can_be_read_on_a_narrow_screen() {
    let Some(program) = program() else { return };
    let fleet = fleet();
    let replica = fleet.replica("one");
    let leads = replica.lead().await;
    let person = format!("spiffe://example.org/{OWNER}");
    let running = leads
        .plan(
            ROLLOUT,
            &spec("approvals: 3\nwaves: [{size: rest}]"),
            &person,
        )
        .await;
    let running = running.expect("planned");
    let digest = running.rollout().header().digest.clone();
    let approve = patchbay_fleet::runner::Command::Approve { digest };
    let approved = running.command(approve, &person).await.expect("it runs");
    approved.expect("planned");

    let folder = tempfile::tempdir().expect("temporary folder");
    let file = folder.path().join("policy.yaml");
    let own = rustix::process::geteuid().as_raw();
    let rules =
        format!("rules: [{{name: all, principals: ['uid:{own}', '{person}'], role: operator}}]");
    std::fs::write(&file, rules).expect("written");
    let policy = LivePolicy::read(file).expect("good");
    let (url, _serving) = serve(&replica.controller, Some(policy)).await;
    let mut browser = Browser::start(&program, WIDTH, 844).await;
    browser.open(&url).await;
    for (id, part) in [
        ("facts-approvals", "1 of 3: spiffe://"),
        ("trail-rows", "approved, 1 of 3"),
        ("guests-rows", GUEST),
    ] {
        browser.wait(&text(id, part)).await;
    }
    check(&mut browser, "approvals").await;
    browser.tab_to("[data-command=approve]").await;
    browser.press("Enter").await;
    browser
        .wait("document.getElementById('confirm').open")
        .await;
    check(&mut browser, "confirm").await;
    assert!(!is_over(running.rollout().header().phase));
}
