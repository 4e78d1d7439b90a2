"""Chat answers: `chat.completion` and `chat.completion.chunk`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.gateway.events import Completed, Event, FirstToken, TokenDelta
from services.gateway.rest.answer import AnswerFrame, Choice, baton_object
from services.gateway.rest.logprobs import chat_logprobs


class ChatShape:
    """Events of a chat request as OpenAI's objects."""

    def __init__(self, frame: AnswerFrame) -> None:
        self._frame = frame

    def _head(self, kind: str) -> dict[str, Any]:
        frame = self._frame
        return {
            "id": frame.answer_id,
            "object": kind,
            "created": frame.created_wall_s,
            "model": frame.model,
        }

    def chunks(self, index: int, event: Event) -> list[dict[str, Any]]:
        """The role first, then content token by token, then the finish reason."""
        if isinstance(event, FirstToken):
            delta = {"role": "assistant", "content": ""}
            chunk = self._chunk(index, delta, None)
            if self._frame.has_token_ids:
                chunk["prompt_token_ids"] = list(self._frame.prompt_token_ids[0])
            return [chunk]
        if isinstance(event, TokenDelta):
            return self._token(index, event)
        if isinstance(event, Completed):
            chunk = self._chunk(index, {}, event.finish.value)
            return [{**chunk, "baton": baton_object(event)}]
        return []

    def _token(self, index: int, delta: TokenDelta) -> list[dict[str, Any]]:
        has_logprob = self._frame.has_logprobs and delta.logprob is not None
        if not (delta.text or has_logprob or self._frame.has_token_ids):
            return []
        chunk = self._chunk(index, {"content": delta.text}, None)
        choice = chunk["choices"][0]
        if has_logprob and delta.logprob is not None:
            choice["logprobs"] = chat_logprobs([delta.logprob])
        if self._frame.has_token_ids:
            choice["token_ids"] = [delta.token_id]
        return [chunk]

    def _chunk(self, index: int, delta: dict[str, Any], finish: str | None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The chunk with `choices: []`."""
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage}

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        """The whole `chat.completion`."""
        body = {
            **self._head("chat.completion"),
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage,
        }
        if self._frame.has_token_ids:
            body["prompt_token_ids"] = list(self._frame.prompt_token_ids[0])
        if choices and choices[0].completed is not None:
            body["baton"] = baton_object(choices[0].completed)
        return body

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        entries = [delta.logprob for delta in choice.deltas if delta.logprob is not None]
        body: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": chat_logprobs(entries) if self._frame.has_logprobs else None,
            "finish_reason": choice.finish,
        }
        if self._frame.has_token_ids:
            body["token_ids"] = choice.token_ids
        return body
