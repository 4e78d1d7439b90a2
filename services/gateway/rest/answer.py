"""What chat and completion answers share: ids, usage, the `baton` object, what headers say.

Owns the bookkeeping of several sequences as one OpenAI response. Pure; the two shapes stand in
`chat_answer` and `completion_answer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton.ids import log_id_text
from services.gateway.events import (
    Admitted,
    Completed,
    Event,
    FirstToken,
    TokenDelta,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFrame:
    """What every chunk of an answer repeats, and how the answer is shaped."""

    answer_id: str
    model: str
    created_wall_s: int
    samples: int
    has_logprobs: bool
    has_top_logprobs: bool
    has_token_ids: bool
    prompt_token_ids: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class _Counts:
    prompt: int = 0
    cached: int = 0
    output: int = 0


class UsageTally:
    """Token counts over all sequences; a prompt counts once however many samples it has."""

    def __init__(self, frame: AnswerFrame) -> None:
        self._samples = frame.samples
        self._prompts = [_Counts(prompt=len(ids)) for ids in frame.prompt_token_ids]

    def note(self, index: int, event: Event) -> None:
        """Take an event of the index-th sequence into account."""
        counts = self._prompts[index // self._samples]
        is_first_sample = index % self._samples == 0
        if isinstance(event, TokenDelta):
            counts.output += 1
        elif isinstance(event, FirstToken) and is_first_sample:
            counts.cached = event.cached_tokens
        elif isinstance(event, Completed) and is_first_sample:
            counts.cached = event.usage.cached_tokens

    def body(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        prompt = sum(one.prompt for one in self._prompts)
        output = sum(one.output for one in self._prompts)
        cached = sum(one.cached for one in self._prompts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def baton_object(completed: Completed) -> dict[str, Any]:
    """What Baton tells beyond OpenAI's shape, per answer."""
    return {
        "log_id": log_id_text(completed.log_id),
        "position": completed.position,
        "mode": completed.mode.value,
        "kv_source": completed.kv_source.value,
        "exactness": completed.exactness.value,
        "exactness_reason": completed.exactness_reason,
        "prefill_worker": completed.prefill_worker_id,
        "decode_worker": completed.decode_worker_id,
        "cached_tokens": completed.usage.cached_tokens,
        "prefix_id": completed.prefix_id,
        "resumed": completed.resumed,
        "time_to_first_token_s": round(completed.time_to_first_token_s, 6),
        "elapsed_s": round(completed.elapsed_s, 6),
        "stage_seconds": {
            name: round(seconds, 6) for name, seconds in completed.stage_seconds.items()
        },
        "brought": completed.brought,
        "hidden_transfer_share": (
            None
            if completed.hidden_transfer_share is None
            else round(completed.hidden_transfer_share, 4)
        ),
        **_session(completed),
    }


def _session(completed: Completed) -> dict[str, Any]:
    mark = completed.session
    if mark is None:
        return {}
    told = {"id": mark.session_id, "generation": mark.generation, "refusal": mark.refusal}
    return {"session": told}


def first_token_headers(first: FirstToken) -> dict[str, str]:
    """What is known before the first byte of the body."""
    return {
        "x-serving-mode": first.mode.value,
        "x-baton-exactness": first.exactness.value,
        "x-baton-kv-source": first.kv_source.value,
        "x-baton-cached-tokens": str(first.cached_tokens),
    }


def answer_headers(completed: Completed) -> dict[str, str]:
    """The same once the answer is complete: its KV may have been computed again on the way."""
    return {
        "x-serving-mode": completed.mode.value,
        "x-baton-exactness": completed.exactness.value,
        "x-baton-kv-source": completed.kv_source.value,
        "x-baton-cached-tokens": str(completed.usage.cached_tokens),
    }


@dataclass(slots=True)
class Choice:
    """One sequence being collected for a whole answer."""

    texts: list[str] = field(default_factory=list)
    deltas: list[TokenDelta] = field(default_factory=list)
    completed: Completed | None = None

    def note(self, event: Event) -> None:
        """Take an event of this sequence."""
        if isinstance(event, TokenDelta):
            self.texts.append(event.text)
            self.deltas.append(event)
        elif isinstance(event, Completed):
            self.completed = event
        else:
            assert isinstance(event, Admitted | FirstToken)

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.texts)

    @property
    def token_ids(self) -> list[int]:
        """The tokens, end token included."""
        return [delta.token_id for delta in self.deltas]

    @property
    def finish(self) -> str:
        """OpenAI's finish reason."""
        assert self.completed is not None
        return self.completed.finish.value


class AnswerShape(Protocol):
    """How events become an OpenAI response: chat or completion."""

    def chunks(self, index: int, event: Event) -> list[dict[str, Any]]:
        """The stream chunks of one event."""
        ...

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The chunk without choices that closes a stream."""
        ...

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        """The response that is not streamed."""
        ...
