"""A store that lives through a random story, and its records written to segments.

Owns the operations: the same seed gives the same story. The store is the real one (pure cores and
the journal); pages are filled as if every copy verified.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from baton.errors import ServiceError
from baton.kv.numeric import TORCH_F32
from services.kvstore.log.segments import Numbered, SegmentWriter
from services.kvstore.log.state import Parent
from services.kvstore.publishing import PublishOrder
from services.kvstore.state import Phase, Writer
from services.kvstore.store import ForkOrder, Store
from tests.unit.kvstore.cores import (
    BLOCK,
    DECODE,
    NOW,
    PREFILL,
    SCOPE,
    EncodedBody,
    ListSink,
    WorkerModel,
    build_store,
    fill_work,
    new_id,
    order,
)

ARENA = bytes(16)
"""The arena id that `build_store` gives its journal."""

OTHER = Writer(worker_id="decode-1", slot=2, incarnation=9)
SHARED = [index % 97 for index in range(5 * BLOCK)]


class Story:
    """A store and the records of all that happened to it."""

    def __init__(self, seed: int, pages: int = 96) -> None:
        self.rng = random.Random(seed)
        self.sink = ListSink()
        self.store: Store = build_store(pages, self.sink)
        self.workers: dict[bytes, WorkerModel] = {}
        self.published: list[str] = []

    def live(self, steps: int) -> None:
        """So many operations; one that the store refuses changes nothing."""
        for _ in range(steps):
            step = self.rng.choice(
                [
                    *[self.open] * 4,
                    *[self.append] * 12,
                    *[self.take] * 4,
                    self.fork,
                    self.truncate,
                    self.finish,
                    self.close,
                    self.cancel,
                    self.lose_worker,
                    self.snapshot,
                    self.publish,
                    self.revoke,
                ]
            )
            try:
                step()
            except ServiceError:
                continue
            fill_work(self.store)
        self.store.core.check_invariants()

    def _any(self, *phases: Phase) -> bytes | None:
        logs = [
            log_id
            for log_id, log in self.store.core.logs.items()
            if not phases or log.phase in phases
        ]
        return self.rng.choice(logs) if logs else None

    def open(self) -> None:
        """A prompt that may share its beginning with others, prefilled in one or two chunks."""
        rng = self.rng
        tokens = [*SHARED[: rng.randrange(len(SHARED))], *(rng.randrange(97) for _ in range(5))]
        wanted = order(tokens, output_pages=rng.randrange(3))
        self.store.open(wanted, PREFILL, NOW)
        fill_work(self.store)
        worker = self.workers[wanted.log_id] = WorkerModel(self.store, wanted.log_id, PREFILL)
        log = worker.log
        if rng.random() < 0.2:
            return
        if log.committed < len(tokens) - 1 and rng.random() < 0.5:
            worker.checkpoint(rng.randrange(log.committed + 1, len(tokens)))
        if log.committed < len(tokens):
            worker.checkpoint(len(tokens))
        worker.seal(rng.randrange(97), "stop" if rng.random() < 0.1 else None)

    def take(self) -> None:
        """Another worker goes on."""
        log_id = self._any(Phase.PREFILL, Phase.DECODE)
        if log_id is None:
            return
        log, writer = self.store.core.logs[log_id], self.rng.choice([DECODE, OTHER])
        self.store.home.take(
            log_id,
            log.generation,
            writer,
            TORCH_F32,
            pages=self.rng.randrange(3),
            now_s=NOW.monotonic_s,
        )
        fill_work(self.store)
        worker = self.workers[log_id] = WorkerModel(self.store, log_id, writer)
        if log.phase is Phase.PREFILL:
            self._commit(worker, log.prompt_tokens)
            worker.seal(self.rng.randrange(97))

    def _commit(self, worker: WorkerModel, end: int) -> None:
        """KV up to a position, with the pages it takes."""
        log = worker.log
        missing = -(-end // BLOCK) - len(log.rows) - len(log.granted)
        if missing > 0:
            writer = worker.writer.worker_id
            self.store.home.grant(log.log_id, worker.generation, writer, missing)
        if log.committed < end:
            worker.checkpoint(end)

    def append(self) -> None:
        """A few tokens of one log."""
        log_id = self._any(Phase.DECODE)
        worker = None if log_id is None else self.workers.get(log_id)
        if worker is None or worker.log.writer is None:
            return
        for _ in range(self.rng.randrange(1, 2 * BLOCK)):
            if worker.log.committed < worker.log.position - 1:
                self._commit(worker, worker.log.position - 1)
            worker.append(self.rng.randrange(97))

    def finish(self) -> None:
        """The writer ends a log by name."""
        log_id = self._any(Phase.DECODE)
        worker = None if log_id is None else self.workers.get(log_id)
        if worker is not None and worker.log.writer is not None:
            self._commit(worker, worker.log.position - 1)
            worker.append(self.rng.randrange(97), "length")

    def fork(self) -> None:
        """From any token position, with a writer or without."""
        log_id = self._any(Phase.DECODE, Phase.ENDED, Phase.KEPT)
        if log_id is None:
            return
        wanted = ForkOrder(log_id=new_id(), request_id="f", scope=SCOPE, sampling=None)
        log = self.store.core.logs[log_id]
        writer = self.rng.choice([None, OTHER])
        parent = Parent(
            log_id=log_id,
            generation=log.generation,
            position=self.rng.randrange(1, log.position + 1),
        )
        self.store.fork(parent, wanted, writer, NOW)
        if writer is not None:
            self.workers[wanted.log_id] = WorkerModel(self.store, wanted.log_id, writer)

    def truncate(self) -> None:
        """To any position."""
        log_id = self._any(Phase.DECODE, Phase.ENDED, Phase.KEPT)
        if log_id is None:
            return
        log = self.store.core.logs[log_id]
        position = self.rng.randrange(1, log.position + 1)
        self.store.truncate(log_id, log.generation, position, NOW)

    def close(self) -> None:
        """Kept until its TTL, or dropped."""
        log_id = self._any()
        if log_id is not None:
            self.store.keeper.close(log_id, is_dropped=self.rng.random() < 0.5, wall_s=NOW.wall_s)

    def cancel(self) -> None:
        """Fenced, and gone if it was not sealed."""
        log_id = self._any()
        if log_id is not None:
            self.store.keeper.cancel(log_id, NOW.wall_s)

    def lose_worker(self) -> None:
        """The mapping of one worker is gone."""
        slot = self.rng.choice([PREFILL.slot, DECODE.slot, OTHER.slot])
        self.store.keeper.worker_gone(slot, NOW.wall_s)

    def snapshot(self) -> None:
        """Compaction."""
        log_id = self._any()
        if log_id is not None:
            self.store.core.journal.snapshot(self.store.core.logs[log_id])

    def publish(self) -> None:
        """Some of a log's positions, for another tenant."""
        log_id = self._any(Phase.DECODE, Phase.ENDED, Phase.KEPT)
        log = None if log_id is None else self.store.core.logs[log_id]
        if log is None or log.committed == 0:
            return
        name = f"p{len(self.published)}"
        wanted = PublishOrder(
            prefix_id=name,
            name=name,
            tenant="acme",
            tenants=("guest",),
            log_id=log.log_id,
            position=self.rng.randrange(1, log.committed + 1),
            text_hash=b"",
            ids_hash=b"",
            history_end=b"",
            text_bytes=10,
            template_digest=b"",
            model="tiny",
            expire_wall_s=None,
        )
        self.store.prefix_keeper.publish(wanted, NOW.wall_s)
        self.published.append(name)

    def revoke(self) -> None:
        """One of them."""
        if self.published:
            self.store.prefix_keeper.revoke(self.rng.choice(self.published), None, NOW.wall_s)


def write_records(
    directory: Path,
    records: Sequence[EncodedBody],
    rng: random.Random,
    *,
    segment_bytes: int = 1 << 16,
    store_id: bytes = bytes(16),
    first_lsn: int = 1,
    first_sequence: int = 1,
    durable_lsn: int = 0,
    is_ever_flushed: bool = True,
) -> SegmentWriter:
    """Writes records in groups of random size, flushed now and then; the writer is not closed."""
    writer = SegmentWriter(
        directory,
        store_id=store_id,
        first_sequence=first_sequence,
        segment_bytes=segment_bytes,
    )
    writer.durable_lsn = durable_lsn
    lsn, start = first_lsn, 0
    while start < len(records):
        group = records[start : start + rng.randrange(1, 9)]
        items = [
            Numbered(lsn=lsn + 1 + index, kind=kind, payload=payload, address=address)
            for index, (kind, payload, address) in enumerate(group)
        ]
        writer.write_group(items, is_flushed=is_ever_flushed and rng.random() < 0.5)
        lsn += len(group) + 1
        start += len(group)
    return writer
