"""The data of the kvstore's cores: logs, page table rows, page work, answers.

Owns shapes only; the rules stand in `home`, `history`, `keeper` and `store`. Pure.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum, IntEnum, unique

from baton.kv.blocks import Scope
from baton.kv.digests import ChunkPage
from baton.sampling_parameters import SamplingParameters

TOKEN_TYPECODE = "I"
assert array(TOKEN_TYPECODE).itemsize == 4


@unique
class Phase(Enum):
    """Where a log is in its life."""

    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"
    KEPT = "kept"


@unique
class AckLevel(IntEnum):
    """How far an acknowledged record has travelled; the numbers are those of the contract."""

    OS = 1
    DISK = 2


@dataclass(slots=True, kw_only=True)
class PageRow:
    """One row of a page table: a page, its page generation, committed slots and their CRCs.

    `crc` is set once the page is full, `slot_crcs` (one per committed slot) while it is partial.
    """

    page: int
    page_generation: int
    tokens: int
    crc: int | None = None
    slot_crcs: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantedPage:
    """A page that one writer may write, under the page generation of this grant."""

    page: int
    page_generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """An attached worker: its name, this run of it, and the slot whose lock byte tells whether it
    lives.
    """

    worker_id: str
    slot: int
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobEntry:
    """Log probability of one token; `top` are the alternatives, without their own `top`."""

    token_id: int
    logprob: float
    token_bytes: bytes = b""
    top: tuple[LogprobEntry, ...] = ()


@dataclass(slots=True, kw_only=True)
class LogState:
    """One log. Tokens are positions 0.. in order; `rows[i]` holds positions i x block_tokens...

    `committed` counts positions whose KV is there; `granted` are the pages its writer may write and
    has not committed, in order of use; `writer` is None when nobody may write. `fence_tail` is true
    when the last row's page may still be written by the current writer (it is partial).
    """

    log_id: bytes
    tenant: str
    scope: Scope
    tokens: array[int]
    prompt_tokens: int
    numeric_class: str
    numeric_class_id: int
    sampling: SamplingParameters
    generation: int
    phase: Phase = Phase.PREFILL
    writer: Writer | None = None
    rows: list[PageRow] = field(default_factory=list)
    granted: dict[int, int] = field(default_factory=dict)
    committed: int = 0
    cached_tokens: int = 0
    base_numeric_class: str = ""
    base_class_id: int = 0
    finish_reason: str | None = None
    logprobs: list[LogprobEntry] = field(default_factory=list)
    chunks: list[list[ChunkPage]] = field(default_factory=list)
    chunk_list_digest: bytes | None = None
    is_cacheable: bool = True
    drop_at_end: bool = False
    ack_level: AckLevel = AckLevel.OS
    ttl_s: float = 3600.0
    last_used_s: float = 0.0
    expires_wall_s: float | None = None
    block_keys: list[bytes] = field(default_factory=list)
    indexed_blocks: int = 0
    request_id: str = ""
    body_hash: bytes = bytes(32)
    label_digest: bytes = bytes(16)
    opened_wall_s: float = 0.0
    lsn: int = 0

    @property
    def position(self) -> int:
        """Tokens in the log."""
        return len(self.tokens)

    @property
    def is_sealed(self) -> bool:
        """Prefill is complete."""
        return self.phase is not Phase.PREFILL

    @property
    def is_open(self) -> bool:
        """A writer could still write to it."""
        return self.phase in (Phase.PREFILL, Phase.DECODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAnswer:
    """What Open found and reserved."""

    generation: int
    cached_tokens: int
    granted: tuple[GrantedPage, ...]
    prefix_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeAnswer:
    """What Take gave."""

    generation: int
    position: int
    granted: tuple[GrantedPage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroPages:
    """Work for the arena: these pages were released; zero them before they are granted again."""

    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSource:
    """Committed slots [first_slot, first_slot + tokens) of a page, with what they must hash to.

    `row` is a copy of the source's row when the work was ordered.
    """

    row: PageRow
    first_slot: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FillPage:
    """Work for the arena: copy the sources' slots to the same slots of a fresh page, verified.

    The sources cover slots 0.. without a gap. `target` is the new log's row; its `crc` (full page)
    or `slot_crcs` are filled in by who does the work, before anybody is told of the page.
    """

    log_id: bytes
    generation: int
    block_index: int
    target: PageRow
    sources: tuple[SlotSource, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPages:
    """Work for the arena: compare full pages that a new writer adopts with their records.

    `blocks`: (block index, row). Who waits for these pages waits for the comparison.
    """

    log_id: bytes
    generation: int
    blocks: tuple[tuple[int, PageRow], ...]


PageWork = ZeroPages | FillPage | CheckPages
