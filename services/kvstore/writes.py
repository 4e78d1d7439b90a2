"""The writes of a log's current writer: CHECKPOINT, SEAL, APPEND.

Owns their rules. Pure: time is passed in, records go to the core's journal.

Invariants: the generation is checked first and a refused write changes nothing; an append is
accepted only at the next position, and the same token at the same position and generation again is
a no-op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import Reason, ServiceError
from baton.kv.crc import slot_list_crc
from baton.kv.digests import ChunkPage, chunk_list_digest
from baton.kv.layout import page_spans
from services.kvstore.core import Core, invalid, stale
from services.kvstore.home import Event, require_allowed
from services.kvstore.state import LogprobEntry, LogState, PageRow, Phase


@dataclass(slots=True, kw_only=True)
class AppendItem:
    """One token of one log, and the KV slot of the token before it.

    Not frozen: thousands are made a second, and freezing is half of what making one costs.
    """

    log_id: bytes
    generation: int
    position: int
    token_id: int
    page: int
    page_generation: int
    slot_crc: int
    page_crc: int | None = None
    logprob: LogprobEntry | None = None
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SealEnd:
    """What prefill sampled, if it did, and whether the answer ends with it."""

    token_id: int | None
    logprob: LogprobEntry | None = None
    finish_reason: str | None = None


class Writes:
    """The writes of one store's logs."""

    def __init__(self, core: Core) -> None:
        self._core = core

    # --- checkpoint and seal ----------------------------------------------------------------

    def checkpoint(
        self,
        log_id: bytes,
        generation: int,
        span: tuple[int, int],
        pages: Sequence[PageRow],
        now_s: float,
    ) -> int:
        """Records the KV of positions [span[0], span[1]); returns the committed position."""
        log = self._core.current(log_id, generation)
        require_allowed(log, Event.CHECKPOINT)
        first, end = span
        if self._is_committed_again(log, span, pages):
            return log.committed
        self._check_checkpoint(log, span, pages)
        core, block_tokens = self._core, self._core.block_tokens
        core.written_from(log, first)
        for index, given in enumerate(pages, start=first // block_tokens):
            if index == len(log.rows):
                core.pool.commit(given.page)
                del log.granted[given.page]
                log.rows.append(given)
            else:
                log.rows[index] = given
        log.committed = end
        if log.phase is Phase.PREFILL:
            log.chunks.append(chunk_of(pages, first, block_tokens))
        self._touch(log, now_s)
        core.journal.checkpointed(log, first, end, pages)
        return end

    def _is_committed_again(
        self, log: LogState, span: tuple[int, int], pages: Sequence[PageRow]
    ) -> bool:
        """A repeated call whose answer was lost."""
        first_row = span[0] // self._core.block_tokens
        return (
            span[0] < span[1] == log.committed
            and list(pages) == log.rows[first_row:]
            and bool(pages)
        )

    def _check_checkpoint(
        self, log: LogState, span: tuple[int, int], pages: Sequence[PageRow]
    ) -> None:
        first, end = span
        last = log.prompt_tokens if log.phase is Phase.PREFILL else log.position - 1
        if first != log.committed:
            raise invalid("from_position", f"must be {log.committed}, where KV ends now")
        if not first < end <= last:
            raise invalid("to_position", f"must be over {first} and at most {last}")
        block_tokens = self._core.block_tokens
        spans = list(page_spans(block_tokens, first, end - first))
        if len(pages) != len(spans):
            raise invalid("pages", f"the range touches {len(spans)} pages, {len(pages)} given")
        seen: set[int] = set()
        for place, given in zip(spans, pages, strict=True):
            tokens = place.first_slot + place.tokens
            field = f"pages[{place.block_index - spans[0].block_index}]"
            self._check_page(log, place.block_index, given, field)
            if given.page in seen:
                raise invalid(f"{field}.page", "is listed twice")
            seen.add(given.page)
            if given.tokens != tokens:
                raise invalid(f"{field}.tokens", f"must be {tokens}")
            if tokens < block_tokens and len(given.slot_crcs) != tokens:
                raise invalid(f"{field}.slot_crc32c", f"give one for each of {tokens} slots")

    def _check_page(self, log: LogState, block_index: int, given: PageRow, field: str) -> None:
        """The page of a row that exists must be that row's; of a new row, a granted one."""
        if block_index < len(log.rows):
            row = log.rows[block_index]
            if (given.page, given.page_generation) != (row.page, row.page_generation):
                raise invalid(f"{field}.page", f"this block's page is {row.page}")
            if given.slot_crcs and given.slot_crcs[: row.tokens] != row.slot_crcs:
                raise invalid(f"{field}.slot_crc32c", "a committed slot was written again")
        elif log.granted.get(given.page) != given.page_generation:
            raise invalid(f"{field}.page", "is not granted to this log's writer")

    def seal(
        self,
        log_id: bytes,
        generation: int,
        digest: bytes,
        end: SealEnd,
        now_s: float,
    ) -> int:
        """Ends prefill; returns the log's position. Repeating the same seal is harmless."""
        log = self._core.current(log_id, generation)
        if self._is_sealed_again(log, digest, end):
            return log.position
        require_allowed(log, Event.SEAL)
        if log.committed != log.prompt_tokens:
            raise invalid(
                "log_id", f"KV is committed to {log.committed} of {log.prompt_tokens} positions"
            )
        if chunk_list_digest(self._core.limits.kv_digest, log.chunks) != digest:
            raise ServiceError(
                Reason.CHECKSUM_MISMATCH,
                "chunk_list_digest is not that of the committed chunks; prefill again",
                field="chunk_list_digest",
            )
        self._check_token(end.token_id)
        log.chunk_list_digest = digest
        log.phase = Phase.DECODE
        if end.token_id is not None:
            log.tokens.append(end.token_id)
            if end.logprob is not None:
                log.logprobs.append(end.logprob)
        log.finish_reason = end.finish_reason
        self._core.journal.sealed(log, digest, end.token_id, end.logprob)
        log.chunks = []
        self._touch(log, now_s)
        if end.token_id is None or end.finish_reason is not None:
            self._finish(log)
        return log.position

    def _is_sealed_again(self, log: LogState, digest: bytes, end: SealEnd) -> bool:
        tokens = 0 if end.token_id is None else 1
        return (
            log.chunk_list_digest == digest
            and log.position == log.prompt_tokens + tokens
            and (end.token_id is None or log.tokens[-1] == end.token_id)
        )

    def _check_token(self, token_id: int | None) -> None:
        size = self._core.limits.vocabulary_size
        if token_id is not None and size is not None and token_id >= size:
            raise invalid("token_id", f"{token_id} is not in the vocabulary of {size} tokens")

    # --- append -----------------------------------------------------------------------------

    def append(self, item: AppendItem, worker_id: str, now_s: float) -> LogState:
        """One token; returns its log. A repeated item changes nothing."""
        log = self.writing_or_ended(item, worker_id)
        tokens = log.tokens
        if item.position != len(tokens) or log.phase is not Phase.DECODE:
            self._require_repeated(log, item)
            return log
        core, limits = self._core, self._core.limits
        row = self._slot_row(log, item, limits.block_tokens)
        size = limits.vocabulary_size
        if size is not None and item.token_id >= size:
            raise invalid("token_id", f"not in the vocabulary of {size} tokens")
        if log.cold.last is not None:
            core.written_from(log, log.committed)
        if row is None:
            core.pool.commit(item.page)
            del log.granted[item.page]
            row = PageRow(page=item.page, page_generation=item.page_generation, tokens=0)
            log.rows.append(row)
        row.tokens += 1
        if item.page_crc is not None and row.tokens == limits.block_tokens:
            row.crc = item.page_crc
            row.slot_crcs = []
        else:
            row.slot_crcs.append(item.slot_crc)
        log.committed += 1
        tokens.append(item.token_id)
        if item.logprob is not None:
            log.logprobs.append(item.logprob)
        log.finish_reason = item.finish_reason
        core.journal.appended(log, row, item.slot_crc, item.logprob)
        log.last_used_s = now_s
        core.leases.renew(item.log_id, now_s)
        if item.finish_reason is not None:
            self._finish(log)
        return log

    def writing_or_ended(self, item: AppendItem, worker_id: str) -> LogState:
        """The log at the item's generation; its writer may have just ended it by name."""
        log = self._core.logs.get(item.log_id)
        if log is None or log.generation != item.generation:
            log = self._core.current(item.log_id, item.generation)
        writer = log.writer
        if writer is None:
            if log.phase is Phase.ENDED:
                return log
        elif writer.worker_id == worker_id:
            return log
        self._core.stale_refused += 1
        raise stale(item.log_id, item.generation, log.generation)

    def _require_repeated(self, log: LogState, item: AppendItem) -> None:
        """An item that is not the next one is there already: the same token, the same end."""
        position, end = item.position, len(log.tokens)
        is_there = log.prompt_tokens <= position < end and log.tokens[position] == item.token_id
        if not is_there:
            require_allowed(log, Event.APPEND)
            raise invalid("position", f"must be {end}, the log's next position")
        if position == end - 1 and log.finish_reason != item.finish_reason:
            raise invalid("finish_reason", f"position {position} was appended with another one")

    def _slot_row(self, log: LogState, item: AppendItem, block_tokens: int) -> PageRow | None:
        """The row whose next slot the item names; None when a granted page begins a new row."""
        if log.committed != item.position - 1:
            raise invalid(
                "position", f"KV is committed to {log.committed}; checkpoint the rest first"
            )
        slot = log.committed % block_tokens
        if slot == block_tokens - 1 and item.page_crc is None:
            raise invalid("page_crc32c", "is missing: the slot is its page's last")
        if slot == 0:
            if log.granted.get(item.page) != item.page_generation:
                raise invalid("page", "is not granted to this log's writer")
            return None
        row = log.rows.last
        assert row is not None
        if row.page != item.page or row.page_generation != item.page_generation:
            raise invalid("page", f"position {item.position - 1} belongs into page {row.page}")
        return row

    def _finish(self, log: LogState) -> None:
        """The writer ended the log by name: it writes nothing more, what it had left is free."""
        core = self._core
        if log.granted:
            core.journal.released(log, list(log.granted))
        for page in log.granted:
            core.pool.give_back(page)
        log.granted = {}
        log.writer = None
        log.phase = Phase.ENDED
        core.leases.end(log.log_id)
        core.idle(log)
        core.drain_freed()

    def _touch(self, log: LogState, now_s: float) -> None:
        log.last_used_s = now_s
        if log.writer is not None:
            self._core.leases.renew(log.log_id, now_s)


def chunk_of(pages: Sequence[PageRow], first: int, block_tokens: int) -> list[ChunkPage]:
    """One commit's part of the chunk list that SEAL's digest covers."""
    start = first // block_tokens * block_tokens
    return [
        ChunkPage(
            first_position=start + index * block_tokens,
            tokens=row.tokens,
            crc=slot_list_crc(row.slot_crcs) if row.crc is None else row.crc,
        )
        for index, row in enumerate(pages)
    ]
