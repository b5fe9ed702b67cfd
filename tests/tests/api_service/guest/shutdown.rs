// SPDX-License-Identifier: Apache-2.0
//! Tests of shutdowns.

use super::*;

async fn shut_down(
    served: &Served,
    request: v1::ShutdownGuestRequest,
) -> Result<v1::ShutdownGuestResponse, tonic::Status> {
    let response = served.guest_client().shutdown_guest(request).await?;
    Ok(response.into_inner())
}

/// Returns a request that gives the guest only 1 ms to power off.
fn impatient() -> v1::ShutdownGuestRequest {
    v1::ShutdownGuestRequest {
        timeout: Some(duration((0, 1_000_000))),
        ..Default::default()
    }
}

#[tokio::test]
async fn a_shutdown_asks_the_guest_and_waits_for_it() {
    let served = Served::start().await;
    let guest = Arc::clone(&served.guest);
    served.guest.on_power_button(move || {
        // The guest powers off later, on a separate thread, as a real guest does.
        let guest = Arc::clone(&guest);
        std::thread::spawn(move || guest.shut_down());
    });
    let response = shut_down(&served, v1::ShutdownGuestRequest::default()).await;
    assert!(!response.expect("it powers itself off").power_cut);
    assert_eq!(
        describe(&served).await.guest_status().state(),
        v1::GuestState::Stopped
    );
    let response = shut_down(&served, v1::ShutdownGuestRequest::default()).await;
    assert!(!response.expect("idempotent").power_cut);
}

#[tokio::test]
async fn a_guest_without_a_power_button_is_only_cut_at_once() {
    let served = Served::start().await;
    served.guest.remove_power_button();
    for cut_after_timeout in [false, true] {
        let request = v1::ShutdownGuestRequest {
            cut_after_timeout,
            ..Default::default()
        };
        let refused = shut_down(&served, request).await;
        let (message, _) = assert_refused(refused, Code::InvalidArgument, "INVALID_ARGUMENT");
        assert!(message.contains("no power button"), "{message}");
    }
    assert!(!served.guest.is_pressed());
    let forced = v1::ShutdownGuestRequest {
        force: true,
        ..Default::default()
    };
    let response = shut_down(&served, forced).await;
    assert!(response.expect("cut").power_cut);
}

#[tokio::test]
async fn a_guest_that_does_not_act_on_its_power_button_runs_on() {
    let served = Served::start().await;
    let refused = shut_down(&served, impatient()).await;
    let (message, _) = assert_refused(refused, Code::DeadlineExceeded, "NOT_POWERED_OFF");
    assert!(message.contains("does not listen"), "{message}");
    assert!(!served.guest.take_back_press(), "taken back by the monitor");
    served.guest.on_power_button(|| {});
    let refused = shut_down(&served, impatient()).await;
    let (message, _) = assert_refused(refused, Code::DeadlineExceeded, "NOT_POWERED_OFF");
    assert!(message.contains("has seen the power button"), "{message}");
    assert_eq!(
        describe(&served).await.guest_status().state(),
        v1::GuestState::Running
    );
    let response = shut_down(
        &served,
        v1::ShutdownGuestRequest {
            cut_after_timeout: true,
            ..impatient()
        },
    )
    .await;
    assert!(response.expect("it is cut").power_cut);
    assert_eq!(
        describe(&served).await.guest_status().state(),
        v1::GuestState::Stopped
    );
}

#[tokio::test]
async fn a_paused_guest_is_shut_down_by_force_alone() {
    let served = Served::start().await;
    pause_for(&served, None).await;
    let refused = shut_down(&served, v1::ShutdownGuestRequest::default()).await;
    assert_refused(refused, Code::FailedPrecondition, "GUEST_PAUSED");
    for bad in [(0, 0), (-1, 0), (3601, 0)] {
        let request = v1::ShutdownGuestRequest {
            timeout: Some(duration(bad)),
            force: true,
            ..Default::default()
        };
        let refused = shut_down(&served, request).await;
        assert_refused(refused, Code::InvalidArgument, "INVALID_ARGUMENT");
    }
    assert_eq!(
        describe(&served).await.guest_status().state(),
        v1::GuestState::Paused
    );
    let request = v1::ShutdownGuestRequest {
        force: true,
        ..Default::default()
    };
    assert!(shut_down(&served, request).await.expect("cut").power_cut);
    assert_eq!(
        describe(&served).await.guest_status().state(),
        v1::GuestState::Stopped
    );
}

/// Checks that the press of the power button is withdrawn if the client disconnects before the
/// guest has reacted to it.
#[tokio::test]
async fn a_cancelled_shutdown_is_taken_back() {
    let served = Served::start().await;
    let mut client = served.guest_client();
    let waiting = tokio::spawn(async move {
        client
            .shutdown_guest(v1::ShutdownGuestRequest::default())
            .await
    });
    let deadline = tokio::time::Instant::now() + PATIENCE;
    for pressed in [true, false] {
        while served.guest.is_pressed() != pressed {
            assert!(tokio::time::Instant::now() < deadline, "{pressed}");
            tokio::task::yield_now().await;
        }
        waiting.abort();
    }
}
