"""Park: a log that will go on later is left without a writer.

Owns the path of this call. What was written stays as it is: the generation is raised, nobody
writes, the KV may be evicted, and who knows the new generation may take the log.
"""

from __future__ import annotations

from baton.api.kvstore.v1 import kvstore_pb2
from baton.capability import Right
from services.kvstore import wire
from services.kvstore.access import Access
from services.kvstore.answers import Answers
from services.kvstore.home import Event, require_allowed
from services.kvstore.pages import Fence
from services.kvstore.runtime import Runtime
from services.kvstore.state import AckLevel


class ParkCalls:
    """Serves Park."""

    def __init__(self, runtime: Runtime, access: Access) -> None:
        self._runtime = runtime
        self._access = access
        self._answers = Answers()

    async def park(self, request: kvstore_pb2.ParkRequest) -> kvstore_pb2.ParkResponse:
        """Park."""
        log_id = wire.require_log_id(request.log_id)
        claims = self._access.any_of(request.capability, (Right.TAKE,), log_id=log_id)
        if request.worker_id:
            self._access.worker(request.worker_capability)
        call = self._answers.call(kvstore_pb2.ParkResponse, claims.tenant, log_id, request)
        kept = call.known()
        if kept is None:
            self._access.log_of(claims, log_id)
            kept = call.keep(*self._park(log_id, request.generation, request.worker_id or None))
        await self._runtime.acked(kept.level)
        return kept.answer

    def _park(
        self, log_id: bytes, generation: int, worker_id: str | None
    ) -> tuple[kvstore_pb2.ParkResponse, AckLevel]:
        store = self._runtime.store
        log = store.core.current(log_id, generation)
        require_allowed(log, Event.TAKE)
        writer = None
        if worker_id is not None:
            writer = store.home.writing(log_id, generation, worker_id).writer
        store.keeper.park(log, self._runtime.now().wall_s)
        if writer is not None:
            # Its writer says itself that it writes no more: its pages need no quarantine.
            store.keeper.lift(Fence(worker_slot=writer.slot, log_id=log_id, generation=generation))
            store.core.drain_freed()
        self._runtime.order_work()
        return kvstore_pb2.ParkResponse(generation=log.generation), log.ack_level
