# SPDX-License-Identifier: Apache-2.0
"""One guest's tracepoints, and its agent."""

from __future__ import annotations

import uuid
from typing import Iterator, Optional

import grpc

from patchbay.calls import Calls, Time, duration
from patchbay.stream import Stream
from patchbay.v1 import tracepoints_pb2, tracepoints_pb2_grpc


class Tracing(Calls):
    """Tracepoints by ``system:name``, or globs of it."""

    def __init__(self, channel: grpc.Channel, name: str, timeout: float) -> None:
        super().__init__(name, timeout)
        self._tracepoints = tracepoints_pb2_grpc.TracepointsServiceStub(channel)

    def tracepoints(
        self, *patterns: str, armed_only: bool = False, refresh: bool = False
    ) -> Iterator[tracepoints_pb2.Tracepoint]:
        """The tracepoints, ordered by name."""
        request = tracepoints_pb2.ListTracepointsRequest(
            guest=self.name, patterns=patterns, armed_only=armed_only, refresh=refresh
        )
        for answer in self.pages(self._tracepoints.ListTracepoints, request):
            yield from answer.tracepoints

    def arm(
        self,
        *patterns: str,
        filter: str = "",
        trigger: str = "",
        even_if_others: bool = False,
        ttl: Optional[Time] = None,
        validate_only: bool = False,
    ) -> tracepoints_pb2.ArmTracepointsResponse:
        """Attaches probes, and parks: the guest traces nothing yet."""
        request = tracepoints_pb2.ArmTracepointsRequest(
            guest=self.name,
            patterns=patterns,
            filter=filter,
            trigger=trigger,
            even_if_others=even_if_others,
            validate_only=validate_only,
            request_id=str(uuid.uuid4()),
            ttl=duration(ttl),
        )
        return self.call(self._tracepoints.ArmTracepoints, request)

    def fire(
        self, *patterns: str, ttl: Optional[Time] = None, validate_only: bool = False
    ) -> tracepoints_pb2.FireTracepointsResponse:
        """Turns the keys of armed events on, all in one pause."""
        request = tracepoints_pb2.FireTracepointsRequest(
            guest=self.name,
            patterns=patterns,
            validate_only=validate_only,
            request_id=str(uuid.uuid4()),
            ttl=duration(ttl),
        )
        return self.call(self._tracepoints.FireTracepoints, request)

    def park(
        self, *patterns: str, even_if_others: bool = False, force: bool = False
    ) -> tracepoints_pb2.ParkTracepointsResponse:
        """Turns the keys off, all in one pause, except of events that others fired."""
        request = tracepoints_pb2.ParkTracepointsRequest(
            guest=self.name,
            patterns=patterns,
            even_if_others=even_if_others,
            force=force,
            request_id=str(uuid.uuid4()),
        )
        return self.call(self._tracepoints.ParkTracepoints, request)

    def disarm(
        self, *patterns: str, force: bool = False
    ) -> tracepoints_pb2.DisarmTracepointsResponse:
        """Detaches the probes."""
        request = tracepoints_pb2.DisarmTracepointsRequest(
            guest=self.name, patterns=patterns, force=force, request_id=str(uuid.uuid4())
        )
        return self.call(self._tracepoints.DisarmTracepoints, request)

    def events(
        self,
        *patterns: str,
        arm_and_fire: bool = False,
        filter: str = "",
        trigger: str = "",
        even_if_others: bool = False,
        max_events_per_second: int = 0,
    ) -> Stream[tracepoints_pb2.StreamTracepointEventsResponse]:
        """Events as they happen; with ``arm_and_fire`` they are traced while the stream lasts.

        The first response has no events. With ``arm_and_fire`` it comes once they fire, and has
        their names.
        """
        request = tracepoints_pb2.StreamTracepointEventsRequest(
            guest=self.name,
            patterns=patterns,
            arm_and_fire=arm_and_fire,
            filter=filter,
            trigger=trigger,
            even_if_others=even_if_others,
            max_events_per_second=max_events_per_second,
        )
        return Stream(self._tracepoints.StreamTracepointEvents(request))

    def kernel_log(self) -> Stream[tracepoints_pb2.StreamKernelLogResponse]:
        """The log of the guest's kernel from now on, from its memory or as the agent reads it.

        The first response has no records.
        """
        request = tracepoints_pb2.StreamKernelLogRequest(guest=self.name)
        return Stream(self._tracepoints.StreamKernelLog(request))

    def trace_stats(self) -> tracepoints_pb2.GetTracepointStatsResponse:
        """Rates and losses."""
        request = tracepoints_pb2.GetTracepointStatsRequest(guest=self.name)
        return self.call(self._tracepoints.GetTracepointStats, request)

    def agent(self) -> tracepoints_pb2.DescribeAgentResponse:
        """The agent's report on itself and the guest."""
        request = tracepoints_pb2.DescribeAgentRequest(guest=self.name)
        return self.call(self._tracepoints.DescribeAgent, request)
