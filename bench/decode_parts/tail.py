"""How steady a step is, beside how steady this machine is: one thread, alone and beside others.

Owns the comparison of tails: the step kernel, a plain read of memory and a read out of cache, each
tuned to last as long as a step, taken in turn, so that all three meet the same minutes. A step
reads memory and computes out of cache; it can be no steadier than the less steady of the two, so
that one is the machine's own tail, and a step's tail is stated as a multiple of it. On a shared
machine conditions change by the minute, so rounds are kept by how steady the two plain reads were
in them, never by the step's own samples; what all rounds gave is stated beside. Never judges.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

import numpy as np

from baton.engine.kernel_weights import WeightMode
from baton.engine.step_kernel_abi import Activation, load
from bench.decode_parts.cases import Block, Case, measure_block
from bench.decode_parts.kernel import BLOCK_TOKENS, KernelRun, Mode

ROUNDS: Final = 24
CACHED_BYTES: Final = 256 << 10
MEMORY_BYTES: Final = 512 << 20
WARM_CALLS: Final = 10
KERNEL: Final = "step kernel"
MEMORY: Final = "plain read of memory"
CACHE: Final = "read out of cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """One kind of work under one condition.

    `ratio`: p99 over p50 of a block, median of the third of the rounds in which the machine's own
    reads were steadiest; `ratio_of_all`: of all rounds. `p50_ms`, `foreign_cores`: of that third.
    """

    name: str
    is_beside_busy: bool
    p50_ms: float
    ratio: float
    ratio_of_all: float
    foreign_cores: float


def measure_tails(path: Path, context: int, steps: int) -> list[Tail]:
    """All three kinds of work, idle and beside a process that takes a core all the time."""
    found = _tails(_cases(path, context), steps)
    with _busy_process() as busy:
        found += _tails(_cases(path, context), steps, busy.pid)
        if not busy.is_alive():
            raise RuntimeError("the busy process ended early; nothing was measured beside it")
    return found


def tail_metrics(tails: list[Tail]) -> dict[str, object]:
    """Every tail, and the kernel's as a multiple of the machine's own."""
    found: dict[str, object] = {}
    for is_beside_busy, suffix in ((False, "_one_thread"), (True, "_beside_busy")):
        those = [one for one in tails if one.is_beside_busy is is_beside_busy]
        by_name = {one.name: one.ratio for one in those}
        of_all = {one.name: one.ratio_of_all for one in those}
        found[f"kernel_p99_over_p50{suffix}_all_rounds"] = round(of_all[KERNEL], 3)
        machine = max(by_name[MEMORY], by_name[CACHE])
        found[f"kernel_p99_over_p50{suffix}"] = round(by_name[KERNEL], 3)
        found[f"memory_p99_over_p50{suffix}"] = round(by_name[MEMORY], 3)
        found[f"cache_p99_over_p50{suffix}"] = round(by_name[CACHE], 3)
        found[f"kernel_tail_over_machine{suffix}"] = round(by_name[KERNEL] / machine, 3)
    return found


def print_tails(tails: list[Tail]) -> None:
    """One line each."""
    print(
        f"{'one thread':33} {'beside':>12} {'p50 ms':>8} {'p99/p50':>8} {'all rounds':>10} "
        f"{'foreign':>7}"
    )
    for one in tails:
        beside = "a busy one" if one.is_beside_busy else "nothing"
        print(
            f"{one.name:33} {beside:>12} {one.p50_ms:8.2f} {one.ratio:8.2f} "
            f"{one.ratio_of_all:10.2f} {one.foreign_cores:7.2f}"
        )


def _cases(path: Path, context: int) -> list[Case]:
    """Each kind of work, one call lasting about as long as a step."""
    mode = Mode(name=KERNEL, weights=WeightMode.PACKED, activation=Activation.INT16, threads=1)
    kernel = KernelRun(path, mode, context // BLOCK_TOKENS + 1).case(context, 1)
    step_ms = _median_ms(kernel.step)
    ffi, library = load()
    whole = ffi.from_buffer(np.ones(MEMORY_BYTES, dtype=np.uint8))
    cached = ffi.from_buffer(np.ones(CACHED_BYTES, dtype=np.uint8))

    def reads(view: object, size: int, times: int) -> Callable[[], float]:
        def step() -> float:
            began = time.perf_counter()
            for _ in range(times):
                library.bt_read_all(view, size)
            return (time.perf_counter() - began) * 1e3

        return step

    share = step_ms / _median_ms(reads(whole, MEMORY_BYTES, 1))
    part = min(MEMORY_BYTES, int(MEMORY_BYTES * share))
    times = max(1, round(step_ms * 100 / _median_ms(reads(cached, CACHED_BYTES, 100))))
    return [
        kernel,
        Case(name=MEMORY, context=context, batch=1, step=reads(whole, part, 1), threads=1),
        Case(
            name=CACHE, context=context, batch=1, step=reads(cached, CACHED_BYTES, times), threads=1
        ),
    ]


def _tails(cases: list[Case], steps: int, busy: int | None = None) -> list[Tail]:
    """`busy`: the process beside; what it takes is no disturbance."""
    for case in cases:
        case.process_id = busy
    for _ in range(ROUNDS):
        for case in cases:
            case.blocks.append(measure_block(case, steps))
    machine = [case for case in cases if not case.is_kernel]
    steadiest = sorted(
        range(ROUNDS), key=lambda index: max(_ratio(case.blocks[index]) for case in machine)
    )[: ROUNDS // 3]
    found = []
    for case in cases:
        kept = [case.blocks[index] for index in steadiest]
        found.append(
            Tail(
                name=case.name,
                is_beside_busy=busy is not None,
                p50_ms=statistics.median(sample for one in kept for sample in one.samples_ms),
                ratio=statistics.median(map(_ratio, kept)),
                ratio_of_all=statistics.median(map(_ratio, case.blocks)),
                foreign_cores=statistics.mean(one.foreign_cores for one in kept),
            )
        )
    return found


def _ratio(block: Block) -> float:
    return float(np.percentile(block.samples_ms, 99)) / statistics.median(block.samples_ms)


def _median_ms(step: Callable[[], float]) -> float:
    for _ in range(WARM_CALLS):
        step()
    return statistics.median(step() for _ in range(WARM_CALLS))


def _spin() -> None:
    """A process that takes one core."""
    while True:
        pass


@contextmanager
def _busy_process() -> Iterator[BaseProcess]:
    busy = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
    busy.start()
    try:
        yield busy
    finally:
        busy.kill()
        busy.join()
