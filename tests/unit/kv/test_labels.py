"""Labels, numeric classes, scopes and block keys: who may read whose KV."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from baton.errors import Reason, ServiceError
from baton.kv.blocks import BlockChain, Scope, block_key, scope_secret
from baton.kv.label import PairLabel, first_mismatch, require_match
from baton.kv.layout import KvDtype
from baton.kv.numeric import (
    DEFAULT_POLICY,
    NATIVE_Q4_1,
    STRICT_POLICY,
    TORCH_BF16,
    TORCH_F32,
    TORCH_Q4_1,
    NumericClass,
)

LABEL = PairLabel(
    model=b"m" * 16,
    rope=b"r" * 16,
    dtype=KvDtype.BF16,
    block_tokens=16,
    tokenizer=b"t" * 8,
    numeric_class=TORCH_BF16,
)


@pytest.mark.parametrize(
    ("change", "field", "reason"),
    [
        ({"model": b"M" * 16}, "model", Reason.COMPAT_MISMATCH),
        ({"rope": b"R" * 16}, "rope", Reason.COMPAT_MISMATCH),
        ({"dtype": KvDtype.F16}, "kv_dtype", Reason.COMPAT_MISMATCH),
        ({"layout": 2}, "layout", Reason.COMPAT_MISMATCH),
        ({"block_tokens": 32}, "block_tokens", Reason.COMPAT_MISMATCH),
        ({"tokenizer": b"T" * 8}, "tokenizer", Reason.TOKENIZER_MISMATCH),
        ({"numeric_class": TORCH_F32}, "numeric_class", Reason.COMPAT_MISMATCH),
    ],
)
def test_mismatch_names_the_field(change: dict[str, object], field: str, reason: Reason) -> None:
    """Field, ours and theirs travel as metadata, so that an operator sees which side is wrong."""
    theirs = replace(LABEL, **change)
    with pytest.raises(ServiceError) as caught:
        require_match(LABEL, theirs)
    assert caught.value.reason is reason
    assert caught.value.metadata["field"] == field
    assert caught.value.metadata["ours"] == LABEL.as_metadata()[field]
    assert caught.value.metadata["theirs"] == theirs.as_metadata()[field]
    assert LABEL.digest() != theirs.digest()


def test_first_of_several_mismatches_is_named() -> None:
    """The order of comparison is fixed."""
    assert first_mismatch(LABEL, replace(LABEL, tokenizer=b"T" * 8, rope=b"R" * 16)) == "rope"
    assert first_mismatch(LABEL, LABEL) is None
    require_match(LABEL, LABEL)


def test_kv_digest_ignores_tokenizer_and_numeric_class_but_not_the_adapter() -> None:
    """They decide who may read, not what the bytes mean."""
    same = replace(LABEL, tokenizer=b"T" * 8, numeric_class=TORCH_F32)
    assert same.kv_digest() == LABEL.kv_digest()
    assert LABEL.kv_digest(adapter=b"a" * 16) != LABEL.kv_digest()


def test_label_of_wrong_size_is_refused() -> None:
    """Digests come from peers."""
    with pytest.raises(ServiceError) as caught:
        replace(LABEL, tokenizer=b"short")
    assert caught.value.field == "tokenizer"


def test_default_policy_pairs_torch_bf16_with_the_native_class() -> None:
    """Both ways, and nothing else."""
    native = replace(LABEL, numeric_class=NATIVE_Q4_1)
    assert first_mismatch(LABEL, native) is None
    assert first_mismatch(native, LABEL) is None
    assert first_mismatch(LABEL, native, STRICT_POLICY) == "numeric_class"
    assert first_mismatch(LABEL, LABEL, STRICT_POLICY) is None
    expected = {TORCH_BF16.id, TORCH_Q4_1.id, NATIVE_Q4_1.id}
    assert DEFAULT_POLICY.writers_for(NATIVE_Q4_1.id) == expected
    assert DEFAULT_POLICY.writers_for(TORCH_F32.id) == {TORCH_F32.id}


@pytest.mark.parametrize("weights", ["q4_0", "q8_0"])
def test_default_policy_pairs_every_kind_of_packed_blocks(weights: str) -> None:
    """Prompts run on torch, steps on the kernel, of the same file; other files are other models."""
    native, torch = replace(NATIVE_Q4_1, weights=weights), replace(TORCH_Q4_1, weights=weights)
    assert DEFAULT_POLICY.is_readable(writer=torch.id, reader=native.id)
    assert DEFAULT_POLICY.is_readable(writer=native.id, reader=torch.id)
    assert not DEFAULT_POLICY.is_readable(writer=NATIVE_Q4_1.id, reader=native.id)


def test_numeric_class_text_round_trip() -> None:
    """One spelling only."""
    text = "weights=q4_1 act=int16 acc=f32 kv=bf16 invariant=no"
    parsed = NumericClass.parse(text)
    assert parsed.text == text == str(parsed)
    assert parsed == NATIVE_Q4_1
    assert replace(parsed, is_invariant=True).text.endswith("invariant=yes")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "weights=q4_1",
        "act=int16 weights=q4_1 acc=f32 kv=bf16 invariant=no",
        "weights=q4_1  act=int16 acc=f32 kv=bf16 invariant=no",
        "weights=Q4_1 act=int16 acc=f32 kv=bf16 invariant=no",
        "weights=q4_1 act=int16 acc=f32 kv=bf16 invariant=maybe",
        "weights= act=int16 acc=f32 kv=bf16 invariant=no",
        "weights=q4_1 act=int16 acc=f32 kv=bf16 invariant=no x=y",
    ],
)
def test_malformed_numeric_class_is_refused(text: str) -> None:
    """Two spellings of one class would have two ids."""
    with pytest.raises(ServiceError) as caught:
        NumericClass.parse(text)
    assert caught.value.field == "numeric_class"


CLUSTER_KEY = bytes(range(32))
SCOPE = Scope(tenant="acme", team="search")
KV = b"k" * 16


def key_of(scope: Scope, version: int = 1, parent: bytes | None = None) -> bytes:
    return block_key(scope_secret(CLUSTER_KEY, version, scope), scope, KV, [1, 2, 3], parent=parent)


def test_block_keys_of_two_scopes_never_meet() -> None:
    """Tenant, team, role, salt, key version and parent each change the key."""
    scopes = [
        Scope(tenant="acme"),
        SCOPE,
        Scope(tenant="acme", role="search"),
        Scope(tenant="acmesearch"),
        SCOPE.narrowed("x"),
        SCOPE.narrowed("y"),
    ]
    keys = [key_of(scope) for scope in scopes]
    keys += [key_of(SCOPE, version=2), key_of(SCOPE, parent=b"p" * 32)]
    assert len(set(keys)) == len(keys)
    assert SCOPE.narrowed(None) == SCOPE


def test_first_block_has_a_zero_parent() -> None:
    """A chain's start is written as 32 zeros."""
    assert key_of(SCOPE) == key_of(SCOPE, parent=bytes(32))


def test_chain_has_one_key_per_full_block_and_can_be_continued() -> None:
    """A chain split at a block boundary is the same chain."""
    chain = BlockChain(
        secret=scope_secret(CLUSTER_KEY, 1, SCOPE), scope=SCOPE, kv=KV, block_tokens=8
    )
    ids = list(range(27))
    keys = list(chain.keys(ids))
    assert len(keys) == 3
    assert list(chain.keys(ids[:7])) == []
    assert list(chain.keys(ids[8:], parent=keys[0])) == keys[1:]
    changed = [*ids[:9], 999, *ids[10:]]
    assert [one == other for one, other in zip(keys, chain.keys(changed), strict=True)] == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tenant": ""}, "tenant"),
        ({"tenant": "t" * 257}, "tenant"),
        ({"tenant": "t", "team": ""}, "team"),
        ({"tenant": "t", "cache_salt": "ü" * 129}, "cache_salt"),
    ],
)
def test_scope_text_is_bounded(fields: dict[str, str], named: str) -> None:
    """An empty part would read as an absent one."""
    with pytest.raises(ServiceError) as caught:
        Scope(**fields)
    assert re.fullmatch("tenant|team|cache_salt", named)
    assert caught.value.field == named
