"""Forks, cuts, takes and sweeps do the same work at any length and with any number of logs.

Counted in function calls, not in seconds: a step for each token, page or log would show at once.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import FrameType

import pytest

from baton.kv.numeric import TORCH_F32
from services.kvstore.log.state import Parent
from services.kvstore.state import LogState, PageRow, Phase, Rows
from services.kvstore.store import ForkOrder, Store
from tests.unit.kvstore.cores import (
    BLOCK,
    DECODE,
    NOW,
    SCOPE,
    ListSink,
    build_store,
    new_id,
    open_log,
    order,
)

SHORT, LONG = 64 * BLOCK, 4096 * BLOCK
FEW, MANY = 10, 1000
SLACK = 24


def calls_of(work: Callable[[], object]) -> int:
    """How many functions, Python's and built-in ones, `work` calls."""
    calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def long_log(store: Store, tokens: int) -> LogState:
    """A kept log of so many tokens with all its KV."""
    log = open_log(store, [7] * tokens, is_cacheable=False).log
    pages = list(log.granted)
    blocks = tokens // BLOCK
    store.core.pool.commit_many(pages[:blocks])
    for page in pages[blocks:]:
        store.core.pool.give_back(page)
    log.rows = Rows(
        PageRow(page=page, page_generation=log.granted[page], tokens=BLOCK, crc=7)
        for page in pages[:blocks]
    )
    log.granted, log.writer, log.phase, log.committed = {}, None, Phase.KEPT, tokens
    store.core.leases.end(log.log_id)
    store.core.idle(log)
    store.core.take_work()
    store.core.check_invariants()
    return log


def costs_at(tokens: int) -> dict[str, int]:
    """Calls of each operation on a log of so many tokens."""
    store = build_store(pages=tokens // BLOCK + 40, sink=ListSink())
    log = long_log(store, tokens)
    at = Parent(log_id=log.log_id, generation=0, position=tokens - 3)
    fork = ForkOrder(log_id=new_id(), request_id="f", scope=SCOPE, sampling=None)
    prompt = array("I", [7] * (tokens - 3) + [8, 9])
    edit = replace(order([1], base=at, is_cacheable=False), tokens=prompt)

    def take() -> None:
        store.home.take(fork.log_id, 1, DECODE, TORCH_F32, pages=1, now_s=NOW.monotonic_s)

    found = {
        "fork": calls_of(lambda: store.fork(at, fork, None, NOW)),
        "take": calls_of(take),
        "truncate": calls_of(lambda: store.truncate(fork.log_id, 2, tokens // 2 + 1, NOW)),
        "open": calls_of(lambda: store.open(edit, DECODE, NOW)),
        "cut of pages nobody shares": 0,
        "snapshot": calls_of(lambda: store.core.journal.snapshot(log)),
    }
    for child in (fork.log_id, edit.log_id):
        store.keeper.close(child, is_dropped=True, wall_s=NOW.wall_s)
    store.core.take_work()
    found["cut of pages nobody shares"] = calls_of(
        lambda: store.truncate(log.log_id, log.generation, BLOCK + 3, NOW)
    )
    store.core.check_invariants()
    return found


def test_operations_do_the_same_work_at_any_length() -> None:
    """64 times the tokens, the same number of calls but for a few."""
    short, long = costs_at(SHORT), costs_at(LONG)
    # Up to 256 freed pages are taken out of the index one by one.
    short["cut of pages nobody shares"] -= SHORT // BLOCK
    for name, calls in long.items():
        assert calls <= short[name] + SLACK, (name, short[name], calls)


def crowd(count: int) -> Store:
    """A store with so many kept logs, one of which is over in a second."""
    store = build_store(pages=4 * count)
    workers = [open_log(store, [1, 2, 3], is_cacheable=False) for _ in range(count)]
    for worker in workers:
        worker.prefill(finish="stop")
        store.keeper.close(worker.log_id, is_dropped=False, wall_s=NOW.wall_s)
    workers[-1].log.expires_wall_s = NOW.wall_s + 1.0
    store.core.idle(workers[-1].log)
    store.keeper.expire_logs(NOW.wall_s)
    return store


def sweep(store: Store) -> None:
    """Nothing is due."""
    store.keeper.expire_logs(NOW.wall_s)
    store.keeper.expire_leases(NOW.monotonic_s, NOW.wall_s)


def evict(store: Store) -> None:
    """One log loses its KV."""
    store.keeper.make_room(store.core.pool.free_count + 1)


def expire_one(store: Store) -> None:
    """One log is over."""
    assert len(store.keeper.expire_logs(NOW.wall_s + 2.0)) == 1


@pytest.mark.parametrize("work", [sweep, evict, expire_one])
def test_what_the_clock_does_costs_the_same_with_many_logs(work: Callable[[Store], None]) -> None:
    """100 times the logs, none due or one due: the same work."""
    found = []
    for count in (FEW, MANY):
        store = crowd(count)
        found.append(calls_of(partial(work, store)))
        store.core.check_invariants()
    assert found[1] <= found[0] + SLACK
