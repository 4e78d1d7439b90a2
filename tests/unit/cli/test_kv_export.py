"""`baton kv export` of logs that take more than one blob, and longer than a capability lasts."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from baton.api.kvstore.v1 import kvstore_pb2, operators_pb2
from baton.cli import kv_files
from baton.kv.blob import BlobHeader, seal_header
from baton.kv.crc import ByteArray, crc32c
from baton.kv.digests import ids_bytes
from baton.kv.layout import KvDtype
from baton.wire.blob import descriptor_from_header

BLOCK = 8
BLOBS = 3
LOG_ID = bytes(16)


def blob_of(first: int) -> tuple[BlobHeader, list[ByteArray], bytes]:
    """One page from a position on: header, pages, token ids."""
    header = BlobHeader(
        tokenizer_hash=bytes(8),
        dtype=KvDtype.F32,
        layers=1,
        kv_heads=1,
        head_dim=4,
        head_dim_v=4,
        block_tokens=BLOCK,
        first_position=first,
        total_tokens=BLOCK,
        generation=3,
        model_digest=bytes(16),
        kv_digest=bytes(16),
        log_id=LOG_ID,
        numeric_class_id=1,
        layers_total=1,
        kv_heads_total=1,
    )
    ids = list(range(first, first + BLOCK))
    pages = [np.full(header.geometry.page_bytes, first, dtype=np.uint8)]
    return seal_header(header, pages, ids), pages, ids_bytes(ids)


class FakeStore:
    """Gives one page a blob, and notes what each was asked for with."""

    def __init__(self) -> None:
        self.minted = 0
        self.shown: list[str] = []
        self.operators = SimpleNamespace(InspectLog=self._inspect)
        self.data = SimpleNamespace(GetBlob=self._get)

    def operator(self) -> str:
        return "operator"

    def tenant(self, *_claims: object) -> str:
        self.minted += 1
        return f"tenant-{self.minted}"

    async def _inspect(self, _request: object) -> operators_pb2.InspectLogResponse:
        log = operators_pb2.LogSummary(committed_tokens=BLOBS * BLOCK)
        return operators_pb2.InspectLogResponse(log=log)

    async def _get(
        self, request: kvstore_pb2.GetBlobRequest, timeout: float
    ) -> AsyncIterator[kvstore_pb2.GetBlobResponse]:
        assert timeout > 0.0
        self.shown.append(request.capability)
        header, pages, ids = blob_of(request.from_position)
        descriptor = descriptor_from_header(header, [crc32c(page) for page in pages])
        yield kvstore_pb2.GetBlobResponse(descriptor=descriptor)
        yield kvstore_pb2.GetBlobResponse(chunk=pages[0].tobytes() + ids)


async def test_each_blob_is_asked_for_with_a_capability_of_its_own() -> None:
    """One for all would be over before the last: a log may have thousands of blobs."""
    fake, out = FakeStore(), io.BytesIO()
    store: Any = fake
    done = await kv_files._export(store, LOG_ID, "acme", out)
    assert (done["tokens"], done["blobs"]) == (BLOBS * BLOCK, BLOBS)
    assert fake.shown == ["tenant-1", "tenant-2", "tenant-3"]
