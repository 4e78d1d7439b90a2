"""A simulated kvstore's moves: the real cores of both halves, over simulated wires.

Owns the order of its steps: MOVED on disk before the answer leaves, OPEN on disk before the old
home is told. Pages are copied from the old home's arena and compared with their rows; one that is
not there costs KV and no token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from baton.api.kvstore.v1 import kvstore_pb2
from baton.errors import Reason, ServiceError
from baton.kv.layout import page_crc, slot_crcs
from services.kvstore.log.journal import LogJournal
from services.kvstore.log.recovery import Recovered
from services.kvstore.moving.arrival import Arrival, Arrivals, Stage
from services.kvstore.moving.departure import Departures
from services.kvstore.state import AckLevel, Phase
from services.kvstore.store import Store
from tests.cluster.memory import BLOCK, GEOMETRY

if TYPE_CHECKING:
    from tests.cluster.homes import SimHome

TOKENS_MAX: Final = 8 * BLOCK
TRIES: Final = 4


class SimMoves:
    """Both halves of one store."""

    def __init__(self, home: SimHome, store: Store, journal: LogJournal) -> None:
        self._home = home
        core = store.core
        self.departures = Departures(core, store.home, store.keeper, journal.snapshot_of)
        self.arrivals = Arrivals(core, store.home, store.chains, lease_s=2.0)
        self._adopting: set[bytes] = set()

    def adopt_moved(self, recovered: Recovered) -> None:
        """After a restart: what had moved away stays away."""
        moved = ((log_id, one.to_home) for log_id, one in recovered.moved.items())
        self.departures.adopt(moved, self._now().monotonic_s)

    def sweep(self) -> None:
        """Replicas end, silent new homes are asked."""
        now_s = self._now().monotonic_s
        self.arrivals.expire(now_s)
        for log in self.departures.to_ask(now_s):
            if log.moved_to is not None:
                self._home.spawn(self._ask(log.log_id, log.generation, log.moved_to))

    async def _ask(self, log_id: bytes, generation: int, to_home: str) -> None:
        request = kvstore_pb2.DescribeMoveRequest(log_id=log_id, generation=generation)
        if await self._call(to_home, "DescribeMove", request):
            self.departures.done(log_id, generation)
            self._runtime.order_work()

    # --- the old home -----------------------------------------------------------------------

    async def give_away(self, request: Any) -> Any:
        """MOVED, on disk, then the answer."""
        runtime = self._runtime
        log = runtime.core.find(request.log_id)
        await runtime.ready([row.page for row in log.rows], AckLevel.OS)
        moved = self.departures.move(
            request.log_id, request.generation, request.to_kvstore_address, self._now().monotonic_s
        )
        departed = self.departures.answer(moved)
        await runtime.acked(AckLevel.DISK)
        return departed

    async def done(self, request: Any) -> bool:
        """The new home has it."""
        is_dropped = self.departures.done(request.log_id, request.generation)
        await self._runtime.acked(AckLevel.OS)
        return is_dropped

    # --- the new home -----------------------------------------------------------------------

    async def adopt(self, request: Any) -> Any:
        """The whole move; again is harmless."""
        log_id = request.log_id
        if self.arrivals.home_generation(log_id, request.generation) is None:
            if log_id in self._adopting:
                raise ServiceError(Reason.WORKER_LOST, "the same move is under way")
            self._adopting.add(log_id)
            try:
                await self._adopt(request)
            finally:
                self._adopting.discard(log_id)
                arrival = self.arrivals.find(log_id)
                if arrival is not None and arrival.stage is not Stage.OPENED:
                    self.arrivals.abandon(log_id)
                self._runtime.order_work()
        await self._runtime.acked(AckLevel.DISK)
        log = self._runtime.core.find(log_id)
        return kvstore_pb2.AdoptLogResponse(generation=log.generation, position=log.position)

    async def _adopt(self, request: Any) -> None:
        log_id, peer = request.log_id, request.from_kvstore_address
        arrival = self.arrivals.follow(log_id, "acme", peer, self._now().monotonic_s)
        self.arrivals.make_room(arrival, TOKENS_MAX)
        asked = kvstore_pb2.MoveRequest(
            log_id=log_id, generation=request.generation, to_kvstore_address=self._home.name
        )
        departed = await self._call(peer, "Move", asked)
        blocks = self.arrivals.moved(
            arrival, departed.generation, departed.snapshot, departed.digest
        )
        await self._fetch(arrival, peer, blocks)
        self.arrivals.open(arrival, self._now())
        self._runtime.order_work()
        self._home.spawn(self._confirm(log_id, arrival.generation, peer))

    async def _fetch(self, arrival: Arrival, peer: str, blocks: list[int]) -> None:
        if not blocks:
            return
        targets = self.arrivals.writing(arrival, blocks)
        await self._runtime.ready([target.row.page for target in targets], AckLevel.OS)
        verified = []
        for block, target in zip(blocks, targets, strict=True):
            await self._home.pause(0.002)
            if arrival.is_abandoned or not self._copy(arrival, peer, block, target.row):
                break
            verified.append(block)
        self.arrivals.written(arrival, verified)
        if arrival.is_abandoned:
            raise ServiceError(Reason.WORKER_LOST, "the arrival was given up")
        if len(verified) < len(blocks):
            self.arrivals.damaged(arrival, blocks[len(verified)])

    def _copy(self, arrival: Arrival, peer: str, block: int, row: Any) -> bool:
        """Whether the old home still has the page, and it is what its row says."""
        old = self._home.peers[peer]
        log = None if old.runtime is None else old.runtime.core.logs.get(arrival.log_id)
        if log is None or log.phase is not Phase.MOVED or block >= len(log.rows):
            return False
        source = old.arena.page(log.rows[block].page)
        if row.crc is not None:
            if page_crc(GEOMETRY, source) != row.crc:
                return False
        elif list(slot_crcs(GEOMETRY, source, 0, row.tokens)) != list(row.slot_crcs):
            return False
        arena: Any = self._home.arena
        arena.page(row.page)[:] = source
        if row.crc is None:
            # Only committed slots travel.
            arena.blank_from(row.page, row.tokens)
        return True

    async def _confirm(self, log_id: bytes, generation: int, peer: str) -> None:
        await self._runtime.acked(AckLevel.DISK)
        request = kvstore_pb2.MoveDoneRequest(log_id=log_id, generation=generation)
        for _ in range(TRIES):
            try:
                await self._call(peer, "MoveDone", request)
            except ServiceError as error:
                if error.reason is Reason.WORKER_LOST:
                    continue
            self.arrivals.confirmed(log_id)
            return

    # --- parts ------------------------------------------------------------------------------

    @property
    def _runtime(self) -> Any:
        assert self._home.runtime is not None
        return self._home.runtime

    def _now(self) -> Any:
        return self._runtime.now()

    def _call(self, peer: str, method: str, request: Any) -> Any:
        home = self._home
        return home.wires.call(home.process, home.peers[peer], method, request)
