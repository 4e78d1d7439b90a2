"""When a sequence ends by its tokens: end token, stop token, length, context.

Owns the token side of the stop rules; stop strings need text and stand in `baton.text`. Pure:
the answer depends on token counts, ids and parameters alone, so every worker gives the same one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from baton.sampling_parameters import SamplingParameters


class TokenEnd(StrEnum):
    """Why a sequence ended, as far as token ids and counts can tell."""

    END_TOKEN = "end_token"
    STOP_TOKEN = "stop_token"
    MAX_TOKENS = "max_tokens"
    CONTEXT_FULL = "context_full"

    @property
    def openai_finish_reason(self) -> str:
        """OpenAI's word: `stop` for a token that ends, `length` for a limit."""
        return "stop" if self in (TokenEnd.END_TOKEN, TokenEnd.STOP_TOKEN) else "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRule:
    """What ends the sequences of one model on one worker.

    `end_token_ids` are the model's own end tokens; `max_context` is the most tokens, prompt and
    output together, that a sequence may have.
    """

    end_token_ids: frozenset[int]
    max_context: int

    def end_after(
        self,
        token_id: int,
        parameters: SamplingParameters,
        *,
        output_tokens: int,
        total_tokens: int,
    ) -> TokenEnd | None:
        """The reason to end after `token_id`, or None to go on.

        `output_tokens` and `total_tokens` both count this token already.
        """
        assert 1 <= output_tokens <= total_tokens
        if token_id in parameters.stop_token_ids:
            return TokenEnd.STOP_TOKEN
        if token_id in self.end_token_ids and not parameters.ignore_eos:
            return TokenEnd.END_TOKEN
        if parameters.max_tokens is not None and output_tokens >= parameters.max_tokens:
            return TokenEnd.MAX_TOKENS
        if total_tokens >= self.max_context:
            return TokenEnd.CONTEXT_FULL
        return None


def is_end_masked(parameters: SamplingParameters, output_tokens_before: int) -> bool:
    """True when `min_tokens` still forbids every ending token at the next position."""
    return output_tokens_before < parameters.min_tokens


def ending_token_ids(
    parameters: SamplingParameters, end_token_ids: Collection[int]
) -> tuple[int, ...]:
    """The sorted ids that would end the sequence: what `min_tokens` masks."""
    own: Collection[int] = () if parameters.ignore_eos else end_token_ids
    return tuple(sorted({*own, *parameters.stop_token_ids}))
