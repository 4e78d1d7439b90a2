"""A local cluster ready to run: plan, key and worker capability put together.

Owns the order of the preparations. Used by `baton up`, `baton demo` and the end-to-end tests.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from baton.capability import CapabilitySigner, Claims, Right
from baton.clock import SystemClock
from baton.launcher.plan import ChildSpec, ClusterOptions, Machine, build_plan, nvme_dir
from baton.launcher.ports import PortReservation
from baton.launcher.rundir import RunDir
from baton.launcher.supervisor import Child, Supervisor

WORKER_CAPABILITY_TTL_S: Final = 30 * 24 * 3600.0
METRICS_TARGETS_FILE: Final = "metrics-targets.json"
SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108  the kernel's tmpfs, not a temporary file


def this_machine(arenas: Path | None = None, disk: Path | None = None) -> Machine:
    """Cores that this process may use, free shared memory and, where NVMe tiers are to be, free
    bytes of the disk.

    What lies in the arena directory `arenas` and in `disk` counts as free: it is used again, or
    replaced.
    """
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.exists() else 0
    if arenas is not None:
        free += sum(path.stat().st_size for path in arenas.glob("arena-*.kv"))
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        shm_free_bytes=free,
        disk_free_bytes=0 if disk is None else _disk_free_bytes(disk),
    )


def _disk_free_bytes(directory: Path) -> int:
    there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    used_again = sum(path.stat().st_size for path in directory.glob(NVME_FILE))
    return shutil.disk_usage(there).free + used_again


def arena_dir(run_dir: Path) -> Path:
    """Where the arena of the cluster in `run_dir` lies: clusters side by side never share one."""
    name = hashlib.blake2b(os.fsencode(run_dir.resolve()), digest_size=4).hexdigest()
    return SHARED_MEMORY / f"baton-{os.getuid()}" / name


NVME_FILE: Final = "nvme-*.kv"
ARENA_FILES: Final = ("arena-*.kv", "arena-*.new", "*.sock")
"""What kvstores put into an arena directory, and leave there: who made it removes it."""


def remove_arena_dir(path: Path) -> None:
    """Remove a stopped cluster's arenas and their directory.

    Nothing goes while a kvstore has one of them; a directory that holds something else stays.
    """
    if any(_is_locked(arena) for arena in path.glob("arena-*.kv")):
        return
    for pattern in ARENA_FILES:
        for file in path.glob(pattern):
            file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.rmdir()


def remove_nvme_files(options: ClusterOptions) -> None:
    """Remove a stopped cluster's NVMe tiers, unless the user chose their place: then what stands
    there is found again. Nothing goes while a kvstore has one of them.
    """
    if options.nvme_dir is None:
        remove_nvme_dir(nvme_dir(options))


def remove_nvme_dir(path: Path) -> None:
    """Remove the files of NVMe tiers and their directory, as `remove_arena_dir` does."""
    if any(_is_locked(file) for file in path.glob(NVME_FILE)):
        return
    for pattern in (NVME_FILE, "nvme-*.new"):
        for file in path.glob(pattern):
            file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.rmdir()


def _is_locked(slots: Path) -> bool:
    """Whether a running kvstore has this arena or NVMe tier."""
    try:
        with slots.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def worker_capability(key: bytes) -> str:
    """A tenant-less capability that lets a worker attach, append and be heard."""
    signer = CapabilitySigner(key, SystemClock())
    claims = Claims(
        tenant=None,
        scope=None,
        rights=frozenset({Right.ATTACH, Right.HEARTBEAT}),
        expiry_wall_s=signer.expiry_after(WORKER_CAPABILITY_TTL_S),
        request_id="worker",
    )
    return signer.sign(claims)


def write_metrics_targets(run_dir: Path, specs: Sequence[ChildSpec]) -> None:
    """Every process's /metrics address, in the form that Prometheus' file_sd_configs read."""
    targets = [
        {"targets": [spec.metrics_address], "labels": {"process": spec.name}}
        for spec in specs
        if spec.metrics_address is not None
    ]
    text = json.dumps(targets, indent=2) + "\n"
    (run_dir / METRICS_TARGETS_FILE).write_text(text, encoding="ascii")


def prepare(
    options: ClusterOptions,
    run_dir: RunDir,
    *,
    on_change: Callable[[Child], None] = lambda child: None,
) -> Supervisor:
    """The supervisor of a cluster that has not been started."""
    ports = PortReservation(options.host)
    specs = build_plan(
        options,
        this_machine(options.arena_dir, nvme_dir(options)),
        next_port=ports.next_port,
        key_file=run_dir.key_file(),
        worker_capability=worker_capability(run_dir.key()),
    )
    ports.release()
    write_metrics_targets(run_dir.path, specs)
    return Supervisor(specs, run_dir.path, on_change=on_change)
