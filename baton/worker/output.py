"""The output side of one sequence: choose a token, turn it into text, say when the answer ends.

Owns the order: sample from logits and history, feed the text stream, apply end rules. Everything is
a pure function of parameters, prompt and output ids, so that a worker that takes a sequence over
rebuilds the same state by replaying the logged tokens. Never does I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from baton.arena.replay import LoggedLogprob, LogView
from baton.engine.finish import EndRule, TokenEnd
from baton.engine.sampling import SampledToken, sample
from baton.sampling_parameters import SamplingParameters
from baton.text.stream import TextOptions, TextStream, TokenBytes

_FINISH_STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputToken:
    """One token of an answer: its output index, the text it made safe to send, how it ended."""

    index: int
    sampled: SampledToken
    text: str
    finish_reason: str | None = None
    stop_string: str | None = None


class OutputState:
    """One sequence's output. `prompt_ids` never reach the text stream."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParameters,
        rule: EndRule,
        tokenizer: TokenBytes,
    ) -> None:
        self._prompt_ids = tuple(prompt_ids)
        self._output_ids: list[int] = []
        self._sampling = sampling
        self._rule = rule
        self._stream = TextStream(
            tokenizer,
            TextOptions(
                stop_strings=sampling.stop_strings,
                include_stop_string=sampling.include_stop_string,
                min_tokens=sampling.min_tokens,
            ),
        )
        self._finish_reason: str | None = None

    @property
    def output_ids(self) -> tuple[int, ...]:
        """The output's token ids."""
        return tuple(self._output_ids)

    @property
    def output_tokens(self) -> int:
        """How many tokens were produced."""
        return len(self._output_ids)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self._prompt_ids)

    @property
    def finish_reason(self) -> str | None:
        """`stop` or `length` once the answer has ended."""
        return self._finish_reason

    def choose(self, logits: NDArray[np.float32]) -> OutputToken:
        """Sample the next token from `logits` (f32 [vocabulary]) and take it."""
        sampled = sample(
            logits,
            self._sampling,
            self._prompt_ids,
            self._output_ids,
            end_token_ids=self._rule.end_token_ids,
        )
        return self.take(sampled)

    def take(self, sampled: SampledToken) -> OutputToken:
        """Take a token that was chosen, here or by an earlier writer."""
        assert self._finish_reason is None, "a token after the end"
        self._output_ids.append(sampled.token_id)
        end = self._rule.end_after(
            sampled.token_id,
            self._sampling,
            output_tokens=len(self._output_ids),
            total_tokens=len(self._prompt_ids) + len(self._output_ids),
        )
        text, stop_string = self._text_of(sampled.token_id, end)
        if stop_string is not None:
            self._finish_reason = _FINISH_STOP
        elif end is not None:
            self._finish_reason = end.openai_finish_reason
        return OutputToken(
            index=len(self._output_ids) - 1,
            sampled=sampled,
            text=text,
            finish_reason=self._finish_reason,
            stop_string=stop_string,
        )

    def end_as_logged(self, last: OutputToken, finish_reason: str) -> OutputToken:
        """End after `last` because the log says so, flushing the text that was held back."""
        assert self._finish_reason is None, "ended twice"
        self._finish_reason = finish_reason
        rest = self._stream.finish()
        return replace(
            last,
            text=last.text + rest.text,
            finish_reason=finish_reason,
            stop_string=rest.stop_string,
        )

    def _text_of(self, token_id: int, end: TokenEnd | None) -> tuple[str, str | None]:
        """Text made safe by the token; a token that ends the answer by its id is not text."""
        text = ""
        if end not in (TokenEnd.END_TOKEN, TokenEnd.STOP_TOKEN):
            delta = self._stream.feed(token_id)
            text = delta.text
            if delta.stopped:
                return text, delta.stop_string
        if end is not None:
            rest = self._stream.finish()
            return text + rest.text, rest.stop_string
        return text, None


def replay_output(
    view: LogView, rule: EndRule, tokenizer: TokenBytes
) -> tuple[OutputState, tuple[OutputToken, ...]]:
    """The state after a log's output tokens, and what each of them said when it was sent.

    Tokens are taken as logged. A log that ended on a worker with a shorter context keeps its end.
    """
    head = view.head
    state = OutputState(view.prompt_ids, head.sampling, rule, tokenizer)
    logprobs: Sequence[LoggedLogprob | None] = head.logprobs
    if len(logprobs) != len(view.output_ids):
        logprobs = [None] * len(view.output_ids)
    replayed = []
    for token_id, logged in zip(view.output_ids, logprobs, strict=True):
        if state.finish_reason is not None:
            break
        replayed.append(state.take(_sampled(token_id, logged)))
    if head.finish_reason is not None and state.finish_reason is None and replayed:
        replayed[-1] = state.end_as_logged(replayed[-1], head.finish_reason)
    return state, tuple(replayed)


def _sampled(token_id: int, logged: LoggedLogprob | None) -> SampledToken:
    if logged is None:
        return SampledToken(token_id=token_id)
    return SampledToken(token_id=token_id, logprob=logged.logprob, top_logprobs=logged.top)
