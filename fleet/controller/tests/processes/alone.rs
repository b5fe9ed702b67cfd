// SPDX-License-Identifier: Apache-2.0
//! Tests a controller whose store no other replica can use.

use std::process::Command;

use patchbay_proto::fleet::v1;
use tonic::Code;

use super::fleet::{PATIENCE, Replica};

/// Checks what a controller says after it was killed, while the lease of its previous run lasts.
/// There is no other replica that it could name.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_controller_waits_for_its_own_lease_and_says_so() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let start = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_patchbay-fleet"));
        command.args([
            "--standalone",
            "--host=a=/nonexistent",
            "--lease-seconds=300",
        ]);
        for option in ["store", "archive", "socket"] {
            command.arg(format!("--{option}={}", path(option).display()));
        }
        command.env_remove("PATCHBAY_LOG").env_remove("RUST_LOG");
        Replica::spawn(command, path("socket"))
    };
    let first = start();
    first.logged(" leads").await;
    drop(first);
    let second = start();
    let refused = async {
        loop {
            let listed = second.rollouts().list(v1::ListRequest {}).await;
            let refused = listed.expect_err("the lease lasts longer than the test");
            // The socket may not be there yet.
            if refused.message().contains("lead") {
                return refused;
            }
        }
    };
    let refused = tokio::time::timeout(PATIENCE, refused).await;
    let refused = refused.expect("in time");
    assert_eq!(refused.code(), Code::Unavailable);
    assert_eq!(
        refused.message(),
        "this controller does not lead yet, because its previous run was killed and the lease of \
         that run has not ended; try again within 300 s"
    );
}
