"""Bringing a sealed log to where it is decoded: moved, else forked, else made again from tokens.

Owns that order and its deadlines for one request. Never talks to the client and never decodes.

Invariant: after `bring` the leg names one (log, generation) that the decode worker of its plan can
take; what it named before is fenced and closed behind the client's back. Tokens never change on the
way: a fork has them, a log made again is given them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum, unique
from typing import Final

import structlog

from baton.errors import Reason, ServiceError
from baton.ids import new_log_id
from baton.tracing import span
from services.gateway.client_moves import MoveClient
from services.gateway.legs import CONTROL_RIGHTS, MOVE_RIGHTS, Leg
from services.gateway.opening import LogOpener, SequenceParts
from services.gateway.recovery import PASSING, PATIENCE_S, PAUSE_S
from services.gateway.registry import WorkerRecord

MOVE_TIMEOUT_S: Final = 10.0

_FINAL: Final = frozenset(
    {
        Reason.CANCELLED,
        Reason.UNAUTHENTICATED,
        Reason.PERMISSION_DENIED,
        Reason.INVALID_REQUEST,
        Reason.UNSUPPORTED,
    }
)
"""Trying elsewhere would not help, or would hide a fault of ours."""

_log = structlog.stdlib.get_logger("baton.gateway.moving")


@unique
class How(StrEnum):
    """How a log came to its decode worker's kvstore."""

    MOVED = "moved"
    FORKED = "forked"
    REOPENED = "reopened"


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """What it took. `hidden_share` is of a move: the part of the bytes that prefill's time hid."""

    how: How
    seconds: float
    transfer_bytes: int = 0
    hidden_share: float | None = None
    transport: str | None = None
    is_recomputed: bool = False


class LogMover:
    """Moves the logs of one request."""

    def __init__(self, parts: SequenceParts, opener: LogOpener) -> None:
        self._parts = parts
        self._opener = opener
        self._client = MoveClient(parts.stores)

    async def expect(self, leg: Leg) -> None:
        """Tells the coming home of the log. A hint: whatever it answers, prefill goes on."""
        if not leg.plan.crosses_nodes:
            return
        capability = self._opener.capability(leg.log_id, MOVE_RIGHTS)
        try:
            await self._client.expect(leg.plan.decode.kvstore_address, leg, capability)
        except ServiceError as error:
            _log.info(
                "log_not_expected",
                request_id=leg.request.request_id,
                reason=error.reason.value,
            )

    def is_needed(self, leg: Leg) -> bool:
        """Whether the log is at another kvstore than the worker that is to take it."""
        return leg.is_sealed and leg.plan.decode.kvstore_address != leg.home

    async def bring(self, leg: Leg, delivered: Sequence[int]) -> Brought:
        """The leg's log, or one with the same tokens, is where the decode worker can take it.

        `delivered`: the output tokens that the client has. Raises when nothing helps.
        """
        clock = self._parts.clock
        began_s = clock.monotonic_s()
        while True:
            try:
                brought = await self._brought(leg, delivered)
                return replace(brought, seconds=clock.monotonic_s() - began_s)
            except ServiceError as error:
                is_late = clock.monotonic_s() - began_s >= PATIENCE_S
                if error.reason not in PASSING or is_late or self._opener.left_s() <= 0.0:
                    self._leave(leg)
                    raise
            # A kvstore that restarts is back in a moment.
            await clock.wait(asyncio.Event(), PAUSE_S)

    async def _brought(self, leg: Leg, delivered: Sequence[int]) -> Brought:
        """Moved, or otherwise, once."""
        if self._parts.planner.is_store_silent(leg.home):
            # The node is gone, or as good as gone: nobody waits for its answer.
            with span("move_fallback", reason=Reason.WORKER_LOST.value):
                return await self._otherwise(leg, delivered, _silent_home())
        try:
            with span("move", worker=leg.plan.decode.worker_id):
                return await self._moved(leg)
        except ServiceError as error:
            if error.reason in _FINAL or self._opener.left_s() <= 0.0:
                raise
            _log.warning(
                "move_failed", request_id=leg.request.request_id, reason=error.reason.value
            )
            with span("move_fallback", reason=error.reason.value):
                return await self._otherwise(leg, delivered, error)

    async def _moved(self, leg: Leg) -> Brought:
        to_address = leg.plan.decode.kvstore_address
        timeout_s = max(min(MOVE_TIMEOUT_S, self._opener.left_s()), 0.001)
        capability = self._opener.capability(leg.log_id, MOVE_RIGHTS)
        moved = await self._client.adopt(to_address, leg, capability, timeout_s=timeout_s)
        leg.moved_to, leg.generation = to_address, moved.generation
        return Brought(
            how=How.MOVED,
            seconds=0.0,
            transfer_bytes=moved.transfer_bytes,
            hidden_share=moved.hidden_share,
            transport=moved.transport or None,
            # What did not come is computed again from its tokens by who takes the log.
            is_recomputed=moved.committed < moved.position - 1,
        )

    async def _otherwise(self, leg: Leg, delivered: Sequence[int], error: ServiceError) -> Brought:
        """Under a new log id: the old home may have given the log away already."""
        near = self._parts.planner.decode_for(leg.home, leg.plan.decode, ())
        if near is not None:
            try:
                await self._forked(leg, near, delivered)
                return Brought(how=How.FORKED, seconds=0.0)
            except ServiceError as problem:
                _log.warning(
                    "fork_failed",
                    request_id=leg.request.request_id,
                    reason=problem.reason.value,
                )
        try:
            await self._reopened(leg, delivered)
        except ServiceError as problem:
            raise error from problem
        return Brought(how=How.REOPENED, seconds=0.0, is_recomputed=True)

    async def _forked(self, leg: Leg, near: WorkerRecord, delivered: Sequence[int]) -> None:
        """The log goes on where its KV is, with a worker of that node."""
        log_id = new_log_id()
        control = self._opener.capability(log_id, CONTROL_RIGHTS)
        position = len(leg.request.prompt.token_ids) + len(delivered)
        generation = await self._client.fork(leg, log_id, position, control)
        self._leave(leg)
        if near.worker_id != leg.plan.decode.worker_id:
            leg.plan, leg.is_reserved = replace(leg.plan, decode=near), False
        leg.log_id, leg.control, leg.generation = log_id, control, generation

    async def _reopened(self, leg: Leg, delivered: Sequence[int]) -> None:
        """The worker's own kvstore gets the tokens; the KV is computed again."""
        log_id = new_log_id()
        control = self._opener.capability(log_id, CONTROL_RIGHTS)
        worker = leg.plan.decode
        generation = await self._client.reopen(worker, leg, log_id, delivered, control)
        self._leave(leg)
        leg.log_id, leg.control, leg.generation = log_id, control, generation
        leg.moved_to = worker.kvstore_address

    def _leave(self, leg: Leg) -> None:
        """Fences and drops the log at both homes: it may have come to either.

        A slot that the worker held for it is taken by the next start, or passes with its time.
        """
        # Another log has its tokens now: nothing of this one is worth keeping.
        request = replace(leg.request, is_dropped_at_end=True)
        for home in {leg.home, leg.plan.decode.kvstore_address}:
            left = replace(leg, request=request, moved_to=home, is_running=False, is_reserved=False)
            self._parts.cleanup.end(left, is_complete=False)


def _silent_home() -> ServiceError:
    return ServiceError(
        Reason.WORKER_LOST, "the kvstore that has the log is silent; try again shortly"
    )
