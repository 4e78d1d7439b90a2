"""What an append says and what comes of it. Pure data.

Owns the entry, its outcome and the batch. The KV slot an entry names is that of the token before
it: the step that consumed token p - 1 wrote KV[p - 1] and sampled token p.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.arena.checksums import SlotChecksum
from baton.arena.replay import GrantedPage
from baton.engine.sampling import SampledToken
from baton.errors import ServiceError


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendEntry:
    """One token of one log at `position`; `page` and `checksum` are those of KV[position - 1]."""

    log_id: bytes
    generation: int
    position: int
    sampled: SampledToken
    page: GrantedPage
    checksum: SlotChecksum
    finish_reason: str | None = None
    pages_wanted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendOutcome:
    """`error` None: the entry is logged. `pages`: granted on request, perhaps fewer."""

    error: ServiceError | None
    pages: tuple[GrantedPage, ...] = field(default=())
