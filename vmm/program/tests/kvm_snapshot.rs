// SPDX-License-Identifier: Apache-2.0

//! Saves a guest over the API of a confined monitor, and starts copies of it.

#[path = "../../tests/bare_metal/mod.rs"]
mod bare_metal;
mod program;

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};

use bare_metal::{wait_until, watchdog};
use patchbay_proto::client;
use patchbay_proto::v1::guest_service_client::GuestServiceClient;
use patchbay_proto::v1::{GuestState, ListGuestsRequest, SnapshotGuestRequest};
use program::{Case, Monitor, TALKING, has_kvm};
use rustix::process::Signal;
use tonic::transport::Channel;

async fn client(socket: &Path) -> GuestServiceClient<Channel> {
    let connector = client::unix_socket(socket);
    let channel = client::endpoint().connect_with_connector(connector).await;
    GuestServiceClient::new(channel.unwrap())
}

/// Saves the guest of a socket in a folder, and returns the guest's state afterwards.
async fn save(socket: &Path, folder: &Path) -> GuestState {
    let mut client = client(socket).await;
    let memory = File::create_new(folder.join("memory")).unwrap();
    let mut state = File::create_new(folder.join("state")).unwrap();
    let request = SnapshotGuestRequest::default();
    let mut parts = client.snapshot_guest(request).await.unwrap().into_inner();
    while let Some(part) = parts.message().await.unwrap() {
        if part.memory_bytes > 0 {
            memory.set_len(part.memory_bytes).unwrap();
        }
        memory
            .write_all_at(&part.memory, part.memory_offset)
            .unwrap();
        state.write_all(&part.state).unwrap();
    }
    let guests = client.list_guests(ListGuestsRequest::default()).await;
    guests.unwrap().into_inner().guests[0].state()
}

/// Returns the command that starts a copy with these names of its files.
fn copy(case: &Case, name: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_patchbay-vmm"));
    command
        .args(["--from", "snapshot", "--name", name, "--rng", "true"])
        .args(["--api-socket", &format!("{name}.api")])
        .args(["--audit-log", &format!("{name}.audit")])
        .args(["--console", &format!("file:{name}.console")])
        .current_dir(case.folder.path())
        .stdin(Stdio::null());
    command
}

#[test]
fn copies_of_a_confined_guest_run_beside_it() {
    let _watchdog = watchdog(120);
    if !has_kvm() {
        return;
    }
    let case = Case::new(TALKING);
    let files = ["--console", "file:console", "--audit-log", "audit"];
    let mut first = Monitor::start(case.program(&[&files[..], &["--api-socket", "api"]].concat()));
    wait_until("the guest types", || !case.read("console").is_empty());
    wait_until("the API answers", || case.answers("api"));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    std::fs::create_dir(case.path("snapshot")).unwrap();
    let state = runtime.block_on(save(&case.path("api"), &case.path("snapshot")));
    assert_eq!(state, GuestState::Running);
    let audit = case.read("audit");
    assert!(audit.contains(r#""reads":"snapshot""#), "{audit}");

    let mut copies = ["a", "b"].map(|name| Monitor::start(copy(&case, name)));
    for name in ["a", "b"] {
        wait_until("the copy types", || {
            case.read(&format!("{name}.console")).starts_with('x')
        });
        let audit = case.read(&format!("{name}.audit"));
        let line = audit.lines().next().unwrap_or_default();
        assert!(
            line.contains(r#""event":"copied","origin":"default""#),
            "{line}"
        );
    }
    // The name, and with it the socket, is taken.
    let again = copy(&case, "a").output().unwrap();
    let text = String::from_utf8_lossy(&again.stderr);
    assert!(text.contains("a running program already serves"), "{text}");
    let devices = copy(&case, "c").args(["--vsock", "v"]).output().unwrap();
    let text = String::from_utf8_lossy(&devices.stderr);
    assert!(text.contains("give the same --disk"), "{text}");
    std::fs::remove_file(case.path("snapshot/state")).unwrap();
    let missing = copy(&case, "d").output().unwrap();
    let text = String::from_utf8_lossy(&missing.stderr);
    assert!(text.contains("snapshot/state"), "{text}");

    for monitor in copies.iter_mut().chain([&mut first]) {
        assert!(monitor.runs());
        monitor.signal(Signal::TERM);
        assert!(monitor.wait().success());
    }
}
