"""Server-sent events as OpenAI's clients parse them. Pure: values in, bytes out."""

from __future__ import annotations

from typing import Final

from services.gateway.rest.exchange import encode_json

DONE: Final = b"data: [DONE]\n\n"


def event(value: object) -> bytes:
    """`data: <JSON>` and a blank line; JSON escapes line ends, so one line is enough."""
    return b"data: " + encode_json(value) + b"\n\n"
