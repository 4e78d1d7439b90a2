"""Tiny random Llama models on disk, so that a whole cluster can run in milliseconds.

Owns their shapes, their byte-level tokenizer and chat template, and both file forms: a Hugging Face
directory and a GGUF file with the same numbers. The weights are random by seed and large enough
that greedy tokens are well apart. Free of torch. Never used outside tests and demonstrations.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from gguf import quants
from numpy.typing import NDArray
from safetensors.numpy import save_file

SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BEGIN_TOKEN_ID: Final = 1
END_TOKEN_ID: Final = 2
# A few merges, so that tokens longer than a byte, and bytes inside a character, both occur.
MERGES: Final = (("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("e", "r"), ("Ġ", "a"))
VOCABULARY: Final = len(SPECIAL_TOKENS) + 256 + len(MERGES) + 7
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """The shape of one tiny model; every size a multiple of 32, so that GGUF can quantise it."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 128
    vocabulary: int = VOCABULARY
    rope_theta: float = 10_000.0
    max_context: int = 512
    has_tied_head: bool = True
    seed: int = 0


GQA_TIED: Final = TinyModel()
GQA_UNTIED: Final = replace(GQA_TIED, has_tied_head=False, seed=1)
MHA_TIED: Final = replace(GQA_TIED, kv_heads=4, seed=2)
MHA_UNTIED: Final = replace(GQA_TIED, kv_heads=4, has_tied_head=False, seed=3)
TINY_MODELS: Final = {
    "gqa_tied": GQA_TIED,
    "gqa_untied": GQA_UNTIED,
    "mha_tied": MHA_TIED,
    "mha_untied": MHA_UNTIED,
}


def write_directory(
    path: Path,
    model: TinyModel = GQA_TIED,
    *,
    shards: int = 1,
    extra_config: dict[str, Any] | None = None,
) -> Path:
    """Write `model` as Hugging Face saves one: config, safetensors, tokenizer, chat template.

    `shards` above 1 writes an index. `extra_config` adds to config.json. Returns `path`.
    """
    path.mkdir(parents=True, exist_ok=True)
    _write_json(path / "config.json", directory_config(model) | (extra_config or {}))
    _write_json(path / "generation_config.json", {"eos_token_id": END_TOKEN_ID})
    _write_json(path / "tokenizer.json", tokenizer_definition())
    _write_json(path / "tokenizer_config.json", tokenizer_config())
    _write_shards(path, dict(weights(model)), shards)
    return path


def write_gguf(path: Path, model: TinyModel = GQA_TIED, *, matrix_type: str = "F32") -> Path:
    """Write `model` as one GGUF file, its matrices stored as `matrix_type`. Returns `path`.

    Q and K rows stand in llama.cpp's order. Types: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    _add_metadata(writer, model)
    _add_tokenizer(writer)
    kind = gguf.GGMLQuantizationType[matrix_type]
    for name, array in weights(model):
        ordered = _llama_cpp_order(name, array, model)
        stored = kind if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(_gguf_name(name), quants.quantize(ordered, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def directory_config(model: TinyModel) -> dict[str, Any]:
    """The config.json of `model`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocabulary,
        "max_position_embeddings": model.max_context,
        "rms_norm_eps": 1e-5,
        "rope_theta": model.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": model.has_tied_head,
        "bos_token_id": BEGIN_TOKEN_ID,
        "eos_token_id": END_TOKEN_ID,
        "dtype": "float32",
    }


def weights(model: TinyModel) -> Iterator[tuple[str, Floats]]:
    """Every tensor by its Hugging Face name, float32, random by the model's seed."""
    random = np.random.Generator(np.random.Philox(model.seed))

    def matrix(rows: int, columns: int) -> Floats:
        scaled: Floats = random.standard_normal((rows, columns)).astype(np.float32)
        return scaled * np.float32(1.5 / columns**0.5)

    def norm() -> Floats:
        return (1.0 + 0.1 * random.standard_normal(model.hidden)).astype(np.float32)

    yield "model.embed_tokens.weight", matrix(model.vocabulary, model.hidden)
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", norm()
        yield (
            f"{prefix}.self_attn.q_proj.weight",
            matrix(model.heads * model.head_dim, model.hidden),
        )
        for name in ("k_proj", "v_proj"):
            rows = model.kv_heads * model.head_dim
            yield f"{prefix}.self_attn.{name}.weight", matrix(rows, model.hidden)
        yield (
            f"{prefix}.self_attn.o_proj.weight",
            matrix(model.hidden, model.heads * model.head_dim),
        )
        yield f"{prefix}.post_attention_layernorm.weight", norm()
        for name in ("gate_proj", "up_proj"):
            yield f"{prefix}.mlp.{name}.weight", matrix(model.intermediate, model.hidden)
        yield f"{prefix}.mlp.down_proj.weight", matrix(model.hidden, model.intermediate)
    yield "model.norm.weight", norm()
    if not model.has_tied_head:
        yield "lm_head.weight", matrix(model.vocabulary, model.hidden)


def vocabulary_tokens() -> list[str]:
    """Every token's text in byte-level spelling, by id: specials, bytes, merges, unused."""
    merged = [left + right for left, right in MERGES]
    used = [*SPECIAL_TOKENS, *_byte_alphabet(), *merged]
    return used + [f"<|unused_{index}|>" for index in range(VOCABULARY - len(used))]


def tokenizer_definition() -> dict[str, Any]:
    """The tokenizer.json: byte-level BPE, digits apart, the chat markers special."""
    tokens = vocabulary_tokens()
    specials = [
        {
            "id": index,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, content in enumerate(SPECIAL_TOKENS)
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": specials,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [list(pair) for pair in MERGES],
        },
    }


def tokenizer_config() -> dict[str, Any]:
    """The tokenizer_config.json, which carries the chat template."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BEGIN_TOKEN_ID],
        "eos_token": SPECIAL_TOKENS[END_TOKEN_ID],
        "unk_token": SPECIAL_TOKENS[0],
        "pad_token": SPECIAL_TOKENS[END_TOKEN_ID],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte, by byte value."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = {byte: chr(byte) for byte in printable}
    for index, byte in enumerate(byte for byte in range(256) if byte not in stand_ins):
        stand_ins[byte] = chr(256 + index)
    return [stand_ins[byte] for byte in range(256)]


def _write_json(path: Path, body: dict[str, Any]) -> None:
    path.write_text(json.dumps(body, ensure_ascii=False, indent=1), "utf-8")


def _write_shards(path: Path, tensors: dict[str, Floats], shards: int) -> None:
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    names = list(tensors)
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[index::shards]}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    size = sum(array.nbytes for array in tensors.values())
    index_body = {"metadata": {"total_size": size}, "weight_map": weight_map}
    _write_json(path / "model.safetensors.index.json", index_body)


def _add_metadata(writer: gguf.GGUFWriter, model: TinyModel) -> None:
    writer.add_name("tiny")
    writer.add_block_count(model.layers)
    writer.add_context_length(model.max_context)
    writer.add_embedding_length(model.hidden)
    writer.add_feed_forward_length(model.intermediate)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_rope_freq_base(model.rope_theta)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(model.vocabulary)


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokens = vocabulary_tokens()
    kinds = [gguf.TokenType.NORMAL] * len(tokens)
    for index in range(len(SPECIAL_TOKENS)):
        kinds[index] = gguf.TokenType.CONTROL
    for index, token in enumerate(tokens):
        if token.startswith("<|unused_"):
            kinds[index] = gguf.TokenType.UNUSED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(BEGIN_TOKEN_ID)
    writer.add_eos_token_id(END_TOKEN_ID)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(END_TOKEN_ID)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHAT_TEMPLATE)


_GGUF_LAYER_NAMES: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_OUTER_NAMES: Final = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def _gguf_name(name: str) -> str:
    if name in _GGUF_OUTER_NAMES:
        return _GGUF_OUTER_NAMES[name]
    _, _, layer, role = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{_GGUF_LAYER_NAMES[role]}.weight"


def _llama_cpp_order(name: str, array: Floats, model: TinyModel) -> Floats:
    """Rows of Q and K as llama.cpp's converter writes them: rotated pairs side by side."""
    heads = {"q_proj": model.heads, "k_proj": model.kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return array
    halves = array.reshape(heads, 2, model.head_dim // 2, array.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
