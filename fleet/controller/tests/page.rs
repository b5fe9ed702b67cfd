// SPDX-License-Identifier: Apache-2.0
//! Tests the controller's page by HTTP requests and in a browser.

#[path = "page/browser.rs"]
mod browser;
#[path = "page/contrast.rs"]
mod contrast;
#[path = "page/head.rs"]
mod head;
#[path = "page/narrow.rs"]
mod narrow;
#[path = "page/refused.rs"]
mod refused;
#[path = "page/remote.rs"]
mod remote;
#[path = "page/scale.rs"]
mod scale;
#[path = "page/seen.rs"]
mod seen;
#[path = "rollouts/support.rs"]
#[allow(dead_code)]
mod support;
#[path = "page/unknown.rs"]
mod unknown;

use std::sync::Arc;

use patchbay_access::policy::LivePolicy;
use patchbay_fleet::controller::Controller;
use patchbay_fleet::page::{Config, Page};
use tokio::task::JoinSet;

/// Serves the page on a free port until the tasks are dropped. Without a policy the user that runs
/// the test may do everything.
async fn serve(controller: &Arc<Controller>, policy: Option<LivePolicy>) -> (String, JoinSet<()>) {
    let own = rustix::process::geteuid().as_raw();
    let config = Config {
        address: "127.0.0.1:0".parse().expect("an address"),
        tls: None,
        policy: policy.unwrap_or_else(|| LivePolicy::own_user_only(own)),
    };
    let page = Page::bind(config, Arc::clone(controller))
        .await
        .expect("free");
    let url = page.link().expect("bound");
    let mut serving = JoinSet::new();
    serving.spawn(page.run());
    (url, serving)
}
