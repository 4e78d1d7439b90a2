"""Finish reasons: OpenAI's words <-> the enum.

Owns the two spellings. Never decides why a sequence ended.
"""

from __future__ import annotations

from typing import Final

from baton.api.common.v1 import common_pb2

_TO_PROTO: Final = {
    "stop": common_pb2.FINISH_REASON_STOP,
    "length": common_pb2.FINISH_REASON_LENGTH,
    "cancelled": common_pb2.FINISH_REASON_CANCELLED,
    "error": common_pb2.FINISH_REASON_ERROR,
}
_FROM_PROTO: Final = {number: text for text, number in _TO_PROTO.items()}


def finish_to_proto(reason: str | None) -> common_pb2.FinishReason.ValueType:
    """The enum value of `stop`, `length`, `cancelled`, `error`; None is unspecified."""
    if reason is None:
        return common_pb2.FINISH_REASON_UNSPECIFIED
    return _TO_PROTO[reason]


def finish_from_proto(value: int) -> str | None:
    """The word, or None while the sequence goes on."""
    return _FROM_PROTO.get(common_pb2.FinishReason.ValueType(value))
