"""Digests of history, and the splice that rests on them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import Reason, ServiceError
from baton.kv.digests import (
    ConfigValue,
    HistoryDigest,
    canonical,
    canonical_config,
    history_at,
    history_start,
    history_step,
    ids_bytes,
    ids_hash,
    text_hash,
)
from baton.kv.manifest import Manifest, Segment
from baton.kv.numeric import NATIVE_Q4_1, STRICT_POLICY, TORCH_BF16, TORCH_F32
from baton.kv.splice import decode_manifest, splice

KV = b"k" * 16
BLOCK = 8


def make_segments(cuts: list[int], ids: list[int]) -> list[Segment]:
    bounds = list(zip([0, *cuts], [*cuts, len(ids)], strict=True))
    return [
        Segment(
            log_id=bytes([index]) * 16,
            generation=index,
            from_position=first,
            to_position=end,
            history_start=history_at(KV, BLOCK, ids[:first]),
            history_end=history_at(KV, BLOCK, ids[:end]),
            kv_digest=KV,
            tokenizer_hash=b"t" * 8,
            block_tokens=BLOCK,
            numeric_class_id=TORCH_BF16.id,
        )
        for index, (first, end) in enumerate(bounds)
    ]


@st.composite
def cut_sequences(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    ids = draw(st.lists(st.integers(0, 50_000), min_size=2, max_size=60))
    cuts = draw(st.sets(st.integers(1, len(ids) - 1), max_size=5))
    return sorted(cuts), ids


@settings(max_examples=80, deadline=None)
@given(cut_sequences())
def test_any_cut_of_one_history_joins_again(case: tuple[list[int], list[int]]) -> None:
    """Where segments come from one history they meet, at any position."""
    cuts, ids = case
    joined = splice(make_segments(cuts, ids))
    assert joined.total_tokens == len(ids)
    assert joined.history_end == history_at(KV, BLOCK, ids)
    assert decode_manifest(joined.canonical_bytes()) == joined
    covered = []
    for plan in joined.pages():
        for source in plan.sources:
            start = plan.block_index * BLOCK + source.first_slot
            covered += range(start, start + source.tokens)
        assert plan.is_shared == (len(plan.sources) == 1 and plan.sources[0].tokens == BLOCK)
    assert covered == list(range(len(ids)))


def test_aligned_joint_shares_and_unaligned_joint_copies_one_block() -> None:
    """Only the block that holds the joint, and the partial tail, are copied."""
    joined = splice(make_segments([16, 21], list(range(40))))
    assert [plan.is_shared for plan in joined.pages()] == [True, True, False, True, True]
    tail = splice(make_segments([16], list(range(21))))
    assert [plan.is_shared for plan in tail.pages()] == [True, True, False]


def refused(segments: list[Segment], **kwargs: object) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        # A table of cases.
        splice(segments, **kwargs)  # type: ignore[arg-type]
    return caught.value


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize(
    ("change", "field", "reason"),
    [
        ({"from_position": 3}, "from_position", Reason.INVALID_REQUEST),
        ({"history_start": b"x" * 32}, "history_start", Reason.INVALID_REQUEST),
        ({"history_end": b"x" * 31}, "history_end", Reason.INVALID_REQUEST),
        ({"to_position": 0}, "to_position", Reason.INVALID_REQUEST),
        ({"log_id": b"short"}, "log_id", Reason.INVALID_REQUEST),
        ({"text_hash": b"x" * 32}, "ids_hash", Reason.INVALID_REQUEST),
        ({"ids_hash": b"x" * 32}, "text_hash", Reason.INVALID_REQUEST),
        ({"generation": 1 << 64}, "generation", Reason.INVALID_REQUEST),
    ],
)
def test_bad_segment_is_refused_naming_index_and_field(
    index: int, change: dict[str, object], field: str, reason: Reason
) -> None:
    """The caller offered several logs: which one, and what about it."""
    segments = make_segments([16, 21], list(range(40)))
    segments[index] = replace(segments[index], **change)
    error = refused(segments)
    assert error.reason is reason
    assert error.metadata["segment"] == str(index)
    assert error.metadata["field"] == field
    assert error.field == f"segments[{index}].{field}"


@pytest.mark.parametrize(
    ("change", "field", "reason"),
    [
        ({"kv_digest": b"K" * 16}, "kv_digest", Reason.COMPAT_MISMATCH),
        ({"block_tokens": 16}, "block_tokens", Reason.COMPAT_MISMATCH),
        ({"tokenizer_hash": b"T" * 8}, "tokenizer_hash", Reason.TOKENIZER_MISMATCH),
        ({"numeric_class_id": TORCH_F32.id}, "numeric_class", Reason.COMPAT_MISMATCH),
    ],
)
def test_segment_of_another_label_is_refused(
    change: dict[str, object], field: str, reason: Reason
) -> None:
    """KV of another meaning never joins, whatever its history says."""
    segments = make_segments([16, 21], list(range(40)))
    segments[1] = replace(segments[1], **change)
    error = refused(segments)
    assert (error.reason, error.metadata["segment"], error.metadata["field"]) == (
        reason,
        "1",
        field,
    )
    assert error.metadata["ours"] != error.metadata["theirs"]


def test_numeric_classes_join_as_policy_allows() -> None:
    """A native segment behind a torch prefix is the usual case; a strict policy refuses it."""
    segments = make_segments([16], list(range(40)))
    segments[1] = replace(segments[1], numeric_class_id=NATIVE_Q4_1.id)
    assert splice(segments).total_tokens == 40
    assert refused(segments, policy=STRICT_POLICY).metadata["field"] == "numeric_class"


def test_segments_whose_histories_differ_by_one_token_do_not_join() -> None:
    """The KV behind the joint saw another token: pointers there would be a wrong answer."""
    ids = list(range(40))
    other = [*ids[:3], 999, *ids[4:]]
    mixed = [make_segments([16], ids)[0], make_segments([16], other)[1]]
    error = refused(mixed)
    assert error.metadata == {"field": "history_start", "segment": "1"}


def test_swapped_and_missing_segments_do_not_join() -> None:
    """Order and completeness come from positions."""
    segments = make_segments([16, 32], list(range(40)))
    assert refused([segments[1], segments[0], segments[2]]).metadata["segment"] == "0"
    assert refused([segments[0], segments[2]]).metadata["field"] == "from_position"
    assert refused([]).field == "segments"
    assert refused(segments * 400).field == "segments"


def test_manifest_bytes_are_refused_when_they_lie() -> None:
    """Truncated, extended, or with a count that does not fit."""
    joined = splice(make_segments([16], list(range(40))))
    data = joined.canonical_bytes()
    for wrong in (
        b"",
        data[:-1],
        data + b"\0",
        b"XXXX" + data[4:],
        data[:6] + b"\xff\xff" + data[8:],
    ):
        with pytest.raises(ServiceError) as caught:
            decode_manifest(wrong)
        assert caught.value.reason is Reason.INVALID_REQUEST
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1
        try:
            decoded = decode_manifest(bytes(flipped))
        except ServiceError:
            continue
        assert decoded.canonical_bytes() == bytes(flipped)
        assert decoded.digest() != joined.digest()


def test_prefix_hashes_survive_the_manifest() -> None:
    """Both hashes of a published prefix, or neither."""
    segments = make_segments([16], list(range(40)))
    hashes = {"text_hash": text_hash(b"x"), "ids_hash": ids_hash([1])}
    segments[0] = replace(segments[0], **hashes)
    joined = splice(segments)
    assert isinstance(joined, Manifest)
    assert decode_manifest(joined.canonical_bytes()).segments == tuple(segments)


@given(st.lists(st.integers(0, 0xFFFFFFFF), max_size=40), st.integers(8, 11), st.data())
def test_history_digest_is_incremental(ids: list[int], block: int, data: st.DataObject) -> None:
    """Fed in any portions it gives the digest of the whole, by the definition of the format."""
    cut = data.draw(st.integers(0, len(ids)))
    history = HistoryDigest(KV, block)
    history.extend(ids[:cut])
    assert history.digest() == history_at(KV, block, ids[:cut])
    history.extend(ids[cut:])
    expected = history_start(KV)
    for first in range(0, len(ids), block):
        expected = history_step(expected, ids[first : first + block])
    assert history.digest() == expected
    assert history.position == len(ids)


@given(st.lists(st.binary(max_size=6), max_size=4), st.lists(st.binary(max_size=6), max_size=4))
def test_canonical_encoding_is_injective(one: list[bytes], other: list[bytes]) -> None:
    """Two field lists encode alike only if they are alike."""
    assert (canonical(*one) == canonical(*other)) == (one == other)


def test_config_values_of_different_types_differ() -> None:
    """1, 1.0, True and "1" are four configurations."""
    values: list[ConfigValue] = [1, 1.0, True, "1", None, "n:", "i:1"]
    assert len({canonical_config({"x": value}) for value in values}) == len(values)
    assert canonical_config({"b": 1, "a": 2}) == canonical_config({"a": 2, "b": 1})


def test_ids_encode_alike_from_lists_and_arrays() -> None:
    """The engine has arrays, the gateway lists."""
    ids = [0, 1, 49151, 0xFFFFFFFF]
    assert (
        ids_bytes(ids) == ids_bytes(np.array(ids, np.int64)) == ids_bytes(np.array(ids, np.uint32))
    )
    with pytest.raises(AssertionError):
        ids_bytes(np.array([-1], np.int64))
