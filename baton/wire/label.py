"""Pair labels and page geometry, proto <-> dataclass.

Owns nothing but the translation; comparison stands in `baton.kv.label`.
"""

from __future__ import annotations

from baton.api.common.v1 import common_pb2
from baton.errors import Reason, ServiceError
from baton.kv.label import PairLabel
from baton.kv.layout import KvDtype, KvGeometry
from baton.kv.numeric import NumericClass


def dtype_to_proto(dtype: KvDtype) -> common_pb2.KvDtype.ValueType:
    """The enum value; its number equals the blob header's code."""
    return common_pb2.KvDtype.ValueType(dtype.wire_code)


def dtype_from_proto(value: int, field: str = "dtype") -> KvDtype:
    """The dtype; raises INVALID_REQUEST naming `field` for an unknown one."""
    dtype = KvDtype.from_wire(value)
    if dtype is None:
        raise ServiceError(
            Reason.INVALID_REQUEST,
            f"{field} has the unknown value {value}; use f16, bf16, f32 or int8",
            field=field,
        )
    return dtype


def geometry_to_proto(geometry: KvGeometry) -> common_pb2.KvGeometry:
    """The page shape as a message."""
    return common_pb2.KvGeometry(
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        head_dim_v=geometry.head_dim_v,
        block_tokens=geometry.block_tokens,
        dtype=dtype_to_proto(geometry.dtype),
    )


def geometry_from_proto(message: common_pb2.KvGeometry) -> KvGeometry:
    """The page shape; raises INVALID_REQUEST naming the field out of range."""
    return KvGeometry(
        layers=message.layers,
        kv_heads=message.kv_heads,
        head_dim=message.head_dim,
        head_dim_v=message.head_dim_v,
        block_tokens=message.block_tokens,
        dtype=dtype_from_proto(message.dtype, "geometry.dtype"),
    )


def label_to_proto(
    label: PairLabel, geometry: KvGeometry, engine_version: str = ""
) -> common_pb2.PairLabel:
    """A label with the page shape it goes with."""
    return common_pb2.PairLabel(
        model_digest=label.model,
        kv_digest=label.kv_digest(),
        tokenizer_hash=label.tokenizer,
        rope_digest=label.rope,
        geometry=geometry_to_proto(geometry),
        layout=label.layout,
        numeric_class=label.numeric_class.text,
        engine_version=engine_version,
    )


def label_from_proto(message: common_pb2.PairLabel) -> PairLabel:
    """The compared part of a label.

    Raises INVALID_REQUEST naming the field that is missing or malformed, and when the KV digest
    does not follow from the other fields.
    """
    if not message.HasField("geometry"):
        raise ServiceError(
            Reason.INVALID_REQUEST,
            "label.geometry is missing; send the page shape",
            field="label.geometry",
        )
    label = PairLabel(
        model=message.model_digest,
        rope=message.rope_digest,
        dtype=dtype_from_proto(message.geometry.dtype, "label.geometry.dtype"),
        block_tokens=message.geometry.block_tokens,
        tokenizer=message.tokenizer_hash,
        numeric_class=NumericClass.parse(message.numeric_class),
        layout=message.layout,
    )
    if message.kv_digest != label.kv_digest():
        raise ServiceError(
            Reason.INVALID_REQUEST,
            "label.kv_digest does not follow from the label's other fields; recompute it",
            field="label.kv_digest",
        )
    return label
