"""W-simdisk: the real log on a disk that loses, after a power cut, whatever was not flushed.

Every seed writes a script of all record kinds, cuts the power at operations of it and recovers;
then kills the process at some call, goes on in a second life on the same disk and cuts the power
there. A failing seed is run again by `run_seed(SEED, None, Tally())` in simulation.py.
"""

from __future__ import annotations

from typing import Final

import pytest

from tests.durability.pool import spread
from tests.durability.report import Tell
from tests.durability.simulation import Tally, run_seed

SEEDS: Final = 2000
CRASHES: Final = 4
THOROUGH_SEEDS: Final = 60


def run_seeds(seeds: range) -> tuple[Tally, list[str]]:
    """Seeds below THOROUGH_SEEDS crash at every operation, the others at a few."""
    tally, faults = Tally(), []
    for seed in seeds:
        try:
            run_seed(seed, None if seed < THOROUGH_SEEDS else CRASHES, tally)
        except AssertionError as error:
            faults.append(f"seed {seed}: {error}")
    return tally, faults


def test_log_survives_power_cuts_on_a_simulated_disk() -> None:
    """A few seeds; `make test-more` has 2,000."""
    tally, faults = run_seeds(range(THOROUGH_SEEDS, THOROUGH_SEEDS + 60))
    assert not faults, faults[:5]
    assert tally.acked > 0


@pytest.mark.more
@pytest.mark.timeout(600)
def test_log_survives_power_cuts_at_any_operation(tell: Tell) -> None:
    """W1, W2, W4: a prefix, nothing acked lost, nothing torn taken for damage, twice the same."""
    results = spread(run_seeds, [range(SEEDS)[first::16] for first in range(16)])
    faults = [fault for _, part in results for fault in part]
    crashes = sum(tally.crashes for tally, _ in results)
    tell(
        f"simulated disk: {SEEDS} seeds, {crashes} power cuts, {len(faults)} failed; at every"
        f" operation for the first {THOROUGH_SEEDS}"
    )
    assert not faults, faults[:5]


@pytest.mark.parametrize("missing", ["fdatasync", "directory"])
def test_simulated_disk_finds_a_missing_flush(missing: str) -> None:
    """The negative control: without these flushes acks must be lost, or the disk forgives."""
    failed = 0
    for seed in range(40):
        try:
            run_seed(seed, CRASHES, Tally(), ignored=frozenset({missing}))
        except AssertionError:
            failed += 1
    assert failed > 0
