"""Logging: structured lines, one canonical line a request, never what tenants wrote.

Owns the configuration of structlog and of the standard library's logging, which ends in the same
lines. Console form on a terminal, JSON elsewhere. Every line carries the request and trace ids of
the running call.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final, TextIO

import structlog

from baton.redaction import redact
from baton.tracing import current_request_id, current_trace


class LogFormat(StrEnum):
    """How lines look: `auto` is `console` on a terminal and `json` elsewhere."""

    AUTO = "auto"
    JSON = "json"
    CONSOLE = "console"


LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")

_QUIET: Final = ("httpx", "httpcore", "urllib3", "asyncio", "uvicorn.access")
"""Libraries that talk a lot at INFO: heard from WARNING on."""


def configure_logging(
    service: str,
    *,
    level: str = "INFO",
    log_format: LogFormat = LogFormat.AUTO,
    stream: TextIO | None = None,
) -> None:
    """Sets up this process's logging; call once, first thing. `level` is one of `LEVELS`."""
    assert level in LEVELS, level
    out = stream or sys.stderr
    is_console = log_format is LogFormat.CONSOLE or (log_format is LogFormat.AUTO and out.isatty())
    before = _processors(service)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *before,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=before,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_renderers(is_console=is_console),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def _processors(service: str) -> list[Any]:
    """What every line passes, ours and the libraries'."""

    def add_service(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> Any:
        event["service"] = service
        return event

    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_service,
        _add_ids,
        _redact,
    ]


def _renderers(*, is_console: bool) -> list[Any]:
    """Tracebacks are rendered without local variables: those hold prompts and keys."""
    if is_console:
        plain = structlog.dev.plain_traceback
        return [structlog.dev.ConsoleRenderer(exception_formatter=plain)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]


def _add_ids(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> Any:
    """The ids of the running request, where the line does not name its own."""
    request_id, trace = current_request_id(), current_trace()
    if request_id is not None:
        event.setdefault("request_id", request_id)
    if trace is not None:
        event.setdefault("trace_id", trace.trace_id)
    return event


def _redact(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> Any:
    """Replaces forbidden values; the standard library's own record objects stay for the
    formatter.
    """
    kept = {name: event.pop(name) for name in tuple(event) if name in _STRUCTURAL}
    return {**redact(event), **kept}


_STRUCTURAL: Final = frozenset({"exc_info", "_record", "_from_structlog", "stack_info"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalLine:
    """What one finished request leaves in the log. Ids, counts and times only; None where unknown.

    `prefill` and `decode` are the workers; `transfer_bytes` were handed over by `transport`, by
    reference where that is shm.
    """

    request_id: str
    tenant: str
    model: str
    route: str
    outcome: str
    client_request_id: str | None = None
    error_code: str | None = None
    log_id: str | None = None
    answers: int | None = None
    prefill: str | None = None
    decode: str | None = None
    serving_mode: str | None = None
    routing: str | None = None
    is_fallback: bool | None = None
    kv_source: str | None = None
    exactness: str | None = None
    finish_reason: str | None = None
    prefix_id: str | None = None
    resumed: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    transfer_ms: float | None = None
    transfer_bytes: int | None = None
    transport: str | None = None


def log_canonical_line(line: CanonicalLine) -> None:
    """Writes the request's one line, without the fields that are None."""
    fields = {name: value for name, value in asdict(line).items() if value is not None}
    structlog.stdlib.get_logger("baton.request").info("request_finished", **fields)
