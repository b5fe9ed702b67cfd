# SPDX-License-Identifier: Apache-2.0
"""The fixture `guest` as a test of somebody else uses it, the example, and the types."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import patchbay

from conftest import Server

PACKAGE = Path(__file__).parent.parent

TEST = """
def test_leaves_a_hold(guest):
    guest.inc("alpha")
    assert guest.key("alpha").enabled
"""


def run(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE)


def test_the_fixture_cleans_up_behind_a_test(
    server: Server, host: patchbay.Host, tmp_path: Path
) -> None:
    kept = host.guest("db").inc("beta").results[0].hold_id
    (tmp_path / "test_it.py").write_text(TEST)
    options = ["--patchbay", server.socket, "--patchbay-guest", "db", "--rootdir", tmp_path]
    plugin = ["-p", "patchbay.pytest_plugin", "-p", "no:cacheprovider"]
    done = run("-m", "pytest", *plugin, *options, tmp_path / "test_it.py")
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    # A hold that existed before the test is kept.
    assert [hold.id for hold in host.guest("db").holds()] == [kept]


def test_the_example_runs(server: Server) -> None:
    done = run(PACKAGE / "examples/flip.py", server.socket, "web-1", "alpha")
    assert done.returncode == 0, done.stderr
    assert "alpha is on" in done.stdout


def test_the_types_are_strict(tmp_path: Path) -> None:
    files = ["src", "examples"]
    done = run("-m", "mypy", "--strict", "--cache-dir", tmp_path / "mypy", *files)
    assert done.returncode == 0, done.stdout + done.stderr
