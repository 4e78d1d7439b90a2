"""Weights as the step kernel takes them: GGUF blocks as stored, or float32 rows.

Owns which kind each matrix of a model becomes under a weight mode, and reading the rows in
half-split RoPE order. Fused matrices are taken apart here: the kernel knows Q, K, V, gate and up.
Holds at most one tensor at a time: the kernel packs its own copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from baton.engine.config import ModelConfig
from baton.engine.families import layer_roles
from baton.engine.label import torch_numeric_class
from baton.engine.model_fields import bad_model
from baton.engine.step_kernel_abi import Activation, Kind, Role
from baton.engine.weight_sources import GgufSource, TensorSource
from baton.engine.weights import half_split_rows, open_source
from baton.errors import Reason, ServiceError
from baton.kv.layout import KvDtype
from baton.kv.numeric import NumericClass

Array = NDArray[Any]


class WeightMode(StrEnum):
    """How matrices are kept: in float32 (the exact class), rounded, or packed as in the GGUF.

    `int8` has one scale a row. `packed` keeps blocks of Q4_0, Q4_1 and Q8_0; an embedding or head
    of another type is kept as bfloat16.
    """

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    PACKED = "packed"


_LAYER_ROLES: Final = {
    Role.QUERY: "query",
    Role.KEY: "key",
    Role.VALUE: "value",
    Role.OUTPUT: "attention_output",
    Role.GATE: "gate",
    Role.UP: "up",
    Role.DOWN: "down",
}
_FUSED: Final = {
    Role.QUERY: "query_key_value",
    Role.KEY: "query_key_value",
    Role.VALUE: "query_key_value",
    Role.GATE: "gate_up",
    Role.UP: "gate_up",
}
_LAYER_VECTORS: Final = {
    Role.ATTENTION_NORM: "attention_norm",
    Role.FEED_FORWARD_NORM: "feed_forward_norm",
    Role.QUERY_BIAS: "query_bias",
    Role.KEY_BIAS: "key_bias",
    Role.VALUE_BIAS: "value_bias",
    Role.QUERY_NORM: "query_norm",
    Role.KEY_NORM: "key_norm",
}
_ROUNDED_KINDS: Final = {
    WeightMode.FLOAT32: Kind.F32,
    WeightMode.BFLOAT16: Kind.BF16,
    WeightMode.INT8: Kind.INT8,
}
_PACKED_KINDS: Final = {"Q4_0": Kind.Q4_1, "Q4_1": Kind.Q4_1, "Q8_0": Kind.Q8_0}
_PACKED_FORMATS: Final = ("q4_0", "q4_1", "q8_0")


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixPlan:
    """One matrix: what it is for, the file's name of it, its shape and the kind it becomes.

    `first_row` is where its rows begin in the stored tensor, which may hold others, too.
    """

    role: Role
    layer: int
    name: str
    first_row: int
    rows: int
    columns: int
    kind: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorPlan:
    """One norm's weight or one bias."""

    role: Role
    layer: int
    name: str


def kernel_numeric_class(
    config: ModelConfig, mode: WeightMode, activation: Activation, kv: KvDtype
) -> NumericClass:
    """The class of the step kernel under `mode` with KV of type `kv`.

    Sums of a sequence do not depend on its batch here, but classes that read each other's KV are
    listed by policy without that claim, so it is not made.
    """
    if mode is WeightMode.FLOAT32 and kv in (KvDtype.F32, KvDtype.INT8):
        return torch_numeric_class(config, kv, KvDtype.F32)
    weights = "int8" if mode is WeightMode.INT8 else config.weights_format
    act = {WeightMode.FLOAT32: "f32", WeightMode.BFLOAT16: "bf16"}.get(mode, activation.value)
    return NumericClass(weights=weights, act=act, acc="f32", kv=kv.text, is_invariant=False)


def default_mode(config: ModelConfig) -> WeightMode:
    """Packed where the file's blocks can be, bfloat16 elsewhere."""
    is_packed = config.weights_format in _PACKED_FORMATS
    return WeightMode.PACKED if is_packed else WeightMode.BFLOAT16


class KernelWeights:
    """The tensors of the model at `path`, planned for `mode`.

    Raises ServiceError INVALID_REQUEST for a damaged model, UNSUPPORTED when it has no blocks to
    keep packed.
    """

    def __init__(self, path: Path, mode: WeightMode) -> None:
        self._source, self.config, self._names = open_source(path)
        self._mode = mode
        self._last: tuple[tuple[str, bool], Array] | None = None
        self.matrices = tuple(self._plan())
        self.vectors = tuple(self._plan_vectors())

    def read(self, plan: MatrixPlan) -> Array:
        """The matrix's rows: float32 [rows, columns], or uint8 [rows, block bytes of a row]."""
        is_packed = plan.kind in (Kind.Q8_0, Kind.Q4_1)
        stored = self._stored(plan.name, is_packed=is_packed)
        rows = stored[plan.first_row : plan.first_row + plan.rows]
        order = self._row_order(plan.role)
        return np.ascontiguousarray(rows if order is None else rows[order])

    def read_vector(self, plan: VectorPlan) -> NDArray[np.float32]:
        """The norm's weight or the bias, float32 [items]."""
        return self._floats(plan.name)

    def _stored(self, name: str, *, is_packed: bool) -> Array:
        """A whole stored tensor; the last one is kept, because fused ones are read part by part."""
        key = (name, is_packed)
        if self._last is None or self._last[0] != key:
            self._last = None
            self._last = (key, self._blocks(name) if is_packed else self._floats(name))
        return self._last[1]

    def _plan(self) -> Iterator[MatrixPlan]:
        roles = [(Role.EMBEDDING, self._names.embedding)]
        if not self.config.has_tied_head:
            roles.append((Role.HEAD, self._names.head))
        shapes = self._source.shapes()
        for role, name in roles:
            rows, columns = shapes[name]
            yield self._matrix(role, 0, name, (0, rows, columns))
        fused = _FUSED if self.config.traits.is_fused else {}
        spans = self._fused_spans()
        for layer in range(self.config.layers):
            for role, key in _LAYER_ROLES.items():
                name = self._names.layer[fused.get(role, key)].format(layer)
                first, rows = spans[role] if role in fused else (0, shapes[name][0])
                yield self._matrix(role, layer, name, (first, rows, shapes[name][1]))

    def _matrix(self, role: Role, layer: int, name: str, span: tuple[int, int, int]) -> MatrixPlan:
        first, rows, columns = span
        return MatrixPlan(
            role=role,
            layer=layer,
            name=name,
            first_row=first,
            rows=rows,
            columns=columns,
            kind=self._kind(role, name),
        )

    def _fused_spans(self) -> dict[Role, tuple[int, int]]:
        """First row and rows of each part of a fused matrix."""
        query, kv, inner = self.config.query_width, self.config.kv_width, self.config.intermediate
        return {
            Role.QUERY: (0, query),
            Role.KEY: (query, kv),
            Role.VALUE: (query + kv, kv),
            Role.GATE: (0, inner),
            Role.UP: (inner, inner),
        }

    def _plan_vectors(self) -> Iterator[VectorPlan]:
        yield VectorPlan(role=Role.FINAL_NORM, layer=0, name=self._names.final_norm)
        wanted = layer_roles(self.config.family)
        for layer in range(self.config.layers):
            for role, key in _LAYER_VECTORS.items():
                if key in wanted:
                    name = self._names.layer[key].format(layer)
                    yield VectorPlan(role=role, layer=layer, name=name)

    def _kind(self, role: Role, name: str) -> Kind:
        if self._mode is not WeightMode.PACKED:
            return _ROUNDED_KINDS[self._mode]
        stored = _block_type(self._source, name)
        kind = _PACKED_KINDS.get(stored)
        if kind is not None:
            return kind
        if role in (Role.EMBEDDING, Role.HEAD):
            return Kind.BF16
        raise ServiceError(
            Reason.UNSUPPORTED,
            f"{name} is stored as {stored}, which the step kernel cannot keep packed; "
            "use weight mode bfloat16",
            field="weight_mode",
        )

    def _row_order(self, role: Role) -> NDArray[np.int64] | None:
        heads = {Role.QUERY: self.config.heads, Role.KEY: self.config.kv_heads}.get(role)
        is_interleaved = self._names.is_gguf and self.config.traits.is_interleaved_in_gguf
        if heads is None or not is_interleaved:
            return None
        order: NDArray[np.int64] = half_split_rows(heads, self.config.head_dim).numpy()
        return order

    def _floats(self, name: str) -> NDArray[np.float32]:
        tensor = self._source.read(name).to(torch.float32).contiguous()
        if not bool(torch.isfinite(tensor.sum())):
            raise bad_model(self._source.path, name, "holds numbers that are not finite")
        numbers: NDArray[np.float32] = tensor.numpy()
        return numbers

    def _blocks(self, name: str) -> NDArray[np.uint8]:
        assert isinstance(self._source, GgufSource)
        kind, rows = self._source.stored_rows(name)
        scales = rows.reshape(-1, _BLOCK_BYTES[kind])[:, : _SCALE_BYTES[kind]]
        if not np.isfinite(np.ascontiguousarray(scales).view("<f2")).all():
            raise bad_model(self._source.path, name, "holds numbers that are not finite")
        return _as_q4_1(rows) if kind == "Q4_0" else rows


_BLOCK_BYTES: Final = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
_SCALE_BYTES: Final = {"Q4_0": 2, "Q4_1": 4, "Q8_0": 2}


def _block_type(source: TensorSource, name: str) -> str:
    if not isinstance(source, GgufSource):
        return "plain numbers"
    return source.stored_rows(name)[0]


def _as_q4_1(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Q4_0 blocks with their minimum, -8 times the scale, written out: the same numbers."""
    blocks = rows.reshape(rows.shape[0], -1, _BLOCK_BYTES["Q4_0"])
    scales = np.ascontiguousarray(blocks[..., :2]).view("<f2")
    minima = (scales.astype(np.float32) * -8.0).astype("<f2").view(np.uint8)
    return np.concatenate((blocks[..., :2], minima, blocks[..., 2:]), axis=-1).reshape(
        rows.shape[0], -1
    )
