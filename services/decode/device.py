"""The decode worker's device memory: made at start, placed by the kvstore as long as it serves.

Owns which device it is, the stream of orders and its restarts, and asking for the logs this worker
writes: their full pages, which no step changes. Never computes: steps read and write the arena.
"""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from baton.arena.device import DevicePages
from baton.arena.device_orders import DeviceOrders, DeviceWorker
from baton.arena.device_standin import StandInPages
from baton.arena.device_wire import DeviceCall
from baton.errors import ServiceError, StartupError
from baton.kv.layout import KvGeometry
from baton.rpc.channel import Channel
from baton.worker.engine import WorkerParts
from services.decode.config import DecodeConfig, DeviceKind

ASK_INTERVAL_S: Final = 1.0
RETRY_PAUSE_S: Final = 1.0

_log = structlog.stdlib.get_logger("services.decode")


def open_device(config: DecodeConfig, geometry: KvGeometry) -> DevicePages:
    """The device memory that the settings speak of; StartupError where there is none."""
    slots = config.device_bytes // geometry.page_bytes
    if slots == 0:
        raise StartupError(
            f"device_bytes: {config.device_bytes} do not hold one page of {geometry.page_bytes}",
            hint="give --device-bytes at least that, or 0 for no device tier",
            exit_code=2,
        )
    if config.device is DeviceKind.STANDIN:
        return StandInPages(geometry, slots)
    # Only here: it needs a build of torch with CUDA.
    from baton.engine.device_cuda import CudaPages

    try:
        return CudaPages(geometry, slots)
    except (RuntimeError, AssertionError) as error:
        raise StartupError(
            f"device_bytes: a CUDA device does not give {slots} pages ({type(error).__name__})",
            hint="lower --device-bytes, or 0 for no device tier; --device standin is for tests",
        ) from error


class DeviceKeeper:
    """Follows the kvstore's orders, again and again, until the service stops."""

    def __init__(self, parts: WorkerParts, pages: DevicePages, channel: Channel) -> None:
        self._parts = parts
        self._pages = pages
        who = DeviceWorker(
            worker_id=parts.worker_id,
            incarnation=parts.identity.incarnation,
            capability=parts.identity.capability,
        )
        self._orders = DeviceOrders(pages, parts.arena, who, lambda: DeviceCall(channel))
        self._following: asyncio.Task[None] | None = None

    async def run(self, stopping: asyncio.Event) -> None:
        """One stream after the other; device memory is empty between them."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._ask(stopping))
                while not stopping.is_set():
                    self._following = group.create_task(self._follow())
                    await _any_of(self._following, stopping)
                    await self.stop_reading()
                    await _waited(stopping, RETRY_PAUSE_S)
        finally:
            self._orders.close()

    async def stop_reading(self) -> None:
        """Returns when nothing reads the arena any more; the next stream begins a moment later."""
        following = self._following
        if following is not None and not following.done():
            following.cancel()
            await asyncio.wait([following])

    async def _follow(self) -> None:
        try:
            # Left before the arena is unmapped: whoever unmaps it stops this first.
            with self._pages.lock_host(self._parts.arena.slots):
                await self._orders.follow()
        except ServiceError as error:
            _log.info("device_stream_ended", reason=error.reason.value)

    async def _ask(self, stopping: asyncio.Event) -> None:
        """Asks for what is written here, now and then, as long as there is a stream."""
        while not await _waited(stopping, ASK_INTERVAL_S):
            for log in self._parts.held.logs():
                if not self._orders.is_following.is_set():
                    break
                try:
                    await self._orders.place(log, with_written=False)
                except ServiceError as error:
                    _log.debug("log_not_placed", log_id=log.log_id.hex(), reason=error.reason.value)


async def _any_of(task: asyncio.Task[None], event: asyncio.Event) -> None:
    """Returns when the task is done or the event is set."""
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(event.wait())
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()


async def _waited(event: asyncio.Event, seconds: float) -> bool:
    """Whether the event is set within so many seconds."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
