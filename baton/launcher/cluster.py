"""A local cluster ready to run: plan, key and worker capability put together.

Owns the order of the preparations. Used by `baton up`, `baton demo` and the end-to-end tests.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from baton.capability import CapabilitySigner, Claims, Right
from baton.clock import SystemClock
from baton.launcher.plan import ChildSpec, ClusterOptions, Machine, build_plan
from baton.launcher.ports import PortReservation
from baton.launcher.rundir import RunDir
from baton.launcher.supervisor import Child, Supervisor

WORKER_CAPABILITY_TTL_S: Final = 30 * 24 * 3600.0
METRICS_TARGETS_FILE: Final = "metrics-targets.json"
SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108  the kernel's tmpfs, not a temporary file


def this_machine() -> Machine:
    """Cores that this process may use, and free shared memory in bytes."""
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.exists() else 0
    return Machine(cores=len(os.sched_getaffinity(0)), shm_free_bytes=free)


def arena_dir(run_dir: Path) -> Path:
    """Where the arena of the cluster in `run_dir` lies: clusters side by side never share one."""
    name = hashlib.blake2b(os.fsencode(run_dir.resolve()), digest_size=4).hexdigest()
    return SHARED_MEMORY / f"baton-{os.getuid()}" / name


def remove_arena_dir(path: Path) -> None:
    """Remove a stopped cluster's arena directory; one that still holds something stays."""
    with contextlib.suppress(OSError):
        path.rmdir()


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
        this_machine(),
        next_port=ports.next_port,
        key_file=run_dir.key_file(),
        worker_capability=worker_capability(run_dir.key()),
    )
    ports.release()
    write_metrics_targets(run_dir.path, specs)
    return Supervisor(specs, run_dir.path, on_change=on_change)
