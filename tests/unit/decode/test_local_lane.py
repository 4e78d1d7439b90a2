"""Prompts beside the steps: the same numbers whatever the budget, and nobody left waiting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.clock import SystemClock
from baton.engine.config import read_config
from baton.engine.kv_pages import KvPages
from baton.engine.transformer import ComputeCancelled, Transformer
from baton.engine.weights import ComputeDtype, load_weights
from baton.scheduling.claims import Claim
from baton.testing.clock import ManualClock
from baton.testing.tiny_models import write_directory
from baton.worker.torch_engine import TorchEngine
from baton.worker.unvouched import Unvouched
from services.decode.local_lane import LocalPrefills, PacedEngine
from services.decode.local_prefill import BudgetTerms, GapBudget

BLOCK = 8
TOKENS = [3 + index * 7 % 200 for index in range(150)]
PAGES = 20
LONG_S = 60.0
TERMS = BudgetTerms(gap=2.0, chunk_tokens=64, block_tokens=BLOCK, layers=2, tokens_per_s=1000.0)


class Whims:
    """A budget that decides whatever it was told to, one piece after the other."""

    wants_quiet = False

    def __init__(self, pieces: Sequence[int], rest_s: float = 0.0) -> None:
        self._pieces = list(pieces)
        self._next = 0
        self._rest_s = rest_s
        self.computed_tokens = 0

    def piece_tokens(self) -> int:
        """The next of the pieces, round and round."""
        self._next += 1
        return self._pieces[self._next % len(self._pieces)]

    def rest_s(self, computed_s: float) -> float:
        """The same after every layer."""
        return self._rest_s

    def computed(self, tokens: int, seconds: float) -> None:
        """Counts."""
        assert seconds >= 0.0
        self.computed_tokens += tokens


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], TorchEngine]:
    """Engines over pages of their own."""
    model = write_directory(tmp_path_factory.mktemp("model") / "tiny")
    weights = load_weights(model, ComputeDtype.FLOAT32)
    geometry = read_config(model).kv_geometry(BLOCK, weights.dtype.kv_dtype)
    return lambda: TorchEngine(Transformer(weights, KvPages.allocate(geometry, PAGES)))


def paced(engine: Any, budget: Any) -> PacedEngine:
    """As a worker makes it."""
    return PacedEngine(engine, cast(GapBudget, budget), SystemClock(), 1)


PIECES = st.lists(st.integers(1, 12).map(lambda pages: pages * BLOCK), min_size=1, max_size=8)


@settings(max_examples=25, deadline=None)
@given(PIECES, st.integers(1, len(TOKENS) - 1))
def test_the_budget_changes_no_number_that_matters(
    make: Callable[[], TorchEngine], pieces: list[int], cut: int
) -> None:
    """In float32: the same first token, logits and KV equal but for rounding, however the chunks of
    a prompt are cut into pieces.
    """
    whole, engine = make(), make()
    table = range(PAGES)
    expected = whole.prefill_chunk(TOKENS, 0, table)
    budget = Whims(pieces)
    lane = paced(engine, budget)
    lane.prefill_kv(TOKENS[:cut], 0, table)
    logits = lane.prefill_chunk(TOKENS[cut:], cut, table)
    assert budget.computed_tokens == len(TOKENS)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-4)
    assert int(logits.argmax()) == int(expected.argmax())
    for layer in range(2):
        ours = engine.transformer.pages.layer(layer).numpy()
        theirs = whole.transformer.pages.layer(layer).numpy()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4)


def test_a_rest_ends_when_nobody_decodes_any_more(make: Callable[[], TorchEngine]) -> None:
    """The budget says a minute after every layer; the last stream's end lets it go on at once."""
    lane = paced(make(), Whims([BLOCK], rest_s=LONG_S))
    lane.decoding(is_quiet=True)
    worker = threading.Thread(target=lambda: lane.prefill_kv(TOKENS[:BLOCK], 0, range(PAGES)))
    worker.start()
    lane.nobody_decodes()
    worker.join(LONG_S / 2)
    assert not worker.is_alive()


def test_a_cancel_is_seen_before_and_after_a_rest(make: Callable[[], TorchEngine]) -> None:
    """The pages may be given to others as soon as the call has ended."""
    asked: list[int] = []

    def after_the_rest() -> bool:
        asked.append(len(asked))
        return len(asked) >= 2

    lane = paced(make(), Whims([BLOCK], rest_s=1e-6))
    lane.decoding(is_quiet=True)
    with pytest.raises(ComputeCancelled):
        lane.prefill_kv(TOKENS[:64], 0, range(PAGES), lambda: True)
    with pytest.raises(ComputeCancelled):
        lane.prefill_kv(TOKENS[:64], 0, range(PAGES), after_the_rest)
    assert asked == [0, 1]
    assert not lane.has_computed_since(SystemClock().monotonic_s() + 1.0)


def prefills(clock: ManualClock, unvouched: Unvouched | None = None) -> LocalPrefills:
    """Those of a worker, whose engine is not called."""
    parts = SimpleNamespace(engine=None, beside=[], unvouched=unvouched or Unvouched())
    return LocalPrefills(cast(Any, parts), TERMS, clock, 1)


def test_a_step_beside_a_prompt_is_told_from_a_quiet_one() -> None:
    """By what was computed since the step before; an idle time is nobody's gap."""
    clock = ManualClock()
    made = prefills(clock)
    clock.advance(1.0)
    made.stepped(0.010, 4)
    clock.advance(0.012)
    made.stepped(0.010, 4)
    assert made.budget.quiet_s == pytest.approx(0.0102)
    assert made.budget.beside_s is None
    made.idled()
    assert not made.budget.is_decoding
    clock.advance(30.0)
    made.stepped(0.010, 4)
    assert made.budget.quiet_s == pytest.approx(0.0102, rel=0.01)


async def test_turns_go_round_tenants_and_a_cancelled_one_passes_on() -> None:
    """Whoever gives up, waiting or just granted, holds nobody up."""
    made, order = prefills(ManualClock()), list[str]()
    opened = asyncio.Event()

    async def prompt(tenant: str, turns: int) -> None:
        mine = made.turns(Claim(request_id="r", tenant=tenant), tenant.encode().ljust(16), 0)
        for _ in range(turns):
            async with mine.turn():
                await opened.wait()
                order.append(tenant)

    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        first = tasks.create_task(prompt("a", 3))
        waits = tasks.create_task(prompt("b", 1))
        tasks.create_task(prompt("c", 2))
        await one_turn()
        waits.cancel()
        await one_turn()
        opened.set()
        first.cancel()
    assert order == ["c", "c"]


async def test_a_check_that_begins_during_a_chunk_does_not_vouch_for_it() -> None:
    """The chunk computes beside the check: part of it comes after what the check saw."""
    unvouched = Unvouched()
    made = prefills(ManualClock(), unvouched)
    log = bytes(16)
    async with made.turns(Claim(request_id="r"), log, 5).turn():
        unvouched.note(log, 5)
        unvouched.begin()
    unvouched.passed()
    assert unvouched.told() == {log: 5}


async def one_turn() -> None:
    """Let every other task run once."""
    await asyncio.sleep(0)  # noqa: TID251 - yields, waits for nothing
