"""What happens to sequences, and what gateways ask for. Pure data.

Owns the shapes that the runner speaks; the servicer turns them into messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.arena.replay import HeldLog
from baton.errors import ServiceError
from baton.kv.label import PairLabel
from baton.scheduling.claims import Claim
from baton.worker.output import OutputToken


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Usage of one answer."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A hand-off is done: the sequence runs at `generation` from `position` tokens on.

    `stage_seconds` make up `total_s`, from the command's arrival on.
    """

    generation: int
    position: int
    kv_transfer_s: float
    exactness: str
    prefill_compute_s: float | None = None
    stage_seconds: Mapping[str, float] = field(default_factory=dict, hash=False)
    total_s: float = 0.0
    transfer_bytes: int = 0
    transport: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Produced:
    """A token whose record is acked; `usage` and `stage_seconds` with the last one."""

    token: OutputToken
    usage: TokenCounts | None = None
    stage_seconds: Mapping[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """The sequence waits, for a slot or for pages; `waiting` sequences of this worker do."""

    waiting: int
    is_preempted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The sequence failed or was refused; nothing follows."""

    error: ServiceError


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceEvent:
    """Something that happened to the sequence of one request."""

    request_id: str
    what: Started | Produced | Waiting | Failed

    @property
    def is_last(self) -> bool:
        """Nothing follows for this request."""
        if isinstance(self.what, Produced):
            return self.what.token.finish_reason is not None
        return isinstance(self.what, Failed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A gateway asks for a place, for at most `hold_s` seconds, for a log that will be
    `total_tokens` long when it comes. `tenant`: its own word, worth a place in the queue.
    """

    request_id: str
    total_tokens: int
    hold_s: float
    tenant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOrder:
    """A gateway hands over a log. Tokens from output index `next_index` on are wanted.

    `deadline_s` counts from now; None: no deadline. `label` None: the gateway did not say.
    `received_s`: when the command came, by the worker's clock. `claim`: whose it is, as its
    capability says, and what the operator made of that.
    """

    claim: Claim
    log: HeldLog
    capability: str
    next_index: int
    is_local_prefill: bool
    label: PairLabel | None = None
    deadline_s: float | None = None
    traceparent: str | None = None
    received_s: float | None = None

    @property
    def request_id(self) -> str:
        """The internal request id."""
        return self.claim.request_id
