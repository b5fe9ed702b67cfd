# SPDX-License-Identifier: Apache-2.0
"""A service of another version: enum values, fields, reasons and methods that one side lacks."""

from __future__ import annotations

from concurrent import futures
from pathlib import Path
from typing import Iterator, NoReturn

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

import patchbay
from patchbay.v1 import static_keys_pb2, static_keys_pb2_grpc, tracepoints_pb2
from patchbay.v1 import tracepoints_pb2_grpc

#: Field 1000, which no message of this version has, as a varint of 7.
UNKNOWN_FIELD = b"\xc0\x3e\x07"


def fail(context: grpc.ServicerContext, reason: str, **metadata: str) -> NoReturn:
    detail = any_pb2.Any()
    info = error_details_pb2.ErrorInfo(reason=reason, domain="patchbay", metadata=metadata)
    detail.Pack(info)
    code = grpc.StatusCode.UNAVAILABLE
    status = status_pb2.Status(code=code.value[0], message="no", details=[detail])
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(code, "no")


class NewerKeys(static_keys_pb2_grpc.StaticKeysServiceServicer):
    def ListStaticKeys(
        self, request: static_keys_pb2.ListStaticKeysRequest, context: grpc.ServicerContext
    ) -> static_keys_pb2.ListStaticKeysResponse:
        key = static_keys_pb2.StaticKey(name=f"{request.page_token or 'first'}")
        # Field 2, key_class, has a value for which this version has no name.
        key.MergeFromString(b"\x10\x63" + UNKNOWN_FIELD)
        following = "" if request.page_token else "second"
        return static_keys_pb2.ListStaticKeysResponse(keys=[key], next_page_token=following)

    def ListHolds(
        self, request: static_keys_pb2.ListHoldsRequest, context: grpc.ServicerContext
    ) -> static_keys_pb2.ListHoldsResponse:
        following = str(int(request.page_token or 0) + 1) if request.holder else "same"
        return static_keys_pb2.ListHoldsResponse(next_page_token=following)

    def UpdateStaticKeys(
        self, request: static_keys_pb2.UpdateStaticKeysRequest, context: grpc.ServicerContext
    ) -> static_keys_pb2.UpdateStaticKeysResponse:
        if request.reason == "busy":
            fail(context, "GUEST_BUSY", gate="MOON_PHASE", gate_message="full moon")
        fail(context, "GUEST_ASLEEP")


class Traces(tracepoints_pb2_grpc.TracepointsServiceServicer):
    def ArmTracepoints(
        self, request: tracepoints_pb2.ArmTracepointsRequest, context: grpc.ServicerContext
    ) -> tracepoints_pb2.ArmTracepointsResponse:
        assert request.request_id and request.filter == "prev_pid == 0"
        assert request.ttl.seconds == 90
        result = tracepoints_pb2.TracepointResult(name=request.patterns[0])
        return tracepoints_pb2.ArmTracepointsResponse(results=[result])

    def StreamTracepointEvents(
        self,
        request: tracepoints_pb2.StreamTracepointEventsRequest,
        context: grpc.ServicerContext,
    ) -> Iterator[tracepoints_pb2.StreamTracepointEventsResponse]:
        assert request.guest == "old" and request.arm_and_fire
        yield tracepoints_pb2.StreamTracepointEventsResponse(names=request.patterns)
        event = tracepoints_pb2.TraceEvent(name=request.patterns[0], pid=7)
        yield tracepoints_pb2.StreamTracepointEventsResponse(events=[event])
        fail(context, "ENDPOINT_ENDING")

    def StreamKernelLog(
        self, request: tracepoints_pb2.StreamKernelLogRequest, context: grpc.ServicerContext
    ) -> Iterator[tracepoints_pb2.StreamKernelLogResponse]:
        assert request.guest == "old"
        yield tracepoints_pb2.StreamKernelLogResponse()
        record = tracepoints_pb2.KernelLogRecord(level=7, text="a line")
        yield tracepoints_pb2.StreamKernelLogResponse(records=[record], lost=3)
        fail(context, "NO_AGENT")


@pytest.fixture
def guest(tmp_path: Path) -> Iterator[patchbay.Guest]:
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    static_keys_pb2_grpc.add_StaticKeysServiceServicer_to_server(NewerKeys(), server)
    tracepoints_pb2_grpc.add_TracepointsServiceServicer_to_server(Traces(), server)
    server.add_insecure_port(f"unix:{tmp_path}/newer.sock")
    server.start()
    with patchbay.connect(tmp_path / "newer.sock") as host:
        yield host.guest("old")
    server.stop(None).wait()


def test_values_and_fields_of_a_newer_service_are_kept(guest: patchbay.Guest) -> None:
    keys = list(guest.keys())
    assert [key.name for key in keys] == ["first", "second"]
    assert [int(key.key_class) for key in keys] == [99, 99]
    assert keys[0].SerializeToString().endswith(UNKNOWN_FIELD)


def test_a_list_that_never_ends_is_given_up(guest: patchbay.Guest) -> None:
    for holder in ("", "somebody"):
        with pytest.raises(patchbay.ResourceExhausted) as error:
            list(guest.holds(holder=holder))
        assert "does not end" in error.value.message


def test_a_reason_of_a_newer_service_keeps_its_name(guest: patchbay.Guest) -> None:
    with pytest.raises(patchbay.Unavailable) as error:
        guest.enable("first")
    assert error.value.reason == patchbay.ErrorReason.ERROR_REASON_UNSPECIFIED
    assert error.value.reason_name == "GUEST_ASLEEP"
    with pytest.raises(patchbay.GuestBusy) as busy:
        guest.enable("first", reason="busy")
    assert busy.value.gate == patchbay.Gate.GATE_UNSPECIFIED
    assert busy.value.gate_name == "MOON_PHASE"


def test_a_method_that_an_older_service_lacks(guest: patchbay.Guest) -> None:
    with pytest.raises(patchbay.PatchbayError) as error:
        guest.describe()
    assert error.value.code == grpc.StatusCode.UNIMPLEMENTED
    assert type(error.value) is patchbay.PatchbayError


def test_requests_of_tracing_carry_what_was_asked(guest: patchbay.Guest) -> None:
    armed = guest.arm("sched:sched_switch", filter="prev_pid == 0", ttl=90)
    assert armed.results[0].name == "sched:sched_switch"
    with guest.events("sched:sched_switch", arm_and_fire=True) as events:
        assert list(next(events).names) == ["sched:sched_switch"]
        assert next(events).events[0].pid == 7
        with pytest.raises(patchbay.Unavailable) as error:
            next(events)
    assert error.value.reason == patchbay.ErrorReason.ERROR_REASON_ENDPOINT_ENDING


def test_the_kernels_log_is_streamed_until_the_agent_goes(guest: patchbay.Guest) -> None:
    with guest.kernel_log() as log:
        assert not next(log).records
        response = next(log)
        assert [(record.level, record.text) for record in response.records] == [(7, "a line")]
        assert response.lost == 3
        with pytest.raises(patchbay.Unavailable) as error:
            next(log)
    assert error.value.reason == patchbay.ErrorReason.ERROR_REASON_NO_AGENT
