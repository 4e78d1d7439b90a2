"""Sampling parameters and log probabilities, proto <-> dataclass.

Owns the defaults of absent fields (those of `SamplingParameters`). Never samples.
"""

from __future__ import annotations

from typing import Any, Final

from baton.api.common.v1 import common_pb2
from baton.sampling_parameters import SamplingParameters

_OPTIONAL: Final = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
)
_PLAIN: Final = ("ignore_eos", "logprobs", "top_logprobs", "include_stop_string")


def sampling_to_proto(parameters: SamplingParameters) -> common_pb2.SamplingParameters:
    """Every field of `parameters`, written out; None stays absent."""
    message = common_pb2.SamplingParameters(
        stop_strings=parameters.stop_strings,
        stop_token_ids=parameters.stop_token_ids,
        logit_bias=dict(parameters.logit_bias),
    )
    for name in (*_OPTIONAL, *_PLAIN):
        value = getattr(parameters, name)
        if value is not None:
            setattr(message, name, value)
    return message


def sampling_from_proto(message: common_pb2.SamplingParameters) -> SamplingParameters:
    """The dataclass, validated; raises ServiceError INVALID_REQUEST naming the field."""
    values: dict[str, Any] = {
        name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)
    }
    values.update({name: getattr(message, name) for name in _PLAIN})
    parameters = SamplingParameters(
        stop_strings=tuple(message.stop_strings),
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=dict(message.logit_bias),
        **values,
    )
    parameters.validate()
    return parameters
