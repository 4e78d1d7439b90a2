"""`POST /v1/completions`: a JSON object to a checked completion request.

Owns the four shapes of `prompt` and the fields of this route alone. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from baton.sampling_parameters import TOKEN_ID_MAX
from services.gateway.request import TextPrompt, TokensPrompt
from services.gateway.rest.json_body import invalid
from services.gateway.rest.reader import ObjectReader, checked_text, checked_whole
from services.gateway.rest.sampling_fields import CommonFields, read_common

PROMPTS_MAX: Final = 64
PROMPT_CHARS_MAX: Final = 16 << 20
PROMPT_TOKENS_MAX: Final = 1 << 20
LOGPROBS_MAX: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """What a completion asks for: prompts in order, each with the path errors name."""

    prompts: tuple[TextPrompt | TokensPrompt, ...]
    prompt_paths: tuple[str, ...]
    common: CommonFields
    has_echo: bool
    ignored: tuple[str, ...]


def read_completion_request(body: dict[str, Any], *, answers_max: int) -> CompletionRequest:
    """Check a parsed body; raises INVALID_REQUEST naming the path at fault."""
    reader = ObjectReader(body)
    prompts = _prompts(reader)
    if reader.take("suffix"):
        raise invalid("suffix is not supported; leave it out", "suffix")
    has_echo = reader.flag("echo")
    reader.note("add_special_tokens")
    wanted = reader.whole("logprobs", low=0, high=LOGPROBS_MAX)
    common = read_common(reader, (wanted is not None, wanted or 0), answers_max)
    if len(prompts) * common.answers > PROMPTS_MAX:
        raise invalid(f"prompts times n may be at most {PROMPTS_MAX}", "prompt")
    many = len(prompts) > 1
    return CompletionRequest(
        prompts=prompts,
        prompt_paths=tuple(f"prompt[{i}]" if many else "prompt" for i in range(len(prompts))),
        common=common,
        has_echo=has_echo,
        ignored=reader.ignored(),
    )


def _prompts(reader: ObjectReader) -> tuple[TextPrompt | TokensPrompt, ...]:
    value = reader.take("prompt")
    if isinstance(value, str):
        return (TextPrompt(text=checked_text(value, "prompt", PROMPT_CHARS_MAX)),)
    if not isinstance(value, list):
        raise invalid(
            "prompt must be a string, a list of strings, token ids, or a list of those", "prompt"
        )
    if not value:
        raise invalid("prompt must not be empty", "prompt")
    if not isinstance(value[0], str | list):
        return (_tokens(value, "prompt"),)
    if len(value) > PROMPTS_MAX:
        raise invalid(f"prompt may hold at most {PROMPTS_MAX} prompts", "prompt")
    return tuple(_one(item, f"prompt[{index}]") for index, item in enumerate(value))


def _one(item: Any, path: str) -> TextPrompt | TokensPrompt:
    if isinstance(item, list):
        return _tokens(item, path)
    return TextPrompt(text=checked_text(item, path, PROMPT_CHARS_MAX))


def _tokens(items: list[Any], path: str) -> TokensPrompt:
    if not 0 < len(items) <= PROMPT_TOKENS_MAX:
        raise invalid(f"{path} must hold 1 to {PROMPT_TOKENS_MAX} token ids", path)
    ids = tuple(
        checked_whole(item, f"{path}[{index}]", 0, TOKEN_ID_MAX) for index, item in enumerate(items)
    )
    return TokensPrompt(token_ids=ids)
