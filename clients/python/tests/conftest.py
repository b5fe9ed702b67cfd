# SPDX-License-Identifier: Apache-2.0
"""Guests in memory, served by the real service. `cargo xtask test` names the programs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Iterator

import pytest

import patchbay


class Server:
    """A program that serves guests, `in_memory_guests` or the one that a variable names: it ends with
    its standard input."""

    def __init__(
        self, socket: Path, names: list[str], variable: str = "PATCHBAY_TEST_GUESTS"
    ) -> None:
        program = os.environ.get(variable)
        if program is None:
            pytest.skip(f"{variable} names no program; `cargo xtask test` sets it")
        self.socket = socket
        self.process = subprocess.Popen(
            [program, str(socket), *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._expect("listening")

    def tell(self, command: str) -> None:
        """Sends a command and waits until it is done."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        self._expect("done")

    def _expect(self, line: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == line + "\n"

    def end(self) -> None:
        self.process.communicate()
        assert self.process.returncode == 0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Two guests behind one socket."""
    server = Server(tmp_path / "all.sock", ["db", "web-1"])
    yield server
    server.end()


@pytest.fixture
def host(server: Server) -> Iterator[patchbay.Host]:
    with patchbay.connect(server.socket) as host:
        yield host


@pytest.fixture
def web(host: patchbay.Host) -> patchbay.Guest:
    return host.guest("web-1")
