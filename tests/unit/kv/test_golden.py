"""The committed golden files: written as before, and readable from the document alone.

`REWRITE=1 pytest tests/unit/kv/test_golden.py` writes them anew; commit a rewrite only with an
explanation of the difference.
"""

from __future__ import annotations

import importlib.util
import json
import os
import struct
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from blake3 import blake3

from baton.kv import blob
from baton.kv.layout import KvDtype
from baton.kv.splice import decode_manifest

DATA = Path(__file__).parents[2] / "data" / "kv"
FORMATS = Path(__file__).parents[3] / "docs" / "formats.md"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_golden", DATA / "make_golden.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GOLDEN = load_script()
BUILT = GOLDEN.build()


@pytest.mark.parametrize("name", sorted(BUILT))
def test_golden_file_is_still_written_byte_for_byte(name: str) -> None:
    """A difference is a change of the format."""
    if os.environ.get("REWRITE") == "1":
        (DATA / name).write_bytes(BUILT[name])
    assert (DATA / name).read_bytes() == BUILT[name]


def test_no_golden_file_is_left_behind() -> None:
    """A file that nothing writes proves nothing."""
    on_disk = {path.name for path in DATA.iterdir() if path.is_file()}
    assert on_disk == set(BUILT) | {"make_golden.py"}


def expected_value(layer: int, part: int, head: int, position: int, dim: int) -> float:
    """The formula of docs/formats.md."""
    return (((layer * 2 + part) * 31 + head * 17 + position * 7 + dim * 3) % 61 - 30) / 8


def bf16_value(raw: bytes) -> float:
    return float(struct.unpack("<f", b"\0\0" + raw)[0])


@pytest.mark.parametrize("name", ["blob_f16.bin", "blob_bf16.bin", "blob_f32.bin"])
def test_float_blob_reads_with_nothing_but_the_document(name: str) -> None:
    """An independent reader: offsets and struct, none of our classes."""
    data = (DATA / name).read_bytes()
    assert data[:4] == b"BKV1"
    dtype, layers, heads, dims, block = struct.unpack_from("<5H", data, 14)
    (total,) = struct.unpack_from("<I", data, 24)
    (first,) = struct.unpack_from("<I", data, 32)
    (dims_v,) = struct.unpack_from("<H", data, 38)
    (at,) = struct.unpack_from("<I", data, 104)
    item = {1: 2, 2: 2, 3: 4}[dtype]
    position = first
    while position < first + total:
        tokens = min(block - position % block, first + total - position)
        for layer in range(layers):
            for part in range(2):
                for head in range(heads):
                    for token in range(tokens):
                        for dim in range(dims_v if part else dims):
                            raw = data[at : at + item]
                            value = (
                                bf16_value(raw)
                                if dtype == 2
                                else struct.unpack("<e" if item == 2 else "<f", raw)[0]
                            )
                            assert value == expected_value(layer, part, head, position + token, dim)
                            at += item
        position += tokens
    ids = struct.unpack_from(f"<{total}I", data, at)
    assert ids == tuple((p * 1009 + 7) % 49152 for p in range(first, first + total))
    assert at + 4 * total == len(data)


def test_int8_blob_is_the_float_blob_within_half_a_step() -> None:
    """Scales at the head of each packed page, one per (layer, K/V, head, token)."""
    decoded = blob.decode_blob((DATA / "blob_int8.bin").read_bytes())
    page = decoded.pages[0]  # positions 5, 6 and 7
    scales = np.frombuffer(page[: 2 * 2 * 2 * 3 * 4].tobytes(), "<f4")
    data = page[2 * 2 * 2 * 3 * 4 :].view(np.int8)
    for token in range(3):
        scale = float(scales[token])  # layer 0, K, head 0
        values = [float(data[token * 4 + dim]) * scale for dim in range(4)]
        expected = [expected_value(0, 0, 0, 5 + token, dim) for dim in range(4)]
        assert max(map(abs, expected)) / 127 == pytest.approx(scale)
        assert np.allclose(values, expected, atol=scale / 2 + 1e-6)


def test_wire_and_file_blob_differ_only_in_the_gap() -> None:
    """The payload is the same; payload_offset and the header's CRC say where it starts."""
    wire = blob.decode_blob((DATA / "blob_bf16.bin").read_bytes())
    file = blob.decode_blob((DATA / "blob_bf16_file.bin").read_bytes())
    assert file.header.payload_offset == 4096
    assert wire.header.payload_crc == file.header.payload_crc
    assert wire.header.dtype is KvDtype.BF16


def test_golden_manifest_still_joins() -> None:
    """An old manifest stays readable."""
    joined = decode_manifest((DATA / "manifest.bin").read_bytes())
    assert joined.total_tokens == 40
    assert [plan.is_shared for plan in joined.pages()] == [True, True, False, True, True]


def field(*parts: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def test_digests_follow_the_strings_of_the_document() -> None:
    """Recomputed from the canonical strings as docs/formats.md writes them."""
    values = json.loads((DATA / "digests.json").read_text())["bytes"]
    model, rope = GOLDEN.MODEL, GOLDEN.ROPE
    kv = blake3(field(b"baton.kv.v1", model, b"", rope, b"bf16", b"\x01\0\x08\0")).digest(16)
    assert kv.hex() == values["kv_digest"]
    start = blake3(field(kv)).digest()
    assert start.hex() == values["history_0"]
    ids = struct.pack("<20I", *GOLDEN.token_ids(0, 20))
    one = blake3(field(start, ids[:32])).digest()
    assert one.hex() == values["history_8"]
    two = blake3(field(one, ids[32:64])).digest()
    assert blake3(field(two, ids[64:])).hexdigest() == values["history_20"]
    scope = field(b"acme", b"search", b"", b"s1")
    context = "baton-serving scope secret v1"
    material = field(GOLDEN.CLUSTER_KEY, struct.pack("<I", 1), scope)
    secret = blake3(material, derive_key_context=context).digest()
    assert secret.hex() == values["scope_secret"]
    first = blake3(field(scope, kv, bytes(32), ids[:32]), key=secret).digest()
    assert first.hex() == values["block_key_0"]
    second = blake3(field(scope, kv, first, ids[32:64]), key=secret)
    assert second.hexdigest() == values["block_key_1"]
    assert blake3(field(b"baton.ids.v1", ids)).hexdigest() != values["ids_hash_0_16"]
    assert blake3(field(b"baton.ids.v1", ids[:64])).hexdigest() == values["ids_hash_0_16"]


def test_the_document_quotes_every_golden_digest() -> None:
    """A reader in another language starts from the document: its values must be the real ones."""
    text = FORMATS.read_text()
    golden = json.loads((DATA / "digests.json").read_text())
    missing = [
        name for group in golden.values() for name, value in group.items() if value not in text
    ]
    assert missing == []


def test_the_document_quotes_the_golden_headers() -> None:
    """The worked blob header and the first record headers, in hex."""
    text = FORMATS.read_text().replace("\n", "").replace(" ", "")
    assert (DATA / "blob_bf16.bin").read_bytes()[:128].hex() in text
    segment = (DATA / "segment.bin").read_bytes()
    assert segment[:192].hex() in text
