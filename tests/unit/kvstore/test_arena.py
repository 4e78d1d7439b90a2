"""The arena file: made whole or not at all, one owner, a lock per worker slot, verified copies."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.errors import StartupError
from baton.kv.layout import KvDtype, KvGeometry, page_crc, page_view, slot_crcs
from services.kvstore.arena import DATA_OFFSET, Arena, ArenaSpec
from services.kvstore.page_worker import Damaged, Filled, _damaged_blocks, fill_page
from services.kvstore.rows import Rows
from services.kvstore.state import CheckPages, FillPage, PageRow, SlotSource

GEOMETRY = KvGeometry(
    layers=2, kv_heads=2, head_dim=4, head_dim_v=4, block_tokens=8, dtype=KvDtype.F32
)


def spec(directory: Path, pages: int = 4, node_id: str = "n0") -> ArenaSpec:
    """A small arena."""
    return ArenaSpec(
        directory=directory,
        node_id=node_id,
        arena_bytes=pages * GEOMETRY.slot_bytes,
        geometry=GEOMETRY,
        kv_digest=bytes(16),
        arena_id=bytes(range(16)),
    )


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    """Four pages."""
    made = Arena.open(spec(tmp_path))
    yield made
    made.remove()


def test_file_is_allocated_whole_private_and_headed(arena: Arena) -> None:
    """Every byte is there before a worker maps it: no SIGBUS later."""
    stat = arena.spec.path.stat()
    assert stat.st_size == DATA_OFFSET + 4 * GEOMETRY.slot_bytes
    assert stat.st_blocks * 512 >= stat.st_size
    assert stat.st_mode & 0o777 == 0o600
    head = arena.spec.path.read_bytes()[:DATA_OFFSET]
    assert head[:4] == b"BKA1"
    assert head[8:24] == bytes(range(16))


@pytest.mark.parametrize(("pages", "word"), [(1, "--arena-bytes"), (1 << 40, "--shm-size")])
def test_arena_that_is_too_small_or_does_not_fit_names_the_remedy(
    tmp_path: Path, pages: int, word: str
) -> None:
    """Refused before anything is allocated."""
    with pytest.raises(StartupError) as refused:
        Arena.open(spec(tmp_path, pages))
    assert word in f"{refused.value.message} {refused.value.hint}"
    assert not list(tmp_path.glob("*.kv"))


def test_arena_of_a_running_store_is_refused(tmp_path: Path) -> None:
    """The flock tells whose it is, not a pid or an age."""
    first = Arena.open(spec(tmp_path))
    with pytest.raises(StartupError, match="running kvstore"):
        Arena.open(spec(tmp_path))
    first.remove()
    assert not list(tmp_path.iterdir())


def test_arena_of_a_dead_store_is_found_again_with_its_bytes(tmp_path: Path) -> None:
    """Same id, same bytes; page generations of this life begin above all of the one before."""
    first = Arena.open(spec(tmp_path))
    first.page(2)[:] = 9
    assert (first.is_reattached, first.generation_floor) == (False, 0)
    first.close()
    floors = []
    for _ in range(3):
        again = Arena.open(replace(spec(tmp_path), arena_id=bytes(16)))
        assert again.is_reattached
        assert again.spec.arena_id == bytes(range(16))
        assert (again.page(2) == 9).all()
        assert not again.page(1).any()
        floors.append(again.generation_floor)
        again.close()
    assert floors == [1 << 32, 2 << 32, 3 << 32]


OTHER_GEOMETRY = replace(GEOMETRY, layers=1, kv_heads=4)


@pytest.mark.parametrize(
    "change",
    [
        {"geometry": OTHER_GEOMETRY},
        {"kv_digest": bytes([1]) * 16},
        {"arena_bytes": 5 * GEOMETRY.slot_bytes},
    ],
    ids=lambda change: next(iter(change)),
)
def test_arena_of_anything_else_is_made_anew(tmp_path: Path, change: dict[str, Any]) -> None:
    """KV of another model, type or shape is no KV: another id, zeros, and the old file is gone."""
    first = Arena.open(spec(tmp_path))
    first.page(0)[:] = 9
    first.close()
    wanted = replace(spec(tmp_path), arena_id=bytes([7]) * 16, **change)
    made = Arena.open(wanted)
    assert not made.is_reattached
    assert made.spec.arena_id == bytes([7]) * 16
    assert not made.page(0).any()
    assert [path.name for path in tmp_path.iterdir()] == ["arena-n0.kv"]
    made.remove()


HEADER_BYTES = 4 + 2 + 2 + 16 + 8 + 8 + 4 + 6 * 2 + 16 + 4 + 4


@pytest.mark.parametrize("offset", range(HEADER_BYTES))
def test_header_with_a_flipped_bit_is_not_believed(tmp_path: Path, offset: int) -> None:
    """Every field is compared or under the CRC: a damaged header is a new arena."""
    first = Arena.open(spec(tmp_path))
    first.close()
    with first.spec.path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))
    made = Arena.open(replace(spec(tmp_path), arena_id=bytes([7]) * 16))
    assert not made.is_reattached
    made.remove()


@pytest.mark.parametrize("size", [0, 17, DATA_OFFSET, DATA_OFFSET + 3 * GEOMETRY.slot_bytes])
def test_file_that_was_cut_is_not_believed(tmp_path: Path, size: int) -> None:
    """A start that was killed half way leaves less than an arena."""
    first = Arena.open(spec(tmp_path))
    first.close()
    os.truncate(first.spec.path, size)
    made = Arena.open(spec(tmp_path))
    assert not made.is_reattached
    made.remove()


def test_link_in_the_arenas_place_is_refused(tmp_path: Path) -> None:
    """Another user's trap: nothing is written through it."""
    target = tmp_path / "precious"
    target.write_bytes(b"mine")
    spec(tmp_path).path.symlink_to(target)
    with pytest.raises(StartupError, match="not an arena file"):
        Arena.open(spec(tmp_path))
    assert target.read_bytes() == b"mine"


def test_locks_of_workers_outlive_the_store(tmp_path: Path) -> None:
    """A restarted store sees who still has the old mapping, slot by slot."""
    first = Arena.open(spec(tmp_path))
    held = [first.open_for_worker(slot) for slot in (3, 4, 900)]
    first.close()
    again = Arena.open(spec(tmp_path))
    assert again.locked_slots() == [3, 4, 900]
    assert again.open_for_worker(4) is None
    for descriptor in held:
        assert descriptor is not None
        os.close(descriptor)
    assert again.locked_slots() == []
    again.remove()


def test_slot_lock_stands_while_the_mapping_does(arena: Arena) -> None:
    """Not the descriptor, not a heartbeat: the last mapping (O4)."""
    descriptor = arena.open_for_worker(3)
    assert descriptor is not None
    assert arena.is_slot_locked(3)
    assert not arena.is_slot_locked(4)
    assert arena.open_for_worker(3) is None
    mapping = mmap.mmap(descriptor, 0)
    os.close(descriptor)
    assert arena.is_slot_locked(3)
    mapping.close()
    assert not arena.is_slot_locked(3)


def filled(arena: Arena, page: int, tokens: int) -> PageRow:
    """A page with bytes of its own and the row that describes them."""
    content = np.random.default_rng(page).integers(0, 256, GEOMETRY.page_bytes, dtype=np.uint8)
    arena.page(page)[:] = content
    is_full = tokens == GEOMETRY.block_tokens
    return PageRow(
        page=page,
        page_generation=1,
        tokens=tokens,
        crc=page_crc(GEOMETRY, arena.page(page)) if is_full else None,
        slot_crcs=[] if is_full else list(slot_crcs(GEOMETRY, arena.page(page), 0, tokens)),
    )


def work(sources: list[SlotSource], tokens: int) -> FillPage:
    """A copy into page 3."""
    target = PageRow(page=3, page_generation=1, tokens=tokens)
    return FillPage(
        log_id=bytes(16), generation=1, block_index=0, target=target, sources=tuple(sources)
    )


def test_slots_of_several_pages_are_joined_and_checksummed(arena: Arena) -> None:
    """A spliced block: some slots from one log, the rest from another."""
    one, two = filled(arena, 0, 8), filled(arena, 1, 7)
    sources = [
        SlotSource(row=one, first_slot=0, tokens=3),
        SlotSource(row=two, first_slot=3, tokens=4),
    ]
    result = fill_page(arena, work(sources, 7))
    assert isinstance(result, Filled)
    assert result.slot_crcs[:3] == list(slot_crcs(GEOMETRY, arena.page(0), 0, 3))
    assert result.slot_crcs[3:] == two.slot_crcs[3:7]
    assert not page_view(GEOMETRY, arena.page(3)).k[:, :, 7].any()


@pytest.mark.parametrize("tokens", [8, 5])
def test_source_that_does_not_verify_is_not_copied(arena: Arena, tokens: int) -> None:
    """Bytes are verified when a generation takes them over."""
    row = filled(arena, 0, tokens)
    arena.page(0)[0] ^= 1
    source = SlotSource(row=row, first_slot=0, tokens=tokens)
    assert isinstance(fill_page(arena, work([source], tokens)), Damaged)
    assert not arena.page(3).any()


@pytest.mark.parametrize("tokens", [8, 5])
@pytest.mark.parametrize("damaged", [None, 0, 2])
def test_the_first_page_that_is_not_its_record_s_is_named(
    arena: Arena, tokens: int, damaged: int | None
) -> None:
    """Of all that a new writer adopts; the last one may be a tail, which has CRCs by slot."""
    table = Rows([filled(arena, 2, 8), filled(arena, 0, 8), filled(arena, 1, tokens)])
    if damaged is not None:
        arena.page(table[damaged].page)[-1 if tokens == 8 else 0] ^= 1
    check = CheckPages(log_id=bytes(16), generation=4, rows=table)
    found = _damaged_blocks(arena, check)
    assert [one.work.block_index for one in found] == ([] if damaged is None else [damaged])
    assert not _damaged_blocks(arena, replace(check, indexes=(1,)))
    assert not _damaged_blocks(arena, replace(check, indexes=()))
