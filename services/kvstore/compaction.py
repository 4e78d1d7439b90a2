"""Bounding the log directory: what keeps the oldest segment is written again, then it is freed.

Owns the policy: nothing is rewritten under the bound; over it, the logs that need the oldest
segment get a SNAPSHOT each, a few at a time, so that appends go on between them. It waits for the
disk, hence a loop of its own: a stalled disk must not hold up leases.

Invariant: a segment goes only when everything that replaces its records is on disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final

import structlog

from baton.clock import Clock
from baton.errors import ServiceError
from baton.ids import new_log_id
from baton.kv.blocks import Scope
from baton.sampling_parameters import SamplingParameters
from services.kvstore.core import Core
from services.kvstore.log.journal import LogJournal
from services.kvstore.log.living import prefix_key, session_key
from services.kvstore.log.store_records import CloseReason
from services.kvstore.log.writer import LogWriter
from services.kvstore.pages import Fence
from services.kvstore.prefixes import Prefix
from services.kvstore.rows import Rows
from services.kvstore.scrub import SCRUB_FENCE
from services.kvstore.state import AckLevel, LogState, Phase, Tokens
from services.kvstore.store import FIRST_GENERATION
from services.kvstore.workers import WorkerTable

COMPACTION_INTERVAL_S: Final = 0.5
TURN_HOLDERS_MAX: Final = 512
SLICE_TOKENS_MAX: Final = 65_536
SLICE_HOLDERS_MAX: Final = 16
ESTIMATE_S: Final = 10.0
RECORD_OVERHEAD_BYTES: Final = 1024
TOKEN_SNAPSHOT_BYTES: Final = 8
"""A token's own four bytes and its share of its page's entry, rounded up."""

_log = structlog.stdlib.get_logger("services.kvstore")


class Compactor:
    """Keeps one store's log directory within `segments_max` segments.

    Where the living logs' snapshots alone need more, within twice what they need.
    """

    def __init__(
        self,
        *,
        core: Core,
        journal: LogJournal,
        writer: LogWriter,
        workers: WorkerTable,
        clock: Clock,
        segments_max: int,
    ) -> None:
        self._core = core
        self._journal = journal
        self._writer = writer
        self._workers = workers
        self._clock = clock
        self._segments_max = segments_max
        self._allowed = segments_max
        self._estimated_s: float | None = None
        self.rewritten = 0

    async def turn(self) -> None:
        """One bounded piece of work; call it every `COMPACTION_INTERVAL_S`."""
        try:
            await self._rewrite_oldest()
            await self._free()
        except ServiceError as error:
            # The next turn tries again: nothing was freed that is needed.
            _log.error("retention_failed", reason=error.reason.value, error=error.message)

    def _is_over(self) -> bool:
        if self._writer.segment_count <= self._segments_max:
            return False
        now_s = self._clock.monotonic_s()
        if self._estimated_s is None or now_s - self._estimated_s >= ESTIMATE_S:
            self._estimated_s = now_s
            needed = -(-self._snapshot_bytes() // self._writer.segment_bytes)
            self._allowed = max(self._segments_max, 2 * needed + 2)
        return self._writer.segment_count > self._allowed

    def _snapshot_bytes(self) -> int:
        """About what SNAPSHOTs of all logs would take."""
        logs = self._core.logs
        tokens = sum(len(log.tokens) for log in logs.values())
        return tokens * TOKEN_SNAPSHOT_BYTES + len(logs) * RECORD_OVERHEAD_BYTES

    async def _rewrite_oldest(self) -> None:
        left = TURN_HOLDERS_MAX
        while left > 0 and self._is_over():
            holders = self._writer.oldest_living()
            if not holders:
                if not await self._free():
                    return
                continue
            left -= self._rewrite(holders)
            # Appends go on here; when it returns the holders that were rewritten are none any more.
            await self._writer.acked(AckLevel.OS)

    def _rewrite(self, holders: set[bytes]) -> int:
        """Some of what needs the oldest segment, again at the log's end; returns how many."""
        count, tokens = 0, 0
        prefixes = {prefix_key(item.prefix_id): item for item in self._core.prefixes.all()}
        sessions = {session_key(one.session_id): one for one in self._core.sessions.all()}
        published: dict[bytes, list[Prefix]] = {}
        for item in prefixes.values():
            published.setdefault(item.log_id, []).append(item)
        for holder in islice(holders, SLICE_HOLDERS_MAX):
            log = self._core.logs.get(holder)
            if log is not None:
                self._snapshot(log, published)
                tokens += len(log.tokens)
            elif (prefix := prefixes.get(holder)) is not None:
                tokens += self._tell_prefix(prefix, published)
            elif (session := sessions.get(holder)) is not None:
                self._journal.session(session, is_deleted=False)
            else:
                _log.warning("log_of_no_use_dropped", holder=holder.hex())
                self._writer.living.release(holder)
            count += 1
            self.rewritten += 1
            if tokens >= SLICE_TOKENS_MAX:
                break
        return count

    def _snapshot(self, log: LogState, published: Mapping[bytes, Sequence[Prefix]]) -> None:
        """SNAPSHOT, and again what it does not say: which prefixes were published from the log."""
        self._journal.snapshot(log)
        for prefix in published.get(log.log_id, ()):
            if not log.tokens.begins_with(prefix.token_ids):
                self._tell_apart(prefix)
                continue
            self._journal.published(prefix)
            # Its pages need not be the log's, which may have given its own up.
            self._journal.promoted(prefix, 0)

    def _tell_prefix(self, prefix: Prefix, published: Mapping[bytes, Sequence[Prefix]]) -> int:
        """A published prefix whose log may be gone; returns the tokens written."""
        log = self._core.logs.get(prefix.log_id)
        if log is not None:
            self._snapshot(log, published)
            return len(log.tokens)
        source = _source_of(prefix)
        self._journal.snapshot(source)
        self._journal.published(prefix)
        generation = self._core.tombstones.get(prefix.log_id, prefix.generation)
        self._journal.closed_by_id(prefix.log_id, generation, CloseReason.DELETED)
        return len(source.tokens)

    def _tell_apart(self, prefix: Prefix) -> None:
        """A prefix whose log was cut inside it and goes on otherwise: the log's SNAPSHOT does not
        have its tokens, so it goes on as that of a log of its own, which is gone.

        Manifests that name the old log are refused; gateways read the list anew and ask again.
        """
        prefix.log_id, prefix.generation = new_log_id(), FIRST_GENERATION
        self._core.prefixes.touch()
        self._journal.snapshot(_source_of(prefix))
        self._journal.published(prefix)
        self._journal.closed_by_id(prefix.log_id, prefix.generation, CloseReason.DELETED)

    async def _free(self) -> bool:
        """Frees the oldest segments that nobody needs; False when there are none."""
        keep = self._writer.free_end()
        if keep is None:
            return False
        fences = self._tell_fences_again()
        await self._writer.acked(AckLevel.DISK)
        if not fences.issuperset(self._fences()):
            return False
        freed = await self._writer.free_before(keep)
        _log.info("segments_freed", count=freed, left=self._writer.segment_count)
        return True

    def _tell_fences_again(self) -> set[Fence]:
        """The only record of what a fenced writer may still write may stand in an old segment."""
        fences = self._fences()
        for fence in fences:
            pages = self._core.pool.fenced_pages(fence)
            self._journal.fenced(fence, self._workers.owner_of(fence.worker_slot), pages)
        return fences

    def _fences(self) -> set[Fence]:
        """Those of writers; scrub's cover pages of this life only."""
        return set(self._core.pool.fences()) - {SCRUB_FENCE}


def _source_of(prefix: Prefix) -> LogState:
    """The published part of a log that is gone, as the log that it would be."""
    scope = Scope(tenant=prefix.owner_tenant)
    return LogState(
        log_id=prefix.log_id,
        tenant=scope.tenant,
        scope=scope,
        tokens=Tokens(prefix.token_ids),
        prompt_tokens=prefix.position,
        numeric_class=prefix.numeric_class,
        numeric_class_id=prefix.numeric_class_id,
        base_class_id=prefix.numeric_class_id,
        sampling=SamplingParameters(),
        request_id=prefix.prefix_id,
        generation=prefix.generation,
        phase=Phase.KEPT,
        rows=Rows(prefix.rows),
        committed=prefix.position,
    )
