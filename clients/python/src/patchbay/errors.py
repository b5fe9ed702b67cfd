# SPDX-License-Identifier: Apache-2.0
"""Errors of the service as exceptions: one class per kind of answer, with the reason as an enum."""

from __future__ import annotations

from typing import Mapping, Optional, Union, cast

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from patchbay.v1.errors_pb2 import ErrorReason, Gate

_DOMAIN = "patchbay"
_DETAILS = "grpc-status-details-bin"


class PatchbayError(Exception):
    """A call that failed."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        reason_name: str = "",
        metadata: Optional[Mapping[str, str]] = None,
        retry_after: Optional[float] = None,
    ) -> None:
        super().__init__(f"{reason_name}: {message}" if reason_name else message)
        self.code = code
        self.message = message
        #: The reason as the service names it, even if this client does not know it. Empty if the
        #: service gave no reason, for example because it cannot be reached.
        self.reason_name = reason_name
        self.metadata = dict(metadata or {})
        #: The time in seconds after which the service suggests to repeat the call.
        self.retry_after = retry_after

    @property
    def reason(self) -> ErrorReason.ValueType:
        """The reason; ERROR_REASON_UNSPECIFIED if this client does not know it."""
        name = f"ERROR_REASON_{self.reason_name}"
        if name in ErrorReason.keys():
            return ErrorReason.Value(name)
        return ErrorReason.ERROR_REASON_UNSPECIFIED


class InvalidArgument(PatchbayError):
    """The request is malformed."""


class NotFound(PatchbayError):
    """There is no such guest, key, hold, plan or event."""

    @property
    def near(self) -> list[str]:
        """Similar names."""
        return [name for name in self.metadata.get("near", "").split(", ") if name]


class PermissionDenied(PatchbayError):
    """The caller may not do that, or is not known."""


class Refused(PatchbayError):
    """The guest or the key is in a state that does not allow it."""


class Conflict(PatchbayError):
    """The key is not what the caller saw last."""


class Gone(PatchbayError):
    """The revision to watch from is not kept, or another incarnation's. List again."""


class ResourceExhausted(PatchbayError):
    """A limit of the service is reached."""


class DeadlineExceeded(PatchbayError):
    """It took too long."""


class DataLoss(PatchbayError):
    """Guest memory is not what it should be. The message tells what was left."""


class Unavailable(PatchbayError):
    """It cannot be done at the moment; repeat the call."""


class GuestBusy(Unavailable):
    """A gate of the guest stayed closed."""

    @property
    def gate_name(self) -> str:
        """As the service names it, also if this client does not know it."""
        return self.metadata.get("gate", "")

    @property
    def gate(self) -> Gate.ValueType:
        """The gate; GATE_UNSPECIFIED if this client does not know it."""
        name = f"GATE_{self.gate_name}"
        return Gate.Value(name) if name in Gate.keys() else Gate.GATE_UNSPECIFIED


_CLASSES: dict[grpc.StatusCode, type[PatchbayError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.UNAUTHENTICATED: PermissionDenied,
    grpc.StatusCode.FAILED_PRECONDITION: Refused,
    grpc.StatusCode.ABORTED: Conflict,
    grpc.StatusCode.OUT_OF_RANGE: Gone,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.DATA_LOSS: DataLoss,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
}


def from_rpc(error: grpc.RpcError) -> PatchbayError:
    """The exception for a failed call of grpc."""
    call = cast(grpc.Call, error)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    retry_after = None
    for detail in _details(call):
        if detail.Is(info.DESCRIPTOR):
            found = error_details_pb2.ErrorInfo()
            detail.Unpack(found)
            if found.domain == _DOMAIN:
                info = found
        elif detail.Is(retry.DESCRIPTOR):
            detail.Unpack(retry)
            retry_after = retry.retry_delay.ToTimedelta().total_seconds()
    code = call.code()
    kind = _CLASSES.get(code, PatchbayError)
    if info.reason == "GUEST_BUSY":
        kind = GuestBusy
    return kind(code, call.details() or "", info.reason, info.metadata, retry_after)


def _details(call: grpc.Call) -> list[any_pb2.Any]:
    entries = cast("list[tuple[str, Union[str, bytes]]]", call.trailing_metadata() or [])
    for key, value in entries:
        if key == _DETAILS and isinstance(value, bytes):
            try:
                return list(status_pb2.Status.FromString(value).details)
            except DecodeError:
                return []
    return []
