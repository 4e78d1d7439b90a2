"""An arena of int8 pages lets in workers of int8 KV only, and the other way round."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.errors import Reason, ServiceError
from baton.kv.label import PairLabel
from baton.kv.layout import KvDtype, KvGeometry
from baton.kv.numeric import TORCH_BF16, NumericClass
from services.kvstore.config import Dtype
from services.kvstore.identity import Identity


def label(kv: KvDtype) -> PairLabel:
    numeric = replace(TORCH_BF16, kv=kv.text)
    return PairLabel(
        model=bytes(16),
        rope=bytes(16),
        dtype=kv,
        block_tokens=16,
        tokenizer=bytes(8),
        numeric_class=NumericClass.parse(numeric.text),
    )


def identity(kv: KvDtype) -> Identity:
    geometry = KvGeometry(
        layers=2, kv_heads=2, head_dim=32, head_dim_v=32, block_tokens=16, dtype=kv
    )
    return Identity(label=label(kv), geometry=geometry, model="m", node_id="node-0")


@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.INT8])
def test_workers_of_the_other_type_are_refused(dtype: Dtype) -> None:
    """Before a byte moves, and by name: the two never share a page."""
    other = KvDtype.INT8 if dtype.kv is KvDtype.BF16 else KvDtype.BF16
    store = identity(dtype.kv)
    store.require_suits(label(dtype.kv))
    with pytest.raises(ServiceError) as caught:
        store.require_suits(label(other))
    assert (caught.value.reason, caught.value.field) == (Reason.COMPAT_MISMATCH, "kv_dtype")
    assert caught.value.metadata["ours"] == dtype.kv.text
