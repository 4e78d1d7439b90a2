"""The pair label of a model on a worker: digests of its files, RoPE, page shape, numeric class.

Owns how a label follows from a model's files. Free of torch: the kvstore builds the same label for
the arena it offers. Reads weight files once, to hash them; never parses a weight.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from blake3 import blake3

from baton.engine.config import ModelConfig
from baton.engine.model_fields import bad_model
from baton.kv.digests import ConfigValue, model_digest, rope_digest
from baton.kv.label import PairLabel
from baton.kv.layout import KvDtype, KvGeometry
from baton.kv.numeric import NumericClass

_CONFIG_FIELDS: Final = (
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "intermediate",
    "vocabulary",
    "rms_eps",
    "max_context",
    "has_tied_head",
    "weights_format",
)


def build_label(
    model_path: Path,
    config: ModelConfig,
    tokenizer_hash: bytes,
    geometry: KvGeometry,
    numeric_class: NumericClass,
) -> PairLabel:
    """The label of the model at `model_path` with pages of `geometry`.

    `tokenizer_hash` is 8 bytes. Takes about 50 ms per 100 MB of weights, on all cores. Raises
    ServiceError INVALID_REQUEST when the weight files cannot be read.
    """
    return PairLabel(
        model=model_digest(config_fields(config), weight_hashes(model_path)),
        rope=rope_digest(rope_fields(config)),
        dtype=geometry.dtype,
        block_tokens=geometry.block_tokens,
        tokenizer=tokenizer_hash,
        numeric_class=numeric_class,
    )


def torch_numeric_class(
    config: ModelConfig, kv: KvDtype, act: KvDtype | None = None
) -> NumericClass:
    """The class of the torch path with KV stored as `kv`.

    It computes in the type that it stores (f32 or bf16), None, unless KV is int8: then in `act`,
    and None is bf16.
    """
    if act is None:
        act = KvDtype.BF16 if kv.has_scales else kv
    return NumericClass(
        weights=config.weights_format, act=act.text, acc="f32", kv=kv.text, is_invariant=False
    )


def config_fields(config: ModelConfig) -> dict[str, ConfigValue]:
    """What of the configuration enters the model digest; RoPE has a digest of its own."""
    fields: dict[str, ConfigValue] = {name: getattr(config, name) for name in _CONFIG_FIELDS}
    return {"family": config.family.value, **fields}


def rope_fields(config: ModelConfig) -> dict[str, ConfigValue]:
    """The RoPE parameters a worker fixes at load.

    None of the scalings we compute depends on a worker's own context limit, so it is not part.
    """
    fields: dict[str, ConfigValue] = {"theta": config.rope_theta, "head_dim": config.head_dim}
    if config.rotary_dim != config.head_dim:
        fields["rotary_dim"] = config.rotary_dim
    scaling = config.rope_scaling
    if scaling is None:
        return fields
    fields.update(
        kind=scaling.kind.value,
        factor=scaling.factor,
        low_freq_factor=scaling.low_freq_factor,
        high_freq_factor=scaling.high_freq_factor,
        original_max_context=scaling.original_max_context,
    )
    if scaling.attention_factor != 1.0:
        fields["attention_factor"] = scaling.attention_factor
    return fields | {f"factors.{i:04d}": value for i, value in enumerate(scaling.factors)}


def weight_hashes(model_path: Path) -> list[bytes]:
    """BLAKE3 (32 bytes) of each weight file as stored, ordered by file name."""
    return [_hash_file(path) for path in weight_files(model_path)]


def weight_files(model_path: Path) -> list[Path]:
    """The .gguf file itself, or a directory's .safetensors files by name."""
    if model_path.is_file():
        return [model_path]
    files = sorted(model_path.glob("*.safetensors"))
    if not files:
        raise bad_model(model_path, "path", "holds no .safetensors file")
    return files


def _hash_file(path: Path) -> bytes:
    try:
        return blake3(max_threads=blake3.AUTO).update_mmap(path).digest()
    except OSError as error:
        raise bad_model(path, "file", f"cannot be read ({error.strerror})") from error
