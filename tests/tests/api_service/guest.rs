// SPDX-License-Identifier: Apache-2.0
//! Tests the guest as a whole: describe, pause, console, and the end of the service.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use patchbay_guest::abi;
use patchbay_guest::guest::Machine;
use patchbay_guest::testing::{Gate, InMemoryGuest, TestKey};
use patchbay_proto::v1;
use patchbay_proto::v1::KeyOp;
use patchbay_service::api::{ApiSocket, SocketError};
use patchbay_service::keys::{Keys, KeysConfig, PauseRequest, Registry};
use tokio_stream::StreamExt;
use tonic::Code;
use zerocopy::IntoBytes;

use super::support::{PATIENCE, Served, Setup, assert_refused, every_kind};

mod shutdown;

async fn describe(served: &Served) -> v1::DescribeGuestResponse {
    served
        .guest_client()
        .describe_guest(v1::DescribeGuestRequest::default())
        .await
        .expect("always answered")
        .into_inner()
}

#[tokio::test]
async fn describes_what_is_registered() {
    let served = Served::start().await;
    assert_eq!(
        served.guest.add_module("ext4", &[TestKey::new("own", 2)]),
        0
    );
    let guest = describe(&served).await;
    assert_eq!(
        (
            guest.guest_status().guest.as_str(),
            guest.vcpus,
            guest.memory_bytes
        ),
        ("test", 1, 72 << 20)
    );
    assert_eq!(guest.guest_status().state(), v1::GuestState::Running);
    assert_eq!(
        guest.guest_status().registration(),
        v1::RegistrationState::Registered
    );
    assert_eq!((guest.keys, guest.sites, guest.modules), (9, 12, 1));
    assert_eq!(guest.guest_status().kernel_release, "6.12.0");
    assert_eq!(guest.guest_status().kernel_build_id, "ab".repeat(20));
    assert_eq!(guest.monitor_pid, std::process::id());
    assert_eq!(guest.transport(), v1::Transport::Hypercall);
    assert_ne!(guest.guest_status().generation, 0);
}

#[tokio::test]
async fn each_state_of_the_registration_is_told() {
    let served = Served::with(Setup::default()).await;
    assert_eq!(
        describe(&served).await.guest_status().registration(),
        v1::RegistrationState::Absent
    );
    assert_eq!(served.guest.register(&every_kind()), 0);
    assert_eq!(
        describe(&served).await.guest_status().registration(),
        v1::RegistrationState::Registered
    );
    assert_eq!(served.guest.unregister(), 0);
    assert_eq!(
        describe(&served).await.guest_status().registration(),
        v1::RegistrationState::Withdrawn
    );
    let result = served.op("alpha", KeyOp::Inc).await;
    assert_refused(result, Code::FailedPrecondition, "GUEST_NOT_REGISTERED");
    served
        .guest_client()
        .shutdown_guest(v1::ShutdownGuestRequest {
            force: true,
            ..Default::default()
        })
        .await
        .expect("shut down");
    assert_eq!(
        describe(&served).await.guest_status().state(),
        v1::GuestState::Stopped
    );
}

type Break = fn(&mut abi::Descriptor);

/// Checks that each of these registrations is refused with -EINVAL and a message that names the
/// fault, and leaves nothing registered.
#[tokio::test]
async fn refused_registrations_say_why() {
    let served = Served::with(Setup::default()).await;
    let breaks: [(&str, Break); 21] = [
        ("magic", |d| d.header.magic ^= 1),
        ("ABI version", |d| d.header.abi_version = 2),
        ("bytes", |d| d.header.size = 8),
        ("generation", |d| d.header.generation = 0),
        ("boot", |d| d.boot = 0),
        ("operation", |d| d.header.op = 3),
        ("format", |d| d.entry_format = 9),
        ("entries", |d| d.entry_size = 24),
        ("jump table", |d| d.jump_table.end = d.jump_table.start - 16),
        ("jump table", |d| d.jump_table.end += 1),
        ("jump table", |d| {
            d.jump_table = abi::Range {
                start: 0x1000,
                end: 0x2000,
            }
        }),
        ("entries", |d| {
            d.jump_table = abi::Range {
                start: 0xffff_8000_0000_0000,
                end: 0xffff_9000_0000_0000,
            }
        }),
        ("text", |d| {
            d.text = abi::Range {
                start: u64::MAX,
                end: 0,
            }
        }),
        ("no system_state", |d| d.gate_count = 0),
        ("no jump_label_mutex", |d| d.gate_count = 1),
        ("65 gates", |d| d.gate_count = 65),
        ("the gates cannot be read", |d| d.gates = 1 << 40),
        ("page table", |d| d.page_table = 1 << 40),
        ("keys", |d| d.directory.key_count = u32::MAX),
        ("names", |d| d.directory.names_size = u32::MAX),
        ("cannot be read", |d| {
            d.directory.keys = 0xffff_ffff_f000_0000
        }),
    ];
    for (word, change) in breaks {
        let mut descriptor = served.guest.descriptor(&every_kind());
        change(&mut descriptor);
        assert_eq!(
            served
                .guest
                .request(abi::OP_REGISTER, descriptor.as_bytes()),
            -22,
            "{word}"
        );
        let guest = describe(&served).await;
        assert_eq!(
            guest.guest_status().registration(),
            v1::RegistrationState::Refused,
            "{word}"
        );
        assert!(
            guest.guest_status().registration_error.contains(word),
            "{word}: {}",
            guest.guest_status().registration_error
        );
        let result = served.op("alpha", KeyOp::Inc).await;
        let (message, _) = assert_refused(result, Code::FailedPrecondition, "GUEST_NOT_REGISTERED");
        assert!(message.contains(word), "{message}");
    }
    assert_eq!(served.guest.request(77, &[0; 24]), -22);
    assert_eq!(
        served.guest.register(&every_kind()),
        0,
        "a sound one is taken afterwards"
    );
    let guest = describe(&served).await;
    assert_eq!(
        (
            guest.guest_status().registration(),
            guest.guest_status().registration_error.as_str()
        ),
        (v1::RegistrationState::Registered, "")
    );
}

/// Checks that a refused registration also ends the earlier one, because another kernel may have
/// replaced the kernel that registered first.
#[tokio::test]
async fn a_refused_registration_ends_the_earlier_one() {
    let served = Served::start().await;
    let mut descriptor = served.guest.descriptor(&every_kind());
    descriptor.entry_format = 9;
    assert_eq!(
        served
            .guest
            .request(abi::OP_REGISTER, descriptor.as_bytes()),
        -22
    );
    let result = served.op("alpha", KeyOp::Inc).await;
    assert_refused(result, Code::FailedPrecondition, "GUEST_NOT_REGISTERED");
}

#[tokio::test]
async fn modules_without_or_beside_the_kernel_are_refused() {
    let served = Served::with(Setup::default()).await;
    assert_eq!(
        served.guest.add_module("early", &[TestKey::new("own", 1)]),
        -22
    );
    assert_eq!(served.guest.register(&every_kind()), 0);
    assert_eq!(
        served.guest.add_module("ext4", &[TestKey::new("own", 1)]),
        0
    );
    assert_eq!(
        served.guest.add_module("ext4", &[TestKey::new("own", 1)]),
        -22,
        "twice"
    );
    let guest = describe(&served).await;
    assert_eq!(
        (guest.guest_status().registration(), guest.modules),
        (v1::RegistrationState::Registered, 1)
    );
    assert!(
        guest.guest_status().registration_error.contains("ext4"),
        "{}",
        guest.guest_status().registration_error
    );
}

#[tokio::test]
async fn a_paused_guest_stays_paused_and_can_be_flipped() {
    let served = Served::start().await;
    let mut client = served.guest_client();
    let paused = client
        .pause_guest(v1::PauseGuestRequest::default())
        .await
        .expect("stops")
        .into_inner();
    assert_eq!(paused.stop_time.expect("told").nanos, 20_000);
    let again = client
        .pause_guest(v1::PauseGuestRequest::default())
        .await
        .expect("idempotent")
        .into_inner();
    assert_eq!(again.stop_time.expect("told").nanos, 0);
    assert_eq!(
        describe(&served).await.guest_status().state(),
        v1::GuestState::Paused
    );

    served
        .op("alpha", KeyOp::Inc)
        .await
        .expect("flipped under the operator's pause");
    assert!(served.guest.jumps("alpha"));
    assert_eq!(served.guest.pauses(), 1, "no pause of its own");
    // In a paused guest, a closed gate stays closed until the resume, so the update must not wait
    // for it.
    served.guest.set_gate(Gate::TextMutex, 0x1000);
    let result = served.op("beta", KeyOp::Inc).await;
    let (message, metadata) = assert_refused(result, Code::Unavailable, "GUEST_BUSY");
    assert!(message.contains("resume"), "{message}");
    assert_eq!(metadata["attempts"], "1");

    client
        .resume_guest(v1::ResumeGuestRequest::default())
        .await
        .expect("resumes");
    client
        .resume_guest(v1::ResumeGuestRequest::default())
        .await
        .expect("idempotent");
    assert_eq!(
        describe(&served).await.guest_status().state(),
        v1::GuestState::Running
    );
}

#[tokio::test]
async fn pauses_that_fail_or_are_malformed() {
    let served = Served::start().await;
    let mut client = served.guest_client();
    served.guest.set_late(true);
    let late = client.pause_guest(v1::PauseGuestRequest::default()).await;
    let (message, _) = assert_refused(late, Code::DeadlineExceeded, "VCPU_NOT_STOPPED");
    assert!(message.contains("vCPU 0"), "{message}");
    assert_eq!(
        describe(&served).await.guest_status().state(),
        v1::GuestState::Running
    );
    for duration in [(-1, 0), (0, 0), (3601, 0), (0, 10)].map(duration) {
        for request in [
            v1::PauseGuestRequest {
                timeout: Some(duration),
                ttl: None,
                ..Default::default()
            },
            v1::PauseGuestRequest {
                timeout: None,
                ttl: Some(duration),
                ..Default::default()
            },
        ] {
            let refused = client.pause_guest(request).await;
            assert_refused(refused, Code::InvalidArgument, "INVALID_ARGUMENT");
        }
    }
    assert_eq!(describe(&served).await.guest_status().paused_until, None);
}

fn duration((seconds, nanos): (i64, i32)) -> prost_types::Duration {
    prost_types::Duration { seconds, nanos }
}

/// Pauses the guest, and returns the time until the pause expires.
async fn pause_for(served: &Served, ttl: Option<i64>) -> Duration {
    let request = v1::PauseGuestRequest {
        timeout: None,
        ttl: ttl.map(|seconds| duration((seconds, 0))),
        ..Default::default()
    };
    let before = SystemTime::now();
    let response = served.guest_client().pause_guest(request).await;
    let expires_at = response.expect("stops").into_inner().expires_at;
    assert_eq!(
        describe(served).await.guest_status().paused_until,
        expires_at
    );
    let expires_at = SystemTime::try_from(expires_at.expect("told"));
    let left = expires_at.expect("a time").duration_since(before);
    left.expect("in the future")
}

async fn state_after(served: &Served, seconds: u64) -> v1::GuestState {
    served.clock.advance(Duration::from_secs(seconds));
    served.keys.tick().await.expect("the executor runs");
    describe(served).await.guest_status().state()
}

/// Checks that a client that ends while it holds a pause does not leave the guest stopped.
#[tokio::test]
async fn a_pause_expires_by_itself() {
    let served = Served::start().await;
    let resumed = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&resumed);
    served.guest.on_resume(move || {
        count.fetch_add(1, Ordering::SeqCst);
    });
    assert!(pause_for(&served, None).await.as_secs() >= 30);
    assert_eq!(state_after(&served, 29).await, v1::GuestState::Paused);
    assert_eq!(resumed.load(Ordering::SeqCst), 0);
    assert_eq!(state_after(&served, 1).await, v1::GuestState::Running);
    assert_eq!(resumed.load(Ordering::SeqCst), 1);
    assert_eq!(describe(&served).await.guest_status().paused_until, None);
    // The next change stops the guest again.
    served.op("alpha", KeyOp::Inc).await.expect("runs");
    assert_eq!(served.guest.pauses(), 2);
}

#[tokio::test]
async fn a_pause_is_renewed_and_not_cut_short() {
    let served = Served::start().await;
    assert!(pause_for(&served, Some(10)).await.as_secs() >= 10);
    assert_eq!(state_after(&served, 9).await, v1::GuestState::Paused);
    assert!(pause_for(&served, Some(10)).await.as_secs() >= 10);
    assert_eq!(state_after(&served, 9).await, v1::GuestState::Paused);
    assert!(pause_for(&served, Some(3600)).await.as_secs() >= 3600);
    // Another client requests a shorter pause.
    assert!(pause_for(&served, Some(1)).await.as_secs() >= 3599);
    assert_eq!(state_after(&served, 3599).await, v1::GuestState::Paused);
    assert_eq!(served.guest.pauses(), 1);
    assert_eq!(state_after(&served, 1).await, v1::GuestState::Running);
}

/// Checks, with the real clock, that the executor wakes at the pause's end and not at the next
/// command.
#[tokio::test]
async fn the_owner_wakes_when_a_pause_expires() {
    let registry = Arc::new(Registry::default());
    let guest = InMemoryGuest::boot(Arc::clone(&registry), &every_kind());
    let (sender, resumed) = std::sync::mpsc::channel();
    guest.on_resume(move || sender.send(()).expect("the test waits"));
    let (keys, _) = Keys::start(guest, registry, KeysConfig::default()).expect("a thread");
    let request = PauseRequest {
        timeout: PATIENCE,
        ttl: Duration::from_millis(1),
    };
    keys.pause(request).await.expect("stops");
    resumed.recv_timeout(PATIENCE).expect("it resumes");
}

#[tokio::test]
async fn the_console_streams_from_an_offset() {
    let served = Served::start().await;
    served.guest.print(b"hello ");
    let first = |offset, no_follow| {
        tokio_stream::once(v1::StreamConsoleRequest {
            offset,
            input: b"typed".to_vec(),
            no_follow,
            ..Default::default()
        })
    };
    let mut client = served.guest_client();
    let mut stream = client
        .stream_console(first(2, false))
        .await
        .expect("starts")
        .into_inner();
    let message = stream.next().await.expect("output").expect("no error");
    assert_eq!(
        (message.offset, message.output.as_slice()),
        (2, &b"llo "[..])
    );
    served.guest.print(b"world");
    let message = stream.next().await.expect("output").expect("no error");
    assert_eq!(
        (message.offset, message.output.as_slice()),
        (6, &b"world"[..])
    );

    let mut dump = client
        .stream_console(first(0, true))
        .await
        .expect("starts")
        .into_inner();
    assert_eq!(
        dump.next().await.expect("output").expect("no error").output,
        b"hello world"
    );
    assert!(
        dump.next().await.is_none(),
        "no_follow ends with the output"
    );
}

/// Checks that endless streams do not keep the monitor from ending.
#[tokio::test]
async fn streams_end_with_the_service() {
    let served = Served::start().await;
    let mut watch = served
        .client()
        .watch_static_keys(v1::WatchStaticKeysRequest::default())
        .await;
    let watch = watch.as_mut().expect("starts").get_mut();
    watch.next().await.expect("begins").expect("no error");
    let path = served.socket();
    let _folder = served.end();
    let end = tokio::time::timeout(PATIENCE, watch.next())
        .await
        .expect("in time");
    assert_eq!(
        end.expect("a status").expect_err("the end").code(),
        Code::Unavailable
    );
    let deadline = std::time::Instant::now() + PATIENCE;
    while path.exists() {
        assert!(
            std::time::Instant::now() < deadline,
            "the socket is still there"
        );
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_second_monitor_on_the_same_socket_is_refused() {
    let served = Served::start().await;
    let error = ApiSocket::bind(&served.socket()).expect_err("in use");
    assert!(matches!(error, SocketError::InUse(_)), "{error}");
    describe(&served).await;
}
