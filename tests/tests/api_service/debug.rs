// SPDX-License-Identifier: Apache-2.0
//! Tests lines of dynamic debug, and keys that are never changed.

use patchbay_guest::testing::TestKey;
use patchbay_kernel_image::DebugLine;
use patchbay_proto::v1;
use patchbay_service::testing::{Discovered, registry};
use tonic::{Code, Status};

use super::support::{Served, Setup, assert_refused, request};

fn site(file: &str, line: u32, function: &str, format: &str) -> DebugLine {
    DebugLine {
        module: "net".to_owned(),
        file: file.to_owned(),
        function: function.to_owned(),
        line,
        format: format.to_owned(),
        classed: false,
    }
}

/// Serves a discovered kernel with three lines of dynamic debug and a key that guards a static
/// call.
async fn discovered() -> Served {
    let keys = ["open", "close", "xmit", "hook", "other"].map(TestKey::guarded);
    let served = Served::with(Setup {
        keys: Some(keys.to_vec()),
        allow_guarded: true,
        ..Setup::default()
    })
    .await;
    served.guest.discover(
        registry(&served.keys),
        &[
            ("open", site("net/a.c", 10, "a_open", "open %s\n")),
            ("close", site("net/a.c", 9, "a_close", "\u{1b}[2J\u{ff}")),
            ("xmit", site("net/b.c", 1, "b_xmit", "xmit\n")),
        ],
        &["hook"],
    );
    served
}

fn queries(queries: &[&str], op: v1::KeyOp) -> v1::UpdateStaticKeysRequest {
    v1::UpdateStaticKeysRequest {
        updates: vec![v1::KeyUpdate {
            op: op.into(),
            debug_queries: queries.iter().map(|&query| query.to_owned()).collect(),
            ..Default::default()
        }],
        ..Default::default()
    }
}

async fn list(
    served: &Served,
    request: v1::ListDebugSitesRequest,
) -> Result<v1::ListDebugSitesResponse, Status> {
    Ok(served
        .client()
        .list_debug_sites(request)
        .await?
        .into_inner())
}

fn names(results: &[v1::KeyResult]) -> Vec<&str> {
    results.iter().map(|result| result.name.as_str()).collect()
}

#[tokio::test]
async fn lines_are_listed_by_file_and_line_in_pages() {
    let served = discovered().await;
    let mut request = v1::ListDebugSitesRequest {
        page_size: 2,
        ..Default::default()
    };
    let first = list(&served, request.clone()).await.expect("registered");
    assert_eq!((first.sites.len(), first.total_size), (2, 3));
    let close = &first.sites[0];
    assert_eq!(
        (close.key.as_str(), close.file.as_str(), close.line),
        ("close", "net/a.c", 9)
    );
    assert_eq!(close.format, r"\033[2J\377", "hostile text is escaped");
    assert_eq!(first.sites[1].format, r"open %s\n");
    request.page_token = first.next_page_token;
    let second = list(&served, request.clone()).await.expect("registered");
    assert_eq!(second.sites.len(), 1);
    assert_eq!(second.sites[0].key, "xmit");
    assert!(second.next_page_token.is_empty());
    served.guest.discover(registry(&served.keys), &[], &[]);
    let stale = list(&served, request).await;
    assert_refused(stale, Code::InvalidArgument, "INVALID_ARGUMENT");
}

#[tokio::test]
async fn a_large_list_is_split_at_the_size_of_a_message() {
    let names: Vec<String> = (0..4000).map(|index| format!("line{index}")).collect();
    let keys: Vec<TestKey> = names.iter().map(|name| TestKey::guarded(name)).collect();
    let served = Served::with(Setup {
        keys: Some(keys),
        ..Setup::default()
    })
    .await;
    let long = "\u{1}".repeat(1000);
    let lines: Vec<(&str, DebugLine)> = (1..)
        .zip(&names)
        .map(|(line, name)| (name.as_str(), site("a.c", line, "f", &long)))
        .collect();
    served.guest.discover(registry(&served.keys), &lines, &[]);
    let mut request = v1::ListDebugSitesRequest {
        page_size: 10_000,
        ..Default::default()
    };
    let (mut seen, mut pages) = (0, 0);
    loop {
        let page = list(&served, request.clone()).await.expect("under 4 MiB");
        seen += page.sites.len();
        pages += 1;
        if page.next_page_token.is_empty() {
            break;
        }
        request.page_token = page.next_page_token;
    }
    assert_eq!(seen, 4000);
    assert!(pages > 4, "{pages}");
}

#[tokio::test]
async fn a_query_switches_its_lines_in_one_transaction_without_permission() {
    let served = discovered().await;
    let on = served
        .update(queries(&["file a.c", "func b_*"], v1::KeyOp::Enable))
        .await
        .expect("not guarded");
    assert_eq!(names(&on.results), ["open", "close", "xmit"]);
    let summary = on.summary.expect("a summary");
    assert_eq!((summary.keys_changed, summary.sites_patched), (3, 3));
    assert_eq!(on.report.expect("a report").attempts, 1);
    assert!(served.guest.jumps("open") && !served.guest.jumps("other"));
    let enabled = v1::ListDebugSitesRequest {
        queries: vec!["line 10".to_owned()],
        enabled: Some(true),
        ..Default::default()
    };
    let lines = list(&served, enabled).await.expect("registered").sites;
    assert_eq!((lines.len(), lines[0].held_references), (1, 1));
    assert_eq!(served.holds().await.len(), 3);
    let audit = served.audit();
    assert_eq!(audit[0]["updates"][0]["debug_queries"][1], "func b_*");
    assert_eq!(audit[0]["updates"][0]["keys"], 3);
    served
        .update(queries(&["file a.c"], v1::KeyOp::Disable))
        .await
        .expect("its own");
    assert!(!served.guest.jumps("open") && served.guest.jumps("xmit"));
}

#[tokio::test]
async fn a_line_is_on_or_off_and_never_counted() {
    let served = discovered().await;
    served.op("open", v1::KeyOp::Enable).await.expect("changed");
    let again = served
        .op("open", v1::KeyOp::Enable)
        .await
        .expect("no change");
    assert_eq!(again.summary.expect("a summary").keys_changed, 0);
    let counted = served.op("open", v1::KeyOp::Inc).await;
    let (message, _) = assert_refused(counted, Code::FailedPrecondition, "WOULD_WARN");
    assert!(message.contains("dyndbg"), "{message}");
    assert_eq!(served.guest.count("open"), 1);
}

#[tokio::test]
async fn a_query_is_planned_and_replayed_as_patterns_are() {
    let served = discovered().await;
    let prepare = v1::PrepareUpdateRequest {
        updates: queries(&["func a_*"], v1::KeyOp::Enable).updates,
        ..Default::default()
    };
    let plan = served
        .client()
        .prepare_update(prepare)
        .await
        .expect("well-formed")
        .into_inner();
    assert_eq!(names(&plan.results), ["open", "close"]);
    assert!(!served.guest.jumps("open"), "nothing is changed");
    let commit = v1::CommitUpdateRequest {
        plan_id: plan.plan_id,
        digest: plan.digest,
        ..Default::default()
    };
    let mut client = served.client();
    client.commit_update(commit).await.expect("unchanged");
    assert!(served.guest.jumps("open"));
    let mut off = queries(&["func a_*"], v1::KeyOp::Disable);
    off.request_id = "once".to_owned();
    let first = served.update(off.clone()).await.expect("its own");
    let again = served.update(off).await.expect("a repeat");
    assert_eq!(first, again);
}

#[tokio::test]
async fn a_query_that_is_wrong_or_selects_nothing_is_refused() {
    let served = discovered().await;
    let wrong = served
        .update(queries(&["file a.c", "file a.c fnc x"], v1::KeyOp::Enable))
        .await;
    let (message, _) = assert_refused(wrong, Code::InvalidArgument, "INVALID_ARGUMENT");
    assert!(
        message.contains("\"fnc\"") && message.contains("column 10"),
        "{message}"
    );
    let listed = v1::ListDebugSitesRequest {
        queries: vec!["line x".to_owned()],
        ..Default::default()
    };
    let listed = list(&served, listed).await;
    assert_refused(listed, Code::InvalidArgument, "INVALID_ARGUMENT");
    let nothing = served
        .update(queries(&["file c.c"], v1::KeyOp::Enable))
        .await;
    let (message, _) = assert_refused(nothing, Code::NotFound, "KEY_NOT_FOUND");
    assert!(message.contains("file c.c"), "{message}");
    let mut several = queries(&["file a.c"], v1::KeyOp::Enable);
    several.updates[0].name = "open".to_owned();
    let several = served.update(several).await;
    assert_refused(several, Code::InvalidArgument, "INVALID_ARGUMENT");
    let mut etag = queries(&["file a.c"], v1::KeyOp::Enable);
    etag.updates[0].etag = "x".to_owned();
    let etag = served.update(etag).await;
    assert_refused(etag, Code::InvalidArgument, "INVALID_ARGUMENT");
    let mut many = queries(&[], v1::KeyOp::Enable);
    many.updates[0].debug_queries = vec!["module m".to_owned(); 1025];
    let many = served.update(many).await;
    assert_refused(many, Code::InvalidArgument, "INVALID_ARGUMENT");
    assert_eq!(served.guest.pauses(), 0);
}

/// Checks that a key of class never is refused by name, by pattern, and with permission and force.
#[tokio::test]
async fn a_key_that_gates_a_null_static_call_is_never_changed() {
    let served = discovered().await;
    let key = served.get("hook").await.expect("listed");
    assert_eq!(key.key_class(), v1::KeyClass::Never);
    assert_eq!(key.patchable_sites, 0);
    assert_eq!(key.sites[0].obstacle(), v1::SiteObstacle::Never);
    for op in [v1::KeyOp::Enable, v1::KeyOp::Disable, v1::KeyOp::Inc] {
        let mut all = request(&[("other", v1::KeyOp::Enable), ("hook", op)]);
        (all.allow_guarded, all.force) = (true, true);
        let refused = served.update(all).await;
        assert_refused(refused, Code::FailedPrecondition, "KEY_NEVER");
    }
    let matching = |patterns: &[&str]| {
        let mut update = queries(&[], v1::KeyOp::Enable);
        update.allow_guarded = true;
        update.updates[0].patterns = patterns.iter().map(|&name| name.to_owned()).collect();
        update
    };
    for patterns in [&["hook", "o*"][..], &["ho*"]] {
        let refused = served.update(matching(patterns)).await;
        assert_refused(refused, Code::FailedPrecondition, "KEY_NEVER");
    }
    let left_out = served.update(matching(&["*"])).await.expect("others match");
    assert_eq!(left_out.summary.expect("a summary").keys_left_out, 1);
    assert!(served.guest.jumps("other") && !served.guest.jumps("hook"));
    assert_eq!(served.guest.count("hook"), 0);
}

#[tokio::test]
async fn a_kernel_that_registers_itself_lists_no_lines() {
    let served = Served::start().await;
    let page = list(&served, v1::ListDebugSitesRequest::default())
        .await
        .expect("registered");
    assert!(page.sites.is_empty());
    let nothing = served.update(queries(&["file *"], v1::KeyOp::Enable)).await;
    assert_refused(nothing, Code::NotFound, "KEY_NOT_FOUND");
}
