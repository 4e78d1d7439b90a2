"""Numeric classes: how KV was computed, and which classes read each other's KV.

Owns the class text, its id and the compatibility policy. Names no kernel and no device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from blake3 import blake3

from baton.errors import Reason, ServiceError

_WORD: Final = re.compile(r"[a-z0-9_]{1,16}")
_KEYS: Final = ("weights", "act", "acc", "kv", "invariant")


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericClass:
    """A numeric class, such as `weights=q4_1 act=int16 acc=f32 kv=bf16 invariant=no`.

    `is_invariant`: a token's KV does not depend on what else was in its batch. Raises
    INVALID_REQUEST for a value that is no word of [a-z0-9_], 1 to 16 characters.
    """

    weights: str
    act: str
    acc: str
    kv: str
    is_invariant: bool

    def __post_init__(self) -> None:
        for name in ("weights", "act", "acc", "kv"):
            if not _WORD.fullmatch(getattr(self, name)):
                raise _malformed(f"{name} must be 1 to 16 of a-z, 0-9 and _")

    @property
    def text(self) -> str:
        """The one spelling of this class."""
        invariant = "yes" if self.is_invariant else "no"
        values = (self.weights, self.act, self.acc, self.kv, invariant)
        return " ".join(f"{key}={value}" for key, value in zip(_KEYS, values, strict=True))

    @property
    def id(self) -> int:
        """The u32 of headers: the first 4 bytes of BLAKE3 of the text, little-endian."""
        return int.from_bytes(blake3(self.text.encode()).digest(4), "little")

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: str) -> NumericClass:
        """Parse a class text; INVALID_REQUEST (field `numeric_class`) unless spelt exactly so."""
        pairs = [item.partition("=") for item in text.split(" ")]
        if tuple(key for key, _, _ in pairs) != _KEYS:
            raise _malformed(f"must give {', '.join(_KEYS)} in this order, one space apart")
        weights, act, acc, kv, invariant = (value for _, _, value in pairs)
        if invariant not in ("yes", "no"):
            raise _malformed("invariant must be yes or no")
        return cls(weights=weights, act=act, acc=acc, kv=kv, is_invariant=invariant == "yes")


def _malformed(remedy: str) -> ServiceError:
    return ServiceError(Reason.INVALID_REQUEST, f"numeric class: {remedy}", field="numeric_class")


TORCH_F32: Final = NumericClass.parse("weights=f32 act=f32 acc=f32 kv=f32 invariant=no")
TORCH_BF16: Final = NumericClass.parse("weights=bf16 act=bf16 acc=f32 kv=bf16 invariant=no")
TORCH_Q4_1: Final = NumericClass.parse("weights=q4_1 act=bf16 acc=f32 kv=bf16 invariant=no")
NATIVE_Q4_1: Final = NumericClass.parse("weights=q4_1 act=int16 acc=f32 kv=bf16 invariant=no")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompatPolicy:
    """Which writer classes each reader class accepts; a class always reads its own KV.

    `readable` holds (writer id, reader id) pairs.
    """

    readable: frozenset[tuple[int, int]]

    @classmethod
    def of_mutual(cls, pairs: Iterable[tuple[NumericClass, NumericClass]]) -> CompatPolicy:
        """Return the policy under which the classes of each pair read one another."""
        ids = [(one.id, other.id) for one, other in pairs]
        return cls(readable=frozenset(ids) | frozenset((other, one) for one, other in ids))

    def is_readable(self, *, writer: int, reader: int) -> bool:
        """Whether KV of class id `writer` may be continued by class id `reader`."""
        return writer == reader or (writer, reader) in self.readable

    def writers_for(self, reader: int) -> frozenset[int]:
        """Return the class ids whose KV `reader` accepts; what lookups filter by."""
        return frozenset({reader} | {writer for writer, to in self.readable if to == reader})


STRICT_POLICY: Final = CompatPolicy(readable=frozenset())
"""Every class reads only its own KV."""

_PACKED_FORMATS: Final = ("q4_0", "q4_1", "q8_0")


def _torch_and_native() -> Iterator[tuple[NumericClass, NumericClass]]:
    for weights, kv in product(_PACKED_FORMATS, ("bf16", "int8")):
        native = replace(NATIVE_Q4_1, weights=weights, kv=kv)
        yield replace(TORCH_BF16, kv=kv), native
        yield replace(TORCH_Q4_1, weights=weights, kv=kv), native


DEFAULT_POLICY: Final = CompatPolicy.of_mutual(_torch_and_native())
"""Torch bf16, whatever its weights came from, and the native decode class of the same blocks read
each other. So do they with int8 KV; KV of one type is never read as the other."""
