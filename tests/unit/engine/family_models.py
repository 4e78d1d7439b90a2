"""Random tiny models of every family but Llama, as transformers makes them, in both file formats.

What the tests of the torch path and of the step kernel share.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from gguf import quants
from transformers import (
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from baton.engine.families import DIRECTORY_NAMES, GGUF_NAMES, Family, layer_roles

VOCABULARY: Final = 300
CONTEXT: Final = 256
HEAD_DIM: Final = 16
SHAPE: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}


def longrope(original: int, count: int = HEAD_DIM // 2) -> dict[str, Any]:
    """Phi-3's scaling: of a model that was trained on `original` tokens first; `count` pairs."""
    return {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "long_factor": [1.0 + 0.5 * index for index in range(count)],
            "short_factor": [1.0 + 0.1 * index for index in range(count)],
            "original_max_position_embeddings": original,
        },
        "original_max_position_embeddings": original,
    }


ORACLES: Final[dict[str, tuple[Any, Any, dict[str, Any]]]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32, "tie_word_embeddings": False}),
    "phi3": (Phi3Config, Phi3ForCausalLM, {}),
    # Every prompt here is longer than the first training's context: transformers, too, takes the
    # long factors from its first token on.
    "phi3_long": (Phi3Config, Phi3ForCausalLM, longrope(32)),
    "phi3_short": (Phi3Config, Phi3ForCausalLM, longrope(CONTEXT)),
    "phi3_part": (Phi3Config, Phi3ForCausalLM, {"partial_rotary_factor": 0.5}),
    "phi3_part_long": (
        Phi3Config,
        Phi3ForCausalLM,
        {"partial_rotary_factor": 0.75, "num_attention_heads": 2, "num_key_value_heads": 1}
        | longrope(32, count=12),
    ),
}


def oracle_of(name: str, folder: Path) -> PreTrainedModel:
    """A random model, saved in `folder` as transformers saves one."""
    config_type, model_type, extra = ORACLES[name]
    torch.manual_seed(3)
    model = model_type(config_type(**(SHAPE | extra))).float().eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            # Norms of one, biases of zero and tiny weights would hide a wrong place.
            if weight.ndim == 1:
                weight.add_(0.3 * torch.randn_like(weight))
            elif "embed" not in key:
                weight.mul_(8.0)
    model.save_pretrained(folder)
    assert isinstance(model, PreTrainedModel)
    return model


def family_of(name: str) -> Family:
    """The family of a case."""
    return Family(name.split("_")[0])


def write_as_gguf(
    path: Path,
    model: PreTrainedModel,
    family: Family,
    matrix_type: str = "F32",
    add_text: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """The same weights under llama.cpp's names; these families' rows keep their order there.

    Matrices are stored as `matrix_type`; `add_text` adds a tokenizer's metadata.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, family.value)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if family is Family.QWEN3:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    share = config.rope_parameters.get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(head_dim * share))
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if add_text is not None:
        add_text(writer)
    tensors = {key: value.numpy() for key, value in model.state_dict().items()}
    rope = config.rope_parameters
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for kind in ("long", "short"):
            factors = np.array(rope[f"{kind}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)
    names = {
        DIRECTORY_NAMES.embedding: GGUF_NAMES.embedding,
        DIRECTORY_NAMES.final_norm: GGUF_NAMES.final_norm,
    }
    if not config.tie_word_embeddings:
        names[DIRECTORY_NAMES.head] = GGUF_NAMES.head
    for layer in range(config.num_hidden_layers):
        for role in layer_roles(family):
            names[DIRECTORY_NAMES.layer[role].format(layer)] = GGUF_NAMES.layer[role].format(layer)
    for theirs, ours in names.items():
        numbers = tensors[theirs].astype(np.float32)
        stored = gguf.GGMLQuantizationType[matrix_type if numbers.ndim == 2 else "F32"]
        writer.add_tensor(ours, quants.quantize(numbers, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
