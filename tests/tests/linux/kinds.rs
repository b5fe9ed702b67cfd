// SPDX-License-Identifier: Apache-2.0
//! Tests the guest's operations on keys of the other kinds that
//! Documentation/staging/static-keys.rst describes, while the host holds references on them, and a
//! tracepoint whose probes change while it is parked. All checks share one boot, and each restores
//! the guest's state.

use anyhow::{Result, ensure};
use patchbay_proto::v1::{KeyOp, KeyUpdate, UpdateStaticKeysRequest};
use patchbay_tests::{Guest, Seen, TEST_KEYS, TestGuest};
use tonic::{Code, Status};

const REF_KEY: &str = "patchbay_test:ref_key";

async fn update(guest: &mut Guest, name: &str, op: KeyOp) -> Result<(), Status> {
    let request = UpdateStaticKeysRequest {
        updates: vec![KeyUpdate {
            name: name.to_owned(),
            op: op.into(),
            ..Default::default()
        }],
        allow_guarded: true,
        force: true,
        ..Default::default()
    };
    guest.static_keys().update_static_keys(request).await?;
    Ok(())
}

/// Runs the guest's own operation on a key.
async fn guest_op(guest: &mut Guest, key: &str, op: &str) -> Result<()> {
    let command = format!("echo {op} > {TEST_KEYS}/{key}/op");
    guest.shell(&command).await?;
    Ok(())
}

/// Fails unless the guest sees this count and the matching branches of the key.
async fn assert_seen(guest: &mut Guest, key: &str, count: i32, when: &str) -> Result<()> {
    let on = count > 0;
    let expected = Seen {
        raw: count,
        count,
        likely: on,
        unlikely: on,
    };
    let seen = guest.seen(key).await?;
    ensure!(
        seen == expected,
        "{key} {when}: {expected:?} expected: {seen:?}"
    );
    Ok(())
}

#[tokio::test]
async fn what_the_guest_does_with_other_kinds_of_keys() -> Result<()> {
    let Some(mut guest) = Guest::with_test_keys(2).await? else {
        return Ok(());
    };
    sealed_and_true(&mut guest).await?;
    deferred(&mut guest, "deferred_key").await?;
    deferred(&mut guest, "limited_key").await?;
    fast_inc(&mut guest).await?;
    cpu_hotplug_callbacks(&mut guest).await?;
    a_probe_for_a_parked_tracepoint(&mut guest).await?;
    guest.assert_no_warnings().await
}

/// Checks DEFINE_STATIC_KEY_TRUE_RO.
async fn sealed_and_true(guest: &mut Guest) -> Result<()> {
    let name = "patchbay_test:ro_true_key";
    for op in [KeyOp::Disable, KeyOp::Dec, KeyOp::Inc] {
        let refusal = update(guest, name, op).await.expect_err("read-only");
        ensure!(refusal.code() == Code::FailedPrecondition, "{refusal:?}");
    }
    let key = guest.key(name).await?;
    ensure!(key.sealed && key.enabled && key.initially_true, "{key:?}");
    assert_seen(guest, "ro_true_key", 1, "sealed").await
}

/// Checks a key whose last reference the guest drops with a delay, while the host takes one.
async fn deferred(guest: &mut Guest, key: &str) -> Result<()> {
    let name = format!("patchbay_test:{key}");
    guest_op(guest, key, "inc").await?;
    guest_op(guest, key, "dec_deferred").await?;
    assert_seen(guest, key, 1, "until the timeout").await?;
    update(guest, &name, KeyOp::Inc).await?;
    assert_seen(guest, key, 2, "with the host's").await?;
    guest_op(guest, key, "flush").await?;
    assert_seen(guest, key, 1, "with the host's alone").await?;
    // Nothing is deferred as long as another reference is left.
    guest_op(guest, key, "inc").await?;
    guest_op(guest, key, "dec_deferred").await?;
    assert_seen(guest, key, 1, "with the host's alone again").await?;
    update(guest, &name, KeyOp::Dec).await?;
    assert_seen(guest, key, 0, "at last").await
}

/// Checks that static_key_fast_inc_not_disabled() counts on top of the host's reference, without
/// any lock.
async fn fast_inc(guest: &mut Guest) -> Result<()> {
    let command = format!("echo fast_inc > {TEST_KEYS}/ref_key/op");
    let (status, said) = guest.console().run(&command).await?;
    ensure!(status != 0, "a key that is off was counted: {said}");
    assert_seen(guest, "ref_key", 0, "refused").await?;
    update(guest, REF_KEY, KeyOp::Inc).await?;
    guest_op(guest, "ref_key", "fast_inc").await?;
    assert_seen(guest, "ref_key", 2, "counted by both").await?;
    update(guest, REF_KEY, KeyOp::Dec).await?;
    assert_seen(guest, "ref_key", 1, "counted by the guest").await?;
    guest_op(guest, "ref_key", "dec").await?;
    assert_seen(guest, "ref_key", 0, "counted by nobody").await
}

/// Checks static_branch_enable_cpuslocked() and its counterpart, called while a CPU goes offline
/// and online.
async fn cpu_hotplug_callbacks(guest: &mut Guest) -> Result<()> {
    const NAME: &str = "patchbay_test:hotplug_key";
    const HOTPLUG: &str = "/sys/kernel/debug/patchbay_test/hotplug";
    const ONLINE: &str = "/sys/devices/system/cpu/cpu1/online";
    guest.shell(&format!("echo 1 > {HOTPLUG}")).await?;
    guest.shell(&format!("echo 0 > {ONLINE}")).await?;
    assert_seen(guest, "hotplug_key", 1, "with a CPU off").await?;
    // At a count of 2 the callback's static_key_disable() would warn and leave the key on.
    let refusal = update(guest, NAME, KeyOp::Inc).await;
    let refusal = refusal.expect_err("guarded and on");
    ensure!(refusal.code() == Code::FailedPrecondition, "{refusal:?}");
    update(guest, NAME, KeyOp::Enable).await?;
    assert_seen(guest, "hotplug_key", 1, "enabled by the host as well").await?;
    guest.shell(&format!("echo 1 > {ONLINE}")).await?;
    assert_seen(guest, "hotplug_key", 0, "with all CPUs").await?;

    // The host flips another key while the callbacks flip theirs.
    guest
        .shell(&format!(
            "((for i in 1 2 3; do echo 0 > {ONLINE}; echo 1 > {ONLINE}; done; echo done > /tmp/hotplug) \
             >/dev/null 2>&1 &)"
        ))
        .await?;
    while guest.shell("cat /tmp/hotplug 2>/dev/null || true").await? != "done" {
        update(guest, REF_KEY, KeyOp::Inc).await?;
        assert_seen(guest, "ref_key", 1, "amid callbacks").await?;
        update(guest, REF_KEY, KeyOp::Dec).await?;
        assert_seen(guest, "ref_key", 0, "amid callbacks").await?;
    }
    assert_seen(guest, "hotplug_key", 0, "after the callbacks").await?;
    guest.shell(&format!("echo 0 > {HOTPLUG}")).await?;
    Ok(())
}

/// Checks that attaching a further probe to a parked tracepoint turns the key on, so that the
/// probe's client gets its events. An unpatched kernel turns the key on only for the first probe.
async fn a_probe_for_a_parked_tracepoint(guest: &mut Guest) -> Result<()> {
    const NAME: &str = "patchbay_test:patchbay_test_plain";
    const FILES: &str = "/sys/kernel/debug/patchbay_test/tracepoint/plain";
    let state = format!("cd {FILES} && echo 1 > fire && echo $(cat enabled hits); cd /");
    let probes = async |guest: &mut Guest, probes: u32| {
        let command = format!("echo {probes} > {FILES}/probe");
        guest.shell(&command).await
    };
    probes(guest, 1).await?;
    ensure!(guest.shell(&state).await? == "1 1", "one probe");
    update(guest, NAME, KeyOp::Disable).await?;
    ensure!(guest.shell(&state).await? == "0 1", "parked");
    probes(guest, 2).await?;
    let seen = guest.shell(&state).await?;
    ensure!(seen == "1 3", "a second probe is to turn it on: {seen}");
    ensure!(guest.key(NAME).await?.enabled, "the host sees it on");
    // Detaching a probe leaves a parked tracepoint parked.
    update(guest, NAME, KeyOp::Disable).await?;
    probes(guest, 1).await?;
    ensure!(guest.shell(&state).await? == "0 3", "parked again");
    probes(guest, 0).await?;
    ensure!(guest.shell(&state).await? == "0 3", "no probe");
    probes(guest, 1).await?;
    ensure!(guest.shell(&state).await? == "1 4", "a first probe");
    probes(guest, 0).await?;
    Ok(())
}
