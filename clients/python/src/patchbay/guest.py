# SPDX-License-Identifier: Apache-2.0
"""One guest: its static keys, its holds and itself as a whole."""

from __future__ import annotations

import contextlib
import uuid
from types import TracebackType
from typing import Iterable, Iterator, Optional, Sequence, TypeVar

import grpc
from google.protobuf.duration_pb2 import Duration

from patchbay.calls import Time, duration
from patchbay.stream import Stream
from patchbay.tracing import Tracing
from patchbay.v1 import guest_pb2, guest_pb2_grpc, static_keys_pb2, static_keys_pb2_grpc
from patchbay.v1.static_keys_pb2 import KeyClass, KeyOp

_Flip = TypeVar(
    "_Flip",
    static_keys_pb2.UpdateStaticKeysResponse,
    static_keys_pb2.CommitUpdateResponse,
    static_keys_pb2.ReleaseHoldsResponse,
    static_keys_pb2.PrepareUpdateResponse,
)


def changes(
    op: KeyOp.ValueType,
    *keys: str,
    classes: Sequence[KeyClass.ValueType] = (),
    etag: str = "",
) -> list[static_keys_pb2.KeyUpdate]:
    """An op on keys, for :meth:`Guest.update` and :meth:`Guest.prepare`.

    If one of the keys is a glob, or begins with ``!``, all are patterns of one selection. Otherwise
    each is a key's name.
    """
    if not keys:
        raise ValueError("name a key, or give a pattern")
    if classes or any(key.startswith("!") or set("*?[") & set(key) for key in keys):
        if etag:
            raise ValueError("an etag is for one key by name")
        return [static_keys_pb2.KeyUpdate(op=op, patterns=keys, classes=classes)]
    if etag and len(keys) != 1:
        raise ValueError("an etag is for one key by name")
    return [static_keys_pb2.KeyUpdate(op=op, name=key, etag=etag) for key in keys]


class Guest(Tracing):
    """A guest by name. Making one asks nothing of the service."""

    def __init__(self, channel: grpc.Channel, name: str, timeout: float) -> None:
        super().__init__(channel, name, timeout)
        self._guests = guest_pb2_grpc.GuestServiceStub(channel)
        self._keys = static_keys_pb2_grpc.StaticKeysServiceStub(channel)

    def describe(self) -> guest_pb2.DescribeGuestResponse:
        """The guest, its kernel and its registration."""
        return self.call(
            self._guests.DescribeGuest, guest_pb2.DescribeGuestRequest(guest=self.name)
        )

    def watch(self) -> Stream[guest_pb2.WatchGuestResponse]:
        """The guest's status at once and after each change."""
        return Stream(self._guests.WatchGuest(guest_pb2.WatchGuestRequest(guest=self.name)))

    def pause(
        self, ttl: Optional[Time] = None, stop_timeout: Optional[Time] = None
    ) -> guest_pb2.PauseGuestResponse:
        """Stops every vCPU until :meth:`resume`, or until ``ttl`` is over (30 s)."""
        request = guest_pb2.PauseGuestRequest(
            guest=self.name, ttl=duration(ttl), timeout=duration(stop_timeout)
        )
        return self.call(self._guests.PauseGuest, request)

    def resume(self) -> None:
        """Lets the guest run on."""
        self.call(self._guests.ResumeGuest, guest_pb2.ResumeGuestRequest(guest=self.name))

    def shutdown(
        self, *, force: bool = False, timeout: Time = 60, cut_after_timeout: bool = False
    ) -> guest_pb2.ShutdownGuestResponse:
        """Presses the power button and waits until the guest is off; ``force`` cuts the power."""
        wait = duration(timeout) or Duration()
        request = guest_pb2.ShutdownGuestRequest(
            guest=self.name, force=force, timeout=wait, cut_after_timeout=cut_after_timeout
        )
        deadline = wait.ToTimedelta().total_seconds() + self.timeout
        return self.call(self._guests.ShutdownGuest, request, deadline)

    def keys(
        self,
        *patterns: str,
        classes: Sequence[KeyClass.ValueType] = (),
        enabled: Optional[bool] = None,
    ) -> Iterator[static_keys_pb2.StaticKey]:
        """The keys, ordered by name; ``patterns`` are globs."""
        request = static_keys_pb2.ListStaticKeysRequest(
            guest=self.name, patterns=patterns, classes=classes, enabled=enabled
        )
        for answer in self.pages(self._keys.ListStaticKeys, request):
            yield from answer.keys

    def key(self, name: str) -> static_keys_pb2.StaticKey:
        """One key with all its sites."""
        request = static_keys_pb2.GetStaticKeyRequest(guest=self.name, name=name)
        sites: list[static_keys_pb2.Site] = []
        for answer in self.pages(self._keys.GetStaticKey, request):
            sites.extend(answer.key.sites)
        del answer.key.sites[:]
        answer.key.sites.extend(sites)
        answer.key.sites.sort(key=lambda site: site.address)
        return answer.key

    def update(
        self,
        *updates: Iterable[static_keys_pb2.KeyUpdate],
        reason: str = "",
        ttl: Optional[Time] = None,
        validate_only: bool = False,
        allow_guarded: bool = False,
        force: bool = False,
        request_id: str = "",
        stop_timeout: Optional[Time] = None,
        retry_timeout: Optional[Time] = None,
        summary_only: bool = False,
    ) -> static_keys_pb2.UpdateStaticKeysResponse:
        """Changes keys in one transaction: all or nothing. ``updates`` are results of `changes`."""
        request = static_keys_pb2.UpdateStaticKeysRequest(
            guest=self.name,
            updates=[update for some in updates for update in some],
            request_id=request_id or str(uuid.uuid4()),
            validate_only=validate_only,
            allow_guarded=allow_guarded,
            force=force,
            reason=reason,
            ttl=duration(ttl),
            stop_timeout=duration(stop_timeout),
            retry_timeout=duration(retry_timeout),
            result_view=_view(summary_only),
        )
        return self._with_all_results(self.call(self._keys.UpdateStaticKeys, request))

    def enable(
        self, *keys: str, ttl: Optional[Time] = None, reason: str = "", force: bool = False
    ) -> static_keys_pb2.UpdateStaticKeysResponse:
        """static_branch_enable() on each key. `update` has more options."""
        return self.update(changes(KeyOp.KEY_OP_ENABLE, *keys), ttl=ttl, reason=reason, force=force)

    def disable(
        self, *keys: str, reason: str = "", force: bool = False
    ) -> static_keys_pb2.UpdateStaticKeysResponse:
        """static_branch_disable() on each key."""
        return self.update(changes(KeyOp.KEY_OP_DISABLE, *keys), reason=reason, force=force)

    def inc(
        self, *keys: str, ttl: Optional[Time] = None, reason: str = ""
    ) -> static_keys_pb2.UpdateStaticKeysResponse:
        """static_branch_inc() on each key. The reference is this client's hold."""
        return self.update(changes(KeyOp.KEY_OP_INC, *keys), ttl=ttl, reason=reason)

    def dec(
        self, *keys: str, reason: str = "", force: bool = False
    ) -> static_keys_pb2.UpdateStaticKeysResponse:
        """static_branch_dec() on each key: drops a reference that this client holds."""
        return self.update(changes(KeyOp.KEY_OP_DEC, *keys), reason=reason, force=force)

    @contextlib.contextmanager
    def enabled(
        self, *keys: str, ttl: Optional[Time] = None, reason: str = ""
    ) -> Iterator[static_keys_pb2.UpdateStaticKeysResponse]:
        """Keeps keys on for the time of a ``with`` block, by a reference on each.

        ``ttl`` gives the references back if this process dies in the block.
        """
        taken = self.inc(*keys, ttl=ttl, reason=reason)
        holds = [result.hold_id for result in taken.results if result.hold_id]
        try:
            yield taken
        finally:
            if holds:
                self.release(*holds)

    def prepare(
        self,
        *updates: Iterable[static_keys_pb2.KeyUpdate],
        reason: str = "",
        hold_ttl: Optional[Time] = None,
        plan_ttl: Optional[Time] = None,
        allow_guarded: bool = False,
        force: bool = False,
        request_id: str = "",
    ) -> Plan:
        """Resolves, plans and checks a change, and keeps the plan. The guest is not changed."""
        request = static_keys_pb2.PrepareUpdateRequest(
            guest=self.name,
            updates=[update for some in updates for update in some],
            allow_guarded=allow_guarded,
            force=force,
            reason=reason,
            hold_ttl=duration(hold_ttl),
            plan_ttl=duration(plan_ttl),
            request_id=request_id or str(uuid.uuid4()),
        )
        answer = self._with_all_results(self.call(self._keys.PrepareUpdate, request))
        return Plan(self, answer)

    def commit(
        self,
        plan_id: str,
        digest: str = "",
        *,
        stop_timeout: Optional[Time] = None,
        retry_timeout: Optional[Time] = None,
    ) -> static_keys_pb2.CommitUpdateResponse:
        """Writes a plan. A second commit of a plan gets the first answer."""
        request = static_keys_pb2.CommitUpdateRequest(
            guest=self.name,
            plan_id=plan_id,
            digest=digest,
            stop_timeout=duration(stop_timeout),
            retry_timeout=duration(retry_timeout),
        )
        return self._with_all_results(self.call(self._keys.CommitUpdate, request))

    def discard(self, plan_id: str) -> None:
        """Forgets a plan."""
        request = static_keys_pb2.DiscardUpdateRequest(guest=self.name, plan_id=plan_id)
        self.call(self._keys.DiscardUpdate, request)

    def watch_keys(
        self, *patterns: str, incarnation: str = "", start_revision: int = 0
    ) -> Stream[static_keys_pb2.WatchStaticKeysResponse]:
        """Every change from a revision of an incarnation on; without one, from now on.

        The first response comes at once and has no events.
        """
        request = static_keys_pb2.WatchStaticKeysRequest(
            guest=self.name,
            patterns=patterns,
            incarnation=incarnation,
            start_revision=start_revision,
        )
        return Stream(self._keys.WatchStaticKeys(request))

    def holds(self, *patterns: str, holder: str = "") -> Iterator[static_keys_pb2.Hold]:
        """The holds, ordered by key and age."""
        request = static_keys_pb2.ListHoldsRequest(
            guest=self.name, patterns=patterns, holder=holder
        )
        for answer in self.pages(self._keys.ListHolds, request):
            yield from answer.holds

    def release(self, *ids: str, force: bool = False) -> static_keys_pb2.ReleaseHoldsResponse:
        """Gives back the references of holds, in one transaction."""
        request = static_keys_pb2.ReleaseHoldsRequest(
            guest=self.name, ids=ids, force=force, request_id=str(uuid.uuid4())
        )
        return self._with_all_results(self.call(self._keys.ReleaseHolds, request))

    def renew(self, *ids: str, ttl: Optional[Time] = None) -> list[static_keys_pb2.Hold]:
        """Gives holds a new expiry; without ``ttl`` they do not expire any more."""
        request = static_keys_pb2.RenewHoldsRequest(guest=self.name, ids=ids, ttl=duration(ttl))
        return list(self.call(self._keys.RenewHolds, request).holds)

    def _with_all_results(self, answer: _Flip) -> _Flip:
        """Fetches the pages of results that did not fit into the answer."""
        if answer.next_page_token:
            request = static_keys_pb2.ListUpdateResultsRequest(
                guest=self.name, page_token=answer.next_page_token
            )
            for page in self.pages(self._keys.ListUpdateResults, request):
                answer.results.extend(page.results)
            answer.next_page_token = ""
        return answer


class Plan:
    """A prepared change. As a context manager it is discarded at the end, unless committed."""

    def __init__(self, guest: Guest, answer: static_keys_pb2.PrepareUpdateResponse) -> None:
        self._guest = guest
        #: The plan: its digest, results, predicted pause and expiry.
        self.answer = answer

    def commit(self) -> static_keys_pb2.CommitUpdateResponse:
        """Writes the plan as it was prepared."""
        return self._guest.commit(self.answer.plan_id, self.answer.digest)

    def discard(self) -> None:
        """Forgets the plan."""
        self._guest.discard(self.answer.plan_id)

    def __enter__(self) -> Plan:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        # Discarding is idempotent, also after a commit.
        self.discard()


def _view(summary_only: bool) -> static_keys_pb2.ResultView.ValueType:
    if summary_only:
        return static_keys_pb2.ResultView.RESULT_VIEW_SUMMARY
    return static_keys_pb2.ResultView.RESULT_VIEW_FULL
