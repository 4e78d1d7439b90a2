"""Weights as the step kernel takes them: GGUF blocks as stored, or float32 rows.

Owns which kind each matrix of a model becomes under a weight mode, and reading the rows in
half-split RoPE order. Holds at most one tensor at a time: the kernel packs its own copy.
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
from baton.engine.label import torch_numeric_class
from baton.engine.model_fields import bad_model
from baton.engine.step_kernel_abi import Activation, Kind, Role
from baton.engine.weight_sources import GgufSource, TensorSource
from baton.engine.weights import GGUF_NAMES, half_split_rows, open_source
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
_LAYER_NORMS: Final = {
    Role.ATTENTION_NORM: "attention_norm",
    Role.FEED_FORWARD_NORM: "feed_forward_norm",
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
    """One matrix: what it is for, the file's name of it, its shape and the kind it becomes."""

    role: Role
    layer: int
    name: str
    rows: int
    columns: int
    kind: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class NormPlan:
    """One norm's weight."""

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
    if mode is WeightMode.FLOAT32 and kv is KvDtype.F32:
        return torch_numeric_class(config, kv)
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
        self.matrices = tuple(self._plan())
        self.norms = tuple(self._plan_norms())

    def read(self, plan: MatrixPlan) -> Array:
        """The matrix's rows: float32 [rows, columns], or uint8 [rows, block bytes of a row]."""
        is_packed = plan.kind in (Kind.Q8_0, Kind.Q4_1)
        rows: Array = self._blocks(plan.name) if is_packed else self._floats(plan.name)
        order = self._row_order(plan.role)
        return np.ascontiguousarray(rows if order is None else rows[order])

    def read_norm(self, plan: NormPlan) -> NDArray[np.float32]:
        """The norm's weight, float32 [hidden]."""
        return self._floats(plan.name)

    def _plan(self) -> Iterator[MatrixPlan]:
        roles = [(Role.EMBEDDING, self._names.embedding)]
        if not self.config.has_tied_head:
            roles.append((Role.HEAD, self._names.head))
        shapes = self._source.shapes()
        for role, name in roles:
            yield self._matrix(role, 0, name, shapes[name])
        for layer in range(self.config.layers):
            for role, key in _LAYER_ROLES.items():
                name = self._names.layer[key].format(layer)
                yield self._matrix(role, layer, name, shapes[name])

    def _matrix(self, role: Role, layer: int, name: str, shape: tuple[int, ...]) -> MatrixPlan:
        kind = self._kind(role, name)
        return MatrixPlan(
            role=role, layer=layer, name=name, rows=shape[0], columns=shape[1], kind=kind
        )

    def _plan_norms(self) -> Iterator[NormPlan]:
        yield NormPlan(role=Role.FINAL_NORM, layer=0, name=self._names.final_norm)
        for layer in range(self.config.layers):
            for role, key in _LAYER_NORMS.items():
                yield NormPlan(role=role, layer=layer, name=self._names.layer[key].format(layer))

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
        if heads is None or self._names is not GGUF_NAMES:
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
