"""The log's format: every record to bytes and back, and every damage named."""

from __future__ import annotations

import json
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import Reason, ServiceError
from baton.kv.blocks import Scope
from baton.kv.crc import crc32c, mask_crc, slot_list_crc
from services.kvstore.log import fields, format, records, state, store_records
from tests.data.kv import make_golden

DATA = Path(__file__).parents[2] / "data" / "kv"
GOLDEN = make_golden
RECORDS = {name: (record, address) for name, record, address in GOLDEN.golden_records()}
CHAIN = format.first_chain(GOLDEN.SEGMENT_ID)


def encode(name: str) -> bytes:
    record, address = RECORDS[name]
    return format.encode_record(record, address, lsn=9, previous_chain=CHAIN).data


def corrupt_field(data: bytes, *, chain: int = CHAIN) -> str:
    """Return the field that reading `data` names."""
    with pytest.raises(ServiceError) as caught:
        format.read_record(data, 0, previous_chain=chain)
    assert caught.value.reason is Reason.LOG_CORRUPT
    assert caught.value.metadata["offset"] == "0"
    assert caught.value.metadata["field"] == caught.value.field
    assert caught.value.field is not None
    return caught.value.field


def reframe(data: bytes, **changes: int) -> bytes:
    """Change header fields and fix chain and header CRC: a liar, not a broken disk."""
    places = {
        "version": ("<B", 4),
        "type": ("<B", 5),
        "flags": ("<H", 6),
        "reserved": ("<I", 44),
        "payload_bytes": ("<I", 48),
        "payload_crc": ("<I", 52),
    }
    out = bytearray(data)
    for name, value in changes.items():
        layout, offset = places[name]
        struct.pack_into(layout, out, offset, value)
    struct.pack_into("<I", out, 56, format.next_chain(CHAIN, bytes(out[:64])))
    struct.pack_into("<I", out, 60, mask_crc(crc32c(bytes(out[:60]))))
    return bytes(out)


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_record_survives_a_round_trip(name: str) -> None:
    """What is written is what is read, header included."""
    record, address = RECORDS[name]
    data = encode(name)
    assert len(data) % 64 == 0
    read = format.read_record(data, 0, previous_chain=CHAIN)
    assert read.record == record
    assert read.header.address == address
    assert read.header.lsn == 9
    assert read.end_offset == len(data)
    assert read.header.type_code == format.type_of(record)


def test_every_type_has_a_golden_record() -> None:
    """Also those that later work writes first."""
    assert {format.type_of(record) for record, _ in RECORDS.values()} == set(format.RecordType)


def test_golden_segment_reads_from_end_to_end() -> None:
    """Old bytes stay readable, and the chain runs from the segment's id to the last record."""
    data = (DATA / "segment.bin").read_bytes()
    header = format.decode_segment_header(data)
    assert header == format.SegmentHeader(
        segment_id=GOLDEN.SEGMENT_ID,
        store_id=GOLDEN.STORE_ID,
        sequence=5,
        first_lsn=17,
        segment_bytes=1 << 20,
    )
    offset, chain = format.SEGMENT_HEADER_BYTES, format.first_chain(header.segment_id)
    index = json.loads((DATA / "segment.json").read_text())
    for row in index:
        read = format.read_record(data, offset, previous_chain=chain)
        assert (read.offset, read.header.lsn) == (row["offset"], row["lsn"])
        assert read.record == RECORDS[row["name"]][0]
        offset, chain = read.end_offset, read.chain
    assert offset == len(data)


@pytest.mark.parametrize("name", ["append", "flush"])
def test_every_bit_flip_of_a_record_is_refused(name: str) -> None:
    """Header, payload and padding: no single bit goes unnoticed."""
    data = encode(name)
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        field = corrupt_field(bytes(flipped))
        if bit < 32:
            assert field == "magic"
        elif bit < 512:
            assert field == "header_crc"
        else:
            assert field in ("payload_crc", "padding")


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_truncation_at_every_byte_is_refused(name: str) -> None:
    """A torn record is never taken for a shorter one."""
    data = encode(name)
    for length in range(len(data)):
        assert corrupt_field(data[:length]) in ("header", "payload")


def test_blank_space_is_no_record() -> None:
    """Preallocated zeros must not verify, although the CRC of nothing is zero."""
    assert corrupt_field(bytes(256)) == "magic"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"version": 2}, "version"),
        ({"type": 0}, "type"),
        ({"type": 16}, "type"),
        ({"type": 0x7F}, "type"),
        ({"flags": 1}, "flags"),
        ({"reserved": 1}, "flags"),
        ({"payload_bytes": (32 << 20) + 1}, "payload_bytes"),
        ({"payload_bytes": 32 << 20}, "payload"),
        ({"payload_bytes": 128}, "payload"),
        ({"payload_bytes": 7}, "payload_crc"),
    ],
)
def test_lying_header_is_refused_before_allocation(changes: dict[str, int], field: str) -> None:
    """With correct CRCs only the checks stand between a length and memory."""
    data = reframe(encode("flush"), **changes)
    tracemalloc.start()
    named = corrupt_field(data)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert named == field
    assert peak_bytes < 1 << 20


def test_a_type_with_the_high_bit_may_be_skipped() -> None:
    """How a later version adds records that old readers pass over."""
    data = reframe(encode("flush"), type=0x80 | 1, flags=3)
    read = format.read_record(data, 0, previous_chain=CHAIN)
    assert read.record == format.SkippedRecord(type_code=0x81, payload=struct.pack("<Q", 16))
    assert read.end_offset == len(data)


def test_record_out_of_its_place_breaks_the_chain() -> None:
    """A dropped, doubled or moved record has a good CRC and a wrong predecessor."""
    data = (DATA / "segment.bin").read_bytes()
    index = json.loads((DATA / "segment.json").read_text())
    third = index[2]["offset"]
    with pytest.raises(ServiceError) as caught:
        format.read_record(data, third, previous_chain=CHAIN)
    assert caught.value.field == "chain_crc"
    assert caught.value.metadata["offset"] == str(third)
    assert corrupt_field(encode("flush"), chain=format.first_chain(bytes(16))) == "chain_crc"


def body_field(record: format.Record, body: bytes) -> str | None:
    """Return the field that decoding `body` as that type names, or None if it is accepted."""
    header = format.RecordHeader(
        type_code=int(format.type_of(record)),
        flags=0,
        log_id=bytes(16),
        lsn=0,
        generation=0,
        position=0,
        payload_bytes=len(body),
        payload_crc=0,
        chain_crc=0,
    )
    fault: ServiceError | None = None
    decoded: format.Record | format.SkippedRecord | None = None
    try:
        decoded = format.decode_body(header, body)
    except ServiceError as error:
        fault = error
    if fault is None:
        # What is accepted must be writable again: no text, count or code that encoding refuses.
        assert decoded is not None
        assert not isinstance(decoded, format.SkippedRecord)
        assert decoded.encode()
        return None
    assert fault.reason is Reason.LOG_CORRUPT
    return fault.field


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_body_cut_or_extended_is_refused_or_another_record(name: str) -> None:
    """Bodies know their own length: nothing is read past the end, nothing is left unread."""
    record, _ = RECORDS[name]
    body = record.encode()
    for length in range(len(body)):
        named = body_field(record, body[:length])
        assert named is not None, length
    assert body_field(record, body + b"\0") == "payload"


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(RECORDS)), st.data())
def test_damaged_body_never_crashes_the_reader(name: str, data: st.DataObject) -> None:
    """Whatever the counts say, only LOG_CORRUPT comes out and no memory is taken for them."""
    record, _ = RECORDS[name]
    body = bytearray(record.encode())
    at = data.draw(st.integers(0, len(body) - 1))
    body[at : at + 4] = data.draw(st.binary(min_size=4, max_size=4))
    body_field(record, bytes(body))


@pytest.mark.parametrize(
    ("name", "offset", "layout", "field"),
    [
        ("grant", 0, "<I", "extents"),
        ("release", 0, "<I", "extents"),
        ("checkpoint", 8, "<I", "entries"),
        ("place", 8, "<I", "entries"),
        ("snapshot", 12, "<I", "token_ids"),
        ("snapshot", 16, "<I", "entries"),
        ("snapshot", 20, "<I", "logprobs"),
        ("snapshot", 24, "<I", "grants"),
        ("open", 8, "<I", "token_ids"),
        ("open_manifest", 4, "<I", "manifest"),
    ],
)
def test_count_that_lies_is_refused_before_allocation(
    name: str, offset: int, layout: str, field: str
) -> None:
    """Four billion entries in a few hundred bytes."""
    record, _ = RECORDS[name]
    body = bytearray(record.encode())
    struct.pack_into(layout, body, offset, 0xFFFFFFFF)
    tracemalloc.start()
    named = body_field(record, bytes(body))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert named == field
    assert peak_bytes < 1 << 20


@pytest.mark.parametrize("bit", range(0, 512, 5))
def test_damaged_segment_header_is_refused(bit: int) -> None:
    """The chain starts from it."""
    data = bytearray((DATA / "segment.bin").read_bytes()[:64])
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ServiceError) as caught:
        format.decode_segment_header(bytes(data))
    assert caught.value.field in ("segment_magic", "segment_crc")
    with pytest.raises(ServiceError):
        format.decode_segment_header(bytes(data[:63]))


def test_partial_page_must_match_its_slot_crcs() -> None:
    """A row states one CRC per committed slot, and they hang together."""
    crcs = (1, 2, 3)
    good = fields.PageRef(arena_id=bytes(16), page=1, page_generation=2, crc=slot_list_crc(crcs))
    assert not fields.PageEntry(ref=good, tokens=3, slot_crcs=crcs).is_full
    for ref, tokens, slot_crcs in (
        (good, 2, crcs),
        (replace(good, crc=7), 3, crcs),
        (good, 0, ()),
        (good, 65, ()),
    ):
        with pytest.raises(ServiceError) as caught:
            fields.PageEntry(ref=ref, tokens=tokens, slot_crcs=slot_crcs)
        assert caught.value.reason is Reason.LOG_CORRUPT


u32 = st.integers(0, 0xFFFFFFFF)
u64 = st.integers(0, (1 << 64) - 1)
text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
real = st.floats(width=32, allow_nan=False)
refs = st.builds(
    fields.PageRef,
    arena_id=st.binary(min_size=16, max_size=16),
    page=u32,
    page_generation=u64,
    crc=u32,
)
logprobs = st.none() | st.builds(
    fields.Logprobs,
    logprob=real,
    top=st.lists(st.tuples(u32, real), max_size=20).map(tuple),
)
end_reasons = st.none() | st.sampled_from(list(fields.EndReason))
full_entries = st.builds(fields.PageEntry, ref=refs, tokens=st.integers(1, 64))


@st.composite
def partial_entries(draw: st.DrawFn) -> fields.PageEntry:
    crcs = tuple(draw(st.lists(u32, min_size=1, max_size=9)))
    ref = replace(draw(refs), crc=slot_list_crc(crcs))
    return fields.PageEntry(ref=ref, tokens=len(crcs), slot_crcs=crcs)


entries = st.lists(full_entries | partial_entries(), max_size=4).map(tuple)
tails = st.none() | partial_entries()
appends = st.builds(
    records.Append,
    token_id=u32,
    slot_ref=refs,
    slot=st.integers(0, 63),
    page_crc=st.none() | u32,
    logprobs=logprobs,
    end_reason=end_reasons,
)
seals = st.builds(
    records.Seal,
    chunk_list_digest=st.binary(min_size=32, max_size=32),
    chunk_count=u32,
    token_id=st.none() | u32,
    logprobs=logprobs,
    end_reason=end_reasons,
)
takes = st.builds(
    records.Take,
    previous_generation=u64,
    worker_id=text,
    worker_slot=st.integers(0, 0xFFFF),
    worker_incarnation=u64,
    lease_ms=u32,
    tail=tails,
)
truncates = st.builds(records.Truncate, previous_generation=u64, tail=tails)
revokes = st.builds(
    store_records.Revoke,
    prefix_id=text,
    revoked_wall_ms=u64,
    tenants=st.lists(text, max_size=4).map(tuple),
)
places = st.builds(
    store_records.Place,
    tier=st.sampled_from(list(store_records.Tier)),
    from_position=st.integers(0, 1 << 31),
    to_position=st.integers(1 << 31, (1 << 32) - 1),
    entries=entries,
    prefix_id=st.none() | text,
)
identities = st.builds(
    fields.LogIdentity,
    scope=st.builds(
        Scope,
        tenant=text,
        team=st.none() | text,
        role=st.none() | text,
        cache_salt=st.none() | text,
    ),
    request_id=text,
    body_hash=st.binary(min_size=32, max_size=32),
    sampling=st.binary(max_size=40),
    label_digest=st.binary(min_size=16, max_size=16),
    kv_digest=st.binary(min_size=16, max_size=16),
    tokenizer_hash=st.binary(min_size=8, max_size=8),
    numeric_class_id=u32,
    block_tokens=st.integers(8, 64),
    ttl_s=u32,
    opened_wall_ms=u64,
    is_stored=st.booleans(),
    is_cacheable=st.booleans(),
    ack_level=st.sampled_from(list(fields.AckLevel)),
)
snapshots = st.builds(
    state.Snapshot,
    identity=identities,
    token_ids=st.lists(u32, max_size=30).map(tuple),
    prompt_tokens=u32,
    cached_tokens=u32,
    entries=entries,
    chunk_list_digest=st.none() | st.binary(min_size=32, max_size=32),
    end_reason=end_reasons,
    logprobs=st.lists(
        st.tuples(u32, logprobs.filter(lambda item: item is not None)), max_size=3
    ).map(tuple),
    worker_id=st.none() | text,
)


@st.composite
def opens(draw: st.DrawFn) -> state.Open:
    if draw(st.booleans()):
        snapshot = draw(snapshots)
        arrival = state.Arrival(from_home=draw(text), snapshot=snapshot)
        return state.Open(identity=snapshot.identity, token_ids=(), base=arrival)
    parents = st.builds(
        state.Parent, log_id=st.binary(min_size=16, max_size=16), generation=u64, position=u32
    )
    return state.Open(
        identity=draw(identities),
        token_ids=tuple(draw(st.lists(u32, max_size=30))),
        base=draw(st.none() | parents),
    )


@settings(max_examples=200, deadline=None)
@given(
    record=st.one_of(appends, seals, takes, truncates, places, revokes, snapshots, opens()),
    log_id=st.binary(min_size=16, max_size=16),
    numbers=st.tuples(u64, u64, u32, u32),
)
def test_any_record_survives_a_round_trip(
    record: format.Record, log_id: bytes, numbers: tuple[int, int, int, int]
) -> None:
    """Optional parts absent and present, texts of any script, numbers at their bounds."""
    lsn, generation, position, chain = numbers
    address = format.RecordAddress(log_id=log_id, generation=generation, position=position)
    encoded = format.encode_record(record, address, lsn=lsn, previous_chain=chain)
    before = bytes(128)
    read = format.read_record(before + encoded.data, 128, previous_chain=chain)
    assert read.record == record
    assert read.header.address == address
    assert (read.header.lsn, read.chain, read.end_offset) == (
        lsn,
        encoded.chain,
        128 + len(encoded.data),
    )


def test_base_tokens_says_where_the_prompt_goes_on() -> None:
    """The first of `token_ids` stands at this position, whatever the base."""
    expected = {"open": 0, "open_fork": 8, "open_manifest": 40, "open_arrival": 12}
    for name, tokens in expected.items():
        record, _ = RECORDS[name]
        assert isinstance(record, state.Open)
        assert record.base_tokens == tokens


def test_append_record_is_two_cache_lines() -> None:
    """64 bytes of header, 64 of body without log probabilities: the hot path of a group commit."""
    append = records.Append(token_id=1, slot_ref=GOLDEN.page_ref(1, 2), slot=0)
    encoded = format.encode_record(append, format.STORE_ADDRESS, lsn=1, previous_chain=0)
    assert len(encoded.data) == 128


def golden_payload(name: str) -> bytes:
    row = next(
        item for item in json.loads((DATA / "segment.json").read_text()) if item["name"] == name
    )
    data = (DATA / "segment.bin").read_bytes()
    start = row["offset"]
    assert data[start + 5] == row["type"]
    (size,) = struct.unpack_from("<I", data, start + 48)
    return data[start + 64 : start + 64 + size]


def test_bodies_stand_at_the_offsets_of_the_document() -> None:
    """An independent reader: offsets of docs/formats.md and struct, none of our decoders."""
    append = golden_payload("append")
    assert struct.unpack_from("<IBBH", append, 0) == (43, 1, 3, 2)
    assert append[8:24] == GOLDEN.ARENA_ID
    assert struct.unpack_from("<QII", append, 24) == (106, 6, 0x0A0B0C0D)
    assert struct.unpack_from("<fIH", append, 40) == (-0.25, 0x0D0C0B0A, 3)
    assert struct.unpack_from("<IfIf", append, 64) == (7, -0.25, 9, -2.0)

    opened = golden_payload("open")
    assert struct.unpack_from("<BxxxIIIQ", opened, 0) == (0, 0, 11, 0, 0)
    identity = opened[40:]
    assert struct.unpack_from("<HBBIQ", identity, 0) == (1, 2, 0, 3600, 1_767_225_600_000)
    assert struct.unpack_from("<6HI", identity, 20) == (8, 4, 6, 0, 2, 5, 13)
    assert identity[100:108] == GOLDEN.TOKENIZER_HASH
    assert identity[112:142] == b'acmesearchs1req-1{"version":1}'
    assert struct.unpack("<11I", identity[142:]) == tuple(GOLDEN.token_ids(0, 11))

    checkpoint = golden_payload("checkpoint")
    assert struct.unpack_from("<IIII", checkpoint, 0) == (0, 11, 2, 0)
    assert struct.unpack_from("<HHI", checkpoint, 16 + 32) == (8, 0, 0)
    assert struct.unpack_from("<HHI", checkpoint, 56 + 32) == (3, 3, 0)
    assert struct.unpack("<3I", checkpoint[96:]) == (0x11111111, 0x22222222, 0x33333333)

    seal = golden_payload("seal")
    assert struct.unpack_from("<IBBHfI", seal, 32) == (42, 0, 3, 2, -0.25, 2)
    snapshot = golden_payload("snapshot")
    assert struct.unpack_from("<HBBIIIIIIHH", snapshot, 0) == (1, 2, 0, 11, 8, 12, 2, 1, 1, 8, 0)
    publish = golden_payload("publish")
    assert struct.unpack_from("<QQHHHH", publish, 144) == (
        1_767_225_600_000,
        1_767_229_200_000,
        5,
        11,
        4,
        2,
    )
    assert publish[168:] == b"pfx-1house styleacme\x04\0acme\x04\0beta"
