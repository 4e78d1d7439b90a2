"""`ServiceError` on the gRPC wire and back.

Owns the translation to and from google.rpc.Status with ErrorInfo, RetryInfo and BadRequest. Pure:
bytes and exceptions in, bytes and exceptions out. What goes out is cut to fit HTTP/2 header limits.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from baton.errors import ERROR_DOMAIN, REASONS, Reason, ServiceError

DETAILS_KEY: Final = "grpc-status-details-bin"
MESSAGE_CHARS_MAX: Final = 1024
METADATA_ENTRIES_MAX: Final = 16
METADATA_CHARS_MAX: Final = 256
DETAILS_BYTES_MAX: Final = 64 * 1024

_BY_CODE: Final = MappingProxyType(
    {
        grpc.StatusCode.CANCELLED: Reason.CANCELLED,
        grpc.StatusCode.ABORTED: Reason.CANCELLED,
        grpc.StatusCode.INVALID_ARGUMENT: Reason.INVALID_REQUEST,
        grpc.StatusCode.OUT_OF_RANGE: Reason.INVALID_REQUEST,
        grpc.StatusCode.DEADLINE_EXCEEDED: Reason.DEADLINE_EXCEEDED,
        grpc.StatusCode.NOT_FOUND: Reason.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS: Reason.ALREADY_EXISTS,
        grpc.StatusCode.PERMISSION_DENIED: Reason.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED: Reason.UNAUTHENTICATED,
        grpc.StatusCode.RESOURCE_EXHAUSTED: Reason.QUEUE_FULL,
        grpc.StatusCode.UNIMPLEMENTED: Reason.UNSUPPORTED,
        grpc.StatusCode.UNAVAILABLE: Reason.WORKER_LOST,
        grpc.StatusCode.DATA_LOSS: Reason.CHECKSUM_MISMATCH,
    }
)
"""What a code means when gRPC itself, a proxy or a foreign server sent it without our details."""


def status_of(error: ServiceError) -> status_pb2.Status:
    """The google.rpc.Status of an error: reason and metadata, when to retry, which field."""
    metadata = _bounded(error)
    status = status_pb2.Status(
        code=error.row.grpc_code.value[0], message=error.message[:MESSAGE_CHARS_MAX]
    )
    info = error_details_pb2.ErrorInfo(
        reason=error.reason.value, domain=ERROR_DOMAIN, metadata=metadata
    )
    status.details.add().Pack(info)
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        status.details.add().Pack(retry)
    if error.field is not None:
        bad_request = error_details_pb2.BadRequest()
        bad_request.field_violations.add(
            field=error.field[:METADATA_CHARS_MAX], description=status.message
        )
        status.details.add().Pack(bad_request)
    return status


def _bounded(error: ServiceError) -> dict[str, str]:
    """ErrorInfo's metadata: the error's own plus its field, cut to the limits."""
    metadata = dict(error.metadata)
    if error.field is not None:
        metadata["field"] = error.field
    kept = list(metadata.items())[-METADATA_ENTRIES_MAX:]
    return {key[:METADATA_CHARS_MAX]: value[:METADATA_CHARS_MAX] for key, value in kept}


def from_rpc_error(error: grpc.aio.AioRpcError) -> ServiceError:
    """The `ServiceError` that the server raised, or the nearest one if it sent no details."""
    status = _details(error)
    info, retry_after_s, field = error_details_pb2.ErrorInfo(), None, None
    for detail in status.details if status is not None else ():
        retry, bad_request = error_details_pb2.RetryInfo(), error_details_pb2.BadRequest()
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Is(retry.DESCRIPTOR):
            detail.Unpack(retry)
            retry_after_s = max(retry.retry_delay.ToNanoseconds() / 1e9, 0.0)
        elif detail.Is(bad_request.DESCRIPTOR):
            detail.Unpack(bad_request)
            field = next((v.field for v in bad_request.field_violations), None)
    if info.domain == ERROR_DOMAIN and info.reason in Reason.__members__:
        metadata = {key: value for key, value in info.metadata.items() if key != "field"}
        return ServiceError(
            Reason[info.reason],
            error.details() or "",
            field=field or info.metadata.get("field"),
            metadata=metadata,
            retry_after_s=retry_after_s,
        )
    return _foreign(error, retry_after_s)


def _details(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    """The status in the trailing metadata, or None where there is none that can be read."""
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes) and len(value) <= DETAILS_BYTES_MAX:
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None


def _foreign(error: grpc.aio.AioRpcError, retry_after_s: float | None) -> ServiceError:
    """The nearest reason for an error without our details."""
    text = error.details() or ""
    reason = _BY_CODE.get(error.code(), Reason.INTERNAL)
    if "message larger than max" in text:
        # gRPC calls an oversized message exhaustion; no retry will make it smaller.
        reason = Reason.INVALID_REQUEST
    return ServiceError(
        reason,
        f"{error.code().name}: {text}"[:MESSAGE_CHARS_MAX],
        metadata={"grpc_code": error.code().name},
        retry_after_s=retry_after_s if REASONS[reason].retryable else None,
    )
