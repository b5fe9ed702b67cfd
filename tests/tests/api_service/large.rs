// SPDX-License-Identifier: Apache-2.0
//! Tests changes of the maximum number of keys. No answer is larger than a stock client accepts.

use patchbay_guest::testing::TestKey;
use patchbay_proto::v1;
use patchbay_proto::v1::KeyOp;
use prost::Message;
use tonic::Code;

use super::support::{Served, Setup, assert_refused, request};

const KEYS: usize = 65_536;
/// Default message limit of gRPC clients.
const STOCK_LIMIT: usize = 4 << 20;

async fn served() -> Served {
    let name = |number| format!("{number:05}_{}", "long".repeat(30));
    let keys = (0..KEYS).map(|number| TestKey::new(&name(number), 1));
    Served::with(Setup {
        keys: Some(keys.collect()),
        ..Setup::default()
    })
    .await
}

fn all(op: KeyOp) -> Vec<v1::KeyUpdate> {
    let mut updates = request(&[("", op)]).updates;
    updates[0].patterns = vec!["*".to_owned()];
    updates
}

/// Reads the further pages, and returns the number of results on all pages.
async fn read_on(served: &Served, first: &[v1::KeyResult], mut page_token: String) -> usize {
    let mut last = first.last().expect("some").name.clone();
    let mut seen = first.len();
    let mut pages = 1;
    while !page_token.is_empty() {
        let request = v1::ListUpdateResultsRequest {
            page_token,
            ..Default::default()
        };
        let page = served.client().list_update_results(request).await;
        let page = page.expect("kept").into_inner();
        assert!(page.encoded_len() < STOCK_LIMIT);
        for result in &page.results {
            assert!(result.name > last, "in order, and each once");
            last.clone_from(&result.name);
        }
        seen += page.results.len();
        pages += 1;
        page_token = page.next_page_token;
    }
    assert!(pages > 6, "of 10,000 at most");
    seen
}

#[tokio::test]
async fn no_answer_is_larger_than_a_stock_client_accepts() {
    let served = served().await;
    let watching = v1::WatchStaticKeysRequest::default();
    let watch = served.client().watch_static_keys(watching).await;
    let mut watch = watch.expect("well-formed").into_inner();
    let begin = watch.message().await.expect("it begins");
    let begin = begin.expect("a message");
    assert!(!begin.more);

    let mut client = served.client();
    let prepare = v1::PrepareUpdateRequest {
        updates: all(KeyOp::Enable),
        reason: "x".repeat(256),
        ..Default::default()
    };
    let plan = client.prepare_update(prepare).await;
    let plan = plan.expect("within the limit").into_inner();
    assert!(plan.encoded_len() < STOCK_LIMIT);
    let token = plan.next_page_token.clone();
    assert_eq!(read_on(&served, &plan.results, token.clone()).await, KEYS);

    let commit = v1::CommitUpdateRequest {
        plan_id: plan.plan_id.clone(),
        ..Default::default()
    };
    let made = client.commit_update(commit).await;
    let made = made.expect("within the limit").into_inner();
    assert!(made.encoded_len() < STOCK_LIMIT);
    assert_eq!(made.summary.expect("a summary").keys_changed as usize, KEYS);
    assert_ne!(made.next_page_token, token);
    assert_eq!(
        read_on(&served, &made.results, made.next_page_token.clone()).await,
        KEYS
    );

    // The events of one revision are split over several responses.
    let mut events = 0;
    loop {
        let part = watch.message().await.expect("within the limit");
        let part = part.expect("not the end");
        assert!(part.encoded_len() < STOCK_LIMIT);
        assert_eq!((part.revision, part.time), (made.revision, part.time));
        events += part.events.len();
        if !part.more {
            break;
        }
    }
    assert_eq!(events, KEYS);

    let update = v1::UpdateStaticKeysRequest {
        updates: all(KeyOp::Disable),
        ..Default::default()
    };
    let update = served.update(update).await.expect("own references");
    assert!(update.encoded_len() < STOCK_LIMIT);
    let seen = read_on(&served, &update.results, update.next_page_token.clone()).await;
    assert_eq!(seen, KEYS);
    for bad in ["", "1", &format!("{token}0"), &token[1..]] {
        let request = v1::ListUpdateResultsRequest {
            page_token: bad.to_owned(),
            ..Default::default()
        };
        let refused = served.client().list_update_results(request).await;
        assert_refused(refused, Code::InvalidArgument, "INVALID_ARGUMENT");
    }
}
