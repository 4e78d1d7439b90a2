"""Errors inside streams: ServiceError <-> ErrorDetail.

Owns the translation of the same reasons that RPC statuses carry. Never logs.
"""

from __future__ import annotations

import math

from baton.api.common.v1 import common_pb2
from baton.errors import Reason, ServiceError


def error_to_proto(error: ServiceError) -> common_pb2.ErrorDetail:
    """The error as a message."""
    detail = common_pb2.ErrorDetail(
        reason=error.reason.value,
        message=error.message,
        field=error.field or "",
        metadata=dict(error.metadata),
    )
    if error.retry_after_s is not None:
        whole = math.floor(error.retry_after_s)
        detail.retry_after.seconds = whole
        detail.retry_after.nanos = int((error.retry_after_s - whole) * 1e9)
    return detail


def error_from_proto(detail: common_pb2.ErrorDetail) -> ServiceError:
    """The error; a reason this version does not know becomes INTERNAL with the text kept."""
    known = detail.reason in Reason.__members__
    retry_after_s = None
    if detail.HasField("retry_after"):
        retry_after_s = max(0.0, detail.retry_after.seconds + detail.retry_after.nanos / 1e9)
    return ServiceError(
        Reason(detail.reason) if known else Reason.INTERNAL,
        detail.message,
        field=detail.field or None,
        metadata=dict(detail.metadata),
        retry_after_s=retry_after_s,
    )
