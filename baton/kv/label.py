"""The pair label: what a writer and a reader of KV must agree on before a byte moves.

Owns the comparison and its order. Never decides which worker to pair (that is routing).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from baton.errors import Reason, ServiceError
from baton.kv.digests import DIGEST_BYTES, TOKENIZER_HASH_BYTES, canonical, kv_digest
from baton.kv.layout import LAYOUT, KvDtype
from baton.kv.numeric import DEFAULT_POLICY, CompatPolicy, NumericClass

LABEL_DIGEST_BYTES: Final = DIGEST_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLabel:
    """A worker's or a log's label.

    `model` is the model digest (16 bytes), `rope` the RoPE digest (16 bytes), `tokenizer` the
    tokenizer hash (8 bytes). Service and engine versions are carried elsewhere and not compared.
    """

    model: bytes
    rope: bytes
    dtype: KvDtype
    block_tokens: int
    tokenizer: bytes
    numeric_class: NumericClass
    layout: int = LAYOUT

    def __post_init__(self) -> None:
        sizes = (
            ("model", DIGEST_BYTES),
            ("rope", DIGEST_BYTES),
            ("tokenizer", TOKENIZER_HASH_BYTES),
        )
        for name, size in sizes:
            if len(getattr(self, name)) != size:
                raise ServiceError(
                    Reason.INVALID_REQUEST, f"label {name} must be {size} bytes", field=name
                )

    def kv_digest(self, adapter: bytes | None = None) -> bytes:
        """Return the KV digest (16 bytes) of this label, with an adapter's digest if one is on."""
        return kv_digest(
            model=self.model,
            rope=self.rope,
            dtype=self.dtype,
            block_tokens=self.block_tokens,
            adapter=adapter,
            layout=self.layout,
        )

    def digest(self) -> bytes:
        """Return the label digest (16 bytes), as OPEN records carry it."""
        numbers = struct.pack("<HH", self.layout, self.block_tokens)
        data = canonical(
            "baton.label.v1",
            self.model,
            self.rope,
            self.dtype.text,
            numbers,
            self.tokenizer,
            self.numeric_class.text,
        )
        return blake3(data).digest(LABEL_DIGEST_BYTES)

    def as_metadata(self) -> dict[str, str]:
        """Return the compared fields as text, in the order of comparison."""
        return {
            "model": self.model.hex(),
            "rope": self.rope.hex(),
            "kv_dtype": self.dtype.text,
            "layout": str(self.layout),
            "block_tokens": str(self.block_tokens),
            "tokenizer": self.tokenizer.hex(),
            "numeric_class": self.numeric_class.text,
        }


def first_mismatch(
    ours: PairLabel, theirs: PairLabel, policy: CompatPolicy = DEFAULT_POLICY
) -> str | None:
    """Return the name of the first field in which `theirs` (the writer) does not suit `ours`.

    None: the reader may use the writer's KV.
    """
    mine, other = ours.as_metadata(), theirs.as_metadata()
    for name in mine:
        if name == "numeric_class":
            writer, reader = theirs.numeric_class.id, ours.numeric_class.id
            if not policy.is_readable(writer=writer, reader=reader):
                return name
        elif mine[name] != other[name]:
            return name
    return None


def require_match(
    ours: PairLabel, theirs: PairLabel, policy: CompatPolicy = DEFAULT_POLICY
) -> None:
    """Refuse a writer's label that `ours` (the reader) cannot use.

    Raises COMPAT_MISMATCH, or TOKENIZER_MISMATCH for the tokenizer, with metadata field, ours,
    theirs.
    """
    name = first_mismatch(ours, theirs, policy)
    if name is not None:
        raise mismatch(name, ours.as_metadata()[name], theirs.as_metadata()[name])


def mismatch(name: str, ours: str, theirs: str) -> ServiceError:
    """Return the error of one mismatching field, spelt the same wherever labels are compared."""
    is_tokenizer = name in ("tokenizer", "tokenizer_hash")
    return ServiceError(
        Reason.TOKENIZER_MISMATCH if is_tokenizer else Reason.COMPAT_MISMATCH,
        f"{name} differs: ours {ours}, theirs {theirs}; pair only workers of one label",
        field=name,
        metadata={"field": name, "ours": ours, "theirs": theirs},
    )
