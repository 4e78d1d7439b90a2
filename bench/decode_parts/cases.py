"""What a decode benchmark measures: configurations, their blocks of samples, their quiet ones.

Owns the data and the going round. Never knows what a step is.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

WARM_STEPS: Final = 3
BLOCK_MS: Final = 300.0
BLOCK_STEPS_MIN: Final = 8
PEER_ROUNDS: Final = 3
CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Consecutive steps: their milliseconds, and the cores that other processes took meanwhile."""

    samples_ms: tuple[float, ...]
    foreign_cores: float


@dataclass(slots=True, kw_only=True)
class Case:
    """One configuration and its samples, in milliseconds a step.

    `step()` makes one step and returns its milliseconds. `floor_bytes` is what a step must read
    (None: a peer). `process_id` is the process that does the work, where it is not this one.
    """

    name: str
    context: int
    batch: int
    step: Callable[[], float]
    steps: int | None = None
    floor_bytes: int | None = None
    process_id: int | None = None
    threads: int = 2
    blocks: list[Block] = field(default_factory=list)
    python_shares: list[float] = field(default_factory=list)

    @property
    def is_kernel(self) -> bool:
        """Ours, not a peer's."""
        return self.floor_bytes is not None

    @property
    def kept(self) -> list[Block]:
        """The quietest third of the blocks."""
        quietest = sorted(self.blocks, key=lambda block: block.foreign_cores)
        return quietest[: -(-len(quietest) // 3)]

    @property
    def samples_ms(self) -> list[float]:
        """The samples of the kept blocks."""
        return [sample for block in self.kept for sample in block.samples_ms]

    @property
    def foreign_cores(self) -> float:
        """What other processes took during the kept blocks, on average."""
        return statistics.mean(block.foreign_cores for block in self.kept)

    @property
    def p50_ms(self) -> float:
        """The median step."""
        return statistics.median(self.samples_ms)

    @property
    def p99_ms(self) -> float:
        """The step that one in a hundred exceeds."""
        return float(np.percentile(self.samples_ms, 99))


def measure(cases: Sequence[Case], rounds: int, steps: int) -> None:
    """Add `rounds` blocks to every case, going round; a third as many to the slow peers.

    A block has at most `steps` steps, fewer where they are long.
    """
    for index in range(rounds):
        for case in cases:
            # A peer's block is a whole answer with its prefill.
            if case.is_kernel:
                warm_ms = min(case.step() for _ in range(WARM_STEPS))
                count = min(steps, max(BLOCK_STEPS_MIN, int(BLOCK_MS / warm_ms)))
                case.blocks.append(measure_block(case, count))
            elif index % PEER_ROUNDS == 0:
                case.blocks.append(measure_block(case, case.steps or steps))


def measure_block(case: Case, count: int) -> Block:
    """`count` steps on end."""
    busy, own = cpu_ticks(case.process_id)
    began = time.perf_counter()
    samples = tuple(case.step() for _ in range(count))
    elapsed_ticks = (time.perf_counter() - began) * CLOCK_TICKS
    busy_after, own_after = cpu_ticks(case.process_id)
    foreign = max(0, (busy_after - busy) - (own_after - own)) / elapsed_ticks
    return Block(samples_ms=samples, foreign_cores=foreign)


def cpu_ticks(process_id: int | None = None) -> tuple[int, int]:
    """(busy ticks of the whole machine, ticks of this process and `process_id`) so far."""
    fields = [int(item) for item in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    used = os.times()
    own = int((used.user + used.system) * CLOCK_TICKS)
    if process_id is not None:
        own += process_ticks(process_id)
    return sum(fields) - fields[3] - fields[4], own


def process_ticks(process_id: int) -> int:
    """Ticks that one process has used, in user and kernel mode."""
    # The name in parentheses may hold spaces; what follows it does not.
    after_name = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return int(after_name[11]) + int(after_name[12])


def find(
    cases: Sequence[Case], name: str, context: int, batch: int, threads: int | None = None
) -> Case | None:
    """The case that starts so."""
    for case in cases:
        is_named = case.name.startswith(name) and (case.context, case.batch) == (context, batch)
        if is_named and threads in (None, case.threads):
            return case
    return None


def ratio(slow: Case | None, fast: Case | None) -> float | None:
    """How many times faster; None when either was not measured."""
    return None if slow is None or fast is None else round(slow.p50_ms / fast.p50_ms, 2)
