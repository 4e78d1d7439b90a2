"""What a stopped cluster leaves in shared memory and on disk: nothing of its own that nobody asked
for, nothing of anybody else's.
"""

from __future__ import annotations

import fcntl
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.launcher.cluster import (
    remove_arena_dir,
    remove_nvme_dir,
    remove_nvme_files,
    this_machine,
)
from baton.launcher.plan import ClusterOptions, nvme_dir


def filled(directory: Path) -> Path:
    """What kvstores of two nodes leave behind."""
    directory.mkdir()
    for node in ("node-0", "node-1"):
        (directory / f"arena-{node}.kv").write_bytes(bytes(8192))
        (directory / f"{node}.sock").touch()
    (directory / "arena-node-0.new").touch()
    return directory


def test_arenas_and_sockets_go_with_their_directory(tmp_path: Path) -> None:
    """They outlive their kvstores, so that who made the directory takes it away."""
    directory = filled(tmp_path / "run")
    remove_arena_dir(directory)
    assert list(tmp_path.iterdir()) == []
    remove_arena_dir(directory)


def test_arena_that_a_kvstore_has_stays_whole(tmp_path: Path) -> None:
    """A kvstore that outlived its launcher goes on serving."""
    directory = filled(tmp_path / "run")
    before = sorted(directory.iterdir())
    with (directory / "arena-node-1.kv").open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        remove_arena_dir(directory)
    assert sorted(directory.iterdir()) == before


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    """The directory may have been chosen by hand."""
    directory = filled(tmp_path / "run")
    (directory / "notes.txt").write_text("mine")
    remove_arena_dir(directory)
    assert [path.name for path in directory.iterdir()] == ["notes.txt"]


def test_arena_of_before_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is used again, or replaced: a start after a crash is not refused for its own arena."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1000))
    directory = filled(tmp_path / "run")
    assert this_machine().shm_free_bytes == 1000
    assert this_machine(directory).shm_free_bytes == 1000 + 2 * 8192


def test_nvme_tier_goes_at_the_end_unless_the_user_chose_its_place(tmp_path: Path) -> None:
    """A gibibyte that nobody asked for does not stay; one with a place of its own is found again,
    and counts as free for the next start.
    """
    own = ClusterOptions(model="m", run_dir=tmp_path, arena_dir=tmp_path, http_port=1, grpc_port=2)
    chosen = replace(own, nvme_dir=tmp_path / "disk")
    for options in (own, chosen):
        nvme_dir(options).mkdir()
        (nvme_dir(options) / "nvme-node-0.kv").write_bytes(bytes(8192))
        assert this_machine().disk_free_bytes == 0
        assert this_machine(disk=nvme_dir(options)).disk_free_bytes > 8192
        remove_nvme_files(options)
    assert not nvme_dir(own).exists()
    assert [path.name for path in nvme_dir(chosen).iterdir()] == ["nvme-node-0.kv"]


def test_nvme_tier_of_a_running_kvstore_stays(tmp_path: Path) -> None:
    """Its lock says so."""
    path = tmp_path / "nvme-node-0.kv"
    path.write_bytes(bytes(10))
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        remove_nvme_dir(tmp_path)
        assert path.exists()
    remove_nvme_dir(tmp_path)
    assert not tmp_path.exists()
