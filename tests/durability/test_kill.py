"""W-kill: a process that writes a log dies at any moment; what it had acked is there.

kill -9 at random moments, kill -9 at chosen system calls (strace delivers the signal at the nth
call of a kind). The page cache outlives the process, so `os` acks count as much as `disk` acks.
Children go on where the one before was killed: recovery is killed as well.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from services.kvstore.state import AckLevel
from tests.durability.child import ENDED, Order, acked
from tests.durability.clients import check
from tests.durability.engine import start
from tests.durability.killing import ForkServer, await_end, fork_server, kill_after, traced
from tests.durability.report import Tell
from tests.durability.simulation import recover_twice
from tests.durability.workload import State

SEGMENT_BYTES: Final = 8192
RANDOM_KILLS: Final = 300
KILLED: Final = -9
CALLS: Final[dict[str, tuple[int, ...]]] = {
    "pwrite64": (1, 2, 3, 5, 9, 20),
    "fdatasync": (1, 2, 3, 7),
    "fsync": (1, 2, 3, 4, 5, 8),
    "ftruncate": (1, 2, 3),
    "fallocate": (1, 2, 3),
    "unlink": (1, 2),
}
"""System calls of the log's threads, and at which of them a child is killed."""


@dataclass(slots=True)
class Grave:
    """A log that children write one after the other, and what each left."""

    path: Path
    base: State = field(default_factory=dict)
    children: int = 0
    killed: int = 0
    tokens: int = 0

    def order(self, seed: int, records_max: int) -> Order:
        """What the next child is to write."""
        self.children += 1
        return Order(
            directory=str(self.log),
            acks=str(self.path / f"acks-{self.children}"),
            seed=seed,
            records_max=records_max,
            segment_bytes=SEGMENT_BYTES,
        )

    @property
    def log(self) -> Path:
        """The log's directory."""
        return self.path / "log"

    def inspect(self, code: int) -> None:
        """Checks what is there after a child that ended with `code`."""
        assert code in (KILLED, ENDED), f"the child ended with {code}"
        self.killed += code == KILLED
        counted = acked(self.path / f"acks-{self.children}", AckLevel.OS)
        found = start(self.log) if self.children % 4 else recover_twice(self.log)
        self.tokens += check(found, self.base, counted)
        self.base = found.state
        if self.children % 10 == 0:
            self.begin_anew()

    def begin_anew(self) -> None:
        """An empty log: they grow, and each child would read all of it."""
        shutil.rmtree(self.log, ignore_errors=True)
        self.log.mkdir(parents=True)
        self.base = {}


@pytest.fixture
def grave(memory_path: Path) -> Grave:
    """An empty log."""
    one = Grave(memory_path)
    one.begin_anew()
    return one


def kill_at_random(server: ForkServer, grave: Grave, seeds: range) -> None:
    """One child for each seed, killed within its first 100 ms."""
    for seed in seeds:
        delay_s = random.Random(seed).uniform(0.01, 0.1)
        code = server.run(grave.order(seed, 4000), kill_after(delay_s))
        try:
            grave.inspect(code)
        except AssertionError as error:
            raise AssertionError(
                f"seed {seed}, killed after {delay_s * 1e3:.1f} ms: {error}"
            ) from error


def test_acked_records_survive_a_few_kills(grave: Grave) -> None:
    """W1 with few children; `make test-more` kills 400."""
    with fork_server() as server:
        kill_at_random(server, grave, range(1000, 1012))
    assert grave.killed > 0
    assert grave.tokens > 0


@pytest.mark.more
@pytest.mark.timeout(300)
def test_acked_records_survive_kills_at_random_moments(grave: Grave, tell: Tell) -> None:
    """W1: a prefix of what was written, with everything acked, at `os` and at `disk`."""
    with fork_server() as server:
        kill_at_random(server, grave, range(RANDOM_KILLS))
    tell(
        f"kill -9 at random moments: {grave.children} runs, {grave.killed} killed while writing,"
        f" {grave.tokens} tokens written, 0 lost acks"
    )
    assert grave.killed > RANDOM_KILLS * 0.8


def kill_at_call(server: ForkServer, grave: Grave, call: str, number: int, seeds: range) -> None:
    """Children that die as they enter the nth call of a kind in one of their threads."""
    with traced(server.process.pid, f"{call}:signal=SIGKILL:when={number}"):
        for seed in seeds:
            code = server.run(grave.order(seed, 400), await_end)
            try:
                grave.inspect(code)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {call} number {number}: {error}") from error


@pytest.mark.more
@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed: 0 of 100 runs")
def test_acked_records_survive_kills_at_chosen_system_calls(grave: Grave, tell: Tell) -> None:
    """Between any two of the log's system calls: the moments a random kill seldom hits."""
    counts = {}
    with fork_server() as server:
        for call, numbers in CALLS.items():
            before = grave.killed
            for number in numbers:
                kill_at_call(server, grave, call, number, range(5))
            counts[call] = grave.killed - before
    died = ", ".join(f"{call} {count}" for call, count in counts.items())
    tell(
        f"kill -9 at chosen system calls: {grave.children} runs, {grave.killed} killed ({died}),"
        f" {grave.tokens} tokens written, 0 lost acks"
    )
    assert grave.children >= 100
    assert all(counts.values()), f"a call that nobody dies in: {counts}"
