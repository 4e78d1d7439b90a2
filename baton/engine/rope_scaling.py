"""How a long-context model stretches its rotation frequencies, as its files say it.

Owns `RopeScaling` and its reading from GGUF metadata and config.json. Free of torch: what is done
with it stands in `baton.engine.rope`.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from baton.engine.gguf_meta import GgufHeader, TensorInfo
from baton.engine.model_fields import ModelFields

ORIGINAL_MAX: Final = 1 << 24
FACTOR_MAX: Final = 1e6
FACTORS_TENSOR: Final = "rope_freqs.weight"
SHORT_FACTORS_TENSOR: Final = "rope_factors_short.weight"
LONG_FACTORS_TENSOR: Final = "rope_factors_long.weight"
FACTOR_TENSORS: Final = frozenset((FACTORS_TENSOR, SHORT_FACTORS_TENSOR, LONG_FACTORS_TENSOR))
_LONGROPE_NAMES: Final = ("longrope", "su", "yarn")
"""Phi-3's own older files call its one scaling by each of these."""


class RopeKind(StrEnum):
    """How the rotation frequencies of a long-context model are scaled."""

    LINEAR = "linear"
    LLAMA3 = "llama3"
    FACTORS = "factors"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Scaling of the rotation frequencies.

    `linear` divides all of them by `factor`; `llama3` blends by wavelength; `factors` divides each
    by its own number (`factors` [rotary_dim / 2]), which is how GGUF stores llama3, and what
    Phi-3's longrope comes to. `attention_factor` multiplies sines and cosines (longrope only).
    """

    kind: RopeKind
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_context: int = 8192
    factors: tuple[float, ...] = ()
    attention_factor: float = 1.0


def gguf_rope_scaling(
    header: GgufHeader, fields: ModelFields, own: str, rotary_dim: int, max_context: int
) -> RopeScaling | None:
    """The scaling in a GGUF header whose fields begin with `own` (`llama.`)."""
    kind = fields.text(f"{own}rope.scaling.type", default="none")
    info = header.tensors.get(FACTORS_TENSOR)
    if LONG_FACTORS_TENSOR in header.tensors:
        return _gguf_longrope(header, fields, own, rotary_dim // 2, max_context)
    if kind == "none" and info is not None:
        return RopeScaling(kind=RopeKind.FACTORS, factors=_factors(fields, info, rotary_dim // 2))
    if kind == "none":
        return None
    if kind == "linear" and info is None:
        return RopeScaling(
            kind=RopeKind.LINEAR, factor=_scale_factor(fields, f"{own}rope.scaling.factor")
        )
    raise fields.bad(f"{own}rope.scaling.type", f"{kind} is not supported; none and linear are")


def directory_rope_scaling(
    fields: ModelFields, rope: ModelFields, family: str, rotary_dim: int, max_context: int
) -> RopeScaling | None:
    """The scaling in a config.json (`fields`) and its object about RoPE (`rope`)."""
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    if kind == "default":
        return None
    if kind == RopeKind.LINEAR:
        return RopeScaling(kind=RopeKind.LINEAR, factor=_scale_factor(rope, "factor"))
    if kind == "longrope" or (family == "phi3" and kind in _LONGROPE_NAMES):
        return _directory_longrope(fields, rope, rotary_dim // 2, max_context)
    if kind != RopeKind.LLAMA3:
        raise rope.bad(
            "rope_type", f"{kind} is not supported; default, linear, llama3 and longrope are"
        )
    scaling = RopeScaling(
        kind=RopeKind.LLAMA3,
        factor=_scale_factor(rope, "factor"),
        low_freq_factor=_scale_factor(rope, "low_freq_factor"),
        high_freq_factor=_scale_factor(rope, "high_freq_factor"),
        original_max_context=rope.whole("original_max_position_embeddings", 1, ORIGINAL_MAX),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise rope.bad("high_freq_factor", "must be above low_freq_factor")
    return scaling


def _gguf_longrope(
    header: GgufHeader, fields: ModelFields, own: str, count: int, max_context: int
) -> RopeScaling:
    original = fields.whole(f"{own}rope.scaling.original_context_length", 1, ORIGINAL_MAX)
    name = LONG_FACTORS_TENSOR if max_context > original else SHORT_FACTORS_TENSOR
    info = header.tensors.get(name)
    if info is None:
        raise fields.bad(name, "is missing; the model is incomplete")
    attention = fields.real(
        f"{own}rope.scaling.attn_factor",
        default=_attention_factor(max_context / original, original),
    )
    return _longrope(fields, _factors(fields, info, count), attention)


def _directory_longrope(
    fields: ModelFields, rope: ModelFields, count: int, max_context: int
) -> RopeScaling:
    """RoPE is fixed at load, by the model's own context: the long factors as soon as that is beyond
    what the model was trained on first. Factors that change in mid-sequence would make the KV that
    stands already another model's.
    """
    default = fields.whole("original_max_position_embeddings", 1, ORIGINAL_MAX, default=max_context)
    original = rope.whole("original_max_position_embeddings", 1, ORIGINAL_MAX, default=default)
    name = "long_factor" if max_context > original else "short_factor"
    factors = rope.reals(name, count)
    stretch = rope.real("factor", default=max_context / original)
    attention = rope.real("attention_factor", default=_attention_factor(stretch, original))
    return _longrope(rope, factors, attention)


def _longrope(fields: ModelFields, factors: tuple[float, ...], attention: float) -> RopeScaling:
    _require_positive(fields, "longrope factors", factors)
    _require_positive(fields, "attention factor", (attention,))
    return RopeScaling(kind=RopeKind.FACTORS, factors=factors, attention_factor=attention)


def _attention_factor(stretch: float, original: int) -> float:
    """LongRoPE's own rule for a model that states none."""
    if stretch <= 1.0 or original < 2:
        return 1.0
    return math.sqrt(1.0 + math.log(stretch) / math.log(original))


def _factors(fields: ModelFields, info: TensorInfo, count: int) -> tuple[float, ...]:
    if info.shape != (count,) or info.type is None or info.type.name != "F32":
        raise fields.bad(info.name, f"must be {count} numbers of type F32")
    with fields.path.open("rb") as file:
        file.seek(info.offset)
        factors = struct.unpack(f"<{count}f", file.read(4 * count))
    _require_positive(fields, info.name, factors)
    return factors


def _require_positive(fields: ModelFields, name: str, numbers: tuple[float, ...]) -> None:
    if not all(0.0 < number < FACTOR_MAX for number in numbers):
        raise fields.bad(name, "must hold positive numbers")


def _scale_factor(fields: ModelFields, name: str) -> float:
    factor = fields.real(name)
    if not 0.0 < factor < FACTOR_MAX:
        raise fields.bad(name, f"{factor} must be a positive number")
    return factor
