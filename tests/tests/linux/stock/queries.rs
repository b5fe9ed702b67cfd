// SPDX-License-Identifier: Apache-2.0
//! Tests that queries of dynamic debug select the same lines as the guest's own kernel.

use anyhow::{Context, Result, ensure};
use patchbay_proto::v1::{
    KeyOp, KeyUpdate, ListDebugSitesRequest, ResultView, UpdateStaticKeysRequest,
};
use patchbay_tests::{Guest, reason};

const CONTROL: &str = "/proc/dynamic_debug/control";

/// The queries to compare. The kernel reads a backslash in a format as an escape, and ends a query
/// at `;`.
const QUERIES: &[&str] = &[
    "module binfmt_misc",
    "module d*",
    "file drivers/base/*",
    "file lib/kobject.c",
    "file kobject*.c",
    "file base/dd.c",
    "func kobject_*",
    "func *_prob?",
    "func really_probe module dd",
    "format received",
    "format ^received",
    r#"format "kobject: ""#,
    r"format \040at\040",
    "file drivers/base/*.c line 1-300",
    "file drivers/base/dd.c line 400-",
    "file lib/kobject.c:kobject_add*",
    "file drivers/base/dd.c:-500",
    "line 100 file *",
    r#"module "*" func driver_* format driver"#,
];

const MALFORMED: &[&str] = &[
    "func",
    "module a module b",
    "file a.c:1-2 line 3",
    "line 20-10",
    "line ten",
    "function main",
    r#"format "open"#,
];

/// Turns on the lines that each query selects, first through the kernel and then by the host, and
/// compares them.
pub async fn select_as_the_kernels_do(guest: &mut Guest) -> Result<()> {
    // The log level keeps the lines off the console.
    guest.shell("dmesg -n 1").await?;
    ensure!(control(guest, "-p").await?, "all lines off");
    ensure!(printed_by_kernel(guest).await?.is_empty());
    let mut selected = 0;
    for query in QUERIES {
        ensure!(control(guest, &format!("{query} +p")).await?, "{query}");
        let by_kernel = printed_by_kernel(guest).await?;
        let keys = on(guest).await?;
        ensure!(
            keys == by_kernel,
            "{query}: the keys of {keys:#?} are on, and the kernel prints {by_kernel:#?}"
        );
        ensure!(control(guest, &format!("{query} -p")).await?, "{query}");

        let changed = change(guest, query, KeyOp::Enable).await;
        match changed {
            Ok(()) => {
                let by_host = on(guest).await?;
                ensure!(
                    by_host == by_kernel,
                    "{query}: the host selects {by_host:#?}, the kernel {by_kernel:#?}"
                );
                change(guest, query, KeyOp::Disable).await?;
            }
            Err(refusal) => ensure!(
                by_kernel.is_empty() && reason(&refusal) == "KEY_NOT_FOUND",
                "{query}: {refusal:?}, the kernel selects {by_kernel:#?}"
            ),
        }
        ensure!(on(guest).await?.is_empty(), "{query}: lines stay on");
        println!("{query}: {} lines", by_kernel.len());
        selected += usize::from(!by_kernel.is_empty());
    }
    ensure!(selected >= 12, "only {selected} queries select anything");
    for query in MALFORMED {
        let accepted = control(guest, &format!("{query} +p")).await?;
        ensure!(!accepted, "the kernel accepts {query:?}");
        let changed = change(guest, query, KeyOp::Enable).await;
        let refusal = changed.err().with_context(|| query.to_string())?;
        ensure!(
            refusal.code() == tonic::Code::InvalidArgument,
            "{refusal:?}"
        );
    }
    ensure!(printed_by_kernel(guest).await?.is_empty());
    Ok(())
}

/// Writes a query with flags to the kernel's file. Returns false if the kernel refuses it.
async fn control(guest: &mut Guest, query: &str) -> Result<bool> {
    let line = format!("echo '{query}' 2>/dev/null >{CONTROL} && echo accepted || true");
    Ok(guest.shell(&line).await?.contains("accepted"))
}

/// Returns the lines that the kernel's file shows as printed, sorted: file, line, module, function.
async fn printed_by_kernel(guest: &mut Guest) -> Result<Vec<String>> {
    let output = guest
        .shell(&format!("grep ' =[a-z]*p[a-z]* ' {CONTROL} || true"))
        .await?;
    let line = |line: &str| line.split_once(" =").map(|(line, _)| line.to_owned());
    let mut lines: Vec<String> = output.lines().filter_map(line).collect();
    lines.sort_unstable();
    Ok(lines)
}

/// Returns the lines whose keys are on in the guest's memory, in the form of [`printed_by_kernel`].
async fn on(guest: &mut Guest) -> Result<Vec<String>> {
    let request = ListDebugSitesRequest {
        page_size: 10_000,
        enabled: Some(true),
        ..Default::default()
    };
    let page = guest.static_keys().list_debug_sites(request).await?;
    let page = page.into_inner();
    ensure!(page.next_page_token.is_empty(), "there are more pages");
    let lines = page.sites.into_iter().map(|site| {
        format!(
            "{}:{} [{}]{}",
            site.file, site.line, site.module, site.function
        )
    });
    let mut lines: Vec<String> = lines.collect();
    lines.sort_unstable();
    Ok(lines)
}

/// Makes the request of `patchbay debug on QUERY` or `patchbay debug off QUERY`.
async fn change(guest: &mut Guest, query: &str, op: KeyOp) -> Result<(), tonic::Status> {
    let request = UpdateStaticKeysRequest {
        updates: vec![KeyUpdate {
            debug_queries: vec![query.to_owned()],
            op: op.into(),
            ..Default::default()
        }],
        result_view: ResultView::Summary.into(),
        ..Default::default()
    };
    let changed = guest.static_keys().update_static_keys(request).await;
    changed.map(drop)
}
