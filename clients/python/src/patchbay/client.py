# SPDX-License-Identifier: Apache-2.0
"""The connection to an endpoint."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Iterator, Optional, Union

import grpc

from patchbay.calls import pages
from patchbay.guest import Guest
from patchbay.v1 import guest_pb2, guest_pb2_grpc

#: The socket of ``patchbayd``.
DEFAULT_SOCKET = "/run/patchbayd/patchbayd.sock"

#: The timeout of a call in seconds. It is longer than the service's own limit of 30 s, so that the
#: service's error, which names the closed gate of the guest, arrives before it.
DEFAULT_TIMEOUT = 35.0

_FilePath = Union[str, "os.PathLike[str]"]


@dataclass(frozen=True)
class TLS:
    """Files for mutual TLS, all PEM."""

    ca: _FilePath
    cert: _FilePath
    key: _FilePath
    #: Name in the host's certificate; needed only if it differs from the name in the address.
    server_name: Optional[str] = None


def connect(
    endpoint: Optional[_FilePath] = None,
    *,
    tls: Optional[TLS] = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> Host:
    """Connects to a unix socket, or with ``tls`` to "HOST:PORT".

    Without an endpoint it is ``$PATCHBAY_SOCKET``, else the socket of ``patchbayd``. The connection
    is made by the first call.
    """
    if endpoint is None:
        endpoint = os.environ.get("PATCHBAY_SOCKET") or DEFAULT_SOCKET
    target = os.fspath(endpoint)
    # An answer of the service has at most 4 MiB, and its frame adds a few bytes.
    options = [("grpc.max_receive_message_length", 5 << 20)]
    if tls is None:
        path = Path(target[len("unix:") :] if target.startswith("unix:") else target)
        if not target.startswith("unix:") and "/" not in target and ":" in target:
            raise ValueError(f"{target} is no socket's path; a TCP endpoint needs tls=TLS(...)")
        # By default, grpc sends the percent-encoded path as the authority, which the service's
        # HTTP/2 implementation refuses.
        options_unix = [*options, ("grpc.default_authority", "localhost")]
        return Host(grpc.insecure_channel(f"unix:{path.absolute()}", options_unix), timeout)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=Path(tls.ca).read_bytes(),
        private_key=Path(tls.key).read_bytes(),
        certificate_chain=Path(tls.cert).read_bytes(),
    )
    if tls.server_name is not None:
        options_tls = [*options, ("grpc.ssl_target_name_override", tls.server_name)]
        return Host(grpc.secure_channel(target, credentials, options_tls), timeout)
    return Host(grpc.secure_channel(target, credentials, options), timeout)


class Host:
    """An endpoint: one guest's, or all of a host. Close it, or use it as a context manager."""

    def __init__(self, channel: grpc.Channel, timeout: float = DEFAULT_TIMEOUT) -> None:
        self.channel = channel
        self.timeout = timeout
        self._guests = guest_pb2_grpc.GuestServiceStub(channel)

    def guest(self, name: str = "") -> Guest:
        """The guest of that name; without one, the only guest of the endpoint."""
        return Guest(self.channel, name, self.timeout)

    def guests(self, *patterns: str) -> Iterator[guest_pb2.GuestStatus]:
        """The endpoint's guests, ordered by name; ``patterns`` are globs."""
        request = guest_pb2.ListGuestsRequest(patterns=patterns)
        for answer in pages(self._guests.ListGuests, request, self.timeout):
            yield from answer.guests

    def close(self) -> None:
        """Ends the connection and its streams."""
        self.channel.close()

    def __enter__(self) -> Host:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()
