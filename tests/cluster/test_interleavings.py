"""Opens, commits, seals, takes, appends, cancels and lease ends in random order, by seed.

No token is lost, doubled or out of order; pages are conserved at every sweep; nothing an old
generation does has an effect; in the end nothing is held.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import pytest

from tests.cluster.loop import SimulatedLoop
from tests.cluster.mutants import MUTANTS, QUIET, Plant
from tests.cluster.parts import Report
from tests.cluster.simulation import Simulation

LOSSES: Final = (0.0, 0.01, 0.05)
"""The share of lost messages, by seed."""

MUTANT_SEEDS_MAX: Final = 40
QUICK_SEEDS: Final = 50
"""Seeds of an ordinary run; the rest is marked more."""


def simulate(seed: int, **options: Any) -> Report:
    """One run on a loop of its own."""

    async def run() -> Report:
        return await Simulation(seed, **{"loss": LOSSES[seed % len(LOSSES)], **options}).run()

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(run())


def test_nothing_is_lost_without_faults() -> None:
    """The simulation itself is sound: every answer is whole when nothing breaks."""
    report = simulate(0, loss=0.0, faults=0)
    assert report.failed == 0
    assert report.completed + report.cancelled == 6


@pytest.mark.parametrize("seed", range(20))
def test_clients_that_leave_have_everything_freed_within_a_second(seed: int) -> None:
    """A cancel is a fence, then a release; no lease has to run out for it."""
    report = simulate(seed, loss=0.0, faults=0, leaving=1.0, rest_s=1.0)
    assert report.failed == 0


def test_same_seed_gives_the_same_run() -> None:
    """A failure's seed is all that is needed to see it again."""
    assert simulate(7) == simulate(7)


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=[] if first < QUICK_SEEDS else [pytest.mark.more])
        for first in range(0, 200, 25)
    ],
)
def test_every_interleaving_keeps_the_promises(first: int) -> None:
    """25 seeds a case; the seed of a failure stands in its traceback."""
    seen = [simulate(seed) for seed in range(first, first + 25)]
    assert sum(report.completed for report in seen) > 25
    assert sum(report.resumed for report in seen) > 0, "faults did meet running answers"
    assert sum(report.stale_refused for report in seen) > 0


# A run that stops at a bug leaves its coroutines where they stood.
@pytest.mark.usefixtures("leftovers")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:coroutine.*was never awaited:RuntimeWarning")
@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.__name__ for mutant in MUTANTS])
def test_planted_fault_is_found(mutant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulation counts only if it fails on a known bug."""
    mutant(monkeypatch)
    for seed in range(MUTANT_SEEDS_MAX):
        # Whatever comes of a planted bug, an assertion or a crash, is a find.
        try:
            simulate(seed, **QUIET.get(mutant, {}))
        except (Exception, BaseExceptionGroup):  # noqa: BLE001 - see above
            return
    pytest.fail(f"{MUTANT_SEEDS_MAX} seeds passed with a bug in the code")
