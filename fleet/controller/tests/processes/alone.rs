// SPDX-License-Identifier: Apache-2.0
//! Tests a controller whose store no other replica can use.

use std::process::Command;

use patchbay_proto::fleet::v1;

use super::fleet::Replica;

/// Checks that a controller that was killed leads when it is started again, although the lease of
/// its previous run would have lasted longer than the test.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_controller_does_not_wait_for_its_own_lease() {
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
    second.logged(" leads").await;
    let listed = second.rollouts().list(v1::ListRequest {}).await;
    listed.expect("the controller leads");
}
