"""One seed on the simulated disk: lives, kills and power cuts at any operation, and the verdict.

Owns the promises as assertions (W1, W2, W4 of docs/durability.md): what a start finds is a prefix
of what was submitted, it holds at least what was acked at the level that the crash respects, a
healthy disk is never taken for damaged, and a second start finds the same and writes nothing.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.kvstore.state import AckLevel
from tests.durability.crash import as_seen, cut_power
from tests.durability.disk import Ack, Killed, Operation, SimulatedDisk
from tests.durability.engine import Batch, Found, InlineExecutor, live, start
from tests.durability.report import fast_directory
from tests.durability.workload import LostAckError, Script, State, Step

RECORDS: Final = (6, 14)
LEVELS: Final = (None, AckLevel.OS, AckLevel.OS, AckLevel.DISK, AckLevel.DISK)


@dataclass(slots=True)
class Tally:
    """What a run of seeds came to."""

    seeds: int = 0
    crashes: int = 0
    acked: int = 0
    lost: int = 0


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory for one image."""
    path = fast_directory()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def batches_of(steps: Sequence[Step], rng: random.Random) -> list[Batch]:
    """The steps in groups of 1 to 4, each waiting for some level."""
    batches = []
    rest = list(steps)
    while rest:
        size = rng.randint(1, 4)
        batches.append(Batch(rest[:size], rng.choice(LEVELS), is_freeing=rng.random() < 0.4))
        del rest[:size]
    return batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What happened to a disk up to now. `states[k]` is what a reader may see of the first k
    records; `first` is the last life's first operation, before which `acked_before` were acked.
    """

    trace: tuple[Operation, ...]
    states: Sequence[State]
    first: int = 0
    kept: int = 0
    acked_before: int = 0

    def acked(self, end: int, level: AckLevel) -> int:
        """Records acked at `level` (or a stronger one) before operation `end`."""
        own = [
            self.kept + item.count
            for item in self.trace[self.first : end]
            if isinstance(item, Ack) and item.level >= level
        ]
        return max([self.acked_before, *own])


def run_life(
    disk: SimulatedDisk, steps: Sequence[Step], rng: random.Random, *, kill_at: int | None = None
) -> int:
    """Lets the real log write records to the disk; returns the life's first operation."""
    first = disk.begin_life(kill_at=kill_at)
    is_clean = rng.random() < 0.3
    work = live(
        disk.directory,
        batches_of(steps, rng),
        disk.note,
        executor=InlineExecutor(),
        is_clean=is_clean,
    )
    with disk.recording():
        try:
            asyncio.run(work)
        except* Killed:
            assert kill_at is not None
    assert as_seen(disk.trace) == disk.files(), "something writes past the recorded calls"
    return first


def prefix_of(found: Found, states: Sequence[State], at_least: int) -> int:
    """How many records were found; raises where it is no prefix, or too short."""
    assert not found.is_damage_reported, "a crash was taken for damage"
    for count in range(len(states) - 1, -1, -1):
        if states[count] == found.state:
            if count < at_least:
                raise LostAckError(f"{at_least} records were acked, {count} are there")
            return count
    raise AssertionError("what was found is not a prefix of what was written")


def recover_twice(directory: Path) -> Found:
    """A start, and another one that must find the same and write nothing."""
    found = start(directory)
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    again = start(directory)
    assert again.state == found.state, "a second start finds something else"
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == files
    assert again.torn_bytes == 0, "a torn tail is cut once"
    return found


def check_power_cut(past: Past, end: int, rng: random.Random, tally: Tally) -> None:
    """Recovers one image of a power cut before operation `end` of the trace."""
    acked = past.acked(end, AckLevel.DISK)
    tally.crashes += 1
    tally.acked += acked
    with scratch() as path:
        for name, data in cut_power(past.trace[:end], rng).items():
            (path / name).write_bytes(data)
        found = recover_twice(path) if tally.crashes % 4 == 0 else start(path)
    prefix_of(found, past.states, acked)


def crash(past: Past, rng: random.Random, crashes: int | None, tally: Tally) -> None:
    """Power cuts at `crashes` random operations of the last life; None: at each."""
    ends = range(past.first, len(past.trace) + 1)
    chosen = ends if crashes is None else sorted(rng.choices(ends, k=crashes))
    for end in chosen:
        check_power_cut(past, end, rng, tally)


def run_seed(
    seed: int,
    crashes: int | None,
    tally: Tally,
    ignored: frozenset[str] = frozenset(),
    *,
    has_sessions: bool = False,
) -> None:
    """A life and power cuts in it. Then the same life again, killed at some call, a second life on
    that disk, and power cuts in the second. Flushes that are `ignored` do nothing.
    """
    rng = random.Random(seed)
    tally.seeds += 1
    script = Script(has_sessions=has_sessions)
    script.extend(rng, rng.randint(*RECORDS))
    with scratch() as path:
        disk = SimulatedDisk(path, ignored)
        run_life(disk, script.steps, rng)
        calls = len(disk.sites)
        crash(Past(trace=tuple(disk.trace), states=script.states), rng, crashes, tally)
    with scratch() as path:
        disk = SimulatedDisk(path, ignored)
        run_life(disk, script.steps, rng, kill_at=rng.randrange(calls))
        past = second_life(disk, script, rng)
        crash(past, rng, crashes, tally)


def second_life(disk: SimulatedDisk, script: Script, rng: random.Random) -> Past:
    """The process was killed, not the machine: what it had written is there, on disk or not. What
    the next life states as durable must be so.
    """
    before = Past(trace=tuple(disk.trace), states=script.states)
    end = len(disk.trace)
    with scratch() as path:
        shutil.copytree(disk.directory, path, dirs_exist_ok=True)
        found = recover_twice(path)
    kept = prefix_of(found, script.states, before.acked(end, AckLevel.OS))
    following = script.following(found.state)
    following.extend(rng, rng.randint(*RECORDS))
    first = run_life(disk, following.steps, rng)
    return Past(
        trace=tuple(disk.trace),
        states=[*script.states[: kept + 1], *following.states[1:]],
        first=first,
        kept=kept,
        acked_before=before.acked(end, AckLevel.DISK),
    )
