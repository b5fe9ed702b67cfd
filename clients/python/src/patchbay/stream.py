# SPDX-License-Identifier: Apache-2.0
"""Streams of the service as iterators that end when they are closed."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Generic, Iterator, Optional, TypeVar

import grpc

from patchbay.errors import from_rpc

if TYPE_CHECKING:
    from grpc import _CallIterator

T = TypeVar("T")


class Stream(Generic[T]):
    """What the service sends, as it comes. ``close`` may be called from another thread."""

    def __init__(self, call: _CallIterator[T]) -> None:
        self._call = call
        self._closed = False

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        try:
            return next(self._call)
        except grpc.RpcError as error:
            if self._closed:
                raise StopIteration from None
            raise from_rpc(error) from None

    def close(self) -> None:
        """Ends the stream. The service then drops what it keeps for it."""
        self._closed = True
        self._call.cancel()

    def __enter__(self) -> Stream[T]:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()
