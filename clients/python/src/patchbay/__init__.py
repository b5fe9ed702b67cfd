# SPDX-License-Identifier: Apache-2.0
"""A thin client of Patchbay: static keys and tracepoints of a running Linux guest, from its host.

Answers are the messages of ``patchbay.v1``, so that fields and enum values of a newer service are
kept. Errors are exceptions with the service's reason.
"""

from patchbay.client import DEFAULT_SOCKET, TLS, Host, connect
from patchbay.errors import (
    Conflict,
    DataLoss,
    DeadlineExceeded,
    Gone,
    GuestBusy,
    InvalidArgument,
    NotFound,
    PatchbayError,
    PermissionDenied,
    Refused,
    ResourceExhausted,
    Unavailable,
)
from patchbay.guest import Guest, Plan, changes
from patchbay.stream import Stream
from patchbay.v1.errors_pb2 import ErrorReason, Gate
from patchbay.v1.static_keys_pb2 import KeyOp

__all__ = [
    "DEFAULT_SOCKET",
    "TLS",
    "Conflict",
    "DataLoss",
    "DeadlineExceeded",
    "ErrorReason",
    "Gate",
    "Gone",
    "Guest",
    "GuestBusy",
    "Host",
    "InvalidArgument",
    "KeyOp",
    "NotFound",
    "PatchbayError",
    "PermissionDenied",
    "Plan",
    "Refused",
    "ResourceExhausted",
    "Stream",
    "Unavailable",
    "changes",
    "connect",
]
