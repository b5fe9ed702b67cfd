# SPDX-License-Identifier: Apache-2.0
"""What all calls about one guest share."""

from __future__ import annotations

from datetime import timedelta
from typing import Optional, TypeVar, Union

import grpc
from google.protobuf.duration_pb2 import Duration

from patchbay.errors import from_rpc

#: Seconds, or a timedelta.
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
