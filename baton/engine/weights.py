"""Loading a model's weights: every tensor found, shaped as the config says, in the compute type.

Owns the names of tensors in both file formats, the undoing of llama.cpp's row order for Q and K,
and the fusing of matrices that share an input. A missing, extra or misshapen tensor is an error
that names it: a model is loaded whole and right, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch

from baton.engine.config import (
    ModelConfig,
    config_from_directory,
    config_from_gguf,
    read_config,
)
from baton.engine.families import DIRECTORY_NAMES, GGUF_NAMES, TensorNames, layer_roles
from baton.engine.gguf_meta import read_header
from baton.engine.model_fields import bad_model
from baton.engine.packed_linear import pack
from baton.engine.rope import RopeTable, build_table
from baton.engine.rope_scaling import FACTOR_TENSORS
from baton.engine.weight_sources import GgufSource, SafetensorsSource, TensorSource
from baton.errors import Reason, ServiceError
from baton.kv.layout import KvDtype


class ComputeDtype(Enum):
    """The type of matrices, of their inputs and of KV; accumulation is float32 in both."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch type."""
        return torch.float32 if self is ComputeDtype.FLOAT32 else torch.bfloat16

    @property
    def kv_dtype(self) -> KvDtype:
        """The type in which KV is stored in pages."""
        return KvDtype.F32 if self is ComputeDtype.FLOAT32 else KvDtype.BF16


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. Norms are float32 [hidden]; matrices are [output, input] in the compute type, for
    `baton.engine.packed_linear.linear`.

    `query_key_value` stacks Q, K and V by rows; `gate_up` stacks gate and up. Where the family has
    them: `query_key_value_bias` in the compute type, and `head_norm`, float32 [heads + kv_heads,
    head_dim], the weight each head of Q and K is normalised with.
    """

    attention_norm: torch.Tensor
    query_key_value: torch.Tensor
    attention_output: torch.Tensor
    feed_forward_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    query_key_value_bias: torch.Tensor | None = None
    head_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """A whole model in memory.

    `embedding` and `head` are float32 [vocabulary, hidden] (one tensor when tied): logits rounded
    to bfloat16 would tie where the model does not. `rope` covers `max_context` positions.
    """

    config: ModelConfig
    dtype: ComputeDtype
    max_context: int
    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: torch.Tensor
    rope: RopeTable


def load_weights(
    path: Path,
    dtype: ComputeDtype,
    *,
    max_context: int | None = None,
    device: torch.device | str = "cpu",
) -> ModelWeights:
    """Load the model at `path` (a .gguf file or a Hugging Face directory) into `device`'s memory.

    `max_context` is the worker's limit, at most the model's own (the default). Raises ServiceError
    INVALID_REQUEST naming file, tensor or field, and what to do.
    """
    source, config, names = open_source(path)
    is_interleaved = names.is_gguf and config.traits.is_interleaved_in_gguf
    kind = _InterleavedLoader if is_interleaved else _Loader
    loader = kind(source, config, dtype, names, torch.device(device))
    context = config.max_context if max_context is None else max_context
    if not 1 <= context <= config.max_context:
        raise ServiceError(
            Reason.INVALID_REQUEST,
            f"max_context {context} must be from 1 to the model's {config.max_context}",
            field="max_context",
        )
    return loader.load(context)


def open_source(path: Path) -> tuple[TensorSource, ModelConfig, TensorNames]:
    """The tensors at `path` (a .gguf file or a Hugging Face directory), checked against its config.

    Raises ServiceError INVALID_REQUEST naming file, tensor or field when any is missing, extra or
    misshapen.
    """
    source: TensorSource
    if path.is_dir():
        config, source, names = (
            config_from_directory(path),
            SafetensorsSource(path),
            DIRECTORY_NAMES,
        )
    elif path.is_file():
        header = read_header(path)
        config, source, names = config_from_gguf(header), GgufSource(header), GGUF_NAMES
    else:
        config = read_config(path)  # Raises: the path does not exist.
        raise AssertionError(f"{path} appeared while it was read")
    _check_tensors(source, config, names)
    return source, config, names


def half_split_rows(heads: int, head_dim: int) -> torch.Tensor:
    """Which row of llama.cpp's Q or K stands where in half-split RoPE order [heads * head_dim].

    llama.cpp interleaves the rotated halves of each head; blocks run along a row, so rows can move.
    """
    rows = torch.arange(heads * head_dim).view(heads, head_dim // 2, 2)
    return rows.transpose(1, 2).reshape(-1)


class _Loader:
    """Reads one source under one set of names; the base is the Hugging Face row order."""

    def __init__(
        self,
        source: TensorSource,
        config: ModelConfig,
        dtype: ComputeDtype,
        names: TensorNames,
        device: torch.device,
    ) -> None:
        self._source = source
        self._config = config
        self._dtype = dtype
        self._names = names
        self._device = device

    def load(self, max_context: int) -> ModelWeights:
        """Read every tensor."""
        embedding = self._read(self._names.embedding, torch.float32)
        head = embedding
        if not self._config.has_tied_head:
            head = self._read(self._names.head, torch.float32)
        return ModelWeights(
            config=self._config,
            dtype=self._dtype,
            max_context=max_context,
            embedding=embedding,
            layers=tuple(self._layer(index) for index in range(self._config.layers)),
            final_norm=self._read(self._names.final_norm, torch.float32),
            head=head,
            rope=build_table(self._config, max_context).to(self._device),
        )

    def _layer(self, index: int) -> LayerWeights:
        def matrix(role: str) -> torch.Tensor:
            return self._ordered(role, self._read(self._layer_name(role, index)))

        def norm(role: str) -> torch.Tensor:
            return self._read(self._layer_name(role, index), torch.float32)

        traits = self._config.traits
        stacked = ("query_key_value",) if traits.is_fused else ("query", "key", "value")
        gated = ("gate_up",) if traits.is_fused else ("gate", "up")
        return LayerWeights(
            attention_norm=norm("attention_norm"),
            query_key_value=pack(torch.cat([matrix(role) for role in stacked])),
            attention_output=pack(matrix("attention_output")),
            feed_forward_norm=norm("feed_forward_norm"),
            gate_up=pack(torch.cat([matrix(role) for role in gated])),
            down=pack(matrix("down")),
            query_key_value_bias=self._bias(index) if traits.has_qkv_bias else None,
            head_norm=self._head_norm(index) if traits.has_qk_norm else None,
        )

    def _bias(self, index: int) -> torch.Tensor:
        roles = ("query_bias", "key_bias", "value_bias")
        return torch.cat([self._read(self._layer_name(role, index)) for role in roles])

    def _head_norm(self, index: int) -> torch.Tensor:
        """The norm of each Q head, then that of each K head."""
        counts = {"query_norm": self._config.heads, "key_norm": self._config.kv_heads}
        return torch.cat(
            [
                self._read(self._layer_name(role, index), torch.float32).expand(count, -1)
                for role, count in counts.items()
            ]
        )

    def _ordered(self, role: str, matrix: torch.Tensor) -> torch.Tensor:
        """Put the rows of `matrix` into half-split RoPE order; here they already are."""
        return matrix

    def _read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        wanted = self._dtype.torch_dtype if dtype is None else dtype
        # A copy always, so that no weight depends on the mapped file staying as it is.
        tensor = self._source.read(name).to(wanted, copy=True).contiguous().to(self._device)
        if not bool(torch.isfinite(tensor.sum())):
            raise bad_model(self._source.path, name, "holds numbers that are not finite")
        return tensor

    def _layer_name(self, role: str, index: int) -> str:
        return self._names.layer[role].format(index)


class _InterleavedLoader(_Loader):
    """llama.cpp interleaves the rotated halves of each Q and K head; this puts them back."""

    def _ordered(self, role: str, matrix: torch.Tensor) -> torch.Tensor:
        heads = {"query": self._config.heads, "key": self._config.kv_heads}.get(role)
        if heads is None:
            return matrix
        return matrix[half_split_rows(heads, self._config.head_dim)]


def _check_tensors(source: TensorSource, config: ModelConfig, names: TensorNames) -> None:
    shapes = source.shapes()
    expected = dict(_expected_shapes(config, names))
    for name, shape in expected.items():
        if name not in shapes:
            raise bad_model(source.path, name, "is missing; the model is incomplete")
        if shapes[name] != shape:
            raise bad_model(
                source.path,
                name,
                f"has shape {list(shapes[name])}, but the config says {list(shape)}",
            )
    extra = sorted(name for name in shapes if name not in expected)
    unknown = [name for name in extra if not _is_harmless(name, config, names)]
    if unknown:
        raise bad_model(
            source.path,
            unknown[0],
            f"is not part of a {config.family} model ({len(unknown)} such tensors)",
        )


def _is_harmless(name: str, config: ModelConfig, names: TensorNames) -> bool:
    """Tensors that repeat what the config says: a tied head, the RoPE frequencies."""
    is_rope = name in FACTOR_TENSORS or name.endswith(".rotary_emb.inv_freq")
    return is_rope or (config.has_tied_head and name == names.head)


def _expected_shapes(
    config: ModelConfig, names: TensorNames
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield names.embedding, (config.vocabulary, config.hidden)
    yield names.final_norm, (config.hidden,)
    if not config.has_tied_head:
        yield names.head, (config.vocabulary, config.hidden)
    shapes = {
        "attention_norm": (config.hidden,),
        "query": (config.query_width, config.hidden),
        "key": (config.kv_width, config.hidden),
        "value": (config.kv_width, config.hidden),
        "query_bias": (config.query_width,),
        "key_bias": (config.kv_width,),
        "value_bias": (config.kv_width,),
        "query_norm": (config.head_dim,),
        "key_norm": (config.head_dim,),
        "query_key_value": (config.query_width + 2 * config.kv_width, config.hidden),
        "attention_output": (config.hidden, config.query_width),
        "feed_forward_norm": (config.hidden,),
        "gate": (config.intermediate, config.hidden),
        "up": (config.intermediate, config.hidden),
        "gate_up": (2 * config.intermediate, config.hidden),
        "down": (config.hidden, config.intermediate),
    }
    for index in range(config.layers):
        for role in layer_roles(config.family):
            yield names.layer[role].format(index), shapes[role]
