"""Sessions' records on a disk that fails, fills up and loses power: the old head or the new one.

The same lives as in `test_simulated_disk` and `test_failing_disk`, in which sessions are made,
edited, told again and deleted between the records of the logs that they name.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from services.kvstore.log.session_records import Session
from tests.durability.pool import spread
from tests.durability.report import Tell
from tests.durability.simulation import Tally, run_seed
from tests.durability.test_failing_disk import fail_calls
from tests.durability.workload import Script

SEEDS = 400


def test_the_lives_are_of_sessions_too() -> None:
    """Made, changed and deleted, or the tests here would say nothing."""
    kinds: Counter[str] = Counter()
    for seed in range(20):
        script = Script(has_sessions=True)
        script.extend(random.Random(seed), 14)
        for step in script.steps:
            if isinstance(step.record, Session):
                is_first = step.record.generation == 1
                kinds["ended" if step.record.is_deleted else "new" if is_first else "changed"] += 1
    assert min(kinds.values()) >= 5, kinds
    assert len(kinds) == 3


def cut_lives(seeds: range) -> Tally:
    """Power cuts and kills at some operations of each seed's lives."""
    tally = Tally()
    for seed in seeds:
        run_seed(seed, 6, tally, has_sessions=True)
    return tally


def test_a_session_names_its_old_head_or_its_new_one_after_a_crash() -> None:
    """Wherever power went or the process was killed; what was acked is the newer one."""
    tally = cut_lives(range(12))
    assert tally.acked > tally.crashes, tally


def test_a_full_or_failing_disk_acks_no_session_that_it_has_not() -> None:
    """Every call of a life fails in every way: EIO, ENOSPC, half a write."""
    outcomes, faults = fail_calls([11], has_sessions=True)
    assert not faults, faults[:5]
    assert outcomes["ended"] > 0
    assert outcomes["went on"] > 0


@pytest.mark.more
@pytest.mark.timeout(600)
def test_sessions_survive_many_lives(tell: Tell) -> None:
    """Hundreds of seeds."""
    tallies = spread(cut_lives, [range(first, SEEDS, 8) for first in range(8)])
    crashes, acked = sum(one.crashes for one in tallies), sum(one.acked for one in tallies)
    tell(f"sessions on a simulated disk: {SEEDS} seeds, {crashes} crashes, {acked} acked, 0 lost")
    assert crashes > SEEDS
