"""The copy that takes a CRC on its way: native and Python give what google_crc32c and numpy do."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from baton.arena import copying
from baton.engine import step_kernel_build as builder
from baton.kv.crc import combine_crc32c
from baton.kv.layout import KvDtype, KvGeometry, slot_crcs

NATIVE = Path(__file__).parents[3] / "native" / "copy"
HEADER = NATIVE / "baton_copy.h"
BLOCK = 3 * 4096
BUILD_TIMEOUT_S = 300.0
LENGTHS = [*range(70), 255, 256, 4095, 4096, 4097]
LENGTHS += [times * BLOCK + off for times in (1, 2, 3, 7) for off in (-1, 0, 1, 15, 16, 17)]
CONTENT = np.random.default_rng(1).integers(0, 256, 8 * BLOCK, dtype=np.uint8)


def crc_of(data: np.ndarray) -> int:
    return google_crc32c.value(data.tobytes())


@pytest.fixture(params=["native", "python"])
def path(request, monkeypatch):
    """Either way of copying."""
    if request.param == "python":
        monkeypatch.setattr(copying, "opened_library", lambda: None)
    elif not copying.is_native():
        pytest.skip("THE NATIVE COPY WAS NOT TESTED: it is not built, or cffi is missing")
    return request.param


def test_every_length_is_copied_with_its_crc(path):
    """From and to any alignment, and nothing beside the target is touched."""
    for length in LENGTHS:
        for skip_source, skip_target in ((0, 0), (1, 0), (0, 1), (7, 13), (16, 15)):
            source = CONTENT[skip_source : skip_source + length]
            target = np.full(length + skip_target + 9, 0xA5, dtype=np.uint8)
            window = target[skip_target : skip_target + length]
            assert copying.copy_crc32c(window, source) == crc_of(source), length
            assert (window == source).all(), length
            assert (target[:skip_target] == 0xA5).all(), length
            assert (target[skip_target + length :] == 0xA5).all(), length
            assert copying.checksum(source) == crc_of(source), length


def test_pieces_of_any_cut_come_to_one_crc(path):
    """What arrives in chunks has the CRC of the whole, wherever it was cut."""
    draw = random.Random(4)
    for _ in range(30):
        whole = CONTENT[: draw.randrange(1, CONTENT.size)]
        target = np.empty_like(whole)
        crc, at, parts = 0, 0, []
        while at < whole.size:
            piece = whole[at : at + draw.choice((1, 5, 4096, 3 * BLOCK, 100_000))]
            crc = copying.copy_crc32c(target[at : at + piece.size], piece, crc)
            parts.append((crc_of(piece), piece.size))
            at += piece.size
        assert crc == crc_of(whole)
        assert (target == whole).all()
        combined = 0
        for part, size in parts:
            combined = combine_crc32c(combined, part, size)
        assert combined == crc


def test_pages_are_scattered_each_with_its_crc(path):
    """A payload into pages anywhere in an arena, the last one shorter; and read back in place."""
    piece, count = 5 * 4096 + 3, 4
    source = CONTENT[: (count - 1) * piece + 777]
    arena = np.zeros(count * piece + 50, dtype=np.uint8)
    offsets = [2 * piece + 9, 0, 3 * piece + 9, piece + 1]
    crcs = copying.scatter(arena, offsets, source, piece)
    for index, offset in enumerate(offsets):
        part = source[index * piece : (index + 1) * piece]
        assert (arena[offset : offset + part.size] == part).all()
        assert crcs[index] == crc_of(part)
    assert copying.checksums_at(arena, offsets[:3], piece) == crcs[:3]


@pytest.mark.parametrize("offset", [1, 100, 1 << 40])
def test_places_outside_the_target_are_refused_before_anything_is_copied(path, offset):
    """A wrong page number never writes over what lies behind the arena."""
    arena = np.zeros(8192, dtype=np.uint8)
    with pytest.raises(IndexError):
        copying.scatter(arena, [0, 4096 + offset], CONTENT[:8192], 4096)
    assert not arena.any()
    with pytest.raises(IndexError):
        copying.checksums_at(arena, [0, 4096 + offset], 4096)


GEOMETRIES = [
    KvGeometry(layers=30, kv_heads=3, head_dim=64, head_dim_v=64, block_tokens=16, dtype=dtype)
    for dtype in KvDtype
] + [
    KvGeometry(layers=2, kv_heads=2, head_dim=24, head_dim_v=40, block_tokens=8, dtype=dtype)
    for dtype in (KvDtype.BF16, KvDtype.INT8)
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda one: f"{one.dtype.text}-{one.layers}")
def test_slots_have_the_crcs_of_the_layout(path, geometry):
    """What a partial page is checked by, for every type and for V of another width than K."""
    page = np.resize(CONTENT, geometry.page_bytes + 11)
    for first, tokens in ((0, geometry.block_tokens), (3, 1), (1, 5), (2, 0)):
        found = copying.slot_checksums(geometry, page, first, tokens)
        assert found == slot_crcs(geometry, page, first, tokens)


def test_nothing_costs_nothing(path):
    """An empty buffer changes no CRC."""
    empty = np.empty(0, dtype=np.uint8)
    assert copying.copy_crc32c(empty, empty, 77) == 77
    assert copying.checksum(empty, 77) == 77
    assert copying.scatter(empty, [], empty, 16) == []
    assert copying.checksums_at(empty, [], 16) == []
    assert combine_crc32c(77, 0, 0) == 77


def test_read_only_target_is_refused(path):
    """Bytes that nobody may change stay as they are."""
    frozen = bytes(100)
    with pytest.raises((BufferError, ValueError)):
        copying.copy_crc32c(frozen, CONTENT[:100])
    assert frozen == bytes(100)


def test_declarations_are_the_headers():
    """cffi believes what it is told: a difference would be a crash."""
    assert declarations(copying.DECLARATIONS) == declarations(HEADER.read_text("utf-8"))


def declarations(text: str) -> list[str]:
    """The C declarations of `text`, spaces and comments aside."""
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    text = re.sub(r"^\s*#.*$|^extern \"C\" \{$|^\}$", " ", text, flags=re.M)
    text = text.replace("BC_EXPORT", " ")
    parts = re.findall(r"[^;{}]+(?:\{[^}]*\}[^;]*)?;", text)
    return sorted(" ".join(part.split()) for part in parts if "enum" not in part)


def test_only_prefixed_symbols_are_exported():
    """A symbol with a common name meets another library's some day; ours are hidden or prefixed."""
    if shutil.which("nm") is None or not builder.COPY.file.is_file():
        pytest.skip("binutils are not installed, or the library is not built")
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(builder.COPY.file)],
        check=True,
        capture_output=True,
        text=True,
    )
    names = [line.split()[-1] for line in listed.stdout.splitlines()]
    assert names
    assert [name for name in names if not name.startswith("bc_")] == []


@pytest.mark.slow
def test_fuzzing_under_sanitizers(tmp_path):
    """Buffers of exactly their size: nothing outside them is read or written."""
    if shutil.which("cmake") is None:
        pytest.skip("THE NATIVE COPY WAS NOT FUZZED: cmake is missing")
    flags = ["-DBATON_SANITIZE=ON", "-DBATON_FUZZ=ON", "-DBATON_WERROR=ON"]
    commands = [
        ["cmake", "-S", str(NATIVE), "-B", str(tmp_path), *flags],
        ["cmake", "--build", str(tmp_path)],
        [str(tmp_path / "fuzz_copy"), "1", "2000"],
    ]
    for command in commands:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
