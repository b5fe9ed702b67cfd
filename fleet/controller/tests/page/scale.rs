// SPDX-License-Identifier: Apache-2.0
//! Tests the page with a thousand hosts: the size of its content stays bounded, and every host can
//! be found.

use patchbay_fleet::hosts::HostEndpoint;
use patchbay_fleet::runner::Command;
use rustix::process::{Resource, getrlimit, setrlimit};
use serde_json::json;

use super::browser::{Browser, program};
use super::serve;
use crate::support::{Fleet, PATIENCE, spec, tell};

const HOSTS: usize = 1000;
/// The number of hosts that are shown at the same time.
const SHOWN: usize = 64;

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_hosts_are_shown_in_pages() {
    let Some(program) = program() else { return };
    // Every host has a connection.
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).expect("a process may raise its limit");
    let fleet = Fleet::start(HOSTS, 1).await;
    // The lease is long, because planning a thousand guests in one process can delay a renewal.
    let replica = fleet.replica_with("one", PATIENCE);
    let leads = replica.lead().await;
    let text = spec("spread_over: rack\nwaves: [{size: 10%, bake: 1h}, {size: rest}]");
    leads.plan("net", &text, "alice").await.expect("planned");
    let (url, _serving) = serve(&replica.controller, None).await;
    let mut browser = Browser::start(&program, 1440, 900).await;
    browser.open(&url).await;
    browser
        .wait("document.getElementById('phase').textContent === 'planned'")
        .await;
    let shown = format!("document.querySelectorAll('#heat-table tbody td').length === {SHOWN}");
    browser.wait(&shown).await;
    // All hosts have answered.
    browser
        .wait("document.querySelectorAll('#heat-table td[data-heat=\"0\"]').length === 64")
        .await;

    let sizes = "(async () => {
        const heat = await (await fetch('/api/heat?find=&from=0')).text();
        const state = await new Promise((resolve) => {
            const events = new EventSource('/api/events?rollout=net');
            events.onmessage = (event) => { events.close(); resolve(event.data); };
        });
        const guests = await (await fetch('/api/guests?rollout=net')).text();
        return [state.length, heat.length, guests.length, document.querySelectorAll('*').length];
    })()";
    let sizes = browser.evaluate(sizes).await;
    let sizes: Vec<u64> = serde_json::from_value(sizes).expect("numbers");
    let paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime";
    let paint = browser.evaluate(paint).await;
    eprintln!("first paint after {paint} ms; state, heat, guests in bytes, nodes: {sizes:?}");
    // The sizes are bounded, whatever the number of hosts.
    for (size, most) in sizes.iter().zip([8 << 10, 32 << 10, 32 << 10, 4000]) {
        assert!(*size > 100 && *size < most, "{sizes:?}");
    }

    // Shows the last page, and finds a host by its name.
    let summary = "document.getElementById('heat-summary').textContent";
    browser
        .wait(&format!("{summary}.startsWith('{HOSTS} hosts')"))
        .await;
    let find = "const find = document.getElementById('heat-find');
        find.value = 'host-997'; find.dispatchEvent(new Event('input'))";
    browser.evaluate(find).await;
    let head = "document.querySelectorAll('#heat-table thead th')";
    browser
        .wait(&format!(
            "{head}.length === 2 && {head}[1].textContent === 'host-997'"
        ))
        .await;

    // The progress of a wave is shown without a reload of the page.
    browser.evaluate("window.notReloaded = true").await;
    let running = leads.rollout("net").expect("planned");
    let digest = running.rollout().header().digest.clone();
    tell(&running, Command::Start { digest }).await;
    browser
        .wait("document.querySelector('#waves .track').getAttribute('aria-valuenow') === '100'")
        .await;
    assert_eq!(browser.evaluate("window.notReloaded").await, json!(true));
    browser.picture("thousand-hosts").await;
    assert_eq!(browser.complaints(&url), Vec::<String>::new());
}

/// Tests a host that accepts connections and never answers. A call to the host times out later than
/// this test's own waits.
#[tokio::test(flavor = "multi_thread")]
async fn a_silent_host_does_not_delay_the_others() {
    let Some(program) = program() else { return };
    let mut fleet = Fleet::start(2, 1).await;
    let folder = tempfile::tempdir().expect("temporary folder");
    let socket = folder.path().join("silent.sock");
    let _silent = std::os::unix::net::UnixListener::bind(&socket).expect("free");
    let mut host = fleet.hosts[0].clone();
    host.name = "silent".to_owned();
    host.endpoint = HostEndpoint::Socket(socket);
    host.labels = [("rack".to_owned(), "c".to_owned())].into();
    fleet.hosts.push(host);
    let replica = fleet.replica("one");
    let leads = replica.lead().await;
    let text = "selector: {labels: {rack: a}}\nclaims: [{want: held, keys: [alpha]}]\nwaves: [{size: rest}]\n";
    leads.plan("net", text, "alice").await.expect("planned");
    let (url, _serving) = serve(&replica.controller, None).await;
    let mut browser = Browser::start(&program, 1280, 900).await;
    browser.open(&url).await;
    let cells = "document.querySelectorAll('#heat-table td[data-heat=\"0\"]').length === 2";
    browser.wait(cells).await;
}
