"""Filesystems of our own on loop devices, and cutting their power.

Owns the image, the mount and the shutdown ioctl that drops everything unflushed (ext4 and XFS know
the same number). Needs root and loop devices; `missing()` says what is not there.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

GOING_DOWN: Final = 0x8004587D
NO_LOG_FLUSH: Final = struct.pack("<I", 2)
IMAGE_BYTES: Final = {"ext4": 64 << 20, "xfs": 320 << 20}
MAKE: Final = {
    "ext4": ("mkfs.ext4", "-q", "-F", "-E", "nodiscard"),
    "xfs": ("mkfs.xfs", "-q", "-f"),
}
COMMAND_S: Final = 30.0


def missing(kind: str) -> str | None:
    """What this machine lacks for such a filesystem; None when it can be used."""
    if os.geteuid() != 0:
        return "needs root"
    if not Path("/dev/loop-control").exists():
        return "needs loop devices (/dev/loop-control)"
    if shutil.which(MAKE[kind][0]) is None:
        return f"needs {MAKE[kind][0]}"
    return None


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stdout}{done.stderr}"


@dataclass(frozen=True, slots=True)
class LoopFilesystem:
    """A mounted filesystem. `path` is its root."""

    device: str
    path: Path

    def cut_power(self) -> None:
        """Nothing reaches the disk any more, neither data nor the filesystem's own journal."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.ioctl(descriptor, GOING_DOWN, NO_LOG_FLUSH)
        finally:
            os.close(descriptor)

    def mount(self) -> None:
        """Mounts it; the filesystem recovers by its own journal."""
        _run("mount", self.device, str(self.path))

    def unmount(self) -> None:
        """Unmounts it; nobody may have a file open there."""
        _run("umount", str(self.path))


@contextmanager
def loop_filesystem(
    kind: str, directory: Path, image_bytes: int | None = None
) -> Iterator[LoopFilesystem]:
    """A fresh filesystem of this kind, mounted under `directory` until the block ends."""
    image, path = directory / f"{kind}.img", directory / kind
    path.mkdir()
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES[kind] if image_bytes is None else image_bytes)
    _run(*MAKE[kind], str(image))
    shown = subprocess.run(
        ["losetup", "--find", "--show", str(image)],
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )
    assert shown.returncode == 0, f"losetup: {shown.stderr}"
    device = shown.stdout.strip()
    filesystem = LoopFilesystem(device, path)
    try:
        filesystem.mount()
        try:
            yield filesystem
        finally:
            subprocess.run(["umount", "-l", str(path)], capture_output=True, check=False)
    finally:
        _run("losetup", "-d", device)
        image.unlink()
