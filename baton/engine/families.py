"""What sets one model family apart from another, and what its tensors are called.

Owns the traits of each family and the tensor names of both file formats. Free of torch. The forward
pass reads traits and never a family's name, so that a further family is an entry here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Family(StrEnum):
    """The architectures the forward pass knows, as config.json and GGUF files name them."""

    LLAMA = "llama"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    PHI3 = "phi3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """How a family differs from Llama.

    `has_qkv_bias`: Q, K and V have biases. `has_qk_norm`: every head of Q and K is normalised
    before RoPE. `is_fused`: Q, K and V stand in one stored matrix, gate and up in another.
    `has_partial_rotary`: a config may have RoPE turn the first elements of each head only.
    `end_texts` are control tokens that end an answer, also where a GGUF file does not say so: it
    names one end token, chat templates use more. `is_interleaved_in_gguf`: llama.cpp's converter
    puts the rotated halves of Q and K side by side.
    """

    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    is_fused: bool = False
    has_partial_rotary: bool = False
    end_texts: tuple[str, ...] = ()
    is_interleaved_in_gguf: bool = False


TRAITS: Final[Mapping[Family, Traits]] = {
    Family.LLAMA: Traits(is_interleaved_in_gguf=True),
    Family.QWEN2: Traits(has_qkv_bias=True, end_texts=("<|im_end|>", "<|endoftext|>")),
    Family.QWEN3: Traits(has_qk_norm=True, end_texts=("<|im_end|>", "<|endoftext|>")),
    Family.PHI3: Traits(
        is_fused=True, has_partial_rotary=True, end_texts=("<|end|>", "<|endoftext|>")
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """What one file format calls each tensor; layer names carry `{}` for the layer index."""

    is_gguf: bool
    embedding: str
    final_norm: str
    head: str
    layer: Mapping[str, str]


GGUF_NAMES: Final = TensorNames(
    is_gguf=True,
    embedding="token_embd.weight",
    final_norm="output_norm.weight",
    head="output.weight",
    layer={
        "attention_norm": "blk.{}.attn_norm.weight",
        "query": "blk.{}.attn_q.weight",
        "key": "blk.{}.attn_k.weight",
        "value": "blk.{}.attn_v.weight",
        "query_bias": "blk.{}.attn_q.bias",
        "key_bias": "blk.{}.attn_k.bias",
        "value_bias": "blk.{}.attn_v.bias",
        "query_norm": "blk.{}.attn_q_norm.weight",
        "key_norm": "blk.{}.attn_k_norm.weight",
        "query_key_value": "blk.{}.attn_qkv.weight",
        "attention_output": "blk.{}.attn_output.weight",
        "feed_forward_norm": "blk.{}.ffn_norm.weight",
        "gate": "blk.{}.ffn_gate.weight",
        "up": "blk.{}.ffn_up.weight",
        # llama.cpp keeps the fused pair under the name of `up`.
        "gate_up": "blk.{}.ffn_up.weight",
        "down": "blk.{}.ffn_down.weight",
    },
)
DIRECTORY_NAMES: Final = TensorNames(
    is_gguf=False,
    embedding="model.embed_tokens.weight",
    final_norm="model.norm.weight",
    head="lm_head.weight",
    layer={
        "attention_norm": "model.layers.{}.input_layernorm.weight",
        "query": "model.layers.{}.self_attn.q_proj.weight",
        "key": "model.layers.{}.self_attn.k_proj.weight",
        "value": "model.layers.{}.self_attn.v_proj.weight",
        "query_bias": "model.layers.{}.self_attn.q_proj.bias",
        "key_bias": "model.layers.{}.self_attn.k_proj.bias",
        "value_bias": "model.layers.{}.self_attn.v_proj.bias",
        "query_norm": "model.layers.{}.self_attn.q_norm.weight",
        "key_norm": "model.layers.{}.self_attn.k_norm.weight",
        "query_key_value": "model.layers.{}.self_attn.qkv_proj.weight",
        "attention_output": "model.layers.{}.self_attn.o_proj.weight",
        "feed_forward_norm": "model.layers.{}.post_attention_layernorm.weight",
        "gate": "model.layers.{}.mlp.gate_proj.weight",
        "up": "model.layers.{}.mlp.up_proj.weight",
        "gate_up": "model.layers.{}.mlp.gate_up_proj.weight",
        "down": "model.layers.{}.mlp.down_proj.weight",
    },
)


def layer_roles(family: Family) -> tuple[str, ...]:
    """The tensors of one layer of a model of `family`, by their roles in `TensorNames.layer`."""
    traits = TRAITS[family]
    roles = ["attention_norm", "attention_output", "feed_forward_norm", "down"]
    if traits.is_fused:
        roles += ["query_key_value", "gate_up"]
    else:
        roles += ["query", "key", "value", "gate", "up"]
    if traits.has_qkv_bias:
        roles += ["query_bias", "key_bias", "value_bias"]
    if traits.has_qk_norm:
        roles += ["query_norm", "key_norm"]
    return tuple(roles)
