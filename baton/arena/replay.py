"""A log as its reader sees it: the pure fold of ReplayLog's pieces into one `LogView`.

Owns the view and its consistency. Never does I/O: the client hands over the pieces.

Invariants of a view: tokens cover every position from 0; rows cover exactly the committed
positions, and only the last row may be partial; committed never exceeds the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baton.engine.sampling import TokenLogprob
from baton.errors import Reason, ServiceError
from baton.sampling_parameters import SamplingParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLog:
    """A log this worker writes, and the generation it writes at."""

    log_id: bytes
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantedPage:
    """A page this log's writer may write, under the page generation it was granted with."""

    page: int
    page_generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRow:
    """One row of a page table: `tokens` committed slots of arena page `page`.

    `crc32c` is the page CRC of a full page; `slot_crcs` are those of a partial page's slots.
    """

    page: int
    page_generation: int
    tokens: int
    crc32c: int | None = None
    slot_crcs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedLogprob:
    """The log probability a token was logged with, and its alternatives."""

    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LogHead:
    """Where a log stands. `position`: tokens in it; `committed_position`: positions with KV."""

    log_id: bytes
    generation: int
    position: int
    prompt_tokens: int
    committed_position: int
    cached_tokens: int
    is_sealed: bool
    sampling: SamplingParameters
    finish_reason: str | None = None
    granted_pages: tuple[GrantedPage, ...] = ()
    logprobs: tuple[LoggedLogprob, ...] = ()
    writer_worker_id: str | None = None
    base_numeric_class: str | None = None

    @property
    def held(self) -> HeldLog:
        """The log at the generation it was replayed at."""
        return HeldLog(log_id=self.log_id, generation=self.generation)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRun:
    """Consecutive token ids from `first_position` on."""

    first_position: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRun:
    """Consecutive rows of the page table from `first_index` on."""

    first_index: int
    rows: tuple[PageRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayEnd:
    """The last piece: nothing was left out."""

    lsn: int


ReplayPiece = LogHead | TokenRun | PageRun | ReplayEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class LogView:
    """A whole log: its head, every token id, every row of its page table."""

    head: LogHead
    token_ids: tuple[int, ...]
    rows: tuple[PageRow, ...]
    lsn: int

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt's token ids."""
        return self.token_ids[: self.head.prompt_tokens]

    @property
    def output_ids(self) -> tuple[int, ...]:
        """The output's token ids so far."""
        return self.token_ids[self.head.prompt_tokens :]


def fold_replay(pieces: Iterable[ReplayPiece], block_tokens: int) -> LogView:
    """The view that the pieces of one replay from position 0 make.

    Raises ServiceError LOG_CORRUPT naming what is missing or does not fit: such a view would be
    continued wrongly, so nothing is built from it.
    """
    head: LogHead | None = None
    end: ReplayEnd | None = None
    token_ids: list[int] = []
    rows: list[PageRow] = []
    for piece in pieces:
        if end is not None:
            raise _corrupt("a piece after the end of the replay")
        match piece:
            case LogHead():
                if head is not None:
                    raise _corrupt("a second head")
                head = piece
            case TokenRun():
                _require_next("tokens", piece.first_position, len(token_ids))
                token_ids.extend(piece.token_ids)
            case PageRun():
                _require_next("page rows", piece.first_index, len(rows))
                rows.extend(piece.rows)
            case ReplayEnd():
                end = piece
    if head is None or end is None:
        raise _corrupt("the replay broke off: " + ("no head" if head is None else "no end"))
    view = LogView(head=head, token_ids=tuple(token_ids), rows=tuple(rows), lsn=end.lsn)
    _check(view, block_tokens)
    return view


def _check(view: LogView, block_tokens: int) -> None:
    head = view.head
    if len(view.token_ids) != head.position:
        raise _corrupt(f"{len(view.token_ids)} tokens of {head.position}")
    if not 1 <= head.prompt_tokens <= head.position:
        raise _corrupt(f"a prompt of {head.prompt_tokens} tokens in {head.position}")
    if head.committed_position > head.position:
        raise _corrupt(f"KV for {head.committed_position} of {head.position} tokens")
    if any(row.tokens != block_tokens for row in view.rows[:-1]):
        raise _corrupt("a partial page before the last one")
    if view.rows and not 1 <= view.rows[-1].tokens <= block_tokens:
        raise _corrupt(f"a last page of {view.rows[-1].tokens} tokens")
    covered = sum(row.tokens for row in view.rows)
    if covered != head.committed_position:
        raise _corrupt(f"pages for {covered} of {head.committed_position} committed positions")


def _require_next(what: str, first: int, expected: int) -> None:
    if first != expected:
        raise _corrupt(f"{what} continue at {first} instead of {expected}")


def _corrupt(what: str) -> ServiceError:
    return ServiceError(
        Reason.LOG_CORRUPT,
        f"the replayed log does not fit together: {what}; take it again or recompute it",
        metadata={"what": what},
    )
