"""What happens during one answer, as plain data: the words REST and gRPC both speak.

Owns the event types and the small enums behind them. Never does I/O and holds no protobuf message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum, unique


@unique
class ServingMode(StrEnum):
    """Whether prefill and decode ran apart."""

    DISAGGREGATED = "disaggregated"
    AGGREGATED = "aggregated"


@unique
class KvSource(StrEnum):
    """Where the prompt's KV came from."""

    LOCAL = "local"
    REMOTE = "remote"
    RECOMPUTED = "recomputed"


@unique
class Exactness(StrEnum):
    """How an answer relates to a fresh computation."""

    EXACT = "exact"
    EQUIVALENT = "equivalent"
    APPROXIMATE = "approximate"


@unique
class FinishReason(StrEnum):
    """Why a sequence ended; `error` and `cancelled` never reach an OpenAI body."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUsage:
    """Token counts of one answer; `cached_tokens` is a part of `prompt_tokens`."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """A token with its natural log probability before temperature, and its alternatives."""

    token_id: int
    logprob: float
    token_bytes: bytes
    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The log is open and a pair was chosen; nothing was computed yet."""

    request_id: str
    log_id: bytes
    prompt_tokens: int
    prefill_worker_id: str | None
    decode_worker_id: str
    mode: ServingMode


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """One token; `text` became safe to send with it and may be empty."""

    index: int
    token_id: int
    text: str
    logprob: Logprob | None = None
    finish: FinishReason | None = None
    stop_string: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionMark:
    """What became of the session that an answer was given in. `refusal`: why it does not name the
    answer's end (somebody changed it meanwhile, say); the answer stands under its response id.
    """

    session_id: str
    generation: int
    refusal: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """The answer is complete. `stage_seconds` uses the names of `baton.stages`; `first_token_s` is
    when the first token was ready, in this process's monotonic time. `brought` says how the log
    came to the decode worker's kvstore where that is another one; `hidden_transfer_share` is the
    part of a moved log's bytes that was copied while its prompt was computed.
    """

    finish: FinishReason
    usage: TokenUsage
    exactness: Exactness
    exactness_reason: str
    kv_source: KvSource
    mode: ServingMode
    log_id: bytes
    generation: int
    position: int
    kvstore_address: str
    prefill_worker_id: str | None
    decode_worker_id: str | None
    time_to_first_token_s: float
    elapsed_s: float
    first_token_s: float = 0.0
    stage_seconds: Mapping[str, float] = field(default_factory=dict, hash=False)
    prefix_id: str | None = None
    resumed: int = 0
    routing: str = ""
    is_fallback: bool = False
    transfer_bytes: int = 0
    transport: str | None = None
    hidden_transfer_share: float | None = None
    brought: str | None = None
    session: SessionMark | None = None

    @property
    def time_per_output_token_s(self) -> float | None:
        """Mean seconds between tokens; None for an answer of one."""
        gaps = self.usage.completion_tokens - 1
        return (self.elapsed_s - self.time_to_first_token_s) / gaps if gaps > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """The log is sealed: what the response headers tell. Comes right before the first token."""

    mode: ServingMode
    exactness: Exactness
    kv_source: KvSource
    cached_tokens: int


Event = Admitted | FirstToken | TokenDelta | Completed
"""What a sequence yields, in this order: Admitted, FirstToken, TokenDelta..., Completed."""
