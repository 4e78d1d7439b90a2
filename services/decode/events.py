"""What happens to sequences, and what gateways ask for. Pure data.

Owns the shapes that the runner speaks; the servicer turns them into messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.arena.replay import HeldLog
from baton.errors import ServiceError
from baton.kv.label import PairLabel
from baton.worker.output import OutputToken
from services.decode.scheduler import Claim, ServiceClass


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
class StartOrder:
    """A gateway hands over a log. Tokens from output index `next_index` on are wanted.

    `deadline_s` counts from now; None: no deadline. `label` None: the gateway did not say.
    `received_s`: when the command came, by the worker's clock. Tenant, class and priority are what
    the gateway verified.
    """

    request_id: str
    log: HeldLog
    capability: str
    next_index: int
    is_local_prefill: bool
    label: PairLabel | None = None
    deadline_s: float | None = None
    traceparent: str | None = None
    received_s: float | None = None
    tenant: str = ""
    service_class: ServiceClass = ServiceClass.INTERACTIVE
    priority: int = 0

    @property
    def claim(self) -> Claim:
        """What the scheduler knows of it."""
        return Claim(
            request_id=self.request_id,
            tenant=self.tenant,
            service_class=self.service_class,
            priority=self.priority,
        )
