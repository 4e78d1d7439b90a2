"""The messages of streams that bring blobs: how long their senders may be silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import pytest

from baton.api.kvstore.v1 import operators_pb2
from baton.errors import Reason, ServiceError
from services.kvstore import blob_wire
from services.kvstore.import_rpc import _collect

WAIT_S = 10.0


async def test_silent_importer_gives_its_pages_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever deadline its call has: it holds pages, and one of two turns."""
    monkeypatch.setattr(blob_wire, "CHUNK_TIMEOUT_S", 0.01)

    async def requests() -> AsyncIterator[operators_pb2.ImportLogRequest]:
        yield operators_pb2.ImportLogRequest(chunk=b"abc")
        await asyncio.Event().wait()

    async with asyncio.timeout(WAIT_S):
        with pytest.raises(ServiceError) as caught:
            await _collect(requests(), 100)
    assert caught.value.reason is Reason.TRANSFER_TIMEOUT


async def test_receiver_that_takes_nothing_gives_its_place_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four of them would keep everybody else out, for as long as they like."""
    monkeypatch.setattr(blob_wire, "CHUNK_TIMEOUT_S", 0.01)
    is_open = True

    async def pieces() -> AsyncGenerator[blob_wire.GetPiece, None]:
        nonlocal is_open
        try:
            for _ in range(3):
                yield b"chunk"
        finally:
            is_open = False

    taken = 0

    async def hand_on() -> None:
        nonlocal taken
        async with aclosing(blob_wire.taken_in_time(pieces())) as offered:
            async for _ in offered:
                taken += 1
                if taken == 2:
                    await asyncio.Event().wait()

    async with asyncio.timeout(WAIT_S):
        with pytest.raises(asyncio.CancelledError):
            await hand_on()
    assert taken == 2
    assert not is_open


async def test_receiver_that_takes_all_gets_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not bothered later."""
    monkeypatch.setattr(blob_wire, "CHUNK_TIMEOUT_S", WAIT_S)

    async def pieces() -> AsyncGenerator[blob_wire.GetPiece, None]:
        for number in range(3):
            yield bytes([number])

    assert [piece async for piece in blob_wire.taken_in_time(pieces())] == [b"\0", b"\1", b"\2"]
