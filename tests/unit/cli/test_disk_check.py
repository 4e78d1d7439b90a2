"""`baton doctor` says what becomes of the disk: an NVMe tier, a slow one, or none, and why."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from baton.cli import disk_check
from baton.cli.checks import MIB, Status


@pytest.mark.parametrize(
    ("free_mib", "is_direct", "status", "word"),
    [
        (64 * 1024, True, Status.OK, "1024 MiB"),
        (64 * 1024, False, Status.WARN, "no direct I/O"),
        (500, True, Status.WARN, "no NVMe tier"),
        (None, True, Status.WARN, "cannot be looked at"),
    ],
)
def test_verdict_names_the_size_or_the_remedy(
    tmp_path: Path, free_mib: int | None, is_direct: bool, status: Status, word: str
) -> None:
    """Nothing of it fails a machine: KV is recomputed where there is no such tier."""
    free = None if free_mib is None else free_mib * MIB
    found = disk_check.check_disk_tier(tmp_path, free, is_direct=is_direct)
    assert found.status is status
    assert word in found.detail
    assert bool(found.remedy) == (status is not Status.OK)


def test_probe_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the file system says; one that refuses is not taken for one that does not."""
    disk_check.takes_direct_io(tmp_path)
    assert not list(tmp_path.iterdir())
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    assert not disk_check.takes_direct_io(tmp_path)


def test_folder_that_is_not_there_yet_is_judged_by_the_one_above(tmp_path: Path) -> None:
    """`baton up` makes it."""
    assert disk_check.nearest(tmp_path / "run" / "nvme") == tmp_path
    assert disk_check.free_disk(tmp_path) is not None
