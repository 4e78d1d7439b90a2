"""Random lives of logs against a model: tokens, fencing and page conservation after every step.

The model keeps, per log, its tokens and its newest generation; the store must agree, refuse every
older generation without a change, and never lose or double a page.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from baton.errors import Reason, ServiceError
from baton.kv.numeric import TORCH_F32
from services.kvstore.log.state import Parent
from services.kvstore.state import Phase, Writer
from services.kvstore.store import ForkOrder
from tests.unit.kvstore.cores import (
    BLOCK,
    NOW,
    SCOPE,
    ListSink,
    WorkerModel,
    build_store,
    fill_work,
    new_id,
    order,
    recovered_from,
)

PAGES = 24
WORKERS = [Writer(worker_id=f"w{slot}", slot=slot, incarnation=1) for slot in range(3)]
EXPECTED = {Reason.PAGES_EXHAUSTED, Reason.INVALID_REQUEST, Reason.PROMPT_TOO_LONG}

# Few distinct tokens and shared beginnings, so that prefixes are found and blocks shared.
prompts = st.builds(
    lambda head, tail: list(range(head)) + tail,
    st.integers(0, 3 * BLOCK),
    st.lists(st.integers(0, 2), min_size=1, max_size=5),
)
workers = st.sampled_from(WORKERS)


def require_expected(error: ServiceError, *more: Reason) -> None:
    """A refusal that the rules allow here; anything else is a finding."""
    if error.reason not in {*EXPECTED, *more}:
        raise AssertionError(f"unexpected: {error}") from error


class LogLives(RuleBasedStateMachine):
    """See the module."""

    logs = Bundle("logs")

    def __init__(self) -> None:
        super().__init__()
        self.sink = ListSink()
        self.store = build_store(pages=PAGES, sink=self.sink)
        self.tokens: dict[bytes, list[int]] = {}
        self.writers: dict[bytes, WorkerModel] = {}

    def alive(self, log_id: bytes) -> bool:
        """The store still has the log."""
        return log_id in self.store.core.logs

    def writer(self, log_id: bytes) -> WorkerModel | None:
        """The model of the log's writer, if it has one."""
        log = self.store.core.logs.get(log_id)
        model = self.writers.get(log_id)
        if log is None or log.writer is None or model is None:
            return None
        assert model.generation == log.generation
        return model

    @rule(target=logs, prompt=prompts, writer=workers, drop=st.booleans())
    def open(self, prompt: list[int], writer: Writer, drop: bool) -> bytes:
        """A new log; the arena may be full."""
        wanted = order(prompt, drop_at_end=drop)
        try:
            self.store.open(wanted, writer, NOW)
        except ServiceError as error:
            require_expected(error)
            return wanted.log_id
        fill_work(self.store)
        self.tokens[wanted.log_id] = list(prompt)
        self.writers[wanted.log_id] = WorkerModel(self.store, wanted.log_id, writer)
        return wanted.log_id

    @rule(log_id=logs, part=st.floats(0.1, 1.0))
    def checkpoint(self, log_id: bytes, part: float) -> None:
        """Part of what is missing."""
        model = self.writer(log_id)
        if model is None:
            return
        log = model.log
        end = log.prompt_tokens if log.phase is Phase.PREFILL else log.position - 1
        if end <= log.committed:
            return
        target = log.committed + max(1, int((end - log.committed) * part))
        room = (len(log.rows) + len(log.granted)) * BLOCK
        target = min(target, room)
        if target > log.committed:
            assert model.checkpoint(target) == target

    @rule(log_id=logs, token=st.integers(0, 2), finish=st.sampled_from([None, "stop"]))
    def seal(self, log_id: bytes, token: int, finish: str | None) -> None:
        """The prompt is done."""
        model = self.writer(log_id)
        if model is None or model.log.phase is not Phase.PREFILL:
            return
        if model.log.committed < model.log.prompt_tokens:
            return
        model.seal(token, finish)
        self.tokens[log_id].append(token)

    @rule(log_id=logs, token=st.integers(0, 2), finish=st.sampled_from([None, None, "length"]))
    def append(self, log_id: bytes, token: int, finish: str | None) -> None:
        """One token; twice, as after a lost ack."""
        model = self.writer(log_id)
        if model is None or model.log.phase is not Phase.DECODE:
            return
        log = model.log
        if log.committed != log.position - 1:
            return
        if log.committed % BLOCK == 0 and not log.granted:
            try:
                self.store.home.grant(log_id, model.generation, model.writer.worker_id, 1)
            except ServiceError as error:
                require_expected(error)
                return
        item = model.item(token, finish)
        for _ in range(2):
            self.store.writes.append(item, model.writer.worker_id, NOW.monotonic_s)
        self.tokens[log_id].append(token)

    @rule(log_id=logs, writer=workers, pages=st.integers(0, 2))
    def take(self, log_id: bytes, writer: Writer, pages: int) -> None:
        """Another writer, or the same one again; the old generation is over."""
        if not self.alive(log_id):
            return
        log = self.store.core.logs[log_id]
        old = log.generation
        try:
            self.store.home.take(log_id, old, writer, TORCH_F32, pages=pages, now_s=NOW.monotonic_s)
        except ServiceError as error:
            require_expected(error)
            self.assert_same_generation(log_id, old)
            return
        fill_work(self.store)
        self.writers[log_id] = WorkerModel(self.store, log_id, writer)
        self.assert_stale(log_id, old)

    @rule(log_id=logs, position=st.integers(1, 40))
    def truncate(self, log_id: bytes, position: int) -> None:
        """A cut under a new generation."""
        if not self.alive(log_id):
            return
        log = self.store.core.logs[log_id]
        old = log.generation
        try:
            self.store.truncate(log_id, old, position, NOW)
        except ServiceError as error:
            require_expected(error)
            return
        fill_work(self.store)
        del self.tokens[log_id][position:]
        self.assert_stale(log_id, old)

    @rule(target=logs, log_id=logs, position=st.integers(1, 40), writer=st.none() | workers)
    def fork(self, log_id: bytes, position: int, writer: Writer | None) -> bytes:
        """A branch."""
        child = new_id()
        wanted = ForkOrder(log_id=child, request_id="f", scope=SCOPE, sampling=None)
        parent = Parent(log_id=log_id, generation=0, position=position)
        try:
            self.store.fork(parent, wanted, writer, NOW)
        except ServiceError as error:
            require_expected(error, Reason.LOG_NOT_FOUND)
            return child
        fill_work(self.store)
        self.tokens[child] = self.tokens[log_id][:position]
        if writer is not None:
            self.writers[child] = WorkerModel(self.store, child, writer)
        return child

    @rule(
        target=logs,
        log_id=logs,
        position=st.integers(1, 40),
        tail=st.lists(st.integers(0, 2), min_size=1, max_size=4),
        writer=workers,
    )
    def edit(self, log_id: bytes, position: int, tail: list[int], writer: Writer) -> bytes:
        """A new log with the first tokens of another one and others behind them."""
        parent = self.store.core.logs.get(log_id)
        kept = [] if parent is None else list(parent.tokens[:position])
        base = Parent(log_id=log_id, generation=0, position=len(kept))
        wanted = order([*kept, *tail], base=base)
        try:
            self.store.open(wanted, writer, NOW)
        except ServiceError as error:
            require_expected(error, Reason.LOG_NOT_FOUND)
            return wanted.log_id
        fill_work(self.store)
        self.tokens[wanted.log_id] = [*kept, *tail]
        self.writers[wanted.log_id] = WorkerModel(self.store, wanted.log_id, writer)
        return wanted.log_id

    @rule(pages=st.integers(1, PAGES))
    def evict(self, pages: int) -> None:
        """KV of logs that nobody writes goes; tokens stay."""
        self.store.keeper.make_room(pages)
        fill_work(self.store)

    @rule(log_id=logs)
    def snapshot(self, log_id: bytes) -> None:
        """Compaction: what was before is not needed any more."""
        if self.alive(log_id):
            self.store.core.journal.snapshot(self.store.core.logs[log_id])

    @rule(log_id=logs)
    def cancel(self, log_id: bytes) -> None:
        """A fence; unsealed logs go."""
        if self.alive(log_id):
            self.store.keeper.cancel(log_id, NOW.wall_s)

    @rule(log_id=consumes(logs), drop=st.booleans())
    def close(self, log_id: bytes, drop: bool) -> None:
        """An end."""
        if self.alive(log_id):
            self.store.keeper.close(log_id, is_dropped=drop, wall_s=NOW.wall_s)

    @rule(writer=workers)
    def worker_dies(self, writer: Writer) -> None:
        """Its lock is gone: nothing of it is quarantined afterwards."""
        self.store.keeper.worker_gone(writer.slot, NOW.wall_s)
        fences = self.store.core.pool.fences()
        assert all(fence.worker_slot != writer.slot for fence in fences)

    @rule()
    def leases_expire(self) -> None:
        """Every written log is fenced."""
        self.store.keeper.expire_leases(NOW.monotonic_s + 1e6, NOW.wall_s)
        assert len(self.store.core.leases) == 0

    @rule()
    def everything_ends(self) -> None:
        """All TTLs over and all workers dead: every page is free again."""
        self.leases_expire()
        self.store.keeper.expire_logs(NOW.wall_s)
        self.store.keeper.expire_logs(NOW.wall_s + 1e9)
        for writer in WORKERS:
            self.store.keeper.worker_gone(writer.slot, NOW.wall_s)
        fill_work(self.store)
        assert self.store.core.pool.counts().free == PAGES

    def assert_same_generation(self, log_id: bytes, generation: int) -> None:
        """A refused take changes nothing."""
        assert self.store.core.logs[log_id].generation == generation

    def assert_stale(self, log_id: bytes, generation: int) -> None:
        """The old generation is refused and changes nothing."""
        before = self.store.core.pool.counts()
        with pytest.raises(ServiceError) as refused:
            self.store.home.grant(log_id, generation, "w0", 1)
        assert refused.value.reason is Reason.STALE_GENERATION
        assert self.store.core.pool.counts() == before

    @invariant()
    def store_agrees_with_the_model(self) -> None:
        """Conservation, holders, and the tokens of every log that is still there."""
        self.store.core.check_invariants()
        for log_id, log in self.store.core.logs.items():
            assert list(log.tokens) == self.tokens[log_id]

    def teardown(self) -> None:
        """A restart here would give back every log as it is, and no other (W1)."""
        recovered = recovered_from(self.sink.records, bytes(16))
        assert recovered.damaged == set()
        assert set(recovered.logs) == set(self.store.core.logs)
        for log_id, log in self.store.core.logs.items():
            back = recovered.logs[log_id]
            assert list(back.tokens) == self.tokens[log_id]
            assert back.generation == log.generation
            assert back.prompt_tokens == log.prompt_tokens
            assert back.is_sealed == log.is_sealed
            # A copied tail whose CRCs came with the copy is known again when its page is full.
            full = log.committed // BLOCK
            assert back.rows[:full] == log.rows[:full]
            assert back.committed <= log.committed


LogLives.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestLogLives = LogLives.TestCase
