"""The payload of a blob that comes in, written straight into its pages while it comes.

Owns the place of every byte and the checksums: each page's CRC is taken while it is copied, and the
payload's follows from the pages'. Blocking: runs in the page thread. Only for blobs of the arena's
own shape; what must be converted is collected first (`blobs`). Nothing written here is believed
before `finish` has returned, and nobody but the transfer knows the pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from baton.arena.copying import checksum, copy_crc32c, slot_checksums
from baton.errors import Reason, ServiceError
from baton.kv.blob import BlobHeader, checksum_mismatch, invalid
from baton.kv.crc import ByteArray, combine_crc32c
from baton.kv.layout import unpack_slots
from services.kvstore.arena import Arena
from services.kvstore.state import PageRow


def page_damaged(index: int) -> ServiceError:
    """CHECKSUM_MISMATCH for a page of a blob."""
    return ServiceError(
        Reason.CHECKSUM_MISMATCH,
        f"blob page {index} does not match its CRC; send the blob again",
        field=f"pages[{index}].crc32c",
    )


class PayloadSink:
    """Takes a payload's bytes in order. `rows` are fresh, zeroed pages, one per page span of the
    blob, which begins at a block's first slot; `page_crcs` are those of its descriptor.
    """

    def __init__(
        self, arena: Arena, header: BlobHeader, rows: Sequence[PageRow], page_crcs: Sequence[int]
    ) -> None:
        assert header.geometry == arena.geometry, "what is converted is collected first"
        assert len(rows) == len(page_crcs), (len(rows), len(page_crcs))
        self._arena = arena
        self._header = header
        self._rows = rows
        self._page_crcs = page_crcs
        geometry = arena.geometry
        self._kv_bytes = header.total_tokens * geometry.token_bytes
        tail_tokens = rows[-1].tokens % geometry.block_tokens
        # A partial last page is packed: its slots find their places once it is whole.
        self._tail: ByteArray = np.empty(tail_tokens * geometry.token_bytes, dtype=np.uint8)
        self._ids: ByteArray = np.empty(header.payload_bytes - self._kv_bytes, dtype=np.uint8)
        self._page_crc = 0
        self._payload_crc = 0
        self.written_bytes = 0

    def write(self, data: memoryview) -> None:
        """The next bytes. BLOB_INVALID when there are too many, CHECKSUM_MISMATCH for a page that
        is complete and not what its CRC says; then nothing more may be written.
        """
        if self.written_bytes + data.nbytes > self._header.payload_bytes:
            raise invalid(
                "payload", "bytes follow the blob's end", offset=self._header.payload_bytes
            )
        source = np.frombuffer(data, dtype=np.uint8)
        while source.size:
            source = source[self._put(source) :]

    def _put(self, source: ByteArray) -> int:
        """Writes what of `source` belongs to the current page, or to the ids; how much that was."""
        if self.written_bytes >= self._kv_bytes:
            at = self.written_bytes - self._kv_bytes
            self._ids[at : at + source.size] = source
            self.written_bytes += source.size
            return source.size
        index, at = divmod(self.written_bytes, self._arena.page_bytes)
        target = self._target(index)
        piece = source[: target.size - at]
        self._page_crc = copy_crc32c(target[at : at + piece.size], piece, self._page_crc)
        self.written_bytes += piece.size
        if at + piece.size == target.size:
            self._end_page(index, target)
        return piece.size

    def _target(self, index: int) -> ByteArray:
        row = self._rows[index]
        is_whole = row.tokens == self._arena.geometry.block_tokens
        return self._arena.page(row.page) if is_whole else self._tail

    def _end_page(self, index: int, target: ByteArray) -> None:
        crc, self._page_crc = self._page_crc, 0
        if crc != self._page_crcs[index]:
            raise page_damaged(index)
        self._payload_crc = combine_crc32c(self._payload_crc, crc, target.size)
        row, geometry = self._rows[index], self._arena.geometry
        if target is not self._tail:
            row.crc = crc
            return
        page = self._arena.page(row.page)
        unpack_slots(geometry, self._tail, page, 0, row.tokens)
        row.slot_crcs = list(slot_checksums(geometry, page, 0, row.tokens))

    def finish(self) -> list[int]:
        """All bytes are there: the token ids. BLOB_INVALID when some are missing,
        CHECKSUM_MISMATCH for the payload's CRC.
        """
        if self.written_bytes < self._header.payload_bytes:
            raise invalid(
                "payload",
                f"ends early, the header promises {self._header.payload_bytes}",
                offset=self.written_bytes,
            )
        crc = combine_crc32c(self._payload_crc, checksum(self._ids), self._ids.size)
        if crc != self._header.payload_crc:
            raise checksum_mismatch("payload_crc")
        found: list[int] = self._ids.view("<u4").tolist()
        return found
