"""The equality matrix: one 100-token prompt, its beginning had in every way, on one node and two.

| axis | values |
| --- | --- |
| fork position | 0 to 100: nothing known, every position, the whole prompt (no new token) |
| beginning | computed, found by lookup, forked by name, spliced by pointer, materialised as blobs |
| node | decode where prefill was; decode on a node with another kvstore, nothing shared |
| chunk | 16, 48, whole prompt, and the decode worker's own; every size 1..100 in `test_engine.py` |

Float32, real processes: the tokens, their log probabilities and `cached_tokens` are compared with a
computation in one process. KV that decode wrote is forked at every position in
tests/integration/workers/test_reuse.py; real conversations are in `test_turns.py`; a network of two
namespaces in tests/netns.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.e2e.equality.matrix import PROMPT, Matrix, cells_at
from tests.e2e.equality.nodes import connected
from tests.integration.workers.harness import Direct, Processes

pytestmark = pytest.mark.cluster

LANES = 2
"""Fork positions that are checked at the same time, each in a tenant of its own."""

SAMPLE = (0, 1, 15, 16, 17, 50, 64, 99, 100)


async def check(processes: Processes, direct: Direct, forks: list[int]) -> int:
    """All cells at these positions; how many there were."""
    counts = [0]

    async def lane(number: int) -> None:
        async with connected(processes.at, direct, f"lane-{number}") as nodes:
            matrix = Matrix(nodes)
            for fork in forks[number::LANES]:
                cells = cells_at(fork)
                await matrix.check_fork(fork, cells)
                counts[0] += len(cells)

    async with asyncio.TaskGroup() as group:
        for number in range(LANES):
            group.create_task(lane(number))
    return counts[0]


async def test_a_sample_of_fork_positions(processes: Processes, direct: Direct) -> None:
    """Nothing, one token, around a block's end, the middle, all but one, all."""
    assert await check(processes, direct, list(SAMPLE)) == 4 + 10 * (len(SAMPLE) - 1)


@pytest.mark.more
@pytest.mark.timeout(300)
async def test_every_fork_position(processes: Processes, direct: Direct) -> None:
    """The whole matrix."""
    assert await check(processes, direct, list(range(len(PROMPT) + 1))) == 4 + 10 * len(PROMPT)
