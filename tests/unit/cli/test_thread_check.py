"""`baton doctor` on decode threads: what is advised for which times, and what is said of it."""

from __future__ import annotations

import sys

import pytest

from baton.cli.checks import Status
from baton.cli.thread_check import advised_threads, check_threads, measure_threads


def times(p50_ms: float, p99_ms: float) -> dict[str, float]:
    return {"p50_ms": p50_ms, "p99_ms": p99_ms, "steps": 100}


def measured(alone: tuple, beside: tuple, *, cpus: int = 2, idle: float = 1.0) -> dict:
    return {
        "cpus": cpus,
        "isa": "avx2",
        "idle_cores": idle,
        "alone": {"1": times(*alone[0]), "2": times(*alone[1])},
        "beside": {"1": times(*beside[0]), "2": times(*beside[1])},
    }


# Two cores, measured: 1.4x faster alone, and lost the moment anything else runs.
TWO_CORES = measured(((4.4, 6.3), (3.1, 4.0)), ((4.3, 4.7), (7.5, 16.0)))
MANY_CORES = measured(((4.4, 5.0), (3.1, 3.5)), ((4.4, 5.0), (3.1, 3.6)), cpus=16, idle=15.0)
SLOW_SECOND = measured(((4.4, 5.0), (4.3, 5.0)), ((4.4, 5.0), (4.3, 5.0)))


@pytest.mark.parametrize(("found", "threads"), [(TWO_CORES, 1), (MANY_CORES, 2), (SLOW_SECOND, 1)])
def test_advice_follows_what_was_measured(found, threads):
    """Two only where they gain something and lose nothing beside other work."""
    assert advised_threads(found) == threads


def test_the_choice_is_explained_with_its_figures():
    """A number that nobody explains is changed by the first who is in a hurry."""
    check = check_threads(TWO_CORES)
    assert check.status is Status.OK
    assert "4.4 ms a step" in check.detail
    assert "1.4x faster on an idle machine" in check.detail
    assert "3.4x one thread's beside other work" in check.detail
    assert "BATON_DECODE_THREADS" in check.detail
    assert check.figures == TWO_CORES


def test_a_busy_machine_is_said_to_have_been_busy():
    """Times beside unknown work are no ground for advice."""
    check = check_threads({**TWO_CORES, "idle_cores": 0.2})
    assert check.status is Status.WARN
    assert "not idle" in check.detail


@pytest.mark.parametrize("python", ["/bin/false", "/absent/python"])
def test_what_cannot_be_measured_is_said_in_one_line(tmp_path, monkeypatch, python):
    """No library, no model, no time: one thread is right then."""
    monkeypatch.setattr(sys, "executable", python)
    found = measure_threads(tmp_path / "absent.gguf")
    assert isinstance(found, str)
    assert "\n" not in found
    check = check_threads(found)
    assert check.status is Status.WARN
    assert "one thread" in check.remedy
