"""The data of the kvstore's cores: logs, page table rows, page work, answers.

Owns shapes only; the rules stand in `home`, `history`, `keeper` and `store`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum, unique

from baton.kv.blocks import Scope
from baton.kv.digests import ChunkPage
from baton.sampling_parameters import SamplingParameters
from services.kvstore.nodes import Node
from services.kvstore.rows import PageArray
from services.kvstore.rows import PageRow as PageRow
from services.kvstore.rows import Rows as Rows
from services.kvstore.tokens import TOKEN_TYPECODE as TOKEN_TYPECODE
from services.kvstore.tokens import Tokens as Tokens
from services.kvstore.tokens import token_array as token_array


@unique
class Phase(Enum):
    """Where a log is in its life."""

    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"
    KEPT = "kept"
    MOVED = "moved"


@unique
class AckLevel(IntEnum):
    """How far an acknowledged record has travelled; the numbers are those of the contract."""

    OS = 1
    DISK = 2


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
    when the last row's page may still be written by the current writer (it is partial). `moved_to`
    is the home a log in phase MOVED went to; here it is only read, until its pages are dropped.
    `cold[i]` is a copy of block i on the NVMe tier: `page` is a slot there.
    """

    log_id: bytes
    tenant: str
    scope: Scope
    tokens: Tokens
    prompt_tokens: int
    numeric_class: str
    numeric_class_id: int
    sampling: SamplingParameters
    generation: int
    phase: Phase = Phase.PREFILL
    writer: Writer | None = None
    rows: Rows = field(default_factory=Rows)
    cold: Rows = field(default_factory=Rows)
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
    # Its way through the tree: a node `node_depth` blocks deep, of which the first `node_blocks`
    # are this log's. `foreign_blocks` of these were published by another tenant.
    node: Node | None = field(default=None, compare=False, repr=False)
    node_depth: int = 0
    node_blocks: int = 0
    foreign_blocks: int = 0
    indexed_blocks: int = 0
    request_id: str = ""
    body_hash: bytes = bytes(32)
    label_digest: bytes = bytes(16)
    # Of a log that was read back; None: this store's own.
    kv_digest: bytes | None = None
    tokenizer_hash: bytes | None = None
    opened_wall_s: float = 0.0
    lsn: int = 0
    moved_to: str | None = None
    # Where it was forked off, for people who look; a record of it goes with compaction.
    parent_id: bytes | None = field(default=None, compare=False)
    parent_position: int = field(default=0, compare=False)

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

    @property
    def is_copied(self) -> bool:
        """All of its KV stands on the NVMe tier too: its host pages may go, and nothing is lost."""
        return 0 < self.committed <= self.cold.tokens


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

    pages: Sequence[int]


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

    `rows` are the log's first blocks, `indexes` those of them to compare; None: all. Who waits for
    these pages waits for the comparison.
    """

    log_id: bytes
    generation: int
    rows: Rows
    indexes: tuple[int, ...] | None = None

    def blocks(self) -> Iterator[tuple[int, PageRow]]:
        """(Block index, row) of each page to compare."""
        if self.indexes is None:
            return iter(enumerate(self.rows))
        return ((index, self.rows[index]) for index in self.indexes)

    def pages(self) -> PageArray:
        """The pages to compare."""
        pages = self.rows.pages()
        return pages if self.indexes is None else pages[list(self.indexes)]


PageWork = ZeroPages | FillPage | CheckPages
