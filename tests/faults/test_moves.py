"""A stream whose log moves to another node while either kvstore dies or freezes: it goes on.

The move is made, or the answer goes on from a fork or from its tokens at the decode worker's own
kvstore. Tokens are those of the undisturbed answer; afterwards both stores' pages add up and the
old home keeps nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import pytest

from baton.metrics_families import PAGE_STATES
from baton.testing.cluster import RunningCluster
from tests.faults.crowd import Crowd
from tests.faults.drill import Drill, Outcome, drill_on, drilled_cluster, prompt_of, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

_log = logging.getLogger("drill")
TOKENS: Final = 12
REASONS: Final = {"worker_lost", "no_worker", "draining", "transfer_timeout"}
OLD, NEW = "kvstore-0", "kvstore-1"
CRASHES: Final = [
    (OLD, "move.before_fence"),
    (OLD, "move.after_fence"),
    (OLD, "move.mid_send"),
    (NEW, "adopt.before_move"),
    (NEW, "adopt.after_move"),
    (NEW, "adopt.after_open"),
]


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Prefill on the first node, decode on the second."""
    folder: Path = tmp_path_factory.mktemp("two-nodes")
    with drilled_cluster(folder, "--nodes", "2") as cluster:
        yield cluster


@pytest.fixture
async def nodes(two_nodes: RunningCluster) -> AsyncIterator[Drill]:
    """The cluster, whole and at rest before and after."""
    async with drill_on(two_nodes) as drill:
        try:
            yield drill
        finally:
            await drill.disarm(NEW)


async def check_stores(drill: Drill) -> None:
    """Pages add up at both stores, and nothing is left at the old home."""
    for name in (OLD, NEW):
        counts = [await drill.metric(name, "baton_kvstore_pages") for _ in range(1)]
        assert counts == [await drill.metric(name, "baton_kvstore_arena_pages")], name

    async def is_empty() -> bool:
        unconfirmed = await drill.metric(OLD, "baton_kvstore_moves_unconfirmed")
        coming = await drill.metric(NEW, "baton_kvstore_replicas")
        return unconfirmed == coming == 0.0

    await until(is_empty, 30.0, "no move unconfirmed, nothing coming")


def check_answer(outcome: Outcome, expected: Outcome, what: str) -> None:
    """Whole, or an error that says why; never a wrong token, never a silent end."""
    _log.info("%s: %s, %.2f s", what, outcome.error or "whole", outcome.ended_s)
    assert outcome.token_ids == expected.token_ids[: len(outcome.token_ids)]
    assert not outcome.is_broken, "a stream never just stops"
    if outcome.is_whole:
        assert outcome.token_ids == expected.token_ids
    else:
        assert outcome.error in REASONS, outcome


@pytest.mark.parametrize(("victim", "point"), CRASHES, ids=[f"{v}-{p}" for v, p in CRASHES])
async def test_a_kvstore_that_dies_in_a_move_costs_time_only(
    nodes: Drill, victim: str, point: str
) -> None:
    """The launcher starts it again meanwhile."""
    prompt = prompt_of(CRASHES.index((victim, point)), tokens=80)
    expected = await nodes.ask(prompt, tokens=TOKENS)
    assert expected.is_whole, expected
    await nodes.arm(victim, f"{point}:exit:once")
    outcome = await nodes.ask(prompt, tokens=TOKENS)
    check_answer(outcome, expected, f"{victim} at {point}")
    await nodes.is_whole()
    again = await nodes.ask(prompt, tokens=TOKENS)
    assert again.token_ids == expected.token_ids
    await check_stores(nodes)


async def test_a_frozen_old_home_does_not_hold_the_stream(nodes: Drill) -> None:
    """The answer goes on from its tokens at the decode worker's node; thawed, the old home finds
    that nobody needs what it has.
    """
    prompt = prompt_of(77, tokens=80)
    expected = await nodes.ask(prompt, tokens=TOKENS)
    assert expected.is_whole, expected
    held = await nodes.hits(NEW, "adopt.before_move")
    await nodes.arm(NEW, "adopt.before_move:pause:30:once")
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(nodes.ask(prompt, tokens=TOKENS))
        await nodes.until_hit((NEW,), "adopt.before_move", (held,))
        pid = nodes.freeze(OLD)
        await nodes.disarm(NEW)
    nodes.thaw(pid)
    outcome = asking.result()
    check_answer(outcome, expected, "frozen old home")
    assert outcome.is_whole, "the decode worker's own kvstore was there"
    await nodes.is_whole()


@pytest.fixture(scope="module")
def spare_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Both roles on the first node, decode on the second."""
    folder: Path = tmp_path_factory.mktemp("spare-node")
    with drilled_cluster(folder, "--nodes", "2", "--decode", "2") as cluster:
        yield cluster


@pytest.mark.parametrize("is_frozen", [False, True], ids=["killed", "frozen"])
async def test_a_lost_node_costs_a_prefill(spare_node: RunningCluster, is_frozen: bool) -> None:
    """Kvstore and workers of one node are gone together: every answer goes on at the other node,
    from the prompt and the tokens that its client has. A host that is off answers nothing at all,
    as one that is frozen.
    """
    async with drill_on(spare_node) as drill:
        crowd = await Crowd.of(drill, 8, seed=7000 + 100 * is_frozen, tokens=32)
        async with crowd.streaming(0.25):
            await crowd.grows(16)
            # decode-1 sits beside prefill: there the logs stayed.
            moving = await drill.metric("decode-1", "baton_decode_active_sequences")
            for name in ("decode-1", OLD, "prefill-0"):
                drill.freeze(name) if is_frozen else drill.kill(name)
            await drill.pace(0.01, ["decode-0"])
        drill.thaw_all()
        crowd.check()
        assert moving >= 4
        assert sum(crowd.resumes()) == moving
        await drill.is_whole()


def test_every_state_of_a_page_is_counted() -> None:
    """What `check_stores` adds up is all there is."""
    assert set(PAGE_STATES) == {"free", "granted", "live", "shared", "quarantined"}
