"""O1 to O7 over seeds: two kvstores, late writers, deaths, freezes, lost and doubled messages.

Each failure names its seed, which is all that is needed to see it again; seeds that failed once
stand in `tests/seeds/ownership.txt` and are run for ever.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Final

import pytest
import structlog

from tests.cluster.ownership import Outcome, Ownership
from tests.cluster.ownership_mutants import MUTANTS, Mutant

SEEDS: Final = 5_000
SEEDS_A_CASE: Final = 250
QUICK_SEEDS: Final = 25
MUTANT_SEEDS_MAX: Final = 60
KEPT: Final = Path(__file__).parents[1] / "seeds" / "ownership.txt"


def kept_seeds() -> list[int]:
    """Seeds that found a bug once."""
    lines = KEPT.read_text("utf-8").splitlines()
    return [int(line.split("#")[0]) for line in lines if line.split("#")[0].strip()]


def totals(outcomes: list[Outcome]) -> Counter[str]:
    """Sums of what happened."""
    sums: Counter[str] = Counter()
    for outcome in outcomes:
        found = asdict(outcome)
        sums.update(found.pop("tally"))
        sums.update(found)
    return sums


def require_faults_met_work(sums: Counter[str]) -> None:
    """A simulation in which nothing happens proves nothing."""
    missing = [name for name in sums if not sums[name]]
    assert not missing, f"never happened: {missing} of {dict(sums)}"


def test_nothing_goes_wrong_without_faults() -> None:
    """The simulation itself is sound: every client is answered when nothing breaks."""
    outcome = Ownership(0, faults=0, clients=3).run()
    assert outcome.tally.given_up == 0
    assert outcome.tally.answered >= 2


def test_the_same_seed_is_the_same_run() -> None:
    """A failure's seed is all that is needed."""
    assert Ownership(11).run() == Ownership(11).run()


def test_a_few_seeds() -> None:
    """The ordinary run."""
    outcomes = [Ownership(seed).run() for seed in range(QUICK_SEEDS)]
    require_faults_met_work(totals(outcomes))


@pytest.mark.parametrize("seed", kept_seeds())
def test_a_seed_that_failed_once(seed: int) -> None:
    """What was mended stays mended."""
    Ownership(seed).run()


def run_seeds(first: int) -> Counter[str]:
    """One part, in a process of its own."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    return totals([Ownership(seed).run() for seed in range(first, first + SEEDS_A_CASE)])


@pytest.mark.more
@pytest.mark.timeout(1500)
def test_every_promise_holds_after_every_step(
    record_property: Callable[[str, object], None],
) -> None:
    """5,000 seeds, on all cores; the seed of a failure is in its text."""
    sums: Counter[str] = Counter()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn) as pool:
        for part in pool.map(run_seeds, range(0, SEEDS, SEEDS_A_CASE)):
            require_faults_met_work(part)
            sums.update(part)
    record_property("seeds", f"0 to {SEEDS - 1}: {dict(sums)}")


# A run that stops at a bug leaves its coroutines where they stood.
@pytest.mark.usefixtures("leftovers")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:coroutine.*was never awaited:RuntimeWarning")
@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_planted_bug_is_found(
    mutant: Mutant,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """At least one for each promise; an assertion and a crash are finds alike."""
    mutant.plant(monkeypatch)
    for seed in range(MUTANT_SEEDS_MAX):
        try:
            Ownership(seed, **mutant.options).run()
        except Exception as error:  # noqa: BLE001 - see above
            record_property("found", f"{mutant.name}: {error}")
            return
    pytest.fail(f"{MUTANT_SEEDS_MAX} seeds passed with a bug in the code")
