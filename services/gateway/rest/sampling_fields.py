"""The sampling fields that both OpenAI routes share, and what neither can do.

Owns the mapping from OpenAI's and vLLM's names to `SamplingParameters`, and the list of fields
that would change the output but are not supported: those are refused by name, never dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from baton.errors import ServiceError
from baton.sampling_parameters import (
    LOGIT_BIAS_ENTRIES_MAX,
    STOP_STRING_CHARS_MAX,
    STOP_STRINGS_MAX,
    STOP_TOKEN_IDS_MAX,
    TOKEN_ID_MAX,
    TOKENS_MAX,
    TOP_K_MAX,
    SamplingParameters,
)
from services.gateway.rest.json_body import invalid, shown
from services.gateway.rest.reader import ObjectReader, checked_text, checked_whole

ID_TEXT_CHARS_MAX: Final = 512
SALT_CHARS_MAX: Final = 1024
_TOKEN_ID: Final = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)

_OPENAI_NAMES: Final[Mapping[str, str]] = {
    "stop_strings": "stop",
    "include_stop_string": "include_stop_str_in_output",
}

_NEUTRAL: Final = (
    "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "parallel_tool_calls", "request_id", "session_id", "priority",
    "stream_interval", "spaces_between_special_tokens", "length_penalty", "early_stopping",
    "prediction", "verbosity",
)  # fmt: skip
"""Understood and without effect on the answer's text."""

_UNSUPPORTED: Final[Mapping[str, Callable[[Any], bool]]] = {
    "response_format": lambda value: (
        not (isinstance(value, dict) and value.get("type") in ("text", None))
    ),
    "functions": bool,
    "function_call": lambda value: value not in ("none", "auto"),
    "audio": lambda value: True,
    "modalities": lambda value: value != ["text"],
    "web_search_options": lambda value: True,
    "use_beam_search": bool,
    "logits_processors": bool,
    "guided_json": lambda value: True,
    "guided_regex": lambda value: True,
    "guided_choice": lambda value: True,
    "guided_grammar": lambda value: True,
    "structured_outputs": bool,
    "allowed_token_ids": bool,
    "bad_words": bool,
    "prompt_logprobs": lambda value: value is not False and value is not None,
    "truncate_prompt_tokens": lambda value: True,
    "kv_transfer_params": bool,
    "skip_special_tokens": lambda value: value is not True,
}
"""Field -> whether this value would change the output; those are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """What a stream carries besides the answer."""

    is_stream: bool
    has_usage: bool
    has_continuous_usage: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonFields:
    """What both routes read the same way. `max_tokens_field` is the name the client used."""

    model: str | None
    sampling: SamplingParameters
    max_tokens_field: str
    answers: int
    stream: StreamOptions
    cache_salt: str | None
    is_dropped_at_end: bool
    has_token_ids: bool


def read_common(reader: ObjectReader, logprobs: tuple[bool, int], answers_max: int) -> CommonFields:
    """Read and check the shared fields; `logprobs` is (wanted, alternatives) of the route."""
    refuse_unsupported(reader)
    reader.note(*_NEUTRAL)
    metadata = reader.mapping("metadata")
    if metadata is not None and len(metadata) > 64:
        raise invalid("metadata may hold at most 64 entries", "metadata")
    reader.text("user", chars_max=ID_TEXT_CHARS_MAX)
    max_tokens_field, max_tokens = _max_tokens(reader)
    sampling = _sampling(reader, max_tokens, logprobs)
    _validate(sampling, max_tokens_field)
    answers = reader.whole("n", low=1, high=answers_max) or 1
    best_of = reader.whole("best_of", low=1, high=answers_max)
    if best_of not in (None, answers):
        raise invalid("best_of other than n is not supported; leave it out", "best_of")
    return CommonFields(
        model=read_model(reader),
        sampling=sampling,
        max_tokens_field=max_tokens_field,
        answers=answers,
        stream=_stream_options(reader),
        cache_salt=_cache_salt(reader),
        is_dropped_at_end=not reader.flag("store", default=True),
        has_token_ids=reader.flag("return_token_ids"),
    )


def read_model(reader: ObjectReader) -> str | None:
    """The model asked for; None when left out. An empty name is a mistake, not a wish."""
    name = reader.text("model", chars_max=ID_TEXT_CHARS_MAX)
    if name == "":
        raise invalid("model must not be empty; leave it out for the one served here", "model")
    return name


def refuse_unsupported(reader: ObjectReader) -> None:
    """400 for the first field that would change the output and that nobody implements."""
    for name, changes_output in _UNSUPPORTED.items():
        value = reader.take(name)
        if value is not None and changes_output(value):
            raise invalid(f"{name} is not supported with this value; leave it out", name)


def _max_tokens(reader: ObjectReader) -> tuple[str, int | None]:
    newer = reader.whole("max_completion_tokens", low=1, high=TOKENS_MAX)
    older = reader.whole("max_tokens", low=1, high=TOKENS_MAX)
    return ("max_tokens", older) if newer is None else ("max_completion_tokens", newer)


def _sampling(
    reader: ObjectReader, max_tokens: int | None, logprobs: tuple[bool, int]
) -> SamplingParameters:
    defaults = SamplingParameters()
    reals: dict[str, Any] = {}
    for name in (
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
    ):
        value = reader.real(name)
        reals[name] = getattr(defaults, name) if value is None else value
    top_k = reader.whole("top_k", low=-1, high=TOP_K_MAX)
    return SamplingParameters(
        **reals,
        # vLLM spells "no limit" as -1 or 0.
        top_k=top_k if top_k is not None and top_k > 0 else None,
        seed=reader.whole("seed", low=-(1 << 63), high=(1 << 63) - 1),
        max_tokens=max_tokens,
        min_tokens=reader.whole("min_tokens", low=0, high=TOKENS_MAX) or 0,
        stop_strings=_stop_strings(reader),
        stop_token_ids=_stop_token_ids(reader),
        ignore_eos=reader.flag("ignore_eos"),
        logprobs=logprobs[0],
        top_logprobs=logprobs[1],
        logit_bias=_logit_bias(reader),
        include_stop_string=reader.flag("include_stop_str_in_output"),
    )


def _validate(sampling: SamplingParameters, max_tokens_field: str) -> None:
    """The bounds of the dataclass, under the names the client used."""
    try:
        sampling.validate()
    except ServiceError as error:
        names = {**_OPENAI_NAMES, "max_tokens": max_tokens_field}
        field = names.get(error.field or "", error.field)
        message = error.message.replace(error.field or "", field or "", 1)
        raise invalid(message, field) from error


def _stop_strings(reader: ObjectReader) -> tuple[str, ...]:
    value = reader.take("stop")
    if value is None:
        return ()
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise invalid("stop must be a string or a list of strings", "stop")
    if len(value) > STOP_STRINGS_MAX:
        raise invalid(f"stop may hold at most {STOP_STRINGS_MAX} strings", "stop")
    texts = [
        checked_text(item, f"stop[{index}]", STOP_STRING_CHARS_MAX)
        for index, item in enumerate(value)
    ]
    if not all(texts):
        raise invalid("stop must not hold an empty string", "stop")
    return tuple(texts)


def _stop_token_ids(reader: ObjectReader) -> tuple[int, ...]:
    value = reader.items("stop_token_ids", count_max=STOP_TOKEN_IDS_MAX) or []
    return tuple(
        checked_whole(item, f"stop_token_ids[{index}]", 0, TOKEN_ID_MAX)
        for index, item in enumerate(value)
    )


def _logit_bias(reader: ObjectReader) -> dict[int, float]:
    given = reader.mapping("logit_bias") or {}
    if len(given) > LOGIT_BIAS_ENTRIES_MAX:
        raise invalid(f"logit_bias may hold at most {LOGIT_BIAS_ENTRIES_MAX} entries", "logit_bias")
    biases: dict[int, float] = {}
    for key, bias in given.items():
        path = f"logit_bias.{shown(key)}"
        if not _TOKEN_ID.fullmatch(key):
            raise invalid(f"{path}: keys must be token ids in decimal", path)
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise invalid(f"{path} must be a number", path)
        biases[int(key)] = float(bias)
    return biases


def _stream_options(reader: ObjectReader) -> StreamOptions:
    is_stream = reader.flag("stream")
    given = reader.mapping("stream_options")
    if given is None:
        return StreamOptions(is_stream=is_stream, has_usage=False, has_continuous_usage=False)
    if not is_stream:
        raise invalid("stream_options needs stream to be true", "stream_options")
    options = ObjectReader(given, "stream_options")
    has_usage = options.flag("include_usage")
    return StreamOptions(
        is_stream=True,
        has_usage=has_usage,
        has_continuous_usage=has_usage and options.flag("continuous_usage_stats"),
    )


def _cache_salt(reader: ObjectReader) -> str | None:
    salt = reader.text("cache_salt", chars_max=SALT_CHARS_MAX)
    if salt == "":
        raise invalid("cache_salt must not be empty; leave it out instead", "cache_salt")
    return salt
