// SPDX-License-Identifier: Apache-2.0
//! Tests the systemd units of the daemon and of its attachers with guests of QEMU.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use patchbay_proto::client;
use patchbay_proto::v1::guest_service_client::GuestServiceClient;
use patchbay_proto::v1::static_keys_service_client::StaticKeysServiceClient;
use patchbay_proto::v1::{
    ListGuestsRequest, ListStaticKeysRequest, PauseGuestRequest, ResumeGuestRequest,
    ShutdownGuestRequest,
};
use tonic::transport::Channel;

#[path = "../../../tests/unit/boot.rs"]
mod boot;

const PROGRAM: &str = env!("CARGO_BIN_EXE_patchbayd");
const UNIT: &str = include_str!("../patchbayd.service");
const ATTACH: &str = include_str!("../../../attach/patchbay-attach.service");
/// The variable that makes the test's program run as a client of the daemon. Its value is the
/// daemon's socket.
const SOCKET: &str = "PATCHBAY_TEST_SOCKET";
const LOG: &str = "[Service]\nStandardError=append:/host/journal\n";
/// The variable that makes this client cut the power of the guest that is found by its process.
const CUT: &str = "PATCHBAY_TEST_CUT";
/// Timeout for a daemon to discover its guests. It is long, because an emulated computer is slow.
const PATIENCE: Duration = Duration::from_secs(120);
/// The names of the QEMUs, after the backends of their memory. The QEMU without a QMP socket is
/// found by its process. It belongs to the user nobody, who may not name it.
const GUESTS: [&str; 4] = ["file", "kvm:65534:", "memfd", "private"];

#[test]
fn a_daemon_without_the_rights_serves_qemus_of_another_user() {
    if let Ok(socket) = std::env::var(SOCKET) {
        return uses_guests(&socket);
    }
    let attacher = Path::new(PROGRAM).with_file_name("patchbay-attach");
    if !attacher.exists() {
        return println!("SKIPPED: patchbay-attach is not built; `cargo xtask test` builds it");
    }
    let qemu = Command::new("qemu-system-x86_64").arg("--version").output();
    if qemu.is_err() || !has_kvm() {
        return println!("SKIPPED: there is no qemu-system-x86_64, or no usable /dev/kvm");
    }
    let client = std::env::current_exe().expect("a program");
    let [attacher, client] = [&attacher, &client].map(|path| path.display().to_string());
    let name = client.rsplit('/').next().unwrap_or_default();
    let steps = include_str!("unit/attach.sh").replace("CLIENT", name);
    let machine = boot::Machine {
        programs: &[PROGRAM, &attacher, &client],
        units: &[
            ("patchbayd.service", UNIT),
            ("patchbay-attach.service", ATTACH),
            ("patchbayd.service.d/log.conf", LOG),
            ("patchbay-attach.service.d/log.conf", LOG),
        ],
        steps: &steps,
        etc: &[
            (
                "policy.yaml",
                b"rules: [{name: root, principals: ['uid:0'], role: admin}]\n",
            ),
            ("attach.conf", b"OPTIONS=--qmp /run/vm\n"),
        ],
    };
    let Some(host) = machine.run() else { return };
    let read = |name: &str| std::fs::read_to_string(host.path().join(name)).unwrap_or_default();
    let journal = read("journal");
    assert_eq!(read("done"), "all\n", "{}{journal}", read("log"));
    assert!(journal.contains("listening"), "{journal}");
    assert!(!journal.contains("is not watched"), "{journal}");
    // The daemon has CAP_DAC_READ_SEARCH and CAP_SETUID. The attachers, and the process that starts
    // them, have CAP_DAC_OVERRIDE, CAP_SETGID, CAP_SETUID, CAP_SYS_PTRACE, CAP_PERFMON and CAP_BPF.
    for (name, capabilities) in [
        ("status.daemon", "0000000000000084"),
        ("status.attach", "000000c0000800c2"),
        ("status.attacher", "000000c0000800c2"),
    ] {
        let status = read(name);
        for line in [
            &format!("CapEff:\t{capabilities}\n"),
            &format!("CapBnd:\t{capabilities}\n"),
            "NoNewPrivs:\t1\n",
            "Seccomp:\t2\n",
        ] {
            assert!(status.contains(line), "{name}: {status}");
        }
    }
    assert_eq!(read("modes"), "755 root root\n600 root root\n");
    assert_eq!(read("agent"), "600 nobody\n");
}

fn has_kvm() -> bool {
    let mut options = std::fs::File::options();
    options.read(true).write(true).open("/dev/kvm").is_ok()
}

/// Waits until the daemon serves the guests, and returns their names.
async fn served(socket: &str) -> (Channel, Vec<String>) {
    let channel = loop {
        let connector = client::unix_socket(socket);
        if let Ok(channel) = client::endpoint().connect_with_connector(connector).await {
            break channel;
        }
    };
    let mut guests = GuestServiceClient::new(channel.clone());
    loop {
        let list = guests.list_guests(ListGuestsRequest::default()).await;
        let list = list.expect("a list").into_inner().guests;
        let names: Vec<String> = list.into_iter().map(|guest| guest.guest).collect();
        let is_one = |(name, guest): (&String, &str)| match guest.ends_with(':') {
            true => name.starts_with(guest),
            false => name == guest,
        };
        if names.len() == GUESTS.len() && names.iter().zip(GUESTS).all(is_one) {
            return (channel, names);
        }
    }
}

/// Stops each guest of the daemon, and reads its memory.
#[tokio::main]
async fn uses_guests(socket: &str) {
    let channel = tokio::time::timeout(PATIENCE, served(socket)).await;
    let (channel, names) = channel.expect("the daemon serves all guests in time");
    let mut guests = GuestServiceClient::new(channel.clone());
    for name in &names {
        // A busy host may take long to schedule a guest's thread.
        let patience = std::time::Duration::from_secs(30);
        let pause = PauseGuestRequest {
            guest: name.to_owned(),
            timeout: patience.try_into().ok(),
            ..Default::default()
        };
        guests.pause_guest(pause).await.expect("it stops");
        let resume = ResumeGuestRequest {
            guest: name.to_owned(),
        };
        guests.resume_guest(resume).await.expect("it runs");
        let keys = ListStaticKeysRequest {
            guest: name.to_owned(),
            ..Default::default()
        };
        let mut client = StaticKeysServiceClient::new(channel.clone());
        let error = client.list_static_keys(keys).await.expect_err("firmware");
        assert!(error.message().contains("kernel"), "{error}");
    }
    if std::env::var_os(CUT).is_some() {
        let name = names.iter().find(|name| name.starts_with("kvm:"));
        let cut = ShutdownGuestRequest {
            guest: name.expect("served").to_owned(),
            force: true,
            ..Default::default()
        };
        let cut = guests.shutdown_guest(cut).await.expect("it ends");
        assert!(cut.into_inner().power_cut);
    }
}
