"""Whether this machine's disk suits an NVMe tier: its room, and whether it takes direct I/O.

Owns the check of `baton doctor`. Leaves nothing on the disk: what it opens has no name.
"""

from __future__ import annotations

import mmap
import os
import shutil
from pathlib import Path
from typing import Final

from baton.cli.checks import MIB, Check, Status
from baton.launcher.plan import NVME_BYTES_MAX, NVME_BYTES_MIN, NVME_SHARE_OF_FREE

NAME: Final = "NVMe tier"
PROBE_BYTES: Final = 4096


def nearest(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(path for path in (folder, *folder.absolute().parents) if path.is_dir())


def free_disk(folder: Path) -> int | None:
    """Free bytes of its file system; None when they cannot be known."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def takes_direct_io(folder: Path) -> bool:
    """Whether a file there can be written and read past the page cache."""
    try:
        descriptor = os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    with mmap.mmap(-1, PROBE_BYTES) as page:
        try:
            is_written = os.pwritev(descriptor, [page], 0) == PROBE_BYTES
            return is_written and os.preadv(descriptor, [page], 0) == PROBE_BYTES
        except OSError:
            return False
        finally:
            os.close(descriptor)


def check_disk_tier(folder: Path, free_bytes: int | None, *, is_direct: bool) -> Check:
    """What `baton up` would make of the disk that its run directory is on."""
    if free_bytes is None:
        return Check(
            name=NAME,
            status=Status.WARN,
            detail=f"{folder} cannot be looked at: no NVMe tier",
            remedy="give `baton up --nvme-dir` a directory of a local disk",
        )
    size = min(NVME_BYTES_MAX, int(free_bytes * NVME_SHARE_OF_FREE))
    if size < NVME_BYTES_MIN:
        return Check(
            name=NAME,
            status=Status.WARN,
            detail=f"{folder} has {free_bytes // MIB} MiB free: no NVMe tier",
            remedy="free disk space, or give `baton up --nvme-dir` another disk",
        )
    room = f"{free_bytes // MIB} MiB free for {size // MIB} MiB"
    if not is_direct:
        return Check(
            name=NAME,
            status=Status.WARN,
            detail=f"{folder} has {room}, but takes no direct I/O: slower, through the page cache",
            remedy="give `baton up --nvme-dir` a directory of a local disk (ext4, XFS)",
        )
    return Check(name=NAME, status=Status.OK, detail=f"{folder} has {room}, direct I/O")
