"""W-eio: calls of the disk fail, once or from then on; nothing is acked that is not at its level.

Every call of a life is made to fail in turn (EIO, ENOSPC, a write that takes half) on the simulated
disk, where a failed flush drops its pages as Linux does; then the power goes. The process may go on
(W3: what was not flushed went to a new segment) or end with the error, but not lie. On real disks:
a small filesystem that fills up, and strace failing the calls of a real process.
"""

from __future__ import annotations

import asyncio
import errno
import random
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from services.kvstore.state import AckLevel
from tests.durability.child import FAILED, Order, acked
from tests.durability.clients import check
from tests.durability.crash import as_seen, cut_power
from tests.durability.disk import Fault, SimulatedDisk
from tests.durability.engine import InlineExecutor, live
from tests.durability.killing import await_end, fork_server, traced
from tests.durability.loops import loop_filesystem, missing
from tests.durability.pool import spread
from tests.durability.report import Tell
from tests.durability.simulation import Past, batches_of, prefix_of, recover_twice, scratch
from tests.durability.workload import Script

SEEDS: Final = 24
ALL_CALLS: Final = frozenset(
    ("open", "fallocate", "write", "fdatasync", "fsync", "fsync_directory", "truncate", "unlink")
)
FLUSHES: Final = frozenset({"fdatasync", "fsync", "fsync_directory"})
POWER_CUTS: Final = 4


def kinds_of_fault(at: int, call: str) -> list[Fault]:
    """What can go wrong at one call: once, or from there on."""
    faults = [
        Fault(at=at, code=errno.EIO, calls=ALL_CALLS),
        Fault(at=at, code=errno.EIO, calls=ALL_CALLS, is_lasting=True),
    ]
    if call == "write":
        faults.append(Fault(at=at, code=None, calls=frozenset({"write"})))
    if call in ("write", "fallocate", "open"):
        full = frozenset({"write", "fallocate", "open"})
        faults.append(Fault(at=at, code=errno.ENOSPC, calls=full, is_lasting=True))
    if call in FLUSHES:
        faults.append(Fault(at=at, code=errno.EIO, calls=FLUSHES, is_lasting=True))
    return faults


def failed_life(
    path: Path, script: Script, seed: int, fault: Fault | None
) -> tuple[SimulatedDisk, bool]:
    """One life with a fault; the disk behind it, and whether the writer ended with an error."""
    rng = random.Random(seed)
    disk = SimulatedDisk(path)
    disk.begin_life()
    disk.faults = [] if fault is None else [fault]
    with disk.recording():
        failure = asyncio.run(
            live(path, batches_of(script.steps, rng), disk.note, executor=InlineExecutor())
        )
    return disk, failure is not None


def check_disk(disk: SimulatedDisk, script: Script, rng: random.Random) -> None:
    """After the fault: what a restart finds, and what one after a power cut finds."""
    past = Past(trace=tuple(disk.trace), states=script.states)
    end = len(disk.trace)
    images = [(as_seen(disk.trace), AckLevel.OS)]
    images += [(cut_power(disk.trace, rng), AckLevel.DISK) for _ in range(POWER_CUTS)]
    for files, level in images:
        with scratch() as path:
            for name, data in files.items():
                (path / name).write_bytes(data)
            prefix_of(recover_twice(path), script.states, past.acked(end, level))


def fail_calls(
    seeds: Sequence[int], *, has_sessions: bool = False
) -> tuple[Counter[str], list[str]]:
    """Each call of each seed's life fails in each way: (outcomes, faults)."""
    outcomes: Counter[str] = Counter()
    faults = []
    for seed in seeds:
        script = Script(has_sessions=has_sessions)
        script.extend(random.Random(seed), 14)
        with scratch() as path:
            sites = list(failed_life(path, script, seed, None)[0].sites)
        for fault in [one for at, call in enumerate(sites) for one in kinds_of_fault(at, call)]:
            with scratch() as path:
                disk, has_failed = failed_life(path, script, seed, fault)
            outcomes["ended" if has_failed else "went on"] += 1
            outcomes[f"at {sites[fault.at]}"] += 1
            try:
                check_disk(disk, script, random.Random(seed))
            except AssertionError as error:
                faults.append(f"seed {seed}, {fault}, {sites[fault.at]}: {error}")
    return outcomes, faults


def test_failing_calls_lose_no_ack() -> None:
    """One seed; `make test-more` has two dozen."""
    outcomes, faults = fail_calls([5])
    assert not faults, faults[:5]
    assert outcomes["ended"] > 0
    assert outcomes["went on"] > 0


@pytest.mark.more
@pytest.mark.timeout(300)
def test_every_call_that_fails_loses_no_ack(tell: Tell) -> None:
    """W3 at every call site: after a failure nothing is acked that a power cut takes away."""
    results = spread(fail_calls, [list(range(SEEDS))[first::8] for first in range(8)])
    outcomes = sum((part for part, _ in results), Counter())
    faults = [fault for _, part in results for fault in part]
    sites = ", ".join(
        f"{name[3:]} {outcomes[name]}" for name in sorted(outcomes) if name[:3] == "at "
    )
    count = outcomes["ended"] + outcomes["went on"]
    tell(
        f"failing calls: {count} runs ({sites}), {outcomes['went on']} went on, {outcomes['ended']}"
        f" ended with the error, {len(faults)} lied"
    )
    assert not faults, faults[:5]
    assert all(outcomes[f"at {call}"] for call in ALL_CALLS), f"a call that never failed: {sites}"


# --- real disks -----------------------------------------------------------------------------------


@pytest.mark.more
def test_full_filesystem_ends_the_log_and_loses_no_ack(
    tmp_path: Path, memory_path: Path, tell: Tell
) -> None:
    """ENOSPC of a real filesystem, met when a segment begins."""
    why = missing("ext4")
    if why is not None:
        pytest.skip(f"NOT TESTED: a full filesystem: {why}")
    order = Order(
        directory=str(tmp_path / "ext4" / "log"),
        acks=str(memory_path / "acks"),
        seed=1,
        records_max=1_000_000,
        segment_bytes=1 << 18,
        is_compacting=False,
    )
    with loop_filesystem("ext4", tmp_path, 8 << 20) as filesystem, fork_server() as server:
        log = filesystem.path / "log"
        log.mkdir()
        filler = filesystem.path / "filler"
        free = shutil.disk_usage(filesystem.path).free
        filler.write_bytes(bytes(free - (1 << 20)))
        assert server.run(order, await_end) == FAILED
        filler.unlink()
        with scratch() as path:
            shutil.copytree(log, path, dirs_exist_ok=True)
            kept = check(recover_twice(path), {}, acked(memory_path / "acks", AckLevel.OS))
    tell(f"full filesystem: the writer ended with ENOSPC, {kept} tokens there, 0 lost acks")


REAL_FAULTS: Final = (
    *("fdatasync:error=EIO:when=2", "fdatasync:error=EIO:when=3+", "pwrite64:error=EIO:when=4"),
    *("pwrite64:error=ENOSPC:when=5+", "fallocate:error=ENOSPC:when=2", "fsync:error=EIO:when=1"),
    *("fsync:error=EIO:when=4", "fsync:error=EIO:when=5", "ftruncate:error=EIO:when=1"),
    *("fallocate:error=EOPNOTSUPP:when=1+", "unlink:error=EIO:when=1"),
)
"""What strace does to calls of a real process."""


@pytest.mark.more
@pytest.mark.timeout(120)
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed: 0 faults")
def test_failing_system_calls_of_a_real_process_lose_no_ack(memory_path: Path, tell: Tell) -> None:
    """The same through the kernel's door: the process ends by itself, loudly or done."""
    ends = Counter[int]()
    tokens = 0
    with fork_server() as server:
        for number, injection in enumerate(REAL_FAULTS):
            log, acks = memory_path / f"log-{number}", memory_path / f"acks-{number}"
            log.mkdir()
            order = Order(
                directory=str(log), acks=str(acks), seed=number, records_max=400, segment_bytes=8192
            )
            with traced(server.process.pid, injection):
                ends[server.run(order, await_end)] += 1
            try:
                tokens += check(recover_twice(log), {}, acked(acks, AckLevel.OS))
            except AssertionError as error:
                raise AssertionError(f"{injection}: {error}") from error
    assert set(ends) <= {0, FAILED}, f"a process hung or crashed: {ends}"
    tell(
        f"failing system calls (strace): {len(REAL_FAULTS)} runs, {ends[0]} went on,"
        f" {ends[FAILED]} ended with the error, {tokens} tokens there, 0 lost acks"
    )
