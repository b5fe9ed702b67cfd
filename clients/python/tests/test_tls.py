# SPDX-License-Identifier: Apache-2.0
"""The client through the host's daemon, with mutual TLS."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Iterator

import pytest

import patchbay

from conftest import Server


ALICE = "spiffe://patchbay.internal/alice"


class Daemon:
    """patchbayd in front of one guest, for which operators are named in a policy."""

    def __init__(self, folder: Path) -> None:
        program = os.environ.get("PATCHBAY_TEST_DAEMON")
        if program is None:
            pytest.skip("PATCHBAY_TEST_DAEMON names no program; `cargo xtask test` sets it")
        self.folder, self.ca = folder, folder / "ca"
        (folder / "run").mkdir()
        self.server = Server(folder / "run/web-1.sock", ["web-1"])
        certs = [program, "certs"]
        subprocess.run([*certs, "init", "--folder", self.ca], check=True, capture_output=True)
        for name, more in (("host", ["--host", "localhost"]), ("alice", []), ("bob", [])):
            issue = [*certs, "issue", name, "--folder", self.ca, *more]
            subprocess.run(issue, check=True, capture_output=True)
        rule = f"name: op, principals: ['{ALICE}'], role: operator, keys: ['alpha']"
        policy = f"rules: [{{{rule}}}]"
        (folder / "policy.yaml").write_text(policy)
        options = {
            "--run-dir": "run",
            "--socket": "node.sock",
            "--policy": "policy.yaml",
            "--audit-log": "audit.jsonl",
            "--cert": "ca/host.pem",
            "--key": "ca/host.key",
        }
        command = [program, "--listen", "127.0.0.1:0"]
        command += ["--client-ca", f"patchbay.internal={self.ca / 'ca.pem'}"]
        for name, file in options.items():
            command += [name, str(folder / file)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        lines = (json.loads(line) for line in self.process.stderr)
        listening = next(line for line in lines if "mutual TLS" in line["message"])
        self.port = listening["address"].rsplit(":", 1)[1]

    def connect(self, name: str) -> patchbay.Host:
        tls = patchbay.TLS(
            ca=self.ca / "ca.pem", cert=self.ca / f"{name}.pem", key=self.ca / f"{name}.key"
        )
        return patchbay.connect(f"localhost:{self.port}", tls=tls)

    def end(self) -> None:
        self.process.terminate()
        self.process.communicate()
        self.server.end()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path)
    yield daemon
    daemon.end()


def test_a_certificate_decides_what_its_holder_may_do(daemon: Daemon) -> None:
    with daemon.connect("alice") as host:
        while not list(host.guests()):
            pass  # The daemon serves before it has found its guests.
        guest = host.guest("web-1")
        assert guest.enable("alpha").results[0].count_after == 1
        (hold,) = guest.holds()
        assert hold.holder == ALICE
        with pytest.raises(patchbay.PermissionDenied) as error:
            guest.enable("beta")
        assert error.value.reason == patchbay.ErrorReason.ERROR_REASON_ROLE_MISSING
    with daemon.connect("bob") as host:
        with pytest.raises(patchbay.PermissionDenied):
            host.guest("web-1").enable("alpha")


def test_a_host_of_another_ca_is_not_trusted(daemon: Daemon, tmp_path: Path) -> None:
    program = os.environ["PATCHBAY_TEST_DAEMON"]
    other = tmp_path / "other"
    init = [program, "certs", "init", "--folder", other]
    subprocess.run(init, check=True, capture_output=True)
    tls = patchbay.TLS(
        ca=other / "ca.pem", cert=daemon.ca / "alice.pem", key=daemon.ca / "alice.key"
    )
    with patchbay.connect(f"localhost:{daemon.port}", tls=tls, timeout=10) as host:
        with pytest.raises(patchbay.Unavailable) as error:
            list(host.guests())
    assert error.value.reason_name == ""
