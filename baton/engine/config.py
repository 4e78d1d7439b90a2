"""What a model is, before any weight is read: `ModelConfig` from a GGUF file or a directory.

Owns the names and bounds of the architecture's numbers. Free of torch, so that the gateway and the
doctor can read a model's shape. Never reads a weight, except the few RoPE factors that a GGUF file
keeps in a tensor instead of in its metadata.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from baton.engine.families import TRAITS, Family, Traits
from baton.engine.gguf_meta import GgufHeader, read_header
from baton.engine.model_fields import ModelFields, bad_model, read_json_object
from baton.engine.rope_scaling import RopeScaling, directory_rope_scaling, gguf_rope_scaling
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
_CONTROL: Final = 3
"""Of a GGUF token that is no text."""
QWEN3_HEAD_DIM: Final = 128
"""Of a config.json that does not say: not hidden / heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The numbers of one decoder-only model.

    `rotary_dim` is how many elements of each head RoPE turns, the first; mostly all of them.
    `weights_format` is the storage type that holds most weights, in lower case (`q4_1`, `bf16`).
    `end_token_ids` may be empty when the files name none; `begin_token_id` may be None.
    """

    family: Family
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
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
    def traits(self) -> Traits:
        """How the model's family differs from Llama."""
        return TRAITS[self.family]

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
    family = _family(fields, "general.architecture")
    own = f"{family.value}."
    if fields.whole(f"{own}expert_count", 0, 1 << 16, default=0):
        raise fields.bad(f"{own}expert_count", "is not 0; mixtures of experts are not supported")
    heads = fields.whole(f"{own}attention.head_count", 1, HEADS_MAX)
    hidden = fields.whole(f"{own}embedding_length", 1, HIDDEN_MAX)
    head_dim = fields.whole(
        f"{own}attention.key_length", 1, HEAD_DIM_MAX, default=max(1, hidden // heads)
    )
    name = f"{own}attention.value_length"
    if fields.whole(name, 1, HEAD_DIM_MAX, default=head_dim) != head_dim:
        raise fields.bad(name, f"must equal the key length {head_dim}")
    rotary_dim = _gguf_rotary_dim(fields, family, head_dim)
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    token_count = len(tokens) if isinstance(tokens, list) and tokens else None
    context = fields.whole(f"{own}context_length", 1, CONTEXT_MAX)
    window = fields.whole(f"{own}attention.sliding_window", 0, CONTEXT_MAX, default=0)
    return _checked(
        fields,
        ModelConfig(
            family=family,
            layers=fields.whole(f"{own}block_count", 1, LAYERS_MAX),
            hidden=hidden,
            heads=heads,
            kv_heads=fields.whole(f"{own}attention.head_count_kv", 1, HEADS_MAX, default=heads),
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            intermediate=fields.whole(f"{own}feed_forward_length", 1, INTERMEDIATE_MAX),
            vocabulary=fields.whole(f"{own}vocab_size", 1, VOCABULARY_MAX, default=token_count),
            rope_theta=fields.real(f"{own}rope.freq_base", default=10_000.0),
            rope_scaling=gguf_rope_scaling(header, fields, own, rotary_dim, context),
            rms_eps=fields.real(f"{own}attention.layer_norm_rms_epsilon"),
            max_context=min(context, window or context),
            has_tied_head="output.weight" not in header.tensors,
            begin_token_id=fields.optional_whole("tokenizer.ggml.bos_token_id"),
            end_token_ids=_gguf_end_token_ids(fields, header, family),
            weights_format=_commonest_format(header),
        ),
    )


def config_from_directory(path: Path) -> ModelConfig:
    """The configuration in a Hugging Face model directory's config.json."""
    fields = ModelFields(path / CONFIG_FILE, read_json_object(path / CONFIG_FILE))
    family = _family(fields, "model_type")
    _refuse_unsupported(fields)
    heads = fields.whole("num_attention_heads", 1, HEADS_MAX)
    hidden = fields.whole("hidden_size", 1, HIDDEN_MAX)
    head_dim = max(1, hidden // heads) if family is not Family.QWEN3 else QWEN3_HEAD_DIM
    rope = fields.nested("rope_parameters") or fields.nested("rope_scaling")
    theta = fields.real("rope_theta", default=10_000.0)
    context = fields.whole("max_position_embeddings", 1, CONTEXT_MAX, default=2048)
    head_dim = fields.whole("head_dim", 1, HEAD_DIM_MAX, default=head_dim)
    rotary_dim = _directory_rotary_dim(fields, rope, family, head_dim)
    scaling = None
    if rope is not None:
        scaling = directory_rope_scaling(fields, rope, family, rotary_dim, context)
    return _checked(
        fields,
        ModelConfig(
            family=family,
            layers=fields.whole("num_hidden_layers", 1, LAYERS_MAX),
            hidden=hidden,
            heads=heads,
            kv_heads=fields.whole("num_key_value_heads", 1, HEADS_MAX, default=heads),
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            intermediate=fields.whole("intermediate_size", 1, INTERMEDIATE_MAX),
            vocabulary=fields.whole("vocab_size", 1, VOCABULARY_MAX),
            rope_theta=rope.real("rope_theta", default=theta) if rope else theta,
            rope_scaling=scaling,
            rms_eps=fields.real("rms_norm_eps", default=1e-6),
            max_context=min(context, _directory_window(fields, family) or context),
            has_tied_head=fields.flag("tie_word_embeddings", default=False),
            begin_token_id=fields.optional_whole("bos_token_id"),
            end_token_ids=_directory_end_token_ids(path, fields),
            weights_format=_directory_format(fields),
        ),
    )


def _family(fields: ModelFields, name: str) -> Family:
    text = fields.text(name)
    if text not in set(Family):
        known = ", ".join(Family)
        raise fields.bad(name, f"{text} is not supported; {known} are")
    return Family(text)


def _gguf_rotary_dim(fields: ModelFields, family: Family, head_dim: int) -> int:
    name = f"{family.value}.rope.dimension_count"
    count = fields.whole(name, 1, HEAD_DIM_MAX, default=head_dim)
    if count != head_dim and not TRAITS[family].has_partial_rotary:
        raise fields.bad(name, f"must equal the key length {head_dim}")
    return _checked_rotary_dim(fields, name, count, head_dim)


def _directory_rotary_dim(
    fields: ModelFields, rope: ModelFields | None, family: Family, head_dim: int
) -> int:
    name = "partial_rotary_factor"
    share = fields.real(name, default=1.0)
    if rope is not None:
        share = rope.real(name, default=share)
    if share != 1.0 and not TRAITS[family].has_partial_rotary:
        raise fields.bad(name, f"is not 1; heads of {family} are rotated whole here")
    if not 0.0 < share <= 1.0:
        raise fields.bad(name, f"{share} must be above 0, at most 1")
    return _checked_rotary_dim(fields, name, int(head_dim * share), head_dim)


def _checked_rotary_dim(fields: ModelFields, name: str, count: int, head_dim: int) -> int:
    if not 2 <= count <= head_dim or (count != head_dim and count % 2):
        raise fields.bad(name, f"makes RoPE turn {count} of {head_dim}; an even number can be")
    return count


def _directory_window(fields: ModelFields, family: Family) -> int | None:
    """Tokens of the sliding window, if the model has one: attention here is over everything, which
    is the same up to that length, so that a context ends there.
    """
    is_used = family is Family.PHI3 or fields.flag("use_sliding_window", default=False)
    window = fields.whole("sliding_window", 0, CONTEXT_MAX, default=0)
    return window if is_used and window else None


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


def _gguf_end_token_ids(fields: ModelFields, header: GgufHeader, family: Family) -> tuple[int, ...]:
    names = ("eos", "eot", "eom")
    named = (fields.optional_whole(f"tokenizer.ggml.{name}_token_id") for name in names)
    ids = {token_id for token_id in named if token_id is not None}
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    kinds = header.metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(kinds, list) and len(tokens) == len(kinds):
        known = {text: index for index, text in enumerate(tokens) if kinds[index] == _CONTROL}
        ids.update(known[text] for text in TRAITS[family].end_texts if text in known)
    return tuple(sorted(ids))


def _directory_end_token_ids(path: Path, fields: ModelFields) -> tuple[int, ...]:
    """The ids that end an answer; generation_config.json, where there, knows them all."""
    ids = set(fields.whole_or_list("eos_token_id"))
    extra = path / GENERATION_CONFIG_FILE
    if extra.is_file():
        ids.update(ModelFields(extra, read_json_object(extra)).whole_or_list("eos_token_id"))
    return tuple(sorted(ids))


def _refuse_unsupported(fields: ModelFields) -> None:
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
