"""How one sequence is sampled: the parameters a request may set, their bounds, their bytes.

Owns the vocabulary of sampling and the canonical encoding that the log's OPEN record carries. It
never samples, never imports torch or numpy, and never reads a request: the gateway translates.

Invariant: everything a sampler, a penalty or a stop rule needs beyond token ids stands here, so
that any worker continues any sequence from its log alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from baton.errors import Reason, ServiceError

TEMPERATURE_MAX: Final = 2.0
TOP_K_MAX: Final = 1 << 20
PENALTY_ABS_MAX: Final = 2.0
REPETITION_PENALTY_MAX: Final = 10.0
TOKENS_MAX: Final = 1 << 20
TOKEN_ID_MAX: Final = (1 << 31) - 1
SEED_MIN: Final = -(1 << 63)
SEED_MAX: Final = (1 << 63) - 1
STOP_STRINGS_MAX: Final = 16
STOP_STRING_CHARS_MAX: Final = 1024
STOP_TOKEN_IDS_MAX: Final = 64
TOP_LOGPROBS_MAX: Final = 20
LOGIT_BIAS_ENTRIES_MAX: Final = 1024
LOGIT_BIAS_ABS_MAX: Final = 100.0
CANONICAL_BYTES_MAX: Final = 1 << 18
CANONICAL_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParameters:
    """The sampling parameters of one sequence; the defaults are OpenAI's.

    `seed` None means that nobody chose one: the gateway draws one with `with_seed` before OPEN, so
    that a logged sequence always has it. `max_tokens` None means up to the context; the gateway
    resolves that too. `top_k` None means no limit. `logit_bias` maps token ids to added logits.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    include_stop_string: bool = False

    @property
    def is_greedy(self) -> bool:
        """True when the most likely token is always taken (temperature 0)."""
        return self.temperature == 0.0

    def with_seed(self, seed: int) -> SamplingParameters:
        """The same parameters with the seed given; what the gateway does when a client has none."""
        return replace(self, seed=seed)

    def validate(self) -> None:
        """Check every bound.

        Raises ServiceError INVALID_REQUEST naming the field, the value's bound and the remedy.
        """
        _check_real("temperature", self.temperature, 0.0, TEMPERATURE_MAX)
        _check_real("top_p", self.top_p, 0.0, 1.0, is_low_excluded=True)
        _check_real("min_p", self.min_p, 0.0, 1.0)
        _check_real(
            "repetition_penalty",
            self.repetition_penalty,
            0.0,
            REPETITION_PENALTY_MAX,
            is_low_excluded=True,
        )
        for name in ("frequency_penalty", "presence_penalty"):
            _check_real(name, getattr(self, name), -PENALTY_ABS_MAX, PENALTY_ABS_MAX)
        if self.top_k is not None:
            _check_whole("top_k", self.top_k, 1, TOP_K_MAX)
        if self.seed is not None:
            _check_whole("seed", self.seed, SEED_MIN, SEED_MAX)
        for name in ("ignore_eos", "logprobs", "include_stop_string"):
            if not isinstance(getattr(self, name), bool):
                raise _refuse(name, "must be true or false")
        self._validate_lengths()
        self._validate_stops()
        self._validate_logit_bias()

    def validate_for_vocabulary(self, vocabulary_size: int) -> None:
        """Check that every token id named here exists in a model of `vocabulary_size` tokens.

        Raises ServiceError INVALID_REQUEST naming the field.
        """
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", tuple(self.logit_bias)),
        ):
            if any(token_id >= vocabulary_size for token_id in ids):
                raise _refuse(name, f"must name token ids below {vocabulary_size}")

    def _validate_lengths(self) -> None:
        if self.max_tokens is not None:
            _check_whole("max_tokens", self.max_tokens, 1, TOKENS_MAX)
        _check_whole("min_tokens", self.min_tokens, 0, TOKENS_MAX)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refuse("min_tokens", f"must not exceed max_tokens ({self.max_tokens})")
        _check_whole("top_logprobs", self.top_logprobs, 0, TOP_LOGPROBS_MAX)
        if self.top_logprobs > 0 and not self.logprobs:
            raise _refuse("top_logprobs", "needs logprobs to be true")

    def _validate_stops(self) -> None:
        if len(self.stop_strings) > STOP_STRINGS_MAX:
            raise _refuse("stop_strings", f"may hold at most {STOP_STRINGS_MAX} strings")
        for text in self.stop_strings:
            if not isinstance(text, str) or not 0 < len(text) <= STOP_STRING_CHARS_MAX:
                raise _refuse(
                    "stop_strings",
                    f"each must be a string of 1 to {STOP_STRING_CHARS_MAX} characters",
                )
            if not _is_unicode_text(text):
                raise _refuse("stop_strings", "must not hold an unpaired surrogate")
        if len(self.stop_token_ids) > STOP_TOKEN_IDS_MAX:
            raise _refuse("stop_token_ids", f"may hold at most {STOP_TOKEN_IDS_MAX} ids")
        for token_id in self.stop_token_ids:
            _check_whole("stop_token_ids", token_id, 0, TOKEN_ID_MAX)

    def _validate_logit_bias(self) -> None:
        if len(self.logit_bias) > LOGIT_BIAS_ENTRIES_MAX:
            raise _refuse("logit_bias", f"may hold at most {LOGIT_BIAS_ENTRIES_MAX} entries")
        for token_id, bias in self.logit_bias.items():
            _check_whole("logit_bias", token_id, 0, TOKEN_ID_MAX)
            _check_real("logit_bias", bias, -LOGIT_BIAS_ABS_MAX, LOGIT_BIAS_ABS_MAX)

    def to_canonical_bytes(self) -> bytes:
        """The one encoding of these parameters: UTF-8 JSON, sorted keys, no spaces, version first.

        Equal parameters give equal bytes in every process; reals are written as Python's shortest
        round-trip decimals, so decoding restores them bit for bit.
        """
        body: dict[str, Any] = {item.name: getattr(self, item.name) for item in fields(self)}
        for name in _REAL_FIELDS:
            body[name] = float(body[name])
        body["stop_strings"] = list(self.stop_strings)
        body["stop_token_ids"] = list(self.stop_token_ids)
        body["logit_bias"] = [[key, float(self.logit_bias[key])] for key in sorted(self.logit_bias)]
        body["version"] = CANONICAL_VERSION
        text = json.dumps(
            body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
        return text.encode("utf-8")

    @classmethod
    def from_canonical_bytes(cls, data: bytes | memoryview) -> SamplingParameters:
        """Decode `to_canonical_bytes` and validate.

        Raises ServiceError INVALID_REQUEST naming `sampling_parameters` for bytes that are too
        long, are no such JSON, have unknown or missing keys, or break a bound.
        """
        if len(data) > CANONICAL_BYTES_MAX:
            raise _refuse(_WHOLE, f"may hold at most {CANONICAL_BYTES_MAX} bytes")
        try:
            body = json.loads(bytes(data).decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise _refuse(_WHOLE, "must be the canonical JSON of SamplingParameters") from error
        if not isinstance(body, dict) or body.pop("version", None) != CANONICAL_VERSION:
            raise _refuse(_WHOLE, f"must be an object of version {CANONICAL_VERSION}")
        if set(body) != _FIELD_NAMES:
            raise _refuse(_WHOLE, f"unknown or missing keys {sorted(set(body) ^ _FIELD_NAMES)}")
        parameters = cls(**_restore_containers(body))
        parameters.validate()
        return parameters


_WHOLE: Final = "sampling_parameters"
_FIELD_NAMES: Final = frozenset(item.name for item in fields(SamplingParameters))
_REAL_FIELDS: Final = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)


def _restore_containers(body: dict[str, Any]) -> dict[str, Any]:
    for name in ("stop_strings", "stop_token_ids", "logit_bias"):
        if not isinstance(body[name], list):
            raise _refuse(name, "must be a list")
    pairs = body["logit_bias"]
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise _refuse("logit_bias", "must be a list of [token id, bias]")
    if not all(isinstance(pair[0], int) for pair in pairs):
        raise _refuse("logit_bias", "token ids must be whole numbers")
    return {
        **body,
        "stop_strings": tuple(body["stop_strings"]),
        "stop_token_ids": tuple(body["stop_token_ids"]),
        "logit_bias": {pair[0]: pair[1] for pair in pairs},
    }


def _check_real(
    name: str, value: object, low: float, high: float, *, is_low_excluded: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refuse(name, "must be a number")
    # A comparison with NaN is false, and a huge int compares exactly: no conversion is needed.
    is_inside = low <= value <= high and not (is_low_excluded and value == low)
    if not is_inside or (isinstance(value, float) and math.isnan(value)):
        above = "above" if is_low_excluded else "at least"
        raise _refuse(name, f"must be {above} {low:g} and at most {high:g}")


def _check_whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _refuse(name, "must be a whole number")
    if not low <= value <= high:
        raise _refuse(name, f"must be from {low} to {high}")


def _is_unicode_text(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _refuse(name: str, remedy: str) -> ServiceError:
    return ServiceError(Reason.INVALID_REQUEST, f"{name} {remedy}", field=name)
