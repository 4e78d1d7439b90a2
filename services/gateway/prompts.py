"""The model as the gateway knows it: name, tokenizer, template, context. No weights, no torch.

Owns the way from a prompt to token ids, and the context check. Long texts are tokenised in a
thread, so that the loop serves others meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeVar

from baton.errors import Reason, ServiceError
from baton.sampling_parameters import SamplingParameters
from baton.text.rendered import RenderedPrompt
from baton.text.tokenizer import Tokenizer
from services.gateway.prefixes import common_prefix
from services.gateway.request import (
    ChatPrompt,
    ChatTurn,
    EncodedPrompt,
    Prompt,
    Role,
    TextPrompt,
    TokensPrompt,
)

_Result = TypeVar("_Result")

INLINE_CHARS_MAX: Final = 4096
"""Texts up to here are tokenised on the loop: a thread would cost more."""


class Template(Protocol):
    """A chat template: `baton.text.template.ChatTemplate` is one."""

    def render(self, messages: object, *, add_generation_prompt: bool = True) -> RenderedPrompt:
        """Render a conversation."""
        ...

    def template_digest(self) -> bytes:
        """16 bytes that name the template."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model. `template` is None for models without a chat template."""

    name: str
    aliases: tuple[str, ...]
    tokenizer: Tokenizer
    template: Template | None
    context_max: int
    created_wall_s: int

    def answers_to(self, name: str | None) -> bool:
        """Whether a request for `name` means this model; None or "" means the only one."""
        return not name or name == self.name or name in self.aliases

    def require(self, name: str | None) -> None:
        """Raises MODEL_NOT_FOUND unless `name` is this model."""
        if not self.answers_to(name):
            raise ServiceError(
                Reason.MODEL_NOT_FOUND,
                f"this gateway serves {self.name}; GET /v1/models lists what there is",
                field="model",
            )

    @property
    def template_digest(self) -> bytes:
        """The template's digest; empty without one."""
        return b"" if self.template is None else self.template.template_digest()

    async def encode(self, prompt: Prompt, field: str) -> EncodedPrompt:
        """The prompt's token ids and bytes; raises naming `field` for a prompt without tokens."""
        if isinstance(prompt, TokensPrompt):
            return self._encode_ids(prompt, field)
        if isinstance(prompt, TextPrompt):
            text = prompt.text
            encoded = await beside_loop(len(text), lambda: self._encode_text(text, field))
        else:
            chars = sum(len(turn.content) for turn in prompt.turns)
            encoded = await beside_loop(chars, lambda: self._encode_chat(prompt))
        if not encoded.token_ids:
            raise ServiceError(
                Reason.INVALID_REQUEST, f"{field} must have at least one token", field=field
            )
        return encoded

    async def encode_leading_turns(self, turns: Sequence[ChatTurn]) -> tuple[int, ...]:
        """Token ids with which every conversation that goes on from `turns` begins.

        Two different continuations are rendered; where they agree with each other and with the
        turns alone, no later turn can change a token.
        """
        given = tuple(turns)
        alone = await self.encode(ChatPrompt(turns=given, has_assistant_header=False), "messages")
        agreed: Sequence[int] = alone.token_ids
        for text in ("0", "\n\nzz"):
            more = (*given, ChatTurn(role=Role.USER, content=text))
            longer = await self.encode(ChatPrompt(turns=more), "messages")
            agreed = common_prefix(replace(alone, token_ids=tuple(agreed)), longer)
        return tuple(agreed)

    async def encode_leading_text(self, text: str) -> tuple[int, ...]:
        """Token ids with which every raw prompt that goes on from `text` begins."""
        alone = await self.encode(TextPrompt(text=text), "text")
        agreed: Sequence[int] = alone.token_ids
        for more in ("0", " zz", "\n", "z"):
            longer = await self.encode(TextPrompt(text=text + more), "text")
            agreed = common_prefix(replace(alone, token_ids=tuple(agreed)), longer)
        return tuple(agreed)

    def encode_turns(self, prompt: ChatPrompt) -> tuple[int, ...]:
        """A conversation's ids, at once; UNSUPPORTED without a chat template."""
        return self._encode_chat(prompt).token_ids

    def spell(self, token_ids: Sequence[int]) -> bytes:
        """The bytes that token ids stand for."""
        return b"".join(map(self.tokenizer.decode_bytes, token_ids))

    def _encode_ids(self, prompt: TokensPrompt, field: str) -> EncodedPrompt:
        size = self.tokenizer.vocab_size
        for index, token_id in enumerate(prompt.token_ids):
            if not 0 <= token_id < size:
                path = f"{field}[{index}]"
                raise ServiceError(
                    Reason.INVALID_REQUEST, f"{path} must be a token id below {size}", field=path
                )
        return EncodedPrompt(token_ids=prompt.token_ids, rendered=self.spell(prompt.token_ids))

    def _encode_text(self, text: str, field: str) -> EncodedPrompt:
        ids = self.tokenizer.encode_prompt(text, field=field)
        return EncodedPrompt(token_ids=tuple(ids), rendered=text.encode())

    def _encode_chat(self, prompt: ChatPrompt) -> EncodedPrompt:
        if self.template is None:
            raise ServiceError(
                Reason.UNSUPPORTED,
                f"{self.name} has no chat template; use /v1/completions",
                field="messages",
            )
        messages = [{"role": turn.role.value, "content": turn.content} for turn in prompt.turns]
        rendered = self.template.render(messages, add_generation_prompt=prompt.has_assistant_header)
        ids = self.tokenizer.encode_rendered(rendered)
        return EncodedPrompt(token_ids=tuple(ids), rendered=rendered.text.encode())


async def beside_loop(chars: int, work: Callable[[], _Result]) -> _Result:
    """What `work` returns; work on a long text is done in a thread, so that nobody else waits."""
    if chars <= INLINE_CHARS_MAX:
        return work()
    return await asyncio.to_thread(work)


def resolve_sampling(
    sampling: SamplingParameters,
    *,
    prompt_tokens: int,
    context_max: int,
    seed: int,
    max_tokens_field: str = "max_tokens",
    prompt_field: str = "prompt",
) -> SamplingParameters:
    """The parameters with seed and max_tokens decided.

    Raises PROMPT_TOO_LONG when prompt and answer together do not fit the context; a prompt is never
    cut. Without max_tokens the room left is the limit.
    """
    room = context_max - prompt_tokens
    wanted = sampling.max_tokens
    if room < 1 or (wanted is not None and wanted > room):
        asked = "" if wanted is None else f" and {max_tokens_field} of {wanted}"
        raise ServiceError(
            Reason.PROMPT_TOO_LONG,
            f"the context holds {context_max} tokens, the prompt has {prompt_tokens}{asked}; "
            "shorten the prompt or ask for fewer tokens",
            field=max_tokens_field if room >= 1 else prompt_field,
        )
    resolved = replace(
        sampling,
        seed=seed if sampling.seed is None else sampling.seed,
        max_tokens=room if wanted is None else wanted,
    )
    if resolved.min_tokens > (resolved.max_tokens or 0):
        raise ServiceError(
            Reason.INVALID_REQUEST,
            f"min_tokens must not exceed the {resolved.max_tokens} tokens that may be produced",
            field="min_tokens",
        )
    return resolved
