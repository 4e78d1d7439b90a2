"""How long a decode step takes with one thread and with two, alone and beside other work.

Owns the measurement, which takes a few seconds: the step kernel of a model over pages of its own,
and a child process that keeps one core busy. Prints one JSON object; judges nothing, that is
`baton doctor`'s, which runs this as a child because it never loads an engine itself.

    python -m baton.engine.thread_times MODEL
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np

from baton.engine.config import read_config
from baton.engine.kv_pages import KvPages
from baton.engine.step_kernel import KernelOptions, StepKernel
from baton.errors import ServiceError
from baton.kv.layout import KvDtype

THREADS: Final = (1, 2)
BLOCK_TOKENS: Final = 16
CONTEXT: Final = 128
WARM_STEPS: Final = 5
TURNS: Final = 3
TURN_S: Final = 0.15
STEPS_MIN: Final = 5
SPIN: Final = "while True: pass"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Milliseconds a step."""

    p50_ms: float
    p99_ms: float
    steps: int


def measure(path: Path) -> dict[str, object]:
    """Times by number of threads: `alone` and `beside` a busy process. Raises ServiceError."""
    kernels = {threads: _kernel(path, threads) for threads in THREADS}
    try:
        idle_before = _idle_ticks()
        began_s = time.perf_counter()
        alone = _round_robin(kernels)
        idle_cores = (_idle_ticks() - idle_before) / os.sysconf("SC_CLK_TCK")
        idle_cores /= time.perf_counter() - began_s
        busy = subprocess.Popen([sys.executable, "-c", SPIN])
        try:
            beside = _round_robin(kernels)
        finally:
            busy.kill()
            busy.wait()
    finally:
        for kernel in kernels.values():
            kernel.close()
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "isa": kernels[THREADS[0]].isa.value,
        "idle_cores": round(idle_cores, 2),
        "alone": {str(threads): asdict(times) for threads, times in alone.items()},
        "beside": {str(threads): asdict(times) for threads, times in beside.items()},
    }


def _kernel(path: Path, threads: int) -> StepKernel:
    config = read_config(path)
    pages = KvPages.allocate(
        config.kv_geometry(BLOCK_TOKENS, KvDtype.BF16), CONTEXT // BLOCK_TOKENS + 1
    )
    context_max = min(config.max_context, 2 * CONTEXT)
    options = KernelOptions(threads=threads, batch_max=1, max_context=context_max)
    return StepKernel(path, pages, options)


def _round_robin(kernels: dict[int, StepKernel]) -> dict[int, StepTimes]:
    """In turns, so that a passing disturbance does not fall on one of them."""
    samples: dict[int, list[float]] = {threads: [] for threads in kernels}
    for _ in range(TURNS):
        for threads, kernel in kernels.items():
            samples[threads] += _steps(kernel)
    return {threads: _times(found) for threads, found in samples.items()}


def _steps(kernel: StepKernel) -> list[float]:
    table = range(kernel.pages.page_count)
    position = min(CONTEXT, kernel.max_context - 1)
    found: list[float] = []
    for _ in range(WARM_STEPS):
        kernel.step([0], [position], [table], needs_logits=False)
    deadline_s = time.perf_counter() + TURN_S
    while time.perf_counter() < deadline_s or len(found) < STEPS_MIN:
        began_s = time.perf_counter()
        kernel.step([0], [position], [table], needs_logits=False)
        found.append((time.perf_counter() - began_s) * 1e3)
    return found


def _times(samples: Sequence[float]) -> StepTimes:
    return StepTimes(
        p50_ms=round(float(np.percentile(samples, 50)), 3),
        p99_ms=round(float(np.percentile(samples, 99)), 3),
        steps=len(samples),
    )


def _idle_ticks() -> int:
    """Ticks that all cores have been idle."""
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", maxsplit=1)[0].split()
    return int(fields[4]) + int(fields[5])


def main() -> None:
    """Measure and print; status 1 with one line where there is no kernel for the model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model", type=Path)
    try:
        measured = measure(parser.parse_args().model)
    except ServiceError as error:
        sys.exit(error.message)
    sys.stdout.write(json.dumps(measured) + "\n")


if __name__ == "__main__":
    main()
