"""The one error model: reasons, what each means on every wire, and `ServiceError`.

Owns the table reason -> (gRPC code, HTTP status, OpenAI type, OpenAI code, retryable). Never does
I/O, never formats a response: the gRPC interceptor and the REST layer read the table.
Asserts are for our own bugs; `ServiceError` is for everything the world can do to us.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum, unique
from types import MappingProxyType
from typing import Final

from grpc import StatusCode

ERROR_DOMAIN: Final = "baton"
"""The `domain` of every google.rpc.ErrorInfo that Baton sends."""


@unique
class Reason(StrEnum):
    """Why a request failed; stable names, part of the contract."""

    INVALID_REQUEST = "INVALID_REQUEST"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    NOT_FOUND = "NOT_FOUND"
    QUEUE_FULL = "QUEUE_FULL"
    PAGES_EXHAUSTED = "PAGES_EXHAUSTED"
    DRAINING = "DRAINING"
    WORKER_LOST = "WORKER_LOST"
    NO_WORKER = "NO_WORKER"
    BLOCK_NOT_FOUND = "BLOCK_NOT_FOUND"
    LOG_NOT_FOUND = "LOG_NOT_FOUND"
    PREFIX_NOT_FOUND = "PREFIX_NOT_FOUND"
    LEASE_EXPIRED = "LEASE_EXPIRED"
    STALE_GENERATION = "STALE_GENERATION"
    COMPAT_MISMATCH = "COMPAT_MISMATCH"
    TOKENIZER_MISMATCH = "TOKENIZER_MISMATCH"
    BLOB_INVALID = "BLOB_INVALID"
    LOG_CORRUPT = "LOG_CORRUPT"
    CHECKSUM_MISMATCH = "CHECKSUM_MISMATCH"
    TRANSFER_TIMEOUT = "TRANSFER_TIMEOUT"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    UNSUPPORTED = "UNSUPPORTED"
    INTERNAL = "INTERNAL"


@dataclass(frozen=True, slots=True)
class ReasonRow:
    """What one reason is called on each wire, and whether the same call may be tried again."""

    grpc_code: StatusCode
    http_status: int
    openai_type: str
    openai_code: str
    retryable: bool


_INVALID = "invalid_request_error"
_SERVER = "server_error"
_RATE = "rate_limit_error"

REASONS: Final[Mapping[Reason, ReasonRow]] = MappingProxyType(
    {
        Reason.INVALID_REQUEST: ReasonRow(
            StatusCode.INVALID_ARGUMENT, 400, _INVALID, "invalid_request", False
        ),
        Reason.PROMPT_TOO_LONG: ReasonRow(
            StatusCode.INVALID_ARGUMENT, 400, _INVALID, "context_length_exceeded", False
        ),
        Reason.MODEL_NOT_FOUND: ReasonRow(
            StatusCode.NOT_FOUND, 404, _INVALID, "model_not_found", False
        ),
        Reason.NOT_FOUND: ReasonRow(StatusCode.NOT_FOUND, 404, _INVALID, "not_found", False),
        Reason.QUEUE_FULL: ReasonRow(
            StatusCode.RESOURCE_EXHAUSTED, 503, _SERVER, "queue_full", True
        ),
        Reason.PAGES_EXHAUSTED: ReasonRow(
            StatusCode.RESOURCE_EXHAUSTED, 503, _SERVER, "pages_exhausted", True
        ),
        Reason.DRAINING: ReasonRow(StatusCode.UNAVAILABLE, 503, _SERVER, "draining", True),
        Reason.WORKER_LOST: ReasonRow(StatusCode.UNAVAILABLE, 503, _SERVER, "worker_lost", True),
        Reason.NO_WORKER: ReasonRow(StatusCode.UNAVAILABLE, 503, _SERVER, "no_worker", True),
        Reason.BLOCK_NOT_FOUND: ReasonRow(
            StatusCode.NOT_FOUND, 404, _INVALID, "block_not_found", False
        ),
        Reason.LOG_NOT_FOUND: ReasonRow(
            StatusCode.NOT_FOUND, 404, _INVALID, "log_not_found", False
        ),
        Reason.PREFIX_NOT_FOUND: ReasonRow(
            StatusCode.NOT_FOUND, 404, _INVALID, "prefix_not_found", False
        ),
        Reason.LEASE_EXPIRED: ReasonRow(StatusCode.ABORTED, 409, _INVALID, "lease_expired", True),
        Reason.STALE_GENERATION: ReasonRow(
            StatusCode.FAILED_PRECONDITION, 409, _INVALID, "stale_generation", False
        ),
        Reason.COMPAT_MISMATCH: ReasonRow(
            StatusCode.FAILED_PRECONDITION, 409, _INVALID, "compat_mismatch", False
        ),
        Reason.TOKENIZER_MISMATCH: ReasonRow(
            StatusCode.FAILED_PRECONDITION, 409, _INVALID, "tokenizer_mismatch", False
        ),
        Reason.BLOB_INVALID: ReasonRow(
            StatusCode.INVALID_ARGUMENT, 400, _INVALID, "blob_invalid", False
        ),
        Reason.LOG_CORRUPT: ReasonRow(StatusCode.DATA_LOSS, 500, _SERVER, "log_corrupt", False),
        Reason.CHECKSUM_MISMATCH: ReasonRow(
            StatusCode.DATA_LOSS, 500, _SERVER, "checksum_mismatch", False
        ),
        Reason.TRANSFER_TIMEOUT: ReasonRow(
            StatusCode.UNAVAILABLE, 503, _SERVER, "transfer_timeout", True
        ),
        Reason.QUOTA_EXCEEDED: ReasonRow(
            StatusCode.RESOURCE_EXHAUSTED, 429, _RATE, "rate_limit_exceeded", True
        ),
        Reason.UNAUTHENTICATED: ReasonRow(
            StatusCode.UNAUTHENTICATED, 401, "authentication_error", "invalid_api_key", False
        ),
        Reason.PERMISSION_DENIED: ReasonRow(
            StatusCode.PERMISSION_DENIED, 403, "permission_error", "permission_denied", False
        ),
        Reason.DEADLINE_EXCEEDED: ReasonRow(
            StatusCode.DEADLINE_EXCEEDED, 504, _SERVER, "deadline_exceeded", True
        ),
        # ABORTED, not CANCELLED: gRPC's CANCELLED belongs to the caller. A server that sends it is
        # indistinguishable from the client's own cancel and from a dropped burst.
        Reason.CANCELLED: ReasonRow(StatusCode.ABORTED, 499, _INVALID, "cancelled", False),
        Reason.ALREADY_EXISTS: ReasonRow(
            StatusCode.ALREADY_EXISTS, 409, _INVALID, "already_exists", False
        ),
        Reason.UNSUPPORTED: ReasonRow(
            StatusCode.UNIMPLEMENTED, 400, _INVALID, "unsupported", False
        ),
        Reason.INTERNAL: ReasonRow(StatusCode.INTERNAL, 500, _SERVER, "internal_error", False),
    }
)
"""One row for each `Reason`."""


class ServiceError(Exception):
    """A refusal or failure that a caller is told about, with its reason and its remedy.

    `message` names the field and the remedy and carries no prompt text, token ids or keys.
    `field` is the path of the offending field; `metadata` travels in ErrorInfo (text to text);
    `retry_after_s` says when the same call is worth trying again.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        field: str | None = None,
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        assert retry_after_s is None or retry_after_s >= 0.0, retry_after_s
        super().__init__(message)
        self.reason = Reason(reason)
        self.message = message
        self.field = field
        self.metadata: Mapping[str, str] = MappingProxyType(dict(metadata or {}))
        self.retry_after_s = retry_after_s

    @classmethod
    def internal(cls, error_id: str) -> ServiceError:
        """The opaque answer to a bug; the traceback is in the server's log under `error_id`."""
        return cls(
            Reason.INTERNAL,
            f"internal error; the server's log has the details under error id {error_id}",
            metadata={"error_id": error_id},
        )

    @property
    def row(self) -> ReasonRow:
        """This reason's row of the table."""
        return REASONS[self.reason]

    def __str__(self) -> str:
        where = f" (field {self.field})" if self.field is not None else ""
        return f"{self.reason}: {self.message}{where}"

    def __repr__(self) -> str:
        return f"ServiceError({self.reason.value}, {self.message!r}, field={self.field!r})"


class StartupError(Exception):
    """A process cannot start: what is wrong, and what to do about it.

    Raised before anything is served, printed by `baton.lifecycle.run_service`; `exit_code` 2 is for
    faults of configuration, 1 for the rest.
    """

    def __init__(self, message: str, *, hint: str | None = None, exit_code: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message} ({self.hint})"
