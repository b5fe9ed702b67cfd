# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests that use a guest: ``guest``, and ``patchbay_host`` for several."""

from __future__ import annotations

from typing import Iterator

import pytest

from patchbay.client import TLS, Host, connect
from patchbay.errors import NotFound, Refused
from patchbay.guest import Guest
from patchbay.v1.errors_pb2 import ErrorReason


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the guest is; the environment's PATCHBAY_SOCKET is the default."""
    group = parser.getgroup("patchbay")
    group.addoption("--patchbay", metavar="ENDPOINT", help="a socket, or HOST:PORT with the files")
    group.addoption("--patchbay-guest", metavar="NAME", default="", help="the guest's name")
    for name in ("ca", "cert", "key"):
        group.addoption(f"--patchbay-{name}", metavar="FILE", help="for mutual TLS, PEM")


@pytest.fixture(scope="session")
def patchbay_host(pytestconfig: pytest.Config) -> Iterator[Host]:
    """The endpoint."""
    ca, cert, key = (pytestconfig.getoption(f"--patchbay-{name}") for name in ("ca", "cert", "key"))
    tls = TLS(ca=ca, cert=cert, key=key) if ca and cert and key else None
    with connect(pytestconfig.getoption("--patchbay"), tls=tls) as host:
        yield host


@pytest.fixture
def guest(patchbay_host: Host, pytestconfig: pytest.Config) -> Iterator[Guest]:
    """The guest, which runs. Holds that the test leaves behind are released after it.

    Tests that share a guest and a principal must not run at the same time.
    """
    guest = patchbay_host.guest(pytestconfig.getoption("--patchbay-guest"))
    before = {hold.id for hold in guest.holds()}
    yield guest
    for hold in guest.holds():
        if hold.id not in before:
            try:
                guest.release(hold.id)
            except NotFound:
                # The hold expired meanwhile.
                pass
            except Refused as error:
                # Another client took the hold over meanwhile.
                if error.reason != ErrorReason.ERROR_REASON_NOT_HOLDER:
                    raise
