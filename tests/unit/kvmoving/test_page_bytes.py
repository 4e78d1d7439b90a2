"""The content of moving pages: read in chunks from one arena, written into another, verified."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from baton.errors import Reason, ServiceError
from baton.kv.crc import crc32c
from baton.kv.layout import KvDtype, KvGeometry, page_crc, slot_crcs
from services.kvstore.arena import Arena, ArenaSpec
from services.kvstore.moving import page_bytes
from services.kvstore.moving.page_bytes import (
    PageReceiver,
    content_ends,
    read_chunk,
    row_content,
)
from services.kvstore.state import PageRow

GEOMETRY = KvGeometry(
    layers=2, kv_heads=2, head_dim=4, head_dim_v=4, block_tokens=8, dtype=KvDtype.F32
)
PAGES = 8


@pytest.fixture
def arenas(tmp_path: Path) -> Iterator[tuple[Arena, Arena]]:
    """The old home's and the new home's."""
    with ExitStack() as stack:
        made = []
        for name in ("old", "new"):
            arena = Arena.open(
                ArenaSpec(
                    directory=tmp_path / name,
                    node_id=name,
                    arena_bytes=PAGES * GEOMETRY.slot_bytes,
                    geometry=GEOMETRY,
                    kv_digest=bytes(16),
                    arena_id=bytes(16),
                )
            )
            stack.callback(arena.remove)
            made.append(arena)
        yield made[0], made[1]


def written(arena: Arena) -> list[PageRow]:
    """Two full pages, a full page whose row was cut, and a partial page; every byte drawn."""
    draw = np.random.default_rng(7)
    for page in range(4):
        arena.page(page)[:] = draw.integers(0, 256, GEOMETRY.page_bytes, dtype=np.uint8)
    crcs = [page_crc(GEOMETRY, arena.page(page)) for page in range(3)]
    rows = [PageRow(page=page, page_generation=1, tokens=8, crc=crcs[page]) for page in (0, 1)]
    rows.append(PageRow(page=2, page_generation=1, tokens=3, crc=crcs[2]))
    partial = list(slot_crcs(GEOMETRY, arena.page(3), 0, 5))
    rows.append(PageRow(page=3, page_generation=1, tokens=5, slot_crcs=partial))
    return rows


def targets(rows: list[PageRow]) -> list[PageRow]:
    """Our pages for the same content, elsewhere in our arena."""
    return [
        PageRow(
            page=PAGES - 1 - index,
            page_generation=1,
            tokens=row.tokens,
            crc=row.crc,
            slot_crcs=list(row.slot_crcs),
        )
        for index, row in enumerate(rows)
    ]


def chunks(arena: Arena, rows: list[PageRow]) -> list[tuple[int, bytes, int]]:
    """All of a transfer's chunks: offset, bytes, CRC."""
    ends, offset, found = content_ends(GEOMETRY, rows), 0, []
    while offset < ends[-1]:
        data, crc = read_chunk(arena, rows, ends, offset)
        found.append((offset, data, crc))
        offset += len(data)
    return found


@pytest.mark.parametrize("size", [1, 7, 100, 1024, 1 << 20])
def test_every_page_arrives_and_verifies_whatever_the_chunks(
    arenas: tuple[Arena, Arena], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Chunks begin and end anywhere, also inside a packed partial page."""
    monkeypatch.setattr(page_bytes, "CHUNK_BYTES", size)
    old, new = arenas
    rows = written(old)
    ours = targets(rows)
    receiver = PageReceiver(new, 10, ours)
    for chunk in chunks(old, rows):
        receiver.write(*chunk)
    assert receiver.result.verified == [10, 11, 12, 13]
    assert receiver.result.damaged == []
    assert receiver.pages_done == len(rows)
    for there, here in zip(rows, ours, strict=True):
        slots = there.tokens
        assert slot_crcs(GEOMETRY, new.page(here.page), 0, slots) == slot_crcs(
            GEOMETRY, old.page(there.page), 0, slots
        )


def test_a_partial_page_brings_its_committed_slots_only(arenas: tuple[Arena, Arena]) -> None:
    """What a writer may be writing behind them does not cross the wire."""
    old, new = arenas
    rows = written(old)[3:]
    ours = targets(rows)
    receiver = PageReceiver(new, 0, ours)
    for chunk in chunks(old, rows):
        receiver.write(*chunk)
    untouched = slot_crcs(GEOMETRY, new.page(ours[0].page), 5, 3)
    assert set(untouched) == {crc32c(bytes(GEOMETRY.token_bytes))}


def test_a_chunk_that_the_wire_damaged_is_refused_and_nothing_is_written(
    arenas: tuple[Arena, Arena],
) -> None:
    """The transfer is broken; the page is asked for again."""
    old, new = arenas
    rows = written(old)
    receiver = PageReceiver(new, 0, targets(rows))
    offset, data, crc = chunks(old, rows)[0]
    with pytest.raises(ServiceError) as caught:
        receiver.write(offset, bytes([data[0] ^ 1]) + data[1:], crc)
    assert caught.value.reason is Reason.CHECKSUM_MISMATCH
    assert receiver.result.received_bytes == 0


@pytest.mark.parametrize("page", [0, 3])
def test_a_page_that_is_not_what_its_record_says_is_told_apart(
    arenas: tuple[Arena, Arena], page: int
) -> None:
    """Damaged where it comes from: its chunk is intact, its page is not."""
    old, new = arenas
    rows = written(old)
    old.page(page)[0] ^= 1
    receiver = PageReceiver(new, 0, targets(rows))
    for chunk in chunks(old, rows):
        receiver.write(*chunk)
    assert receiver.result.damaged == [page]
    assert receiver.result.verified == [index for index in range(4) if index != page]


@pytest.mark.parametrize("fault", ["repeated", "skipped", "too long"])
def test_chunks_come_in_order_and_end_where_they_should(
    arenas: tuple[Arena, Arena], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Nothing is written outside of the pages that were asked for."""
    monkeypatch.setattr(page_bytes, "CHUNK_BYTES", 256)
    old, new = arenas
    rows = written(old)
    sent = chunks(old, rows)
    receiver = PageReceiver(new, 0, targets(rows))
    receiver.write(*sent[0])
    wrong = {
        "repeated": sent[0],
        "skipped": sent[2],
        "too long": (256, bytes(1 << 20), crc32c(bytes(1 << 20))),
    }[fault]
    with pytest.raises(ServiceError) as caught:
        receiver.write(*wrong)
    assert caught.value.reason is Reason.CHECKSUM_MISMATCH
    assert receiver.result.received_bytes == 256


def test_placed_pages_verify_as_chunks_do(arenas: tuple[Arena, Arena]) -> None:
    """A transport that puts whole pages into place, in any order, also the packed partial one."""
    old, new = arenas
    rows = written(old)
    ours = [
        PageRow(page=7 - row.page, page_generation=1, tokens=row.tokens, crc=row.crc,
                slot_crcs=row.slot_crcs)
        for row in rows
    ]  # fmt: skip
    receiver = PageReceiver(new, 10, ours)
    for index in (3, 0, 2, 1):
        receiver.target(index)[:] = row_content(old, rows[index])
        receiver.placed(index)
    receiver.sent([crc32c(row_content(old, row)) for row in rows])
    assert sorted(receiver.result.verified) == [10, 11, 12, 13]
    assert receiver.result.received_bytes == content_ends(GEOMETRY, rows)[-1]
    for row, own in zip(rows[:3], ours, strict=False):
        assert np.array_equal(old.page(row.page), new.page(own.page))


@pytest.mark.parametrize("is_wire", [True, False], ids=["wire", "source"])
def test_a_placed_page_that_is_wrong_tells_the_wire_from_the_source(
    arenas: tuple[Arena, Arena], is_wire: bool
) -> None:
    """Damaged where it comes from: it is cut. Damaged on the way: it is asked for again."""
    old, new = arenas
    rows = written(old)
    receiver = PageReceiver(new, 0, rows)
    sent = []
    for index, row in enumerate(rows):
        content = row_content(old, row).copy()
        if index == 1 and not is_wire:
            content[3] ^= 1
        sent.append(crc32c(content))
        if index == 1 and is_wire:
            content[3] ^= 1
        receiver.target(index)[:] = content
        receiver.placed(index)
    if is_wire:
        with pytest.raises(ServiceError) as caught:
            receiver.sent(sent)
        assert caught.value.reason is Reason.CHECKSUM_MISMATCH
    else:
        receiver.sent(sent)
    assert receiver.result.damaged == ([] if is_wire else [1])
    assert receiver.result.verified == [0, 2, 3]
