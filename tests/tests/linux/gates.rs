// SPDX-License-Identifier: Apache-2.0
//! Tests a guest that changes its own keys: the host waits, gives up, or follows.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use patchbay_proto::v1::{
    KeyOp, KeyUpdate, ListStaticKeysRequest, StaticKey, UpdateStaticKeysRequest,
    UpdateStaticKeysResponse,
};
use patchbay_tests::{Guest, TestGuest};
use tonic::{Code, Status};

const TEST: &str = "/sys/kernel/debug/patchbay_test";

/// Returns a request for one op that keeps trying a busy guest for this long.
fn request(name: &str, op: KeyOp, patience: Duration) -> UpdateStaticKeysRequest {
    UpdateStaticKeysRequest {
        updates: vec![KeyUpdate {
            name: name.to_owned(),
            op: op.into(),
            ..Default::default()
        }],
        allow_guarded: true,
        force: true,
        retry_timeout: Some(prost_types::Duration {
            seconds: patience.as_secs().cast_signed(),
            nanos: patience.subsec_nanos().cast_signed(),
        }),
        ..Default::default()
    }
}

async fn update_within(
    guest: &mut Guest,
    name: &str,
    op: KeyOp,
    patience: Duration,
) -> Result<UpdateStaticKeysResponse, Status> {
    let request = request(name, op, patience);
    let response = guest.static_keys().update_static_keys(request).await?;
    Ok(response.into_inner())
}

/// Flips a key and flips it back.
async fn there_and_back(guest: &mut Guest, name: &str) -> Result<()> {
    update_within(guest, name, KeyOp::Inc, PATIENT).await?;
    update_within(guest, name, KeyOp::Dec, PATIENT).await?;
    Ok(())
}

/// A limit that is short enough to end while a gate is held for a moment.
const IMPATIENT: Duration = Duration::from_millis(200);
/// A limit that is long enough for an attempt in a lab that stands still for a moment.
const HELD: Duration = Duration::from_secs(2);
/// A limit that is long enough for any gate to open.
const PATIENT: Duration = Duration::from_secs(25);

const REF_KEY: &str = "patchbay_test:ref_key";
const TRACEPOINT: &str = "patchbay_test:patchbay_test_plain";

/// Checks three things: the host gives up at its deadline and names the mutex; it succeeds if the
/// mutex is released before the deadline; and changes that need no gate do not wait for the mutex.
#[tokio::test]
async fn held_mutexes_close_the_gate() -> Result<()> {
    let Some(mut guest) = Guest::with_test_keys(1).await? else {
        return Ok(());
    };
    guest
        .shell(&format!("echo 1 > {TEST}/tracepoint/plain/probe"))
        .await?;
    let gates = [
        ("jump_label_mutex", REF_KEY, KeyOp::Inc, KeyOp::Dec),
        ("text_mutex", REF_KEY, KeyOp::Inc, KeyOp::Dec),
        // The attached probe has turned this tracepoint's key on.
        (
            "tracepoints_mutex",
            TRACEPOINT,
            KeyOp::Disable,
            KeyOp::Enable,
        ),
    ];
    for (mutex, key, there, back) in gates {
        let hold = format!("{TEST}/hold/{mutex}");
        guest.shell(&format!("echo 600000 > {hold}")).await?;
        let refusal = update_within(&mut guest, key, there, HELD)
            .await
            .expect_err("the mutex is held");
        ensure!(refusal.code() == Code::Unavailable, "{mutex}: {refusal:?}");
        ensure!(
            refusal.message().contains(mutex),
            "the gate is not named: {}",
            refusal.message()
        );
        if key == TRACEPOINT {
            there_and_back(&mut guest, REF_KEY).await?;
        }
        let mut client = guest.static_keys();
        let waiting = tokio::spawn(async move {
            let request = request(key, there, PATIENT);
            client.update_static_keys(request).await
        });
        guest.shell(&format!("cat {hold}")).await?;
        guest.shell(&format!("echo 0 > {hold}")).await?;
        let answer = waiting.await?.context(mutex)?.into_inner();
        let attempts = answer.report.unwrap_or_default().attempts;
        ensure!(attempts > 1, "{mutex}: done at the first attempt");
        update_within(&mut guest, key, back, PATIENT).await?;
    }

    // A count that does not cross zero touches no site.
    update_within(&mut guest, REF_KEY, KeyOp::Inc, PATIENT).await?;
    guest
        .shell(&format!("echo 600000 > {TEST}/hold/jump_label_mutex"))
        .await?;
    update_within(&mut guest, REF_KEY, KeyOp::Inc, HELD).await?;
    update_within(&mut guest, REF_KEY, KeyOp::Dec, HELD).await?;
    guest
        .shell(&format!("echo 0 > {TEST}/hold/jump_label_mutex"))
        .await?;
    guest.assert_no_warnings().await
}

/// Flips the key until a change is refused because of this gate, and then waits until the gate
/// opens.
async fn meet_and_pass(guest: &mut Guest, gate: &str) -> Result<()> {
    let deadline = Instant::now() + 2 * PATIENT;
    let mut op = KeyOp::Inc;
    while Instant::now() < deadline {
        // These attempts must be short, because the gate could open unnoticed during a long one.
        match update_within(guest, REF_KEY, op, IMPATIENT).await {
            Ok(_) if op == KeyOp::Inc => op = KeyOp::Dec,
            Ok(_) => op = KeyOp::Inc,
            Err(refusal) => {
                ensure!(refusal.code() == Code::Unavailable, "{refusal:?}");
                if refusal.message().contains(gate) {
                    update_within(guest, REF_KEY, op, PATIENT).await?;
                    if op == KeyOp::Inc {
                        update_within(guest, REF_KEY, KeyOp::Dec, PATIENT).await?;
                    }
                    return Ok(());
                }
            }
        }
        // The guest also needs time to reach its gate.
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    bail!("no attempt was refused for {gate}")
}

/// Checks a text change that is queued, and a CPU that is stopped in the middle of one. All mutexes
/// are free, so only a word in the kernel's memory shows each of them.
#[tokio::test]
async fn text_changes_half_way_close_the_gate() -> Result<()> {
    let Some(mut guest) = Guest::with_test_keys(1).await? else {
        return Ok(());
    };
    for (file, gate) in [
        ("text_queue", "text changes are queued"),
        ("text_poke", "a text change is in progress"),
    ] {
        // Nothing else is typed meanwhile, because the guest's only CPU may be the stopped one.
        let line = format!("echo 2000 > {TEST}/hold/{file}");
        guest.console().type_line(&line).await?;
        meet_and_pass(&mut guest, gate).await?;
    }

    // The kernel itself changes this key. The breakpoints that it sets at the key's sites do not
    // count as foreign bytes.
    let line = format!("echo 2000 > {TEST}/hold/poke; echo enable > {TEST}/keys/ref_key/op");
    guest.console().type_line(&line).await?;
    let deadline = Instant::now() + 2 * PATIENT;
    while !half_way(&mut guest).await? {
        ensure!(
            Instant::now() < deadline,
            "the guest's change was never seen half-way"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let refusal = update_within(&mut guest, REF_KEY, KeyOp::Inc, IMPATIENT)
        .await
        .expect_err("the guest is changing the key");
    ensure!(refusal.code() == Code::Unavailable, "{refusal:?}");
    count_on_top_of_the_guest(&mut guest).await?;
    let seen = guest
        .shell(&format!("cat {TEST}/keys/ref_key/count"))
        .await?;
    ensure!(seen == "1", "the guest's own reference: {seen}");
    guest.assert_no_warnings().await
}

/// Returns whether a breakpoint is at the start of a site of the key.
async fn half_way(guest: &mut Guest) -> Result<bool> {
    let sites = guest.key(REF_KEY).await?.sites;
    Ok(sites.iter().any(|site| site.disassembly == "int3"))
}

/// Checks that the key's sites are complete again, and that the host counts on top of the guest's
/// reference.
async fn count_on_top_of_the_guest(guest: &mut Guest) -> Result<()> {
    let answer = update_within(guest, REF_KEY, KeyOp::Inc, PATIENT).await?;
    let result = answer.results.first().context("no result")?;
    ensure!(
        (result.count_before, result.count_after) == (1, 2),
        "{result:?}"
    );
    update_within(guest, REF_KEY, KeyOp::Dec, PATIENT).await?;
    Ok(())
}

/// Checks foreign code that patches the kernel's text. The key is not changed from then on, until
/// its module is reloaded.
#[tokio::test]
async fn foreign_bytes_quarantine_their_key() -> Result<()> {
    let Some(mut guest) = Guest::with_test_keys(1).await? else {
        return Ok(());
    };
    let foreign = format!("{TEST}/keys/ref_key/foreign");
    guest.shell(&format!("echo 1 > {foreign}")).await?;
    let loss = update_within(&mut guest, REF_KEY, KeyOp::Inc, PATIENT)
        .await
        .expect_err("foreign bytes");
    ensure!(loss.code() == Code::DataLoss, "{loss:?}");
    ensure!(
        loss.message().contains(REF_KEY) && loss.message().contains("holds eb 0"),
        "key and bytes are not named: {}",
        loss.message()
    );
    let seen = guest
        .shell(&format!("cd {TEST}/keys/ref_key && cat raw unlikely; cd /"))
        .await?;
    ensure!(seen == "0\n0", "something was changed: {seen}");
    there_and_back(&mut guest, "patchbay_test:siteless_key").await?;
    there_and_back(&mut guest, "patchbay_test:many_key").await?;

    // Restoring the bytes does not lift the quarantine, because the host cannot know who wrote the
    // foreign bytes.
    guest.shell(&format!("echo 0 > {foreign}")).await?;
    let refusal = update_within(&mut guest, REF_KEY, KeyOp::Inc, PATIENT)
        .await
        .expect_err("in quarantine");
    ensure!(refusal.code() == Code::FailedPrecondition, "{refusal:?}");
    ensure!(
        refusal
            .message()
            .contains("load module patchbay_test again"),
        "no way out: {}",
        refusal.message()
    );
    ensure!(guest.key(REF_KEY).await?.quarantine.is_some());
    guest
        .shell("rmmod patchbay_test && insmod /lib/modules/patchbay_test.ko")
        .await?;
    there_and_back(&mut guest, REF_KEY).await?;
    ensure!(guest.key(REF_KEY).await?.quarantine.is_none());
    guest.assert_no_warnings().await
}

/// Checks keys and sites that the kernel itself no longer changes after its boot.
#[tokio::test]
async fn what_is_constant_after_init_is_left_alone() -> Result<()> {
    let Some(mut guest) = Guest::with_test_keys(1).await? else {
        return Ok(());
    };
    let list = ListStaticKeysRequest {
        page_size: 10_000,
        ..Default::default()
    };
    let keys = guest.static_keys().list_static_keys(list).await?;
    let keys = keys.into_inner().keys;
    let kernel = |key: &&StaticKey| !key.name.contains(':');

    // The key is in memory that is read-only after init.
    let sealed = keys.iter().filter(kernel).find(|key| key.sealed);
    let sealed = sealed.context("the kernel has no sealed key")?;
    for op in [KeyOp::Enable, KeyOp::Disable] {
        let refusal = update_within(&mut guest, &sealed.name, op, PATIENT)
            .await
            .expect_err("sealed");
        ensure!(refusal.code() == Code::FailedPrecondition, "{refusal:?}");
        ensure!(refusal.message().contains("sealed"), "{refusal:?}");
    }

    // The key's only site is in the module's init text, which is freed, so a change writes the
    // key's count and no site.
    let name = "patchbay_test:init_only_key";
    let answer = update_within(&mut guest, name, KeyOp::Inc, PATIENT).await?;
    ensure!(answer.results[0].sites_patched == 0, "{answer:?}");
    let key = guest.key(name).await?;
    ensure!(
        key.count == 1 && key.site_count == 1 && key.patchable_sites == 0,
        "{key:?}"
    );
    ensure!(key.sites[0].obstacle_message.contains("init"), "{key:?}");
    update_within(&mut guest, name, KeyOp::Dec, PATIENT).await?;

    // Some sites are in the kernel's own init text, so a change would write only the others.
    let init_sites = |key: &&StaticKey| !key.sealed && key.patchable_sites < key.site_count;
    let mut with_init_sites = keys.iter().filter(kernel).filter(init_sites);
    let key = with_init_sites
        .next()
        .context("no key of the kernel has a site in init text")?;
    let op = if key.enabled {
        KeyOp::Disable
    } else {
        KeyOp::Enable
    };
    let dry_run = UpdateStaticKeysRequest {
        validate_only: true,
        ..request(&key.name, op, PATIENT)
    };
    let answer = guest.static_keys().update_static_keys(dry_run).await?;
    let result = answer.into_inner().results.remove(0);
    ensure!(
        i64::from(result.sites_patched) == i64::from(key.patchable_sites),
        "{result:?} of {key:?}"
    );
    guest.assert_no_warnings().await
}

/// Checks that keys whose entries are spread over several modules change in all of these modules,
/// and only while all of the modules are live.
#[tokio::test]
async fn keys_shared_between_modules() -> Result<()> {
    let Some(mut guest) = Guest::with_test_keys(1).await? else {
        return Ok(());
    };
    guest
        .shell("insmod /lib/modules/patchbay_test_user.ko")
        .await?;
    for key in ["patchbay_test_shared_key", "patchbay_test_lent_key"] {
        let file = key
            .trim_start_matches("patchbay_test_")
            .trim_end_matches("_key");
        let name = format!("patchbay_test:{key}");
        for (op, taken) in [(KeyOp::Inc, "2"), (KeyOp::Dec, "0")] {
            update_within(&mut guest, &name, op, PATIENT).await?;
            let seen = guest
                .shell(&format!("cat /sys/kernel/debug/patchbay_test_user/{file}"))
                .await?;
            ensure!(seen == taken, "{op:?} {key}: the other module sees {seen}");
        }
    }
    let before = guest.describe().await?;
    guest.shell("rmmod patchbay_test_user").await?;
    let after = guest.describe().await?;
    ensure!(
        after.modules + 1 == before.modules && after.sites < before.sites,
        "the module's sites are still there: {before:?} {after:?}"
    );
    update_within(
        &mut guest,
        "patchbay_test:patchbay_test_shared_key",
        KeyOp::Inc,
        PATIENT,
    )
    .await?;
    guest.shell("rmmod patchbay_test").await?;
    ensure!(listed(&mut guest, "patchbay_test:*").await?.is_empty());
    let gone = update_within(&mut guest, "patchbay_test:ref_key", KeyOp::Inc, PATIENT)
        .await
        .expect_err("its module is unloaded");
    ensure!(gone.code() == Code::NotFound, "{gone:?}");
    guest.assert_no_warnings().await
}

/// Returns the names of the keys that the host lists.
async fn listed(guest: &mut Guest, pattern: &str) -> Result<Vec<String>> {
    let list = ListStaticKeysRequest {
        patterns: vec![pattern.to_owned()],
        ..Default::default()
    };
    let keys = guest.static_keys().list_static_keys(list).await?;
    Ok(keys
        .into_inner()
        .keys
        .into_iter()
        .map(|key| key.name)
        .collect())
}

/// Checks a module that has not finished loading: its gate stays closed, and its keys are removed
/// if the module never finishes.
#[tokio::test]
async fn a_loading_module_closes_the_gate() -> Result<()> {
    let Some(mut guest) = Guest::with_test_keys(1).await? else {
        return Ok(());
    };
    // The module's init waits until it is released, so the test does not depend on the guest's
    // clock.
    guest
        .shell("insmod /lib/modules/patchbay_test_stall.ko ms=600000 fail=1 2>/dev/null &")
        .await?;
    guest
        .shell("until [ -e /sys/kernel/debug/patchbay_test_stall/release ]; do sleep 0.1; done")
        .await?;
    let stalled = "patchbay_test_stall:*";
    ensure!(listed(&mut guest, stalled).await? == ["patchbay_test_stall:stall_key"]);
    let mut keys = guest.static_keys();
    let update = request("patchbay_test_stall:stall_key", KeyOp::Inc, PATIENT);
    let waiting = tokio::spawn(async move { keys.update_static_keys(update).await });
    // insmod of busybox tries to load the module twice, so the file is created and removed twice.
    guest
        .shell(
            "while kill -0 $!; do echo 1 >/sys/kernel/debug/patchbay_test_stall/release; \
             sleep 0.1; done 2>/dev/null; wait",
        )
        .await?;
    let gone = waiting.await?.expect_err("its load is rolled back");
    ensure!(gone.code() == Code::NotFound, "{gone:?}");
    ensure!(listed(&mut guest, stalled).await?.is_empty());
    // The module that failed to load had sites of this key. They are gone, so the key can be
    // changed again.
    there_and_back(&mut guest, "patchbay_test:patchbay_test_shared_key").await?;

    guest
        .shell("insmod /lib/modules/patchbay_test_stall.ko ms=600000 &")
        .await?;
    // The module's init runs once its files exist.
    guest
        .shell("until [ -e /sys/kernel/debug/patchbay_test_stall/release ]; do sleep 0.1; done")
        .await?;
    let key = "patchbay_test_stall:stall_key";
    let refusal = update_within(&mut guest, key, KeyOp::Inc, IMPATIENT)
        .await
        .expect_err("the module is COMING");
    ensure!(refusal.code() == Code::Unavailable, "{refusal:?}");
    ensure!(
        refusal
            .message()
            .contains("patchbay_test_stall is not LIVE"),
        "{refusal:?}"
    );
    guest
        .shell("echo 1 > /sys/kernel/debug/patchbay_test_stall/release")
        .await?;
    update_within(&mut guest, key, KeyOp::Inc, PATIENT).await?;
    let taken = guest
        .shell("cat /sys/kernel/debug/patchbay_test_stall/taken")
        .await?;
    ensure!(
        taken == "1 0",
        "stall_key, and the shared key beside it: {taken}"
    );
    guest.assert_no_warnings().await
}
