# SPDX-License-Identifier: Apache-2.0
"""Every error of the interface, through the host's daemon."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path
from typing import Callable, Iterator

import pytest

import patchbay
from patchbay.v1.errors_pb2 import ErrorReason

from conftest import Server

PREFIX = "ERROR_REASON_"
REASONS = [name.removeprefix(PREFIX) for name in ErrorReason.keys() if ErrorReason.Value(name)]


@pytest.fixture
def refusing(tmp_path: Path) -> Iterator[patchbay.Guest]:
    """A guest whose monitor refuses each call with the reason that stands in a key's place."""
    program = os.environ.get("PATCHBAY_TEST_DAEMON")
    if program is None:
        pytest.skip("PATCHBAY_TEST_DAEMON names no program; `cargo xtask test` sets it")
    (tmp_path / "run").mkdir()
    policy = f"rules: [{{name: own, principals: ['uid:{os.geteuid()}'], role: admin}}]"
    (tmp_path / "policy.yaml").write_text(policy)
    monitor = Server(tmp_path / "run/refusing.sock", ["refusing"], "PATCHBAY_TEST_REFUSING")
    command = [program]
    for option, name in (
        ("--run-dir", "run"),
        ("--socket", "node.sock"),
        ("--policy", "policy.yaml"),
        ("--audit-log", "audit.jsonl"),
    ):
        command += [option, str(tmp_path / name)]
    daemon = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    stderr = daemon.stderr
    assert stderr is not None
    assert any("guest found" in line for line in stderr)
    # The output is read to its end, so that a full pipe never blocks the daemon.
    threading.Thread(target=stderr.read, daemon=True).start()
    with patchbay.connect(tmp_path / "node.sock") as host:
        yield host.guest("refusing")
    daemon.kill()
    daemon.wait()
    monitor.end()


def test_every_reason_comes_through_the_daemon(refusing: patchbay.Guest) -> None:
    calls: list[Callable[[str], object]] = [
        lambda reason: refusing.inc(reason),
        lambda reason: refusing.key(reason),
        lambda reason: list(refusing.watch_keys(reason)),
    ]
    for reason in REASONS:
        for call in calls:
            with pytest.raises(patchbay.PatchbayError) as error:
                call(reason)
            assert error.value.reason == ErrorReason.Value(PREFIX + reason)
            assert error.value.message == f"refused with {reason}: “100 %”\nas asked"
            assert error.value.metadata["near"] == "näher\nund näher"
