"""W-power: the power goes at a random moment; what was acked at `disk` is there.

The real log code writes to ext4 and XFS on loop devices; a shutdown ioctl drops all that was not
flushed, journal included; the filesystem is mounted again and the log recovered. The negative
controls take the flushes away and must lose acks, or the method would prove nothing. It tears no
sectors: the simulated disk does (test_simulated_disk.py).
"""

from __future__ import annotations

import random
import select
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from services.kvstore.log.files import sync_directory
from services.kvstore.state import AckLevel
from tests.durability.child import ENDED, FAILED, Order, acked
from tests.durability.clients import check
from tests.durability.engine import start
from tests.durability.killing import ForkServer, await_end, fork_server
from tests.durability.loops import LoopFilesystem, loop_filesystem, missing
from tests.durability.report import Tell
from tests.durability.workload import State

CYCLES: Final = 150
"""Of each filesystem."""
CONTROL_CYCLES: Final = 12
SEGMENT_BYTES: Final = 64 << 10
FIRST_ACK_TURNS: Final = 400
KINDS: Final = ("ext4", "xfs")


@dataclass(slots=True)
class Bench:
    """A log on a filesystem whose power is cut again and again; every tenth time it begins anew."""

    filesystem: LoopFilesystem
    acks: Path
    no_sync: tuple[str, ...] = ()
    base: State = field(default_factory=dict)
    cycles: int = 0
    acked: int = 0
    found: int = 0
    lost: int = 0

    @property
    def log(self) -> Path:
        """The log's directory."""
        return self.filesystem.path / "log"

    def cycle(self, server: ForkServer, seed: int) -> None:
        """One child writes until the power goes; then everything that was acked is looked for."""
        if self.cycles % 10 == 0:
            shutil.rmtree(self.log, ignore_errors=True)
            self.log.mkdir()
            sync_directory(self.filesystem.path)
            self.base = {}
        self.cycles += 1
        self.acks.unlink(missing_ok=True)
        order = Order(
            directory=str(self.log),
            acks=str(self.acks),
            seed=seed,
            records_max=20_000,
            segment_bytes=SEGMENT_BYTES,
            no_sync=self.no_sync,
        )
        counts: list[int] = []
        code = server.run(order, lambda pid: counts.append(self._cut(pid, random.Random(seed))))
        assert code in (ENDED, FAILED), f"the child ended with {code}: no loud end"
        self.filesystem.unmount()
        self.filesystem.mount()
        self._inspect(counts[0])

    def _cut(self, pid: int, rng: random.Random) -> int:
        """Cuts the power and returns what was acked before.

        Not what is acked while the ioctl runs: ext4 may let an fdatasync that is under way return 0
        although its journal is aborted. No client of a host without power hears such an ack.
        """
        # Deadlines that pass: nothing tells when the power goes. One in four goes before any ack.
        if rng.random() < 0.75:
            for _ in range(FIRST_ACK_TURNS):
                if self.acks.exists():
                    break
                select.select([], [], [], 0.005)
        select.select([], [], [], rng.uniform(0.0, 0.1))
        count = acked(self.acks, AckLevel.DISK)
        self.filesystem.cut_power()
        await_end(pid)
        return count

    def _inspect(self, at_least: int) -> None:
        self.acked += at_least
        try:
            found = start(self.log)
            self.found += check(found, self.base, at_least)
        except AssertionError:
            if not self.no_sync:
                raise
            self.lost += 1
            self.cycles += -self.cycles % 10
            return
        self.base = found.state


def run_cycles(kind: str, path: Path, memory: Path, seeds: range, *no_sync: str) -> Bench:
    """Power cuts on one filesystem."""
    with loop_filesystem(kind, path) as filesystem, fork_server() as server:
        bench = Bench(filesystem, memory / "acks", no_sync)
        for seed in seeds:
            try:
                bench.cycle(server, seed)
            except AssertionError as error:
                raise AssertionError(f"{kind}, seed {seed}: {error}") from error
        return bench


def require(kind: str) -> None:
    """Skips where such a filesystem cannot be had, with the count that is missing."""
    why = missing(kind)
    if why is not None:
        pytest.skip(f"NOT TESTED: power cuts on {kind}: {why}")


@pytest.mark.parametrize("kind", KINDS)
def test_disk_acks_survive_a_few_power_cuts(kind: str, tmp_path: Path, memory_path: Path) -> None:
    """W1 with few cuts; `make test-more` has 300."""
    require(kind)
    bench = run_cycles(kind, tmp_path, memory_path, range(9000, 9004))
    assert bench.cycles == 4
    assert bench.acked > 0


@pytest.mark.more
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_disk_acks_survive_power_cuts(
    kind: str, tmp_path: Path, memory_path: Path, tell: Tell
) -> None:
    """W1: a prefix of what was written that holds all that was acked at `disk`."""
    require(kind)
    bench = run_cycles(kind, tmp_path, memory_path, range(CYCLES))
    tell(
        f"power cuts on {kind}: {bench.cycles} cycles, {bench.acked} tokens acked at disk,"
        f" {bench.found} found, 0 lost acks"
    )
    assert bench.acked > CYCLES


@pytest.mark.more
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
def test_power_cuts_lose_acks_where_nothing_is_flushed(
    kind: str, tmp_path: Path, memory_path: Path, tell: Tell
) -> None:
    """The negative control: with fdatasync and fsync doing nothing the same test must fail."""
    require(kind)
    bench = run_cycles(kind, tmp_path, memory_path, range(CONTROL_CYCLES), "fdatasync", "fsync")
    tell(f"negative control on {kind}, no flushes: {bench.lost} logs lost acks, as they must")
    assert bench.lost > 0, "power cuts that lose nothing prove nothing"
