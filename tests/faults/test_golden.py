"""A damaged weight while serving: the check sees it, nothing computed with it is believed, and the
worker goes over to torch, or ends where torch is what is damaged.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from typing import Final

import pytest

from baton.testing.cluster import RunningCluster
from tests.faults.drill import Drill, drill_on, drilled_cluster, prompt_of, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

TOKENS: Final = 60
DAMAGE_AT_TOKEN: Final = 8
PACE_S: Final = 0.05
INTERVAL_S: Final = "0.5"
# The sign and exponent of the first number of the embedding, which is the head, too.
FLIP: Final = "flip_byte:3:once"
CHECKS: Final = "baton_worker_golden_checks_total"
DEGRADED: Final = "baton_worker_degraded"


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Workers that check themselves all the time."""
    names = [f"BATON_{role}_GOLDEN_INTERVAL_S" for role in ("PREFILL", "DECODE")]
    os.environ.update(dict.fromkeys(names, INTERVAL_S))
    try:
        with drilled_cluster(tmp_path_factory.mktemp("golden"), "--kernel", "native") as cluster:
            yield cluster
    finally:
        for name in names:
            os.environ.pop(name, None)


@pytest.fixture
async def drill(checked: RunningCluster) -> AsyncIterator[Drill]:
    """Whole and at rest before and after."""
    async with drill_on(checked) as drill:
        yield drill


async def passes(drill: Drill, name: str, rounds: int) -> None:
    """Waits for so many more checks."""
    wanted = await drill.metric(name, CHECKS) + rounds

    async def is_met() -> bool:
        return await drill.metric(name, CHECKS) >= wanted

    await until(is_met, 60.0, f"{rounds} checks of {name}")


async def test_checks_pass_while_a_stream_runs(drill: Drill) -> None:
    """They take turns with the steps and change no token."""
    prompt = prompt_of(901)
    expected = await drill.ask(prompt, tokens=TOKENS)
    await drill.pace(0.02)
    before = await drill.metric("decode-0", CHECKS)
    outcome = await drill.ask(prompt, tokens=TOKENS)
    await passes(drill, "decode-0", 2)
    assert outcome.token_ids == expected.token_ids
    assert await drill.metric("decode-0", CHECKS) > before
    assert await drill.metric("decode-0", DEGRADED) == 0.0


async def test_a_damaged_kernel_leaves_its_place_to_torch(drill: Drill) -> None:
    """The stream goes on, what was computed since the last pass is not believed, and the worker
    says that it is degraded.
    """
    prompt = prompt_of(902)
    expected = await drill.ask(prompt, tokens=TOKENS)

    async def damage(count: int) -> None:
        if count == DAMAGE_AT_TOKEN:
            await drill.arm("decode-0", f"worker.native_weights:{FLIP}")

    await drill.pace(PACE_S)
    outcome = await drill.ask(prompt, tokens=TOKENS, is_cached=True, on_token=damage)
    assert outcome.is_whole, outcome
    assert len(outcome.token_ids) == TOKENS

    async def is_degraded() -> bool:
        return await drill.metric("decode-0", DEGRADED) == 1.0

    await until(is_degraded, 60.0, "the worker degraded")
    await drill.disarm("decode-0")
    assert "kv_distrusted" in drill.cluster.log("kvstore-0")
    assert "worker_degraded" in drill.cluster.log("decode-0")
    # Torch computes what the kernel computed before the damage.
    assert (await drill.ask(prompt, tokens=TOKENS)).token_ids == expected.token_ids
    # What was written in between serves nobody: with the cache and without it is the same answer.
    longer = [*prompt, *outcome.token_ids]
    fresh = await drill.ask(longer, tokens=24)
    cached = await drill.ask(longer, tokens=24, is_cached=True)
    assert cached.cached_tokens > 0
    assert cached.token_ids == fresh.token_ids
    await drill.settles()


async def test_a_worker_whose_torch_is_damaged_ends_and_comes_back_checked(drill: Drill) -> None:
    """It leaves before it serves anything more; a new start reads the weights anew and passes."""
    prompt = prompt_of(903)
    expected = await drill.ask(prompt, tokens=24)
    pid = drill.pid("prefill-0")
    await drill.arm("prefill-0", f"worker.torch_weights:{FLIP}")

    async def is_another() -> bool:
        return drill.pid("prefill-0") != pid

    await until(is_another, 60.0, "the worker ended and was started again")
    await drill.is_whole()
    assert "golden check failed while serving" in drill.cluster.log("prefill-0")
    assert (await drill.ask(prompt, tokens=24)).token_ids == expected.token_ids
