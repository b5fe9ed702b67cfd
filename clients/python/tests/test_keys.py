# SPDX-License-Identifier: Apache-2.0
"""The client against the real service with guests in memory."""

from __future__ import annotations

from datetime import timedelta

import pytest

import patchbay
from patchbay import ErrorReason, Gate, KeyOp, changes
from patchbay.v1.static_keys_pb2 import KeyClass, KeyEvent

from conftest import Server


def test_guests_are_listed_and_named(host: patchbay.Host) -> None:
    assert [guest.guest for guest in host.guests()] == ["db", "web-1"]
    assert [guest.guest for guest in host.guests("web-*")] == ["web-1"]
    assert host.guest("db").describe().status.guest == "db"
    with pytest.raises(patchbay.InvalidArgument) as error:
        host.guest().describe()
    assert error.value.reason == ErrorReason.ERROR_REASON_GUEST_NOT_NAMED
    with pytest.raises(patchbay.NotFound) as missing:
        host.guest("web-7").describe()
    assert missing.value.reason == ErrorReason.ERROR_REASON_GUEST_NOT_FOUND


def test_keys_are_listed_by_pattern_class_and_state(web: patchbay.Guest) -> None:
    names = [key.name for key in web.keys()]
    assert names == sorted(names) and {"alpha", "beta", "guarded"} <= set(names)
    assert [key.name for key in web.keys("*a", "!beta")] == ["alpha"]
    guarded = web.keys(classes=[KeyClass.KEY_CLASS_GUARDED])
    assert [key.name for key in guarded] == ["guarded"]
    web.enable("alpha")
    assert [key.name for key in web.keys("alpha", "beta", enabled=True)] == ["alpha"]


def test_a_key_has_its_sites(web: patchbay.Guest) -> None:
    key = web.key("beta")
    assert len(key.sites) == key.site_count == 3
    addresses = [site.address for site in key.sites]
    assert addresses == sorted(addresses)
    with pytest.raises(patchbay.NotFound) as error:
        web.key("betta")
    assert error.value.reason == ErrorReason.ERROR_REASON_KEY_NOT_FOUND
    assert "beta" in error.value.near


def test_ops_change_one_guest_only(host: patchbay.Host) -> None:
    web, db = host.guest("web-1"), host.guest("db")
    done = web.enable("alpha", "beta", reason="a test")
    assert [(r.name, r.count_before, r.count_after) for r in done.results] == [
        ("alpha", 0, 1),
        ("beta", 0, 1),
    ]
    assert done.summary.sites_patched == 4
    assert web.key("alpha").enabled and not db.key("alpha").enabled
    assert web.inc("alpha").results[0].count_after == 2
    assert web.dec("alpha").results[0].count_after == 1
    assert web.disable("alp*").results[0].count_after == 0


def test_a_reference_that_was_released_cannot_be_dropped(web: patchbay.Guest) -> None:
    web.enable("alpha")
    web.release(*[hold.id for hold in web.holds()])
    with pytest.raises(patchbay.Refused) as error:
        web.dec("alpha")
    assert error.value.reason == ErrorReason.ERROR_REASON_WOULD_WARN


def test_holds_are_listed_renewed_and_released(web: patchbay.Guest) -> None:
    web.inc("alpha", ttl=timedelta(hours=1), reason="canary")
    (hold,) = web.holds("al*")
    assert (hold.key, hold.reason, hold.references) == ("alpha", "canary", 1)
    assert hold.HasField("expires_at")
    (renewed,) = web.renew(hold.id)
    assert not renewed.HasField("expires_at")
    assert list(web.holds(holder="nobody")) == []
    assert web.release(renewed.id).results[0].count_after == 0
    with pytest.raises(patchbay.NotFound) as error:
        web.release(renewed.id)
    assert error.value.reason == ErrorReason.ERROR_REASON_HOLD_NOT_FOUND


def test_a_block_gives_its_references_back_even_if_it_fails(web: patchbay.Guest) -> None:
    with pytest.raises(RuntimeError), web.enabled("alpha", "beta"):
        assert web.key("alpha").enabled and web.key("beta").enabled
        raise RuntimeError
    assert not web.key("alpha").enabled and list(web.holds()) == []


def test_a_plan_is_committed_as_prepared_or_goes_stale(web: patchbay.Guest) -> None:
    with web.prepare(changes(KeyOp.KEY_OP_ENABLE, "alpha", "beta")) as plan:
        assert plan.answer.summary.keys_changed == 2 and len(plan.answer.digest) == 64
        assert not web.key("alpha").enabled
        assert plan.commit().summary.sites_patched == 4
    with web.prepare(changes(KeyOp.KEY_OP_DISABLE, "alpha")) as plan:
        web.inc("alpha")
        with pytest.raises(patchbay.Refused) as error:
            plan.commit()
        assert error.value.reason == ErrorReason.ERROR_REASON_PLAN_STALE
    with pytest.raises(patchbay.NotFound) as gone:
        plan.commit()
    assert gone.value.reason == ErrorReason.ERROR_REASON_PLAN_NOT_FOUND


def test_an_etag_of_another_state_is_a_conflict(web: patchbay.Guest) -> None:
    seen = web.key("alpha").etag
    web.inc("alpha")
    with pytest.raises(patchbay.Conflict) as error:
        web.update(changes(KeyOp.KEY_OP_ENABLE, "alpha", etag=seen))
    assert error.value.reason == ErrorReason.ERROR_REASON_ETAG_MISMATCH


def test_a_repeat_with_the_same_id_gets_the_first_answer(web: patchbay.Guest) -> None:
    inc = changes(KeyOp.KEY_OP_INC, "alpha")
    first = web.update(inc, request_id="once")
    assert web.update(inc, request_id="once") == first
    assert web.key("alpha").count == 1


def test_changes_are_watched_from_now_and_from_a_revision(web: patchbay.Guest) -> None:
    with web.watch_keys("alpha") as watch:
        start = next(watch)
        web.inc("beta")
        web.inc("alpha", reason="seen")
        event = next(response for response in watch if response.events).events[0]
    assert (event.kind, event.name, event.count) == (KeyEvent.KIND_CHANGED, "alpha", 1)
    assert event.reason == "seen"
    # The watch ended because this client closed it.
    assert list(watch) == []
    again = web.watch_keys(incarnation=start.incarnation, start_revision=start.revision + 1)
    with again:
        names = [event.name for event in next(r for r in again if r.events).events]
    assert names == ["beta"]
    with web.watch_keys(incarnation="another", start_revision=1) as other:
        with pytest.raises(patchbay.Gone) as error:
            next(other)
    assert error.value.reason == ErrorReason.ERROR_REASON_INCARNATION_CHANGED


def test_a_busy_guest_is_an_error_with_its_gate(server: Server, web: patchbay.Guest) -> None:
    server.tell("busy web-1")
    with pytest.raises(patchbay.GuestBusy) as error:
        web.update(changes(KeyOp.KEY_OP_ENABLE, "alpha"), retry_timeout=1)
    assert error.value.reason == ErrorReason.ERROR_REASON_GUEST_BUSY
    assert error.value.gate == Gate.GATE_SYSTEM_STATE
    assert error.value.retry_after is not None
    server.tell("idle web-1")
    assert web.enable("alpha").report.paused


def test_guarded_keys_are_refused(web: patchbay.Guest) -> None:
    with pytest.raises(patchbay.Refused) as error:
        web.enable("guarded")
    assert error.value.reason == ErrorReason.ERROR_REASON_KEY_GUARDED


def test_a_paused_guest_is_seen_and_resumed(web: patchbay.Guest) -> None:
    with web.watch() as watch:
        before = next(watch).status.state
        assert web.pause(ttl=60).HasField("expires_at")
        paused = next(watch).status.state
        web.resume()
        after = next(watch).status.state
    assert before == after != paused


def test_tracing_without_an_agent_is_unavailable(web: patchbay.Guest) -> None:
    assert [t.key for t in web.tracepoints("*sched_switch")]
    with pytest.raises(patchbay.Unavailable) as error:
        web.arm("sched_switch")
    assert error.value.reason == ErrorReason.ERROR_REASON_NO_AGENT
    assert web.agent().absent
    with web.kernel_log() as log, pytest.raises(patchbay.Unavailable) as unread:
        next(log)
    assert unread.value.reason == ErrorReason.ERROR_REASON_NO_AGENT


def test_nobody_listening_is_unavailable_without_a_reason(tmp_path: object) -> None:
    with patchbay.connect(f"{tmp_path}/nobody.sock") as host:
        with pytest.raises(patchbay.Unavailable) as error:
            host.guest().describe()
    assert error.value.reason_name == ""
    assert error.value.reason == ErrorReason.ERROR_REASON_UNSPECIFIED


def test_what_cannot_be_meant_is_refused_before_a_call(web: patchbay.Guest) -> None:
    with pytest.raises(ValueError, match="name a key"):
        web.enable()
    with pytest.raises(ValueError, match="etag"):
        changes(KeyOp.KEY_OP_INC, "a*", etag="x")
    with pytest.raises(ValueError, match="tls"):
        patchbay.connect("web.example:7447")
