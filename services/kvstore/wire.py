"""The kvstore's messages <-> its cores' data.

Owns the translation and the checks of form (sizes of ids, missing fields). Never decides anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from google.protobuf.duration_pb2 import Duration

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import kvstore_pb2
from baton.ids import LOG_ID_BYTES
from baton.kv.blocks import Scope
from baton.kv.manifest import Manifest, Segment
from baton.wire.durations import duration_from_proto, timestamp_to_proto
from baton.wire.finish import finish_from_proto, finish_to_proto
from baton.wire.label import geometry_to_proto
from baton.wire.sampling import sampling_to_proto
from baton.wire.segments import manifest_from_proto, segment_to_proto
from services.kvstore.arena import DATA_OFFSET, Arena
from services.kvstore.core import Limits, invalid
from services.kvstore.log.state import Parent
from services.kvstore.prefixes import Prefix
from services.kvstore.state import AckLevel, GrantedPage, LogprobEntry, LogState, PageRow
from services.kvstore.tiers.nvme_tier import NvmeTier
from services.kvstore.tiers.owners import host_tokens
from services.kvstore.writes import AppendItem

REPLAY_TOKENS_MAX: Final = 16_384
REPLAY_ROWS_MAX: Final = 2_048
TOP_LOGPROBS_MAX: Final = 20
REQUEST_ID_CHARS_MAX: Final = 256


def require_log_id(log_id: bytes, field: str = "log_id") -> bytes:
    """The id, if it has 16 bytes."""
    if len(log_id) != LOG_ID_BYTES:
        raise invalid(field, f"must be {LOG_ID_BYTES} bytes")
    return log_id


def require_request_id(request_id: str) -> str:
    """The id, if it is there and not too long."""
    if not 1 <= len(request_id) <= REQUEST_ID_CHARS_MAX:
        raise invalid("request_id", f"must have 1 to {REQUEST_ID_CHARS_MAX} characters")
    return request_id


def seconds_of(message: Duration, field: str) -> float:
    """A duration that nobody checked yet: seconds, if it is not negative."""
    seconds = duration_from_proto(message)
    if seconds < 0.0:
        raise invalid(field, "must not be negative")
    return seconds


def scope_of(tenant: str, scope: str, cache_salt: str) -> Scope:
    """A verified scope, narrowed by the caller's salt."""
    return Scope(tenant=tenant, team=scope or None).narrowed(cache_salt or None)


def ack_level_of(value: int) -> AckLevel:
    """The level asked for; the store's default is `os`."""
    if value == common_pb2.ACK_LEVEL_DISK:
        return AckLevel.DISK
    return AckLevel.OS


def ack_level_to_proto(level: AckLevel) -> common_pb2.AckLevel.ValueType:
    """The level as the enum."""
    return common_pb2.AckLevel.ValueType(int(level))


def base_of(request: kvstore_pb2.OpenRequest) -> Parent | Manifest | None:
    """What the history starts from."""
    match request.WhichOneof("base"):
        case "parent":
            return parent_of(request.parent)
        case "manifest":
            return manifest_from_proto(request.manifest)
    return None


def parent_of(position: common_pb2.LogPosition) -> Parent:
    """A log position as a parent."""
    return Parent(
        log_id=require_log_id(position.log_id, "parent.log_id"),
        generation=position.generation,
        position=position.position,
    )


def row_of(entry: common_pb2.PageEntry, block_tokens: int) -> PageRow:
    """One row of a commit: the page CRC counts when the page is full, slot CRCs when not."""
    is_full = entry.tokens == block_tokens
    return PageRow(
        page=entry.page,
        page_generation=entry.page_generation,
        tokens=entry.tokens,
        crc=entry.crc32c if is_full else None,
        slot_crcs=[] if is_full else list(entry.slot_crc32c),
    )


def moved_row_of(entry: common_pb2.PageEntry, block_tokens: int) -> PageRow:
    """One row of a moving log: a cut row of a full page has its page's CRC and no slot CRCs."""
    is_whole = not entry.slot_crc32c
    if not 1 <= entry.tokens <= block_tokens:
        raise invalid("pages.tokens", f"must be 1 to {block_tokens}")
    return PageRow(
        page=entry.page,
        page_generation=entry.page_generation,
        tokens=entry.tokens,
        crc=entry.crc32c if is_whole else None,
        slot_crcs=list(entry.slot_crc32c),
    )


def row_to_proto(row: PageRow) -> common_pb2.PageEntry:
    """One row of a replay."""
    return common_pb2.PageEntry(
        page=row.page,
        page_generation=row.page_generation,
        tokens=row.tokens,
        crc32c=row.crc or 0,
        slot_crc32c=row.slot_crcs,
    )


def logprob_of(message: common_pb2.TokenLogprob) -> LogprobEntry:
    """A token's log probability and its alternatives, which have none of their own."""
    if len(message.top) > TOP_LOGPROBS_MAX:
        raise invalid("logprob.top", f"at most {TOP_LOGPROBS_MAX}")
    return LogprobEntry(
        token_id=message.token_id,
        logprob=message.logprob,
        token_bytes=message.token_bytes,
        top=tuple(
            LogprobEntry(token_id=item.token_id, logprob=item.logprob, token_bytes=item.token_bytes)
            for item in message.top
        ),
    )


def logprob_to_proto(entry: LogprobEntry) -> common_pb2.TokenLogprob:
    """The same, back."""
    return common_pb2.TokenLogprob(
        token_id=entry.token_id,
        logprob=entry.logprob,
        token_bytes=entry.token_bytes,
        top=[logprob_to_proto(item) for item in entry.top],
    )


def append_item_of(entry: kvstore_pb2.AppendEntry) -> AppendItem:
    """One entry of a group commit."""
    return AppendItem(
        log_id=entry.log_id,
        generation=entry.generation,
        position=entry.position,
        token_id=entry.token_id,
        page=entry.page,
        page_generation=entry.page_generation,
        slot_crc=entry.slot_crc32c,
        page_crc=entry.page_crc32c if entry.HasField("page_crc32c") else None,
        logprob=logprob_of(entry.logprob) if entry.HasField("logprob") else None,
        finish_reason=finish_from_proto(entry.finish_reason) if entry.finish_reason else None,
    )


def grants_to_proto(pages: Iterable[GrantedPage]) -> list[kvstore_pb2.GrantedPage]:
    """Granted pages."""
    return [
        kvstore_pb2.GrantedPage(page=page.page, page_generation=page.page_generation)
        for page in pages
    ]


def head_to_proto(log: LogState) -> kvstore_pb2.LogHead:
    """Where a log stands."""
    return kvstore_pb2.LogHead(
        log_id=log.log_id,
        generation=log.generation,
        position=log.position,
        prompt_tokens=log.prompt_tokens,
        committed_position=log.committed,
        cached_tokens=log.cached_tokens,
        sealed=log.is_sealed,
        finish_reason=finish_to_proto(log.finish_reason),
        sampling=sampling_to_proto(log.sampling),
        granted_pages=[
            kvstore_pb2.GrantedPage(page=page, page_generation=page_generation)
            for page, page_generation in log.granted.items()
        ],
        logprobs=[logprob_to_proto(entry) for entry in log.logprobs],
        writer_worker_id="" if log.writer is None else log.writer.worker_id,
        base_numeric_class=log.base_numeric_class,
    )


def token_runs(tokens: Sequence[int], first: int) -> Iterator[kvstore_pb2.TokenRun]:
    """Token ids from `first` on, in pieces."""
    for start in range(first, len(tokens), REPLAY_TOKENS_MAX):
        yield kvstore_pb2.TokenRun(
            first_position=start, token_ids=tokens[start : start + REPLAY_TOKENS_MAX]
        )


def page_runs(rows: Sequence[PageRow]) -> Iterator[kvstore_pb2.PageRun]:
    """The page table, in pieces."""
    for start in range(0, len(rows), REPLAY_ROWS_MAX):
        part = rows[start : start + REPLAY_ROWS_MAX]
        yield kvstore_pb2.PageRun(first_index=start, pages=[row_to_proto(row) for row in part])


def replay_to_proto(
    log: LogState, from_position: int, newest_lsn: int
) -> Iterator[kvstore_pb2.ReplayLogResponse]:
    """A log as ReplayLog tells it, with tokens from a position on."""
    yield kvstore_pb2.ReplayLogResponse(head=head_to_proto(log))
    for run in token_runs(log.tokens, from_position):
        yield kvstore_pb2.ReplayLogResponse(tokens=run)
    for pages in page_runs(log.rows):
        yield kvstore_pb2.ReplayLogResponse(pages=pages)
    yield kvstore_pb2.ReplayLogResponse(end=kvstore_pb2.ReplayEnd(lsn=newest_lsn))


def arena_to_proto(arena: Arena) -> kvstore_pb2.ArenaInfo:
    """The arena's shape."""
    return kvstore_pb2.ArenaInfo(
        arena_id=arena.spec.arena_id,
        page_count=arena.page_count,
        slot_bytes=arena.slot_bytes,
        page_bytes=arena.page_bytes,
        data_offset=DATA_OFFSET,
        geometry=geometry_to_proto(arena.geometry),
    )


def nvme_to_proto(tier: NvmeTier | None) -> kvstore_pb2.NvmeInfo | None:
    """The NVMe tier's slots and rates; None where there is none."""
    if tier is None:
        return None
    counts = tier.slots.counts()
    return kvstore_pb2.NvmeInfo(
        slot_count=counts.total,
        slot_bytes=tier.file.slot_bytes,
        slots_free=counts.free,
        slots_writing=counts.granted,
        slots_held=counts.live + counts.shared,
        slots_retired=tier.slots.retired_count,
        is_direct=tier.file.is_direct,
        read_bytes_per_s=tier.queue.read_bytes_per_s or 0.0,
        write_bytes_per_s=tier.queue.write_bytes_per_s or 0.0,
    )


def prefix_to_proto(
    prefix: Prefix, limits: Limits, history_start: bytes
) -> kvstore_pb2.PublishedPrefix:
    """A published prefix with the segment to splice."""
    has_text = any(prefix.text_hash)
    segment = segment_to_proto(
        Segment(
            log_id=prefix.log_id,
            generation=prefix.generation,
            from_position=0,
            to_position=prefix.position,
            history_start=history_start,
            history_end=prefix.history_end,
            kv_digest=limits.kv_digest,
            tokenizer_hash=prefix.tokenizer_hash,
            block_tokens=limits.block_tokens,
            numeric_class_id=prefix.numeric_class_id,
            text_hash=prefix.text_hash if has_text else None,
            ids_hash=prefix.ids_hash if has_text else None,
        )
    )
    segment.prefix_id = prefix.prefix_id
    segment.token_ids.extend(prefix.token_ids)
    message = kvstore_pb2.PublishedPrefix(
        prefix_id=prefix.prefix_id,
        name=prefix.name,
        log=segment.log,
        segment=segment,
        tenants=prefix.tenants,
        owner_tenant=prefix.owner_tenant,
        text_bytes=prefix.text_bytes,
        template_digest=prefix.template_digest,
        create_time=timestamp_to_proto(prefix.create_wall_s),
        hits=prefix.hits,
        model=prefix.model,
        version=prefix.version,
        pinned=prefix.is_pinned,
        host_tokens=host_tokens(prefix, limits.block_tokens),
        nvme_tokens=prefix.cold.tokens,
    )
    if prefix.expire_wall_s is not None:
        message.expire_time.CopyFrom(timestamp_to_proto(prefix.expire_wall_s))
    return message
