"""The calls of workers about themselves: Attach, RenewLeases and Distrust.

Owns the choice of a worker's slot and what a re-attaching worker keeps. Never opens descriptors.
"""

from __future__ import annotations

import structlog

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import kvstore_pb2
from baton.errors import ServiceError
from baton.wire.durations import duration_to_proto
from baton.wire.label import geometry_from_proto, label_from_proto
from services.kvstore import wire
from services.kvstore.access import Access
from services.kvstore.attach import AttachDesk
from services.kvstore.core import invalid
from services.kvstore.distrust import Distrust
from services.kvstore.identity import Identity
from services.kvstore.runtime import Runtime
from services.kvstore.state import AckLevel, LogState, Writer
from services.kvstore.workers import AttachedWorker, Former

WORKER_ID_CHARS_MAX = 128
HELD_MAX = 65_536

_log = structlog.stdlib.get_logger("services.kvstore")


class WorkerCalls:
    """Attach, RenewLeases and Distrust."""

    def __init__(
        self, runtime: Runtime, access: Access, identity: Identity, desk: AttachDesk
    ) -> None:
        self._runtime = runtime
        self._access = access
        self._identity = identity
        self._desk = desk

    async def attach(self, request: kvstore_pb2.AttachRequest) -> kvstore_pb2.AttachResponse:
        """Attach."""
        self._access.worker(request.capability)
        if not 1 <= len(request.worker_id) <= WORKER_ID_CHARS_MAX:
            raise invalid("worker_id", f"must have 1 to {WORKER_ID_CHARS_MAX} characters")
        if len(request.held) > HELD_MAX:
            raise invalid("held", f"at most {HELD_MAX} logs")
        label = label_from_proto(request.label)
        geometry = geometry_from_proto(request.label.geometry)
        self._identity.require_suits(label, geometry)
        slot = self._slot(request.worker_id)
        writer = Writer(worker_id=request.worker_id, slot=slot, incarnation=request.incarnation)
        worker = AttachedWorker(writer=writer, numeric_class=label.numeric_class)
        held = self._keep(request, worker)
        await self._runtime.acked(AckLevel.OS)
        await self._runtime.pages.settled()
        return kvstore_pb2.AttachResponse(
            ticket=self._desk.issue(worker),
            socket_path=str(self._desk.path),
            worker_slot=slot,
            arena=wire.arena_to_proto(self._runtime.arena),
            lease=duration_to_proto(self._runtime.core.leases.lease_s),
            held=held,
            node_id=self._identity.node_id,
        )

    def _slot(self, worker_id: str) -> int:
        """The worker's slot, unless an earlier mapping of it still stands: then a new one."""
        self._runtime.find_dead_workers(self._runtime.now().wall_s)
        for slot in self._runtime.workers.slots_of(worker_id):
            if not self._runtime.arena.is_slot_locked(slot):
                return slot
        return self._runtime.workers.new_slot(worker_id, self._runtime.arena.is_slot_locked)

    def _keep(
        self, request: kvstore_pb2.AttachRequest, worker: AttachedWorker
    ) -> list[common_pb2.LogPosition]:
        """The named logs that are still this worker's, under new generations (O4, O7)."""
        kept: list[common_pb2.LogPosition] = []
        for named in request.held:
            log = self._runtime.core.logs.get(named.log_id)
            if log is None or not self._is_still_held(log, named.generation, worker):
                continue
            try:
                taken = self._runtime.store.home.take(
                    log.log_id,
                    log.generation,
                    worker.writer,
                    worker.numeric_class,
                    pages=0,
                    now_s=self._runtime.clock.monotonic_s(),
                )
            except ServiceError as error:
                # No page for its tail, say: this log is lost to the worker, the others are not.
                _log.warning("log_not_kept", log_id=log.log_id.hex(), reason=error.reason.value)
                continue
            self._runtime.former.pop(log.log_id, None)
            kept.append(
                common_pb2.LogPosition(
                    log_id=log.log_id, generation=taken.generation, position=taken.position
                )
            )
        return kept

    def _is_still_held(self, log: LogState, generation: int, worker: AttachedWorker) -> bool:
        """Another run of the same worker never inherits: it knows nothing of what was written."""
        if not log.is_open:
            return False
        if log.writer is not None:
            # An older generation too: the answer to an earlier Attach of this run was lost.
            return _is_same_run(log.writer, worker.writer) and generation <= log.generation
        # The arena was lost: the generation was raised by one and nobody has taken the log since.
        former = self._runtime.former.get(log.log_id)
        return (
            former is not None
            and _is_same_run(former.writer, worker.writer)
            and former.generation == generation
            and log.generation == generation + 1
        )

    def renew(self, request: kvstore_pb2.RenewLeasesRequest) -> kvstore_pb2.RenewLeasesResponse:
        """RenewLeases."""
        self._access.worker(request.capability)
        if len(request.logs) > HELD_MAX:
            raise invalid("logs", f"at most {HELD_MAX} a call")
        runtime, core = self._runtime, self._runtime.core
        worker = runtime.workers.find(request.worker_id)
        if worker.writer.incarnation != request.incarnation:
            raise invalid("incarnation", "another run of this worker is attached")
        has_progressed = core.leases.has_progressed(
            request.worker_id, request.incarnation, request.progress
        )
        now_s = runtime.clock.monotonic_s()
        lost: list[bytes] = []
        for named in request.logs:
            log = core.logs.get(named.log_id)
            is_held = (
                log is not None
                and log.generation == named.generation
                and log.writer is not None
                and log.writer.worker_id == request.worker_id
            )
            if not is_held:
                lost.append(named.log_id)
            elif has_progressed:
                core.leases.renew(named.log_id, now_s)
        named_pairs = {(named.log_id, named.generation) for named in request.logs}
        runtime.release_named(worker.writer.slot, named_pairs)
        return kvstore_pb2.RenewLeasesResponse(lost_log_ids=lost)

    async def distrust(self, request: kvstore_pb2.DistrustRequest) -> kvstore_pb2.DistrustResponse:
        """Distrust."""
        self._access.worker(request.capability)
        if len(request.logs) > HELD_MAX:
            raise invalid("logs", f"at most {HELD_MAX} a call")
        runtime = self._runtime
        worker = runtime.workers.find(request.worker_id)
        if worker.writer.incarnation != request.incarnation:
            raise invalid("incarnation", "another run of this worker is attached")
        positions = {wire.require_log_id(named.log_id): named.position for named in request.logs}
        given_up = Distrust(runtime.store).logs(positions, runtime.now().wall_s)
        for log_id, (writer, generation) in given_up.fenced.items():
            # Its own logs come back to this run when it attaches again, as after a lost arena.
            if _is_same_run(writer, worker.writer):
                runtime.former[log_id] = Former(writer=writer, generation=generation)
        await runtime.acked(AckLevel.OS)
        _log.error(
            "kv_distrusted",
            worker_id=request.worker_id,
            logs=given_up.logs,
            prefixes=given_up.prefixes,
            pages=given_up.pages,
        )
        return kvstore_pb2.DistrustResponse(
            logs=given_up.logs, prefixes=given_up.prefixes, pages=given_up.pages
        )


def _is_same_run(one: Writer, other: Writer) -> bool:
    """The same worker and the same process of it; its slot may be another."""
    return (one.worker_id, one.incarnation) == (other.worker_id, other.incarnation)
