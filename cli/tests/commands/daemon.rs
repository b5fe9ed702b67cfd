// SPDX-License-Identifier: Apache-2.0
//! Runs the daemon of a host in front of a lab's guest.

use patchbay_access::listen::DEFAULT_STREAM_AGE;
use patchbay_node::monitors::RunDirs;
use patchbay_node::serve::{Config, serve};
use tokio::runtime::Runtime;

use super::lab::{Commands, Lab, runtime};

/// Returns the configuration of a daemon without a policy.
pub fn config(lab: &Lab) -> Config {
    Config {
        run_dirs: RunDirs(vec![lab.folder().join("patchbay")]),
        socket: lab.folder().join("node.sock"),
        socket_mode: 0o600,
        listen: None,
        policy: None,
        max_stream_age: DEFAULT_STREAM_AGE,
        audit_log: lab.folder().join("host-audit.log"),
        metrics: None,
        guests: patchbay_node::guests::Guests::default(),
        attach: patchbay_node::attach::Attach::default(),
        autopsies: None,
        registry: None,
    }
}

/// Starts a daemon, which ends with its runtime.
pub fn start(config: Config) -> Runtime {
    let runtime = runtime();
    runtime.spawn(async move {
        let (_reloads, reload) = tokio::sync::mpsc::channel(1);
        serve(config, reload, std::future::pending())
            .await
            .expect("it serves");
    });
    runtime
}
