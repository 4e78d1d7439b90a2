"""Incidents A1, A2, A11, A12: a writer goes on after its log was aborted, at every point.

Each is named after the incident of docs/incidents.md whose rule it proves. The victim is another
tenant that gets every page there is; the bytes of its KV are its canary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Final

import pytest

from baton.errors import ServiceError
from baton.kv.blocks import Scope
from baton.kv.numeric import TORCH_F32
from services.kvstore.state import LogState, Writer
from tests.cluster.memory import BLOCK, PAGES, kv_of
from tests.unit.kvstore.cores import NOW, order
from tests.unit.kvstore.model_sites import BytesSite, Ghost, Hand

SLOW: Final = Writer(worker_id="slow", slot=0, incarnation=1)
OTHER: Final = Writer(worker_id="other", slot=1, incarnation=1)
PROMPT: Final = [1 + index % 50 for index in range(3 * BLOCK + 3)]
OUTPUT: Final = 14
POINTS: Final = range(len(PROMPT) + OUTPUT)
LATER_S: Final = NOW.monotonic_s + 1e3


def cancel(site: BytesSite, log: LogState) -> None:
    """The client left."""
    site.store.keeper.cancel(log.log_id, NOW.wall_s)


def drop(site: BytesSite, log: LogState) -> None:
    """It is deleted."""
    site.store.keeper.close(log.log_id, is_dropped=True, wall_s=NOW.wall_s)


def time_out(site: BytesSite, log: LogState) -> None:
    """Its lease ends, then its time, and every kept page is wanted by others."""
    site.store.keeper.expire_leases(LATER_S, NOW.wall_s)
    site.store.keeper.expire_logs(NOW.wall_s + 1e9)
    assert log.log_id not in site.store.core.logs


def taken_over(site: BytesSite, log: LogState) -> None:
    """Another worker goes on with it, then it is dropped."""
    try:
        site.store.home.take(
            log.log_id, log.generation, OTHER, TORCH_F32, pages=1, now_s=NOW.monotonic_s
        )
    finally:
        site.work()
        site.store.keeper.close(log.log_id, is_dropped=True, wall_s=NOW.wall_s)


def kvstore_restarts(site: BytesSite, log: LogState) -> None:
    """The kvstore dies and comes back while the writer stands still."""
    site.restart(NOW, is_same_arena=True, locked=frozenset({SLOW.slot, OTHER.slot}))
    site.store.keeper.expire_leases(LATER_S, NOW.wall_s)
    site.store.keeper.expire_logs(NOW.wall_s + 1e9)


ABORTS: Final[tuple[Callable[[BytesSite, LogState], None], ...]] = (
    cancel,
    drop,
    time_out,
    taken_over,
    kvstore_restarts,
)


def written_to(site: BytesSite, point: int) -> Hand:
    """A log whose writer stands `point` tokens into its work: prefill, then decode."""
    wanted = order(PROMPT, output_pages=2)
    site.store.open(wanted, SLOW, NOW)
    site.work()
    hand = Hand(site, wanted.log_id, SLOW)
    if point > 0:
        hand.checkpoint(min(point, len(PROMPT)), NOW.monotonic_s)
    if point >= len(PROMPT):
        hand.seal(3, None, NOW.monotonic_s)
        for _ in range(point - len(PROMPT)):
            if hand.log.committed % BLOCK == 0 and not hand.log.granted:
                hand.grant(1)
            item = hand.item(2, None)
            site.store.writes.append(item, SLOW.worker_id, NOW.monotonic_s)
    return hand


def victims(site: BytesSite) -> list[Hand]:
    """Another tenant's logs, as many as the arena holds."""
    hands: list[Hand] = []
    while True:
        prompt = [40 + len(hands), *range(2 * BLOCK)]
        wanted = order(prompt, tenant="victim", scope=Scope(tenant="victim"), output_pages=0)
        try:
            site.store.open(wanted, OTHER, NOW)
        except ServiceError:
            return hands
        site.work()
        hands.append(Hand(site, wanted.log_id, OTHER))


def write_on(site: BytesSite, ghost: Ghost) -> None:
    """All that the slow writer had before it, of an answer nobody wants any more."""
    for page, slot in ghost.spots:
        site.arena.put(page, slot, 4242, 4242)


def assert_intact(site: BytesSite, hand: Hand) -> None:
    """Every slot of a victim reads as it was written."""
    kv, log = 0, hand.log
    for position in range(log.committed):
        kv = kv_of(log.tokens[position], kv)
        row = log.rows[position // BLOCK]
        assert site.arena.get(row.page, position % BLOCK) == (kv, position + 1), position


@pytest.mark.parametrize("abort", ABORTS, ids=[abort.__name__ for abort in ABORTS])
def test_a1_a2_a11_a_slow_writer_reaches_nobody_else(
    abort: Callable[[BytesSite, LogState], None],
) -> None:
    """41 points of abort x 5 ways: 205 runs, the victim's canary intact after each, and every page
    back once the writer is gone.
    """
    for point in POINTS:
        site = BytesSite("a")
        hand = written_to(site, point)
        ghost = hand.ghost()
        abort(site, hand.log)
        site.work()
        write_on(site, ghost)
        held = victims(site)
        assert held, "the victim got pages"
        for index, one in enumerate(held):
            one.checkpoint(BLOCK + index % BLOCK, NOW.monotonic_s)
            write_on(site, ghost)
            one.checkpoint(one.log.prompt_tokens, NOW.monotonic_s)
        write_on(site, ghost)
        for one in held:
            assert_intact(site, one)
        site.store.core.check_invariants()
        site.store.keeper.worker_gone(SLOW.slot, NOW.wall_s)
        for one in held:
            site.store.keeper.close(one.log_id, is_dropped=True, wall_s=NOW.wall_s)
        site.store.keeper.worker_gone(OTHER.slot, NOW.wall_s)
        site.work()
        assert site.store.core.pool.counts().free == PAGES


def let_go(site: BytesSite) -> None:
    """The worker names nothing any more."""
    for fence in site.store.core.pool.fences():
        site.store.keeper.lift(fence)


def test_a12_expiry_and_late_messages_in_any_order_end_things_once() -> None:
    """720 of the orders of seven ends and late messages: nothing is erased twice, nothing kept."""
    for late in itertools.islice(itertools.permutations(range(7)), 0, None, 7):
        site = BytesSite("a")
        hand = written_to(site, len(PROMPT) + 2)
        keeper, log_id, generation = site.store.keeper, hand.log_id, hand.generation
        item = hand.item(2, None)

        steps: tuple[Callable[[], object], ...] = (
            partial(keeper.expire_leases, LATER_S, NOW.wall_s),
            partial(keeper.expire_logs, NOW.wall_s + 1e9),
            partial(keeper.worker_gone, SLOW.slot, NOW.wall_s),
            partial(keeper.cancel, log_id, NOW.wall_s),
            partial(site.store.writes.append, item, SLOW.worker_id, LATER_S),
            partial(site.store.writes.checkpoint, log_id, generation, (0, 1), (), NOW.monotonic_s),
            partial(let_go, site),
        )
        for step in late:
            try:
                steps[step]()
            except ServiceError:
                continue
            finally:
                site.work()
                site.store.core.check_invariants()
        log = site.store.core.logs.get(log_id)
        assert log is None or log.generation > generation or log.writer is None
        keeper.expire_leases(LATER_S + 1e6, NOW.wall_s)
        keeper.expire_logs(NOW.wall_s + 2e9)
        keeper.expire_logs(NOW.wall_s + 9e9)
        keeper.worker_gone(SLOW.slot, NOW.wall_s)
        site.work()
        assert site.store.core.pool.counts().free == PAGES
