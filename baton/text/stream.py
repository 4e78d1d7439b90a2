"""From token ids to text that is safe to send: the incremental detokenizer with stop strings.

Owns three rules. (1) A delta never splits a character: bytes wait until they form one, and bytes
that never can become U+FFFD, exactly as decoding the whole would make them. (2) Text that could
still become a stop string is held back. (3) Deltas are disjoint slices of one string: joined, they
are the decoded text, cut at the stop string.

Invariant: the state is a pure function of the options and the tokens fed, so a worker that takes
over rebuilds it with `TextStream.replay`. A stop string ends where its last character completes,
whatever tokens carry it; of several that end there the longest counts. No I/O, no clock.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from baton.sampling_parameters import SamplingParameters
from baton.text.stop_strings import StopMatcher

_Utf8Decoder: Final = codecs.getincrementaldecoder("utf-8")


class TokenBytes(Protocol):
    """What the stream needs of a tokenizer."""

    def decode_bytes(self, token_id: int) -> bytes:
        """The raw bytes of one token; empty for an id without text."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether this is a control token, left out when `skip_special` is set."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How a stream turns tokens into text.

    `min_tokens`: stop strings are looked for only in the text of later tokens.
    """

    stop_strings: tuple[str, ...] = ()
    include_stop_string: bool = False
    skip_special: bool = True
    min_tokens: int = 0

    @classmethod
    def from_parameters(
        cls, parameters: SamplingParameters, *, skip_special: bool = True
    ) -> TextOptions:
        """The options that a request's validated sampling parameters ask for."""
        return cls(
            stop_strings=parameters.stop_strings,
            include_stop_string=parameters.include_stop_string,
            skip_special=skip_special,
            min_tokens=parameters.min_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """The text that became safe to send; may be empty. `stopped`: `stop_string` was matched."""

    text: str
    stopped: bool = False
    stop_string: str | None = None


_NOTHING: Final = TextDelta(text="")


class TextStream:
    """One sequence's text, fed one token at a time. Amortised constant time per token."""

    def __init__(self, tokenizer: TokenBytes, options: TextOptions | None = None) -> None:
        self._tokenizer = tokenizer
        self._options = options if options is not None else TextOptions()
        self._matcher = StopMatcher(self._options.stop_strings)
        self._utf8 = _Utf8Decoder("replace")
        self._state = StopMatcher.ROOT
        self._held = ""
        self._tokens_fed = 0
        self._chars_sent = 0
        self._stop_string: str | None = None
        self._is_finished = False

    @classmethod
    def replay(
        cls, tokenizer: TokenBytes, options: TextOptions, token_ids: Iterable[int]
    ) -> TextStream:
        """The stream as it stood after `token_ids` were fed one by one; their text was sent."""
        stream = cls(tokenizer, options)
        for token_id in token_ids:
            stream.feed(token_id)
        return stream

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was matched: nothing may be fed any more."""
        return self._stop_string is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._stop_string

    @property
    def chars_sent(self) -> int:
        """How many characters the deltas so far hold."""
        return self._chars_sent

    @property
    def tokens_fed(self) -> int:
        """How many tokens were fed."""
        return self._tokens_fed

    def feed(self, token_id: int) -> TextDelta:
        """Take one token and return the text that is now safe to send."""
        assert not self.is_stopped, "fed after a stop string"
        assert not self._is_finished, "fed after finish"
        self._tokens_fed += 1
        if self._options.skip_special and self._tokenizer.is_special(token_id):
            return _NOTHING
        return self._advance(self._utf8.decode(self._tokenizer.decode_bytes(token_id)))

    def finish(self) -> TextDelta:
        """End the text: flush what was held, with U+FFFD for bytes of an unfinished character."""
        assert not self._is_finished, "finished twice"
        self._is_finished = True
        if self.is_stopped:
            return _NOTHING
        delta = self._advance(self._utf8.decode(b"", final=True))
        if delta.stopped:
            return delta
        rest, self._held = self._held, ""
        self._chars_sent += len(rest)
        return TextDelta(text=delta.text + rest)

    def _advance(self, piece: str) -> TextDelta:
        if not self._options.stop_strings or self._tokens_fed <= self._options.min_tokens:
            self._chars_sent += len(piece)
            return TextDelta(text=piece) if piece else _NOTHING
        state, matcher = self._state, self._matcher
        for index, char in enumerate(piece):
            state = matcher.step(state, char)
            stop = matcher.found(state)
            if stop is not None:
                return self._stop(stop, self._held + piece[: index + 1])
        self._state = state
        text = self._held + piece
        safe = len(text) - matcher.depth(state)
        self._held = text[safe:]
        self._chars_sent += safe
        return TextDelta(text=text[:safe]) if safe else _NOTHING

    def _stop(self, stop: str, text: str) -> TextDelta:
        self._stop_string = stop
        self._held = ""
        kept = text if self._options.include_stop_string else text[: len(text) - len(stop)]
        self._chars_sent += len(kept)
        return TextDelta(text=kept, stopped=True, stop_string=stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenText:
    """One token as `logprobs` shows it.

    `text` is its own bytes decoded alone (U+FFFD where they split a character), `utf8` the raw
    bytes, `offset` the number of characters of the whole text that were complete before it.
    """

    token_id: int
    text: str
    utf8: bytes
    offset: int


def token_texts(
    tokenizer: TokenBytes, token_ids: Sequence[int], *, first_offset: int = 0
) -> tuple[TokenText, ...]:
    """Align tokens with their text, for `logprobs.content[].bytes` and `text_offset`.

    `first_offset` is the offset of the first token. Special tokens are spelled out: a caller that
    hides them leaves out their ids.
    """
    utf8 = _Utf8Decoder("replace")
    offset = first_offset
    rows: list[TokenText] = []
    for token_id in token_ids:
        raw = tokenizer.decode_bytes(token_id)
        text = raw.decode("utf-8", "replace")
        rows.append(TokenText(token_id=token_id, text=text, utf8=raw, offset=offset))
        offset += len(utf8.decode(raw))
    return tuple(rows)
