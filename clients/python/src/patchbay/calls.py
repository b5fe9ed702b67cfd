# SPDX-License-Identifier: Apache-2.0
"""What all calls about one guest share."""

from __future__ import annotations

from datetime import timedelta
from typing import Iterator, Optional, Protocol, TypeVar, Union

import grpc
from google.protobuf.duration_pb2 import Duration

from patchbay.errors import ResourceExhausted, from_rpc

#: A time in seconds, or a timedelta.
Time = Union[float, timedelta]

_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")


def duration(time: Optional[Time]) -> Optional[Duration]:
    """The message for a time; None stays unset."""
    if time is None:
        return None
    message = Duration()
    message.FromTimedelta(time if isinstance(time, timedelta) else timedelta(seconds=time))
    return message


def call(
    method: grpc.UnaryUnaryMultiCallable[_Request, _Answer], request: _Request, timeout: float
) -> _Answer:
    """Calls, and turns grpc's errors into this package's."""
    try:
        return method(request, timeout=timeout)
    except grpc.RpcError as error:
        raise from_rpc(error) from None


#: The limits of one list, in pages and bytes. The service decides where a list ends, and a faulty
#: service must not exhaust this program's memory.
MAX_PAGES = 1000
MAX_BYTES = 64 << 20


class _Asks(Protocol):
    page_token: str


class _Page(Protocol):
    @property
    def next_page_token(self) -> str: ...

    def ByteSize(self) -> int: ...


_Asked = TypeVar("_Asked", bound=_Asks)
_Paged = TypeVar("_Paged", bound=_Page)


def pages(
    method: grpc.UnaryUnaryMultiCallable[_Asked, _Paged], request: _Asked, timeout: float
) -> Iterator[_Paged]:
    """The answers from the request's page on, up to the last one."""
    size = 0
    for _ in range(MAX_PAGES):
        page = call(method, request, timeout)
        yield page
        size += page.ByteSize()
        if not page.next_page_token:
            return
        if page.next_page_token == request.page_token or size > MAX_BYTES:
            break
        request.page_token = page.next_page_token
    raise ResourceExhausted(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f"the service's list does not end: {MAX_PAGES} pages or {MAX_BYTES} bytes are the most, and "
        "no page may follow itself; give narrower patterns",
    )


class Calls:
    """A guest's name, and how long a call about it may take."""

    def __init__(self, name: str, timeout: float) -> None:
        self.name = name
        self.timeout = timeout

    def call(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Request, _Answer],
        request: _Request,
        timeout: Optional[float] = None,
    ) -> _Answer:
        """Calls within ``timeout`` seconds, or this guest's default."""
        return call(method, request, self.timeout if timeout is None else timeout)

    def pages(
        self, method: grpc.UnaryUnaryMultiCallable[_Asked, _Paged], request: _Asked
    ) -> Iterator[_Paged]:
        """The answers from the request's page on, up to the last one."""
        return pages(method, request, self.timeout)
