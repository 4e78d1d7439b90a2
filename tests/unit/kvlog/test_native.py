"""The native framing and the Python framing: one result on whole, cut and damaged segments."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine import step_kernel_build as builder
from baton.errors import ServiceError
from services.kvstore.log import native
from services.kvstore.log.format import (
    RecordAddress,
    RecordType,
    first_chain,
    frame_payload,
    read_record,
    unsealed_record,
)

NATIVE = Path(__file__).parents[3] / "native" / "log"
HEADER = NATIVE / "baton_log.h"
SEGMENT = Path(__file__).parents[2] / "data" / "kv" / "segment.bin"
SEGMENT_ID = bytes(range(16))
BUILD_TIMEOUT_S = 300.0


@pytest.fixture
def library():
    """The native library, or a skip that says so."""
    if not native.is_native():
        pytest.skip("THE NATIVE LOG WAS NOT TESTED: it is not built, or cffi is missing")
    return native.opened_library()


def records(draw: random.Random, count: int) -> list[tuple[RecordType, bytes, RecordAddress]]:
    """Records of a few logs, of every type, with bodies that no decoder would take."""
    logs = [draw.randbytes(16) for _ in range(4)]
    return [
        (
            RecordType(draw.randint(1, 15)),
            draw.randbytes(draw.choice((0, 1, 63, 64, 65, draw.randint(0, 500)))),
            RecordAddress(
                log_id=draw.choice(logs),
                generation=draw.randint(0, 1 << 63),
                position=draw.randint(0, (1 << 32) - 1),
            ),
        )
        for _ in range(count)
    ]


def sealed(draw: random.Random, count: int, first_lsn: int = 1) -> bytes:
    """A segment's bytes from its first record on."""
    group = bytearray(b"".join(unsealed_record(*item) for item in records(draw, count)))
    native.seal_in_python(group, first_lsn=first_lsn, chain_crc=first_chain(SEGMENT_ID))
    return bytes(group)


def assert_same(first: native.Scanned, second: native.Scanned) -> None:
    assert first.stop == second.stop
    assert (first.end_offset, first.chain_crc) == (second.end_offset, second.chain_crc)
    assert first.rows.tobytes() == second.rows.tobytes()
    assert first.log_ids.tobytes() == second.log_ids.tobytes()


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    count=st.integers(0, 12),
    cut=st.integers(0, 4000),
    flips=st.lists(st.integers(0, 1 << 20), max_size=3),
    zeros=st.integers(0, 200),
    is_chained=st.booleans(),
)
def test_damaged_segments_read_alike(seed, count, cut, flips, zeros, is_chained):
    """Native and Python stop at the same byte for the same reason, having read the same records."""
    if not native.is_native():
        pytest.skip("THE NATIVE LOG WAS NOT TESTED: it is not built, or cffi is missing")
    draw = random.Random(seed)
    data = bytearray(sealed(draw, count) + bytes(zeros))
    if cut < len(data):
        del data[len(data) - cut :]
    for bit in flips:
        if data:
            data[bit // 8 % len(data)] ^= 1 << bit % 8
    chain = first_chain(SEGMENT_ID) if is_chained else None
    assert_same(
        native.scan(data, chain_crc=chain, offset=0),
        native.scan_in_python(data, chain_crc=chain, offset=0),
    )
    for offset in range(0, len(data), 64):
        assert native.find_record(data, offset) == native.find_record_in_python(data, offset)


def test_scanning_says_what_reading_says(library):
    """Every bit of a small segment flipped: the same record is bad, in the same field."""
    whole = sealed(random.Random(5), 4)
    chain = first_chain(SEGMENT_ID)
    for bit in range(len(whole) * 8):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        scanned = native.scan(data, chain_crc=chain, offset=0)
        assert scanned.stop is not None, bit
        with pytest.raises(ServiceError) as caught:
            read_record(data, scanned.end_offset, previous_chain=scanned.chain_crc)
        assert caught.value.field == scanned.stop


@pytest.mark.parametrize("seal", [native.seal, native.seal_in_python])
def test_sealing_gives_the_records_of_the_format(seal):
    """A group completed in one call is, byte for byte, what `frame_payload` gives one by one."""
    items = records(random.Random(9), 40)
    group = bytearray(b"".join(unsealed_record(*item) for item in items))
    chain = first_chain(SEGMENT_ID)
    after = seal(group, first_lsn=77, chain_crc=chain)
    expected = b""
    for lsn, (kind, payload, address) in enumerate(items, start=77):
        record = frame_payload(kind, payload, address, lsn=lsn, previous_chain=chain)
        expected, chain = expected + record.data, record.chain
    assert (bytes(group), after) == (expected, chain)


def test_sealing_again_gives_the_same(library):
    """What is written anew into another segment is sealed anew, over the old seals."""
    group = bytearray(sealed(random.Random(2), 9))
    first = bytes(group)
    native.seal(group, first_lsn=50, chain_crc=1)
    assert bytes(group) != first
    native.seal(group, first_lsn=1, chain_crc=first_chain(SEGMENT_ID))
    assert bytes(group) == first


@pytest.mark.parametrize("scan", [native.scan, native.scan_in_python])
def test_the_golden_segment(scan):
    """The published example: nineteen records, LSN 17 on, two log ids."""
    data = SEGMENT.read_bytes()
    scanned = scan(data, chain_crc=first_chain(data[8:24]))
    assert scanned.stop is None
    assert scanned.rows["lsn"].tolist() == list(range(17, 36))
    assert scanned.rows["type_code"].tolist()[:2] == [14, 1]
    assert scanned.log_ids[0].tobytes() == bytes(16)
    assert (scanned.log_ids[scanned.rows["log"]] == scanned.rows["log_id"]).all()


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 63, 64, 1000])
def test_checksum_is_crc32c(library, size):
    """The same CRC as the rest of the system."""
    ffi, opened = library
    data = np.arange(1000, dtype=np.uint8)
    crc = opened.bl_crc32c(0, ffi.from_buffer("uint8_t[]", data), size)
    assert crc == google_crc32c.value(data[:size].tobytes())


def test_declarations_are_the_headers():
    """cffi believes what it is told: a difference would be a crash."""
    assert declarations(native.DECLARATIONS) == declarations(HEADER.read_text("utf-8"))
    assert native.ROW.itemsize == 64
    stops = re.search(r"enum bl_stop \{(.*?)\};", HEADER.read_text("utf-8"), flags=re.S)
    assert stops is not None
    names = re.findall(r"BL_([A-Z_]+) =", stops[1])
    assert [name.lower() for name in names[1:]] == list(native.STOPS[1:])


def declarations(text: str) -> list[str]:
    """The C declarations of `text`, spaces and comments aside."""
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    text = re.sub(r"^\s*#.*$|^extern \"C\" \{$|^\}$", " ", text, flags=re.M)
    text = text.replace("BL_EXPORT", " ")
    parts = re.findall(r"[^;{}]+(?:\{[^}]*\}[^;]*)?;", text)
    return sorted(" ".join(part.split()) for part in parts if "enum" not in part)


def test_only_prefixed_symbols_are_exported(library):
    """A symbol called `step` once met another library's; ours are hidden or prefixed."""
    if shutil.which("nm") is None:
        pytest.skip("binutils are not installed")
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(builder.LOG.file)],
        check=True,
        capture_output=True,
        text=True,
    )
    names = [line.split()[-1] for line in listed.stdout.splitlines()]
    assert names
    assert [name for name in names if not name.startswith("bl_")] == []


def test_wrong_sizes_are_refused(library):
    """The library checks what it is given, whoever calls it."""
    ffi, opened = library
    data = np.zeros(128, dtype=np.uint8)
    pointer = ffi.from_buffer("uint8_t[]", data)
    chain = ffi.new("uint32_t *")
    assert opened.bl_seal_records(pointer, 100, 1, chain) == -1
    assert opened.bl_seal_records(pointer, 128, 1, chain) == -2
    assert opened.bl_seal_records(ffi.NULL, 128, 1, chain) == -1
    assert opened.bl_find_record(pointer, 128, 7) == -1
    rows, slots = ffi.new("struct bl_row[2]"), ffi.new("uint32_t[4]")
    out = ffi.new("struct bl_scan *")
    for offset, capacity, slot_count in ((192, 2, 4), (8, 2, 4), (0, 2, 3), (0, 2, 2)):
        status = opened.bl_scan_records(
            pointer, 128, offset, 0, 1, rows, capacity, slots, slot_count, out
        )
        assert status == -1


@pytest.mark.slow
@pytest.mark.timeout(BUILD_TIMEOUT_S + 60)
def test_damaged_segments_never_lead_outside_them(tmp_path):
    """Under AddressSanitizer and UndefinedBehaviorSanitizer, segments by seed, cut and flipped."""
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        pytest.skip("THE SANITIZERS DID NOT RUN: no CMake or no C++ compiler")
    build, said = str(tmp_path / "build"), ""
    for command in (
        ["cmake", "-S", str(NATIVE), "-B", build, "-DBATON_SANITIZE=ON", "-DBATON_FUZZ=ON"],
        ["cmake", "--build", build],
        [f"{build}/fuzz_log", "2000", "1"],
    ):
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        said = done.stdout
    assert "no fault" in said
