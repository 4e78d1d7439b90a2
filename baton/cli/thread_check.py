"""`baton doctor` on decode threads: measured in a child, judged here.

Owns the judgement and its words. One thread keeps its pace beside other work; two are faster only
where nothing else runs, because each of a step's barriers waits for the slower one. Never loads an
engine and never sets anything: the number is the decode worker's `--threads`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from baton.cli.checks import Check, Status

NAME: Final = "decode threads"
TIMEOUT_S: Final = 60.0
BESIDE_P99_MAX: Final = 1.3
"""Two threads are advised where, beside a busy process, their p99 is no more of one thread's."""
GAIN_MIN: Final = 1.1
IDLE_SHARE_MIN: Final = 0.9
SETTING: Final = "--threads (BATON_DECODE_THREADS)"


def measure_threads(model: Path, timeout_s: float = TIMEOUT_S) -> Mapping[str, Any] | str:
    """What `baton.engine.thread_times` found, or one line that says why it did not."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "baton.engine.thread_times", str(model)],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        return f"the measurement was given up: {type(problem).__name__}"
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return lines[-1] if lines else f"the measurement ended with status {done.returncode}"
    found: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def advised_threads(measured: Mapping[str, Any]) -> int:
    """2 where a second thread gains something and loses nothing beside other work, else 1."""
    alone, beside = measured["alone"], measured["beside"]
    is_faster = alone["1"]["p50_ms"] >= GAIN_MIN * alone["2"]["p50_ms"]
    is_steady = beside["2"]["p99_ms"] <= BESIDE_P99_MAX * beside["1"]["p99_ms"]
    return 2 if measured["cpus"] >= 2 and is_faster and is_steady else 1


def check_threads(measured: Mapping[str, Any] | str) -> Check:
    """How many threads a decode worker should have here, and why."""
    if isinstance(measured, str):
        return Check(
            name=NAME,
            status=Status.WARN,
            detail=f"not measured: {measured}",
            remedy="one thread is the choice that is right beside other work",
        )
    advised = advised_threads(measured)
    alone, beside = measured["alone"], measured["beside"]
    parts = [
        f"{threads}: {_times(alone[threads])}, beside a busy process {_times(beside[threads])}"
        for threads in ("1", "2")
    ]
    detail = f"{'; '.join(parts)}. {_why(measured, advised)}"
    idle = measured["idle_cores"] / max(1, measured["cpus"] - 1)
    if idle < IDLE_SHARE_MIN:
        return Check(
            name=NAME,
            status=Status.WARN,
            detail=f"{detail} This machine was not idle meanwhile",
            remedy="measure again with nothing else running: baton doctor",
            figures=measured,
        )
    return Check(name=NAME, status=Status.OK, detail=detail, figures=measured)


def _times(times: Mapping[str, float]) -> str:
    return f"{times['p50_ms']:.1f} ms a step (p99 {times['p99_ms']:.1f})"


def _why(measured: Mapping[str, Any], advised: int) -> str:
    gain = measured["alone"]["1"]["p50_ms"] / measured["alone"]["2"]["p50_ms"]
    if advised == 2:
        return f"Two by {SETTING}: {gain:.1f}x faster, and steady beside other work."
    if measured["cpus"] < 2 or gain < GAIN_MIN:
        return f"One, the default of {SETTING}: a second one gains nothing here."
    loss = measured["beside"]["2"]["p99_ms"] / measured["beside"]["1"]["p99_ms"]
    return (
        f"One, the default of {SETTING}: two are {gain:.1f}x faster on an idle machine, but their "
        f"p99 is {loss:.1f}x one thread's beside other work."
    )
