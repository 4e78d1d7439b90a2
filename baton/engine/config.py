"""What a model is, before any weight is read: `ModelConfig` from a GGUF file or a directory.

Owns the names and bounds of the architecture's numbers. Free of torch, so that the gateway and the
doctor can read a model's shape. Never reads a weight, except the few RoPE factors that a GGUF file
keeps in a tensor instead of in its metadata.
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from baton.engine.gguf_meta import GgufHeader, TensorInfo, read_header
from baton.engine.model_fields import ModelFields, bad_model, read_json_object
from baton.kv.layout import KvDtype, KvGeometry

LAYERS_MAX: Final = 1024
HEADS_MAX: Final = 1024
HEAD_DIM_MAX: Final = 1024
HIDDEN_MAX: Final = 1 << 17
INTERMEDIATE_MAX: Final = 1 << 19
VOCABULARY_MAX: Final = 1 << 22
CONTEXT_MAX: Final = 1 << 24

CONFIG_FILE: Final = "config.json"
GENERATION_CONFIG_FILE: Final = "generation_config.json"
ROPE_FACTORS_TENSOR: Final = "rope_freqs.weight"


class Family(StrEnum):
    """The architectures the forward pass knows."""

    LLAMA = "llama"


class RopeKind(StrEnum):
    """How the rotation frequencies of a long-context model are scaled."""

    LINEAR = "linear"
    LLAMA3 = "llama3"
    FACTORS = "factors"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Scaling of the rotation frequencies.

    `linear` divides all of them by `factor`; `llama3` blends by wavelength; `factors` divides each
    by its own number (`factors` [head_dim / 2]), which is how GGUF stores llama3.
    """

    kind: RopeKind
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_context: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The numbers of one decoder-only model.

    `weights_format` is the storage type that holds most weights, in lower case (`q4_1`, `bf16`).
    `end_token_ids` may be empty when the files name none; `begin_token_id` may be None.
    """

    family: Family
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    rms_eps: float
    max_context: int
    has_tied_head: bool
    begin_token_id: int | None
    end_token_ids: tuple[int, ...]
    weights_format: str

    @property
    def query_width(self) -> int:
        """Columns of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of all key (or value) heads together."""
        return self.kv_heads * self.head_dim

    def kv_geometry(self, block_tokens: int, dtype: KvDtype) -> KvGeometry:
        """The page geometry of this model's whole KV cache."""
        return KvGeometry(
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim,
            block_tokens=block_tokens,
            dtype=dtype,
        )


def read_config(path: Path) -> ModelConfig:
    """The configuration of the model at `path`, a .gguf file or a Hugging Face directory.

    Raises ServiceError INVALID_REQUEST naming the file, the field and the remedy when the file is
    missing, damaged, or describes a model that the forward pass would compute wrongly.
    """
    if path.is_dir():
        return config_from_directory(path)
    if path.is_file():
        return config_from_gguf(read_header(path))
    raise bad_model(path, "path", "does not exist; give a .gguf file or a model directory")


def config_from_gguf(header: GgufHeader) -> ModelConfig:
    """The configuration in a parsed GGUF header."""
    fields = ModelFields(header.path, header.metadata)
    if fields.text("general.architecture") != Family.LLAMA:
        raise fields.bad("general.architecture", "is not supported; only llama is")
    if fields.whole("llama.expert_count", 0, 1 << 16, default=0):
        raise fields.bad("llama.expert_count", "is not 0; mixtures of experts are not supported")
    heads = fields.whole("llama.attention.head_count", 1, HEADS_MAX)
    hidden = fields.whole("llama.embedding_length", 1, HIDDEN_MAX)
    head_dim = fields.whole(
        "llama.attention.key_length", 1, HEAD_DIM_MAX, default=max(1, hidden // heads)
    )
    for name in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if fields.whole(name, 1, HEAD_DIM_MAX, default=head_dim) != head_dim:
            raise fields.bad(name, f"must equal the key length {head_dim}")
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    token_count = len(tokens) if isinstance(tokens, list) and tokens else None
    return _checked(
        fields,
        ModelConfig(
            family=Family.LLAMA,
            layers=fields.whole("llama.block_count", 1, LAYERS_MAX),
            hidden=hidden,
            heads=heads,
            kv_heads=fields.whole("llama.attention.head_count_kv", 1, HEADS_MAX, default=heads),
            head_dim=head_dim,
            intermediate=fields.whole("llama.feed_forward_length", 1, INTERMEDIATE_MAX),
            vocabulary=fields.whole("llama.vocab_size", 1, VOCABULARY_MAX, default=token_count),
            rope_theta=fields.real("llama.rope.freq_base", default=10_000.0),
            rope_scaling=_gguf_rope_scaling(header, fields, head_dim),
            rms_eps=fields.real("llama.attention.layer_norm_rms_epsilon"),
            max_context=fields.whole("llama.context_length", 1, CONTEXT_MAX),
            has_tied_head="output.weight" not in header.tensors,
            begin_token_id=fields.optional_whole("tokenizer.ggml.bos_token_id"),
            end_token_ids=_gguf_end_token_ids(fields),
            weights_format=_commonest_format(header),
        ),
    )


def config_from_directory(path: Path) -> ModelConfig:
    """The configuration in a Hugging Face model directory's config.json."""
    fields = ModelFields(path / CONFIG_FILE, read_json_object(path / CONFIG_FILE))
    if fields.text("model_type") != Family.LLAMA:
        raise fields.bad("model_type", "is not supported; only llama is")
    _refuse_unsupported_llama(fields)
    heads = fields.whole("num_attention_heads", 1, HEADS_MAX)
    hidden = fields.whole("hidden_size", 1, HIDDEN_MAX)
    rope = fields.nested("rope_parameters") or fields.nested("rope_scaling")
    theta = fields.real("rope_theta", default=10_000.0)
    return _checked(
        fields,
        ModelConfig(
            family=Family.LLAMA,
            layers=fields.whole("num_hidden_layers", 1, LAYERS_MAX),
            hidden=hidden,
            heads=heads,
            kv_heads=fields.whole("num_key_value_heads", 1, HEADS_MAX, default=heads),
            head_dim=fields.whole("head_dim", 1, HEAD_DIM_MAX, default=max(1, hidden // heads)),
            intermediate=fields.whole("intermediate_size", 1, INTERMEDIATE_MAX),
            vocabulary=fields.whole("vocab_size", 1, VOCABULARY_MAX),
            rope_theta=rope.real("rope_theta", default=theta) if rope else theta,
            rope_scaling=_directory_rope_scaling(rope) if rope else None,
            rms_eps=fields.real("rms_norm_eps", default=1e-6),
            max_context=fields.whole("max_position_embeddings", 1, CONTEXT_MAX, default=2048),
            has_tied_head=fields.flag("tie_word_embeddings", default=False),
            begin_token_id=fields.optional_whole("bos_token_id"),
            end_token_ids=_directory_end_token_ids(path, fields),
            weights_format=_directory_format(fields),
        ),
    )


def _checked(fields: ModelFields, config: ModelConfig) -> ModelConfig:
    if config.heads % config.kv_heads:
        raise fields.bad(
            "kv heads", f"{config.kv_heads} must divide the {config.heads} attention heads"
        )
    if config.head_dim % 2:
        raise fields.bad("head_dim", f"{config.head_dim} must be even, because RoPE turns pairs")
    if not 0.0 < config.rms_eps < 1.0:
        raise fields.bad("rms epsilon", f"{config.rms_eps} must lie between 0 and 1")
    if not 1.0 <= config.rope_theta <= 1e12:
        raise fields.bad("rope theta", f"{config.rope_theta} must lie from 1 to 1e12")
    if any(token_id >= config.vocabulary for token_id in config.end_token_ids):
        raise fields.bad("eos token id", f"must be below the vocabulary size {config.vocabulary}")
    return config


def _gguf_rope_scaling(
    header: GgufHeader, fields: ModelFields, head_dim: int
) -> RopeScaling | None:
    kind = fields.text("llama.rope.scaling.type", default="none")
    info = header.tensors.get(ROPE_FACTORS_TENSOR)
    if kind == "none" and info is not None:
        return RopeScaling(
            kind=RopeKind.FACTORS, factors=_rope_factors(fields, info, head_dim // 2)
        )
    if kind == "none":
        return None
    if kind == "linear" and info is None:
        return RopeScaling(
            kind=RopeKind.LINEAR, factor=_scale_factor(fields, "llama.rope.scaling.factor")
        )
    raise fields.bad("llama.rope.scaling.type", f"{kind} is not supported; none and linear are")


def _rope_factors(fields: ModelFields, info: TensorInfo, count: int) -> tuple[float, ...]:
    if info.shape != (count,) or info.type is None or info.type.name != "F32":
        raise fields.bad(ROPE_FACTORS_TENSOR, f"must be {count} numbers of type F32")
    with fields.path.open("rb") as file:
        file.seek(info.offset)
        factors = struct.unpack(f"<{count}f", file.read(4 * count))
    if not all(0.0 < factor < 1e6 for factor in factors):
        raise fields.bad(ROPE_FACTORS_TENSOR, "must hold positive numbers")
    return factors


def _directory_rope_scaling(rope: ModelFields) -> RopeScaling | None:
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    if kind == "default":
        return None
    if kind == RopeKind.LINEAR:
        return RopeScaling(kind=RopeKind.LINEAR, factor=_scale_factor(rope, "factor"))
    if kind != RopeKind.LLAMA3:
        raise rope.bad("rope_type", f"{kind} is not supported; default, linear and llama3 are")
    scaling = RopeScaling(
        kind=RopeKind.LLAMA3,
        factor=_scale_factor(rope, "factor"),
        low_freq_factor=_scale_factor(rope, "low_freq_factor"),
        high_freq_factor=_scale_factor(rope, "high_freq_factor"),
        original_max_context=rope.whole("original_max_position_embeddings", 1, CONTEXT_MAX),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise rope.bad("high_freq_factor", "must be above low_freq_factor")
    return scaling


def _scale_factor(fields: ModelFields, name: str) -> float:
    factor = fields.real(name)
    if not 0.0 < factor < 1e6:
        raise fields.bad(name, f"{factor} must be a positive number")
    return factor


def _gguf_end_token_ids(fields: ModelFields) -> tuple[int, ...]:
    names = ("eos", "eot", "eom")
    ids = (fields.optional_whole(f"tokenizer.ggml.{name}_token_id") for name in names)
    return tuple(sorted({token_id for token_id in ids if token_id is not None}))


def _directory_end_token_ids(path: Path, fields: ModelFields) -> tuple[int, ...]:
    """The ids that end an answer; generation_config.json, where there, knows them all."""
    ids = set(fields.whole_or_list("eos_token_id"))
    extra = path / GENERATION_CONFIG_FILE
    if extra.is_file():
        ids.update(ModelFields(extra, read_json_object(extra)).whole_or_list("eos_token_id"))
    return tuple(sorted(ids))


def _refuse_unsupported_llama(fields: ModelFields) -> None:
    for name in ("attention_bias", "mlp_bias"):
        if fields.flag(name, default=False):
            raise fields.bad(name, "is true; biases are not supported")
    if fields.text("hidden_act", default="silu") not in ("silu", "swish"):
        raise fields.bad("hidden_act", "must be silu")
    if fields.nested("quantization_config") is not None:
        raise fields.bad("quantization_config", "is not supported; use a GGUF file instead")


def _directory_format(fields: ModelFields) -> str:
    name = fields.text("dtype", default=fields.text("torch_dtype", default="float32"))
    formats = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
    if name not in formats:
        raise fields.bad("dtype", f"{name} is not supported; use one of {sorted(formats)}")
    return formats[name]


def _commonest_format(header: GgufHeader) -> str:
    items: Counter[str] = Counter()
    for tensor in header.tensors.values():
        if tensor.name.startswith("blk.") and len(tensor.shape) == 2:
            name = tensor.type.name if tensor.type else f"type{tensor.type_id}"
            items[name.lower()] += tensor.shape[0] * tensor.shape[1]
    return items.most_common(1)[0][0] if items else "f32"
