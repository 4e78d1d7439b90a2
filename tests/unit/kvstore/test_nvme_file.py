"""The NVMe file: made whole or not at all, one owner, found again, other files are other ids."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from baton.errors import StartupError
from baton.kv.crc import ByteArray
from baton.kv.layout import KvDtype, KvGeometry
from services.kvstore.slot_files import DATA_OFFSET
from services.kvstore.tiers import nvme_file
from services.kvstore.tiers.nvme_file import NvmeFile, NvmeSpec

GEOMETRY = KvGeometry(
    layers=2, kv_heads=2, head_dim=4, head_dim_v=4, block_tokens=8, dtype=KvDtype.F32
)
SLOT = GEOMETRY.slot_bytes


def spec(directory: Path, slots: int = 8, node_id: str = "n0") -> NvmeSpec:
    """A small file."""
    return NvmeSpec(
        directory=directory,
        node_id=node_id,
        nvme_bytes=slots * SLOT,
        geometry=GEOMETRY,
        kv_digest=bytes(16),
        file_id=bytes(range(16)),
    )


def buffers(count: int, fill: int = 0) -> list[ByteArray]:
    """Page-aligned buffers of one slot each, apart from each other."""
    found = []
    for index in range(count):
        buffer = np.frombuffer(mmap.mmap(-1, SLOT), dtype=np.uint8)
        buffer[:] = fill + index
        found.append(buffer)
    return found


@pytest.fixture(params=["direct", "buffered"])
def file(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[NvmeFile]:
    """Eight slots, past the page cache where this file system allows it and through it."""
    if request.param == "buffered":
        monkeypatch.setattr(nvme_file, "_open_direct", lambda *_: None)
    made = NvmeFile.open(spec(tmp_path))
    yield made
    made.remove()
    assert not list(tmp_path.iterdir())


def test_file_is_allocated_whole_private_and_headed(file: NvmeFile) -> None:
    """A full disk is found at the start, and nobody else reads other people's KV."""
    stat = file.spec.path.stat()
    assert stat.st_size == DATA_OFFSET + 8 * SLOT
    assert stat.st_blocks * 512 >= stat.st_size
    assert stat.st_mode & 0o777 == 0o600
    head = file.spec.path.read_bytes()[:DATA_OFFSET]
    assert (head[:4], head[8:24]) == (b"BKN1", bytes(range(16)))


def test_runs_of_slots_come_back_as_they_were_written(file: NvmeFile) -> None:
    """Several slots from several pages in one call, and a part of them in another."""
    file.write_run(2, buffers(4, fill=10))
    file.flush()
    found = buffers(2)
    file.read_run(3, found)
    assert [set(buffer.tolist()) for buffer in found] == [{11}, {12}]


@pytest.mark.parametrize("size", [512, SLOT, SLOT + 512])
def test_transfers_that_stop_early_go_on_from_there(
    file: NvmeFile, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """The kernel may take or give less than was asked, also in the middle of a buffer."""
    _limit(monkeypatch, size)
    file.write_run(0, buffers(3, fill=20))
    found = buffers(3)
    file.read_run(0, found)
    assert [set(buffer.tolist()) for buffer in found] == [{20}, {21}, {22}]


def _limit(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    real_write, real_read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda d, b, o: real_write(d, [b[0][:size]], o))
    monkeypatch.setattr(os, "preadv", lambda d, b, o: real_read(d, [b[0][:size]], o))


def test_file_that_ends_early_is_an_error_and_not_old_bytes(file: NvmeFile) -> None:
    """Somebody cut it: a read of what is gone says so."""
    os.truncate(file.spec.path, DATA_OFFSET + 3 * SLOT)
    with pytest.raises(OSError, match="ends"):
        file.read_run(2, buffers(2))


def test_file_of_a_dead_store_is_found_again_with_its_slots(tmp_path: Path) -> None:
    """Same id, same bytes; slot generations of this life begin above all of the one before."""
    first = NvmeFile.open(spec(tmp_path))
    first.write_run(5, buffers(1, fill=7))
    first.flush()
    first.close()
    again = NvmeFile.open(replace(spec(tmp_path), file_id=bytes(16)))
    found = buffers(1)
    again.read_run(5, found)
    assert set(found[0].tolist()) == {7}
    assert (again.file_id, again.is_reattached) == (bytes(range(16)), True)
    assert again.generation_floor == 1 << 32
    again.close()
    third = NvmeFile.open(spec(tmp_path))
    assert third.generation_floor == 2 << 32
    third.remove()


@pytest.mark.parametrize("change", ["slots", "digest", "geometry", "header", "cut", "starts"])
def test_file_that_is_anything_else_is_made_anew_under_another_id(
    tmp_path: Path, change: str
) -> None:
    """References to it are misses: nothing of another model, shape or damaged header is served."""
    first = NvmeFile.open(spec(tmp_path))
    first.close()
    wanted = replace(spec(tmp_path), file_id=b"\xff" * 16)
    path = first.spec.path
    if change == "slots":
        wanted = replace(wanted, nvme_bytes=6 * SLOT)
    elif change == "digest":
        wanted = replace(wanted, kv_digest=b"\1" * 16)
    elif change == "geometry":
        wanted = replace(wanted, geometry=replace(GEOMETRY, dtype=KvDtype.BF16))
    elif change == "cut":
        os.truncate(path, path.stat().st_size - 1)
    else:
        at = 72 if change == "starts" else 30
        with path.open("r+b") as raw:
            raw.seek(at)
            raw.write(b"\xff\xff\xff\xff")
    made = NvmeFile.open(wanted)
    assert (made.file_id, made.is_reattached) == (b"\xff" * 16, False)
    assert path.stat().st_size == wanted.header.file_bytes
    made.remove()


def test_file_of_a_running_store_is_refused(tmp_path: Path) -> None:
    """The flock tells whose it is; the message names the settings."""
    first = NvmeFile.open(spec(tmp_path))
    with pytest.raises(StartupError, match="running kvstore has the NVMe") as refused:
        NvmeFile.open(spec(tmp_path))
    assert "--nvme-dir" in (refused.value.hint or "")
    first.remove()


@pytest.mark.parametrize("slots", [0, 1, 1 << 40])
def test_size_that_cannot_be_had_is_refused_before_anything_is_there(
    tmp_path: Path, slots: int
) -> None:
    """The message names the setting and what would do."""
    with pytest.raises(StartupError) as refused:
        NvmeFile.open(spec(tmp_path, slots))
    assert "--nvme-bytes" in f"{refused.value.message} {refused.value.hint}"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_disk_that_fails_while_the_file_is_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """No half file under any name, and a message with a remedy."""

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(StartupError) as refused:
        NvmeFile.open(spec(tmp_path))
    assert "--nvme-" in (refused.value.hint or "")
    assert not list(tmp_path.iterdir())


def test_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """A file where the directory should be."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(StartupError) as refused:
        NvmeFile.open(spec(tmp_path / "file"))
    assert "--nvme-dir" in (refused.value.hint or "")


def test_link_in_the_place_of_the_file_is_refused(tmp_path: Path) -> None:
    """It could point at anything."""
    (tmp_path / "other").write_bytes(b"precious")
    spec(tmp_path).path.symlink_to(tmp_path / "other")
    with pytest.raises(StartupError, match="not an NVMe file"):
        NvmeFile.open(spec(tmp_path))
    assert (tmp_path / "other").read_bytes() == b"precious"
