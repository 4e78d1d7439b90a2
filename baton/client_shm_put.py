"""One put in place: copied page by page, recorded while the next pages are copied.

Owns the order of its calls and the commits' content. Never opens and never cancels: who opened the
log does. Blocking.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import kvstore_pb2
from baton.arena.client_wire import piece_from_proto
from baton.arena.copying import scatter, slot_checksums
from baton.arena.mapping import MappedArena
from baton.arena.replay import fold_replay
from baton.kv.crc import ByteArray, as_bytes, slot_list_crc
from baton.kv.digests import ChunkPage, chunk_list_digest
from baton.kv.layout import copy_slots, page_crc, page_view
from baton.rpc.blocking import metadata, translated

CALL_TIMEOUT_S: Final = 10.0
COMMIT_PAGES: Final = 96
"""Pages of one commit: longer to copy than the store takes to record those before them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOrder:
    """What is put: `content` are the packed pages of `tokens` positions from 0 on."""

    log_id: bytes
    generation: int
    cached_tokens: int
    content: ByteArray
    tokens: int
    capability: str
    kv_digest: bytes


class ShmPut:
    """Fills an opened log. `granted` are the pages for what is not cached, in order."""

    def __init__(
        self,
        stub: Any,
        arena: MappedArena,
        order: PutOrder,
        granted: Sequence[kvstore_pb2.GrantedPage],
    ) -> None:
        self._stub = stub
        self._arena = arena
        self._geometry = arena.geometry
        self._bytes: ByteArray = np.frombuffer(arena.slots, dtype=np.uint8)
        self._order = order
        self._granted = granted
        self._used = 0
        self._position = order.cached_tokens
        self._chunks: list[list[ChunkPage]] = []
        self._recording: Any = None

    def run(self) -> int:
        """Writes, commits, seals and closes; returns the log's position. Raises as the store
        refuses.
        """
        order, block = self._order, self._geometry.block_tokens
        if self._position % block:
            # The rest of a block whose beginning is here already, in a page of this log's own.
            end = min(order.tokens, self._position - self._position % block + block)
            self._commit([self._entry(self._tail(), self._position, end)], end)
        while self._position < order.tokens:
            end = min(order.tokens, self._position + COMMIT_PAGES * block)
            self._commit(self._written(end), end)
        self._wait()
        digest = chunk_list_digest(order.kv_digest, self._chunks)
        sealed = self._call(
            self._stub.Seal,
            kvstore_pb2.SealRequest(
                log_id=order.log_id,
                generation=order.generation,
                chunk_list_digest=digest,
                capability=order.capability,
            ),
        )
        self._call(
            self._stub.Close,
            kvstore_pb2.CloseRequest(log_id=order.log_id, capability=order.capability),
        )
        return int(sealed.position)

    def _call(self, call: Callable[..., Any], request: Any) -> Any:
        with translated():
            return call(request, timeout=CALL_TIMEOUT_S, metadata=metadata())

    def _commit(self, entries: list[common_pb2.PageEntry], end: int) -> None:
        """Begins to record [position, end), once what is before it is recorded."""
        order, block, first = self._order, self._geometry.block_tokens, self._position
        self._wait()
        request = kvstore_pb2.CommitCheckpointRequest(
            log_id=order.log_id,
            generation=order.generation,
            from_position=first,
            to_position=end,
            pages=entries,
            capability=order.capability,
        )
        self._recording = self._stub.CommitCheckpoint.future(
            request, timeout=CALL_TIMEOUT_S, metadata=metadata()
        )
        start = first - first % block
        crcs = [entry.crc32c for entry in entries]
        if end % block:
            crcs[-1] = slot_list_crc(list(entries[-1].slot_crc32c))
        self._chunks.append(
            [
                ChunkPage(first_position=at, tokens=min(block, end - at), crc=crc)
                for at, crc in zip(range(start, end, block), crcs, strict=True)
            ]
        )
        self._position = end

    def _wait(self) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            with translated():
                recording.result()

    def _tail(self) -> kvstore_pb2.GrantedPage:
        """The page of the log's last committed block."""
        order, block = self._order, self._geometry.block_tokens
        request = kvstore_pb2.ReplayLogRequest(
            log_id=order.log_id, capability=order.capability, generation=order.generation
        )
        with translated():
            call = self._stub.ReplayLog(request, timeout=CALL_TIMEOUT_S, metadata=metadata())
            view = fold_replay((piece_from_proto(piece, block) for piece in call), block)
        last = view.rows[-1]
        return kvstore_pb2.GrantedPage(page=last.page, page_generation=last.page_generation)

    def _take(self, count: int) -> Sequence[kvstore_pb2.GrantedPage]:
        """The next granted pages."""
        taken = self._granted[self._used : self._used + count]
        self._used += count
        assert len(taken) == count, "the store granted fewer pages than the log needs"
        return taken

    def _written(self, end: int) -> list[common_pb2.PageEntry]:
        """Copies [position, end), which begins a block, into pages; a commit's entries."""
        geometry, first, block = self._geometry, self._position, self._geometry.block_tokens
        full = (end - first) // block
        start = first * geometry.token_bytes
        pages = self._take(full)
        offsets = np.array([page.page for page in pages], dtype=np.uint64)
        offsets *= self._arena.shape.slot_bytes
        source = self._order.content[start : start + full * geometry.page_bytes]
        crcs = scatter(self._bytes, offsets, source, geometry.page_bytes)
        entries = [
            common_pb2.PageEntry(
                page=page.page, page_generation=page.page_generation, tokens=block, crc32c=crc
            )
            for page, crc in zip(pages, crcs, strict=True)
        ]
        if first + full * block < end:
            entries.append(self._entry(self._take(1)[0], first + full * block, end))
        return entries

    def _entry(
        self, granted: kvstore_pb2.GrantedPage, first: int, end: int
    ) -> common_pb2.PageEntry:
        """Copies positions [first, end) of one block slot by slot; the entry of its page."""
        geometry, block = self._geometry, self._geometry.block_tokens
        slot = first % block
        start = first - slot
        packed = self._order.content[start * geometry.token_bytes :]
        packed_tokens = min(block, self._order.tokens - start)
        page = as_bytes(self._arena.page(granted.page))
        source, target = page_view(geometry, packed, packed_tokens), page_view(geometry, page)
        copy_slots(source, slot, target, slot, end - first)
        entry = common_pb2.PageEntry(
            page=granted.page, page_generation=granted.page_generation, tokens=end - start
        )
        if entry.tokens == block:
            entry.crc32c = page_crc(geometry, page)
        else:
            entry.slot_crc32c.extend(slot_checksums(geometry, page, 0, entry.tokens))
        return entry
