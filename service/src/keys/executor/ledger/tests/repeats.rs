// SPDX-License-Identifier: Apache-2.0
//! Requests with an id that are repeated to the next service, because the first service ended
//! before its answer arrived.

use super::*;
use crate::keys::UpdateOutcome;
use crate::keys::replay::RequestId;

impl Service {
    /// Increments a key with a request id.
    async fn inc(&self, name: &str, id: &str) -> Result<Arc<UpdateOutcome>, KeysError> {
        let updates = vec![KeyUpdate::new(name, Op::Inc)];
        let second = Duration::from_secs(1);
        let deadline = Instant::now() + Duration::from_secs(10);
        let mut request = UpdateRequest::new(updates, "uid:7", second, deadline);
        request.request_id = RequestId::new(id.to_owned(), || name.into());
        self.keys.update(request).await
    }
}

#[tokio::test]
async fn a_request_that_was_made_is_not_made_again() {
    // The last write has the outcome. The one before has the pending change.
    for lost in [0, 1] {
        let (guest, place) = (boot(), Place::default());
        let first = serve(&guest, &place);
        let answer = first.inc("alpha", "r").await.expect("made");
        drop(first);
        let second = serve(&guest, &place.after(place.writes() - lost));
        let again = second.inc("alpha", "r").await.expect("answered");
        assert_eq!(guest.count("alpha"), 1, "{lost} writes lost");
        assert_eq!(again.summary, answer.summary);
        assert_eq!((again.results.len(), again.report), (0, None));
        let error = second.inc("beta", "r").await.expect_err("another request");
        assert_eq!(error.reason(), "REQUEST_ID_REUSED");
        second.inc("alpha", "s").await.expect("another id");
        assert_eq!(guest.count("alpha"), 2);
    }
}

#[tokio::test]
async fn a_request_that_was_not_made_is_made_when_it_is_repeated() {
    let (guest, place) = (boot(), Place::default());
    let first = serve(&guest, &place);
    first.inc("alpha", "r").await.expect("made");
    drop(first);
    guest.set_count("alpha", 0);
    let second = serve(&guest, &place.after(place.writes() - 1));
    let made = second.inc("alpha", "r").await.expect("made");
    assert_eq!((guest.count("alpha"), made.results.len()), (1, 1));
}

/// Request ids belong to a boot, as the changes do.
#[tokio::test]
async fn another_boot_forgets_requests() {
    let (guest, place) = (boot(), Place::default());
    let first = serve(&guest, &place);
    first.inc("alpha", "r").await.expect("made");
    drop(first);
    guest.run(&["alpha", "beta", "gamma"].map(|name| TestKey::new(name, 0)));
    let second = serve(&guest, &place);
    second.inc("alpha", "r").await.expect("made");
    assert_eq!(guest.count("alpha"), 1);
}

/// The service and its watchdog were killed during the change.
#[tokio::test]
async fn a_request_that_was_made_in_part_is_answered_so() {
    let (guest, place) = (boot(), Place::default());
    let first = serve(&guest, &place);
    let both = || {
        let updates = ["alpha", "beta"].map(|name| KeyUpdate::new(name, Op::Inc));
        let second = Duration::from_secs(1);
        let deadline = Instant::now() + Duration::from_secs(10);
        let mut request = UpdateRequest::new(updates.to_vec(), "uid:7", second, deadline);
        request.request_id = RequestId::new("r".to_owned(), Vec::new);
        request
    };
    let writes = place.writes();
    first.keys.update(both()).await.expect("made");
    drop(first);
    guest.set_count("beta", 0);
    let second = serve(&guest, &place.after(writes + 1));
    let error = second.keys.update(both()).await.expect_err("in part");
    assert_eq!(error.reason(), "REQUEST_ID_REUSED");
    let text = error.to_string();
    assert!(
        text.contains("1 of its keys were changed and 1 were not"),
        "{text}"
    );
    assert_eq!((guest.count("alpha"), guest.count("beta")), (1, 0));
    assert_eq!(second.holds().await.len(), 1, "the one on alpha");
}

/// A release has an id too.
#[tokio::test]
async fn a_release_that_was_made_is_not_made_again() {
    let (guest, place) = (boot(), Place::default());
    let first = serve(&guest, &place);
    first.update("alpha", Op::Inc, None).await.expect("made");
    first
        .update("alpha", Op::Inc, Some(60))
        .await
        .expect("made");
    let ids: Vec<String> = first.holds().await.into_iter().map(|(id, ..)| id).collect();
    let release = || ReleaseRequest {
        ids: ids[..1].to_vec(),
        caller: "uid:7".into(),
        force: false,
        request_id: RequestId::new("r".to_owned(), Vec::new),
        summary_only: true,
        stop_timeout: Duration::from_secs(1),
        deadline: Instant::now() + Duration::from_secs(10),
    };
    let writes = place.writes();
    first.keys.release(release()).await.expect("made");
    drop(first);
    let second = serve(&guest, &place.after(writes + 1));
    let again = second.keys.release(release()).await.expect("answered");
    assert_eq!((again.summary.keys_changed, guest.count("alpha")), (1, 1));
    assert_eq!(second.holds().await.len(), 1);
}
