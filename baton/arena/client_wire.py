"""The kvstore's messages that a worker uses, proto <-> dataclass.

Owns the translation only. A message that makes no sense is refused naming the field.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import kvstore_pb2
from baton.arena.append import AppendEntry, AppendOutcome
from baton.arena.mapping import ArenaShape
from baton.arena.replay import (
    GrantedPage,
    LoggedLogprob,
    LogHead,
    PageRow,
    PageRun,
    ReplayEnd,
    ReplayPiece,
    TokenRun,
)
from baton.engine.sampling import SampledToken, TokenLogprob
from baton.errors import Reason, ServiceError
from baton.wire.errors import error_from_proto
from baton.wire.finish import finish_from_proto, finish_to_proto
from baton.wire.label import geometry_from_proto
from baton.wire.sampling import sampling_from_proto


def arena_from_proto(message: kvstore_pb2.ArenaInfo) -> ArenaShape:
    """The shape of an arena."""
    return ArenaShape(
        arena_id=message.arena_id,
        page_count=message.page_count,
        slot_bytes=message.slot_bytes,
        page_bytes=message.page_bytes,
        data_offset=message.data_offset,
        geometry=geometry_from_proto(message.geometry),
    )


def grants_from_proto(messages: Iterable[kvstore_pb2.GrantedPage]) -> tuple[GrantedPage, ...]:
    """Granted pages."""
    return tuple(GrantedPage(page=m.page, page_generation=m.page_generation) for m in messages)


def row_to_proto(row: PageRow) -> common_pb2.PageEntry:
    """One row of a commit."""
    return common_pb2.PageEntry(
        page=row.page,
        page_generation=row.page_generation,
        tokens=row.tokens,
        crc32c=row.crc32c or 0,
        slot_crc32c=row.slot_crcs,
    )


def logprob_to_proto(sampled: SampledToken) -> common_pb2.TokenLogprob | None:
    """What the log keeps of a token's log probability; None when the request asked for none."""
    if sampled.logprob is None:
        return None
    return common_pb2.TokenLogprob(
        token_id=sampled.token_id,
        logprob=sampled.logprob,
        top=[
            common_pb2.TokenLogprob(token_id=item.token_id, logprob=item.logprob)
            for item in sampled.top_logprobs
        ],
    )


def piece_from_proto(message: kvstore_pb2.ReplayLogResponse, block_tokens: int) -> ReplayPiece:
    """One piece of a replay."""
    match message.WhichOneof("content"):
        case "head":
            return head_from_proto(message.head)
        case "tokens":
            return TokenRun(
                first_position=message.tokens.first_position,
                token_ids=tuple(message.tokens.token_ids),
            )
        case "pages":
            rows = tuple(_row_from_proto(entry, block_tokens) for entry in message.pages.pages)
            return PageRun(first_index=message.pages.first_index, rows=rows)
        case "end":
            return ReplayEnd(lsn=message.end.lsn)
    raise ServiceError(Reason.LOG_CORRUPT, "a piece of the replay holds nothing this version reads")


def head_from_proto(message: kvstore_pb2.LogHead) -> LogHead:
    """Where a log stands."""
    return LogHead(
        log_id=message.log_id,
        generation=message.generation,
        position=message.position,
        prompt_tokens=message.prompt_tokens,
        committed_position=message.committed_position,
        cached_tokens=message.cached_tokens,
        is_sealed=message.sealed,
        finish_reason=finish_from_proto(message.finish_reason),
        sampling=sampling_from_proto(message.sampling),
        granted_pages=grants_from_proto(message.granted_pages),
        logprobs=tuple(_logprob_from_proto(item) for item in message.logprobs),
        writer_worker_id=message.writer_worker_id or None,
        base_numeric_class=message.base_numeric_class or None,
    )


def _row_from_proto(entry: common_pb2.PageEntry, block_tokens: int) -> PageRow:
    return PageRow(
        page=entry.page,
        page_generation=entry.page_generation,
        tokens=entry.tokens,
        crc32c=entry.crc32c if entry.tokens == block_tokens else None,
        slot_crcs=tuple(entry.slot_crc32c),
    )


def _logprob_from_proto(message: common_pb2.TokenLogprob) -> LoggedLogprob:
    return LoggedLogprob(
        logprob=message.logprob,
        top=tuple(
            TokenLogprob(token_id=item.token_id, logprob=item.logprob) for item in message.top
        ),
    )


def entry_to_proto(entry: AppendEntry) -> kvstore_pb2.AppendEntry:
    """One token of one log."""
    message = kvstore_pb2.AppendEntry(
        log_id=entry.log_id,
        generation=entry.generation,
        position=entry.position,
        token_id=entry.sampled.token_id,
        page=entry.page.page,
        page_generation=entry.page.page_generation,
        slot_crc32c=entry.checksum.slot_crc32c,
        page_crc32c=entry.checksum.page_crc32c,
        logprob=logprob_to_proto(entry.sampled),
        finish_reason=finish_to_proto(entry.finish_reason),
        pages_wanted=entry.pages_wanted,
    )
    return message


def outcome_from_proto(message: kvstore_pb2.AppendOutcome) -> AppendOutcome:
    """The fate of one entry."""
    error = error_from_proto(message.error) if message.HasField("error") else None
    return AppendOutcome(error=error, pages=grants_from_proto(message.pages))
