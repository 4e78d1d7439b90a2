"""Reading a streamed chat answer.

Owns: server-sent events to text pieces, and what makes a stream complete. Never does I/O.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from baton.cli.console import CommandFailed
from baton.cli.gateway_http import error_text

DONE = "[DONE]"


@dataclass(slots=True, kw_only=True)
class Answer:
    """What has been read of one answer so far."""

    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None

    @property
    def text(self) -> str:
        """The answer's text so far."""
        return "".join(self.pieces)


def event_data(lines: Iterable[str]) -> Iterator[str]:
    """The data of each server-sent event; comments and other fields are skipped."""
    data: list[str] = []
    for line in lines:
        if line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))
        elif not line and data:
            yield "\n".join(data)
            data = []
    if data:
        yield "\n".join(data)


def read_answer(lines: Iterable[str], answer: Answer) -> Iterator[str]:
    """Yield text pieces as they come and fill `answer`.

    Raises `CommandFailed` for an error event, for what is not JSON, and for a stream that ends
    without saying why: such an answer may be cut.
    """
    for data in event_data(lines):
        if data == DONE:
            break
        piece = _take(_parsed(data), answer)
        if piece:
            yield piece
    if answer.finish_reason is None:
        raise CommandFailed("the answer broke off: the stream ended without a finish_reason")


def _parsed(data: str) -> dict[str, object]:
    try:
        chunk = json.loads(data)
    except ValueError as problem:
        raise CommandFailed("the gateway streamed something that is not JSON") from problem
    if not isinstance(chunk, dict):
        raise CommandFailed("the gateway streamed something that is not a JSON object")
    if "error" in chunk:
        raise CommandFailed(error_text(chunk["error"]))
    return chunk


def _take(chunk: dict[str, object], answer: Answer) -> str:
    usage = chunk.get("usage")
    if isinstance(usage, dict):
        answer.prompt_tokens = usage.get("prompt_tokens")
        answer.output_tokens = usage.get("completion_tokens")
        details = usage.get("prompt_tokens_details") or {}
        answer.cached_tokens = details.get("cached_tokens")
    choices = chunk.get("choices")
    if not isinstance(choices, list) or not choices:
        return ""
    choice = choices[0]
    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    piece = str((choice.get("delta") or {}).get("content") or "")
    if piece:
        answer.pieces.append(piece)
    return piece
