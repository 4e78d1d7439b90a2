"""The legs of a request: which capability goes where, and what is known of an open log.

Owns the rights per leg and their lifetime. Never sends anything.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from baton.capability import CapabilitySigner, Claims, Right
from services.gateway.policy import PlacementDecision
from services.gateway.registry import WorkerRecord
from services.gateway.request import SequenceRequest, Tenant

CAPABILITY_MARGIN_S: Final = 60.0
"""How much longer a leg's capability lives than the request: clocks differ, clean-up takes time."""

CONTROL_RIGHTS: Final = frozenset(
    {
        Right.OPEN,
        Right.READ,
        Right.WRITE,
        Right.FORK,
        Right.CANCEL,
        Right.PUBLISH,
        Right.BLOB_GET,
    }
)
PREFILL_RIGHTS: Final = frozenset({Right.READ, Right.WRITE, Right.SEAL, Right.CANCEL})
MOVE_RIGHTS: Final = frozenset({Right.MOVE})
DECODE_RIGHTS: Final = frozenset({Right.READ, Right.TAKE, Right.WRITE, Right.SEAL, Right.CANCEL})


class CapabilityMint:
    """Mints the capabilities of one gateway."""

    def __init__(self, signer: CapabilitySigner) -> None:
        self._signer = signer

    def mint(
        self,
        tenant: Tenant | None,
        rights: Collection[Right],
        *,
        ttl_s: float,
        request_id: str,
        log_id: bytes | None = None,
    ) -> str:
        """A capability for `tenant` (None: for this gateway itself) bound to a log if given."""
        return self._signer.sign(
            Claims(
                tenant=None if tenant is None else tenant.name,
                scope=None if tenant is None else tenant.team or "",
                rights=frozenset(rights),
                expiry_wall_s=self._signer.expiry_after(ttl_s + CAPABILITY_MARGIN_S),
                request_id=request_id,
                log_id=log_id,
            )
        )

    def mint_own(self, *, ttl_s: float, request_id: str) -> str:
        """A capability of this gateway itself: it lists every tenant's prefixes."""
        rights = {Right.READ, Right.ADMIN}
        return self.mint(None, rights, ttl_s=ttl_s, request_id=request_id)

    def expiry_wall_s(self, ttl_s: float) -> float:
        """When a capability minted now ends."""
        return self._signer.expiry_after(ttl_s + CAPABILITY_MARGIN_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where an attempt runs. `prefill` is None for local prefill."""

    decode: WorkerRecord
    prefill: WorkerRecord | None
    decision: PlacementDecision

    @property
    def writer(self) -> WorkerRecord:
        """The worker that the log is opened for."""
        return self.decode if self.prefill is None else self.prefill

    @property
    def kvstore_address(self) -> str:
        """The kvstore of the writer's node."""
        return self.writer.kvstore_address

    @property
    def crosses_nodes(self) -> bool:
        """Whether the log has to move before the decode worker can take it."""
        return self.decode.kvstore_address != self.kvstore_address


@dataclass(slots=True, kw_only=True)
class Leg:
    """One attempt at a request: an open log and how far it came."""

    request: SequenceRequest
    plan: Plan
    log_id: bytes
    control: str
    generation: int = 0
    cached_tokens: int = 0
    prefix_id: str | None = None
    is_sealed: bool = False
    is_running: bool = False
    """A worker may be working on it: a cancel must tell it."""
    is_reserved: bool = False
    """The decode worker may hold a slot for it that no sequence has taken yet."""
    moved_to: str | None = None
    """The kvstore it moved to, if it did."""

    @property
    def home(self) -> str:
        """The address of the kvstore that owns the log."""
        return self.moved_to or self.plan.kvstore_address
