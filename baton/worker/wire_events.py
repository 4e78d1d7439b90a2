"""Output tokens, usage and exactness as messages.

Owns the translation only; prefill's first token and decode's tokens look the same on the wire.
"""

from __future__ import annotations

from typing import Final

from baton.api.common.v1 import common_pb2
from baton.text.stream import TokenBytes
from baton.wire.finish import finish_to_proto
from baton.worker.engine import APPROXIMATE, EQUIVALENT, EXACT
from baton.worker.output import OutputToken

_EXACTNESS: Final = {
    EXACT: common_pb2.EXACTNESS_CLASS_EXACT,
    EQUIVALENT: common_pb2.EXACTNESS_CLASS_EQUIVALENT,
    APPROXIMATE: common_pb2.EXACTNESS_CLASS_APPROXIMATE,
}


def exactness_to_proto(exactness: str) -> common_pb2.ExactnessClass.ValueType:
    """The enum value of `exact`, `equivalent` or `approximate`."""
    return _EXACTNESS[exactness]


def token_to_proto(token: OutputToken, tokenizer: TokenBytes) -> common_pb2.TokenEvent:
    """One token of one answer, with log probabilities where it was sampled with them."""
    event = common_pb2.TokenEvent(
        index=token.index,
        token_id=token.sampled.token_id,
        text=token.text,
        finish_reason=finish_to_proto(token.finish_reason),
        stop_string=token.stop_string or "",
    )
    if token.sampled.logprob is not None:
        event.logprob.CopyFrom(_logprob(token.sampled.token_id, token.sampled.logprob, tokenizer))
        event.logprob.top.extend(
            _logprob(item.token_id, item.logprob, tokenizer) for item in token.sampled.top_logprobs
        )
    return event


def usage_to_proto(
    *, prompt_tokens: int, cached_tokens: int, completion_tokens: int
) -> common_pb2.Usage:
    """Token counts of one answer."""
    return common_pb2.Usage(
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        completion_tokens=completion_tokens,
    )


def _logprob(token_id: int, logprob: float, tokenizer: TokenBytes) -> common_pb2.TokenLogprob:
    return common_pb2.TokenLogprob(
        token_id=token_id, logprob=logprob, token_bytes=tokenizer.decode_bytes(token_id)
    )
