"""A client that leaves while the server writes to it is no fault of the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import structlog

from baton.rpc.interceptor import CallLimits, ErrorInterceptor
from tests.unit.core.rpc_fixtures import Recorder


class LeftContext:
    """A call whose client has gone: every write fails, and so does the status."""

    def __init__(self, *, is_client_waiting: bool) -> None:
        self._is_client_waiting = is_client_waiting

    async def write(self, _message: bytes) -> None:
        """As grpc.aio does where a write meets the client's cancel on its way."""
        raise grpc.aio.InternalError('Failed "execute_batch"')

    async def abort(self, *_status: object, **_details: object) -> None:
        """Only a client that waits can be sent a status."""
        raise grpc.aio.AbortError() if self._is_client_waiting else grpc.aio.InternalError()

    def invocation_metadata(self) -> tuple[()]:
        """None."""
        return ()

    def time_remaining(self) -> None:
        """No deadline."""
        return


async def _wrapped(recorder: Recorder) -> Any:
    async def ticks(_request: bytes, _context: Any) -> AsyncIterator[bytes]:
        yield b"x"

    async def continuation(_details: Any) -> Any:
        return grpc.unary_stream_rpc_method_handler(ticks)

    interceptor = ErrorInterceptor(CallLimits(), recorder)
    details: Any = type("Details", (), {"method": "/s/Ticks"})()
    handler: Any = await interceptor.intercept_service(continuation, details)
    return handler.unary_stream


async def test_a_write_to_a_client_that_left_is_its_cancel() -> None:
    """Counted as CANCELLED, and no traceback for an operator to chase."""
    recorder = Recorder()
    call = await _wrapped(recorder)
    with structlog.testing.capture_logs() as logs, pytest.raises(asyncio.CancelledError):
        await call(b"", LeftContext(is_client_waiting=False))
    assert recorder.handled == [("/s/Ticks", grpc.StatusCode.CANCELLED)]
    assert logs == []


async def test_a_failed_write_to_a_client_that_waits_is_a_bug() -> None:
    """It is logged and answered as any other."""
    recorder = Recorder()
    call = await _wrapped(recorder)
    with structlog.testing.capture_logs() as logs, pytest.raises(grpc.aio.AbortError):
        await call(b"", LeftContext(is_client_waiting=True))
    assert recorder.handled == [("/s/Ticks", grpc.StatusCode.INTERNAL)]
    assert [entry["event"] for entry in logs] == ["call_failed_unexpectedly"]
