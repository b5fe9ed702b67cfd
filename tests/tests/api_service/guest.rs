// SPDX-License-Identifier: Apache-2.0
//! The guest as a whole: describe, pause, console, and how the service ends.

use patchbay_proto::v1;
use patchbay_proto::v1::KeyOp;
use patchbay_service::abi;
use patchbay_service::api::{ApiSocket, SocketError};
use patchbay_service::testing::{Gate, TestKey};
use tokio_stream::StreamExt;
use tonic::Code;
use zerocopy::IntoBytes;

use super::support::{PATIENCE, Served, Setup, assert_refused, every_kind};

async fn describe(served: &Served) -> v1::DescribeGuestResponse {
    served
        .guest_client()
        .describe_guest(v1::DescribeGuestRequest {})
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
        (guest.name.as_str(), guest.vcpus, guest.memory_bytes),
        ("test", 1, 16 << 20)
    );
    assert_eq!(guest.state(), v1::GuestState::Running);
    assert_eq!(guest.registration(), v1::RegistrationState::Registered);
    assert_eq!((guest.keys, guest.sites, guest.modules), (9, 12, 1));
    assert_eq!(guest.kernel_release, "6.12.0");
    assert_eq!(guest.kernel_build_id, "ab".repeat(20));
    assert_eq!(guest.monitor_pid, std::process::id());
    assert_eq!(guest.transport(), v1::Transport::Hypercall);
    assert_ne!(guest.generation, 0);
}

#[tokio::test]
async fn each_state_of_the_registration_is_told() {
    let served = Served::with(Setup::default()).await;
    assert_eq!(
        describe(&served).await.registration(),
        v1::RegistrationState::Absent
    );
    assert_eq!(served.guest.register(&every_kind()), 0);
    assert_eq!(
        describe(&served).await.registration(),
        v1::RegistrationState::Registered
    );
    assert_eq!(served.guest.unregister(), 0);
    assert_eq!(
        describe(&served).await.registration(),
        v1::RegistrationState::Withdrawn
    );
    let result = served.op("alpha", KeyOp::Inc).await;
    assert_refused(result, Code::FailedPrecondition, "GUEST_NOT_REGISTERED");
    served
        .guest_client()
        .shutdown_guest(v1::ShutdownGuestRequest {})
        .await
        .expect("shut down");
    assert_eq!(describe(&served).await.state(), v1::GuestState::Stopped);
}

type Break = fn(&mut abi::Descriptor);

/// Each of these is refused with -EINVAL, named, and leaves no registration behind.
#[tokio::test]
async fn refused_registrations_say_why() {
    let served = Served::with(Setup::default()).await;
    let breaks: [(&str, Break); 18] = [
        ("magic", |d| d.header.magic ^= 1),
        ("ABI version", |d| d.header.abi_version = 2),
        ("bytes", |d| d.header.size -= 8),
        ("generation", |d| d.header.generation = 0),
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
        ("system_state", |d| d.system_state = 0),
        ("jump_label_mutex", |d| d.jump_label_mutex_owner = 0x1000),
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
            guest.registration(),
            v1::RegistrationState::Refused,
            "{word}"
        );
        assert!(
            guest.registration_error.contains(word),
            "{word}: {}",
            guest.registration_error
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
        (guest.registration(), guest.registration_error.as_str()),
        (v1::RegistrationState::Registered, "")
    );
}

/// A kernel that is replaced by one whose registration is refused must not be patched any more.
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
        (guest.registration(), guest.modules),
        (v1::RegistrationState::Registered, 1)
    );
    assert!(
        guest.registration_error.contains("ext4"),
        "{}",
        guest.registration_error
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
    assert_eq!(describe(&served).await.state(), v1::GuestState::Paused);

    served
        .op("alpha", KeyOp::Inc)
        .await
        .expect("flipped under the operator's pause");
    assert!(served.guest.jumps("alpha"));
    assert_eq!(served.guest.pauses(), 1, "no pause of its own");
    // A gate that is closed now stays closed until the resume: no use in waiting.
    served.guest.set_gate(Gate::TextMutex, 0x1000);
    let result = served.op("beta", KeyOp::Inc).await;
    let (message, metadata) = assert_refused(result, Code::Aborted, "GUEST_BUSY");
    assert!(message.contains("resume"), "{message}");
    assert_eq!(metadata["attempts"], "1");

    client
        .resume_guest(v1::ResumeGuestRequest {})
        .await
        .expect("resumes");
    client
        .resume_guest(v1::ResumeGuestRequest {})
        .await
        .expect("idempotent");
    assert_eq!(describe(&served).await.state(), v1::GuestState::Running);
}

#[tokio::test]
async fn pauses_that_fail_or_are_malformed() {
    let served = Served::start().await;
    let mut client = served.guest_client();
    served.guest.set_late(true);
    let late = client.pause_guest(v1::PauseGuestRequest::default()).await;
    let (message, _) = assert_refused(late, Code::DeadlineExceeded, "VCPU_NOT_STOPPED");
    assert!(message.contains("vCPU 0"), "{message}");
    assert_eq!(describe(&served).await.state(), v1::GuestState::Running);
    for seconds in [-1, 3600] {
        let timeout = Some(prost_types::Duration { seconds, nanos: 0 });
        let refused = client.pause_guest(v1::PauseGuestRequest { timeout }).await;
        assert_refused(refused, Code::InvalidArgument, "INVALID_ARGUMENT");
    }
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

/// Streams without end must not keep the monitor from ending.
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
