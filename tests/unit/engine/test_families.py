"""Qwen2, Qwen3 and Phi-3 against transformers on random tiny models, in float32.

Both file formats, chunks and single steps; and what a family has that we would compute wrongly is
refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from baton.engine.config import read_config
from baton.engine.kv_pages import KvPages
from baton.engine.transformer import Transformer
from baton.engine.weights import ComputeDtype, load_weights
from baton.errors import Reason, ServiceError
from tests.unit.engine.family_models import (
    ORACLES,
    VOCABULARY,
    family_of,
    oracle_of,
    write_as_gguf,
)

BLOCK_TOKENS: Final = 16
PAGES: Final = list(range(16))[::-1]


def partial(share: float) -> dict[str, Any]:
    """RoPE over this share of each head, as transformers saves it."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": share}
    return {"rope_parameters": rope}


def transformer_of(path: Path) -> Transformer:
    """Our engine on fresh pages, in float32."""
    weights = load_weights(path, ComputeDtype.FLOAT32)
    geometry = weights.config.kv_geometry(BLOCK_TOKENS, weights.dtype.kv_dtype)
    return Transformer(weights, KvPages.allocate(geometry, len(PAGES)))


@pytest.mark.parametrize("is_gguf", [False, True], ids=["directory", "gguf"])
@pytest.mark.parametrize("name", sorted(ORACLES))
def test_logits_equal_transformers(tmp_path: Path, name: str, is_gguf: bool) -> None:
    """Chunks over shuffled pages, then single steps: each row is the oracle's, to rounding."""
    folder = tmp_path / "model"
    model = oracle_of(name, folder)
    if is_gguf:
        folder = write_as_gguf(tmp_path / "m.gguf", model, family_of(name))
    ours = transformer_of(folder)
    tokens = torch.randint(3, VOCABULARY, (100,), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
    ids = tokens.tolist()
    ours.prefill_kv(ids[:37], 0, PAGES)
    rows = [ours.prefill_chunk(ids[37:64], 37, PAGES)]
    rows += [ours.decode_step([ids[at]], [at], [PAGES])[0] for at in range(64, 100)]
    computed = torch.stack(rows)
    wanted = expected[63:]
    assert float(wanted.std()) > 0.05, "an oracle that says the same of every token proves nothing"
    assert float((computed - wanted).norm() / wanted.norm()) < 1e-4
    assert torch.equal(computed.argmax(-1), wanted.argmax(-1))


@pytest.mark.parametrize("name", sorted(ORACLES))
def test_both_formats_say_the_same_model(tmp_path: Path, name: str) -> None:
    """The configuration read from config.json and from GGUF metadata agree."""
    folder = tmp_path / "model"
    model = oracle_of(name, folder)
    ours = read_config(folder)
    theirs = read_config(write_as_gguf(tmp_path / "m.gguf", model, family_of(name)))
    for field in (
        "family",
        "layers",
        "heads",
        "kv_heads",
        "head_dim",
        "rotary_dim",
        "vocabulary",
        "max_context",
    ):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert ours.family is family_of(name)
    mine, its = ours.rope_scaling, theirs.rope_scaling
    assert (mine is None) == (its is None) == ("long" not in name and "short" not in name)
    if mine is not None and its is not None:
        assert mine.factors == pytest.approx(its.factors)
        assert mine.attention_factor == pytest.approx(its.attention_factor)


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("qwen2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("phi3", partial(0.05), "partial_rotary_factor"),
        ("phi3", partial(1.5), "partial_rotary_factor"),
        ("phi3_long", {"rope_parameters": {"rope_type": "longrope"}}, "long_factor"),
        ("qwen2", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("qwen2", {"model_type": "qwen2_moe"}, "model_type"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], field: str
) -> None:
    """The error names the field; a model that loads is computed right."""
    oracle_of(name, tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text("utf-8")) | {"original_max_position_embeddings": 32}
    file.write_text(json.dumps(config | changes), "utf-8")
    with pytest.raises(ServiceError) as caught:
        read_config(tmp_path)
    assert (caught.value.reason, caught.value.field) == (Reason.INVALID_REQUEST, field)


def test_a_context_ends_at_the_sliding_window(tmp_path: Path) -> None:
    """Up to its window such a model attends to everything; beyond it we would not do as it does."""
    oracle_of("phi3", tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps(config | {"sliding_window": 48}), "utf-8")
    assert read_config(tmp_path).max_context == 48


def test_a_missing_bias_is_named(tmp_path: Path) -> None:
    """A Qwen2 file without its biases is incomplete, not a Llama."""
    model = oracle_of("qwen2", tmp_path)
    state = {key: value for key, value in model.state_dict().items() if "k_proj.bias" not in key}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ServiceError) as caught:
        load_weights(tmp_path, ComputeDtype.FLOAT32)
    assert caught.value.field == "model.layers.0.self_attn.k_proj.bias"
