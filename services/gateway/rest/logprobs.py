"""Log probabilities in the two shapes of the OpenAI reference. Pure.

JSON has no infinities: a probability of zero is written as the reference's -9999.0.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import Any, Final

from baton.text.stream import TokenBytes
from services.gateway.events import Logprob

IMPOSSIBLE: Final = -9999.0
_Utf8Decoder: Final = codecs.getincrementaldecoder("utf-8")


def number(logprob: float) -> float:
    """A log probability that JSON can carry."""
    return logprob if math.isfinite(logprob) else IMPOSSIBLE


def token_text(token_bytes: bytes) -> str:
    """One token alone as text; a part of a character shows as U+FFFD."""
    return token_bytes.decode("utf-8", "replace")


def chat_entry(logprob: Logprob) -> dict[str, Any]:
    """An entry of `choices[].logprobs.content`."""
    return {**_entry(logprob), "top_logprobs": [_entry(one) for one in logprob.top]}


def _entry(logprob: Logprob) -> dict[str, Any]:
    return {
        "token": token_text(logprob.token_bytes),
        "logprob": number(logprob.logprob),
        "bytes": list(logprob.token_bytes),
    }


def chat_logprobs(entries: Sequence[Logprob]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat answer."""
    return {"content": [chat_entry(one) for one in entries], "refusal": None}


class CompletionLogprobs:
    """`choices[].logprobs` of completions: parallel lists, with offsets into the whole text.

    An offset counts the characters of the text before the token, as the text stream decodes it: a
    token that ends inside a character adds none for it, the one that completes it adds one.
    """

    def __init__(self, has_top: bool, tokenizer: TokenBytes) -> None:
        self._has_top = has_top
        self._tokenizer = tokenizer
        self._utf8 = _Utf8Decoder("replace")
        self._offset = 0

    def echo(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """The prompt's tokens; their probabilities are null: they were not computed."""
        pieces = [self._tokenizer.decode_bytes(token_id) for token_id in token_ids]
        nothing: list[None] = [None] * len(pieces)
        lists = {
            "tokens": [token_text(piece) for piece in pieces],
            "token_logprobs": nothing,
            "top_logprobs": list(nothing) if self._has_top else None,
            "text_offset": [self._advance(piece) for piece in pieces],
        }
        # The answer's text begins afresh behind the prompt, whatever bytes that ends with.
        self._offset += len(self._utf8.decode(b"", final=True))
        return lists

    def of(self, entries: Sequence[Logprob]) -> dict[str, Any]:
        """The next tokens."""
        return {
            "tokens": [token_text(one.token_bytes) for one in entries],
            "token_logprobs": [number(one.logprob) for one in entries],
            "top_logprobs": [_top(one) for one in entries] if self._has_top else None,
            "text_offset": [self._advance(self._shown(one)) for one in entries],
        }

    def _shown(self, one: Logprob) -> bytes:
        """What the token adds to the answer's text: control tokens are left out there."""
        return b"" if self._tokenizer.is_special(one.token_id) else one.token_bytes

    def _advance(self, piece: bytes) -> int:
        offset = self._offset
        self._offset += len(self._utf8.decode(piece))
        return offset


def _top(logprob: Logprob) -> dict[str, float]:
    """The alternatives by text; of two that read alike the likelier one, which comes first."""
    found: dict[str, float] = {}
    for one in logprob.top:
        found.setdefault(token_text(one.token_bytes), number(one.logprob))
    return found
