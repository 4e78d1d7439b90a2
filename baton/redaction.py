"""What never leaves a process in a log line, a span or an error.

Owns the list of forbidden names and the function that applies it. Pure. Names are matched whole and
without case, so that `prompt_tokens` (a count) passes and `prompt` (a text) does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

REDACTED: Final = "[redacted]"
DEPTH_MAX: Final = 4

FORBIDDEN_NAMES: Final = frozenset(
    {
        "prompt",
        "prompts",
        "text",
        "content",
        "messages",
        "completion",
        "token_ids",
        "prompt_token_ids",
        "logprobs",
        "authorization",
        "cookie",
        "api_key",
        "capability",
        "capability_key",
        "cluster_key",
        "scope_secret",
        "secret",
        "password",
        "ticket",
        "payload",
    }
)
"""Names whose values carry what tenants wrote or what opens a door."""

_COUNTS: Final = frozenset({"tokens"})
"""Names that are fine as a number and forbidden as a list."""


def redact(fields: Mapping[str, Any], *, depth: int = 0) -> dict[str, Any]:
    """A copy of `fields` with every forbidden value replaced, also inside nested mappings."""
    return {name: _value(name, value, depth) for name, value in fields.items()}


def _value(name: str, value: Any, depth: int) -> Any:
    lowered = str(name).lower().replace("-", "_")
    if lowered in FORBIDDEN_NAMES:
        return REDACTED
    if lowered in _COUNTS and not isinstance(value, int | float | None):
        return REDACTED
    if isinstance(value, bytes | bytearray | memoryview):
        return f"[{len(value)} bytes]"
    if isinstance(value, Mapping):
        return redact(value, depth=depth + 1) if depth < DEPTH_MAX else REDACTED
    if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        return [_value("", item, depth + 1) for item in value] if depth < DEPTH_MAX else REDACTED
    return value
