"""Mapping an arena, fetching its descriptor, and the checksums of what was written."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from baton.arena.checksums import chunk_pages, commit_rows, slot_checksum
from baton.arena.mapping import ArenaShape, MappedArena
from baton.arena.page_table import PageTable
from baton.arena.replay import GrantedPage
from baton.arena.ticket_socket import fetch_descriptor
from baton.errors import Reason, ServiceError
from baton.kv.crc import slot_list_crc
from baton.kv.layout import KvDtype, KvGeometry, page_crc, slot_crc

GEOMETRY = KvGeometry(
    layers=2, kv_heads=2, head_dim=4, head_dim_v=4, block_tokens=8, dtype=KvDtype.F32
)
SHAPE = ArenaShape(
    arena_id=bytes(16),
    page_count=4,
    slot_bytes=GEOMETRY.slot_bytes,
    page_bytes=GEOMETRY.page_bytes,
    data_offset=4096,
    geometry=GEOMETRY,
)


def arena_file(path: Path, size: int = SHAPE.file_bytes) -> int:
    """A descriptor of a fresh file of `size` bytes."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(descriptor, size)
    return descriptor


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[MappedArena]:
    """A small arena with random content."""
    mapped = MappedArena(arena_file(tmp_path / "arena"), SHAPE)
    random = np.random.default_rng(0)
    mapped.slots[:] = random.integers(0, 256, len(mapped.slots), np.uint8).tobytes()
    yield mapped
    mapped.unmap()


def test_pages_are_slots_without_padding(arena: MappedArena, tmp_path: Path) -> None:
    """Writing a page writes the file at the slot's offset, and only there."""
    page = arena.page(2)
    assert len(page) == GEOMETRY.page_bytes
    page[:4] = b"abcd"
    page.release()
    content = (tmp_path / "arena").read_bytes()
    at = SHAPE.data_offset + 2 * SHAPE.slot_bytes
    assert content[at : at + 4] == b"abcd"


def test_the_descriptor_is_not_inherited(tmp_path: Path) -> None:
    """A child that kept it would keep this worker's lock."""
    descriptor = arena_file(tmp_path / "arena")
    os.set_inheritable(descriptor, True)
    mapped = MappedArena(descriptor, SHAPE)
    assert not os.get_inheritable(descriptor)
    mapped.unmap()


@pytest.mark.parametrize(
    ("shape", "field"),
    [
        (replace(SHAPE, page_count=0), "page_count"),
        (replace(SHAPE, page_bytes=SHAPE.page_bytes + 1), "page_bytes"),
        (replace(SHAPE, slot_bytes=SHAPE.page_bytes - 1), "slot_bytes"),
        (replace(SHAPE, data_offset=100), "data_offset"),
        (replace(SHAPE, page_count=5), "file"),
    ],
)
def test_an_arena_that_does_not_add_up_is_not_mapped(
    shape: ArenaShape, field: str, tmp_path: Path
) -> None:
    """Sizes are checked against each other and the file before anything is mapped; the descriptor,
    which holds the worker's slot, is not left open.
    """
    descriptor = arena_file(tmp_path / "arena")
    with pytest.raises(ServiceError) as caught:
        MappedArena(descriptor, shape)
    assert caught.value.reason is Reason.COMPAT_MISMATCH
    assert caught.value.field == field
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_commit_rows_give_page_crcs_when_full_and_slot_crcs_when_not(arena: MappedArena) -> None:
    """A partial page lists every committed slot, also those of an earlier commit."""
    table = PageTable([], [GrantedPage(page=p, page_generation=p + 1) for p in (3, 1)], 8)
    table.require(13)
    rows = commit_rows(arena, table, 5, 13)
    assert [(row.page, row.page_generation, row.tokens) for row in rows] == [(3, 4, 8), (1, 2, 5)]
    assert rows[0].crc32c == page_crc(GEOMETRY, arena.page(3))
    assert rows[0].slot_crcs == ()
    assert rows[1].crc32c is None
    assert rows[1].slot_crcs == tuple(slot_crc(GEOMETRY, arena.page(1), i) for i in range(5))
    first, second = chunk_pages(rows, 5, 8)
    assert (first.first_position, first.tokens, first.crc) == (0, 8, rows[0].crc32c)
    assert (second.first_position, second.tokens) == (8, 5)
    assert second.crc == slot_list_crc(rows[1].slot_crcs)


def test_the_last_slot_of_a_page_also_has_the_page_crc(arena: MappedArena) -> None:
    """The append that fills a page is where its page CRC enters the log."""
    table = PageTable([], [GrantedPage(page=0, page_generation=1)], 8)
    table.require(8)
    middle, last = slot_checksum(arena, table, 6), slot_checksum(arena, table, 7)
    assert middle.page_crc32c is None
    assert last.page_crc32c == page_crc(GEOMETRY, arena.page(0))
    assert last.slot_crc32c == slot_crc(GEOMETRY, arena.page(0), 7)


class FakeDoor:
    """A unix socket that answers one client with a reply and perhaps a descriptor."""

    def __init__(self, path: Path, reply: bytes, descriptor: int | None) -> None:
        self.path = str(path)
        self.received = b""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen()
        self._reply, self._descriptor = reply, descriptor
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        link, _ = self._listener.accept()
        with link:
            self.received = link.recv(256)
            if self._descriptor is not None:
                socket.send_fds(link, [self._reply], [self._descriptor])
            elif self._reply:
                link.sendall(self._reply)

    def close(self) -> None:
        """Wait for the client to be served."""
        self._thread.join()
        self._listener.close()


def test_the_ticket_buys_the_descriptor(tmp_path: Path) -> None:
    """One line with the ticket goes out, a status byte and the descriptor come back."""
    given = arena_file(tmp_path / "arena")
    door = FakeDoor(tmp_path / "door", b"0", given)
    got = fetch_descriptor(door.path, "c0ffee", timeout_s=5.0)
    door.close()
    assert door.received == b"c0ffee\n"
    assert os.fstat(got).st_ino == os.fstat(given).st_ino
    assert not os.get_inheritable(got)
    os.close(got)
    os.close(given)


def test_a_refused_ticket_says_why(tmp_path: Path) -> None:
    """The kvstore's own words reach the log."""
    door = FakeDoor(tmp_path / "door", b"1the ticket is used up", None)
    with pytest.raises(ServiceError) as caught:
        fetch_descriptor(door.path, "c0ffee", timeout_s=5.0)
    door.close()
    assert caught.value.reason is Reason.PERMISSION_DENIED
    assert "used up" in caught.value.message


def test_a_door_that_closes_or_is_not_there_is_a_lost_peer(tmp_path: Path) -> None:
    """Both may pass: the worker tries again."""
    door = FakeDoor(tmp_path / "door", b"", None)
    for path in (door.path, str(tmp_path / "nowhere")):
        with pytest.raises(ServiceError) as caught:
            fetch_descriptor(path, "c0ffee", timeout_s=5.0)
        assert caught.value.reason is Reason.WORKER_LOST
    door.close()


def test_an_overlong_path_is_refused_before_it_is_cut(tmp_path: Path) -> None:
    """Unix sockets hold 107 bytes; a cut path would be somebody else's."""
    with pytest.raises(ServiceError) as caught:
        fetch_descriptor("/" + "x" * 100, "c0ffee", timeout_s=5.0)
    assert caught.value.field == "socket_path"
