"""Random lives of logs on two stores, equal to plain Python lists, down to the bytes of their KV.

After each step: every log's tokens are the list's, every committed slot reads as its writer wrote
it, whatever fenced writers wrote meanwhile; pages are conserved; what is granted is blank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from baton.errors import Reason, ServiceError
from baton.kv.digests import history_at
from baton.kv.manifest import Manifest, Segment
from baton.kv.numeric import TORCH_F32
from services.kvstore.log.state import Parent
from services.kvstore.publishing import PublishOrder
from services.kvstore.state import Phase, Writer
from services.kvstore.store import ForkOrder
from tests.cluster.memory import BLOCK
from tests.unit.kvstore.cores import KV, SCOPE, TOKENIZER, order
from tests.unit.kvstore.model_base import ModelOfLives, require_expected
from tests.unit.kvstore.model_draws import (
    ABOUT_A_LOG,
    ABOUT_A_WRITER,
    ANYTIME,
    FIELDS,
    WORKERS,
    prompts,
    workers,
)
from tests.unit.kvstore.model_sites import BytesSite, Hand

STEPS: Final = 30


class LogLives(ModelOfLives):
    """See the module."""

    # --- one step ---------------------------------------------------------------------------

    @initialize(prompt=prompts, writer=workers)
    def begins(self, prompt: list[int], writer: Writer) -> None:
        """There is something to do."""
        self.open(0, prompt, writer, False)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """One of the things that are possible now, the usual ones more often."""
        written = sorted(log_id for log_id in self.hands if self.hand(log_id) is not None)
        present = sorted({log_id for site in self.sites for log_id in site.store.core.logs})
        names = [*ANYTIME, *(ABOUT_A_LOG if present else ())]
        if self.ghosts:
            names += 2 * ["late_write"]
        # Both ends of a list are drawn more often than what is between.
        ends = 2 * ABOUT_A_WRITER if written else ["open"]
        names = [*ends, *names, *ends]
        name = data.draw(st.sampled_from(names))
        fields = {key: data.draw(strategy, key) for key, strategy in FIELDS[name].items()}
        if name in ABOUT_A_LOG:
            fields["log_id"] = data.draw(st.sampled_from(present))
        elif name in ABOUT_A_WRITER:
            fields["log_id"] = data.draw(st.sampled_from(written))
        self.done[name] += 1
        getattr(self, name)(**fields)

    # --- open and write ---------------------------------------------------------------------

    def open(self, side: int, prompt: list[int], writer: Writer, drop: bool) -> bytes:
        """A new log from what is cached, if anything is."""
        return self._open(side, prompt, writer, drop_at_end=drop)

    def open_from_parent(self, log_id: bytes, cut: int, writer: Writer) -> bytes:
        """A new log from a position of another."""
        found = self.found(log_id)
        if found is None:
            return self.new_id()
        site, log = found
        position = min(cut, log.position)
        prompt = [*list(log.tokens)[:position], 1]
        parent = Parent(log_id=log_id, generation=0, position=position)
        return self._open(self.sites.index(site), prompt, writer, base=parent)

    def open_from_manifest(self, log_id: bytes, cut: int, writer: Writer) -> bytes:
        """A new log from a splice of one segment."""
        found = self.found(log_id)
        if found is None or not found[1].committed:
            return self.new_id()
        site, log = found
        end = min(cut, log.committed)
        tokens = list(log.tokens)
        segment = Segment(
            log_id=log_id,
            generation=log.generation,
            from_position=0,
            to_position=end,
            history_start=history_at(KV, BLOCK, []),
            history_end=history_at(KV, BLOCK, tokens[:end]),
            kv_digest=KV,
            tokenizer_hash=TOKENIZER,
            block_tokens=BLOCK,
            numeric_class_id=log.numeric_class_id,
        )
        manifest = Manifest(segments=(segment,))
        return self._open(self.sites.index(site), [*tokens[:end], 2, 1], writer, base=manifest)

    def _open(self, side: int, prompt: list[int], writer: Writer, **fields: Any) -> bytes:
        site = self.sites[side]
        wanted = order(prompt, log_id=self.new_id(), **fields)
        before = site.store.core.pool.counts()
        try:
            site.store.open(wanted, writer, self.now)
        except ServiceError as error:
            require_expected(error)
            assert wanted.log_id not in site.store.core.logs
            if error.reason is not Reason.PAGES_EXHAUSTED:
                assert site.store.core.pool.counts() == before
            return wanted.log_id
        site.work()
        self.tokens[wanted.log_id] = list(prompt)
        self.hands[wanted.log_id] = Hand(site, wanted.log_id, writer)
        return wanted.log_id

    def checkpoint(self, log_id: bytes, part: float) -> None:
        """Part of what is missing."""
        hand = self.hand(log_id)
        if hand is None:
            return
        log = hand.log
        if log.phase not in (Phase.PREFILL, Phase.DECODE):
            return
        end = log.prompt_tokens if log.phase is Phase.PREFILL else log.position - 1
        target = log.committed + max(1, int((end - log.committed) * part))
        target = min(target, hand.room(), end)
        if target > log.committed:
            hand.checkpoint(target, self.now.monotonic_s)

    def seal(self, log_id: bytes, token: int, finish: str | None) -> None:
        """The prompt is done."""
        hand = self.hand(log_id)
        if hand is None or hand.log.phase is not Phase.PREFILL:
            return
        log = hand.log
        if log.committed < log.prompt_tokens:
            if hand.room() < log.prompt_tokens:
                return
            hand.checkpoint(log.prompt_tokens, self.now.monotonic_s)
        hand.seal(token, finish, self.now.monotonic_s)
        self.tokens[log_id].append(token)

    def append(self, log_id: bytes, new: list[int], finish: str | None) -> None:
        """Some tokens, each twice, as after a lost ack."""
        for index, token in enumerate(new):
            hand = self.hand(log_id)
            if hand is None or hand.log.phase is not Phase.DECODE:
                return
            log = hand.log
            if log.committed != log.position - 1:
                return
            try:
                if log.committed % BLOCK == 0 and not log.granted:
                    hand.grant(1)
            except ServiceError as error:
                require_expected(error)
                return
            item = hand.item(token, finish if index == len(new) - 1 else None)
            writes = hand.site.store.writes
            for _ in range(2):
                writes.append(item, hand.writer.worker_id, self.now.monotonic_s)
            hand.site.work()
            self.tokens[log_id].append(token)

    # --- ownership --------------------------------------------------------------------------

    def take(self, log_id: bytes, writer: Writer, pages: int) -> None:
        """Another writer; the old one does not notice."""
        found = self.found(log_id)
        if found is None:
            return
        site, log = found
        old, hand = log.generation, self.hand(log_id)
        ghost = None if hand is None else hand.ghost()
        try:
            site.store.home.take(
                log_id, old, writer, TORCH_F32, pages=pages, now_s=self.now.monotonic_s
            )
        except ServiceError as error:
            require_expected(error)
            assert log.generation == old
            return
        if ghost is not None:
            self.ghosts.append((site, ghost))
        site.work()
        self.hands[log_id] = Hand(site, log_id, writer)
        self.assert_stale(site, log_id, old)

    def truncate(self, log_id: bytes, position: int) -> None:
        """A cut under a new generation."""
        found = self.found(log_id)
        if found is None:
            return
        site, log = found
        old, hand = log.generation, self.hand(log_id)
        ghost = None if hand is None else hand.ghost()
        try:
            site.store.truncate(log_id, old, position, self.now)
        except ServiceError as error:
            require_expected(error)
            return
        if ghost is not None:
            self.ghosts.append((site, ghost))
        site.work()
        del self.tokens[log_id][position:]
        self.assert_stale(site, log_id, old)

    def cancel(self, log_id: bytes) -> None:
        """A fence; unsealed logs go."""
        site = self.site(log_id)
        if site is not None:
            self.fenced(log_id)
            site.store.keeper.cancel(log_id, self.now.wall_s)
            site.work()

    def close(self, log_id: bytes, drop: bool) -> None:
        """An end."""
        site = self.site(log_id)
        if site is not None:
            self.fenced(log_id)
            site.store.keeper.close(log_id, is_dropped=drop, wall_s=self.now.wall_s)
            site.work()

    def leases_expire(self, side: int) -> None:
        """Nobody makes progress for a lease; time alone frees nothing under a writer."""
        site = self.sites[side]
        for log_id in list(site.store.core.leases):
            self.fenced(log_id)
        self.now = replace(self.now, monotonic_s=self.now.monotonic_s + 100.0)
        site.store.keeper.expire_leases(self.now.monotonic_s, self.now.wall_s)
        site.work()
        assert len(site.store.core.leases) == 0

    def late_write(self, seed: int) -> None:
        """A fenced writer writes what it was about to write; nobody may see it."""
        if not self.ghosts:
            return
        site, ghost = self.ghosts[seed % len(self.ghosts)]
        if ghost.writer.slot in site.alive:
            for page, slot in ghost.spots:
                site.arena.put(page, slot, 1 + seed, 1 + seed)

    def worker_dies(self, side: int, writer: Writer) -> None:
        """Its mapping is gone; what waited for it is free. Another of its name comes later."""
        site = self.sites[side]
        self.ghosts = [
            (where, ghost)
            for where, ghost in self.ghosts
            if where is not site or ghost.writer != writer
        ]
        site.store.keeper.worker_gone(writer.slot, self.now.wall_s)
        site.work()
        assert all(one.worker_slot != writer.slot for one in site.store.core.pool.fences())

    def worker_lets_go(self, side: int, seed: int) -> None:
        """A worker names what it writes: one fenced log is not among it any more."""
        site = self.sites[side]
        fences = site.store.core.pool.fences()
        if not fences:
            return
        fence = fences[seed % len(fences)]
        self.ghosts = [
            (where, ghost)
            for where, ghost in self.ghosts
            if where is not site
            or (ghost.writer.slot, ghost.log_id, ghost.generation)
            != (fence.worker_slot, fence.log_id, fence.generation)
        ]
        site.store.keeper.lift(fence)
        site.work()

    # --- branches, prefixes, room -----------------------------------------------------------

    def fork(self, log_id: bytes, position: int, writer: Writer | None) -> bytes:
        """A branch at any position, also of a log that moved away."""
        child = self.new_id()
        holding = [site for site in self.sites if log_id in site.store.core.logs]
        if not holding:
            return child
        site = holding[0]
        wanted = ForkOrder(log_id=child, request_id="f", scope=SCOPE, sampling=None)
        parent = Parent(log_id=log_id, generation=0, position=position)
        tokens = list(site.store.core.logs[log_id].tokens)[:position]
        try:
            site.store.fork(parent, wanted, writer, self.now)
        except ServiceError as error:
            require_expected(error)
            return child
        site.work()
        self.tokens[child] = tokens
        if writer is not None:
            self.hands[child] = Hand(site, child, writer)
        return child

    def publish(self, log_id: bytes, position: int) -> None:
        """A prefix that holds its pages by itself."""
        found = self.found(log_id)
        if found is None:
            return
        site, _ = found
        wanted = PublishOrder(
            prefix_id=self.new_id().hex(), name=self.new_id().hex(), tenant="acme", tenants=("*",),
            log_id=log_id, position=position, text_hash=b"", ids_hash=b"", history_end=b"",
            text_bytes=0, template_digest=b"", model="m", expire_wall_s=None,
        )  # fmt: skip
        try:
            site.store.prefix_keeper.publish(wanted, self.now.wall_s)
        except ServiceError as error:
            require_expected(error)

    def revoke(self, side: int, seed: int) -> None:
        """It ends; who forked from it keeps the pages."""
        site = self.sites[side]
        prefixes = site.store.core.prefixes.all()
        if prefixes:
            prefix = prefixes[seed % len(prefixes)]
            site.store.prefix_keeper.revoke(prefix.prefix_id, None, self.now.wall_s)
            site.work()

    def evict(self, side: int, pages: int) -> None:
        """KV of logs that nobody writes goes, their tokens stay."""
        site = self.sites[side]
        site.store.keeper.make_room(pages)
        site.work()

    def times_end(self, side: int) -> None:
        """TTLs are over: logs without a writer are collected."""
        site = self.sites[side]
        site.store.keeper.expire_logs(self.now.wall_s)
        self.now = replace(self.now, wall_s=self.now.wall_s + 1e6)
        site.store.keeper.expire_logs(self.now.wall_s)
        site.work()
        assert all(log.writer is not None for log in site.store.core.logs.values())

    # --- crash and move ---------------------------------------------------------------------

    def crash(self, side: int, is_same_arena: bool, dead: set[int]) -> None:
        """The store comes back; some workers are gone, the others write on."""
        site = self.sites[side]
        before = {
            log_id: (list(log.tokens), log.generation, log.phase)
            for log_id, log in site.store.core.logs.items()
        }
        alive = frozenset(range(len(WORKERS))) - dead
        for log_id in list(site.store.core.leases):
            self.fenced(log_id)
        if not is_same_arena:
            alive = frozenset()
        self.ghosts = [
            (where, ghost)
            for where, ghost in self.ghosts
            if where is not site or ghost.writer.slot in alive
        ]
        site.restart(self.now, is_same_arena=is_same_arena, locked=alive)
        logs = site.store.core.logs
        assert set(logs) == set(before), "W1: a log is missing, or one is there that was not"
        for log_id, (tokens, generation, phase) in before.items():
            assert list(logs[log_id].tokens) == tokens
            assert logs[log_id].generation >= generation
            assert logs[log_id].is_sealed == (phase is not Phase.PREFILL)
            if phase is Phase.MOVED:
                assert logs[log_id].phase is Phase.MOVED
        for log_id, hand in list(self.hands.items()):
            if hand.site is site:
                # A living writer attaches again and goes on at its next generation.
                del self.hands[log_id]
        for writer in WORKERS:
            if writer.slot in dead:
                site.store.keeper.worker_gone(writer.slot, self.now.wall_s)
                site.work()

    def move(self, log_id: bytes, early: bool, dies: bool) -> None:
        """The log's home becomes the other store; its writer does not notice."""
        found = self.found(log_id)
        if found is None:
            return
        old, log = found
        new = self.sites[1 - self.sites.index(old)]
        now_s = self.now.monotonic_s
        try:
            arrival = new.arrivals.follow(log_id, "acme", old.name, now_s)
            if early:
                full = [row for row in log.rows if row.crc is not None and row.tokens == BLOCK]
                self._fetch(old, new, arrival, new.arrivals.announced(arrival, 0, full))
            new.arrivals.make_room(arrival, log.position)
            hand = self.hand(log_id)
            ghost = None if hand is None else hand.ghost()
            moved = old.departures.move(log_id, log.generation, new.name, now_s)
        except ServiceError as error:
            require_expected(error)
            new.arrivals.abandon(log_id)
            new.work()
            return
        if ghost is not None:
            self.ghosts.append((old, ghost))
        old.work()
        departed = old.departures.answer(moved)
        missing = new.arrivals.moved(
            arrival, departed.generation, departed.snapshot, departed.digest
        )
        self._fetch(old, new, arrival, missing)
        new.arrivals.open(arrival, self.now)
        new.work()
        if not dies:
            assert old.departures.done(log_id, departed.generation)
            new.arrivals.confirmed(log_id)
            old.work()

    def _fetch(self, old: BytesSite, new: BytesSite, arrival: Any, blocks: list[int]) -> None:
        """The bytes, as the data plane brings them."""
        new.work()
        rows = old.store.core.logs[arrival.log_id].rows
        if not blocks:
            return
        for block, target in zip(blocks, new.arrivals.writing(arrival, blocks), strict=True):
            assert new.arena.is_blank(target.row.page, 0), "a replica's page holds foreign bytes"
            new.arena.page(target.row.page)[:] = old.arena.page(rows[block].page)
        new.arrivals.written(arrival, blocks)


QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


# hypothesis makes the class at run time.
class TestSomeLives(LogLives.TestCase):  # type: ignore[valid-type,misc]
    """A few in every run."""

    settings = settings(
        max_examples=20, stateful_step_count=STEPS, deadline=None, suppress_health_check=QUIET
    )


@pytest.mark.more
# hypothesis makes the class at run time.
class TestManyLives(LogLives.TestCase):  # type: ignore[valid-type,misc]
    """300 runs of 30 steps."""

    settings = settings(
        max_examples=300, stateful_step_count=STEPS, deadline=None, suppress_health_check=QUIET
    )
