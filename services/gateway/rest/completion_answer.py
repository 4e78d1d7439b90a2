"""Completion answers: `text_completion`, whole and streamed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.text.stream import TokenBytes
from services.gateway.events import Completed, Event, FirstToken, TokenDelta
from services.gateway.rest.answer import AnswerFrame, Choice, baton_object
from services.gateway.rest.logprobs import CompletionLogprobs


class CompletionShape:
    """Events of a completion request as OpenAI's objects.

    `echoes` holds the prompts' texts when they are to be repeated, else None; `tokenizer` gives a
    token's bytes.
    """

    def __init__(
        self,
        frame: AnswerFrame,
        echoes: Sequence[str] | None,
        tokenizer: TokenBytes,
    ) -> None:
        self._frame = frame
        self._echoes = echoes
        self._tokenizer = tokenizer
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def _head(self) -> dict[str, Any]:
        frame = self._frame
        return {
            "id": frame.answer_id,
            "object": "text_completion",
            "created": frame.created_wall_s,
            "model": frame.model,
        }

    def chunks(self, index: int, event: Event) -> list[dict[str, Any]]:
        """The echo if asked for, then text token by token, then the finish reason."""
        if isinstance(event, FirstToken):
            return self._echo_chunks(index)
        if isinstance(event, TokenDelta):
            return self._token(index, event)
        if isinstance(event, Completed):
            chunk = self._chunk(index, "", None, event.finish.value)
            return [{**chunk, "baton": baton_object(event)}]
        return []

    def _echo_chunks(self, index: int) -> list[dict[str, Any]]:
        if self._echoes is None:
            return []
        logprobs = self._echo_logprobs(index) if self._frame.has_logprobs else None
        return [self._chunk(index, self._echoes[index // self._frame.samples], logprobs, None)]

    def _echo_logprobs(self, index: int) -> dict[str, Any]:
        ids = self._frame.prompt_token_ids[index // self._frame.samples]
        return self._lists(index).echo(ids)

    def _lists(self, index: int) -> CompletionLogprobs:
        has_top = self._frame.has_top_logprobs
        return self._logprobs.setdefault(index, CompletionLogprobs(has_top, self._tokenizer))

    def _token(self, index: int, delta: TokenDelta) -> list[dict[str, Any]]:
        has_logprob = self._frame.has_logprobs and delta.logprob is not None
        if not (delta.text or has_logprob or self._frame.has_token_ids):
            return []
        logprobs = None
        if has_logprob and delta.logprob is not None:
            logprobs = self._lists(index).of([delta.logprob])
        chunk = self._chunk(index, delta.text, logprobs, None)
        if self._frame.has_token_ids:
            chunk["choices"][0]["token_ids"] = [delta.token_id]
        return [chunk]

    def _chunk(
        self, index: int, text: str, logprobs: dict[str, Any] | None, finish: str | None
    ) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return {**self._head(), "choices": [choice]}

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The chunk with `choices: []`."""
        return {**self._head(), "choices": [], "usage": usage}

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        """The whole `text_completion`."""
        body = {
            **self._head(),
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage,
        }
        if choices and choices[0].completed is not None:
            body["baton"] = baton_object(choices[0].completed)
        return body

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        prompt_index = index // self._frame.samples
        echo = "" if self._echoes is None else self._echoes[prompt_index]
        body: dict[str, Any] = {
            "index": index,
            "text": echo + choice.text,
            "logprobs": self._whole_logprobs(index, choice) if self._frame.has_logprobs else None,
            "finish_reason": choice.finish,
        }
        if self._frame.has_token_ids:
            body["prompt_token_ids"] = list(self._frame.prompt_token_ids[prompt_index])
            body["token_ids"] = choice.token_ids
        return body

    def _whole_logprobs(self, index: int, choice: Choice) -> dict[str, Any]:
        entries = [delta.logprob for delta in choice.deltas if delta.logprob is not None]
        if self._echoes is None:
            return self._lists(index).of(entries)
        echoed = self._echo_logprobs(index)
        made = self._lists(index).of(entries)
        return {key: None if made[key] is None else [*echoed[key], *made[key]] for key in made}
