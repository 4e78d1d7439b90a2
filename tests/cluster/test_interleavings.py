"""Opens, commits, seals, takes, appends, cancels and lease ends in random order, by seed.

No token is lost, doubled or out of order; pages are conserved at every sweep; nothing an old
generation does has an effect; in the end nothing is held.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.cluster.loop import SimulatedLoop
from tests.cluster.simulation import Report, Simulation


def simulate(seed: int, *, loss: float) -> Report:
    """One run on a loop of its own."""

    async def run() -> Report:
        return await Simulation(seed, loss=loss).run()

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(run())


def test_nothing_is_lost_without_faults() -> None:
    """The simulation itself is sound: every answer is whole when nothing breaks."""

    async def run() -> Report:
        return await Simulation(0, loss=0.0, faults=0).run()

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        report = runner.run(run())
    assert report.failed == 0
    assert report.completed + report.cancelled == 6


def test_same_seed_gives_the_same_run() -> None:
    """A failure's seed is all that is needed to see it again."""
    assert simulate(7, loss=0.02) == simulate(7, loss=0.02)


@pytest.mark.parametrize("first", range(0, 200, 25))
def test_every_interleaving_keeps_the_promises(first: int) -> None:
    """25 seeds a case; the seed of a failure stands in its traceback."""
    for seed in range(first, first + 25):
        simulate(seed, loss=(0.0, 0.01, 0.05)[seed % 3])
