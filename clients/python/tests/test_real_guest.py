# SPDX-License-Identifier: Apache-2.0
"""Both clients with a Linux guest under the real monitor. `cargo xtask clients` runs it, where there is
no hardware KVM in the lab."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Iterator

import pytest

import patchbay
from patchbay import KeyOp, changes
from patchbay.v1.guest_pb2 import RegistrationState
from patchbay.v1.static_keys_pb2 import KeyClass
from patchbay.v1.tracepoints_pb2 import TracepointState

# The command line with which the tests of the monitor boot the guest.
COMMAND_LINE = "console=ttyS0 quiet panic=-1 reboot=k noxsave acpi=off patchbay.agent"
#: A time in seconds that no correct run reaches, not even in the lab.
PATIENCE = 300.0
EVENT = "sched:sched_switch"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the guest's sockets are."""
    return tmp_path_factory.mktemp("guest")


@pytest.fixture(scope="module")
def linux(folder: Path) -> Iterator[patchbay.Guest]:
    """A guest that has registered and whose agent is connected."""
    files = {
        name: os.environ.get(f"PATCHBAY_{name}")
        for name in ("VMM", "TEST_KERNEL", "TEST_INITRAMFS")
    }
    if None in files.values():
        pytest.skip("PATCHBAY_VMM and PATCHBAY_TEST_* name no guest; `cargo xtask clients` sets them")
    monitor = subprocess.Popen(
        [
            str(files["VMM"]),
            *("--kernel", str(files["TEST_KERNEL"])),
            *("--initrd", str(files["TEST_INITRAMFS"])),
            *("--cmdline", COMMAND_LINE, "--memory", "256M", "--allow-guarded"),
            *("--console", f"file:{folder}/console"),
            *("--api-socket", f"{folder}/api.sock", "--vsock", f"{folder}/vsock"),
        ],
        stdin=subprocess.DEVNULL,
    )
    try:
        while not (folder / "api.sock").exists():
            assert monitor.poll() is None, "the monitor ended"
        with patchbay.connect(folder / "api.sock", timeout=PATIENCE) as host:
            guest = host.guest()
            with guest.watch() as watch:
                for answer in watch:
                    registered = RegistrationState.REGISTRATION_STATE_REGISTERED
                    if answer.status.registration == registered and answer.status.agent_connected:
                        break
            yield guest
    finally:
        monitor.kill()
        monitor.wait()


def key_of(guest: patchbay.Guest) -> str:
    """A key that is off, with sites."""
    keys = guest.keys(enabled=False, classes=[KeyClass.KEY_CLASS_GUARDED])
    return next(key.name for key in keys if key.patchable_sites and not key.sealed)


def test_a_key_of_the_kernel_is_flipped_and_put_back(linux: patchbay.Guest) -> None:
    name = key_of(linux)
    before = {site.address: site.current_bytes for site in linux.key(name).sites}
    with linux.watch_keys(name) as watch:
        next(watch)
        done = linux.update(changes(KeyOp.KEY_OP_INC, name), allow_guarded=True, ttl=3600)
        assert next(response for response in watch if response.events).events[0].count == 1
    assert done.report.paused and done.summary.sites_patched >= 1
    changed = {site.address: site.current_bytes for site in linux.key(name).sites}
    assert changed.keys() == before.keys() and changed != before
    linux.release(done.results[0].hold_id)
    assert {site.address: site.current_bytes for site in linux.key(name).sites} == before


def test_an_event_is_armed_fired_seen_parked_and_disarmed(linux: patchbay.Guest) -> None:
    def state() -> TracepointState.ValueType:
        (found,) = linux.tracepoints(EVENT)
        return found.state

    linux.arm(EVENT, ttl=3600)
    assert state() == TracepointState.TRACEPOINT_STATE_PARKED
    with linux.events(EVENT) as events:
        # The first response has no events. Events that fire after it are received.
        next(events)
        linux.fire(EVENT)
        seen = next(response for response in events if response.events).events[0]
        assert seen.name == EVENT and "prev_comm" in {field.name for field in seen.fields}
        assert state() == TracepointState.TRACEPOINT_STATE_FIRING
        linux.park(EVENT)
    assert state() == TracepointState.TRACEPOINT_STATE_PARKED
    linux.disarm(EVENT)
    assert state() == TracepointState.TRACEPOINT_STATE_DISARMED
    assert linux.agent().agent_version


def test_an_event_is_traced_for_as_long_as_its_stream(linux: patchbay.Guest) -> None:
    with linux.events(EVENT, arm_and_fire=True, filter="prev_pid == 0") as events:
        assert list(next(events).names) == [EVENT]
        assert next(response for response in events if response.events).events


def test_a_pause_ends_by_itself(linux: patchbay.Guest) -> None:
    with linux.watch() as watch:
        running = next(watch).status.state
        linux.pause(ttl=0.5)
        assert next(watch).status.state != running
        assert next(watch).status.state == running


def test_the_example_in_go_reaches_the_guest(linux: patchbay.Guest, folder: Path) -> None:
    program = os.environ.get("PATCHBAY_TEST_GO_FLIP")
    if program is None:
        pytest.skip("PATCHBAY_TEST_GO_FLIP names no program: go is not installed")
    # The example does not request permission for guarded keys, so the change is refused with that
    # reason.
    command = [program, f"{folder}/api.sock", "", key_of(linux)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "KEY_GUARDED" in done.stderr, done.stderr
