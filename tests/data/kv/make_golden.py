"""Write the golden files of the KV and log formats beside this script.

    python tests/data/kv/make_golden.py

Inputs are formulas or literals stated here and in docs/formats.md, so that a reader in another
language can make the same bytes. A changed file means a changed format: explain it in the commit.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from baton.kv import blob, blocks, convert, digests, label, manifest, numeric, splice
from baton.kv.crc import crc32c, mask_crc, slot_list_crc
from baton.kv.layout import KvDtype, KvGeometry, page_crc, slot_crc
from services.kvstore.log import fields, format, records, session_records, state, store_records

HERE = Path(__file__).parent

LAYERS, KV_HEADS, HEAD_DIM, HEAD_DIM_V, BLOCK_TOKENS = 2, 2, 4, 6, 8
FIRST_POSITION, TOTAL_TOKENS = 5, 14


def sequence(start: int, count: int) -> bytes:
    """Bytes start, start + 1, ... of a stand-in id or digest."""
    return bytes((start + index) % 256 for index in range(count))


TOKENIZER_HASH = sequence(0x10, 8)
MODEL = sequence(0x20, 16)
ROPE = sequence(0x30, 16)
LOG_ID = sequence(0x40, 16)
PARENT_ID = sequence(0x50, 16)
ARENA_ID = sequence(0x60, 16)
SEGMENT_ID = sequence(0x70, 16)
STORE_ID = sequence(0x80, 16)
CLUSTER_KEY = sequence(0x90, 32)


def token_ids(first: int, count: int) -> list[int]:
    """The id at position p is (p * 1009 + 7) mod 49152."""
    return [(position * 1009 + 7) % 49152 for position in range(first, first + count)]


def kv_arrays(first: int, count: int) -> convert.KvArrays:
    """Float32 KV whose element is exact in every float type: see docs/formats.md."""

    def part(number: int, dims: int) -> convert.Elements:
        layer, head, position, dim = np.ogrid[:LAYERS, :KV_HEADS, first : first + count, :dims]
        mixed = (layer * 2 + number) * 31 + head * 17 + position * 7 + dim * 3
        return np.asarray((mixed % 61 - 30) / 8, dtype=np.float32)

    return convert.KvArrays(dtype=KvDtype.F32, k=part(0, HEAD_DIM), v=part(1, HEAD_DIM_V))


def pair_label(dtype: KvDtype) -> label.PairLabel:
    """The label of the golden blob of `dtype`."""
    return label.PairLabel(
        model=MODEL,
        rope=ROPE,
        dtype=dtype,
        block_tokens=BLOCK_TOKENS,
        tokenizer=TOKENIZER_HASH,
        numeric_class=numeric.TORCH_BF16,
    )


def golden_blob(dtype: KvDtype, payload_offset: int) -> bytes:
    """Return a blob with a partial first page, a full one and a partial last one."""
    arrays = convert.cast(kv_arrays(FIRST_POSITION, TOTAL_TOKENS), dtype)
    header = blob.BlobHeader(
        tokenizer_hash=TOKENIZER_HASH,
        dtype=dtype,
        layers=LAYERS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        head_dim_v=HEAD_DIM_V,
        block_tokens=BLOCK_TOKENS,
        first_position=FIRST_POSITION,
        total_tokens=TOTAL_TOKENS,
        generation=3,
        model_digest=MODEL,
        kv_digest=pair_label(dtype).kv_digest(),
        log_id=LOG_ID,
        numeric_class_id=numeric.TORCH_BF16.id,
        layers_total=LAYERS,
        kv_heads_total=KV_HEADS,
        payload_offset=payload_offset,
    )
    pages = convert.scatter(arrays, BLOCK_TOKENS, FIRST_POSITION)
    _, parts = blob.encode_blob(header, pages, token_ids(FIRST_POSITION, TOTAL_TOKENS))
    return b"".join(parts)


def golden_manifest() -> manifest.Manifest:
    """Return three segments: 0..16, 16..21 and 21..40, the first a published prefix."""
    kv = pair_label(KvDtype.BF16).kv_digest()
    cuts = [(0, 16), (16, 21), (21, 40)]
    ids = token_ids(0, 40)
    segments = [
        manifest.Segment(
            log_id=sequence(0xA0 + index, 16),
            generation=index + 1,
            from_position=first,
            to_position=end,
            history_start=digests.history_at(kv, BLOCK_TOKENS, ids[:first]),
            history_end=digests.history_at(kv, BLOCK_TOKENS, ids[:end]),
            kv_digest=kv,
            tokenizer_hash=TOKENIZER_HASH,
            block_tokens=BLOCK_TOKENS,
            numeric_class_id=numeric.TORCH_BF16.id,
            text_hash=digests.text_hash(b"You are Baton.") if index == 0 else None,
            ids_hash=digests.ids_hash(ids[first:end]) if index == 0 else None,
        )
        for index, (first, end) in enumerate(cuts)
    ]
    return splice.splice(segments)


def page_ref(page: int, crc: int) -> fields.PageRef:
    """A reference into the golden arena."""
    return fields.PageRef(arena_id=ARENA_ID, page=page, page_generation=page + 100, crc=crc)


def full_entry(page: int) -> fields.PageEntry:
    """A full page."""
    return fields.PageEntry(ref=page_ref(page, 0x01020304 + page), tokens=BLOCK_TOKENS)


def partial_entry(page: int, tokens: int) -> fields.PageEntry:
    """A page with `tokens` committed slots."""
    crcs = tuple(0x11111111 * (slot + 1) for slot in range(tokens))
    ref = page_ref(page, slot_list_crc(crcs))
    return fields.PageEntry(ref=ref, tokens=tokens, slot_crcs=crcs)


def identity() -> fields.LogIdentity:
    """The golden log's identity."""
    golden = pair_label(KvDtype.BF16)
    return fields.LogIdentity(
        scope=blocks.Scope(tenant="acme", team="search", cache_salt="s1"),
        request_id="req-1",
        body_hash=digests.body_hash(b"{}"),
        sampling=b'{"version":1}',
        label_digest=golden.digest(),
        kv_digest=golden.kv_digest(),
        tokenizer_hash=TOKENIZER_HASH,
        numeric_class_id=numeric.TORCH_BF16.id,
        block_tokens=BLOCK_TOKENS,
        ttl_s=3600,
        opened_wall_ms=1_767_225_600_000,
        is_cacheable=False,
        ack_level=fields.AckLevel.DISK,
    )


def extent() -> fields.Extent:
    """Pages 4, 5 and 6."""
    return fields.Extent(arena_id=ARENA_ID, first_page=4, page_count=3, page_generation=9)


def grant() -> records.Grant:
    """The golden grant."""
    return records.Grant(
        worker_id="prefill-a", worker_slot=2, worker_incarnation=77, extents=(extent(),)
    )


def snapshot() -> state.Snapshot:
    """The golden snapshot: 12 tokens, KV of 11."""
    return state.Snapshot(
        identity=identity(),
        token_ids=tuple(token_ids(0, 12)),
        prompt_tokens=11,
        cached_tokens=8,
        entries=(full_entry(4), partial_entry(5, 3)),
        chunk_list_digest=sequence(0xB0, 32),
        end_reason=fields.EndReason.LENGTH,
        logprobs=((11, fields.Logprobs(logprob=-0.5, top=((5, -0.5), (6, -1.25)))),),
        grants=(grant(),),
        worker_id="decode-a",
    )


def golden_publish() -> store_records.Publish:
    """The PUBLISH record."""
    seen = identity()
    return store_records.Publish(
        prefix_id="pfx-1",
        name="house style",
        owner_tenant="acme",
        tenants=("acme", "beta"),
        text_hash=digests.text_hash(b"You are Baton."),
        ids_hash=digests.ids_hash(token_ids(0, 8)),
        history_end=sequence(0xC0, 32),
        template_digest=digests.template_digest("{{ messages }}"),
        kv_digest=seen.kv_digest,
        tokenizer_hash=TOKENIZER_HASH,
        numeric_class_id=numeric.TORCH_BF16.id,
        text_bytes=14,
        created_wall_ms=1_767_225_600_000,
        expires_wall_ms=1_767_229_200_000,
    )


def golden_place() -> store_records.Place:
    """The PLACE record."""
    return store_records.Place(
        tier=store_records.Tier.NVME,
        from_position=0,
        to_position=11,
        entries=(full_entry(1000), partial_entry(1001, 3)),
        prefix_id="pfx-1",
    )


def golden_seal() -> records.Seal:
    """The SEAL record."""
    return records.Seal(
        chunk_list_digest=sequence(0xB0, 32), chunk_count=2, token_id=42, logprobs=LOGPROBS
    )


def golden_take() -> records.Take:
    """The TAKE record."""
    return records.Take(
        previous_generation=1,
        worker_id="decode-a",
        worker_slot=3,
        worker_incarnation=78,
        lease_ms=3000,
        tail=partial_entry(6, 3),
    )


def golden_session() -> session_records.Session:
    """The SESSION record."""
    return session_records.Session(
        session_id="sess-1",
        tenant="acme",
        generation=3,
        created_wall_ms=1_767_225_600_000,
        expires_wall_ms=1_767_312_000_000,
        ttl_s=86_400,
        home="node-b:7003",
        parent_id="sess-0",
        parent_position=9,
    )


LOGPROBS = fields.Logprobs(logprob=-0.25, top=((7, -0.25), (9, -2.0)))


def golden_records() -> list[tuple[str, format.Record, format.RecordAddress]]:
    """One record of every type, OPEN in each of its four forms, in the order of the segment."""
    seen = identity()
    parent = state.Parent(log_id=PARENT_ID, generation=2, position=8)
    append = records.Append(
        token_id=43,
        slot_ref=page_ref(6, 0x0A0B0C0D),
        slot=3,
        page_crc=0x0D0C0B0A,
        logprobs=LOGPROBS,
        end_reason=fields.EndReason.STOP,
    )
    checkpoint = records.Checkpoint(
        from_position=0, to_position=11, entries=(full_entry(4), partial_entry(5, 3))
    )
    moved = records.Moved(
        previous_generation=3, to_home="node-b:7003", chunk_list_digest=sequence(0xB0, 32)
    )
    truncate = records.Truncate(previous_generation=2, tail=partial_entry(7, 2))
    arrival = state.Arrival(from_home="node-a:7003", snapshot=snapshot())
    spliced = golden_manifest()
    prompt = tuple(token_ids(0, 11))
    items: list[tuple[str, format.Record, int, int]] = [
        ("flush", store_records.Flush(durable_lsn=16), 0, 0),
        ("open", state.Open(identity=seen, token_ids=prompt), 1, 0),
        ("open_fork", state.Open(identity=seen, token_ids=prompt[8:], base=parent), 1, 8),
        ("open_manifest", state.Open(identity=seen, token_ids=(1, 2), base=spliced), 1, 40),
        ("open_arrival", state.Open(identity=seen, token_ids=(), base=arrival), 4, 12),
        ("grant", grant(), 1, 0),
        ("release", records.Release(extents=(extent(),)), 1, 0),
        ("checkpoint", checkpoint, 1, 11),
        ("seal", golden_seal(), 1, 11),
        ("take", golden_take(), 2, 12),
        ("append", append, 2, 12),
        ("truncate", truncate, 3, 10),
        ("moved", moved, 4, 10),
        ("place", golden_place(), 1, 11),
        ("publish", golden_publish(), 1, 8),
        (
            "revoke",
            store_records.Revoke(
                prefix_id="pfx-1", revoked_wall_ms=1_767_226_000_000, tenants=("beta",)
            ),
            0,
            0,
        ),
        ("snapshot", snapshot(), 2, 12),
        ("close", store_records.Close(reason=store_records.CloseReason.EXPIRED), 3, 10),
        ("session", golden_session(), 2, 12),
    ]
    of_store = {"flush", "revoke"}
    return [
        (
            name,
            record,
            format.RecordAddress(
                log_id=format.STORE_LOG_ID if name in of_store else LOG_ID,
                generation=generation,
                position=position,
            ),
        )
        for name, record, generation, position in items
    ]


def golden_segment() -> tuple[bytes, list[dict[str, Any]]]:
    """Return a segment of all golden records from LSN 17 on, and where each stands."""
    header = format.SegmentHeader(
        segment_id=SEGMENT_ID, store_id=STORE_ID, sequence=5, first_lsn=17, segment_bytes=1 << 20
    )
    data = format.encode_segment_header(header)
    chain = format.first_chain(SEGMENT_ID)
    index = []
    for lsn, (name, record, address) in enumerate(golden_records(), start=17):
        encoded = format.encode_record(record, address, lsn=lsn, previous_chain=chain)
        index.append(
            {
                "name": name,
                "type": int(format.type_of(record)),
                "lsn": lsn,
                "offset": len(data),
                "record_bytes": len(encoded.data),
                "header": encoded.data[: format.HEADER_BYTES].hex(),
            }
        )
        data += encoded.data
        chain = encoded.chain
    return data, index


def golden_digests() -> dict[str, Any]:
    """Return every digest's input (as literals) and value, in hex."""
    golden = pair_label(KvDtype.BF16)
    kv = golden.kv_digest()
    scope = blocks.Scope(tenant="acme", team="search", cache_salt="s1")
    secret = blocks.scope_secret(CLUSTER_KEY, 1, scope)
    chain = blocks.BlockChain(secret=secret, scope=scope, kv=kv, block_tokens=BLOCK_TOKENS)
    config: dict[str, digests.ConfigValue] = {
        "layers": 30,
        "rope_theta": 100000.0,
        "tied": True,
        "name": "tiny",
        "window": None,
    }
    weight = digests.content_hash([b"weights"])
    pages = [
        [digests.ChunkPage(first_position=0, tokens=8, crc=0x01020308)],
        [digests.ChunkPage(first_position=8, tokens=3, crc=partial_entry(5, 3).ref.crc)],
    ]
    page = convert.scatter(convert.cast(kv_arrays(8, 8), KvDtype.BF16), BLOCK_TOKENS, 8)[0]
    shape = KvGeometry(
        layers=LAYERS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        head_dim_v=HEAD_DIM_V,
        block_tokens=BLOCK_TOKENS,
        dtype=KvDtype.BF16,
    )
    values: dict[str, bytes] = {
        "canonical_ab_empty_c": digests.canonical("ab", b"", b"c"),
        "canonical_config": digests.canonical_config(config),
        "content_hash_weights": weight,
        "model_digest": digests.model_digest(config, [weight, weight]),
        "tokenizer_hash": digests.tokenizer_hash(
            "bpe", ["a", "b", "ab"], ["a b"], [2], {"add_bos": False}
        ),
        "template_digest": digests.template_digest("{{ messages }}"),
        "rope_digest": digests.rope_digest({"theta": 10000.0, "dim": 4, "scaling": None}),
        "kv_digest": kv,
        "kv_digest_with_adapter": golden.kv_digest(adapter=sequence(0xD0, 16)),
        "label_digest": golden.digest(),
        "ids_hash_0_16": digests.ids_hash(token_ids(0, 16)),
        "text_hash": digests.text_hash(b"You are Baton."),
        "body_hash": digests.body_hash(b"{}"),
        "chunk_list_digest": digests.chunk_list_digest(kv, pages),
        "history_0": digests.history_start(kv),
        "history_5": digests.history_at(kv, BLOCK_TOKENS, token_ids(0, 5)),
        "history_8": digests.history_at(kv, BLOCK_TOKENS, token_ids(0, 8)),
        "history_20": digests.history_at(kv, BLOCK_TOKENS, token_ids(0, 20)),
        "scope_canonical": scope.canonical_bytes(),
        "scope_secret": secret,
        "manifest_digest": golden_manifest().digest(),
    }
    for index, key in enumerate(chain.keys(token_ids(0, 20))):
        values[f"block_key_{index}"] = key
    numbers = {
        "crc32c_123456789": crc32c(b"123456789"),
        "crc32c_masked_123456789": mask_crc(crc32c(b"123456789")),
        "numeric_class_torch_bf16": numeric.TORCH_BF16.id,
        "numeric_class_native_q4_1": numeric.NATIVE_Q4_1.id,
        "numeric_class_torch_f32": numeric.TORCH_F32.id,
        "first_chain": format.first_chain(SEGMENT_ID),
        "slot_list_crc_3": partial_entry(5, 3).ref.crc,
        "page_crc_bf16_block_1": page_crc(shape, page),
        "slot_crc_bf16_position_11": slot_crc(shape, page, 3),
    }
    return {
        "bytes": {name: value.hex() for name, value in values.items()},
        "u32": {name: f"{value:08x}" for name, value in numbers.items()},
    }


def build() -> dict[str, bytes]:
    """Return every golden file's name and content."""
    segment, index = golden_segment()
    files = {
        f"blob_{dtype.text}.bin": golden_blob(dtype, blob.PAYLOAD_OFFSET_WIRE) for dtype in KvDtype
    }
    files["blob_bf16_file.bin"] = golden_blob(KvDtype.BF16, blob.PAYLOAD_OFFSET_FILE)
    files["manifest.bin"] = golden_manifest().canonical_bytes()
    files["segment.bin"] = segment
    files["segment.json"] = _json(index)
    files["digests.json"] = _json(golden_digests())
    return files


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def main() -> None:
    """Write the files."""
    for name, content in build().items():
        (HERE / name).write_bytes(content)
        sys.stdout.write(f"{name}: {len(content)} bytes\n")


if __name__ == "__main__":
    main()
