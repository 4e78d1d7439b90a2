"""`DeviceService` on gRPC: one stream of orders and reports for each worker with device memory.

Owns the stream and its messages. What stands where is decided in `tiers.device_memory`; what a
worker finds damaged is compared once more here before anything is given up for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
import structlog

from baton.api.common.v1 import common_pb2
from baton.api.kvstore.v1 import device_pb2, device_pb2_grpc
from baton.errors import Reason, ServiceError
from baton.kv.layout import page_crc, slot_crcs
from services.kvstore import wire
from services.kvstore.access import Access
from services.kvstore.core import invalid
from services.kvstore.distrust import Distrust
from services.kvstore.runtime import Runtime
from services.kvstore.state import PageRow
from services.kvstore.tiers.device import DeviceTier
from services.kvstore.tiers.device_memory import DeviceMemory
from services.kvstore.tiers.device_orders import (
    DeviceOrder,
    DeviceOutcome,
    Load,
    Placed,
    Reserve,
)

SERVICE_NAME: Final = "baton.api.kvstore.v1.DeviceService"
FOLLOW_METHOD: Final = f"/{SERVICE_NAME}/FollowOrders"
ORDERS_PER_MESSAGE_MAX: Final = 256

_OUTCOMES: Final = {
    device_pb2.DEVICE_OUTCOME_DONE: DeviceOutcome.DONE,
    device_pb2.DEVICE_OUTCOME_DAMAGED: DeviceOutcome.DAMAGED,
    device_pb2.DEVICE_OUTCOME_FAILED: DeviceOutcome.FAILED,
}
_Context = grpc.aio.ServicerContext[Any, Any]
_Reports = AsyncIterator[device_pb2.FollowOrdersRequest]

_log = structlog.stdlib.get_logger("services.kvstore")


class DeviceServicer(device_pb2_grpc.DeviceServiceServicer):
    """See the module."""

    def __init__(self, runtime: Runtime, access: Access, tier: DeviceTier) -> None:
        self._runtime = runtime
        self._access = access
        self._tier = tier
        self._distrust = Distrust(runtime.store)

    # A coroutine that writes to its context, which gRPC allows and the stub's type does not know.
    async def FollowOrders(  # type: ignore[override]
        self, request_iterator: _Reports, context: _Context
    ) -> None:
        """One worker's stream. What it leaves behind stands until the worker's next hello, or until
        the worker is gone: it may still be copying.
        """
        reports = aiter(request_iterator)
        worker_id, memory = self._hello(await anext(reports, None))
        news = asyncio.Event()
        memory.on_news = news.set
        try:
            async with asyncio.TaskGroup() as group:
                writing = group.create_task(self._write(memory, news, context))
                async for report in reports:
                    self._require_current(worker_id, memory)
                    self._take(memory, report)
                writing.cancel()
        except* ServiceError as failures:
            raise _first(failures) from None
        finally:
            memory.on_news = _nobody
            _log.info("device_stream_closed", worker_id=worker_id)

    def _hello(self, first: device_pb2.FollowOrdersRequest | None) -> tuple[str, DeviceMemory]:
        if first is None or first.WhichOneof("report") != "hello":
            raise invalid("hello", "is the first report of a stream")
        hello = first.hello
        self._access.worker(hello.capability)
        worker = self._runtime.workers.find(hello.worker_id)
        if worker.writer.incarnation != hello.incarnation:
            raise invalid("hello.incarnation", "another run of this worker is attached")
        page_bytes = self._runtime.arena.spec.geometry.page_bytes
        memory = self._tier.hello(worker.writer, hello.slots, hello.slot_bytes, page_bytes)
        self._runtime.order_work()
        _log.info("device_stream_opened", worker_id=hello.worker_id, slots=hello.slots)
        return hello.worker_id, memory

    def _require_current(self, worker_id: str, memory: DeviceMemory) -> None:
        if self._tier.find(worker_id) is not memory:
            raise ServiceError(
                Reason.LEASE_EXPIRED,
                "the worker attached anew, or began another stream; this one is over",
                field="hello.worker_id",
            )

    def _take(self, memory: DeviceMemory, report: device_pb2.FollowOrdersRequest) -> None:
        """One report of an open stream."""
        now_s = self._runtime.clock.monotonic_s()
        match report.WhichOneof("report"):
            case "want":
                want = report.want
                memory.want(
                    wire.require_log_id(want.log_id),
                    want.generation,
                    now_s,
                    with_written=want.written_pages,
                )
            case "done":
                outcome = _OUTCOMES.get(report.done.outcome)
                if outcome is None:
                    raise invalid("done.outcome", "is none that this kvstore knows")
                memory.done(report.done.order_id, outcome, now_s)
                self._judge()
            case _:
                raise invalid("report", "after hello a stream carries want and done only")
        self._runtime.order_work()

    def _judge(self) -> None:
        """Pages that a worker found damaged: if they are, nobody uses them any more."""
        runtime = self._runtime
        damaged = {row.page for row in self._tier.take_damaged() if self._is_damaged(row)}
        if damaged:
            _log.error("kv_damaged", pages=sorted(damaged), found_by="device")
            self._distrust.pages(damaged, runtime.now().wall_s)

    def _is_damaged(self, row: PageRow) -> bool:
        arena = self._runtime.arena
        if not self._runtime.core.pool.is_held(row.page, row.page_generation):
            return False
        geometry, page = arena.spec.geometry, arena.page(row.page)
        if row.crc is not None:
            return page_crc(geometry, page) != row.crc
        return list(slot_crcs(geometry, page, 0, row.tokens)) != row.slot_crcs

    async def _write(self, memory: DeviceMemory, news: asyncio.Event, context: _Context) -> None:
        """Sends orders as they come up, many in a message."""
        while True:
            news.clear()
            while memory.has_news:
                orders, placed = memory.take_orders(ORDERS_PER_MESSAGE_MAX)
                message = device_pb2.FollowOrdersResponse(
                    orders=[_order_to_proto(order) for order in orders],
                    placed=[_placed_to_proto(answer) for answer in placed],
                )
                await context.write(message)
            await news.wait()


def _order_to_proto(order: DeviceOrder) -> device_pb2.DeviceOrder:
    message = device_pb2.DeviceOrder(order_id=order.order_id, slot=order.slot)
    if isinstance(order, Load):
        message.load.CopyFrom(
            common_pb2.PageEntry(
                page=order.row.page,
                page_generation=order.row.page_generation,
                tokens=order.row.tokens,
                crc32c=order.row.crc or 0,
                slot_crc32c=order.row.slot_crcs,
            )
        )
        return message
    page = device_pb2.DevicePage(page=order.page, page_generation=order.page_generation)
    if isinstance(order, Reserve):
        message.reserve.CopyFrom(page)
    else:
        message.clear.CopyFrom(page)
    return message


def _placed_to_proto(answer: Placed) -> device_pb2.DevicePlaced:
    return device_pb2.DevicePlaced(
        log_id=answer.log_id,
        generation=answer.generation,
        pages=answer.pages,
        missing=answer.missing,
    )


def _first(failures: BaseExceptionGroup[ServiceError]) -> ServiceError:
    """The first refusal of a group, however deep it is."""
    failure: BaseException = failures
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    assert isinstance(failure, ServiceError)
    return failure


def _nobody() -> None:
    return
