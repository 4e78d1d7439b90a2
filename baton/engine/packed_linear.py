"""Matrices in the order in which oneDNN multiplies them, reordered once instead of at every call.

Owns the choice of what is packed: bfloat16 matrices of a CPU where torch has oneDNN for them. A
packed matrix takes the place of the plain one, takes as much memory, and gives the same bits.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def pack(weight: torch.Tensor, rows: int = 256) -> torch.Tensor:
    """`weight` [output, input] for `linear`, packed where that is faster; `rows`: how many inputs a
    call is expected to have.
    """
    if weight.dtype is not torch.bfloat16 or not weight.is_cpu or not _has_packed():
        return weight
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)
    return packed


def linear(
    states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`states` [rows, input] times the plain or packed `weight`, plus `bias` [output]."""
    if not weight.is_mkldnn:
        return functional.linear(states, weight, bias)
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")
    return product


def place(tensor: torch.Tensor) -> int:
    """What tells two tensors apart: where its numbers are, or itself where oneDNN keeps them."""
    return id(tensor) if tensor.is_mkldnn else tensor.data_ptr()


def _has_packed() -> bool:
    operations = torch.ops.mkldnn
    if not hasattr(operations, "_linear_pointwise"):
        return False
    return bool(operations._is_mkldnn_bf16_supported())
