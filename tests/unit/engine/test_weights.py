"""Loading weights: every storage type, every broken file refused by name."""

from __future__ import annotations

import json
import struct

import gguf
import numpy as np
import pytest
import torch
from gguf import quants
from safetensors.numpy import load_file, save_file

from baton.engine.config import read_config
from baton.engine.gguf_meta import read_header, read_metadata
from baton.engine.rope import inverse_frequencies
from baton.engine.rope_scaling import RopeKind
from baton.engine.weights import ComputeDtype, load_weights
from baton.errors import Reason, ServiceError
from baton.testing.tiny_models import (
    GQA_TIED,
    GQA_UNTIED,
    MHA_UNTIED,
    weights,
    write_directory,
    write_gguf,
)

F32 = ComputeDtype.FLOAT32
# The worst error of one number, in units of its block's largest magnitude.
QUANT_ERRORS = {
    "F32": 0.0,
    "F16": 1e-3,
    "BF16": 1e-2,
    "Q8_0": 0.01,
    "Q5_0": 0.08,
    "Q5_1": 0.08,
    "Q4_0": 0.15,
    "Q4_1": 0.15,
}


def refused(call, *, field: str, text: str = "") -> None:
    with pytest.raises(ServiceError) as caught:
        call()
    assert caught.value.reason is Reason.INVALID_REQUEST
    assert caught.value.field == field
    assert text in str(caught.value)


@pytest.mark.parametrize("kind", sorted(QUANT_ERRORS))
def test_gguf_types_dequantise_to_the_stored_values(tmp_path, kind):
    """Loaded numbers are near the original ones, and equal to gguf's own dequantisation."""
    path = write_gguf(tmp_path / "m.gguf", GQA_UNTIED, matrix_type=kind)
    loaded = load_weights(path, F32)
    original = dict(weights(GQA_UNTIED))["model.layers.1.mlp.down_proj.weight"]
    down = loaded.layers[1].down.numpy()
    assert np.abs(down - original).max() <= QUANT_ERRORS[kind] * np.abs(original).max()
    stored = quants.quantize(original, gguf.GGMLQuantizationType[kind])
    plain = quants.dequantize(stored, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(down, plain)
    assert loaded.config.weights_format == kind.lower()


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("model", [GQA_TIED, MHA_UNTIED], ids=["tied", "untied"])
def test_directory_and_gguf_load_the_same_numbers(tmp_path, model, shards):
    """Two file formats, sharded or not, tied or not: one model."""
    ours = load_weights(write_directory(tmp_path / "hf", model, shards=shards), F32)
    theirs = load_weights(write_gguf(tmp_path / "m.gguf", model), F32)
    for one, other in zip(ours.layers, theirs.layers, strict=True):
        for name in one.__slots__:
            mine, its = getattr(one, name), getattr(other, name)
            assert (mine is None and its is None) or torch.equal(mine, its), name
    assert torch.equal(ours.embedding, theirs.embedding)
    assert torch.equal(ours.head, theirs.head)
    assert torch.equal(ours.final_norm, theirs.final_norm)
    assert (ours.head is ours.embedding) == model.has_tied_head


def test_header_reader_agrees_with_gguf(tmp_path):
    """Our fast reader and the reference reader see the same metadata and tensors."""
    path = write_gguf(tmp_path / "m.gguf", matrix_type="Q4_1")
    header, reference = read_header(path), gguf.GGUFReader(path)
    names = [name for name in reference.fields if not name.startswith("GGUF.")]
    assert set(names) == set(header.metadata)
    for name in names:
        assert header.metadata[name] == reference.fields[name].contents(), name
    assert {t.name: int(t.data_offset) for t in reference.tensors} == {
        t.name: t.offset for t in header.tensors.values()
    }
    assert read_metadata(path) == header.metadata


def test_truncated_gguf_is_refused_at_any_byte(tmp_path):
    """A broken download must give a clear error wherever it broke, never a crash or a hang."""
    path = write_gguf(tmp_path / "m.gguf")
    whole = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    sizes = [*range(0, 4096, 61), len(whole) // 2, len(whole) - 1]
    for size in sizes:
        cut.write_bytes(whole[:size])
        with pytest.raises(ServiceError) as caught:
            read_header(cut)
        assert caught.value.reason is Reason.INVALID_REQUEST
        assert "cut.gguf" in str(caught.value)


def test_absurd_gguf_lengths_are_refused_before_allocation(tmp_path):
    """A length field is a claim by a stranger."""
    path = tmp_path / "m.gguf"
    start = b"GGUF" + struct.pack("<I", 3)
    key = struct.pack("<Q", 1) + b"k"
    huge = 1 << 60
    path.write_bytes(start + struct.pack("<QQ", huge, 0))
    refused(lambda: read_header(path), field="tensor_count")
    path.write_bytes(start + struct.pack("<QQ", 0, huge))
    refused(lambda: read_header(path), field="metadata_count")
    path.write_bytes(start + struct.pack("<QQQ", 0, 1, huge) + bytes(64))
    refused(lambda: read_header(path), field="metadata key")
    path.write_bytes(start + struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 8, huge))
    refused(lambda: read_header(path), field="k")
    path.write_bytes(start + struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 8, 1 << 20))
    refused(lambda: read_header(path), field="k", text="truncated")
    path.write_bytes(start + struct.pack("<QQ", 0, 1) + key + struct.pack("<I", 77))
    refused(lambda: read_header(path), field="k", text="77")


def test_other_files_are_refused_by_name(tmp_path):
    """Not GGUF, empty, absent, another version: each says which."""
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    refused(lambda: read_config(path), field="magic")
    path.write_bytes(b"GGUF" + struct.pack("<I", 1) + bytes(100))
    refused(lambda: read_config(path), field="version")
    path.write_bytes(b"")
    refused(lambda: read_config(path), field="file")
    refused(lambda: read_config(tmp_path / "absent.gguf"), field="path")
    refused(lambda: load_weights(tmp_path / "absent.gguf", F32), field="path")


def test_unreadable_tensor_type_is_refused_with_remedy(tmp_path):
    """Many GGUF files are Q4_K; the user must learn which types to fetch instead."""
    path = write_gguf(tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    name = b"blk.0.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 16
    data[at : at + 4] = struct.pack("<I", 12)
    path.write_bytes(bytes(data))
    refused(lambda: load_weights(path, F32), field=name.decode(), text="Q4_K")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_type": "mamba"}, "model_type"),
        ({"num_key_value_heads": 3}, "kv heads"),
        ({"head_dim": 33}, "head_dim"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"vocab_size": 1 << 40}, "vocab_size"),
        ({"rms_norm_eps": -1.0}, "rms epsilon"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "factor"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"eos_token_id": 5000}, "eos token id"),
        ({"dtype": "int8"}, "dtype"),
    ],
)
def test_unsupported_config_names_its_field(tmp_path, change, field):
    """A model we would compute wrongly is refused, never approximated."""
    path = write_directory(tmp_path, extra_config=change)
    refused(lambda: read_config(path), field=field, text="config.json")


def test_config_that_is_no_json_is_refused(tmp_path):
    """Half a config.json, or none."""
    path = write_directory(tmp_path)
    (path / "config.json").write_text('{"model_type": "lla')
    refused(lambda: read_config(path), field="file", text="config.json")
    (path / "config.json").unlink()
    refused(lambda: read_config(path), field="file", text="config.json")


@pytest.mark.parametrize("fault", ["missing", "extra", "shape", "nan"])
def test_odd_tensor_is_refused_by_name(tmp_path, fault):
    """A model is loaded whole and right, or not at all."""
    path = write_directory(tmp_path)
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if fault == "missing":
        del tensors[name]
    elif fault == "extra":
        name = "model.layers.0.self_attn.q_proj.bias"
        tensors[name] = np.zeros(128, np.float32)
    elif fault == "shape":
        tensors[name] = np.ascontiguousarray(tensors[name].T)
    else:
        tensors[name][3, 3] = np.nan
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    refused(lambda: load_weights(path, F32), field=name)


def test_damaged_safetensors_are_refused(tmp_path):
    """Truncated, absent, or an index that points out of its directory."""
    path = write_directory(tmp_path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused(lambda: load_weights(path, F32), field="file", text="model.safetensors")
    file.unlink()
    refused(lambda: load_weights(path, F32), field="model.safetensors")
    index = path / "model.safetensors.index.json"
    for target in ("../escape.safetensors", "absent.safetensors"):
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": target}}))
        refused(lambda: load_weights(path, F32), field="weight_map")
    index.write_text(json.dumps({"weight_map": []}))
    refused(lambda: load_weights(path, F32), field="weight_map")


def test_context_limit_is_checked_against_the_model(tmp_path):
    """RoPE is fixed at load: a worker may serve less than the model can, never more."""
    path = write_directory(tmp_path)
    assert load_weights(path, F32, max_context=100).rope.cosine.shape == (100, 32)
    for context in (0, 513):
        with pytest.raises(ServiceError) as caught:
            load_weights(path, F32, max_context=context)
        assert caught.value.field == "max_context"


def test_end_tokens_come_from_both_config_files(tmp_path):
    """Llama 3 names its end-of-turn tokens only in generation_config.json."""
    path = write_directory(tmp_path)
    (path / "generation_config.json").write_text('{"eos_token_id": [5, 2, 9]}')
    assert read_config(path).end_token_ids == (2, 5, 9)


def test_gguf_rope_factors_divide_the_frequencies(tmp_path):
    """GGUF stores Llama 3's scaling as a tensor of factors; without it positions drift."""
    path = tmp_path / "m.gguf"
    write_gguf(path)
    plain = read_config(path)
    writer = gguf.GGUFWriter(path, "llama")
    header = read_header(path)
    for name in ("block_count", "context_length", "embedding_length", "feed_forward_length"):
        writer.add_uint32(f"llama.{name}", header.metadata[f"llama.{name}"])
    writer.add_head_count(plain.heads)
    writer.add_head_count_kv(plain.kv_heads)
    writer.add_key_length(plain.head_dim)
    writer.add_value_length(plain.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(plain.vocabulary)
    factors = np.linspace(1.0, 8.0, plain.head_dim // 2, dtype=np.float32)
    writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    scaled = read_config(path)
    assert scaled.rope_scaling is not None
    assert scaled.rope_scaling.kind is RopeKind.FACTORS
    expected = inverse_frequencies(plain) / torch.from_numpy(factors)
    torch.testing.assert_close(inverse_frequencies(scaled), expected)
