"""Errors as OpenAI's clients read them: status, body, and the headers that steer retries.

Owns the body's shape and the few refusals that are HTTP's own (404, 405, 413, 415). The meaning of
every `Reason` stands in `baton.errors`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from baton.errors import Reason, ServiceError
from services.gateway.limits import RateState

DEFAULT_RETRY_AFTER_S: Final = 1.0
_RETRIED_BY_CLIENTS: Final = frozenset({408, 409, 429})


class HttpRefusal(Exception):
    """A refusal that only HTTP knows."""

    def __init__(
        self, status: int, message: str, code: str, *, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.headers = dict(headers or {})


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorAnswer:
    """A whole error response."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def content(self) -> bytes:
        """The body's bytes."""
        return json.dumps(self.body, ensure_ascii=False, allow_nan=False).encode()


def error_body(message: str, kind: str, param: str | None, code: str) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`; the code is always a string."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def body_of(error: ServiceError) -> dict[str, Any]:
    """The error object of a failed request, also for the middle of a stream."""
    row = error.row
    return error_body(error.message, row.openai_type, error.field, row.openai_code)


def answer_of(error: ServiceError) -> ErrorAnswer:
    """The response of a request that failed before its first byte."""
    row = error.row
    headers: dict[str, str] = {}
    if row.retryable and row.http_status in (429, 503):
        after_s = DEFAULT_RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
        headers["retry-after"] = str(max(1, math.ceil(after_s)))
        headers["retry-after-ms"] = str(max(1, math.ceil(after_s * 1000)))
    if row.http_status in _RETRIED_BY_CLIENTS or row.http_status >= 500:
        headers["x-should-retry"] = "true" if row.retryable else "false"
    headers |= _rate_headers_of(error)
    if error.reason is Reason.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    return ErrorAnswer(status=row.http_status, body=body_of(error), headers=headers)


def rate_headers(state: RateState | None) -> dict[str, str]:
    """What a tenant's limit leaves it, in the headers that OpenAI's clients read; none without."""
    if state is None:
        return {}
    return {
        "x-ratelimit-limit-requests": str(state.limit),
        "x-ratelimit-remaining-requests": str(state.remaining),
        "x-ratelimit-reset-requests": f"{math.ceil(state.reset_s)}s",
    }


def _rate_headers_of(error: ServiceError) -> dict[str, str]:
    """The same of a request that was one too many."""
    limit = error.metadata.get("requests_per_minute", "")
    if error.reason is not Reason.QUOTA_EXCEEDED or not limit.isdigit():
        return {}
    after_s = error.retry_after_s or DEFAULT_RETRY_AFTER_S
    return rate_headers(RateState(limit=int(limit), remaining=0, reset_s=after_s))


def answer_of_refusal(refusal: HttpRefusal) -> ErrorAnswer:
    """The response of HTTP's own refusals."""
    body = error_body(refusal.message, "invalid_request_error", None, refusal.code)
    return ErrorAnswer(status=refusal.status, body=body, headers=refusal.headers)
