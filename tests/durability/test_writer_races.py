"""Two threads, one segment: what one of them gives up while the other is at work with it.

Each test holds the threads at the moment that random faults meet once in a hundred runs.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from services.kvstore.log.format import RecordAddress, RecordType
from services.kvstore.log.groups import Numbered, group_of
from services.kvstore.log.reader import scan_directory
from services.kvstore.log.segments import SegmentWriter
from services.kvstore.log.store_records import Close, CloseReason

SEGMENT_BYTES = 2048


def records(first_lsn: int, count: int) -> list[Numbered]:
    """Records told apart by their LSNs."""
    payload = Close(reason=CloseReason.EXPIRED).encode()
    return [
        Numbered(
            lsn=lsn,
            kind=RecordType.CLOSE,
            payload=payload,
            address=RecordAddress(log_id=bytes([1]) * 16, generation=1, position=lsn),
        )
        for lsn in range(first_lsn, first_lsn + count)
    ]


def new_writer(directory: Path) -> SegmentWriter:
    """A writer of an empty directory."""
    return SegmentWriter(
        directory, store_id=bytes(16), first_sequence=1, segment_bytes=SEGMENT_BYTES
    )


def lsns(directory: Path) -> set[int]:
    """What is read back."""
    scan = scan_directory(directory)
    assert scan.damaged_from is None
    return {item.header.lsn for segment in scan.segments for item in segment.records}


def refuse(*_args: object) -> None:
    """A disk that says no."""
    raise OSError(errno.EIO, "refused")


def test_a_group_whose_beginning_was_given_up_is_written_whole(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it was written, no room for the other half; then the flush of the first failed."""
    writer = new_writer(memory_path)
    writer.write(group_of(records(2, 3), durable_lsn=0))
    long = group_of(records(6, 20), durable_lsn=0)
    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(OSError, match="refused"):
            writer.write(long)
    assert long.done > 0
    with monkeypatch.context() as broken:
        broken.setattr(os, "fdatasync", refuse)
        with pytest.raises(OSError, match="refused"):
            writer.flush()
    writer.rewrite()
    writer.write(long)
    writer.flush()
    assert lsns(memory_path) == set(range(1, 26))


def test_a_segment_given_up_while_it_is_flushed_is_not_durable(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name may be gone when the flush returns: what it held counts where it stands now."""
    writer = new_writer(memory_path)
    writer.write(group_of(records(2, 3), durable_lsn=0))
    real = os.fdatasync

    def give_up_meanwhile(descriptor: int) -> None:
        monkeypatch.setattr(os, "fdatasync", real)
        with monkeypatch.context() as broken:
            broken.setattr(os, "pwrite", refuse)
            with pytest.raises(OSError, match="refused"):
                writer.write(group_of(records(6, 1), durable_lsn=0))
        writer.rewrite()
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", give_up_meanwhile)
    with pytest.raises(OSError, match="given up"):
        writer.flush()
    assert writer.durable_lsn == 0
    writer.write(group_of(records(6, 1), durable_lsn=0))
    writer.flush()
    assert writer.durable_lsn == 6
    assert lsns(memory_path) == set(range(1, 7))
